"""Logits made a second time, in backward, chunk by chunk: for upstream gradients that differ from token to token.

A gradient taken in forward can be multiplied by one number later, but not by a number per token: dw has summed the tokens
by then. So where ``reduction="none"`` or the lse is differentiated, forward keeps nothing and backward repeats the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..objective import Objective
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
    return _Recompute.apply(input, linear_weight, linear_bias, target, loss, lse, objective, plan)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, loss, lse, objective, plan):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(input, linear_weight, linear_bias, target)
        ctx.objective, ctx.plan = objective, plan
        ctx.set_materialize_grads(False)
        return loss.clone(), lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, grad_lse):  # type: ignore[no-untyped-def]
        if grad_loss is None and grad_lse is None:
            return (None,) * 8
        tensors = ctx.saved_tensors
        if grad_loss is None:
            grad_loss = torch.zeros_like(grad_lse)
        # Upstream gradients of 1/N would underflow in float16 dlogits: their scale is taken out here, put back below.
        largest = torch.stack([g.abs().amax() for g in (grad_loss, grad_lse) if g is not None and g.numel()] or [
            grad_loss.new_ones(())
        ]).amax()  # fmt: skip
        largest = torch.where(largest == 0, 1.0, largest)
        upstream = [None if g is None else g / largest for g in (grad_loss, grad_lse)]
        rows = consume_chunks(*tensors, ctx.objective, ctx.plan, ctx.needs_input_grad[:3], *upstream)
        dtypes = [None if t is None else t.dtype for t in tensors[:3]]
        grads = [scaled(g, largest, dtype) for g, dtype in zip((rows.dx, rows.dw, rows.db), dtypes, strict=True)]
        return *grads, None, None, None, None, None
