"""Logits made a second time, in backward, chunk by chunk: for upstream gradients that differ from token to token.

A gradient taken in forward can be multiplied by one number later, but not by a number per token: dw has summed the
tokens by then. So where ``reduction="none"`` or the lse is differentiated, forward keeps nothing and backward repeats
the stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..objective import Objective
from .first_order import anchors_of, first_order_only
from .fused import consume_chunks, scaled
from .plan import Plan


def attach_gradient(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    loss: Tensor,
    lse: Tensor,
    objective: Objective,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """``loss`` and ``lse`` (N,), computed before without a gradient, as differentiable functions of the inputs."""
    head = (input, linear_weight, linear_bias)
    loss, lse = _Recompute.apply(*head, target, loss, lse, objective, plan, anchors_of(*head))
    return loss, lse


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, loss, lse, objective, plan, anchors):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(input, linear_weight, linear_bias, target)
        ctx.objective, ctx.plan, ctx.anchors = objective, plan, anchors
        ctx.set_materialize_grads(False)
        return loss.clone(), lse.clone()

    @staticmethod
    @first_order_only
    def backward(ctx, grad_loss, grad_lse):  # type: ignore[no-untyped-def]
        if grad_loss is None and grad_lse is None:
            return (None,) * 9
        input, linear_weight, linear_bias, target = ctx.saved_tensors
        objective = without_weight(ctx.objective, grad_loss)
        # Upstream gradients of 1/N would underflow in float16 dlogits: their scale is taken out here, put back below.
        grad_loss, grad_lse, scale = without_scale(grad_loss, grad_lse, target, objective)
        rows = consume_chunks(
            input, linear_weight, linear_bias, target, objective, ctx.plan, ctx.needs_input_grad[:3],
            grad_loss, grad_lse,
        )  # fmt: skip
        dx, dw, db = (
            scaled(g, scale, t.dtype, ctx.plan.kernel) if t is not None else None
            for g, t in zip((rows.dx, rows.dw, rows.db), (input, linear_weight, linear_bias), strict=True)
        )
        return dx, dw, db, None, None, None, None, None, None


def without_weight(objective: Objective, grad_loss: Tensor | None) -> Objective:
    """The objective where only lse is differentiated: class weights don't enter it, not even as the NaN that those of
    a total of 0 are under "mean"."""
    return replace(objective, class_weight=None) if grad_loss is None else objective


def without_scale(
    grad_loss: Tensor | None, grad_lse: Tensor | None, target: Tensor, objective: Objective
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The upstream gradients (N,), one at least, divided by their largest finite magnitude, and that (), or 1 for 0."""
    # What comes to an ignored row counts for nothing, even if it is not finite (the square root of its loss, say).
    ignored = target == objective.ignore_index
    upstream = [None if g is None else g.masked_fill(ignored, 0.0) for g in (grad_loss, grad_lse)]
    scale = _largest(*upstream)
    grad_loss, grad_lse = (None if g is None else g / scale for g in upstream)
    if grad_loss is None:
        grad_loss = target.new_zeros(target.shape, dtype=scale.dtype)
    return grad_loss, grad_lse, scale


def _largest(*upstream: Tensor | None) -> Tensor:
    """The largest finite magnitude among upstream gradients, 0-d; 1 where all are zero or there is none."""
    flat = torch.cat([g.abs().flatten() for g in upstream if g is not None])
    flat = flat.masked_fill(~flat.isfinite(), 0.0)
    largest = flat.amax() if flat.numel() else flat.new_zeros(())
    return torch.where(largest == 0, 1.0, largest)
