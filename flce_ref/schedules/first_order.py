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


def anchor_of(*tensors: Tensor | None) -> Tensor | None:
    """A number that hangs on every tensor that needs a gradient, and keeps none of them alive.

    Results of a backward that hang on it in turn are found by whatever differentiates them, also where that names the
    tensors of which it wants derivatives. None where nothing needs a gradient, or while compiling, when no second
    derivative can be recorded anyway.
    """
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not wanted:
        return None
    # Sums of no rows: 0, whatever the tensors hold.
    return torch.stack([t[:0].sum(dtype=torch.float32) for t in wanted]).sum()


def first_order_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the ``backward`` of an autograd function: differentiating through its results raises RuntimeError.

    The function's first saved tensor is the :func:`anchor_of` its inputs.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        wanted_again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        with torch.no_grad():
            grads = backward(ctx, *upstream)
        if not wanted_again:
            return grads
        anchor = ctx.saved_tensors[0]
        return tuple(None if g is None else _RefuseDerivative.apply(anchor, g) for g in grads)

    return wrapper


class _RefuseDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, gradient):  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: this schedule takes the first one without recording how; "
            "schedule='naive' has one"
        )
