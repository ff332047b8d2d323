"""The front door: arguments are checked once, then a schedule and a kernel are chosen."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import Arguments, Call, prepare
from .schedules.checkpointed import checkpointed
from .schedules.chunked import chunked
from .schedules.fused import consume_chunks, fused
from .schedules.naive import naive
from .schedules.plan import piece_size
from .schedules.recompute import attach_gradient
from .schedules.vocab_tiled import vocab_tiled


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    schedule: str = "fused",
    chunk_size: int | None = None,
    accum_dtype: torch.dtype | None = None,
    kernel: str = "auto",
    skip_ignored: bool = False,
    return_lse: bool = False,
    filter_eps: float | None = None,
    options: None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Cross-entropy of ``F.linear(input, linear_weight, linear_bias)`` against ``target``, without the logits.

    With :math:`z = s \tanh((x W^\top + b) / s)` for softcap :math:`s`, or :math:`z = x W^\top + b` without, the loss of
    token :math:`i` is :math:`\mathrm{CE}(z_i) + \mathtt{z\_loss} \cdot \mathrm{lse}_i^2`, and 0 for an ignored one.

    Args:
        input: hidden states (…, D); float32, bfloat16, float16 or float64.
        linear_weight: the head's weight (V, D), in the dtype of ``input`` (any but float64 under autocast).
        target: class indices, the shape of ``input`` without its last dimension; int64, int32, int16, int8 or uint8.
        linear_bias: (V,), or None.
        weight: class weights (V,), as in :func:`torch.nn.functional.cross_entropy`; not differentiable.
        reduction: ``"mean"`` (cross-entropy over Σ weight[target] of the valid tokens, z-loss over their number),
            ``"sum"`` or ``"none"``. If every target is ignored, ``"mean"`` is NaN with zero gradients, as in PyTorch.
        ignore_index: targets of this value have no loss, no gradient and lse 0; may lie inside the vocabulary. None
            means −100.
        label_smoothing: in [0, 1], as in :func:`torch.nn.functional.cross_entropy`.
        z_loss: factor of the squared log-sum-exp (PaLM, arXiv:2204.02311), ≥ 0.
        softcap: bound of the logits (Gemma 2, arXiv:2408.00118), > 0, or None.
        schedule: when the logits exist. ``"fused"``: some tokens at a time, consumed at once. ``"vocab_tiled"``: some
            words at a time, twice; no float32 sum of the weight's size, one product more. ``"naive"``, ``"chunked"``
            and ``"checkpointed"`` are there to be compared with.
        chunk_size: tokens C whose logits are alive at once (not for naive), or under vocab_tiled words T. None: a
            documented rule, :func:`flce_ref.schedules.plan.default_chunk_size` and
            :func:`flce_ref.schedules.plan.default_tile_width`.
        accum_dtype: dtype of what every piece adds to: dw over chunks (fused), dx over tiles (vocab_tiled). None:
            float32, or float64 for float64 inputs. ``torch.bfloat16``, with bfloat16 inputs, halves that buffer and
            rounds once per piece.
        kernel: what computes row losses and gradients (fused, vocab_tiled): a name of
            :func:`flce_ref.kernels.available`, or ``"auto"``.
        skip_ignored: drop ignored tokens before the first product. Reads their number from the device: one
            synchronisation, and an error while a CUDA graph is captured.
        return_lse: also return the log-sum-exp of every token, differentiable, the shape of ``target``.
        filter_eps: leave out the gradients of a token in a tile of words where its probabilities are all below this
            number, in (0, 1), and its target is not (vocab_tiled). None: none, the exact gradient. Backward then reads
            from the device how many tokens need each tile: one synchronisation, and an error while a CUDA graph is
            captured. Narrower tiles (``chunk_size``) leave out more. The loss is exact either way.
        options: accepted as None, for calls written for :func:`torch.nn.functional.linear_cross_entropy`.

    Returns:
        The loss, 0-d or (``reduction="none"``) of the shape of ``target``; with ``return_lse`` the pair (loss, lse).
        Both are float32 for half-precision inputs, else of the input's dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, dtype, device or value, or one that the schedule
            has no use for; the message names it.
        IndexError: on the CPU, a target that is neither ignored nor in 0 … V − 1. On CUDA, and while compiling, such a
            target makes the loss and its gradients NaN: looking would cost a synchronisation.

    Only gradients that are needed are computed. A second derivative raises a RuntimeError.
    """
    arguments = Arguments(
        input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, z_loss, softcap,
        schedule, chunk_size, accum_dtype, kernel, skip_ignored, return_lse, filter_eps, options,
    )  # fmt: skip
    return run(prepare(arguments), arguments)


def run(call: Call, a: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """What a call of the front door returns, once it is checked."""
    x, y = call.input, call.target
    kept = _valid_rows(y, call.objective.ignore_index) if a.skip_ignored else None
    if kept is not None:
        x, y = x.index_select(0, kept), y.index_select(0, kept)
        if a.chunk_size is None:  # about equal chunks of the tokens that are left
            size = piece_size(call.schedule, None, y.shape[0], *a.linear_weight.shape)
            call = replace(call, plan=replace(call.plan, chunk_size=size))
    loss, lse = _follow_schedule(call, x, a.linear_weight, a.linear_bias, y, a.reduction, a.return_lse)
    loss = loss.to(call.loss_dtype)
    if a.reduction == "none":
        loss = _to_rows(loss, kept, call.target).reshape(a.target.shape)
    if not a.return_lse:
        return loss
    assert lse is not None
    return loss, _to_rows(lse.to(call.loss_dtype), kept, call.target).reshape(a.target.shape)


def bind(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Arguments:
    """The arguments of :func:`linear_cross_entropy` for the same call; TypeError for an unknown option."""
    bound = inspect.signature(linear_cross_entropy).bind(input, linear_weight, target, **options)
    bound.apply_defaults()
    return Arguments(**bound.arguments)


def _follow_schedule(
    call: Call,
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    y: Tensor,
    reduction: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Loss under ``reduction`` and lse per token, from the schedule that was asked for."""
    head = (linear_weight, linear_bias, y, call.objective)
    if call.schedule == "naive":
        return naive(x, *head, reduction, return_lse)
    if call.schedule == "chunked":
        return chunked(x, *head, reduction, return_lse, call.plan.chunk_size)
    if call.schedule == "checkpointed":
        return checkpointed(x, *head, reduction, return_lse, call.plan.chunk_size)

    x = x.to(call.compute_dtype)
    if call.schedule == "vocab_tiled":
        return vocab_tiled(x, *head, reduction, call.plan)
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, linear_weight, linear_bias)
    )
    if differentiable and reduction != "none":
        loss, row_loss, lse = fused(x, *head, reduction, call.plan)
    else:
        with torch.no_grad():
            row_loss, lse, *_ = consume_chunks(x, *head, call.plan, needs=(False, False, False))
            loss = row_loss if reduction == "none" else row_loss.sum()
            if reduction == "mean":
                loss = loss / (y != call.objective.ignore_index).sum()
    if differentiable and (reduction == "none" or return_lse):
        row_loss, lse = attach_gradient(x, linear_weight, linear_bias, y, row_loss, lse, call.objective, call.plan)
        loss = row_loss if reduction == "none" else loss
    return loss, lse


def _valid_rows(target: Tensor, ignore_index: int) -> Tensor:
    """Indices of the tokens that are not ignored; needs their number on the host."""
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "skip_ignored=True reads the number of valid tokens from the device, which a CUDA graph capture forbids"
        )
    return (target != ignore_index).nonzero().squeeze(1)


def _to_rows(values: Tensor, kept: Tensor | None, target: Tensor) -> Tensor:
    """Values of the kept tokens at their places among all N, 0 elsewhere."""
    return values if kept is None else values.new_zeros(target.shape).index_copy(0, kept, values)
