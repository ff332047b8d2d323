"""What every implementation is held to: the float64 truth, and what plain PyTorch reaches in the same dtype.

`truth` is written out from the formulas, without autograd, so that nothing is checked against itself:

    z    = softcap · tanh((x Wᵀ + b) / softcap), or x Wᵀ + b                          (N, V)
    lse  = log Σ_v exp z_v,   log p = z − lse                                         (N,)
    CEᵢ  = −(1 − ε) w[y] log p[y] − (ε / V) Σ_v w_v log p_v      (class weight w, label smoothing ε)
    loss = Σ CEᵢ / Σ w[yᵢ] + z_loss · Σ lseᵢ² / n_valid                               ("mean"; sums over valid rows)

and, for one row, with p = softmax(z) and upstream gradients a of CE, c of the z-loss term, e of lse:

    ∂/∂z_v = a · [(1 − ε) w_y (p_v − 1[v = y]) + (ε / V)(p_v Σ_u w_u − w_v)] + (2 c z_loss lse + e) p_v
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import LEAVES, Problem


@dataclass(frozen=True)
class Result:
    """What came out of one forward and backward; None where it was not asked for, or did not come."""

    loss: Tensor
    dx: Tensor | None = None
    dw: Tensor | None = None
    dbias: Tensor | None = None
    lse: Tensor | None = None


def truth(problem: Problem, upstream: Tensor | float = 1.0, lse_upstream: Tensor | float = 0.0) -> Result:
    """Loss, lse and gradients of `problem` in float64, for the upstream gradient of the loss (scalar, or one per token
    under "none") and of lse."""
    x, w_head = problem.input.detach().double(), problem.linear_weight.detach().double()
    shape = x.shape[:-1]
    x, y = x.reshape(-1, x.shape[-1]), problem.target.reshape(-1).long()
    vocabulary = w_head.shape[0]
    valid = y != problem.ignore_index
    y = torch.where(valid, y, 0)
    class_weight = x.new_ones(vocabulary) if problem.weight is None else problem.weight.double()
    eps = problem.label_smoothing

    z = x @ w_head.mT
    if problem.linear_bias is not None:
        z = z + problem.linear_bias.detach().double()
    slope = torch.ones_like(z)
    if problem.softcap is not None:
        capped = torch.tanh(z / problem.softcap)
        z, slope = problem.softcap * capped, 1 - capped**2
    log_p = F.log_softmax(z, dim=-1)
    p, lse = log_p.exp(), torch.logsumexp(z, dim=-1)

    nll = -log_p.gather(1, y[:, None])[:, 0]
    ce = (1 - eps) * class_weight[y] * nll - eps / vocabulary * (log_p @ class_weight)
    ce, lse = ce * valid, lse * valid
    penalty = problem.z_loss * lse**2
    if problem.reduction == "mean":
        ce_divisor, penalty_divisor = (class_weight[y] * valid).sum(), valid.sum()
        loss = ce.sum() / ce_divisor + (penalty.sum() / penalty_divisor if problem.z_loss else 0.0)
    else:
        ce_divisor = penalty_divisor = x.new_ones(())
        loss = ce + penalty if problem.reduction == "none" else (ce + penalty).sum()

    one_hot = F.one_hot(y, vocabulary)
    smooth = p * class_weight.sum() - class_weight
    d_ce = (1 - eps) * class_weight[y][:, None] * (p - one_hot) + eps / vocabulary * smooth
    upstream = _per_token(upstream, y)
    a, c, e = upstream / ce_divisor, upstream / penalty_divisor, _per_token(lse_upstream, y)
    dz = a * d_ce + (2 * c * problem.z_loss * lse[:, None] + e) * p
    # where, not a product: with every row ignored the divisor is 0, and 0 · inf is not 0
    dz = torch.where(valid[:, None], dz * slope, 0.0)
    return Result(
        loss=loss.reshape(shape) if problem.reduction == "none" else loss,
        lse=lse.reshape(shape),
        dx=(dz @ w_head).reshape(problem.input.shape),
        dw=dz.mT @ x,
        dbias=None if problem.linear_bias is None else dz.sum(0),
    )


def plain(problem: Problem) -> Tensor:
    """The loss of `problem` as anyone would write it in PyTorch: F.cross_entropy(F.linear(…)), in the inputs' dtype."""
    logits = F.linear(problem.input, problem.linear_weight, problem.linear_bias)
    if problem.softcap is not None:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    logits, target = logits.reshape(-1, logits.shape[-1]), problem.target.reshape(-1)
    loss = F.cross_entropy(
        logits,
        target,
        weight=problem.weight,
        ignore_index=problem.ignore_index,
        reduction=problem.reduction,
        label_smoothing=problem.label_smoothing,
    )
    if problem.z_loss:
        valid = target != problem.ignore_index
        penalty = torch.where(valid, problem.z_loss * torch.logsumexp(logits, dim=-1) ** 2, 0.0)
        if problem.reduction == "mean":
            penalty = penalty.sum() / valid.sum()
        loss = loss + (penalty.sum() if problem.reduction == "sum" else penalty)
    return loss.reshape(problem.target.shape) if problem.reduction == "none" else loss


def plain_linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """`plain` with the calling shape that `verify` expects: the yardstick can be put through the suite itself."""
    return plain(Problem(input, linear_weight, target, **options))


def execute(
    function: Callable[[Problem], Tensor],
    problem: Problem,
    upstream: Tensor | float = 1.0,
    frozen: tuple[str, ...] = (),
) -> Result:
    """One forward and backward of `function`, the upstream gradient a contiguous tensor of the loss's shape."""
    problem = problem.leaves(frozen)
    loss = function(problem)
    wanted = [name for name in LEAVES if getattr(problem, name) is not None and name not in frozen]
    if not wanted:
        return Result(loss.detach())
    gradient = torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand_as(loss).contiguous()
    leaves = [getattr(problem, name) for name in wanted]
    found = dict(zip(wanted, torch.autograd.grad(loss, leaves, gradient, allow_unused=True), strict=True))
    return Result(loss.detach(), found.get("input"), found.get("linear_weight"), found.get("linear_bias"))


def _per_token(upstream: Tensor | float, y: Tensor) -> Tensor:
    """An upstream gradient as a float64 column (N, 1)."""
    column = torch.as_tensor(upstream, dtype=torch.float64, device=y.device).reshape(-1, 1)
    return column.expand(y.numel(), 1)
