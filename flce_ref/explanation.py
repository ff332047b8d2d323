"""What would run, and what it would take: the front door's choices without the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .arguments import HONOURS
from .call import Arguments, Call, prepare
from .functional import bind
from .schedules.peak import Head, fused_peak, plain_peak, tiled_peak


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`.

    ``kernel`` and ``chunk_size`` are None where the schedule has none; under vocab_tiled the latter counts words, under
    the others tokens. ``step_peak_bytes`` is the highest sum of live
    bytes in forward + backward above input, weight and target; None where no closed form is known.
    """

    schedule: str
    kernel: str | None
    chunk_size: int | None
    step_peak_bytes: int | None
    why: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"schedule {self.schedule}"]
        parts += [f"kernel {self.kernel}"] if self.kernel else []
        pieces = "tiles of {} words" if self.schedule == "vocab_tiled" else "chunks of {} tokens"
        parts += [pieces.format(self.chunk_size)] if self.chunk_size else []
        if self.step_peak_bytes is not None:
            parts.append(f"step peak {self.step_peak_bytes / 2**30:.3f} GiB above the inputs")
        return "\n".join([", ".join(parts), *(f"  - {reason}" for reason in self.why)])


def explain(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Explanation:
    """What :func:`flce_ref.linear_cross_entropy` would run for the same arguments, and the memory it would take.

    Nothing is computed, so tensors on the ``meta`` device serve as well, and cost nothing. Gradients are counted for
    whichever of ``input``, ``linear_weight`` and ``linear_bias`` require them; an lse that is returned is taken to be
    read, not differentiated. Raises what the call itself would raise.

    >>> x = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    >>> w = torch.empty(151552, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    >>> y = torch.empty(8192, dtype=torch.int64, device="meta")
    >>> print(f"{explain(x, w, y).step_peak_bytes / 2**30:.3f} GiB")
    1.766 GiB
    """
    arguments = bind(input, linear_weight, target, **options)
    call = prepare(arguments)
    head = _head(call, arguments)
    why = []
    if call.schedule == "naive":
        why.append("all (N, V) logits at once, as PyTorch computes them: kept to be compared with")
    elif arguments.chunk_size is None and call.schedule == "vocab_tiled":
        why.append("the default tile: about 2 D words, at least 1024, all tiles about equal")
    elif arguments.chunk_size is None:
        why.append("the default chunk: about D tokens, at least 1024, all chunks about equal")
    has_kernel = "kernel" in HONOURS[call.schedule]
    if has_kernel:
        why.append(kernels.why(arguments.kernel, input.device, call.compute_dtype))
        why += _why_tiled(call, head) if call.schedule == "vocab_tiled" else _why_fused(call, head, arguments)
    elif arguments.return_lse and head.needs_gradients:
        why.append("an lse that is differentiated, or kept with its graph, keeps more logits; that is not counted")
    if arguments.skip_ignored:
        why.append(
            "ignored tokens are dropped first; all are counted here, for their number is known to the device only"
        )
    peak = _step_peak(call, head)
    if peak is None:
        why.append("no closed form under autocast; flce_ref.memory.simulate counts it")
    return Explanation(
        call.schedule,
        call.plan.kernel if has_kernel else None,
        None if call.schedule == "naive" else call.plan.chunk_size,
        peak,
        tuple(why),
    )


def _head(call: Call, arguments: Arguments) -> Head:
    input, linear_weight, linear_bias = arguments.input, arguments.linear_weight, arguments.linear_bias
    return Head(
        n=call.input.shape[0],
        d=linear_weight.shape[1],
        v=linear_weight.shape[0],
        compute_bytes=call.compute_dtype.itemsize,
        input_bytes=input.dtype.itemsize,
        weight_bytes=linear_weight.dtype.itemsize,
        needs_dx=torch.is_grad_enabled() and input.requires_grad,
        needs_dw=torch.is_grad_enabled() and linear_weight.requires_grad,
        softcap=call.objective.softcap is not None,
        uses_lse=bool(call.objective.z_loss),
        returns_lse=arguments.return_lse,
        needs_db=torch.is_grad_enabled() and linear_bias is not None and linear_bias.requires_grad,
    )


def _why_fused(call: Call, head: Head, arguments: Arguments) -> list[str]:
    if not head.needs_gradients:
        return ["no gradient is wanted: the logits of a chunk are read once and overwritten by the next"]
    why = [f"dw is summed over chunks in {call.plan.accum_dtype}"] if head.needs_dw else []
    if arguments.reduction == "none":
        return [*why, "upstream gradients may differ by token: backward makes the logits again, chunk by chunk"]
    why.append("the loss is a scalar: its gradient is taken in forward and scaled in backward")
    if arguments.return_lse:
        why.append("where lse is differentiated too, backward makes the logits again; that is not counted")
    return why


def _why_tiled(call: Call, head: Head) -> list[str]:
    if not head.needs_gradients:
        return ["no gradient is wanted: the logits of a tile are read once and overwritten by the next"]
    why = [f"dx is summed over tiles in {call.plan.accum_dtype}"] if head.needs_dx else []
    why.append("backward makes the logits again, tile by tile")
    if call.plan.filter_eps is not None:
        why.append("what is filtered out is known to the device only: the peak is the highest possible")
    return why


def _step_peak(call: Call, head: Head) -> int | None:
    if call.schedule == "fused":
        return fused_peak(head, call.plan)
    if call.schedule == "vocab_tiled":
        return tiled_peak(head, call.plan)
    if head.compute_bytes != head.weight_bytes or head.compute_bytes != head.input_bytes:
        return None
    chunk = max(head.n, 1) if call.schedule == "naive" else call.plan.chunk_size
    return plain_peak(head, chunk, checkpointed=call.schedule == "checkpointed")
