"""What the tests of the tile kernels share: a row is read tile by tile between red zones, then written tile by tile.

The truth and the error that is allowed are those of the row kernels: see ``kernel_cases.py``.
"""

from __future__ import annotations

import itertools
from types import ModuleType

import torch
from torch import Tensor

from flce_ref.objective import GradCoefficients, Objective, RowStats, grad_coefficients, row_loss, stats_of_nothing

from .kernel_cases import Case, Guarded, check_gradient, check_within, truth


def tiles_of(vocab_size: int, width: int) -> list[tuple[int, int]]:
    """(first column, end) of tiles of ``width`` columns, the first and the last narrower."""
    first = max(1, width // 3)
    edges = [0, *range(min(first, vocab_size), vocab_size, width), vocab_size]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def run_tiles(
    module: ModuleType, case: Case, width: int, row_stride: int = 0, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, logits after, maxima of the tiles) of a kernel's module on copies of ``case`` between red zones."""
    guarded = Guarded(str(case.logits.device))
    logits = guarded.place(case.logits, row_stride, offset)
    o, rows = case.objective, case.logits.shape[0]
    weight = None if o.class_weight is None else guarded.place(o.class_weight)
    objective = Objective(o.vocab_size, o.ignore_index, o.label_smoothing, o.z_loss, o.softcap, weight)
    target = guarded.place(case.target)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    nothing = stats_of_nothing(rows, o.label_smoothing > 0, dtype, logits.device)
    stats = RowStats(*(None if s is None else guarded.place(s) for s in nothing))
    tiles, highest = tiles_of(o.vocab_size, width), []
    for first, end in tiles:
        highest.append(guarded.place(torch.full((rows,), float("nan"), dtype=dtype, device=logits.device)))
        module.merge_stats_(stats, logits[:, first:end], target, first, objective, highest[-1])
    if not case.write_grad:
        assert torch.equal(logits.nan_to_num(), case.logits.nan_to_num()), "the logits were to be left alone"
    loss, lse = row_loss(stats, target, objective)
    if case.write_grad:
        by = grad_coefficients(lse, target, objective, case.grad_loss, case.grad_lse)
        by = GradCoefficients(*(guarded.place(c) for c in by))
        for first, end in tiles:
            module.write_grad_(logits[:, first:end], target, first, stats, by, objective)
    guarded.check()
    return loss, lse, logits, torch.stack(highest)


def check_tiles(
    module: ModuleType, case: Case, width: int, row_stride: int = 0, offset: int = 0, rounding: float = 1
) -> None:
    """What a kernel makes of the tiles of rows is what float64 makes of the rows."""
    true_loss, true_lse, true_grad, size = truth(case)
    loss, lse, after, highest = run_tiles(module, case, width, row_stride, offset)
    magnitude = 1 + true_loss.abs() + true_lse.abs()
    check_within(loss, true_loss, 4e-6 * magnitude, "loss")
    check_within(lse, true_lse, 1e-6 * magnitude, "lse")
    cap, z = case.objective.softcap, case.logits.double()
    z = z if cap is None else cap * torch.tanh(z / cap)
    true_highest = torch.stack([z[:, a:b].amax(1) for a, b in tiles_of(z.shape[1], width)])
    finite = true_highest.isfinite()
    check_within(highest[finite], true_highest[finite], 1e-6 * (1 + true_highest[finite].abs()), "maxima of the tiles")
    if case.write_grad:
        check_gradient(after, true_grad, size, rounding)
