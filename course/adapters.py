"""A student's functions as implementations of linear cross-entropy, so that the library's suite can judge them.

Each adapter is called as `flce_ref.verify` calls its subject, in the grader's own process and on the grader's own
tensors, and has the numbers computed in the sandbox. What comes back is data: shapes are checked, values are judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .sandbox import Failed, Sandbox

GUARD = 64


def sent(tensor: Tensor) -> tuple[str, np.ndarray]:
    """A tensor as the sandbox takes it."""
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().contiguous()
    return name, (tensor.view(torch.int16) if name == "bfloat16" else tensor).numpy()


def received(name: str, values: np.ndarray) -> Tensor:
    """And back."""
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor


def shaped(what: str, values: Tensor, shape: torch.Size) -> Tensor:
    """`values`, which must have the shape.

    Raises:
        Failed: they have another.
    """
    if values.shape != shape:
        raise Failed(f"{what} has the shape {tuple(values.shape)}, {tuple(shape)} is due")
    return values


@dataclass
class Numbers:
    """Functions of NumPy arrays, called by name: ``numbers("softmax", z)``."""

    sandbox: Sandbox

    def __call__(self, function: str, *tensors: Tensor, results: int = 1, **options: Any) -> tuple[Tensor, ...]:
        arrays = [sent(t.double() if t.is_floating_point() else t) for t in tensors]
        answer = self.sandbox.ask("numbers", arrays, name=function, options=options)
        if len(answer) != results:
            raise Failed(f"{function} should return {results} values, it returned {len(answer)}")
        return tuple(received(*array) for array in answer)

    def one(self, function: str, *tensors: Tensor, **options: Any) -> Tensor:
        """The only result."""
        return self(function, *tensors, **options)[0]


@dataclass
class Loss:
    """``function(input, linear_weight, target, **options)``, a loss of torch tensors with its own backward.

    ``shift`` rolls the targets before they are sent: see :mod:`course.marking`.
    """

    sandbox: Sandbox
    function: str
    shift: int = 0
    calls: int = 0

    def __call__(self, input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        loss: Tensor = _Elsewhere.apply(self, input, linear_weight, target.roll(self.shift), options)
        return loss


class _Elsewhere(torch.autograd.Function):
    """Forward in the sandbox, backward in the sandbox: the graph stays there in between."""

    @staticmethod
    def forward(ctx: Any, how: Loss, input: Tensor, linear_weight: Tensor, target: Tensor, options: Any) -> Tensor:
        how.calls += 1
        ctx.how, ctx.call = how, how.calls
        ctx.wanted = list(ctx.needs_input_grad[1:3])
        ctx.leaves = [t for t, needed in zip((input, linear_weight), ctx.wanted) if needed]
        arrays = [sent(input), sent(linear_weight), sent(target)]
        answer = how.sandbox.ask("forward", arrays, name=how.function, options=options, wanted=ctx.wanted)
        (loss,) = (received(*array) for array in answer)
        return shaped("the loss", loss, torch.Size([]))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        assert ctx.call == ctx.how.calls, "the sandbox keeps the graph of the last forward only"
        found = [received(*array) for array in ctx.how.sandbox.ask("backward", [sent(upstream)])]
        if len(found) != len(ctx.leaves):
            raise Failed(f"backward gave {len(found)} gradients, {len(ctx.leaves)} are due")
        gradients = iter([shaped("a gradient", g, leaf.shape) for g, leaf in zip(found, ctx.leaves)])
        return None, *(next(gradients) if needed else None for needed in ctx.wanted), None, None


@dataclass
class RowKernel:
    """``function(logits, target, …) → loss (C,)``, a kernel that overwrites logits by their gradient, as a whole head.

    The products are the grader's. The rows lie ``gap`` elements apart in a buffer filled with NaN, which may not be
    touched; ``block`` is passed on.
    """

    sandbox: Sandbox
    function: str

    def __call__(
        self, input: Tensor, linear_weight: Tensor, target: Tensor, *, ignore_index: int = -100, block: int
    ) -> Tensor:
        loss, dlogits = self.rows(F.linear(input, linear_weight).detach(), target, ignore_index, block)
        per_row: Tensor = _Rows.apply(input, linear_weight, loss, dlogits)
        return per_row.sum() / (target != ignore_index).sum()

    def rows(
        self, logits: Tensor, target: Tensor, ignore_index: int, block: int, gap: int = 0
    ) -> tuple[Tensor, Tensor]:
        """What the kernel makes of logits (C, V): loss (C,) and the overwritten rows (C, V)."""
        (rows, words), stride = logits.shape, logits.shape[1] + gap
        buffer = torch.full((rows * stride + GUARD,), float("nan"), dtype=logits.dtype)
        view = buffer.as_strided((rows, words), (stride, 1))
        view.copy_(logits)
        found = [
            received(*array)
            for array in self.sandbox.ask(
                "in_place", [sent(buffer), sent(target)], name=self.function, shape=[rows, words], stride=stride,
                options={"ignore_index": ignore_index, "block": block},
            )
        ]  # fmt: skip
        if len(found) != 2 or found[1].dtype != buffer.dtype:
            raise Failed("the kernel did not return one loss per row")
        loss, after = shaped("the loss", found[0], target.shape), shaped("the buffer", found[1], buffer.shape)
        outside = torch.ones_like(after, dtype=torch.bool)
        outside.as_strided((rows, words), (stride, 1)).fill_(False)
        if not after[outside].isnan().all():
            raise Failed("the kernel wrote outside its rows")
        return loss, after.as_strided((rows, words), (stride, 1)).clone()


class _Rows(torch.autograd.Function):
    """Losses whose gradient with respect to the logits is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, loss: Tensor, dlogits: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, dlogits)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        x, w, dlogits = ctx.saved_tensors
        scaled = dlogits.double() * upstream[:, None]
        return (scaled @ w.double()).to(x.dtype), (scaled.mT @ x.double()).to(w.dtype), None, None


Adapter = Callable[..., Any]
