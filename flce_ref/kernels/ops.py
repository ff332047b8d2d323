"""The operations a chunk is made of, as PyTorch custom ops.

A custom op is what ``torch.compile`` sees as one step that overwrites one buffer, and what the memory simulator books
as one kernel. To be seen costs some tens of microseconds a call, which a GPU would wait for where pieces are small; so
where nobody looks, what is behind the op is called at once. None allocates anything of the size of the logits; those
that end in ``_`` overwrite their first argument.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..objective import GradCoefficients, Objective, RowStats, stats_of_nothing
from . import implementation

# How many dispatch modes are watching; where PyTorch does not say, an op is always an op.
_watchers: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)

# A block of the left factor, copied to the accumulator's dtype where the device has no mixed-precision product.
_BLOCK_BYTES = 64 * 2**20


def _nobody_looks(tensor: Tensor) -> bool:
    """Whether a plain tensor is computed with, that is neither traced nor watched by a dispatch mode."""
    return type(tensor) is Tensor and not tensor.is_meta and not torch.compiler.is_compiling() and not _watchers()


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    kernel: str,
    write_grad: bool = True,
    grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row of ``logits`` (C, V), both (C,); with ``write_grad`` the logits become their gradient.

    ``grad_loss`` and ``grad_lse`` (C,) multiply the gradient of a row's loss and lse before it is stored.
    """
    if _nobody_looks(logits):
        run = implementation(kernel, logits)
        loss, lse = run(logits, target, objective, grad_loss, grad_lse, write_grad)
        return loss, lse
    o = objective
    loss, lse = _cross_entropy_op(
        logits, target, o.class_weight, grad_loss, grad_lse, o.ignore_index, o.label_smoothing, o.z_loss, o.softcap,
        write_grad, kernel,
    )  # fmt: skip
    return loss, lse


@torch.library.custom_op("flce_ref::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_op(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    write_grad: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    objective = Objective(logits.shape[1], ignore_index, label_smoothing, z_loss, softcap, class_weight)
    loss, lse = implementation(kernel, logits)(logits, target, objective, grad_loss, grad_lse, write_grad)
    return loss, lse


@_cross_entropy_op.register_fake
def _(logits: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
    row = torch.empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    return row, torch.empty_like(row)


def row_stats(tile: Tensor, target: Tensor, first_column: int, objective: Objective, kernel: str) -> RowStats:
    """Statistics of each row of ``tile`` (C, T), the raw logits of columns first_column … first_column + T − 1."""
    dtype = torch.promote_types(tile.dtype, torch.float32)
    stats = stats_of_nothing(tile.shape[0], objective.label_smoothing > 0, dtype, tile.device)
    merge_stats_(stats, tile, target, first_column, objective, kernel)
    return stats


def merge_stats_(
    running: RowStats,
    tile: Tensor,
    target: Tensor,
    first_column: int,
    objective: Objective,
    kernel: str,
    highest: Tensor | None = None,
) -> None:
    """``running``, of all columns before first_column or of none, is overwritten by what it is with those of ``tile``.

    ``highest`` (C,), if given, gets each row's maximum in the tile.
    """
    if _nobody_looks(tile):
        implementation(kernel, tile, "merge_stats_")(running, tile, target, first_column, objective, highest)
        return
    o = objective
    _merge_stats_op(
        *running, highest, tile, target, o.class_weight, first_column, o.vocab_size, o.label_smoothing, o.softcap,
        kernel,
    )  # fmt: skip


@torch.library.custom_op(
    "flce_ref::merge_stats_", mutates_args={"row_max", "sumexp", "target_logit", "smooth_sum", "highest"}
)
def _merge_stats_op(
    row_max: Tensor,
    sumexp: Tensor,
    target_logit: Tensor,
    smooth_sum: Tensor | None,
    highest: Tensor | None,
    tile: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    first_column: int,
    vocab_size: int,
    label_smoothing: float,
    softcap: float | None,
    kernel: str,
) -> None:
    objective = Objective(vocab_size, 0, label_smoothing, 0.0, softcap, class_weight)
    running = RowStats(row_max, sumexp, target_logit, smooth_sum)
    implementation(kernel, tile, "merge_stats_")(running, tile, target, first_column, objective, highest)


@_merge_stats_op.register_fake
def _(*_args: object, **_kwargs: object) -> None:
    return None


def write_grad_(
    tile: Tensor,
    target: Tensor,
    first_column: int,
    stats: RowStats,
    by: GradCoefficients,
    objective: Objective,
    kernel: str,
) -> None:
    """Overwrite raw logits ``tile`` (C, T) by their gradient; ``stats`` are those of whole rows, over all columns."""
    if _nobody_looks(tile):
        implementation(kernel, tile, "write_grad_")(tile, target, first_column, stats, by, objective)
        return
    o = objective
    _write_grad_op(
        tile, target, stats.max, stats.sumexp, *by, o.class_weight, first_column, o.vocab_size, o.ignore_index,
        o.label_smoothing, o.softcap, kernel,
    )  # fmt: skip


@torch.library.custom_op("flce_ref::write_grad_", mutates_args={"tile"})
def _write_grad_op(
    tile: Tensor,
    target: Tensor,
    row_max: Tensor,
    sumexp: Tensor,
    on_probability: Tensor,
    on_target: Tensor,
    on_smooth: Tensor,
    class_weight: Tensor | None,
    first_column: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    kernel: str,
) -> None:
    objective = Objective(vocab_size, ignore_index, label_smoothing, 0.0, softcap, class_weight)
    stats = RowStats(row_max, sumexp, row_max, None)  # of the target's logit and the smoothed sum only losses are made
    by = GradCoefficients(on_probability, on_target, on_smooth)
    implementation(kernel, tile, "write_grad_")(tile, target, first_column, stats, by, objective)


@_write_grad_op.register_fake
def _(tile: Tensor, *_args: object, **_kwargs: object) -> None:
    return None


def accumulate_product_(out: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """``out`` (M, K) = left (M, C) @ right (C, K), added to what ``out`` holds unless ``overwrite``.

    ``out`` may be wider than the factors: the product is then summed and stored in ``out``'s dtype, never rounded to
    theirs in between.
    """
    (_accumulate_product if _nobody_looks(out) else _accumulate_product_op)(out, left, right, overwrite)


def _accumulate_product(out: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=0 if overwrite else 1, out=out)
    elif out.is_cuda:
        if overwrite:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        right = right.to(out.dtype)
        step = max(1, _BLOCK_BYTES // (out.element_size() * max(1, left.shape[1])))
        for start in range(0, out.shape[0], step):
            block = out[start : start + step]
            torch.addmm(block, left[start : start + step].to(out.dtype), right, beta=0 if overwrite else 1, out=block)


_accumulate_product_op = torch.library.custom_op("flce_ref::accumulate_product_", mutates_args={"out"})(
    _accumulate_product
)


@_accumulate_product_op.register_fake
def _(out: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    return None
