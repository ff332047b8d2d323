"""How many rows or columns of logits exist at once, and in which dtype what every piece adds to is summed."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .vocab_parallel import Shard

# Below this many rows (or columns) a product no longer fills a GPU, however small the hidden size is.
_SMALLEST_CHUNK = 1024
# They come in multiples of this: the tile height of the matrix products.
_TILE = 128


@dataclass(frozen=True)
class Plan:
    """What a schedule that works in pieces needs to know beside its tensors.

    ``chunk_size`` is C, the rows of logits alive at once, or T, the columns; ``accum_dtype`` that of the sum over
    pieces: of ``dw`` over chunks of tokens, of ``dx`` over tiles of the vocabulary; ``kernel`` names what works
    out row losses and gradients; ``shard`` is this rank's part of the vocabulary, None where it has all; ``filter_eps``
    the probability below which the gradient of a tile is left out, None where none is.
    """

    chunk_size: int
    accum_dtype: torch.dtype
    kernel: str
    shard: Shard | None = None
    filter_eps: float | None = None


def piece_size(schedule: str, asked: int | None, n_tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Rows of a chunk or, under ``vocab_tiled``, columns of a tile: what was asked for, at most all, or the default."""
    if schedule == "vocab_tiled":
        return default_tile_width(n_tokens, vocab_size, hidden_size) if asked is None else min(asked, vocab_size)
    return default_chunk_size(n_tokens, hidden_size) if asked is None else min(asked, max(n_tokens, 1))


def default_chunk_size(n_tokens: int, hidden_size: int) -> int:
    """C for N tokens of hidden size D: about D rows, at least 1024, never more than N, and all chunks about equal.

    With C = D the (C, V) logits take as many bytes as the (V, D) gradient in the weight's dtype. That gradient is
    allocated in backward anyway, after the buffer is gone, next to a float32 sum that lives through both: so up to
    C = D the buffer does not raise the step peak, and larger chunks only buy fewer, larger products.
    """
    return _equal_pieces(n_tokens, max(_SMALLEST_CHUNK, hidden_size))


def default_tile_width(n_tokens: int, vocab_size: int, hidden_size: int) -> int:
    """T for N tokens and V words of hidden size D: about 2 D columns or, with few tokens, V D / (16 N).

    With T = 2 D the (N, T) logits of half precision take as many bytes as the float32 sum of dx (N, D) beside them: a
    tile at most doubles what cannot be avoided, whatever N is. Narrower tiles cost time: each adds to that sum, which
    is read and written once more for it, and the product that does so has only T terms to hide it behind. With fewer
    than V / 32 tokens tiles may be wider: as long as one takes a sixteenth of dw (V, D), it is hardly seen beside it,
    and fewer tiles mean fewer products too small to fill a GPU. At least 1024, never more than V, all about equal.
    """
    unseen = vocab_size * hidden_size // (16 * max(1, n_tokens))
    return _equal_pieces(vocab_size, max(_SMALLEST_CHUNK, 2 * hidden_size, unseen))


def _equal_pieces(total: int, largest: int) -> int:
    """The size of pieces of ``total``: at most ``largest`` but for rounding up to a multiple of 128, about equal."""
    if total <= 1:
        return max(1, total)
    equal = ceil(total / ceil(total / largest))
    return min(total, ceil(equal / _TILE) * _TILE)


def accumulation_dtype(accum_dtype: torch.dtype | None, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which pieces are summed: the one asked for, else float32 or wider."""
    return accum_dtype or torch.promote_types(compute_dtype, torch.float32)
