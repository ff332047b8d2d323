"""Tiles of columns as custom ops: statistics that merge to those of whole rows, and gradients written tile by tile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flce_ref.kernels import eager, ops
from flce_ref.objective import Objective, grad_coefficients, merge, row_loss, stats_of_nothing
from tests.kernel_cases import DTYPES, EVERYTHING, layouts_of, make_case
from tests.tile_cases import check_tiles

C, V = 7, 23
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "ignore_index": 4, "weighted": True},
]


def problem(options: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Objective]:
    options = dict(options)
    weight = torch.linspace(0.5, 2, V, dtype=torch.promote_types(dtype, torch.float32))
    weight_given = weight if options.pop("weighted", False) else None
    logits = (4 * torch.randn(C, V, dtype=torch.float64)).to(dtype)
    return logits, torch.tensor([0, 4, 22, 9, 10, 11, -100][:C]), Objective(V, class_weight=weight_given, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "everything"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tiles_give_what_whole_rows_give(options: dict[str, Any], dtype: torch.dtype) -> None:
    logits, y, objective = problem(options, dtype)
    y[6] = objective.ignore_index
    whole = logits.clone()
    loss, lse = ops.cross_entropy_(whole, y, objective, "eager")

    edges = (0, 1, 10, 23)
    tiles = [(a, logits[:, a:b]) for a, b in itertools.pairwise(edges)]  # strided, as columns of wider rows
    ones = torch.ones(V, dtype=loss.dtype)
    weights = [(ones if objective.class_weight is None else objective.class_weight)[a : a + t.shape[1]].sum()
               for a, t in tiles]  # fmt: skip
    merged, weight = ops.row_stats(tiles[0][1], y, 0, objective, "auto"), weights[0]
    for (first, tile), own in zip(tiles[1:], weights[1:]):
        merged, weight = merge(merged, ops.row_stats(tile, y, first, objective, "auto"), weight, own), weight + own
    torch.testing.assert_close(row_loss(merged, y, objective), (loss, lse))
    for first, tile in tiles:
        ops.write_grad_(tile, y, first, merged, grad_coefficients(lse, y, objective), objective, "auto")
    torch.testing.assert_close(logits, whole)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "everything"])
def test_the_ops_are_well_behaved(options: dict[str, Any]) -> None:
    logits, y, o = problem(options, torch.float32)
    stats = eager.row_stats(logits, y, 0, o)
    by = grad_coefficients(row_loss(stats, y, o)[1], y, o)
    running, highest = stats_of_nothing(C, o.label_smoothing > 0, logits.dtype, logits.device), torch.empty(C)
    for extra in (None, highest):
        torch.library.opcheck(
            ops._merge_stats_op,
            (*running, extra, logits, y, o.class_weight, 0, V, o.label_smoothing, o.softcap, "eager"),
            test_utils=("test_schema", "test_faketensor"),
        )
    torch.library.opcheck(
        ops._write_grad_op,
        (logits, y, stats.max, stats.sumexp, *by, o.class_weight, 0, V, o.ignore_index, o.label_smoothing, o.softcap,
         "eager"),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"label_smoothing": 0.3}], ids=["plain", "everything", "smoothing"]
)
def test_eager_tiles_against_float64(shape: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(*shape, dtype, **options)
    for row_stride, offset in layouts_of(*shape):
        check_tiles(eager, case, 300, row_stride, offset)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weighted": True}], ids=str)
def test_a_common_offset_and_masked_words(options: dict[str, Any]) -> None:
    case = make_case(4, 777, torch.float32, **options)
    case.logits.add_(1e4)
    check_tiles(eager, case, 100)
    case = make_case(4, 777, torch.float32)
    case.logits[:, 100:500] = float("-inf")  # whole tiles of masked words
    case.target[case.target != -100] = 7
    check_tiles(eager, case, 100)


def test_no_rows_and_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, y, objective = problem(OPTIONS[1], torch.float64)
    stats = eager.row_stats(logits, y, 0, objective)
    assert [s.shape for s in eager.row_stats(logits[:0], y[:0], 0, objective)] == [(0,)] * 4
    monkeypatch.setattr(eager, "_BLOCK_BYTES", 4 * V * 3)  # three rows
    torch.testing.assert_close(eager.row_stats(logits, y, 0, objective), stats)
