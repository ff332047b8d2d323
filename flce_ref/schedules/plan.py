"""How many rows of logits exist at once, and in which dtype the weight's gradient is summed."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .vocab_parallel import Shard

# Below this many rows a product no longer fills a GPU, however small the hidden size is.
_SMALLEST_CHUNK = 1024
# Rows come in multiples of this: the tile height of the matrix products.
_TILE = 128


@dataclass(frozen=True)
class Plan:
    """What a chunked schedule needs to know beside its tensors.

    ``chunk_size`` is C, the rows of logits alive at once; ``accum_dtype`` that of the sum of ``dw``; ``kernel`` the row
    kernel's name; ``shard`` this rank's part of the vocabulary, None where it has all of it.
    """

    chunk_size: int
    accum_dtype: torch.dtype
    kernel: str
    shard: Shard | None = None


def default_chunk_size(n_tokens: int, hidden_size: int) -> int:
    """C for N tokens of hidden size D: about D rows, at least 1024, never more than N, and all chunks about equal.

    With C = D the (C, V) logits take as many bytes as the (V, D) gradient in the weight's dtype. That gradient is
    allocated in backward anyway, after the buffer is gone, next to a float32 sum that lives through both: so up to
    C = D the buffer does not raise the step peak, and larger chunks only buy fewer, larger products.
    """
    if n_tokens <= 1:
        return max(1, n_tokens)
    largest = max(_SMALLEST_CHUNK, hidden_size)
    equal = ceil(n_tokens / ceil(n_tokens / largest))
    return min(n_tokens, ceil(equal / _TILE) * _TILE)


def accumulation_dtype(accum_dtype: torch.dtype | None, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``dw`` is summed: the one asked for, else float32 or wider."""
    return accum_dtype or torch.promote_types(compute_dtype, torch.float32)
