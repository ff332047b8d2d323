"""A backward that may be used once, and says so when a second derivative is asked of it.

``torch.autograd.function.once_differentiable`` says nothing when the upstream gradient is a constant, as it is under
``loss.backward(create_graph=True)``: a gradient penalty would then silently lose its second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def anchors_of(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """For every tensor that needs a gradient a number that hangs on it, and does not keep it alive.

    Results of a backward that hang on these in turn are found by whatever differentiates them, also where that names
    the tensors of which it wants derivatives. None are made while compiling, when no second derivative is recorded.
    They are to be kept on ``ctx`` as a tuple: as an input of the function, a number would take part in its backward.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return ()
    return tuple(t[:0].sum() for t in tensors if t is not None and t.requires_grad)  # sums of no rows


def first_order_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the ``backward`` of an autograd function: differentiating through its results raises RuntimeError.

    Its forward leaves :func:`anchors_of` the inputs in ``ctx.anchors``.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        wanted_again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        with torch.no_grad():
            grads = backward(ctx, *upstream)
        if not wanted_again:
            return grads
        hung_on = (*ctx.anchors, *(u for u in upstream if u is not None and u.requires_grad))
        return tuple(None if g is None else _RefuseDerivative.apply(g, *hung_on) for g in grads)

    return wrapper


class _RefuseDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, *hung_on):  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: this schedule takes the first one without recording how; "
            "schedule='naive' has one"
        )
