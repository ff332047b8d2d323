"""Chunk by chunk with one backward at the end: the first thing one tries, kept because its failure teaches.

The logits of a chunk are freed in forward, but each chunk's autograd graph keeps its log-probabilities until the one
backward has passed through it. All chunks together keep N·V elements, however many chunks there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..objective import Objective
from .plain import plain_loss


def chunked(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    objective: Objective,
    reduction: str,
    need_lse: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Loss under ``reduction`` and, if needed, lse (N,), from chunks of ``chunk_size`` rows."""
    losses, lses = [], []
    chunk_reduction = "none" if reduction == "none" else "sum"
    # split() of zero rows gives one empty chunk, so that the graph reaches the inputs for N = 0 too.
    for x, y in zip(input.split(chunk_size), target.split(chunk_size), strict=True):
        loss, lse = plain_loss(x, linear_weight, linear_bias, y, objective, chunk_reduction, need_lse)
        losses.append(loss)
        lses.append(lse)
    lse = torch.cat([lse for lse in lses if lse is not None]) if need_lse else None
    return combine(losses, target, objective, reduction), lse


def combine(losses: list[Tensor], target: Tensor, objective: Objective, reduction: str) -> Tensor:
    """The loss of all tokens from that of each chunk: concatenated, summed in float32 or wider, or averaged."""
    if reduction == "none":
        return torch.cat(losses)
    # Chunk sums reach thousands; a bfloat16 running total would soon be too coarse to add the next chunk to.
    total = torch.stack(losses).sum(dtype=torch.promote_types(losses[0].dtype, torch.float32))
    return total / (target != objective.ignore_index).sum() if reduction == "mean" else total
