"""The peers of ``head.py``: plain PyTorch and torch.compile of it, PyTorch's own function, and other libraries."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# (input, weight, target) → (loss, dx, dw)
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
_PACKAGES = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")


def with_grad(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """Forward and backward of a loss as one step."""

    def step(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = loss_of(x, w, y)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    return step


def plain(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), y)


def plain_in_float32(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def peer_steps(errors: dict[str, str]) -> dict[str, Step]:
    """Plain PyTorch, and the libraries that are installed; why others are not goes into ``errors``."""
    steps: dict[str, Step] = {"naive": with_grad(plain)}
    steps["torch.compile of naive"] = with_grad(torch.compile(plain, dynamic=False))
    steps["torch.compile of naive, float32 logits"] = with_grad(torch.compile(plain_in_float32, dynamic=False))
    for add in (_torch_native, _liger, _cut_cross_entropy, _quack):
        try:
            steps |= add()
        except Exception as error:
            errors[add.__name__.strip("_")] = f"{type(error).__name__}: {error}".splitlines()[0]
    return steps


def _torch_native() -> dict[str, Step]:
    native = getattr(F, "linear_cross_entropy", None)
    if native is None:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return {"torch native, chunked": with_grad(partial(native, options=options))}


def _liger() -> dict[str, Step]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    default, wide = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return {
        "liger-kernel": with_grad(lambda x, w, y: default(w, x, y)),
        "liger-kernel, fp32 dw": with_grad(lambda x, w, y: wide(w, x, y)),
    }


def _cut_cross_entropy() -> dict[str, Step]:
    from cut_cross_entropy import linear_cross_entropy as cut

    return {"cut-cross-entropy": with_grad(lambda x, w, y: cut(x, w, y))}


def _quack() -> dict[str, Step]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

    return {
        f"quack-kernels, chunk {chunk}": with_grad(partial(quack, chunk_size=chunk)) for chunk in (1024, 2048, 4096)
    }


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
