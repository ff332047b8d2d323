"""A whole training step around the loss: a decoder of published shape, and how high the loss stands out of it.

The decoder has the layers of Llama 3 (arXiv:2407.21783): RMSNorm, causal attention with grouped queries and rotary
positions, a gated MLP. It is here to allocate what such a model allocates, on a laptop (:func:`simulate_whole_step`) or
on a GPU, so it is written in plain PyTorch operators that are the same on both; attention is FlashAttention-2 through
``F.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flce_ref.functional import linear_cross_entropy
from flce_ref.memory.labels import label
from flce_ref.memory.simulator import simulate
from flce_ref.memory.timeline import Allocation, Timeline
from flce_ref.models import Model

_LOGITS = ("logits", "log-probabilities", "dlogits")


# ---------------------------------------------------------------- the decoder


class Decoder(nn.Module):
    """``loss = decoder(tokens, target)``, both (1, N) int64; the loss by :func:`flce_ref.linear_cross_entropy`.

    Args:
        model: whose shape. Needs the four fields that describe the layers.
        tied: whether the head's weight is the embedding's, as it is in many small models.
        checkpointing: keep only each layer's output for backward and run the layer again there.
        schedule: of the loss.

    Raises:
        ValueError: the model's layers are not of one published shape.
    """

    def __init__(
        self, model: Model, *, tied: bool = False, checkpointing: bool = True, schedule: str = "fused"
    ) -> None:
        super().__init__()
        if model.head_dim is None:
            raise ValueError(f"model: {model.id} is not described layer by layer; take a dense one such as llama-3-8b")
        self.head_dim = model.head_dim
        self.checkpointing, self.schedule = checkpointing, schedule
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        loss = linear_cross_entropy(self.hidden_states(tokens), self.head.weight, target, schedule=self.schedule)
        assert isinstance(loss, Tensor)
        return loss

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """What the head is applied to, (B, N, D), of ``tokens`` (B, N)."""
        with label("output of a layer"):
            x = self.embedding(tokens)
        with label("rotary positions"):
            angles = rotary(tokens.shape[1], self.head_dim, x)
        for layer in self.layers:
            if self.checkpointing:  # without dropout there is no random state to bring back
                x = checkpoint(layer, x, angles, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, angles)
        with label("final norm"):
            return self.norm(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """(1, N, D) → (1, N, D): x + attention(norm(x)), then that + MLP(norm(that))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(model.hidden_size), RMSNorm(model.hidden_size)
        self.attention, self.mlp = Attention(model), GatedMLP(model)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        with label("attention"):
            x = x + self.attention(self.attention_norm(x), angles)
        with label("MLP"):
            y = self.mlp(self.mlp_norm(x))
        with label("output of a layer"):
            return x + y  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight over the last dimension, in float32, as the published model code computes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention, several query heads to one key-value head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.num_heads and model.num_kv_heads and model.head_dim
        self.head_dim = model.head_dim
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q = nn.Linear(model.hidden_size, queries, bias=False)
        self.k = nn.Linear(model.hidden_size, keys, bias=False)
        self.v = nn.Linear(model.hidden_size, keys, bias=False)
        self.out = nn.Linear(queries, model.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, *angles), rotated(k, *angles)  # (1, heads, N, head_dim)
        if not _fused_attention_has_groups(x.device):
            k, v = (t.repeat_interleave(self.q.out_features // self.k.out_features, dim=1) for t in (k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def _fused_attention_has_groups(device: torch.device) -> bool:
    """FlashAttention has grouped queries: on the CPU since PyTorch 2.9, on GPUs since Ampere, which it needs."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.__version__ >= "2.9"


def rotary(tokens: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (N, head_dim) of the rotary positions (arXiv:2104.09864), in the dtype of ``like``."""
    frequency = 500_000.0 ** (torch.arange(0, head_dim, 2, device=like.device) / -head_dim)
    angle = torch.arange(tokens, device=like.device)[:, None] * frequency.repeat(2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (1, heads, N, head_dim), each pair of its dimensions turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.intermediate_size
        self.gate = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- its step


def simulate_whole_step(
    model: Model,
    tokens: int,
    *,
    tied: bool = False,
    checkpointing: bool = True,
    schedule: str = "naive",
    dtype: torch.dtype = torch.bfloat16,
    title: str | None = None,
) -> Timeline:
    """Forward and backward of one sequence, beside the two moments that ``torch.optim.AdamW`` keeps of each parameter.

    Parameters and moments are of ``dtype``: what AdamW does to a model in bfloat16. Its own update, which comes after
    backward, is not part of the timeline. Parameters are one block there and moments another, because a step allocates
    and frees none of them. 128K tokens through the 32 layers of Llama 3 8B take a few seconds.

    Raises:
        ValueError: ``tokens`` is below 1, the model is not described layer by layer, or the schedule is unknown.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    with torch.device("meta"):
        decoder = Decoder(model, tied=tied, checkpointing=checkpointing, schedule=schedule).to(dtype)
        moments = [torch.empty_like(parameter) for parameter in decoder.parameters() for _ in range(2)]
        ids = torch.empty(1, tokens, dtype=torch.int64), torch.empty(1, tokens, dtype=torch.int64)

    def step(decoder: Decoder, tokens: Tensor, target: Tensor, moments: Sequence[Tensor]) -> Tensor:
        loss: Tensor = decoder(tokens, target)
        return loss

    names = ("model", "tokens", "target", "moments")
    timeline = simulate(step, decoder, *ids, moments, title=title or f"{model.name}, {schedule} loss", labels=names)
    return merge_given(timeline)


def merge_given(timeline: Timeline) -> Timeline:
    """The timeline with the blocks that it was given, and that it never frees, merged into one for each kind."""
    kinds: dict[tuple[str, str], list[Allocation]] = {}
    others = []
    for a in timeline.allocations:
        if a.start == 0 and a.end is None:
            kinds.setdefault(_kind(a), []).append(a)
        else:
            others.append(a)
    merged = []
    for (name, category), members in kinds.items():
        count = f" ({len(members)} tensors)" if len(members) > 1 else ""
        merged.append(Allocation(sum(a.bytes for a in members), 0, None, name + count, category))
    return replace(timeline, allocations=(*merged, *others))


def _kind(allocation: Allocation) -> tuple[str, str]:
    if allocation.category == "weight":
        return "parameters", "weight"
    return ("AdamW's moments" if allocation.label.startswith("moments") else allocation.label), allocation.category


# ---------------------------------------------------------------- the loss in it


@dataclass(frozen=True)
class Spike:
    """The loss among the rest of a step, in bytes alive, everything included.

    Attributes:
        start, end: the events between which the loss has buffers of its own.
        foot: just before the first of them.
        top: most within.
        elsewhere: most outside.
    """

    start: int
    end: int
    foot: int
    top: int
    elsewhere: int

    @property
    def height(self) -> int:
        return self.top - self.foot


def loss_spike(timeline: Timeline) -> Spike:
    """Where the loss stands in a step's timeline, by its buffers of logits, log-probabilities and their gradients.

    What the loss itself allocates before them in forward (the fused schedule's sums of dx and dw) is part of it.

    Raises:
        ValueError: nothing in the timeline is one of these.
    """
    backward = timeline.backward_start or timeline.n_events + 1
    wide = [a for a in timeline.allocations if a.category in _LOGITS and a.start > 0]
    if not wide:
        raise ValueError("timeline: no allocation is named as logits, log-probabilities or their gradient")
    sums = [a for a in timeline.allocations if a.category in ("dx", "dw") and 0 < a.start < backward]
    start = min(a.start for a in [*wide, *sums])
    end = max(timeline.n_events + 1 if a.end is None else a.end for a in wide)
    live = timeline.live_bytes()
    outside = np.concatenate([live[:start], live[end:]])
    return Spike(start, end, int(live[start - 1]), int(live[start:end].max()), int(outside.max()))
