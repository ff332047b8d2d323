"""A call of the front door, checked and completed: tokens flattened, the objective and the schedule's plan made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .arguments import autocast_dtype, check_objective, check_schedule, check_target_range, check_tensors
from .objective import Objective
from .schedules.plan import Plan, accumulation_dtype, default_chunk_size


@dataclass(frozen=True)
class Call:
    """A checked call: tokens flattened, the objective complete, the schedule's plan made."""

    input: Tensor  # (N, D)
    target: Tensor  # (N,) int64
    objective: Objective
    schedule: str
    plan: Plan
    compute_dtype: torch.dtype

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.compute_dtype, torch.float32)


def prepare(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    reduction: str, ignore_index: int | None, label_smoothing: float, z_loss: float, softcap: float | None,
    schedule: str, chunk_size: int | None, accum_dtype: torch.dtype | None, kernel: str, options: None,
) -> Call:  # fmt: skip
    if options is not None:
        raise TypeError("options belong to torch.nn.functional.linear_cross_entropy; here use schedule and chunk_size")
    check_tensors(input, linear_weight, target, linear_bias, weight)
    check_objective(reduction, ignore_index, label_smoothing, z_loss, softcap)
    compute_dtype = autocast_dtype(input) or input.dtype
    check_schedule(schedule, chunk_size, accum_dtype, kernel, compute_dtype)
    vocab_size, hidden_size = linear_weight.shape
    ignore_index = -100 if ignore_index is None else int(ignore_index)
    input = input.reshape(-1, hidden_size) if hidden_size else input.reshape(target.numel(), 0)
    target = target.reshape(-1).long()  # before any comparison: V need not fit the target's own dtype
    check_target_range(target, vocab_size, ignore_index)
    if weight is not None:
        # A copy: weights changed between forward and backward must not change the gradient of a loss already taken.
        weight = weight.detach().to(torch.promote_types(compute_dtype, torch.float32), copy=True)
        if reduction == "mean":
            weight = _normalised(weight, target, ignore_index)
    objective = Objective(
        vocab_size,
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        None if softcap is None else float(softcap),
        weight,
    )
    n = input.shape[0]
    chunk = default_chunk_size(n, hidden_size) if chunk_size is None else min(int(chunk_size), max(n, 1))
    if schedule == "fused":
        kernel = kernels.resolve(kernel, input.device, compute_dtype)
    plan = Plan(chunk, accumulation_dtype(accum_dtype, compute_dtype), kernel)
    return Call(input, target, objective, schedule, plan, compute_dtype)


def _normalised(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Class weights times n_valid / Σ weight[target], so that "mean" can divide every term by n_valid alone."""
    valid = target != ignore_index
    total = weight[target.clamp(0, weight.shape[0] - 1)].masked_fill(~valid, 0.0).sum()
    n_valid = valid.sum()
    return weight * torch.where(n_valid == 0, 1.0, n_valid / total)
