"""Chunk by chunk, each chunk recomputed in backward: the honest repair of :mod:`flce_ref.schedules.chunked`.

Nothing of a chunk survives forward but its inputs and its loss. The price is a second projection of every chunk, and a
gradient of the weight that autograd still sums in the weight's own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..objective import Objective
from .chunked import combine
from .plain import plain_loss


def checkpointed(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    objective: Objective,
    reduction: str,
    need_lse: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Loss under ``reduction`` and, if needed, lse (N,), from checkpointed chunks of ``chunk_size`` rows."""
    losses, lses = [], []
    chunk_reduction = "none" if reduction == "none" else "sum"
    for x, y in zip(input.split(chunk_size), target.split(chunk_size), strict=True):
        # No dropout here, so no random state to save and restore.
        loss, lse = checkpoint(
            plain_loss, x, linear_weight, linear_bias, y, objective, chunk_reduction, need_lse,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        losses.append(loss)
        lses.append(lse)
    lse = torch.cat([lse for lse in lses if lse is not None]) if need_lse else None
    return combine(losses, target, objective, reduction), lse
