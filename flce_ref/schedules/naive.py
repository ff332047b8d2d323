"""All logits at once: what ``F.cross_entropy(F.linear(…))`` does, and what every other schedule is measured against."""

from __future__ import annotations

from torch import Tensor

from ..objective import Objective
from .plain import plain_loss


def naive(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    objective: Objective,
    reduction: str,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Loss under ``reduction`` and, if needed, lse (N,). Holds three (N, V) buffers at its peak, in backward."""
    return plain_loss(input, linear_weight, linear_bias, target, objective, reduction, need_lse)
