"""Where a chunk runs: one contract, defined by :mod:`flce_ref.kernels.eager`, kept by three kernels.

``cuda`` (CUDA C++) and ``triton`` need a CUDA device and optional packages; ``eager`` is plain PyTorch and runs
everywhere. "auto" is the first that can run.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KERNELS = ("cuda", "triton", "eager")

#: What the two fast kernels compute in float32 and store in.
FAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available() -> dict[str, str]:
    """Each kernel's name and ``"usable"``, or the reason why it is not, on the current CUDA device or else the CPU.

    The first call on a device loads the kernels there, which takes a second or so.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return {name: problem(name, device, torch.float32) or "usable" for name in KERNELS}


def resolve(kernel: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that runs for ``kernel``, "auto" or a name, on contiguous logits of ``dtype`` on ``device``.

    While compiling, ``kernel`` itself: the custom op resolves it when it runs.

    Raises:
        ValueError: a kernel asked for by name that cannot run there; the message says why, and which can.
    """
    if torch.compiler.is_compiling():
        return kernel
    if kernel == "auto":
        candidates = KERNELS if device.type == "cuda" else ("eager",)  # not Triton's interpreter, which takes forever
        return next(name for name in candidates if problem(name, device, dtype) is None)
    # On the meta device nothing runs: any name may be asked about.
    reason = None if device.type == "meta" else problem(kernel, device, dtype)
    if reason is not None:
        usable = ", ".join(repr(name) for name in KERNELS if problem(name, device, dtype) is None)
        raise ValueError(f"kernel={kernel!r} can't run here: {reason}; accepted are 'auto' and {usable}")
    return kernel


def why(asked: str, device: torch.device, dtype: torch.dtype) -> str:
    """One sentence: which kernel :func:`resolve` gives for ``asked``, and why not an earlier one."""
    chosen = resolve(asked, device, dtype)
    if asked != "auto":
        return f"kernel {chosen}, as asked for"
    passed_over = {name: problem(name, device, dtype) for name in KERNELS[: KERNELS.index(chosen)]}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items() if reason)
    return f"kernel {chosen}, the first that can run" + (f" ({reasons})" if reasons else "")


def implementation(kernel: str, logits: Tensor, function: str = "cross_entropy_") -> Callable[..., Any]:
    """The ``function`` of the contract that runs for ``kernel`` on ``logits`` (C, V), whatever their strides."""
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        if kernel not in ("auto", "eager"):
            raise ValueError(
                f"kernel={kernel!r} needs logits whose columns have stride 1, got strides {logits.stride()}; "
                "accepted are 'auto' and 'eager'"
            )
        kernel = "eager"
    name = resolve(kernel, logits.device, logits.dtype)
    if name != "eager" and function != "cross_entropy_":
        name += "_tiles"
    run: Callable[..., Any] = getattr(importlib.import_module(f".{name}", __name__), function)
    return run


def scale(gradient: Tensor, factor: Tensor, out: Tensor, kernel: str) -> None:
    """``out`` = ``gradient`` · ``factor``, (1,) on their device: by ``kernel`` where it can, else in PyTorch."""
    fast = (
        out.is_cuda
        and out.numel() > 0
        and out.dtype in FAST_DTYPES
        and gradient.dtype in (out.dtype, torch.float32)
        and factor.dtype == torch.float32
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (gradient, out))
    )
    name = resolve(kernel, out.device, out.dtype) if fast else "eager"
    importlib.import_module(f".{name}", __name__).scale(gradient, factor, out)


def problem(kernel: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``kernel`` cannot run on contiguous logits of ``dtype`` on ``device``; None if it can."""
    if kernel == "eager":
        return None
    if dtype not in FAST_DTYPES:
        return f"it computes in float32, and the logits are {dtype}"
    if kernel == "triton" and os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu":
        return _import_problem("triton")
    if device.type != "cuda":
        return f"it needs a CUDA device, and the logits are on {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    if kernel == "triton" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(index) < (8, 0):
        return "Triton has no bfloat16 on GPUs of compute capability below 8.0"
    return _import_problem(kernel) or _launch_problem(kernel, index)


@functools.cache
def _import_problem(kernel: str) -> str | None:
    try:
        importlib.import_module(f".{kernel}", __name__)
    except ImportError as error:
        return f"it needs the packages of flce-ref[{kernel}]: {error}"
    return None


@functools.cache
def _launch_problem(kernel: str, device: int) -> str | None:
    problem: str | None = importlib.import_module(f".{kernel}", __name__).problem(device)
    return problem
