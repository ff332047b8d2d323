"""Every row kernel on a CUDA device against float64: sizes, strides, options, bad targets, streams, graphs, 64 bits.

Buffers lie between red zones (``tests/kernel_cases.py``). For the tools of the CUDA toolkit see
``tests/gpu/sanitize.sh``.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from flce_ref import explain, kernels, linear_cross_entropy
from flce_ref.kernels import cuda, eager, ops
from flce_ref.kernels.cuda import Layout
from tests.kernel_cases import (
    DTYPES,
    EVERYTHING,
    ONE_BY_ONE,
    RowKernel,
    check_case,
    check_gradient,
    check_within,
    layouts_of,
    make_case,
    run_guarded,
    truth,
)

pytestmark = pytest.mark.gpu

SHAPES = ((1, 1), (3, 7), (2, 8), (5, 1000), (9, 4099), (17, 32000), (5, 151552), (3, 262144))
ALIGNED_AND_NOT = ((5, 1000), (9, 4099), (5, 151552))


@pytest.fixture(params=kernels.KERNELS)
def kernel(request: pytest.FixtureRequest) -> RowKernel:
    """Each kernel. One that cannot run on this GPU fails here: on the machines where these tests run all three must."""
    state = kernels.available()[request.param]
    assert state == "usable", f"{request.param}: {state}"
    row_kernel: RowKernel = importlib.import_module(f"flce_ref.kernels.{request.param}").cross_entropy_
    return row_kernel


def name_of(kernel: RowKernel) -> str:
    return kernel.__module__.rpartition(".")[2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_shapes_and_dtypes(
    kernel: RowKernel, shape: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = make_case(*shape, dtype, device="cuda", **options)
    for row_stride, offset in layouts_of(*shape):
        check_case(kernel, case, row_stride, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ONE_BY_ONE, ids=str)
def test_each_option(kernel: RowKernel, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_case(kernel, make_case(7, 4099, dtype, device="cuda", seed=1, **options), row_stride=4101, offset=1)


@pytest.mark.parametrize("seed", range(3))
def test_fresh_rows_of_the_head(kernel: RowKernel, seed: int) -> None:
    check_case(kernel, make_case(131, 151552, torch.bfloat16, device="cuda", seed=seed, scale=1.0 + 3 * seed))


def test_4096_rows(kernel: RowKernel) -> None:
    check_case(kernel, make_case(4096, 32001, torch.bfloat16, device="cuda", label_smoothing=0.1))


LAYOUTS = [
    Layout(cluster, threads, 1, hold_row, bulk)
    for cluster in (1, 2, 4, 8)
    for threads in (128, 512, 1024)
    for hold_row, bulk in ((False, False), (True, False), (True, True))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_of_the_cuda_kernel(layout: Layout) -> None:
    if (layout.cluster > 1 or layout.bulk_copy) and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters and bulk copies need compute capability 9.0")
    for shape in ALIGNED_AND_NOT:
        if layout.held_bytes(shape[1], 2) > torch.cuda.get_device_properties(0).shared_memory_per_block_optin - 4096:
            continue
        for options in ({}, EVERYTHING):
            case = make_case(*shape, torch.bfloat16, device="cuda", **options)
            for row_stride, offset in layouts_of(*shape):
                check_case(cuda.cross_entropy_, case, row_stride, offset, layout=layout)


@pytest.mark.parametrize("bad", ["V", -1, 2**31, 2**40, -(2**40), 2**62, -(2**63)])
@pytest.mark.parametrize("vocab_size", [50, 151552])
def test_a_target_that_is_no_word_is_nan_and_harmless(kernel: RowKernel, bad: int | str, vocab_size: int) -> None:
    case = make_case(5, vocab_size, torch.bfloat16, device="cuda", weighted=True, label_smoothing=0.1)
    case.target[1] = vocab_size if bad == "V" else bad
    loss, lse, dlogits = run_guarded(kernel, case, row_stride=vocab_size + 3)
    assert loss[1].isnan() and lse[1].isnan() and dlogits[1].isnan().all()
    others = torch.arange(5, device="cuda") != 1
    assert loss[others].isfinite().all() and dlogits[others].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weighted": True}], ids=str)
def test_a_common_offset_and_masked_words(kernel: RowKernel, options: dict[str, Any]) -> None:
    case = make_case(4, 7777, torch.float32, device="cuda", **options)
    case.logits.add_(1e4)
    check_case(kernel, case)
    case = make_case(4, 7777, torch.float32, device="cuda")
    case.logits[:, 100:5000] = float("-inf")
    case.target[case.target != -100] = 7
    check_case(kernel, case)


@pytest.mark.parametrize("softcap", [0.3, 30.0, 1000.0])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 60.0), (torch.float16, 10.0), (torch.float32, 3.0)], ids=str
)
def test_soft_caps(kernel: RowKernel, softcap: float, dtype: torch.dtype, scale: float) -> None:
    """Logits far below the cap, about it and far above."""
    check_case(kernel, make_case(7, 32000, dtype, device="cuda", softcap=softcap, scale=scale))


@pytest.mark.parametrize("words", [float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_that_are_not_finite_as_in_eager(kernel: RowKernel, words: float, softcap: float | None) -> None:
    for place in (slice(None), slice(39, 40)):
        case = make_case(2, 4000, torch.float32, device="cuda", softcap=softcap)
        case.logits[0, place] = words
        fast, slow = (run_guarded(k, case) for k in (kernel, eager.cross_entropy_))
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_no_rows(kernel: RowKernel) -> None:
    objective = make_case(1, 5, torch.float32).objective
    nothing = torch.zeros(0, 5, device="cuda"), torch.zeros(0, dtype=torch.int64, device="cuda")
    loss, lse = kernel(*nothing, objective)
    assert loss.shape == lse.shape == (0,)


def test_the_same_bits_every_time(kernel: RowKernel) -> None:
    case = make_case(64, 151552, torch.bfloat16, device="cuda", **EVERYTHING)
    first, *others = (run_guarded(kernel, case) for _ in range(3))
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_more_than_two_to_the_31_logits(kernel: RowKernel) -> None:
    rows, vocab_size = 14336, 151552
    assert rows * vocab_size > 2**31
    logits = torch.randn(rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    case = make_case(8, vocab_size, torch.bfloat16, device="cuda", seed=5)
    target = torch.randint(0, vocab_size, (rows,), device="cuda")
    for place in (slice(0, 8), slice(rows - 8, rows)):  # the truth is known for the first rows and the last ones
        logits[place], target[place] = case.logits, case.target
    loss, lse = kernel(logits, target, case.objective)
    true_loss, true_lse, true_grad, size = truth(case)
    for place in (slice(0, 8), slice(rows - 8, rows)):
        check_within(loss[place], true_loss, 4e-6 * (1 + true_loss.abs()), "loss")
        check_within(lse[place], true_lse, 1e-6 * (1 + true_lse.abs()), "lse")
        check_gradient(logits[place], true_grad, size)
    # Elsewhere: the gradient of every row sums to 0 but for roundings.
    assert all(part.float().sum(1).abs().max() < 0.05 for part in logits.split(1024))


def test_it_runs_on_the_current_stream(kernel: RowKernel) -> None:
    case = make_case(33, 32000, torch.bfloat16, device="cuda")
    expected = run_guarded(kernel, case)
    logits = torch.zeros_like(case.logits)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 30 ms: a launch on another stream would see zeros
        logits.copy_(case.logits)
        loss, lse = kernel(logits, case.target, case.objective)
        doubled = loss * 2
    side.synchronize()
    for got, true in zip((loss, lse, logits), expected, strict=True):
        assert torch.equal(got, true)
    assert torch.equal(doubled, expected[0] * 2)


def test_a_captured_launch_can_be_replayed(kernel: RowKernel) -> None:
    cases = [make_case(33, 32000, torch.bfloat16, device="cuda", seed=s, **EVERYTHING) for s in (0, 1)]
    expected = [run_guarded(kernel, case) for case in cases]
    logits, target = cases[0].logits.clone(), cases[0].target.clone()
    weight, grad_loss, grad_lse = (
        t.clone() for t in (cases[0].objective.class_weight, cases[0].grad_loss, cases[0].grad_lse)
    )
    objective = cases[0].objective.__class__(**{**vars(cases[0].objective), "class_weight": weight})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, lse = ops.cross_entropy_(logits, target, objective, name_of(kernel), True, grad_loss, grad_lse)
    for case, true in zip(cases, expected, strict=True):
        for buffer, values in (
            (logits, case.logits), (target, case.target), (weight, case.objective.class_weight),
            (grad_loss, case.grad_loss), (grad_lse, case.grad_lse),
        ):  # fmt: skip
            buffer.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip((loss, lse, logits), true, strict=True))


def test_a_device_that_is_not_the_current_one(kernel: RowKernel) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case(9, 4099, torch.bfloat16, device="cuda:1", **EVERYTHING)
    assert torch.cuda.current_device() == 0
    check_case(kernel, case)


def test_the_registered_op(kernel: RowKernel) -> None:
    case = make_case(4, 40, torch.float32, device="cuda")
    o = case.objective
    torch.library.opcheck(
        torch.ops.flce_ref.cross_entropy_.default,
        (case.logits, case.target, None, None, None, o.ignore_index, 0.0, 0.0, None, True, name_of(kernel)),
    )


def test_which_kernel_runs() -> None:
    x, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (32, 100))
    y = torch.randint(0, 100, (32,), device="cuda")
    answer = explain(x, w, y)
    assert answer.kernel == "cuda" and "kernel cuda, the first that can run" in answer.why
    assert explain(x.double(), w.double(), y).kernel == "eager"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert explain(x.float(), w.float(), y).kernel == "cuda"
    with pytest.raises(ValueError, match=r"kernel='cuda' can't run here: it computes in float32.*float64"):
        linear_cross_entropy(x.double(), w.double(), y, kernel="cuda")


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_half_of_the_tokens_ignored_and_skipped(name: str) -> None:
    x, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (300, 1000))
    y = torch.randint(0, 1000, (300,), device="cuda")
    y[::2] = -100
    results = []
    for skip in (False, True):
        loss, lse = linear_cross_entropy(x, w, y, kernel=name, skip_ignored=skip, return_lse=True, chunk_size=300)
        results.append((loss.detach(), lse.detach(), *torch.autograd.grad(loss, (x, w))))
    assert (results[1][1][::2] == 0).all() and (results[1][2][::2] == 0).all()
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("count", [1, 7, 8, 4095, 4097, 1_000_003])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [(torch.float32, dtype) for dtype in kernels.FAST_DTYPES]
    + [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_the_scaling(name: str, count: int, source: torch.dtype, dtype: torch.dtype) -> None:
    # A red zone of 64 NaN on either side; 128 bytes and more keep the middle aligned, as every whole tensor is.
    zone = torch.full((count + 128,), float("nan"), device="cuda", dtype=source)
    values = zone[64 : 64 + count].copy_(torch.randn(count, device="cuda"))
    factor = torch.tensor([0.3721], device="cuda")
    true = (values.double() * factor.double()).to(dtype)
    target = zone if dtype == source else torch.full((count + 128,), float("nan"), device="cuda", dtype=dtype)
    out = target[64 : 64 + count]
    kernels.scale(values, factor, out, name)
    torch.testing.assert_close(out, true, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)
    assert (out != true).float().mean() < (1 if dtype == torch.float32 else 0.01)  # one rounding, float32's aside
    assert target[:64].isnan().all() and target[64 + count :].isnan().all()


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_the_scaling_of_what_the_kernels_do_not_take(name: str) -> None:
    factor = torch.tensor([0.5], device="cuda")
    odd = torch.arange(9.0, device="cuda")[1:]  # an address that is no multiple of 16
    strided = torch.arange(16.0, device="cuda").reshape(4, 4).T
    for values in (odd, strided, torch.arange(4.0, device="cuda", dtype=torch.float64), odd[:0]):
        out = torch.empty_like(values)
        kernels.scale(values, factor.to(values.dtype), out, name if values.dtype != torch.float64 else "auto")
        assert torch.equal(out, values / 2)
