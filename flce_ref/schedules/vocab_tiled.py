"""The other axis cut: all tokens at once, T words of the vocabulary at a time.

A tile of logits (N, T) cannot be turned into its gradient when it is made, because a softmax needs the whole row. So
the tiles are made twice. Forward merges each into the statistics of its rows and forgets it; then the loss is known,
and backward makes the tile again and consumes it. That is a fourth product where :mod:`flce_ref.schedules.fused` has
three. What it buys: each tile sees all tokens, so its rows of dw come out of one product, summed in float32 inside it
and stored once, in the weight's own dtype. There is no (V, D) sum in float32; what every tile adds to is dx, (N, D).

Upstream gradients that differ from token to token cost nothing here: they are there when the gradient is formed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.ops import accumulate_product_, merge_stats_, write_grad_
from ..objective import GradCoefficients, Objective, RowStats, grad_coefficients, row_loss, stats_of_nothing
from .filtering import refuse_where_nothing_can_be_read, rows_that_need
from .first_order import anchors_of, first_order_only
from .fused import scaled
from .plan import Plan
from .recompute import without_scale, without_weight


def vocab_tiled(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    objective: Objective,
    reduction: str,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """Loss under ``reduction``, and lse per row (N,); both can be differentiated."""
    head = (input, linear_weight, linear_bias)
    loss, lse = _VocabTiled.apply(*head, target, objective, plan, anchors_of(*head))
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (target != objective.ignore_index).sum()  # NaN if every target is ignored, as PyTorch has it
    return loss, lse


# 1. The autograd shell: forward keeps five numbers per row at most, backward does the work.
class _VocabTiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, objective, plan, anchors):  # type: ignore[no-untyped-def]
        filtered = plan.filter_eps is not None and any(ctx.needs_input_grad[:3])
        if filtered:
            refuse_where_nothing_can_be_read(input.device)
        stats, highest = read_tiles(input, linear_weight, linear_bias, target, objective, plan, filtered)
        loss, lse = row_loss(stats, target, objective)
        ctx.save_for_backward(input, linear_weight, linear_bias, target, stats.max, stats.sumexp, lse, highest)
        ctx.objective, ctx.plan, ctx.anchors = objective, plan, anchors
        ctx.set_materialize_grads(False)
        return loss, lse.clone()  # a copy: what the caller does to it shall not change the gradient

    @staticmethod
    @first_order_only
    def backward(ctx, grad_loss, grad_lse):  # type: ignore[no-untyped-def]
        if grad_loss is None and grad_lse is None:
            return (None,) * 7
        input, linear_weight, linear_bias, target, row_max, sumexp, lse, highest = ctx.saved_tensors
        objective, plan = without_weight(ctx.objective, grad_loss), ctx.plan
        factor = None
        if input.dtype == torch.float16:
            # Upstream gradients of 1/N would underflow in float16 dlogits.
            grad_loss, grad_lse, factor = without_scale(grad_loss, grad_lse, target, objective)
        elif grad_loss is None:
            grad_loss = torch.zeros_like(lse)
        by = grad_coefficients(lse, target, objective, grad_loss, grad_lse)
        rows = Rows(input, target, torch.stack([row_max, sumexp, *by]))
        needed = None if highest is None else rows_that_need(highest, lse, target, objective, plan)
        dx, dw, db = consume_tiles(
            rows, linear_weight, linear_bias, objective, plan, ctx.needs_input_grad[:3], factor, needed
        )
        # The buffer is gone by now, and dx can be copied to its final dtype in its place.
        dx, db = _final(dx, factor, input, plan.kernel), _final(db, factor, linear_bias, plan.kernel)
        return dx, dw, db, None, None, None, None


class Rows(NamedTuple):
    """All that is known of some tokens when their logits are made again."""

    input: Tensor  # (R, D)
    target: Tensor  # (R,)
    values: Tensor  # (5, R) of whole rows: max and sumexp, then the three coefficients of their gradient

    def at(self, index: Tensor) -> Rows:
        """Those at ``index`` (R,), copied: three launches a tile, whatever there is to know."""
        return Rows(
            self.input.index_select(0, index), self.target.index_select(0, index), self.values.index_select(1, index)
        )

    def write_grad_(self, logits: Tensor, first_column: int, objective: Objective, kernel: str) -> None:
        """Overwrite their logits (R, T) by the gradient."""
        row_max, sumexp, *by = self.values
        stats = RowStats(row_max, sumexp, row_max, None)  # of the rest only losses are made
        write_grad_(logits, self.target, first_column, stats, GradCoefficients(*by), objective, kernel)


# 2. A tile of logits, into the buffer that the last tile left behind.
def tile_of_logits(buffer: Tensor, input: Tensor, weight: Tensor, linear_bias: Tensor | None, columns: slice) -> Tensor:
    """(R, T) from input (R, D) and the tile's own words, weight (T, D)."""
    rows, width = input.shape[0], weight.shape[0]
    logits = buffer.view(-1)[: rows * width].view(rows, width)  # a narrower one is contiguous too
    if linear_bias is None:
        torch.mm(input, weight.T, out=logits)
    else:
        torch.addmm(linear_bias[columns].to(input.dtype), input, weight.T, out=logits)
    return logits


# 3. First pass: every tile is merged into what is known of its rows, and forgotten.
def read_tiles(
    input: Tensor,  # (N, D), in the dtype of the products
    linear_weight: Tensor,  # (V, D), possibly wider (autocast)
    linear_bias: Tensor | None,  # (V,)
    target: Tensor,  # (N,)
    objective: Objective,
    plan: Plan,
    want_highest: bool,
) -> tuple[RowStats, Tensor | None]:
    """Statistics of whole rows and, if wanted, the highest logit of each row in each tile, (tiles, N)."""
    n, v = input.shape[0], linear_weight.shape[0]
    row_dtype = torch.promote_types(input.dtype, torch.float32)
    stats = stats_of_nothing(n, objective.label_smoothing > 0, row_dtype, input.device)
    tiles = range(0, v, plan.chunk_size)
    highest = torch.empty(len(tiles), n, dtype=row_dtype, device=input.device) if want_highest else None
    buffer = input.new_empty(n, plan.chunk_size)
    for tile, first in enumerate(tiles):
        columns = slice(first, min(first + plan.chunk_size, v))
        logits = tile_of_logits(buffer, input, linear_weight[columns].to(input.dtype), linear_bias, columns)
        own = None if highest is None else highest[tile]
        merge_stats_(stats, logits, target, first, objective, plan.kernel, own)
    return stats, highest


# 4. Second pass: every tile is made again, overwritten by its own gradient, and consumed.
def consume_tiles(
    all_rows: Rows,
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    objective: Objective,
    plan: Plan,
    needs: tuple[bool, bool, bool],
    factor: Tensor | None,  # () what every gradient is still to be multiplied by
    needed: list[Tensor | None] | None,  # of every tile the rows that need it, or None for all
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those that are needed of dx (N, D) in plan.accum_dtype and db (V,), still without ``factor``, and dw (V, D)."""
    input, weight_dtype = all_rows.input, linear_weight.dtype
    (n, d), v = input.shape, linear_weight.shape[0]
    need_dx, need_dw, need_db = needs
    new_dx = torch.empty if needed is None else torch.zeros
    dx = new_dx(n, d, dtype=plan.accum_dtype, device=input.device) if need_dx else None
    dw = input.new_empty(v, d, dtype=weight_dtype) if need_dw else None
    db = torch.zeros(v, dtype=all_rows.values.dtype, device=input.device) if need_db else None
    buffer = input.new_empty(n, plan.chunk_size)

    for tile, first in enumerate(range(0, v, plan.chunk_size)):
        columns = slice(first, min(first + plan.chunk_size, v))
        index = None if needed is None else needed[tile]
        rows = all_rows if index is None else all_rows.at(index)
        if rows.input.shape[0] == 0:
            if dw is not None:
                dw[columns].zero_()
            continue
        weight = linear_weight[columns].to(input.dtype)  # (T, D)
        logits = tile_of_logits(buffer, rows.input, weight, linear_bias, columns)  # (R, T)
        rows.write_grad_(logits, first, objective, plan.kernel)
        dlogits = logits

        # All tokens meet in one product, so what comes out of it is final.
        if dw is not None:
            _write_product(dw[columns], dlogits.T, rows.input, factor, plan.kernel)  # (T, R) @ (R, D) = (T, D)
        if db is not None:
            db[columns] = dlogits.sum(0, dtype=db.dtype)
        # Every tile adds to dx: (R, T) @ (T, D) = (R, D).
        if dx is not None:
            _add_product(dx, dlogits, weight, index, overwrite=first == 0 and needed is None)
    return dx, dw, db


def _write_product(out: Tensor, left: Tensor, right: Tensor, factor: Tensor | None, kernel: str) -> None:
    """``out`` = left @ right · factor; the unscaled product is in float32, as it might not fit in float16."""
    if factor is None:
        accumulate_product_(out, left, right, overwrite=True)
        return
    product = torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
    accumulate_product_(product, left, right, overwrite=True)
    result = scaled(product, factor, out.dtype, kernel)
    assert result is not None
    out.copy_(result)


def _add_product(out: Tensor, left: Tensor, right: Tensor, index: Tensor | None, overwrite: bool) -> None:
    """``out`` += left @ right, in all its rows or in those at ``index``."""
    if index is None:
        accumulate_product_(out, left, right, overwrite)
        return
    product = torch.empty(left.shape[0], right.shape[1], dtype=out.dtype, device=out.device)
    accumulate_product_(product, left, right, overwrite=True)
    out.index_add_(0, index, product)


def _final(gradient: Tensor | None, factor: Tensor | None, like: Tensor | None, kernel: str) -> Tensor | None:
    if gradient is None or like is None:
        return None
    return gradient.to(like.dtype) if factor is None else scaled(gradient, factor, like.dtype, kernel)
