"""What autograd may ask of the loss: only what is needed, twice, scaled, expanded, under autocast, compiled."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce_ref import LinearCrossEntropyLoss, linear_cross_entropy
from flce_ref.kernels import ops
from tests.oracle import oracle, problem, relative_error

SCHEDULES = ("naive", "chunked", "checkpointed", "fused", "vocab_tiled")


@pytest.mark.parametrize("options", [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"return_lse": True},
    {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "return_lse": True},
])  # fmt: skip
def test_gradcheck(options: dict[str, object]) -> None:
    x, w, y = problem(n=6, d=3, v=5)
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, y, chunk_size=4, **options), (x, w))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_backwards_give_the_same(reduction: str) -> None:
    x, w, y = problem(dtype=torch.float32)
    loss = linear_cross_entropy(x, w, y, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, w), retain_graph=True)
    third = torch.autograd.grad(2 * loss, (x, w))
    torch.testing.assert_close(first, tuple(kept), rtol=0, atol=0)  # nobody wrote into what was handed out
    torch.testing.assert_close(second, tuple(kept), rtol=0, atol=0)
    torch.testing.assert_close(third, tuple(2 * g for g in kept))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: str) -> None:
    x, w, y = problem()
    loss = linear_cross_entropy(x, w, y, reduction=reduction).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (loss + dx.norm()).backward()


@pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=3) if any(n)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_combination_of_frozen_tensors(needs: tuple[bool, bool, bool], schedule: str, reduction: str) -> None:
    x, w, y = problem()
    bias = torch.randn(17, dtype=torch.float64)
    tensors = [t.detach().requires_grad_(need) for t, need in zip((x, w, bias), needs, strict=True)]
    asked = [t for t in tensors if t.requires_grad]
    loss = linear_cross_entropy(
        tensors[0], tensors[1], y, linear_bias=tensors[2], schedule=schedule, reduction=reduction
    )
    truth, _ = oracle(tensors[0], tensors[1], y, linear_bias=tensors[2], reduction=reduction)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), asked), torch.autograd.grad(truth.sum(), asked))


class CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products and remembers every shape that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        self.products += func is torch.ops.flce_ref.accumulate_product_.default
        self.shapes |= {
            tuple(t.shape) for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)
        }
        return out


@pytest.mark.parametrize(
    ("needs_x", "needs_w", "grad_mode", "products"),
    [
        (True, True, True, 3),
        (True, False, True, 2),
        (False, True, True, 2),
        (False, False, True, 1),
        (True, True, False, 1),
    ],
)
def test_only_needed_work_is_done(needs_x: bool, needs_w: bool, grad_mode: bool, products: int) -> None:
    n, d, v = 10, 6, 17
    x, w, y = (t.detach() for t in problem(n, d, v, dtype=torch.float32))
    x.requires_grad_(needs_x), w.requires_grad_(needs_w)
    with CountProducts() as count, torch.set_grad_enabled(grad_mode):
        linear_cross_entropy(x, w, y, chunk_size=n)
    assert count.products == products
    assert ((v, d) in count.shapes) == (needs_w and grad_mode)


def test_nothing_of_all_the_logits_is_ever_allocated() -> None:
    n, d, v = 64, 4, 50
    x, w, y = problem(n, d, v, dtype=torch.float32)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    with Sizes():
        for reduction in ("mean", "none"):
            linear_cross_entropy(x, w, y, chunk_size=8, reduction=reduction).sum().backward()
    assert max(sizes) == max(8 * v, n * d, v * d)


def test_backward_scales_its_own_buffers_in_place() -> None:
    x, w, y = problem(dtype=torch.float32)
    loss = linear_cross_entropy(x, w, y)
    saved = {t.data_ptr() for t in loss.grad_fn.saved_tensors if t is not None}
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert {dx.data_ptr(), dw.data_ptr()} <= saved
    # and not when somebody may come back for them
    loss = linear_cross_entropy(x, w, y)
    saved = {t.data_ptr() for t in loss.grad_fn.saved_tensors if t is not None}
    dx, dw = torch.autograd.grad(loss, (x, w), retain_graph=True)
    assert not {dx.data_ptr(), dw.data_ptr()} & saved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expanded_upstream_gradients(schedule: str) -> None:
    x, w, y = problem()
    up = torch.tensor(0.7, dtype=torch.float64).expand(13)  # stride 0
    loss = linear_cross_entropy(x, w, y, reduction="none", schedule=schedule)
    got = torch.autograd.grad(loss, (x, w), grad_outputs=up)
    truth = torch.autograd.grad(oracle(x, w, y, reduction="none")[0], (x, w), grad_outputs=up.clone())
    torch.testing.assert_close(got, truth)


def test_inputs_are_left_alone_and_layouts_do_not_matter() -> None:
    x, w, y = problem(12, 6, 17)
    truth = torch.autograd.grad(oracle(x, w, y)[0], (x, w))
    strided = x.detach().T.contiguous().T.requires_grad_()
    transposed = w.detach().T.contiguous().T.requires_grad_()
    labels = torch.stack([y, y], dim=1)[:, 0]
    before = [t.detach().clone() for t in (strided, transposed, labels)]
    loss = linear_cross_entropy(strided, transposed, labels, chunk_size=5)
    torch.testing.assert_close(torch.autograd.grad(loss, (strided, transposed)), truth)
    for t, b in zip((strided, transposed, labels), before, strict=True):
        assert torch.equal(t, b)
    expanded = x.detach()[:1].expand(12, 6)
    torch.testing.assert_close(linear_cross_entropy(expanded, w, y), oracle(expanded, w, y)[0])


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_any_leading_shape(lead: tuple[int, ...], reduction: str) -> None:
    x = torch.randn(*lead, 4, dtype=torch.float64, requires_grad=True)
    w, y = torch.randn(7, 4, dtype=torch.float64, requires_grad=True), torch.randint(0, 7, lead)
    loss, lse = linear_cross_entropy(x, w, y, reduction=reduction, return_lse=True)
    assert lse.shape == y.shape and loss.shape == (y.shape if reduction == "none" else ())
    truth = F.cross_entropy(F.linear(x, w).reshape(-1, 7), y.reshape(-1), reduction=reduction)
    torch.testing.assert_close(loss, truth.reshape(loss.shape))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), (x, w)), torch.autograd.grad(truth.sum(), (x, w)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_behaves_as_for_linear(dtype: torch.dtype, schedule: str) -> None:
    x, w, y = problem(64, 32, 100, dtype=torch.float32)
    bias = torch.randn(100, requires_grad=True)
    hidden = x.detach().to(dtype).requires_grad_()  # mixed: half-precision hidden states, float32 weight
    for inputs in ((x, w, bias), (hidden, w, bias)):
        with torch.autocast("cpu", dtype=dtype):
            loss = linear_cross_entropy(inputs[0], w, y, linear_bias=bias, schedule=schedule)
            plain = F.cross_entropy(F.linear(inputs[0], w, bias), y)
        truth, _ = oracle(*(t.detach().double() for t in inputs[:2]), y, linear_bias=bias.detach().double())
        assert loss.dtype == torch.float32
        assert abs(loss - truth) <= 2 * abs(plain - truth) + 1e-6
        grads, plain_grads = (torch.autograd.grad(value, inputs) for value in (loss, plain))
        assert [g.dtype for g in grads] == [t.dtype for t in inputs]
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        true_grads = torch.autograd.grad(oracle(*doubles[:2], y, linear_bias=doubles[2])[0], doubles)
        for got, plain_grad, true in zip(grads, plain_grads, true_grads, strict=True):
            assert relative_error(got, true) <= 2 * relative_error(plain_grad, true)


def test_autocast_disabled_inside_or_float64_changes_nothing() -> None:
    x, w, y = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_cross_entropy(x, w, y).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert linear_cross_entropy(x.float(), w.float(), y).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_half_precision_is_no_worse_than_plain_pytorch(dtype: torch.dtype, reduction: str) -> None:
    x, w, y = problem(256, 64, 500, dtype=dtype)
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = oracle(*doubles, y)[0]
    true_grads = torch.autograd.grad(truth, doubles)
    plain = F.cross_entropy(F.linear(x, w), y)
    plain_grads = torch.autograd.grad(plain, (x, w))
    loss = linear_cross_entropy(x, w, y, chunk_size=32, reduction=reduction)
    if reduction == "none":
        loss = loss.sum() / (y != -100).sum()  # upstream gradients of 1/N, which float16 dlogits would lose
    assert loss.dtype == torch.float32
    assert abs(loss - truth) <= abs(plain - truth) + 1e-6
    for got, plain_grad, true in zip(torch.autograd.grad(loss, (x, w)), plain_grads, true_grads, strict=True):
        assert relative_error(got, true) <= 1.1 * relative_error(plain_grad, true)


def test_float32_accumulation_does_not_get_worse_with_more_chunks() -> None:
    x, w, y = problem(1024, 16, 64, dtype=torch.bfloat16)
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    true = torch.autograd.grad(oracle(*doubles, y)[0], doubles)[1]

    def error(chunk_size: int, accum_dtype: torch.dtype | None = None) -> float:
        loss = linear_cross_entropy(x, w, y, chunk_size=chunk_size, accum_dtype=accum_dtype)
        return relative_error(torch.autograd.grad(loss, w)[0], true)

    assert error(1) <= 1.05 * error(1024)
    assert error(1, torch.bfloat16) > 3 * error(1024, torch.bfloat16)  # what the low-memory mode costs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_lse": True, "label_smoothing": 0.1}])
def test_compiles_without_a_graph_break(schedule: str, options: dict[str, object]) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 33)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            size = {} if schedule == "naive" else {"chunk_size": 8}
            out = linear_cross_entropy(
                self.norm(hidden),
                self.head.weight,
                target,
                linear_bias=self.head.bias,
                schedule=schedule,
                **size,
                **options,
            )
            return out if isinstance(out, Tensor) else out[0] + out[1].mean()

    torch._dynamo.reset()
    torch.manual_seed(0)
    head, hidden, target = Head(), torch.randn(20, 8), torch.randint(0, 33, (20,))
    results = []
    for call in (head, torch.compile(head, backend="aot_eager", fullgraph=True)):
        head.zero_grad()
        loss = (call(hidden, target) * 1.7).sum()
        loss.backward()
        results.append((loss.detach(), *(p.grad.clone() for p in head.parameters())))
    torch.testing.assert_close(results[0], results[1])


def test_custom_ops_keep_their_contract() -> None:
    z, y = torch.randn(5, 11), torch.tensor([0, 1, -100, 10, 4])
    weight, per_row = torch.rand(11), torch.rand(5)
    for args in (
        (None, None, None, -100, 0.0, 0.0, None, True, "eager"),
        (weight, per_row, per_row, -100, 0.1, 0.1, 5.0, True, "eager"),
        (None, None, None, -100, 0.0, 0.0, 5.0, False, "eager"),
    ):
        torch.library.opcheck(ops._cross_entropy_op, (z, y, *args))
    for overwrite in (True, False):
        torch.library.opcheck(
            ops._accumulate_product_op, (torch.ones(4, 3), torch.randn(4, 5), torch.randn(5, 3), overwrite)
        )


def test_a_weight_tied_to_the_embedding() -> None:
    grads = []
    for loss_fn in (linear_cross_entropy, lambda *a: oracle(*a)[0]):
        torch.manual_seed(0)
        embedding = nn.Embedding(17, 6, dtype=torch.float64)
        ids, y = torch.randint(0, 17, (3, 5)), torch.randint(0, 17, (3, 5))
        loss_fn(embedding(ids).tanh(), embedding.weight, y).backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads)


def test_micro_batches_with_a_global_token_count() -> None:
    x, w, y = problem(12, ignored=(1, 2, 3, 9))
    truth = torch.autograd.grad(linear_cross_entropy(x, w, y), (x, w))
    n_valid = (y != -100).sum()
    total = sum(linear_cross_entropy(x[i : i + 4], w, y[i : i + 4], reduction="sum") / n_valid for i in (0, 4, 8))
    torch.testing.assert_close(torch.autograd.grad(total, (x, w)), truth)


def test_skip_ignored_changes_nothing_but_the_work() -> None:
    for reduction, ignored in itertools.product(("mean", "sum", "none"), ((2, 5, 6), tuple(range(13)), ())):
        x, w, y = problem(ignored=ignored)
        a, b = (
            linear_cross_entropy(x, w, y, reduction=reduction, skip_ignored=skip, return_lse=True)
            for skip in (False, True)
        )
        torch.testing.assert_close(a, b, equal_nan=True)
        torch.testing.assert_close(*(torch.autograd.grad(o[0].sum() + o[1].sum(), (x, w)) for o in (a, b)))


def test_the_module_is_the_function() -> None:
    x, w, y = problem()
    weight = torch.rand(17, dtype=torch.float64)
    module = LinearCrossEntropyLoss(weight, label_smoothing=0.1, chunk_size=4, return_lse=True)
    direct = linear_cross_entropy(x, w, y, weight=weight, label_smoothing=0.1, chunk_size=4, return_lse=True)
    torch.testing.assert_close(module(x, w, y), direct)
    assert "label_smoothing=0.1" in repr(module) and not list(module.state_dict())
    with pytest.raises(TypeError, match="unknown argument 'chunksize'"):
        LinearCrossEntropyLoss(chunksize=3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", ["x", "w"])
def test_a_second_derivative_is_refused_also_where_its_variable_is_named(reduction: str, wanted: str) -> None:
    x, w, y = problem()
    hidden = x * 1.0  # no leaf
    loss = linear_cross_entropy(hidden, w, y, reduction=reduction).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dx.square().sum() + loss, {"x": x, "w": w}[wanted])


def test_a_hessian_is_refused_and_not_zero() -> None:
    x, w, y = problem()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.functional.hessian(lambda x: linear_cross_entropy(x, w, y), x)
    naive = torch.autograd.functional.hessian(lambda x: linear_cross_entropy(x, w, y, schedule="naive"), x)
    assert naive.abs().max() > 0


def test_the_hidden_states_are_not_kept_for_that_refusal() -> None:
    x, w, y = problem()
    hidden = x * 1.0
    released = weakref.ref(hidden)
    loss = linear_cross_entropy(hidden, w, y)
    del hidden
    assert released() is None
    loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("schedule", ["fused", "checkpointed", "vocab_tiled"])
def test_class_weights_changed_after_forward_change_nothing(schedule: str, reduction: str) -> None:
    x, w, y = problem()
    weight = torch.rand(len(w), dtype=torch.float64)
    expected = torch.autograd.grad(
        linear_cross_entropy(x, w, y, weight=weight, reduction=reduction, schedule=schedule).sum(), (x, w)
    )
    loss = linear_cross_entropy(x, w, y, weight=weight, reduction=reduction, schedule=schedule).sum()
    weight.mul_(3)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_through_the_upstream_gradient_is_refused(reduction: str) -> None:
    x, w, y = problem()
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(factor * linear_cross_entropy(x, w, y, reduction=reduction).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dx.square().sum() + factor, factor)


def test_an_upstream_gradient_that_is_not_finite_stays_with_its_token() -> None:
    x, w, y = problem()
    y[-1] = -100
    loss = linear_cross_entropy(x, w, y, reduction="none", ignore_index=-100)
    grads = torch.autograd.grad(loss.sqrt().sum(), (x, w))  # at the ignored token, the slope of √0
    expected = oracle(x, w, y, reduction="none", ignore_index=-100)[0]
    torch.testing.assert_close(grads, torch.autograd.grad(expected[:-1].sqrt().sum(), (x, w)))
    up = torch.ones(len(y), dtype=torch.float64)
    up[0] = torch.inf
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, w, y, reduction="none"), x, up)
    assert not dx[0].isfinite().all() and dx[1:].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_autograd_with_an_eager_forward(reduction: str) -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    if not hasattr(compiled_autograd, "_enable"):
        pytest.skip("this PyTorch has it under another name")
    x, w, y = problem()
    expected = torch.autograd.grad(linear_cross_entropy(x, w, y, reduction=reduction).sum(), (x, w))
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        linear_cross_entropy(x, w, y, reduction=reduction).sum().backward()
    torch.testing.assert_close((x.grad, w.grad), expected)


@pytest.mark.parametrize("loss_too", [False, True])
@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
def test_a_total_class_weight_of_zero_spoils_the_mean_but_not_lse(schedule: str, loss_too: bool) -> None:
    """As F.cross_entropy beside torch.logsumexp: NaN for the mean and what it reaches, not for lse alone."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y, weight = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    logits = x @ w.T
    loss, lse = F.cross_entropy(logits, y, weight=weight), torch.logsumexp(logits, -1)
    expected = torch.autograd.grad(lse.square().sum() + (loss if loss_too else 0.0), (x, w))
    loss, lse = linear_cross_entropy(x, w, y, weight=weight, schedule=schedule, return_lse=True)
    found = torch.autograd.grad(lse.square().sum() + (loss if loss_too else 0.0), (x, w))
    assert loss.isnan() and not lse.isnan().any()
    assert all(g.isnan().any() == loss_too for g in expected)
    for g, right in zip(found, expected, strict=True):
        torch.testing.assert_close(g, right, equal_nan=True)
