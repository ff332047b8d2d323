"""The eager kernel against float64, how a kernel is chosen, and how a row is laid out: what needs no GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from flce_ref import explain, functional, kernels, linear_cross_entropy
from flce_ref.kernels import cuda, eager, ops
from flce_ref.kernels.cuda import Layout, choose_layout
from flce_ref.objective import Objective
from tests.kernel_cases import DTYPES, EVERYTHING, ONE_BY_ONE, SHAPES, check_case, layouts_of, make_case, run_guarded

CPU = torch.device("cpu")
# Shared memory per block and per multiprocessor: compute capabilities 7.5, 8.0, 8.6, 9.0, 12.0 (CUDA programming guide,
# table of technical specifications).
GPUS = {(7, 5): (64, 64), (8, 0): (163, 164), (8, 6): (99, 100), (9, 0): (227, 228), (12, 0): (99, 100)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_eager_shapes_and_dtypes(shape: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(*shape, dtype, **options)
    for row_stride, offset in layouts_of(*shape):
        check_case(eager.cross_entropy_, case, row_stride, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ONE_BY_ONE, ids=str)
def test_eager_each_option(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_case(eager.cross_entropy_, make_case(7, 1003, dtype, seed=1, **options))


@pytest.mark.parametrize("vocab_size", [32000, 151552])
def test_eager_real_vocabularies(vocab_size: int) -> None:
    check_case(eager.cross_entropy_, make_case(3, vocab_size, torch.bfloat16, **EVERYTHING))


@pytest.mark.parametrize("bad", [50, -1, 2**40, -(2**40), 2**62])
def test_eager_a_target_that_is_no_word_is_nan_and_harmless(bad: int) -> None:
    case = make_case(5, 50, torch.bfloat16, weighted=True, label_smoothing=0.1)
    case.target[1] = bad
    loss, lse, dlogits = run_guarded(eager.cross_entropy_, case, row_stride=53)
    assert loss[1].isnan() and lse[1].isnan() and dlogits[1].isnan().all()
    others = torch.arange(5) != 1
    assert loss[others].isfinite().all() and dlogits[others].isfinite().all()


def test_eager_a_common_offset() -> None:
    case = make_case(4, 777, torch.float32, label_smoothing=0.1, weighted=True)
    case.logits.add_(1e4)
    check_case(eager.cross_entropy_, case)


def test_every_kernel_is_listed_with_a_reason() -> None:
    states = kernels.available()
    assert tuple(states) == kernels.KERNELS
    assert states["eager"] == "usable"
    if not torch.cuda.is_available():
        assert "CUDA device" in states["cuda"] and kernels.resolve("auto", CPU, torch.float32) == "eager"


def pretend(monkeypatch: pytest.MonkeyPatch, **problems: str | None) -> None:
    """Let kernels have these problems on a CUDA device that is not there."""
    monkeypatch.setattr(kernels, "_import_problem", lambda kernel: None)
    monkeypatch.setattr(kernels, "_launch_problem", lambda kernel, device: problems[kernel])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.parametrize(
    ("cuda_problem", "triton_problem", "dtype", "chosen"),
    [
        (None, None, torch.bfloat16, "cuda"),
        ("no driver", None, torch.bfloat16, "triton"),
        ("no driver", "no compiler", torch.bfloat16, "eager"),
        (None, None, torch.float64, "eager"),
    ],
)
def test_auto_takes_the_first_that_can_run(
    monkeypatch: pytest.MonkeyPatch, cuda_problem: str, triton_problem: str, dtype: torch.dtype, chosen: str
) -> None:
    pretend(monkeypatch, cuda=cuda_problem, triton=triton_problem)
    device = torch.device("cuda", 0)
    assert kernels.resolve("auto", device, dtype) == chosen
    why = kernels.why("auto", device, dtype)
    assert why.startswith(f"kernel {chosen}, the first that can run")
    assert all(reason in why for reason in (cuda_problem, triton_problem) if reason and dtype != torch.float64)
    if chosen != "cuda":
        with pytest.raises(ValueError, match=r"kernel='cuda' can't run here: .*; accepted are 'auto' and .*'eager'"):
            kernels.resolve("cuda", device, dtype)


def test_triton_is_not_asked_for_bfloat16_on_turing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda="no packages", triton=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    chosen = [kernels.resolve("auto", torch.device("cuda", 0), t) for t in (torch.bfloat16, torch.float16)]
    assert chosen == ["eager", "triton"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_kernel_that_cannot_run_is_an_error_only_where_named() -> None:
    x, w, y = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 3])
    for kernel in ("cuda", "triton"):
        with pytest.raises(ValueError, match=f"kernel='{kernel}' can't run here: .*on cpu; accepted are 'auto' and"):
            linear_cross_entropy(x, w, y, kernel=kernel)
    reasons = explain(x, w, y).why
    assert any(r.startswith("kernel eager, the first that can run (cuda: it needs a CUDA device") for r in reasons)
    meta = explain(x.to("meta"), w.to("meta"), y.to("meta"), kernel="cuda")
    assert meta.kernel == "cuda"


def test_logits_with_strided_columns() -> None:
    case = make_case(3, 8, torch.float32)
    strided = case.logits.repeat_interleave(2, dim=1)[:, ::2]
    with pytest.raises(
        ValueError, match=r"kernel='cuda' needs logits whose columns have stride 1, got strides \(16, 2\)"
    ):
        ops.cross_entropy_(strided, case.target, case.objective, "cuda")
    loss, _ = ops.cross_entropy_(strided, case.target, case.objective, "auto")
    expected, _ = eager.cross_entropy_(case.logits, case.target, case.objective)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(strided, case.logits, rtol=0, atol=0, equal_nan=True)


def test_bare_addresses_are_of_the_right_kind() -> None:
    total = torch.tensor(3.0, dtype=torch.float64)
    vector = cuda.vector(total, 1)
    assert vector is not None and vector.dtype == torch.float32 and vector.shape == (1,)
    strided = cuda.vector(torch.arange(10)[::2], 5, torch.int64)
    assert strided is not None and strided.is_contiguous() and strided.tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError, match="expand"):
        cuda.vector(torch.zeros(4), 5)


@pytest.mark.parametrize("capability", GPUS, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("vocab_size", [1, 8, 1000, 32000, 128256, 151552, 201088, 262144, 2**20])
def test_a_layout_fits_its_gpu(capability: tuple[int, int], itemsize: int, vocab_size: int) -> None:
    per_block, per_multiprocessor = (kib * 1024 for kib in GPUS[capability])
    layout = choose_layout(vocab_size, itemsize, capability, per_block, per_multiprocessor)
    assert layout.cluster == 1 or capability >= (9, 0)
    assert layout.threads * layout.min_blocks <= 1536 and layout.threads % 32 == 0
    if layout.hold_row:
        static = 12 * layout.cluster * layout.threads // 32
        held = layout.held_bytes(vocab_size, itemsize)
        assert held * layout.cluster >= vocab_size // (16 // itemsize) * 16
        assert held + static + 1024 <= per_block
        assert layout.min_blocks * (held + static + 1024) <= per_multiprocessor


def test_the_layout_of_the_head_on_hopper() -> None:
    assert choose_layout(151552, 2, (9, 0), 227 * 1024, 228 * 1024) == Layout(4, 256, 3, True, True)


@pytest.mark.parametrize(("chunk_size", "used"), [(None, 640), (1000, 1000)])
def test_skipping_makes_equal_chunks_of_what_is_left(chunk_size: int | None, used: int) -> None:
    x, w = torch.randn(4096, 8, requires_grad=True), torch.randn(10, 8)
    y = torch.randint(0, 10, (4096,))
    y[1100:] = -100
    with mock.patch.object(functional, "fused", wraps=functional.fused) as fused:
        linear_cross_entropy(x, w, y, skip_ignored=True, chunk_size=chunk_size)
    *_, plan = fused.call_args.args
    assert fused.call_args.args[0].shape == (1100, 8) and plan.chunk_size == used


def test_objective_of_another_size_is_refused_by_the_op() -> None:
    logits = torch.randn(2, 5)
    with pytest.raises(RuntimeError):
        eager.cross_entropy_(
            logits, torch.tensor([0, 1]), Objective(5, label_smoothing=0.1, class_weight=torch.ones(4))
        )
