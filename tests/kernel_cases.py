"""What the tests of the row kernels share: guarded buffers, the truth in float64, and the error that is allowed.

A kernel is held to float64 on *its own* logits, so the only errors left are those of float32 arithmetic and of rounding
the gradient once to the dtype of the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ref.objective import Objective

RowKernel = Callable[..., tuple[Tensor, Tensor]]

SHAPES = ((1, 1), (3, 7), (2, 8), (5, 1000), (9, 4099))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "weighted": True, "upstream": True}
ONE_BY_ONE: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1}, {"label_smoothing": 1.0}, {"z_loss": 0.01}, {"softcap": 5.0}, {"weighted": True},
    {"weighted": True, "label_smoothing": 0.3}, {"upstream": True}, {"ignore_index": 3}, {"write_grad": False},
)  # fmt: skip

# Elements on either side of a buffer, and the gap between two rows of it: nothing may read or write them.
_GUARD = 64
# Half a unit in the last place, relative, and the smallest distance of two numbers.
_ROUNDING = {torch.bfloat16: (2**-8, 2**-134), torch.float16: (2**-11, 2**-25), torch.float32: (2**-24, 0.0)}


@dataclass
class Guarded:
    """Buffers with red zones: NaN (or an impossible target) around every one and between the rows of the logits.

    NaN because a value read from there then shows in the result; bits are compared afterwards because one written there
    must show too.
    """

    device: str
    zones: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def place(self, values: Tensor, row_stride: int = 0, offset: int = 0) -> Tensor:
        """A copy of ``values`` in a guarded storage; rows ``row_stride`` elements apart, ``offset`` from alignment."""
        shape, strides = values.shape, values.stride()
        if values.ndim == 2:
            row_stride = max(row_stride, shape[1])
            strides = (row_stride, 1)
            used = row_stride * (shape[0] - 1) + shape[1] if shape[0] else 0
        else:
            strides, used = ((1,) if values.ndim else ()), values.numel()
        fill = float("nan") if values.is_floating_point() else 2**62
        storage = torch.full((used + 2 * _GUARD + offset,), fill, dtype=values.dtype, device=self.device)
        view = storage.as_strided(shape, strides, _GUARD + offset)
        outside = torch.ones_like(storage, dtype=torch.bool)
        outside.as_strided(shape, strides, _GUARD + offset).fill_(False)
        self.zones.append((storage, outside, storage.clone()))
        view.copy_(values)
        return view

    @contextmanager
    def around_outputs(self) -> Iterator[None]:
        """What ``torch.empty`` and ``empty_like`` return meanwhile is guarded, and poisoned with NaN."""
        empty = torch.empty

        def guarded_empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
            return self.place(torch.full_like(empty(*size, dtype=dtype, device=device), float("nan")))

        def guarded_like(like: Tensor) -> Tensor:
            return guarded_empty(like.shape, dtype=like.dtype, device=like.device)

        with mock.patch.object(torch, "empty", guarded_empty), mock.patch.object(torch, "empty_like", guarded_like):
            yield

    def check(self) -> None:
        for storage, outside, before in self.zones:
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[storage.element_size()]
            assert torch.equal(storage.view(bits)[outside], before.view(bits)[outside]), "a red zone was written to"


@dataclass(frozen=True)
class Case:
    """Random rows of logits with everything that goes with them."""

    logits: Tensor  # (C, V)
    target: Tensor  # (C,)
    objective: Objective
    grad_loss: Tensor | None
    grad_lse: Tensor | None
    write_grad: bool


def make_case(
    rows: int, vocab_size: int, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0, scale: float = 3.0,
    weighted: bool = False, upstream: bool = False, write_grad: bool = True, **options: Any,
) -> Case:  # fmt: skip
    """Logits of standard deviation ``scale``; the middle row is ignored, and the last targets are the last words."""
    g = torch.Generator(device=device).manual_seed(seed)
    logits = (torch.randn(rows, vocab_size, generator=g, device=device) * scale).to(dtype)
    target = torch.randint(0, vocab_size, (rows,), generator=g, device=device)
    target[-1] = vocab_size - 1
    objective = Objective(
        vocab_size,
        class_weight=torch.rand(vocab_size, generator=g, device=device) + 0.5 if weighted else None,
        **options,
    )
    if rows > 2:
        target[rows // 2] = objective.ignore_index
        logits[rows // 2, 0] = float("nan")  # and stays without effect
    gradients = [torch.randn(rows, generator=g, device=device) if upstream else None for _ in range(2)]
    return Case(logits, target, objective, *gradients, write_grad)


def truth(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, dlogits) in float64 by autograd, and the size of the terms that each row's gradient is made of."""
    step = max(1, 2**25 // case.objective.vocab_size)
    blocks = [_truth(case, slice(i, i + step)) for i in range(0, case.logits.shape[0], step)]
    loss, lse, dlogits, size = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return loss, lse, dlogits, size


def _truth(case: Case, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, y = case.objective, case.target[rows]
    ignored = y == o.ignore_index
    raw = case.logits[rows].double().masked_fill(ignored[:, None], 0.0).requires_grad_()
    z = raw if o.softcap is None else o.softcap * torch.tanh(raw / o.softcap)
    weight = None if o.class_weight is None else o.class_weight.double()
    loss = F.cross_entropy(
        z, y, weight, ignore_index=o.ignore_index, reduction="none", label_smoothing=o.label_smoothing
    )
    lse = z.logsumexp(1)
    loss = torch.where(ignored, 0.0, loss + o.z_loss * lse.square())
    lse = torch.where(ignored, 0.0, lse)
    up_loss, up_lse = (None if g is None else g[rows].double() for g in (case.grad_loss, case.grad_lse))
    up_loss = torch.ones_like(loss) if up_loss is None else up_loss
    total = (loss * up_loss).sum() + (0.0 if up_lse is None else (lse * up_lse).sum())
    (dlogits,) = torch.autograd.grad(total, raw)
    biggest_weight = 1.0 if weight is None else weight.max()
    size = up_loss.abs() * (biggest_weight + 2 * o.z_loss * lse.abs()) + (0.0 if up_lse is None else up_lse.abs())
    return loss.detach(), lse.detach(), dlogits, size.detach()


def run_guarded(
    kernel: RowKernel, case: Case, row_stride: int = 0, offset: int = 0, **extra: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, logits after) of ``kernel`` on copies of ``case`` between red zones, which are checked."""
    guarded = Guarded(str(case.logits.device))
    logits = guarded.place(case.logits, row_stride, offset)
    o = case.objective
    weight = None if o.class_weight is None else guarded.place(o.class_weight)
    objective = Objective(o.vocab_size, o.ignore_index, o.label_smoothing, o.z_loss, o.softcap, weight)
    target = guarded.place(case.target)
    gradients = [None if g is None else guarded.place(g) for g in (case.grad_loss, case.grad_lse)]
    with guarded.around_outputs():
        loss, lse = kernel(logits, target, objective, *gradients, case.write_grad, **extra)
    guarded.check()
    return loss, lse, logits


def check_case(
    kernel: RowKernel, case: Case, row_stride: int = 0, offset: int = 0, rounding: float = 1, **extra: Any
) -> None:
    """The kernel's loss, lse and gradient are those of float64 but for float32 arithmetic and one rounding.

    ``rounding`` is the error of that one in halves of a unit in the last place.
    """
    true_loss, true_lse, true_grad, size = truth(case)
    loss, lse, after = run_guarded(kernel, case, row_stride, offset, **extra)
    magnitude = 1 + true_loss.abs() + true_lse.abs()
    check_within(loss, true_loss, 4e-6 * magnitude, "loss")
    check_within(lse, true_lse, 1e-6 * magnitude, "lse")
    if not case.write_grad:
        assert torch.equal(after.nan_to_num(), case.logits.nan_to_num()), "the logits were to be left alone"
        return
    check_gradient(after, true_grad, size, rounding)


def check_gradient(got: Tensor, true_grad: Tensor, size: Tensor, rounding: float = 1) -> None:
    relative, absolute = _ROUNDING[got.dtype]
    # float32 arithmetic: 1e-5 of a term (exp of an argument near −30 has an error of 30 · 2⁻²⁴), 2e-7 of the sum.
    bound = (rounding * relative + 1e-5) * true_grad.abs() + 4e-7 * size[:, None] + absolute
    check_within(got, true_grad, bound, "gradient")


def check_within(got: Tensor, true: Tensor, bound: Tensor, what: str) -> None:
    error = (got.double() - true).abs()
    worst = (error / bound).nan_to_num(nan=float("inf")).flatten()
    at = int(worst.argmax())
    assert worst[at] <= 1, (
        f"{what}: element {at} is {got.flatten()[at]:.9g}, should be {true.flatten()[at]:.9g}, "
        f"off by {float(worst[at]):.3g} times what is allowed"
    )


def layouts_of(rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """(row stride, offset): contiguous and aligned, then strides and starts that make every row misaligned."""
    yield from itertools.product((vocab_size, vocab_size + 3), (0, 1))
