"""What is computed for one row of logits: the loss of a token and its gradient.

Nothing here knows how many rows exist at once (that is a schedule) or what hardware reads them (that is a kernel).

For one token with logits z = (z_1 … z_V), target y, class weights w and label smoothing ε, write s = ε / V. Then

    lse  = log Σ_k exp(z_k)
    CE   = (1 − ε) w_y (lse − z_y) + s Σ_k w_k (lse − z_k)
    loss = CE + z_loss · lse²

which for ε = 0 and w = 1 is the familiar lse − z_y. Differentiating, with p = softmax(z) and ∂lse/∂z_j = p_j,

    ∂loss/∂z_j = A p_j − B 1[j = y] − s w_j
    A = (1 − ε) w_y + s Σ_k w_k + 2 z_loss lse,     B = (1 − ε) w_y

so a kernel that writes a gradient needs three numbers per row and never the formula. With a softcap c the logits are
z = c tanh(x / c) of raw logits x, and the gradient is multiplied by 1 − (z / c)².

Sources: label smoothing as in Szegedy et al. 2015 (arXiv:1512.00567) with PyTorch's convention for class weights;
z-loss as in PaLM, Chowdhery et al. 2022 (arXiv:2204.02311), section 5; soft capping as in Gemma 2 (arXiv:2408.00118),
section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """The loss of one row, with the meaning of :func:`torch.nn.functional.cross_entropy` plus z-loss and softcap.

    ``class_weight`` is (V,), float32 or wider, or None for weights of one.
    """

    vocab_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None

    def weights_about(self, first: int, width: int) -> tuple[Tensor | int, Tensor | int]:
        """Σ_k w_k over the columns before ``first``, and over ``width`` columns from there on."""
        if self.class_weight is None:
            return first, width
        return self.class_weight[:first].sum(), self.class_weight[first : first + width].sum()


class RowStats(NamedTuple):
    """All that a row of logits must be remembered by; each (C,), float32 or wider.

    ``max`` and ``sumexp`` = Σ exp(z − max) are kept apart rather than folded into lse: at a common offset of 1e4 the
    probabilities exp(z − lse) err by 3.5e-4, exp(z − max) / sumexp by 1.5e-7. ``smooth_sum`` = Σ_k w_k (z_k − max) is
    shifted for the same reason, and is None unless labels are smoothed.
    """

    max: Tensor
    sumexp: Tensor
    target_logit: Tensor
    smooth_sum: Tensor | None

    def of(self, rows: slice) -> RowStats:
        """The statistics of some of the rows."""
        smooth_sum = None if self.smooth_sum is None else self.smooth_sum[rows]
        return RowStats(self.max[rows], self.sumexp[rows], self.target_logit[rows], smooth_sum)


def stats_of_nothing(rows: int, smooth: bool, dtype: torch.dtype, device: torch.device) -> RowStats:
    """Statistics of no columns, for :func:`merge` to begin with; ``smooth`` says whether labels are smoothed."""
    zeros = [torch.zeros(rows, dtype=dtype, device=device) for _ in range(2 + smooth)]
    return RowStats(torch.full_like(zeros[0], float("-inf")), zeros[0], zeros[1], zeros[2] if smooth else None)


class GradCoefficients(NamedTuple):
    """dz_j = probability · p_j − target · 1[j = y] − smooth · w_j; each (C,), zero for an ignored row."""

    probability: Tensor
    target: Tensor
    smooth: Tensor


def finite_shift(row_max: Tensor) -> Tensor:
    """``row_max`` with −inf (a tile of masked words only) replaced by 0, so that exp(z − shift) is 0 and not NaN."""
    return torch.where(row_max == float("-inf"), 0.0, row_max)


def merge(a: RowStats, b: RowStats, a_weight: Tensor | float, b_weight: Tensor | float) -> RowStats:
    """Statistics of two tiles of the same rows; ``a_weight`` is Σ_k w_k over the columns of ``a``, ``b_weight`` b's.

    Associative and commutative: each sum is moved to the common maximum before it is added.
    """
    maximum = torch.maximum(a.max, b.max)
    a, b = moved(a, maximum, a_weight), moved(b, maximum, b_weight)
    smooth_sum = None if a.smooth_sum is None or b.smooth_sum is None else a.smooth_sum + b.smooth_sum
    return RowStats(maximum, a.sumexp + b.sumexp, a.target_logit + b.target_logit, smooth_sum)


def moved(stats: RowStats, maximum: Tensor, weight: Tensor | float) -> RowStats:
    """The statistics of a tile about ``maximum``, (C,) ≥ its own; ``weight`` is Σ_k w_k over the tile's columns."""
    shift = finite_shift(maximum)
    # exp of −∞ itself for a tile of masked words: it then adds 0 whatever the maximum, and not 0 · ∞.
    sumexp = stats.sumexp * torch.exp(stats.max - shift)
    smooth_sum = stats.smooth_sum
    if smooth_sum is not None:
        # Of no columns, or of masked words alone, there is nothing that a shift could move.
        smooth_sum = smooth_sum + torch.where(stats.max == float("-inf"), 0.0, weight * (stats.max - shift))
    return RowStats(maximum, sumexp, stats.target_logit, smooth_sum)


def _row_masks(target: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """(C,) masks: ignored rows, rows whose target is no word, and targets made safe to index with."""
    ignored = target == objective.ignore_index
    bad = ~ignored & ((target < 0) | (target >= objective.vocab_size))
    return ignored, bad, target.clamp(0, objective.vocab_size - 1)


def row_loss(stats: RowStats, target: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row, both (C,): 0 for an ignored row, NaN where the target is no word of the vocabulary."""
    ignored, bad, safe_target = _row_masks(target, objective)
    smoothing, weight = objective.label_smoothing, objective.class_weight
    shift = finite_shift(stats.max)
    log_sumexp = torch.log(stats.sumexp)
    # log Σ exp(z − max) − (z_y − max), not lse − z_y: the two maxima of a large common offset never meet in a sum.
    loss = log_sumexp - (stats.target_logit - shift)
    if weight is not None:
        loss = loss * weight[safe_target]
    if stats.smooth_sum is not None:
        total = objective.vocab_size if weight is None else weight.sum()
        smooth = total * log_sumexp - stats.smooth_sum
        loss = (1 - smoothing) * loss + (smoothing / objective.vocab_size) * smooth
    lse = shift + log_sumexp
    if objective.z_loss:
        loss = loss + objective.z_loss * lse.square()
    loss, lse = (value.masked_fill(bad, float("nan")).masked_fill(ignored, 0.0) for value in (loss, lse))
    return loss, lse


def grad_coefficients(
    lse: Tensor, target: Tensor, objective: Objective, grad_loss: Tensor | None = None, grad_lse: Tensor | None = None
) -> GradCoefficients:
    """The three numbers of each row's gradient, (C,) each.

    ``grad_loss`` and ``grad_lse`` are the upstream gradients of the row's loss and lse, (C,); None stands for 1 and 0.
    """
    ignored, bad, safe_target = _row_masks(target, objective)
    smoothing, weight = objective.label_smoothing, objective.class_weight
    one = torch.ones_like(lse)
    on_target = (1 - smoothing) * (one if weight is None else weight[safe_target])
    on_probability = on_target
    if smoothing:
        on_probability = on_probability + smoothing * (1.0 if weight is None else weight.mean())
    if objective.z_loss:
        on_probability = on_probability + 2 * objective.z_loss * lse
    coefficients = [on_probability, on_target, one * (smoothing / objective.vocab_size)]
    if grad_loss is not None:
        coefficients = [c * grad_loss for c in coefficients]
    if grad_lse is not None:
        coefficients[0] = coefficients[0] + grad_lse
    coefficients[0] = coefficients[0].masked_fill(bad, float("nan"))
    return GradCoefficients(*(c.masked_fill(ignored, 0.0) for c in coefficients))
