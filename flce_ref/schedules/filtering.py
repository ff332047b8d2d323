"""Which tokens need which tiles of the vocabulary: gradient filtering, after Cut Cross-Entropy (arXiv:2411.09009).

A trained model gives nearly all words of a tile a probability of nearly nothing. Their part of the gradient, p, is then
below what the rest of it loses to rounding, and the products that would carry it can be left out: not for a tile as a
whole, which one token in thousands is enough to keep, but for each token by itself. The tokens that need a tile are
gathered, and the tile's products have as many rows as there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..objective import Objective
from .plan import Plan

# If more of the tokens than this need a tile it is made for all of them: to gather and scatter rows takes as long.
NEARLY_ALL = 0.75


def refuse_where_nothing_can_be_read(device: torch.device) -> None:
    """RuntimeError while compiling or capturing a CUDA graph: shapes depend on values that the host must read."""
    reason = "filter_eps reads from the device how many tokens need each tile, which {} forbids"
    if torch.compiler.is_compiling():
        raise RuntimeError(reason.format("torch.compile"))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(reason.format("a CUDA graph capture"))


def rows_that_need(
    highest: Tensor,  # (tiles, N) the highest logit of each row in each tile
    lse: Tensor,  # (N,)
    target: Tensor,  # (N,)
    objective: Objective,
    plan: Plan,
) -> list[Tensor | None]:
    """For every tile the rows (R,) that have their target in it or a probability of ``plan.filter_eps``; None is all.

    An ignored row needs no tile, one whose loss is NaN every one. One synchronisation with the host.
    """
    refuse_where_nothing_can_be_read(lse.device)
    assert plan.filter_eps is not None
    needed = ~(torch.exp(highest - lse) < plan.filter_eps)
    tile_of_target = target.clamp(0, objective.vocab_size - 1) // plan.chunk_size
    needed.scatter_(0, tile_of_target[None], True)
    needed &= target != objective.ignore_index
    rows = needed.to(torch.uint8).argsort(dim=1, descending=True, stable=True)  # those that need the tile come first
    counts = needed.sum(1)
    if _has_no_values(counts):
        return [None] * len(rows)  # the most that backward can take
    enough = NEARLY_ALL * target.shape[0]
    return [None if count > enough else row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]


def _has_no_values(tensor: Tensor) -> bool:
    if type(tensor) is Tensor:
        return False
    from torch._subclasses.fake_tensor import is_fake  # here, for a plain tensor shall not pay for loading it

    return is_fake(tensor)
