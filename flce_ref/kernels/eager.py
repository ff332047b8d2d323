"""The kernels' contract in plain PyTorch: the definition that the Triton and CUDA C++ kernels are held to.

Two layers. ``merge_stats_`` and ``write_grad_`` work on any tile of columns, so that a tiled vocabulary is served as
well as a whole row; ``cross_entropy_`` does both for full rows. Arithmetic is in float32 (float64 for float64 logits).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..objective import GradCoefficients, Objective, RowStats, finite_shift, grad_coefficients, merge, row_loss

# The float32 copy of a block of rows; bounds the temporaries of a chunk and keeps a block in a CPU's cache.
_BLOCK_BYTES = 16 * 2**20


def row_stats(tile: Tensor, target: Tensor, first_column: int, objective: Objective) -> RowStats:
    """Statistics of each row of ``tile`` (C, T), raw logits of columns first_column … first_column + T − 1."""
    parts = [_stats_of_block(tile[rows], target[rows], first_column, objective) for rows in _row_blocks(tile)]
    row_max, sumexp, target_logit, smooth_sum = zip(*parts)
    smooth = torch.cat(smooth_sum) if objective.label_smoothing else None
    return RowStats(torch.cat(row_max), torch.cat(sumexp), torch.cat(target_logit), smooth)


def _stats_of_block(tile: Tensor, target: Tensor, first_column: int, objective: Objective) -> RowStats:
    z = _capped(tile, objective)
    row_max = z.amax(dim=1)
    shift = finite_shift(row_max)
    inside, column = _target_column(target, first_column, tile.shape[1])
    target_logit = torch.where(inside, z.gather(1, column[:, None]).squeeze(1), 0.0)
    z = z.sub_(shift[:, None])
    smooth_sum = None
    if objective.label_smoothing:
        smooth_sum = z.sum(dim=1) if objective.class_weight is None else z @ _columns(objective, first_column, tile)
    return RowStats(row_max, z.exp_().sum(dim=1), target_logit, smooth_sum)


def merge_stats_(
    running: RowStats,
    tile: Tensor,
    target: Tensor,
    first_column: int,
    objective: Objective,
    highest: Tensor | None = None,
) -> None:
    """``running``, of all columns before first_column or of none, is overwritten by what it is with those of ``tile``.

    ``highest`` (C,), if given, gets each row's maximum in the tile.
    """
    own = row_stats(tile, target, first_column, objective)
    before, here = objective.weights_about(first_column, tile.shape[1]) if objective.label_smoothing else (0, 0)
    for old, new in zip(running, merge(running, own, before, here), strict=True):
        if old is not None and new is not None:
            old.copy_(new)
    if highest is not None:
        highest.copy_(own.max)


def write_grad_(
    tile: Tensor, target: Tensor, first_column: int, stats: RowStats, by: GradCoefficients, objective: Objective
) -> None:
    """Overwrite raw logits ``tile`` (C, T) by their gradient; ``stats`` are those of the whole row."""
    for rows in _row_blocks(tile):
        by_block = GradCoefficients(*(coefficient[rows] for coefficient in by))
        _write_grad_of_block_(tile[rows], target[rows], first_column, stats.of(rows), by_block, objective)


def _write_grad_of_block_(
    tile: Tensor, target: Tensor, first_column: int, stats: RowStats, by: GradCoefficients, objective: Objective
) -> None:
    z = _capped(tile, objective)
    slope = None if objective.softcap is None else 1 - (z / objective.softcap).square_()
    grad = z.sub_(finite_shift(stats.max)[:, None]).exp_().mul_((by.probability / stats.sumexp)[:, None])
    if objective.label_smoothing:
        weight = 1.0 if objective.class_weight is None else _columns(objective, first_column, tile)
        grad.sub_(by.smooth[:, None] * weight)
    # The one-hot is taken off here, in float32: after rounding p to bfloat16, p − 1 is 0 for every p above 0.998.
    inside, column = _target_column(target, first_column, tile.shape[1])
    grad.scatter_add_(1, column[:, None], torch.where(inside, -by.target, 0.0)[:, None])
    if slope is not None:
        grad.mul_(slope)
    # Not by the zero coefficients alone: 0 · p is NaN where the logits of an ignored row are not finite.
    grad.masked_fill_((target == objective.ignore_index)[:, None], 0.0)
    tile.copy_(grad)


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
    write_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row of ``logits`` (C, V); with ``write_grad`` the logits become their own gradient."""
    loss = torch.empty(logits.shape[0], dtype=_accumulation_dtype(logits), device=logits.device)
    lse = torch.empty_like(loss)
    for rows in _row_blocks(logits):
        block, y = logits[rows], target[rows]
        stats = _stats_of_block(block, y, 0, objective)
        loss[rows], lse[rows] = row_loss(stats, y, objective)
        if write_grad:
            upstream = [None if g is None else g[rows] for g in (grad_loss, grad_lse)]
            by = grad_coefficients(lse[rows], y, objective, *upstream)
            _write_grad_of_block_(block, y, 0, stats, by, objective)
    return loss, lse


def scale(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out`` = ``gradient`` · ``factor``, (1,) float32 or wider, rounded once. ``out`` may be ``gradient`` itself."""
    torch.mul(gradient, factor, out=out)


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _capped(tile: Tensor, objective: Objective) -> Tensor:
    """A fresh float32 copy of ``tile``, soft-capped: the caller may overwrite it."""
    z = tile.to(_accumulation_dtype(tile), copy=True)
    cap = objective.softcap
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


def _columns(objective: Objective, first_column: int, tile: Tensor) -> Tensor:
    """The class weights of a tile's columns, (T,), in the tile's accumulation dtype."""
    assert objective.class_weight is not None
    return objective.class_weight[first_column : first_column + tile.shape[1]].to(_accumulation_dtype(tile))


def _target_column(target: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether each target lies in the tile, and its column there (clamped, so that it may index either way)."""
    column = target - first_column
    return (column >= 0) & (column < width), column.clamp(0, width - 1)


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, _BLOCK_BYTES // (4 * columns))
    for start in range(0, max(rows, 1), step):  # no row is one empty block
        yield slice(start, start + step)
