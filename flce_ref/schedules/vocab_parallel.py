"""The vocabulary split over ranks: each holds some rows of the weight, and makes those columns of the logits only.

The stream of token chunks is the one of :mod:`flce_ref.schedules.fused`, run by every rank over the same tokens at the
same time; autograd's part is that schedule's own. Three things have to cross between ranks, and each is an all-reduce
per chunk. A softmax is over all words, so before anyone can write a gradient, all must have the row's maximum, and then
the sums that are taken about it. And every word contributes to dx; that sum is under way while the chunk's dw and the
next chunk's logits are computed. dw stays where its words are.

The collectives depend on shapes and options only, never on values: a rank that owns no target of the batch, or no word
at all, takes part in each of them. In the comments V counts the words of all ranks, v those of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.ops import accumulate_product_, row_stats, write_grad_
from ..objective import Objective, RowStats, grad_coefficients, moved, row_loss
from .fused import Consumed
from .plan import Plan


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary: its words begin at ``first_word``; the ranks of ``group`` have the others."""

    first_word: int
    group: dist.ProcessGroup

    def consume_chunks(
        self,
        input: Tensor,  # (N, D), the same on every rank, as is target
        linear_weight: Tensor,  # (v, D)
        linear_bias: Tensor | None,  # (v,)
        target: Tensor,  # (N,), words of the whole vocabulary
        objective: Objective,  # of the whole vocabulary
        plan: Plan,
        needs: tuple[bool, bool, bool],
        grad_loss: Tensor | None = None,  # (N,) upstream gradients per row, or None for 1
        grad_lse: Tensor | None = None,
    ) -> Consumed:
        """Loss, lse and dx of all rows, the same on every rank; dw (v, D) and db (v,) of this rank's words."""
        (n, d), v = input.shape, linear_weight.shape[0]
        weight = linear_weight.to(input.dtype)
        bias = None if linear_bias is None else linear_bias.to(input.dtype)
        need_dx, need_dw, need_db = needs
        row_dtype = torch.promote_types(input.dtype, torch.float32)
        loss, lse = (torch.empty(n, dtype=row_dtype, device=input.device) for _ in range(2))
        dx = input.new_empty(n, d) if need_dx else None
        new_dw = torch.empty if n else torch.zeros
        dw = new_dw(v, d, dtype=plan.accum_dtype, device=input.device) if need_dw else None
        db = torch.zeros(v, dtype=row_dtype, device=input.device) if need_db else None
        buffer = input.new_empty(min(plan.chunk_size, n), v)
        sums_of_dx = []

        for start in range(0, n, plan.chunk_size):
            rows = slice(start, min(start + plan.chunk_size, n))
            x, y = input[rows], target[rows]  # (C, D), (C,)
            logits = buffer[: x.shape[0]]  # (C, v)
            if bias is None:
                torch.mm(x, weight.T, out=logits)
            else:
                torch.addmm(bias, x, weight.T, out=logits)

            # First and second all-reduce: the statistics of whole rows. Everyone waits for the slowest here.
            stats = self._of_whole_rows(self._of_own_words(logits, y, objective, plan.kernel), v, y, objective)
            loss[rows], lse[rows] = row_loss(stats, y, objective)
            if not any(needs):
                continue
            upstream = (None if g is None else g[rows] for g in (grad_loss, grad_lse))
            if v:
                by = grad_coefficients(lse[rows], y, objective, *upstream)
                write_grad_(logits, y, self.first_word, stats, by, objective, plan.kernel)
            dlogits = logits

            # Third all-reduce: started as soon as this rank's part of the sum is there, awaited after the last chunk.
            if dx is not None:
                torch.mm(dlogits, weight, out=dx[rows])  # (C, v) @ (v, D) = (C, D)
                sums_of_dx.append(dist.all_reduce(dx[rows], group=self.group, async_op=True))
            if dw is not None:
                accumulate_product_(dw, dlogits.T, x, overwrite=start == 0)  # (v, C) @ (C, D) = (v, D)
            if db is not None:
                db += dlogits.sum(0, dtype=row_dtype)

        for work in sums_of_dx:
            assert work is not None
            work.wait()
        return Consumed(loss, lse, dx, dw, db)

    def _of_own_words(self, logits: Tensor, target: Tensor, objective: Objective, kernel: str) -> RowStats:
        """Statistics of this rank's columns; those of no columns are −∞ and sums of nothing."""
        if logits.shape[1]:
            return row_stats(logits, target, self.first_word, objective, kernel)
        zero = logits.new_zeros(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
        return RowStats(torch.full_like(zero, float("-inf")), zero, zero, zero if objective.label_smoothing else None)

    def _of_whole_rows(self, own: RowStats, v: int, target: Tensor, objective: Objective) -> RowStats:
        """Statistics over the words of all ranks: ``objective.merge`` by two collectives, all parts at once.

        Only one rank has a row's target logit, and it has another one for another target. So the targets go along with
        the maxima, twice: where their largest and their smallest differ between ranks, the row becomes NaN.
        """
        y = target.to(own.max.dtype)
        highest = torch.stack([own.max, y, -y])  # (3, C)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        weights = objective.class_weight
        own = moved(own, highest[0], v if weights is None else weights[self.first_word : self.first_word + v].sum())
        sums = torch.stack([s for s in own[1:] if s is not None])  # (2, C), or (3, C) with smoothing
        dist.all_reduce(sums, group=self.group)
        sumexp, target_logit, *smooth_sum = sums
        sumexp = sumexp.masked_fill(highest[1] != -highest[2], float("nan"))
        return RowStats(highest[0], sumexp, target_logit, smooth_sum[0] if smooth_sum else None)
