"""Tiles of the vocabulary in Triton: the contract of :mod:`flce_ref.kernels.eager`, to be read beside ``tiles.cu``.

One program per row of a tile, with the pieces of :mod:`flce_ref.kernels.triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..objective import GradCoefficients, Objective, RowStats
from .triton import _LOWEST, _class_weight, _load


def merge_stats_(
    running: RowStats,
    tile: Tensor,
    target: Tensor,
    first_column: int,
    objective: Objective,
    highest: Tensor | None = None,
) -> None:
    """As :func:`flce_ref.kernels.eager.merge_stats_`, for a tile (C, T) whose columns have stride 1."""
    before = here = None
    if objective.label_smoothing and objective.class_weight is not None:
        before, here = objective.weights_about(first_column, tile.shape[1])
    vectors = (target.contiguous(), _weights(objective, first_column, tile), before, here, *running, highest)
    _launch(_merge_stats, tile, first_column, objective, vectors)


def write_grad_(
    tile: Tensor, target: Tensor, first_column: int, stats: RowStats, by: GradCoefficients, objective: Objective
) -> None:
    """As :func:`flce_ref.kernels.eager.write_grad_`, for a tile (C, T) whose columns have stride 1."""
    rows = (t.contiguous() for t in (stats.max, stats.sumexp, *by))
    vectors = (target.contiguous(), _weights(objective, first_column, tile), *rows, objective.ignore_index)
    _launch(_write_grad, tile, first_column, objective, vectors)


def _launch(kernel, tile: Tensor, first_column: int, objective: Objective, vectors) -> None:  # type: ignore[no-untyped-def]
    rows, width = tile.shape
    if rows == 0:
        return
    block = min(triton.next_power_of_2(width), 4096)
    softcap = objective.softcap
    with torch.cuda.device(tile.device if tile.is_cuda else -1):
        kernel[(rows,)](
            tile, tile.stride(0), first_column, *vectors, softcap or 1.0,
            SMOOTHING=objective.label_smoothing > 0, SOFTCAP=softcap is not None,
            WIDTH=width, BLOCK=block, num_warps=8 if block > 1024 else 4,
        )  # fmt: skip


def _weights(objective: Objective, first_column: int, tile: Tensor) -> Tensor | None:
    weight = objective.class_weight
    return None if weight is None else weight[first_column : first_column + tile.shape[1]].contiguous()


@triton.jit(do_not_specialize=["first_column", "softcap"])
def _merge_stats(  # type: ignore[no-untyped-def]
    tile, row_stride, first_column,  # (C, T), raw logits of columns first_column and on
    target, class_weight, weight_before, weight_here,  # (C,), (T,) | None, () | None, () | None
    row_max, sumexp, target_logit, smooth_sum, highest,  # (C,), and (C,) | None twice
    softcap,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = tile + row * row_stride
    columns = tl.arange(0, BLOCK)
    z_0 = _load(z_row, 0, softcap, WIDTH, SOFTCAP)
    reference = tl.where(tl.abs(z_0) <= -_LOWEST, z_0, 0.0)
    own_max = tl.full([], _LOWEST, tl.float32)
    exps, smooths = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + columns
        z = _load(z_row, column, softcap, WIDTH, SOFTCAP)
        new_max = tl.maximum(own_max, tl.max(z, 0))
        exps = exps * tl.exp(own_max - new_max) + tl.exp(z - new_max)
        own_max = new_max
        if SMOOTHING:
            smooths += tl.where(column < WIDTH, _class_weight(class_weight, column, WIDTH) * (z - reference), 0.0)

    # What is known of the columns before is moved to the maximum of all, and the tile's own is added.
    before = tl.load(row_max + row)
    both = tl.maximum(before, own_max)
    nothing = both == _LOWEST
    tl.store(row_max + row, tl.where(nothing, float("-inf"), both))
    moved = tl.load(sumexp + row) * tl.exp(before - both)
    tl.store(sumexp + row, moved + tl.sum(exps, 0) * tl.exp(own_max - both))
    if SMOOTHING:
        shift = tl.where(nothing, 0.0, both)
        total_before = first_column.to(tl.float32) if weight_before is None else tl.load(weight_before)
        total_here = WIDTH if weight_here is None else tl.load(weight_here)
        # Of no columns, or of masked words alone, there is nothing that a shift could move.
        sum_before = tl.where(before == float("-inf"), 0.0, total_before * (before - shift))
        sum_here = tl.sum(smooths, 0) + total_here * (reference - shift)
        tl.store(smooth_sum + row, tl.load(smooth_sum + row) + sum_before + sum_here)
    y = tl.load(target + row) - first_column
    if (y >= 0) & (y < WIDTH):
        tl.store(target_logit + row, _load(z_row, y, softcap, WIDTH, SOFTCAP))
    if highest is not None:
        tl.store(highest + row, tl.where(own_max == _LOWEST, float("-inf"), own_max))


@triton.jit(do_not_specialize=["first_column", "ignore_index", "softcap"])
def _write_grad(  # type: ignore[no-untyped-def]
    tile, row_stride, first_column,  # (C, T), overwritten by the gradient
    target, class_weight,  # (C,), (T,) | None
    row_max, sumexp, on_probability, on_target, on_smooth,  # (C,) of whole rows
    ignore_index, softcap,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = tile + row * row_stride
    y = tl.load(target + row)
    total = tl.load(sumexp + row)
    shift = tl.where(total == 0, 0.0, tl.load(row_max + row))
    scale = tl.load(on_probability + row) / total
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = _load(z_row, column, softcap, WIDTH, SOFTCAP)
        grad = scale * tl.exp(z - shift)
        if SMOOTHING:
            grad -= tl.load(on_smooth + row) * _class_weight(class_weight, column, WIDTH)
        grad -= tl.where(column == y - first_column, tl.load(on_target + row), 0.0)
        if SOFTCAP:
            grad *= 1 - (z / softcap) * (z / softcap)
        # Not by coefficients of zero: the logits of an ignored row need not be finite.
        grad = tl.where(y == ignore_index, 0.0, grad)
        tl.store(z_row + column, grad.to(tile.dtype.element_ty), mask=column < WIDTH)
