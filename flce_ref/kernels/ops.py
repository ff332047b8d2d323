"""The two operations a chunk is made of, as PyTorch custom ops.

A custom op is what ``torch.compile`` and CUDA graphs see as one step that overwrites one buffer, and what the memory
simulator books as one kernel. Both overwrite their first argument and allocate nothing of its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..objective import Objective
from . import implementation

# A block of the left factor, copied to the accumulator's dtype where the device has no mixed-precision product.
_BLOCK_BYTES = 64 * 2**20


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    kernel: str,
    write_grad: bool = True,
    grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row of ``logits`` (C, V), both (C,); with ``write_grad`` the logits become their gradient.

    ``grad_loss`` and ``grad_lse`` (C,) multiply the gradient of a row's loss and lse before it is stored.
    """
    o = objective
    loss, lse = _cross_entropy_op(
        logits, target, o.class_weight, grad_loss, grad_lse, o.ignore_index, o.label_smoothing, o.z_loss, o.softcap,
        write_grad, kernel,
    )  # fmt: skip
    return loss, lse


@torch.library.custom_op("flce_ref::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_op(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    write_grad: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    objective = Objective(logits.shape[1], ignore_index, label_smoothing, z_loss, softcap, class_weight)
    return implementation(kernel, logits)(logits, target, objective, grad_loss, grad_lse, write_grad)


@_cross_entropy_op.register_fake
def _(logits: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
    row = torch.empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    return row, torch.empty_like(row)


@torch.library.custom_op("flce_ref::accumulate_product_", mutates_args={"out"})
def accumulate_product_(out: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """``out`` (M, K) = left (M, C) @ right (C, K), added to what ``out`` holds unless ``overwrite``.

    ``out`` may be wider than the factors: the product is then summed and stored in ``out``'s dtype, never rounded to
    theirs in between.
    """
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=0 if overwrite else 1, out=out)
    elif out.is_cuda:
        if overwrite:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        right = right.to(out.dtype)
        step = max(1, _BLOCK_BYTES // (out.element_size() * max(1, left.shape[1])))
        for start in range(0, out.shape[0], step):
            block = out[start : start + step]
            torch.addmm(block, left[start : start + step].to(out.dtype), right, beta=0 if overwrite else 1, out=block)


@accumulate_product_.register_fake
def _(out: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    return None
