"""The Triton kernel against float64, on the CPU through Triton's interpreter.

``test_kernels_triton.py`` runs this file in a process of its own: the interpreter must be asked for before Triton is
imported. One by one: ``TRITON_INTERPRET=1 pytest tests/triton_interpreted.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flce_ref import kernels, linear_cross_entropy
from flce_ref.kernels import eager, triton, triton_tiles
from tests.kernel_cases import (
    DTYPES,
    EVERYTHING,
    ONE_BY_ONE,
    SHAPES,
    Case,
    check_case,
    layouts_of,
    make_case,
    run_guarded,
)
from tests.oracle import oracle, problem
from tests.tile_cases import check_tiles


def check_interpreted(case: Case, row_stride: int = 0, offset: int = 0) -> None:
    # The interpreter cuts bfloat16 off where a GPU rounds it: the error is up to a whole unit in the last place.
    rounding = 2 if case.logits.dtype == torch.bfloat16 else 1
    check_case(triton.cross_entropy_, case, row_stride, offset, rounding=rounding)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_shapes_and_dtypes(shape: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(*shape, dtype, **options)
    for row_stride, offset in layouts_of(*shape):
        check_interpreted(case, row_stride, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ONE_BY_ONE, ids=str)
def test_each_option(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_interpreted(make_case(7, 1003, dtype, seed=1, **options))


def test_a_real_vocabulary() -> None:
    check_interpreted(make_case(1, 32000, torch.bfloat16))


@pytest.mark.parametrize("bad", [50, -1, 2**40, -(2**40), 2**62])
def test_a_target_that_is_no_word_is_nan_and_harmless(bad: int) -> None:
    case = make_case(5, 50, torch.bfloat16, weighted=True, label_smoothing=0.1)
    case.target[1] = bad
    loss, lse, dlogits = run_guarded(triton.cross_entropy_, case, row_stride=53)
    assert loss[1].isnan() and lse[1].isnan() and dlogits[1].isnan().all()
    others = torch.arange(5) != 1
    assert loss[others].isfinite().all() and dlogits[others].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weighted": True}], ids=str)
def test_a_common_offset_and_masked_words(options: dict[str, Any]) -> None:
    case = make_case(4, 777, torch.float32, **options)
    case.logits.add_(1e4)
    check_interpreted(case)
    case = make_case(4, 777, torch.float32)
    case.logits[:, 100:500] = float("-inf")
    case.target[case.target != -100] = 7
    check_interpreted(case)


@pytest.mark.parametrize("words", [float("-inf"), float("inf"), float("nan")])
def test_logits_that_are_not_finite_as_in_eager(words: float) -> None:
    case = make_case(2, 40, torch.float32)
    case.logits[0] = words
    fast, slow = (run_guarded(kernel, case) for kernel in (triton.cross_entropy_, eager.cross_entropy_))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_no_rows() -> None:
    loss, lse = triton.cross_entropy_(
        torch.empty(0, 5), torch.empty(0, dtype=torch.int64), make_case(1, 5, torch.float32).objective
    )
    assert loss.shape == lse.shape == (0,)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_through_the_front_door(reduction: str) -> None:
    assert kernels.available()["triton"] == "usable"
    x, w, y = problem(dtype=torch.float32)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}
    loss, lse = linear_cross_entropy(x, w, y, kernel="triton", chunk_size=5, return_lse=True, **options)
    true, true_lse = oracle(x, w, y, **options)
    torch.testing.assert_close(loss, true)
    torch.testing.assert_close(lse, true_lse)
    got, grads = (torch.autograd.grad(a.sum() + b.sum(), (x, w)) for a, b in ((loss, lse), (true, true_lse)))
    torch.testing.assert_close(got, grads)
    with pytest.raises(
        ValueError, match=r"kernel='triton' can't run here: .*float32.*float64; accepted are 'auto' and 'eager'"
    ):
        linear_cross_entropy(x.double(), w.double(), y, kernel="triton")


@pytest.mark.parametrize("shape", ((1, 1), (3, 7), (5, 1000)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"label_smoothing": 0.3}], ids=["plain", "everything", "smoothing"]
)
def test_tiles(shape: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(*shape, dtype, **options)
    for row_stride, offset in layouts_of(*shape):
        check_tiles(triton_tiles, case, 300, row_stride, offset, rounding=2 if dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weighted": True}], ids=str)
def test_tiles_with_a_common_offset_and_of_masked_words(options: dict[str, Any]) -> None:
    case = make_case(4, 777, torch.float32, **options)
    case.logits.add_(1e4)
    check_tiles(triton_tiles, case, 100)
    case = make_case(4, 777, torch.float32)
    case.logits[:, 100:500] = float("-inf")
    case.target[case.target != -100] = 7
    check_tiles(triton_tiles, case, 100)


def test_tiles_through_the_front_door() -> None:
    x, w, y = problem(dtype=torch.float32)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}
    loss = linear_cross_entropy(x, w, y, schedule="vocab_tiled", kernel="triton", chunk_size=5, **options)
    true = oracle(x, w, y, **options)[0]
    torch.testing.assert_close(loss, true)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(true, (x, w)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_scaling(dtype: torch.dtype) -> None:
    values, out = torch.randn(5000), torch.full((5000,), float("nan"), dtype=dtype)
    triton.scale(values, torch.tensor([0.25]), out)
    assert torch.equal(out, (values / 4).to(dtype))
