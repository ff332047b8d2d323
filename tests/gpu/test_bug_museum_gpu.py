"""What people reported that only a GPU can show, or that a kernel of its own can get wrong again: on every kernel.

The reports that a CPU can try are in tests/test_bug_museum.py. Liger-Kernel #916 and #47 (an illegal access, N·V beyond
2³¹) are tried by ``test_more_than_two_to_the_31_logits`` of test_kernels_gpu.py, and by test_library_gpu.py.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ref import kernels, linear_cross_entropy
from flce_ref.kernels import cuda
from flce_ref.kernels.cuda import Layout
from tests.kernel_cases import check_case, make_case
from tests.oracle import oracle, problem, relative_error

pytestmark = pytest.mark.gpu
on_every_kernel = pytest.mark.parametrize("kernel", kernels.KERNELS)


def head(dtype: torch.dtype = torch.float32, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    return problem(n=40, d=32, v=1003, dtype=dtype, device="cuda", **options)


def truth_of(x: Tensor, w: Tensor, y: Tensor, upstream: Tensor | None = None, **options: object) -> tuple[Tensor, ...]:
    """Gradients in float64."""
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    loss, _ = oracle(*doubles, y, **options)
    return torch.autograd.grad(loss, doubles, None if upstream is None else upstream.double())


def close(got: tuple[Tensor, ...], true: tuple[Tensor, ...], bound: float = 1e-5) -> None:
    for gradient, truth in zip(got, true, strict=True):
        assert relative_error(gradient, truth) < bound


def test_nvdli_12_a_launch_that_fails_says_so() -> None:
    """Kernels were silently not launched on a T4, and the cells that followed showed what the memory had held.

    https://github.com/NVDLI/notebooks/issues/12
    """
    case = make_case(3, 151552, torch.bfloat16, device="cuda")
    too_much = Layout(threads=512, hold_row=True)  # a row of 296 KiB in the shared memory of one block
    before = case.logits.clone()
    with pytest.raises(Exception, match=r"(?i)shared|resource|invalid|argument|CUDA_ERROR"):
        cuda.cross_entropy_(case.logits, case.target, case.objective, layout=too_much)
    torch.cuda.synchronize()
    assert torch.equal(case.logits.nan_to_num(), before.nan_to_num())
    check_case(cuda.cross_entropy_, case)  # and the next launch is none the worse for it


def test_gpu_puzzles_48_machine_code_for_this_card() -> None:
    """PTX of a version that the driver does not know was refused; machine code of this very card has no such version.

    https://github.com/srush/GPU-Puzzles/issues/48
    """
    driver = importlib.import_module("cuda.bindings.driver")
    kernel = cuda._kernel(0, torch.bfloat16, Layout(), False, False, True)
    handle = getattr(kernel, "handle", None) or kernel._handle
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_BINARY_VERSION
    status, version = driver.cuKernelGetAttribute(attribute, handle, driver.CUdevice(0))
    major, minor = torch.cuda.get_device_capability(0)
    assert (int(status), version) == (0, 10 * major + minor)


@on_every_kernel
def test_liger_968_and_te_2402_upstream_per_token_and_expanded(kernel: str) -> None:
    """Every gradient scaled by the first token's; an upstream gradient of stride 0 read beyond its end.

    https://github.com/linkedin/Liger-Kernel/issues/968, https://github.com/NVIDIA/TransformerEngine/pull/2402
    """
    x, w, y = head()
    for upstream in (torch.linspace(-1, 2, len(y), device="cuda"), torch.tensor(0.7, device="cuda").expand(len(y))):
        loss = linear_cross_entropy(x, w, y, reduction="none", chunk_size=16, kernel=kernel)
        got = torch.autograd.grad(loss, (x, w), upstream)
        close(got, truth_of(x, w, y, upstream, reduction="none"))


@on_every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quack_209_retained_graph(kernel: str, dtype: torch.dtype) -> None:
    """A second backward raised, or doubled silently: raw pointers evade autograd's version counters.

    https://github.com/Dao-AILab/quack/pull/209
    """
    x, w, y = head(dtype)
    for options in ({}, {"accum_dtype": dtype}, {"reduction": "sum"}):
        loss = linear_cross_entropy(x, w, y, chunk_size=16, kernel=kernel, **options)
        first = torch.autograd.grad(loss, (x, w), retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(4 * loss, (x, w))
        assert all(map(torch.equal, first, kept)), "the second backward wrote over the first one's gradients"
        torch.testing.assert_close([gradient / 4 for gradient in second], kept)


@on_every_kernel
def test_liger_272_only_buffers_of_our_own_are_overwritten(kernel: str) -> None:
    """Gradients written in place over what a layer before had saved.

    https://github.com/linkedin/Liger-Kernel/issues/272
    """
    x, w, y = head()
    inputs = [t.detach().clone() for t in (x, w, y)]
    loss = linear_cross_entropy(x.tanh(), w.exp() / 32, y, chunk_size=16, kernel=kernel)
    got = torch.autograd.grad(loss, (x, w))
    assert all(map(torch.equal, inputs, (x, w, y)))
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    loss, _ = oracle(doubles[0].tanh(), doubles[1].exp() / 32, y)
    close(got, torch.autograd.grad(loss, doubles))


@on_every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_liger_1329_and_mlx_4520_confident_tokens(kernel: str, dtype: torch.dtype) -> None:
    """At p = 0.999 a gradient taken from a rounded p is off by 100 %, a loss from rounded logits has no digits left.

    https://github.com/linkedin/Liger-Kernel/issues/1329, https://github.com/ml-explore/mlx/pull/4520
    """
    case = make_case(8, 1003, dtype, device="cuda", scale=0.5)
    valid = case.target != -100
    case.logits[valid, case.target[valid]] = 15.0
    z = case.logits.double()[valid].requires_grad_()
    truth = F.cross_entropy(z, case.target[valid], reduction="none")
    (true,) = torch.autograd.grad(truth.sum(), z)
    assert 0 < truth.max() < 0.002
    row_kernel = importlib.import_module(f"flce_ref.kernels.{kernel}").cross_entropy_
    loss, _ = row_kernel(case.logits, case.target, case.objective)
    torch.testing.assert_close(loss[valid].double(), truth.detach(), rtol=2e-3, atol=0)
    at_target = [t.gather(1, case.target[valid][:, None]) for t in (case.logits[valid].double(), true)]
    torch.testing.assert_close(*at_target, rtol=5e-3, atol=0)


@on_every_kernel
def test_pytorch_116349_and_liger_1338_ignored_rows(kernel: str) -> None:
    """No target at all: NaN under "mean", zero gradients. Under torch.compile ignored rows never wrote their loss.

    https://github.com/pytorch/pytorch/issues/116349, https://github.com/linkedin/Liger-Kernel/pull/1338
    """
    x, w, y = head()

    def losses(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, y, reduction="none", chunk_size=16, kernel=kernel)

    torch._dynamo.reset()
    for call in (losses, torch.compile(losses)):
        torch.full((4096,), float("nan"), device="cuda")  # poison for the allocator to hand out again
        some = y.clone()
        some[::2] = -100
        loss = call(x, w, some)
        assert not loss[::2].any() and (loss[1::2] > 0).all()
    y[:] = -100
    loss = linear_cross_entropy(x, w, y, chunk_size=16, kernel=kernel)
    assert loss.isnan() and not any(g.any() for g in torch.autograd.grad(loss, (x, w)))


@on_every_kernel
def test_prime_rl_3011_a_frozen_head_has_no_gradient_buffer(kernel: str) -> None:
    """A frozen head still cost a (V, D) buffer and a product per chunk.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/3011
    """
    x, w, y = problem(n=64, d=512, v=8192, dtype=torch.bfloat16, device="cuda")
    peaks = []
    for weight in (w, w.detach()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, y, chunk_size=16, kernel=kernel).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        x.grad = w.grad = None
    assert peaks[0] >= 4 * w.numel()  # summed in float32
    assert peaks[1] < 2 * w.numel()
