"""Where a chunk runs: one contract, defined by :mod:`flce_ref.kernels.eager`."""

from __future__ import annotations

from torch import Tensor

KERNELS = ("eager",)


def available() -> dict[str, str]:
    """Each kernel's name and ``"usable"``, or the reason why it is not."""
    return {"eager": "usable"}


def resolve(kernel: str, logits_like: Tensor) -> str:
    """The kernel that runs for ``kernel`` ("auto" or a name) on the device of ``logits_like``."""
    return "eager" if kernel == "auto" else kernel
