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


@dataclass(frozen=True, slots=True)
class Model:
    """A published model.

    `vocab_size` counts the rows of the released head, padding included: what is multiplied, not what is tokenized.
    The last four fields describe the decoder's layers where each is one gated MLP and grouped-query attention of one
    shape; they are None for mixtures of experts, latent attention and layers of several shapes.
    """

    id: str  # what ``--model`` takes
    name: str
    vocab_size: int  # V
    hidden_size: int  # D
    source: str  # where the publisher states them
    num_layers: int
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


class HeadSizes(NamedTuple):
    """What goes into the head and what comes out of it."""

    hidden_bytes: int  # (B, S, D)
    logits_bytes: int  # (B, S, V)
    ratio: float  # logits_bytes / hidden_bytes, that is V / D


def _hf(repository: str, file: str = "/blob/main/config.json") -> str:
    """Return the address of a Hugging Face repository's configuration file, or with ``file=""`` of its model card."""
    return f"https://huggingface.co/{repository}{file}"


# fmt: off
# id, name, V, D, source, layers; then MLP width, heads, key-value heads, head dimension
MODELS: tuple[Model, ...] = (
    Model("gpt-oss-120b", "GPT-OSS 120B", 201_088, 2880, _hf("openai/gpt-oss-120b"), 36),
    Model("gpt-oss-20b", "GPT-OSS 20B", 201_088, 2880, _hf("openai/gpt-oss-20b"), 24),
    Model("gravity-16b-a3b", "Gravity-16B-A3B", 151_552, 2048, _hf("trillionlabs/Gravity-16B-A3B-Base", ""), 28),
    Model("llama-3-8b", "Llama 3 8B", 128_256, 4096, _hf("meta-llama/Meta-Llama-3-8B"), 32, 14_336, 32, 8, 128),
    Model("llama-3-70b", "Llama 3 70B", 128_256, 8192, _hf("meta-llama/Meta-Llama-3-70B"), 80, 28_672, 64, 8, 128),
    Model("llama-3.1-405b", "Llama 3.1 405B", 128_256, 16_384, _hf("meta-llama/Meta-Llama-3.1-405B"),
          126, 53_248, 128, 8, 128),
    Model("llama-4-scout", "Llama 4 Scout", 202_048, 5120, _hf("meta-llama/Llama-4-Scout-17B-16E"), 48),
    Model("qwen3-0.6b", "Qwen3 0.6B", 151_936, 1024, _hf("Qwen/Qwen3-0.6B"), 28, 3072, 16, 8, 128),
    Model("qwen3-8b", "Qwen3 8B", 151_936, 4096, _hf("Qwen/Qwen3-8B"), 36, 12_288, 32, 8, 128),
    Model("qwen3-32b", "Qwen3 32B", 151_936, 5120, _hf("Qwen/Qwen3-32B"), 64, 25_600, 64, 8, 128),
    Model("qwen3-235b-a22b", "Qwen3 235B-A22B", 151_936, 4096, _hf("Qwen/Qwen3-235B-A22B"), 94),
    Model("qwen3.5-35b-a3b", "Qwen3.5 35B-A3B", 248_320, 2048, _hf("Qwen/Qwen3.5-35B-A3B"), 40),
    Model("qwen3.5-397b-a17b", "Qwen3.5 397B-A17B", 248_320, 4096, _hf("Qwen/Qwen3.5-397B-A17B"), 60),
    Model("deepseek-v3", "DeepSeek-V3", 129_280, 7168, _hf("deepseek-ai/DeepSeek-V3"), 61),
    Model("deepseek-v4-flash", "DeepSeek-V4-Flash", 129_280, 4096, _hf("deepseek-ai/DeepSeek-V4-Flash"), 43),
    # Gemma 3's configuration files name no V: these are the rows of the released embedding, 64 more than tokens.
    Model("gemma-3-4b", "Gemma 3 4B", 262_208, 2560, _hf("google/gemma-3-4b-it", ""), 34, 10_240, 8, 4, 256),
    Model("gemma-3-27b", "Gemma 3 27B", 262_208, 5376, _hf("google/gemma-3-27b-it", ""), 62, 21_504, 32, 16, 128),
    Model("gemma-4-31b", "Gemma 4 31B", 262_144, 5376, _hf("google/gemma-4-31B-it"), 60),
    Model("glm-4.5", "GLM-4.5", 151_552, 5120, _hf("zai-org/GLM-4.5"), 92),
    Model("glm-5", "GLM-5", 154_880, 6144, _hf("zai-org/GLM-5"), 78),
    Model("kimi-k2", "Kimi K2", 163_840, 7168, _hf("moonshotai/Kimi-K2-Instruct"), 61),
    Model("mistral-nemo", "Mistral Nemo", 131_072, 5120, _hf("mistralai/Mistral-Nemo-Base-2407"),
          40, 14_336, 32, 8, 128),
    Model("mistral-small-3", "Mistral Small 3", 131_072, 5120, _hf("mistralai/Mistral-Small-24B-Base-2501"),
          40, 32_768, 32, 8, 128),
    Model("phi-4", "Phi-4", 100_352, 5120, _hf("microsoft/phi-4"), 40, 17_920, 40, 10, 128),
    Model("phi-4-mini", "Phi-4-mini", 200_064, 3072, _hf("microsoft/Phi-4-mini-instruct"), 32, 8192, 24, 8, 128),
    Model("olmo-2-7b", "OLMo 2 7B", 100_352, 4096, _hf("allenai/OLMo-2-1124-7B"), 32, 11_008, 32, 32, 128),
    Model("olmo-3.1-32b", "OLMo 3.1 32B", 100_278, 5120, _hf("allenai/Olmo-3.1-32B-Instruct"), 64, 27_648, 40, 8, 128),
    Model("smollm3-3b", "SmolLM3 3B", 128_256, 2048, _hf("HuggingFaceTB/SmolLM3-3B"), 36, 11_008, 16, 4, 128),
)
# fmt: on


def get(id: str) -> Model:
    """Return the model of that id (case does not matter).

    Raises:
        ValueError: there is none; the message names the nearest ids and then all of them.
    """
    by_id = {model.id: model for model in MODELS}
    key = str(id).lower()
    if key not in by_id:
        near = difflib.get_close_matches(key, by_id)
        suggestion = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown model {id!r}.{suggestion} Known: {', '.join(by_id)}")
    return by_id[key]


def head_sizes(model: Model, batch: int, seq: int, dtype: torch.dtype = torch.bfloat16) -> HeadSizes:
    """Return the bytes of the hidden states (B, S, D) and of the logits (B, S, V), and their ratio.

    Args:
        model: whose V and D.
        batch: B, at least 1.
        seq: S, at least 1.
        dtype: of both tensors, a floating-point one.

    Raises:
        TypeError: `batch` or `seq` is no integer, or `dtype` no `torch.dtype`.
        ValueError: `batch` or `seq` is below 1, or `dtype` is not a floating-point one.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point one such as torch.bfloat16, got {dtype}")
    per_column = batch * seq * dtype.itemsize
    return HeadSizes(
        hidden_bytes=per_column * model.hidden_size,
        logits_bytes=per_column * model.vocab_size,
        ratio=model.vocab_size / model.hidden_size,
    )
