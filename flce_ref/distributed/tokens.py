"""The tokens shared out over ranks: one mean over all of them, and what it does to gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import Arguments, Call, counts_of, normalised, prepare
from ..functional import bind, run
from .agreement import Facts, agree, facts_about, process_group

GRADIENTS = ("averaged", "summed")


@torch.compiler.disable
def token_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    gradients: str,
    group: dist.ProcessGroup | None = None,
    trust_ranks: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The mean of :func:`flce_ref.linear_cross_entropy` over the tokens of all ranks, each of which has some of them.

    For data, sequence and context parallelism. Ranks may have different numbers of tokens, or of valid ones, or none;
    every token counts the same. Cross-entropy is divided by the Σ ``weight[target]`` of all ranks, the z-loss by their
    number of valid tokens; if no rank has any, the mean is NaN with zero gradients.

    Args:
        input, target: this rank's tokens (…, D), (…).
        linear_weight: the whole weight (V, D), the same on every rank: as DDP keeps it and FSDP gathers it.
        gradients: what becomes of parameters' gradients after backward. ``"averaged"`` over the ranks, by DDP and by
            FSDP as they come: backward makes them R times larger for R ranks. ``"summed"``, by a plain all-reduce or
            by FSDP with a divisor of 1: backward makes each rank's share of the gradient.
        group: the ranks that share out the tokens, those whose gradients are averaged or summed; None: the default.
        trust_ranks: leave out the agreement on options, for which the host waits once per call.
        **options: as in :func:`flce_ref.linear_cross_entropy`, without ``reduction``.

    Returns:
        The mean, the same on every rank; with ``return_lse`` the pair with the lse of this rank's tokens.

    Raises:
        TypeError, ValueError, IndexError: as in :func:`flce_ref.linear_cross_entropy`; on every rank a ValueError for
            arguments on which the ranks disagree.
        RuntimeError: the arguments of another rank, which is named, are wrong; or there is no process group.

    ``torch.compile`` runs it as it is, between two graphs.
    """
    group = process_group(group)

    def describe() -> tuple[tuple[Arguments, Call], Facts]:
        if "reduction" in options:
            raise TypeError("reduction can't be chosen: the loss is the mean over the tokens of all ranks")
        _check_gradients(gradients)
        a = bind(input, linear_weight, target, reduction="sum", **options)
        call = prepare(a)
        shared = facts_about(a, is_shard=False)
        return (a, call), Facts({**shared, "gradients": gradients, "the number of words": linear_weight.shape[0]})

    arguments, call = describe()[0] if trust_ranks else agree(describe, group)[0]
    objective = call.objective
    if objective.class_weight is not None:
        counts = counts_of(objective.class_weight, call.target, objective.ignore_index)
        dist.all_reduce(counts, group=group)
        call = replace(call, objective=replace(objective, class_weight=normalised(objective.class_weight, counts)))
    result = run(call, arguments)
    total, *lse = result if isinstance(result, tuple) else (result,)
    n_valid = (call.target != objective.ignore_index).sum()
    mean = global_mean(total, n_valid, gradients=gradients, group=group)
    return (mean, *lse) if lse else mean  # type: ignore[return-value]


@torch.compiler.disable
def global_mean(
    total: Tensor, count: Tensor | float, *, gradients: str, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Σ ``total`` / Σ ``count`` over the ranks of ``group``, differentiable in this rank's ``total``.

    For sums from elsewhere: of a vocabulary-parallel loss with ``reduction="sum"`` whose tokens are shared out as well,
    over another group. One all-reduce of two numbers in forward, none in backward: what the other ranks' totals depend
    on is theirs to differentiate.

    Args:
        total: the sum of this rank's losses, 0-d.
        count: what it counts for in the divisor: its number of valid tokens, or the sum of their class weights.
        gradients: ``"averaged"`` or ``"summed"``, see :func:`flce_ref.distributed.token_parallel_linear_cross_entropy`.
        group: the ranks; None: the default group.

    Returns:
        0-d, in the dtype of ``total``, the same on every rank. Where Σ ``count`` is 0: NaN with zero gradients.
    """
    _check_gradients(gradients)
    if total.ndim:
        raise ValueError(f"total must be 0-d, the sum of this rank's losses, got shape {tuple(total.shape)}")
    group = process_group(group)
    factor = dist.get_world_size(group) if gradients == "averaged" else 1
    mean: Tensor = _GlobalMean.apply(total, count, factor, group)
    return mean


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, count, factor, group):  # type: ignore[no-untyped-def]
        count = torch.as_tensor(count, dtype=torch.float64, device=total.device)
        sums = torch.stack([total.double(), count])
        dist.all_reduce(sums, group=group)
        total_of_all, count_of_all = sums
        ctx.scale = (factor / torch.where(count_of_all == 0, 1.0, count_of_all)).to(total.dtype)
        return (total_of_all / count_of_all).to(total.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.scale, None, None, None


def _check_gradients(gradients: str) -> None:
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients must be one of {', '.join(map(repr, GRADIENTS))}, got {gradients!r}")
