"""A call of the front door, checked and completed: tokens flattened, the objective and the schedule's plan made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import kernels
from .arguments import (
    HONOURS,
    autocast_dtype,
    check_class_weight,
    check_flags,
    check_objective,
    check_schedule,
    check_target_range,
    check_tensors,
)
from .objective import Objective
from .schedules.plan import Plan, accumulation_dtype, piece_size

if TYPE_CHECKING:
    from .schedules.vocab_parallel import Shard


@dataclass(frozen=True)
class Arguments:
    """Those of :func:`flce_ref.linear_cross_entropy`, in its order, as they came."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    schedule: str
    chunk_size: int | None
    accum_dtype: torch.dtype | None
    kernel: str
    skip_ignored: bool
    return_lse: bool
    filter_eps: float | None
    options: None


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


def check(a: Arguments, is_shard: bool = False) -> torch.dtype:
    """The dtype of the products, once all is checked that can be before the number of words is known."""
    if a.options is not None:
        raise TypeError("options belong to torch.nn.functional.linear_cross_entropy; here use schedule and chunk_size")
    check_tensors(a.input, a.linear_weight, a.target, a.linear_bias, a.weight, is_shard)
    check_objective(a.reduction, a.ignore_index, a.label_smoothing, a.z_loss, a.softcap)
    compute_dtype = autocast_dtype(a.input) or a.input.dtype
    check_schedule(a.schedule, a.chunk_size, a.accum_dtype, a.kernel, a.filter_eps, compute_dtype)
    check_flags(skip_ignored=a.skip_ignored, return_lse=a.return_lse)
    return compute_dtype


def prepare(a: Arguments, vocab_size: int | None = None, shard: Shard | None = None) -> Call:
    """A checked call. ``linear_weight`` holds all words or, if a number of all is given, those of ``shard``."""
    compute_dtype = check(a, is_shard=vocab_size is not None)
    vocab_size = a.linear_weight.shape[0] if vocab_size is None else vocab_size
    check_class_weight(a.weight, vocab_size)
    hidden_size = a.linear_weight.shape[1]
    ignore_index = -100 if a.ignore_index is None else int(a.ignore_index)
    input = a.input.reshape(-1, hidden_size) if hidden_size else a.input.reshape(a.target.numel(), 0)
    target = a.target.reshape(-1).long()  # before any comparison: V need not fit the target's own dtype
    check_target_range(target, vocab_size, ignore_index)
    weight = a.weight
    if weight is not None:
        # A copy: weights changed between forward and backward must not change the gradient of a loss already taken.
        weight = weight.detach().to(torch.promote_types(compute_dtype, torch.float32), copy=True)
        if a.reduction == "mean":
            weight = normalised(weight, counts_of(weight, target, ignore_index))
    objective = Objective(
        vocab_size,
        ignore_index,
        float(a.label_smoothing),
        float(a.z_loss),
        None if a.softcap is None else float(a.softcap),
        weight,
    )
    asked = None if a.chunk_size is None else int(a.chunk_size)
    size = piece_size(a.schedule, asked, input.shape[0], vocab_size, hidden_size)
    kernel = a.kernel
    if "kernel" in HONOURS[a.schedule]:
        kernel = kernels.resolve(kernel, input.device, compute_dtype)
    plan = Plan(size, accumulation_dtype(a.accum_dtype, compute_dtype), kernel, shard, a.filter_eps)
    return Call(input, target, objective, a.schedule, plan, compute_dtype)


def counts_of(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """(2,) float64: the number of valid tokens, n_valid, and Σ weight[target] over them."""
    valid = target != ignore_index
    total = weight.double()[target.clamp(0, weight.shape[0] - 1)].masked_fill(~valid, 0.0).sum()
    return torch.stack([valid.sum().to(total.dtype), total])


def normalised(weight: Tensor, counts: Tensor) -> Tensor:
    """Class weights times n_valid / Σ weight[target], so that "mean" can divide every term by n_valid alone."""
    n_valid, total = counts
    # In float64: neither the sum of large weights nor the inverse of small ones need be a float32.
    return (weight.double() * torch.where(n_valid == 0, 1.0, n_valid / total)).to(weight.dtype)
