"""How large the head of published models is: vocabulary V and hidden size D of each, and where both were published.

>>> from flce_ref.models import get, head_sizes
>>> round(head_sizes(get("gpt-oss-120b"), batch=4, seq=4096).ratio)
70
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A published model.

    `vocab_size` is the V of the head, padding rows included: what is multiplied, not what the tokenizer knows.
    The shape of the decoder below the head is given where one layer describes it (no mixture of experts, no latent
    attention), and is None elsewhere.
    """

    id: str  # what ``--model`` takes
    name: str
    vocab_size: int  # V
    hidden_size: int  # D
    source: str  # where the publisher states both
    num_layers: int | None = None
    intermediate_size: int | None = None  # of the gated MLP
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


class HeadSizes(NamedTuple):
    """What goes into the head and what comes out of it, in bytes."""

    hidden_bytes: int  # (B, S, D)
    logits_bytes: int  # (B, S, V)
    ratio: float  # logits over hidden, that is V / D


MODELS: tuple[Model, ...] = (
    Model(
        id="gpt-oss-120b",
        name="GPT-OSS 120B",
        vocab_size=201_088,
        hidden_size=2880,
        source="https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json",
    ),
    Model(
        id="gpt-oss-20b",
        name="GPT-OSS 20B",
        vocab_size=201_088,
        hidden_size=2880,
        source="https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json",
    ),
    Model(
        id="gravity-16b-a3b",
        name="Gravity-16B-A3B",
        vocab_size=151_552,
        hidden_size=2048,
        source="https://huggingface.co/trillionlabs/Gravity-16B-A3B-Base",
    ),
)


def get(id: str) -> Model:
    """Return the model of that id (case does not matter).

    Raises:
        ValueError: there is none; the message names the nearest ids and then all of them.
    """
    by_id = {model.id: model for model in MODELS}
    try:
        return by_id[id.lower()]
    except KeyError:
        near = difflib.get_close_matches(id.lower(), by_id, cutoff=0.5)
        suggestion = f" did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown model {id!r};{suggestion} known: {', '.join(by_id)}") from None


def head_sizes(model: Model, batch: int, seq: int, dtype: torch.dtype = torch.bfloat16) -> HeadSizes:
    """Return the bytes of the hidden states (B, S, D) and of the logits (B, S, V), and their ratio.

    Args:
        model: whose V and D.
        batch: B, at least 1.
        seq: S, at least 1.
        dtype: of both tensors, a floating one.

    Raises:
        TypeError: `dtype` is no `torch.dtype`.
        ValueError: `batch` or `seq` is below 1, or `dtype` is not a floating one.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating one such as torch.bfloat16, got {dtype}")
    element = batch * seq * dtype.itemsize
    return HeadSizes(element * model.hidden_size, element * model.vocab_size, model.vocab_size / model.hidden_size)
