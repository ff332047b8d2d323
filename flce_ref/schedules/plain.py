"""The loss of some tokens as plain PyTorch computes it: the yardstick's own arithmetic, autograd's own memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..objective import Objective


def plain_loss(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    objective: Objective,
    reduction: str,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Loss of tokens ``input`` (n, D) under ``reduction``, and lse (n,) if needed, in the dtypes PyTorch gives them.

    "mean" divides by the number of valid rows: the front door has normalised the class weights to that.
    """
    logits = F.linear(input, linear_weight, linear_bias)
    if objective.softcap is not None:
        logits = objective.softcap * torch.tanh(logits / objective.softcap)
    ignored = target == objective.ignore_index
    bad = ~ignored & ((target < 0) | (target >= logits.shape[1]))
    weight = None if objective.class_weight is None else objective.class_weight.to(logits.dtype)
    loss = F.cross_entropy(
        logits,
        target.masked_fill(bad, 0),  # a device assert would end the process; the loss is made NaN below instead
        weight=weight,
        ignore_index=objective.ignore_index,
        reduction=reduction,
        label_smoothing=objective.label_smoothing,
    )
    lse = None
    if need_lse or objective.z_loss:
        lse = torch.logsumexp(logits, dim=1).masked_fill(ignored, 0.0)
    if objective.z_loss:
        assert lse is not None
        penalty = objective.z_loss * lse.square()
        if reduction != "none":
            penalty = penalty.sum()
        loss = loss + (penalty / (~ignored).sum() if reduction == "mean" else penalty)
    poison = torch.where(bad if reduction == "none" else bad.any(), float("nan"), 1.0)
    return loss * poison.to(loss.dtype), lse
