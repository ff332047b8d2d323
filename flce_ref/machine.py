"""What a lab runs on: which device, which half-precision dtype, how many tokens.

The labs ask here and nowhere else, so that they run on whatever there is, say beforehand what a cell will take, and can
be tried without the hardware.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flce_ref.kernels import available

GIB = 2**30
FEWEST_TOKENS = 256

# What a simulated peak leaves out: workspaces of the matrix library, and blocks that are larger than what they hold.
_MARGIN, _WORKSPACES = 1.05, GIB // 4


@dataclass(frozen=True)
class Machine:
    """Where a lab runs.

    Attributes:
        device: "cuda" or "cpu".
        name: the GPU's name, or "CPU".
        half: the 16-bit dtype that it computes in: bfloat16, but float16 on GPUs that only emulate bfloat16.
    """

    device: str
    name: str
    half: torch.dtype

    def free_bytes(self) -> int:
        """GPU memory that can be allocated now: what the driver has, and what PyTorch holds without using it."""
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def tokens(self, most: int, needs: Callable[[int], int]) -> int:
        """As many tokens as fit on the GPU: `most`, or a half of it, a quarter, … Says what they will take.

        Args:
            most: what one would like.
            needs: the bytes that n tokens take at their peak, everything included.

        Returns:
            The number of tokens; 0 without a GPU, or if not even a few hundred fit.
        """
        if self.device != "cuda":
            print(f"No GPU here. On one, {most:,} tokens would take {needs(most) / GIB:.2f} GiB.")
            return 0
        free, n = self.free_bytes(), most
        while not self._fits(needs(n), free):
            if n // 2 < FEWEST_TOKENS:
                print(
                    f"Left out: {n:,} tokens take {needs(n) / GIB:.2f} GiB, {free / GIB:.2f} are free on {self.name}."
                )
                return 0
            n //= 2
        dtype = str(self.half).removeprefix("torch.")
        print(f"{n:,} tokens in {dtype} take {needs(n) / GIB:.2f} GiB; {free / GIB:.2f} are free on {self.name}.")
        return n

    @staticmethod
    def _fits(needed: int, free: int) -> bool:
        return _MARGIN * needed + _WORKSPACES <= free


def this_machine() -> Machine:
    """The current CUDA device, or the CPU."""
    if not torch.cuda.is_available():
        return Machine("cpu", "CPU", torch.bfloat16)
    return Machine("cuda", torch.cuda.get_device_name(), half_dtype(torch.cuda.get_device_capability()))


def what_is_missing() -> list[str]:
    """What a lab can do without but would use, and how to get it without replacing PyTorch; one sentence each."""
    advice = []
    if importlib.util.find_spec("matplotlib") is None:
        advice.append("Figures need matplotlib: pip install matplotlib")
    if torch.cuda.is_available():
        major = (torch.version.cuda or "").partition(".")[0]
        pip = f"pip install --no-deps cuda-core cuda-pathfinder cuda-bindings=={major}.*"
        usable = available()
        if usable["cuda"] != "usable":
            advice.append(f"The kernel in CUDA C++ can't be used here ({usable['cuda']}): {pip}")
        if usable["triton"] != "usable":
            advice.append(f"The kernel in Triton can't be used here ({usable['triton']})")
    return advice


def half_dtype(capability: tuple[int, int]) -> torch.dtype:
    """bfloat16 from compute capability 8.0 on, else float16: `torch.cuda.is_bf16_supported` is also true where bfloat16
    is emulated, as on a T4."""
    return torch.bfloat16 if capability >= (8, 0) else torch.float16
