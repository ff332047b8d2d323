"""The vocabulary cut into tiles: what only this schedule does, and the gradients that its filter leaves out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_ref import explain, linear_cross_entropy
from flce_ref.memory import head_inputs, simulate
from flce_ref.objective import Objective
from flce_ref.schedules import filtering
from flce_ref.schedules.filtering import rows_that_need
from flce_ref.schedules.plan import Plan, default_tile_width
from tests.oracle import oracle, problem, relative_error

tiled = partial(linear_cross_entropy, schedule="vocab_tiled")
EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}


@pytest.mark.parametrize("width", [1, 4, 17, 50])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_upstream_gradients_of_loss_and_lse(width: int, reduction: str) -> None:
    x, w, y = problem()
    b, weight = torch.randn(17, dtype=torch.float64, requires_grad=True), torch.rand(17, dtype=torch.float64)
    options = {"linear_bias": b, "weight": weight, "reduction": reduction, **EVERYTHING}
    got, true = tiled(x, w, y, chunk_size=width, return_lse=True, **options), oracle(x, w, y, **options)
    torch.testing.assert_close(got, true)
    up = [torch.randn_like(t) for t in true]
    for which in ((0,), (1,), (0, 1)):
        grads = [torch.autograd.grad([o[i] for i in which], (x, w, b), [up[i] for i in which], retain_graph=True)
                 for o in (got, true, got)]  # fmt: skip
        torch.testing.assert_close(grads[0], grads[1])
        assert all(torch.equal(first, second) for first, second in zip(grads[0], grads[2]))


def test_changing_the_returned_lse_changes_no_gradient() -> None:
    x, w, y = problem()
    loss, lse = tiled(x, w, y, z_loss=0.1, return_lse=True)
    expected = torch.autograd.grad(loss, (x, w), retain_graph=True)
    lse.detach().zero_()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, (x, w)), expected))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: str) -> None:
    x, w, y = problem()
    hidden, factor = x * 1.0, torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss = (factor * tiled(hidden, w, y, reduction=reduction)).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    for wanted in (x, w, factor):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.square().sum() + loss, wanted, retain_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_worse_than_plain_pytorch(dtype: torch.dtype) -> None:
    x, w, y = (t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in problem(300, 64, 1000))
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    true = torch.autograd.grad(oracle(*doubles, y)[0], doubles)
    plain = torch.autograd.grad(linear_cross_entropy(x, w, y, schedule="naive"), (x, w))
    for got, base, truth in zip(torch.autograd.grad(tiled(x, w, y, chunk_size=128), (x, w)), plain, true):
        assert relative_error(got, truth) <= 1.05 * relative_error(base, truth) + 1e-7


def test_float16_neither_underflows_nor_overflows() -> None:
    """1/N of 40,000 tokens is nearly lost in float16; unscaled, their sum for one word passes 65504."""
    n = 40_000
    x = torch.full((n, 2), 3.0, dtype=torch.float16, requires_grad=True)
    w = torch.tensor([[0.0, 0], [1, 1], [1, -1]], dtype=torch.float16, requires_grad=True)
    y = torch.zeros(n, dtype=torch.int64)
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    for reduction, width in (("mean", 2), ("mean", 3)):
        grads = torch.autograd.grad(tiled(x, w, y, reduction=reduction, chunk_size=width), (x, w))
        true = torch.autograd.grad(oracle(*doubles, y, reduction=reduction)[0], doubles)
        assert relative_error(grads[1], true[1]) < 1e-3
        assert relative_error(grads[0], true[0]) < 1e-2  # stored in float16, dx has few digits left itself


@pytest.mark.parametrize("v", [1, 2, 100, 1024, 1025, 32_000, 50_257, 151_552, 262_144])
@pytest.mark.parametrize("d", [64, 2048, 7168])
@pytest.mark.parametrize("n", [0, 1, 256, 8192, 1_048_576])
def test_the_default_width(n: int, v: int, d: int) -> None:
    width = default_tile_width(n, v, d)
    tiles, widest = -(-v // width), max(1024, 2 * d, v * d // (16 * max(1, n)))
    assert 1 <= width <= v and (width == v or width % 128 == 0)
    assert width <= widest + 127 and tiles <= -(-v // widest) and (tiles - 1) * width < v


@pytest.mark.parametrize(("n", "tiles"), [(64, 1), (256, 2), (1024, 8), (4096, 32), (8192, 37), (65_536, 37)])
def test_few_tokens_have_few_tiles_which_are_hardly_seen(n: int, tiles: int) -> None:
    v, d = 151_552, 2048
    width = default_tile_width(n, v, d)
    assert -(-v // width) == tiles
    assert width <= 2 * d or n * width <= 1.01 * v * d / 16


def test_the_step_peak_of_the_head() -> None:
    """At most 0.75 GiB, of which the two gradients are 0.61."""
    inputs = head_inputs(8192, 151_552, 2048)
    timeline = simulate(tiled, *inputs)
    assert timeline.step_peak_bytes <= 0.75 * 2**30
    assert explain(*inputs, schedule="vocab_tiled").step_peak_bytes == pytest.approx(timeline.step_peak_bytes, rel=1e-3)
    assert [name for name, _ in timeline.alive_at_peak()][:5] == [
        "dw (returned)", "linear_weight", "buffer for a tile of logits", "dx", "input",
    ]  # fmt: skip


def test_it_says_what_would_run() -> None:
    x, w, y = problem(dtype=torch.float32)
    answer = str(explain(x, w, y, schedule="vocab_tiled", chunk_size=8, filter_eps=0.01))
    assert "schedule vocab_tiled, kernel eager, tiles of 8 words" in answer and "highest possible" in answer


# ---------------------------------------------------------------- the filter


def needed_by_definition(x: Tensor, w: Tensor, y: Tensor, eps: float, width: int, **options: Any) -> Tensor:
    """(N, V) whether a token's gradient at a word is formed."""
    logits = x @ w.T
    softcap = options.get("softcap")
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    p = logits.softmax(1)
    tile = torch.arange(len(w)) // width
    highest = torch.stack([p[:, tile == t].amax(1) for t in tile.unique()])
    needed = highest >= eps
    valid = y != -100
    needed[y[valid] // width, valid.nonzero()[:, 0]] = True
    return (needed & valid).T[:, tile]


@pytest.mark.parametrize("nearly_all", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_what_is_left_out_and_nothing_else(
    nearly_all: float, width: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtering, "NEARLY_ALL", nearly_all)
    x, w, y = problem(40, 6, 17, ignored=(2, 9))
    eps = 0.15
    needed = needed_by_definition(x, w, y, eps, width, **options)
    if nearly_all < 1:
        needed = torch.where((needed.sum(0) > nearly_all * len(y))[None], True, needed)
    assert 0.1 < needed.double().mean() < 0.95 or nearly_all == 0
    logits = (x @ w.T).detach().requires_grad_()
    eye = torch.eye(17, dtype=torch.float64)
    (dlogits,) = torch.autograd.grad(oracle(logits, eye, y, **options)[0], logits)
    dlogits = dlogits * needed
    b = torch.zeros(17, dtype=torch.float64, requires_grad=True)
    loss = tiled(x, w, y, linear_bias=b, chunk_size=width, filter_eps=eps, **options)
    torch.testing.assert_close(loss, oracle(x, w, y, **options)[0])  # the loss is exact
    dx, dw, db = torch.autograd.grad(loss, (x, w, b))
    torch.testing.assert_close((dx, dw, db), (dlogits @ w, dlogits.T @ x, dlogits.sum(0)))


def test_rows_that_need_a_tile() -> None:
    objective, plan = Objective(6), Plan(2, torch.float32, "eager", filter_eps=0.1)
    lse, nan = torch.zeros(5), float("nan")
    highest = torch.tensor([[0.5, 0.01, 0.01, 0.5, nan], [0.01, 0.01, 0.5, 0.5, nan], [0.1001, 0.01, 0.01, 0.5, nan]])
    target = torch.tensor([0, 5, 2, -100, 0])
    first, second, third = rows_that_need(highest.log(), lse, target, objective, plan)
    assert [t is not None and t.tolist() for t in (first, second, third)] == [[0, 4], [2, 4], [0, 1, 4]]
    everyone = rows_that_need(torch.zeros(3, 5), lse, torch.tensor([0, 5, 2, 0, 0]), objective, plan)
    assert everyone == [None] * 3


def test_nothing_is_left_out_of_a_simulation() -> None:
    inputs = head_inputs(1024, 4096, 64)
    options: dict[str, Any] = {"chunk_size": 1024}
    exact = simulate(partial(tiled, **options), *inputs).step_peak_bytes
    assert simulate(partial(tiled, filter_eps=0.1, **options), *inputs).step_peak_bytes == pytest.approx(exact, rel=0.1)
    most = explain(*inputs, schedule="vocab_tiled", filter_eps=0.1, **options).step_peak_bytes
    assert most is not None and most > exact


def test_compiled_it_is_refused_as_a_whole_and_left_to_eager_otherwise() -> None:
    x, w, y = problem(dtype=torch.float32)
    step = partial(tiled, chunk_size=5, filter_eps=0.05)
    torch._dynamo.reset()
    # PyTorch 2.8 names the type of the error only.
    with pytest.raises(Exception, match=r"filter_eps reads from the device|ExceptionVariable.*RuntimeError"):
        torch.compile(step, backend="eager", fullgraph=True)(x, w, y)
    torch._dynamo.reset()
    results = [(loss, *torch.autograd.grad(loss, (x, w))) for call in (step, torch.compile(step, backend="eager"))
               for loss in [call(x, w, y)]]  # fmt: skip
    torch.testing.assert_close(*results)


def test_without_a_gradient_nothing_is_read() -> None:
    x, w, y = problem()
    with torch.no_grad():
        torch.testing.assert_close(tiled(x, w, y, filter_eps=0.1), oracle(x, w, y)[0])
