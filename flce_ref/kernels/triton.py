"""The row kernel in Triton: the contract of :mod:`flce_ref.kernels.eager`, to be read beside ``cross_entropy.cu``.

One program per row. The row is read twice, the second time with luck from the L2 cache: Triton keeps no row on chip
across a loop. Under ``TRITON_INTERPRET=1`` it runs on the CPU, slowly, which is how it is tested without a GPU.
"""

from __future__ import annotations

import functools
import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..objective import Objective

# The maximum starts here and not at −∞, so that exp(−∞ − max) of a masked word is 0 and not NaN.
_LOWEST = tl.constexpr(-3.402823466e38)


@functools.cache
def problem(device: int) -> str | None:
    """Why the kernel cannot run on CUDA device number ``device``, or None if it can; found out by launching it once.

    Warns (once per device) where it cannot, as Triton is there and only its compiler or the driver can have refused.
    """
    try:
        logits = torch.zeros(1, 1, device=torch.device("cuda", device))
        cross_entropy_(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), Objective(1))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the Triton kernel of flce_ref can't be used: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return None


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
    write_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """As :func:`flce_ref.kernels.eager.cross_entropy_`, for logits (C, V) with columns of stride 1.

    A target that is no word makes NaN and reads nothing.
    """
    rows, vocab_size = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    if rows == 0:
        return loss, lse
    smoothing, weight = objective.label_smoothing, objective.class_weight
    total_weight = weight.sum() if weight is not None and smoothing else None
    block = min(triton.next_power_of_2(vocab_size), 4096)
    vectors = (None if t is None else t.contiguous() for t in (target, weight, total_weight, grad_loss, grad_lse))
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        _cross_entropy[(rows,)](
            logits, logits.stride(0), *vectors, loss, lse,
            objective.ignore_index, smoothing, objective.z_loss, objective.softcap or 1.0,
            SMOOTHING=smoothing > 0, SOFTCAP=objective.softcap is not None, WRITE_GRAD=write_grad,
            V=vocab_size, BLOCK=block, num_warps=8 if block > 1024 else 4,
        )  # fmt: skip
    return loss, lse


def scale(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """As :func:`flce_ref.kernels.eager.scale`, for contiguous tensors."""
    block = 4096
    with torch.cuda.device(out.device if out.is_cuda else -1):
        _scale[(triton.cdiv(out.numel(), block),)](gradient, factor, out, out.numel(), BLOCK=block, num_warps=8)


@triton.jit
def _scale(gradient, factor, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(gradient + i, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # (1 − e) / (1 + e) loses the digits of a small x to the subtraction; there the series is exact to 1e-9.
    e = tl.exp(-2 * tl.abs(x))
    large = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.05, x - x * x * x * (1 / 3 - x * x * (2 / 15)), large)


@triton.jit
def _load(z_row, column, softcap, V: tl.constexpr, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = column < V
    z = tl.load(z_row + column, mask=inside, other=0.0).to(tl.float32)
    if SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return tl.where(inside, z, float("-inf"))  # beyond the row: a word of probability 0


@triton.jit
def _class_weight(class_weight, column, V: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = column < V
    return inside.to(tl.float32) if class_weight is None else tl.load(class_weight + column, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["ignore_index", "smoothing", "z_loss", "softcap"])
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, row_stride,  # (C, V)
    target, class_weight, total_weight, grad_loss, grad_lse,  # (C,), (V,) | None, () | None, (C,) | None, (C,) | None
    loss, lse,  # (C,), (C,)
    ignore_index, smoothing, z_loss, softcap,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, WRITE_GRAD: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 64 bits: C · V passes 2³¹
    z_row = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    y = tl.load(target + row)

    # Rows that need no softmax are not read: 0 for an ignored one, NaN for a target that is no word.
    if (y == ignore_index) | (y < 0) | (y >= V):
        value = tl.where(y == ignore_index, 0.0, float("nan"))
        tl.store(loss + row, value)
        tl.store(lse + row, value)
        if WRITE_GRAD:
            for start in range(0, V, BLOCK):
                column = start + columns
                fill = tl.full([BLOCK], 0.0, tl.float32) + value
                tl.store(z_row + column, fill.to(logits.dtype.element_ty), mask=column < V)
    else:
        # First pass: max, Σ exp(z − max) and, for label smoothing, Σ w (z − reference). Where the maximum rises, what
        # was summed before is moved to the new one. The reference, a logit of the row, keeps the digits of the last
        # sum under a large common offset.
        z_y = _load(z_row, y, softcap, V, SOFTCAP)
        z_0 = _load(z_row, 0, softcap, V, SOFTCAP)
        reference = tl.where(tl.abs(z_0) <= -_LOWEST, z_0, 0.0)
        row_max = tl.full([], _LOWEST, tl.float32)
        exps, smooths = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            column = start + columns
            z = _load(z_row, column, softcap, V, SOFTCAP)
            new_max = tl.maximum(row_max, tl.max(z, 0))
            exps = exps * tl.exp(row_max - new_max) + tl.exp(z - new_max)
            row_max = new_max
            if SMOOTHING:
                weighted = _class_weight(class_weight, column, V) * (z - reference)
                smooths += tl.where(column < V, weighted, 0.0)
        sumexp = tl.sum(exps, 0)
        shift = tl.where(sumexp == 0, 0.0, row_max)

        log_sumexp = tl.log(sumexp)
        row_lse = shift + log_sumexp
        on_target = (1 - smoothing) * _class_weight(class_weight, y, V)
        # log Σ exp(z − max) − (z_y − max): the two maxima of a large common offset never meet in a sum.
        row_loss = on_target * (log_sumexp - (z_y - shift))
        on_probability = on_target
        smooth = smoothing / V
        if SMOOTHING:
            total = V if total_weight is None else tl.load(total_weight)
            row_loss += smooth * (total * (log_sumexp - (reference - shift)) - tl.sum(smooths, 0))
            on_probability += smooth * total
        if z_loss != 0:
            row_loss += z_loss * row_lse * row_lse
            on_probability += 2 * z_loss * row_lse
        tl.store(loss + row, row_loss)
        tl.store(lse + row, row_lse)

        # Second pass: dz_j = on_probability · p_j − on_target · 1[j = y] − smooth · w_j, times the upstream.
        if WRITE_GRAD:
            up = 1.0 if grad_loss is None else tl.load(grad_loss + row)
            on_probability = on_probability * up
            if grad_lse is not None:
                on_probability += tl.load(grad_lse + row)
            scale = on_probability / sumexp
            for start in range(0, V, BLOCK):
                column = start + columns
                z = _load(z_row, column, softcap, V, SOFTCAP)
                grad = scale * tl.exp(z - shift)
                if SMOOTHING:
                    grad -= smooth * up * _class_weight(class_weight, column, V)
                # In float32: after rounding p to bfloat16, p − 1 is 0 for every p above 0.998.
                grad -= tl.where(column == y, on_target * up, 0.0)
                if SOFTCAP:
                    grad *= 1 - (z / softcap) * (z / softcap)
                tl.store(z_row + column, grad.to(logits.dtype.element_ty), mask=column < V)
