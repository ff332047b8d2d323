"""The truth that tests compare with: the loss as its definition reads, in plain PyTorch, in the dtype of its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def oracle(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, lse); every optional argument as in ``linear_cross_entropy``."""
    logits = F.linear(input, linear_weight, linear_bias).flatten(0, -2)
    y = target.reshape(-1).long()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, y, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    valid = y != ignore_index
    lse = logits.logsumexp(dim=-1)
    penalty = torch.where(valid, z_loss * lse.square(), 0.0)
    if reduction == "none":
        loss = (loss + penalty).reshape(target.shape)
    elif z_loss:
        loss = loss + (penalty.sum() / valid.sum() if reduction == "mean" else penalty.sum())
    return loss, torch.where(valid, lse, 0.0).reshape(target.shape)


def problem(
    n: int = 13,
    d: int = 6,
    v: int = 17,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    ignored: tuple[int, ...] = (2,),
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Random input (n, d) and linear_weight (v, d) that require grad, and target (n,) with some tokens ignored."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_()
    w = torch.randn(v, d, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_()
    y = torch.randint(0, v, (n,), generator=g)
    y[[i for i in ignored if i < n]] = -100
    return x, w, y.to(device)


def relative_error(got: Tensor, truth: Tensor) -> float:
    """‖got − truth‖ / ‖truth‖ in float64."""
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()
