"""The checks at the front door: each argument is looked at once; an error says what came and what is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor

from . import kernels

REDUCTIONS = ("mean", "sum", "none")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOAT32 = torch.finfo(torch.float32)
TARGET_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Which optional arguments each schedule has a use for; asking another for them is an error, not a no-op.
HONOURS: dict[str, frozenset[str]] = {
    "naive": frozenset(),
    "chunked": frozenset({"chunk_size"}),
    "checkpointed": frozenset({"chunk_size"}),
    "fused": frozenset({"chunk_size", "accum_dtype", "kernel"}),
    "vocab_tiled": frozenset({"chunk_size", "accum_dtype", "kernel", "filter_eps"}),
}


def check_tensors(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    is_shard: bool = False,
) -> None:
    """Types, shapes, dtypes and devices of the tensors, read but for the values of ``target``.

    Of a shard, ``linear_weight`` holds some rows of the head's weight, or none.
    """
    named = {"input": input, "linear_weight": linear_weight, "target": target}
    named |= {k: v for k, v in (("linear_bias", linear_bias), ("weight", weight)) if v is not None}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
            raise TypeError(f"{name} must be a dense tensor (torch.strided), got {kind}")
        if type(tensor).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor; plain tensors are accepted. flce_ref.distributed has functions for a sharded "
                f"vocabulary and for sharded tokens; {name}.full_tensor() gathers it"
            )
        if tensor.device != input.device:
            raise ValueError(f"{name} is on {tensor.device} but input is on {input.device}; all must share one device")
    _check_head(input, linear_weight, linear_bias, is_shard)
    if target.is_floating_point() or target.is_complex():
        raise TypeError(f"target must hold class indices ({_names(TARGET_DTYPES)}), got {target.dtype}: "
                        "class probabilities are not supported")  # fmt: skip
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(f"target must have one of the dtypes {_names(TARGET_DTYPES)}, got {target.dtype}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target must have the shape of input without its last dimension, {tuple(input.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    if weight is not None:
        if weight.dtype not in FLOAT_DTYPES:
            raise TypeError(f"weight must have one of the dtypes {_names(FLOAT_DTYPES)}, got {weight.dtype}")
        if weight.requires_grad:
            raise ValueError("weight requires grad, but class weights are constants of the loss; pass weight.detach()")


def check_class_weight(weight: Tensor | None, vocab_size: int) -> None:
    """One class weight for each of all words."""
    if weight is not None and weight.shape != (vocab_size,):
        raise ValueError(f"weight must be ({vocab_size},), one per word of linear_weight, got {tuple(weight.shape)}")


def _check_head(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, is_shard: bool) -> None:
    if input.ndim < 1:
        raise ValueError("input must be (…, D) with at least one dimension, got a 0-d tensor")
    no_words = linear_weight.ndim == 2 and linear_weight.shape[0] == 0 and not is_shard
    if linear_weight.ndim != 2 or no_words or linear_weight.shape[1] != input.shape[-1]:
        sharded = linear_weight.ndim != 2 or linear_weight.numel() == 0
        hint = "; a weight sharded by FSDP or ZeRO-3 must be gathered before the loss sees it" if sharded else ""
        raise ValueError(
            f"linear_weight must be (V, D) with V ≥ 1 and D = {input.shape[-1]}, the last dimension of input, "
            f"got {tuple(linear_weight.shape)}{hint}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ValueError(
            f"linear_bias must be ({linear_weight.shape[0]},), one per row of linear_weight, "
            f"got {tuple(linear_bias.shape)}"
        )
    heads = {"input": input, "linear_weight": linear_weight}
    heads |= {} if linear_bias is None else {"linear_bias": linear_bias}
    for name, tensor in heads.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must have one of the dtypes {_names(FLOAT_DTYPES)}, got {tensor.dtype}")
        if tensor.dtype != input.dtype and (autocast_dtype(input) is None or tensor.dtype == torch.float64):
            raise TypeError(
                f"{name} is {tensor.dtype} but input is {input.dtype}; they must have one dtype, unless autocast "
                "brings both to its own, which it does with all but float64"
            )


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """The dtype in which ``F.linear`` would compute under the autocast now in force; None outside autocast."""
    device = input.device.type
    # Asked by name, since torch.amp.is_autocast_available cannot be compiled before PyTorch 2.9.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return None if input.dtype == torch.float64 else torch.get_autocast_dtype(device)


def check_target_range(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """IndexError for an int64 target that is neither a word nor ignored: on the CPU, where looking does not wait.

    On other devices the loss and its gradients become NaN instead. Fake and traced tensors have no values to look at.
    """
    if torch.compiler.is_compiling() or target.device.type != "cpu":
        return
    if type(target) is not Tensor:
        from torch._subclasses.fake_tensor import is_fake  # here, for a plain tensor shall not pay for loading it

        if is_fake(target) or torch._is_functional_tensor(target):
            return
    bad = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    if bad.any():
        value = int(target[bad][0])
        raise IndexError(
            f"target {value} is out of range: accepted are 0 … {vocab_size - 1} and ignore_index={ignore_index}"
        )


def check_flags(**flags: object) -> None:
    """Options that are on or off."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_objective(
    reduction: str, ignore_index: int | None, label_smoothing: float, z_loss: float, softcap: float | None
) -> None:
    """The options of the loss itself."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if ignore_index is not None and (not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool)):
        raise TypeError(f"ignore_index must be an int or None, got {ignore_index!r}")
    if ignore_index is not None and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index}")
    for name, value, ok, accepted in (
        ("label_smoothing", label_smoothing, lambda v: 0 <= v <= 1, "a number in [0, 1]"),
        ("z_loss", z_loss, lambda v: 0 <= v <= _FLOAT32.max, "a finite number ≥ 0 that float32 holds"),
        (
            "softcap",
            softcap,
            lambda v: _FLOAT32.tiny <= v <= _FLOAT32.max,
            "None or a finite number > 0 that float32 holds",
        ),
    ):
        if name == "softcap" and value is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be {accepted}, got {value!r}")
        if not ok(value):
            raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_schedule(
    schedule: str,
    chunk_size: int | None,
    accum_dtype: torch.dtype | None,
    kernel: str,
    filter_eps: float | None,
    compute_dtype: torch.dtype,
) -> None:
    """The options of how the loss is computed, each only where the schedule has a use for it."""
    if not isinstance(schedule, str) or schedule not in HONOURS:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, HONOURS))}, got {schedule!r}")
    given = {
        "chunk_size": chunk_size is not None,
        "accum_dtype": accum_dtype is not None,
        "kernel": kernel != "auto",
        "filter_eps": filter_eps is not None,
    }
    for name, is_given in given.items():
        if is_given and name not in HONOURS[schedule]:
            able = ", ".join(repr(s) for s, names in HONOURS.items() if name in names)
            raise ValueError(f"schedule={schedule!r} has no use for {name}; schedules that do: {able}")
    if chunk_size is not None:
        if not isinstance(chunk_size, Integral) or isinstance(chunk_size, bool):
            raise TypeError(f"chunk_size must be an int ≥ 1 or None, got {chunk_size!r}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be an int ≥ 1 or None, got {chunk_size}")
    if accum_dtype is not None:
        accepted = {torch.promote_types(compute_dtype, torch.float32)}
        accepted |= {torch.bfloat16} if compute_dtype == torch.bfloat16 else set()
        if not isinstance(accum_dtype, torch.dtype):
            raise TypeError(f"accum_dtype must be a torch.dtype or None, got {accum_dtype!r}")
        if accum_dtype not in accepted:
            why = ": an unscaled dw overflows float16" if accum_dtype == torch.float16 else ""
            raise ValueError(
                f"accum_dtype for {compute_dtype} products must be None, {_names(sorted(accepted, key=str))}; "
                f"got {accum_dtype}{why}"
            )
    if kernel not in ("auto", *kernels.KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(map(repr, ('auto', *kernels.KERNELS)))}, got {kernel!r}")
    if filter_eps is not None:
        if not isinstance(filter_eps, Real) or isinstance(filter_eps, bool):
            raise TypeError(f"filter_eps must be a number in (0, 1) or None, got {filter_eps!r}")
        if not 0 < filter_eps < 1:
            raise ValueError(f"filter_eps must be a number in (0, 1) or None, got {filter_eps!r}")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(d) for d in dtypes)
