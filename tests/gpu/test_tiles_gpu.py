"""Tiles of the vocabulary on a CUDA device: every kernel's functions against float64, and the schedule made of them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from flce_ref import explain, kernels, linear_cross_entropy
from flce_ref.kernels import cuda_tiles, eager
from flce_ref.objective import GradCoefficients, RowStats, stats_of_nothing
from tests.gpu.test_library_gpu import random_head, true_gradients
from tests.kernel_cases import DTYPES, EVERYTHING, ONE_BY_ONE, layouts_of, make_case
from tests.oracle import relative_error
from tests.tile_cases import check_tiles, run_tiles

pytestmark = pytest.mark.gpu

SHAPES = ((1, 1), (3, 7), (2, 8), (5, 1000), (9, 4099), (17, 32000), (5, 151552))
TILED: dict[str, Any] = {"schedule": "vocab_tiled"}


@pytest.fixture(params=("cuda_tiles", "triton_tiles", "eager"))
def module(request: pytest.FixtureRequest) -> ModuleType:
    """The functions for tiles of each kernel. One that cannot run on this GPU fails here."""
    name = request.param.removesuffix("_tiles")
    state = kernels.available()[name]
    assert state == "usable", f"{name}: {state}"
    return importlib.import_module(f"flce_ref.kernels.{request.param}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_shapes_and_dtypes(module: ModuleType, shape: tuple[int, int], dtype: torch.dtype, options: Any) -> None:
    case = make_case(*shape, dtype, device="cuda", **options)
    for row_stride, offset in layouts_of(*shape):
        check_tiles(module, case, min(shape[1], 4096), row_stride, offset)


@pytest.mark.parametrize("width", [1, 5, 127, 128, 1000, 1024, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths(module: ModuleType, width: int, dtype: torch.dtype) -> None:
    check_tiles(module, make_case(7, 33 * width + 5 if width < 1000 else 33000, dtype, device="cuda"), width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ONE_BY_ONE, ids=str)
def test_each_option(module: ModuleType, dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(7, 4099, dtype, device="cuda", seed=1, **options)
    check_tiles(module, case, 1000, row_stride=4101, offset=1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weighted": True}], ids=str)
def test_a_common_offset_and_masked_words(module: ModuleType, options: dict[str, Any]) -> None:
    case = make_case(4, 7777, torch.float32, device="cuda", **options)
    case.logits.add_(1e4)
    check_tiles(module, case, 1024)
    case = make_case(4, 7777, torch.float32, device="cuda")
    case.logits[:, 100:5000] = float("-inf")  # whole tiles of masked words, and one half of it
    case.target[case.target != -100] = 7
    check_tiles(module, case, 1024)


@pytest.mark.parametrize("words", [float("-inf"), float("inf"), float("nan")])
def test_logits_that_are_not_finite_as_in_eager(module: ModuleType, words: float) -> None:
    for place in (slice(None), slice(39, 40)):
        case = make_case(2, 4000, torch.float32, device="cuda")
        case.logits[0, place] = words
        fast, slow = (run_tiles(m, case, 900) for m in (module, eager))
        for a, b in zip(fast[:3], slow[:3], strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_more_than_two_to_the_31_logits_in_a_tile(module: ModuleType) -> None:
    rows, width = 2**20 + 3, 2049
    assert rows * width > 2**31
    tile = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    case = make_case(8, width, torch.bfloat16, device="cuda")
    target = torch.randint(0, width, (rows,), device="cuda")
    tile[-8:], target[-8:] = case.logits, case.target
    few = tile[-8:].clone()
    results = []
    for t, y in ((tile, target), (few, target[-8:])):
        stats = stats_of_nothing(len(y), False, torch.float32, t.device)
        module.merge_stats_(stats, t, y, 0, case.objective)
        ones = torch.ones(len(y), device="cuda")
        module.write_grad_(t, y, 0, stats, GradCoefficients(ones, ones, 0 * ones), case.objective)
        results.append([*(s[-8:] for s in stats[:3]), t[-8:]])
    # Not to the last bit: rows that start elsewhere are cut into vectors elsewhere, and added up in another order.
    for many, alone in zip(*results, strict=True):
        rounding = 2**-7 if many.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(many, alone, rtol=rounding, atol=1e-6, equal_nan=True)


def test_statistics_that_a_kernel_cannot_write_to_are_refused() -> None:
    case = make_case(4, 100, torch.bfloat16, device="cuda")
    column = torch.zeros(4, 2, device="cuda")[:, 0]
    for wrong in (column, column.double().contiguous()):
        with pytest.raises(ValueError, match="statistics must be contiguous float32"):
            cuda_tiles.merge_stats_(
                RowStats(wrong, *(column.contiguous() for _ in range(2)), None), case.logits, case.target, 0,
                case.objective,
            )  # fmt: skip


@pytest.mark.parametrize("kernel", kernels.KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}, {"reduction": "none"}], ids=str
)
def test_no_worse_than_plain_pytorch(kernel: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    x, w, y = random_head(500, 5003, 256, dtype)
    y[::7] = -100
    true_loss, true = true_gradients(x, w, y, **options)
    plain_loss = linear_cross_entropy(x, w, y, schedule="naive", **options)
    plain = torch.autograd.grad(plain_loss.sum(), (x, w))
    loss = linear_cross_entropy(x, w, y, kernel=kernel, chunk_size=1000, **TILED, **options)
    grads = torch.autograd.grad(loss.sum(), (x, w))
    assert relative_error(loss, true_loss) <= relative_error(plain_loss, true_loss) + 1e-6
    for got, plain_grad, truth in zip(grads, plain, true, strict=True):
        assert relative_error(got, truth) <= 1.1 * relative_error(plain_grad, truth) + 1e-6


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_nothing_waits_for_the_device_and_graphs_can_be_captured(kernel: str) -> None:
    x, w, y = random_head(300, 1000, 64)
    options = {**TILED, "kernel": kernel, "chunk_size": 300}

    def step(**more: Any) -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy(x, w, y, label_smoothing=0.1, **options, **more)
        return loss.detach(), *torch.autograd.grad(loss * 3, (x, w))

    step()  # compiles what is compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            step(filter_eps=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, step())
    with pytest.raises(RuntimeError, match="filter_eps"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_cross_entropy(x, w, y, **TILED, filter_eps=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x, w, y = random_head(256, 1000, 64, torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        loss = linear_cross_entropy(x, w, y, chunk_size=300, **TILED)
        plain = linear_cross_entropy(x, w, y, schedule="naive")
    _, true = true_gradients(x, w, y)
    for got, plain_grad, truth in zip(
        torch.autograd.grad(loss, (x, w)), torch.autograd.grad(plain * len(y), (x, w)), true, strict=True
    ):  # plain PyTorch at a loss scale that makes its dlogits as large: p, not p / N, which float16 can't hold
        assert got.dtype == torch.float32
        assert relative_error(got, truth) <= 2 * relative_error(plain_grad / len(y), truth)


def test_filtering_leaves_out_what_is_small() -> None:
    """Most tokens are sure of one word: what is left out is bounded by eps, and the rest is exact."""
    n, v, d, eps = 2000, 8192, 256, 2**-12
    w = torch.nn.functional.normalize(torch.randn(v, d, device="cuda")).requires_grad_()
    y = torch.randint(0, v, (n,), device="cuda")
    x = (12 * w.detach()[y] + 0.05 * torch.randn(n, d, device="cuda")).requires_grad_()
    results = []
    for more in ({}, {"filter_eps": eps}):
        loss = linear_cross_entropy(x, w, y, reduction="sum", chunk_size=512, **TILED, **more)
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, w))))
    exact, filtered = results
    assert torch.equal(exact[0], filtered[0])
    for a, b in zip(exact[1:], filtered[1:], strict=True):
        assert 1e-6 < relative_error(b, a) < 0.1


def test_the_targets_of_the_head() -> None:
    """N = 8192 tokens of a (151552, 2048) head in bfloat16 take no more than 0.75 GiB above the inputs."""
    x, w, y = random_head(8192, 151552, 2048)

    def step() -> None:
        linear_cross_entropy(x, w, y, **TILED).backward()
        x.grad = w.grad = None

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    predicted = explain(x, w, y, **TILED).step_peak_bytes
    assert predicted is not None and measured == pytest.approx(predicted, rel=0.01)
    assert measured <= 0.75 * 2**30
