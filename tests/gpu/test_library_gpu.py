"""The library on a CUDA device: same meaning, no synchronisation, the predicted peak, and sizes beyond 2³¹."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from flce_ref import explain, kernels, linear_cross_entropy
from tests.oracle import oracle, problem, relative_error

pytestmark = pytest.mark.gpu
SCHEDULES = ("naive", "chunked", "checkpointed", "fused", "vocab_tiled")
KERNELS = tuple(name for name, state in kernels.available().items() if state == "usable")


def random_head(n: int, v: int, d: int, dtype: torch.dtype = torch.bfloat16):  # type: ignore[no-untyped-def]
    x = torch.randn(n, d, device="cuda", dtype=dtype).requires_grad_()
    w = (torch.randn(v, d, device="cuda", dtype=dtype) * 0.02).requires_grad_()
    return x, w, torch.randint(0, v, (n,), device="cuda")


def true_gradients(x, w, y, **options):  # type: ignore[no-untyped-def]
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    loss = oracle(*doubles, y, **options)[0]
    return loss, torch.autograd.grad(loss.sum(), doubles)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_combinations_match_the_definition(schedule: str, reduction: str) -> None:
    for ignore, smoothing, z_loss, cap, weighted in itertools.product(
        (-100, 3), (0.0, 0.1), (0.0, 0.01), (None, 2.0), (0, 1)
    ):
        x, w, y = problem(device="cuda")
        y[2] = ignore
        weight = torch.rand(17, device="cuda", dtype=torch.float64) if weighted else None
        options = {"reduction": reduction, "ignore_index": ignore, "label_smoothing": smoothing, "z_loss": z_loss,
                   "softcap": cap, "weight": weight}  # fmt: skip
        size = {} if schedule == "naive" else {"chunk_size": 5}
        loss = linear_cross_entropy(x, w, y, schedule=schedule, **size, **options)
        truth = oracle(x, w, y, **options)[0]
        up = torch.randn_like(truth)
        torch.testing.assert_close(loss, truth)
        got, true = (torch.autograd.grad((value * up).sum(), (x, w)) for value in (loss, truth))
        torch.testing.assert_close(got, true)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}, {"reduction": "none"}]
)
def test_no_worse_than_plain_pytorch(kernel: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    x, w, y = random_head(500, 5003, 256, dtype)
    y[::7] = -100
    true_loss, true = true_gradients(x, w, y, **options)
    plain_loss = linear_cross_entropy(x, w, y, schedule="naive", **options)
    plain = torch.autograd.grad(plain_loss.sum(), (x, w))
    loss = linear_cross_entropy(x, w, y, kernel=kernel, chunk_size=128, **options)
    grads = torch.autograd.grad(loss.sum(), (x, w))
    assert relative_error(loss, true_loss) <= relative_error(plain_loss, true_loss) + 1e-6
    for got, plain_grad, truth in zip(grads, plain, true, strict=True):
        assert relative_error(got, truth) <= 1.1 * relative_error(plain_grad, truth) + 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("bad", [97, -1, 2**40, -(2**40)])
def test_a_target_outside_the_vocabulary_is_nan_and_harmless(schedule: str, reduction: str, bad: int) -> None:
    x, w, y = random_head(40, 97, 32)
    y[5] = bad
    loss = linear_cross_entropy(x, w, y, schedule=schedule, reduction=reduction)
    dx, dw = torch.autograd.grad(loss.sum(), (x, w))
    torch.cuda.synchronize()
    assert loss.sum().isnan() and dx[5].isnan().all() and dw.isnan().all()
    fine = torch.arange(40, device="cuda") != 5
    if reduction == "none":
        assert loss[fine].isfinite().all() and dx[fine].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_waits_for_the_device_and_graphs_can_be_captured(kernel: str) -> None:
    x, w, y = random_head(300, 1000, 64)

    def step() -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy(x, w, y, kernel=kernel, chunk_size=128, label_smoothing=0.1)
        # Detached: a graph kept alive from before the capture would tie it to the stream of that time.
        return loss.detach(), *torch.autograd.grad(loss * 3, (x, w))

    expected = step()  # compiles what is compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
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
    assert not torch.equal(captured[1], expected[1])
    with pytest.raises(RuntimeError, match="skip_ignored"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_cross_entropy(x, w, y, skip_ignored=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x, w, y = random_head(256, 1000, 64, torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        loss = linear_cross_entropy(x, w, y, chunk_size=64)
        plain = F.cross_entropy(F.linear(x, w), y)
    assert loss.dtype == torch.float32
    _, true = true_gradients(x, w, y)
    scale = 1024.0
    for got, plain_grad, truth in zip(
        torch.autograd.grad(loss * scale, (x, w)), torch.autograd.grad(plain * scale, (x, w)), true, strict=True
    ):
        assert got.dtype == torch.float32
        assert relative_error(got / scale, truth) <= 1.1 * relative_error(plain_grad / scale, truth)


def test_compiled_by_inductor() -> None:
    x, w, y = random_head(300, 1000, 64)
    torch._dynamo.reset()
    step = torch.compile(lambda x, w, y: linear_cross_entropy(x.tanh(), w, y, chunk_size=128), fullgraph=True)
    results = []
    for call in (step, lambda x, w, y: linear_cross_entropy(x.tanh(), w, y, chunk_size=128)):
        loss = call(x, w, y)
        results.append((loss.detach(), *torch.autograd.grad(loss * 2, (x, w))))
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize(("options"), [{"schedule": "naive"}, {"schedule": "chunked", "chunk_size": 1024},
    {"schedule": "checkpointed", "chunk_size": 1024}, {}, {"chunk_size": 1024}, {"accum_dtype": torch.bfloat16},
    {"reduction": "none"}], ids=str)  # fmt: skip
def test_the_peak_is_the_predicted_one(options: dict[str, object]) -> None:
    x, w, y = random_head(8192, 151552, 2048)

    def step() -> None:
        loss = linear_cross_entropy(x, w, y, **options)
        (loss.sum() if loss.ndim else loss).backward()
        x.grad = w.grad = None

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    # The eager kernel's float32 blocks come on top where it is the one that runs.
    assert measured == pytest.approx(explain(x, w, y, **options).step_peak_bytes, rel=0.02, abs=2**26)


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_two_to_the_31_logits_in_one_buffer(kernel: str) -> None:
    n, v, d = 14336, 151552, 128
    assert n * v > 2**31
    x, w, y = random_head(n, v, d)
    whole = linear_cross_entropy(x, w, y, chunk_size=n, kernel=kernel)
    parts = linear_cross_entropy(x, w, y, chunk_size=1024, kernel=kernel)
    torch.testing.assert_close(whole, parts)
    for a, b in zip(torch.autograd.grad(whole, (x, w)), torch.autograd.grad(parts, (x, w)), strict=True):
        assert relative_error(a, b) < 1e-2
        assert relative_error(a[-64:], b[-64:]) < 1e-2


def test_the_largest_vocabulary() -> None:
    x, w, y = random_head(64, 262144, 128)
    y[:2] = torch.tensor([262143, 0])
    true_loss, true = true_gradients(x, w, y)
    loss = linear_cross_entropy(x, w, y)
    plain = F.cross_entropy(F.linear(x, w), y)
    assert abs(loss - true_loss) <= abs(plain - true_loss) + 1e-5
    for got, base, truth in zip(
        torch.autograd.grad(loss, (x, w)), torch.autograd.grad(plain, (x, w)), true, strict=True
    ):
        assert relative_error(got, truth) <= 1.1 * relative_error(base, truth)
