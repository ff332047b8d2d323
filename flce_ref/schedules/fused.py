"""Logits consumed as soon as they are made: fused linear cross-entropy.

Each chunk of C tokens is projected into one reused (C, V) buffer, the buffer is overwritten by its own gradient, and
the gradient is consumed at once, into dx and dw. This is possible in forward because the loss is a scalar: whatever its
upstream gradient turns out to be, it multiplies dx and dw as a whole, and backward has nothing else to do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import scale
from ..kernels.ops import accumulate_product_, cross_entropy_
from ..objective import Objective
from .first_order import anchors_of, first_order_only
from .plan import Plan


class Consumed(NamedTuple):
    """What is left of all chunks: loss and lse per row (N,), and the gradients of Σ loss that were asked for."""

    loss: Tensor
    lse: Tensor
    dx: Tensor | None  # (N, D) in the input's dtype
    dw: Tensor | None  # (V, D) in plan.accum_dtype
    db: Tensor | None  # (V,)   in float32 or wider


def fused(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    objective: Objective,
    reduction: str,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss under ``reduction`` ("mean" or "sum"), and loss and lse per row (N,) that carry no gradient."""
    head = (input, linear_weight, linear_bias)
    loss, row_loss, lse = _Fused.apply(*head, target, objective, reduction, plan, anchors_of(*head))
    return loss, row_loss, lse


# 1. The autograd shell: all the work is in forward.
class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, objective, reduction, plan, anchors):  # type: ignore[no-untyped-def]
        rows = consume_chunks(input, linear_weight, linear_bias, target, objective, plan, ctx.needs_input_grad[:3])
        n_valid = (target != objective.ignore_index).sum()
        loss = rows.loss.sum()
        if reduction == "mean":
            loss = loss / n_valid  # NaN if every target is ignored, as PyTorch has it
        divisor = n_valid.clamp(min=1) if reduction == "mean" else None
        ctx.save_for_backward(rows.dx, rows.dw, rows.db, divisor)
        ctx.kernel, ctx.anchors = plan.kernel, anchors
        ctx.dtypes = [t.dtype if t is not None else None for t in (input, linear_weight, linear_bias)]
        ctx.mark_non_differentiable(rows.loss, rows.lse)
        ctx.set_materialize_grads(False)
        return loss, rows.loss, rows.lse

    # 6. Backward makes no logits: the upstream gradient and 1/N arrive as one float32 factor.
    @staticmethod
    @first_order_only
    def backward(ctx, grad_loss, *_):  # type: ignore[no-untyped-def]
        if grad_loss is None:
            return (None,) * 8
        dx, dw, db, divisor = ctx.saved_tensors
        factor = grad_loss if divisor is None else grad_loss / divisor
        grads = [scaled(g, factor, dtype, ctx.kernel) for g, dtype in zip((dx, dw, db), ctx.dtypes, strict=True)]
        return *grads, None, None, None, None, None


def consume_chunks(
    input: Tensor,  # (N, D), in the dtype of the products
    linear_weight: Tensor,  # (V, D), possibly wider (autocast)
    linear_bias: Tensor | None,  # (V,)
    target: Tensor,  # (N,)
    objective: Objective,
    plan: Plan,
    needs: tuple[bool, bool, bool],
    grad_loss: Tensor | None = None,  # (N,) upstream gradients per row, or None for 1
    grad_lse: Tensor | None = None,
) -> Consumed:
    """Loss, lse and unscaled gradients of all rows, with one (C, V) buffer alive at a time."""
    if plan.shard is not None:  # the same stream, run by several ranks that share out the words
        return plan.shard.consume_chunks(
            input, linear_weight, linear_bias, target, objective, plan, needs, grad_loss, grad_lse
        )
    (n, d), v = input.shape, linear_weight.shape[0]
    weight = linear_weight.to(input.dtype)
    bias = None if linear_bias is None else linear_bias.to(input.dtype)
    need_dx, need_dw, need_db = needs
    row_dtype = torch.promote_types(input.dtype, torch.float32)
    loss, lse = (torch.empty(n, dtype=row_dtype, device=input.device) for _ in range(2))
    dx = input.new_empty(n, d) if need_dx else None
    # Not zeroed: the first chunk writes, later ones add. Only without any chunk nothing would write.
    new_dw = torch.empty if n else torch.zeros
    dw = new_dw(v, d, dtype=plan.accum_dtype, device=input.device) if need_dw else None
    db = torch.zeros(v, dtype=row_dtype, device=input.device) if need_db else None
    buffer = input.new_empty(min(plan.chunk_size, n), v)

    # 2. The stream of token chunks.
    for start in range(0, n, plan.chunk_size):
        rows = slice(start, min(start + plan.chunk_size, n))
        x, y = input[rows], target[rows]  # (C, D), (C,)

        # 3. The logits of this chunk, into the buffer that the last chunk left behind.
        logits = buffer[: x.shape[0]]  # (C, V)
        if bias is None:
            torch.mm(x, weight.T, out=logits)
        else:
            torch.addmm(bias, x, weight.T, out=logits)

        # 4. The buffer is overwritten by its own gradient.
        g_loss, g_lse = (None if g is None else g[rows] for g in (grad_loss, grad_lse))
        loss[rows], lse[rows] = cross_entropy_(logits, y, objective, plan.kernel, any(needs), g_loss, g_lse)
        dlogits = logits

        # 5. dx is written, dw accumulated; then nothing needs the buffer any more.
        if dx is not None:
            torch.mm(dlogits, weight, out=dx[rows])  # (C, V) @ (V, D) = (C, D)
        if dw is not None:
            accumulate_product_(dw, dlogits.T, x, overwrite=start == 0)  # (V, C) @ (C, D) = (V, D)
        if db is not None:
            db += dlogits.sum(0, dtype=row_dtype)
    return Consumed(loss, lse, dx, dw, db)


def scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype, kernel: str) -> Tensor | None:
    """``gradient`` times the scalar ``factor`` in ``dtype``, in place if nobody can ask for the unscaled one again.

    The factor has one dimension, so that the product is taken in its dtype: a 0-d one takes no part in promotion.
    """
    if gradient is None:
        return None
    factor = factor.to(torch.promote_types(gradient.dtype, torch.float32)).reshape(1)
    if torch.compiler.is_compiling():
        return (gradient * factor).to(dtype)
    out = gradient if gradient.dtype == dtype and not _graph_is_kept() else torch.empty_like(gradient, dtype=dtype)
    scale(gradient, factor, out, kernel)
    return out


def _graph_is_kept() -> bool:
    """Whether this backward runs under retain_graph; assumed so where PyTorch does not say."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()
