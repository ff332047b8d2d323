"""How long a step takes and how much memory it needs: CUDA events and the caching allocator's peak.

A step is any function without arguments. Steps to be compared are measured together, in turns, because a GPU's clock
falls as it grows warm: what is measured second would look slower. For the same reason a turn begins with 0.2 s of the
step itself, untimed, and the turn's time is the median of the runs that follow.

    >>> results = measure({"naive": naive_step, "fused": fused_step})   # doctest: +SKIP
    >>> print(results["fused"].median_ms, results["fused"].peak_bytes)  # doctest: +SKIP
"""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

# What a machine's numbers depend on, beside the driver.
_PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas", "flce-ref")
# Cycles, about a millisecond, for which the GPU is kept busy so that the step's launches are queued when it starts.
_HEAD_START = 2_000_000
# Before a step is timed it runs for so long, at least once, that the clock is the one it sustains, not the one its
# predecessor left: on a card at its power limit, a step that follows a lighter one is faster for a while.
_SETTLE_SECONDS = 0.2
# Then it is timed for so long, at least once: single runs scatter by several per cent.
_TURN_SECONDS = 0.15


@dataclass(frozen=True)
class Measurement:
    """Times of one step in milliseconds, one of each turn in the order measured, and its peak in bytes.

    ``peak_bytes`` is the highest number of bytes alive during the step above those alive before it; None on the CPU,
    where nobody counts. ``error`` is set, and the rest empty, if the step failed.
    """

    times_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def median_ms(self) -> float | None:
        """Median of the times; None if there are none."""
        return statistics.median(self.times_ms) if self.times_ms else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "median_ms": self.median_ms}


def measure(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 10,
    warmups: int = 2,
    device: torch.device | str | None = None,
) -> dict[str, Measurement]:
    """Measure every step: warm-ups and the peak first, then ``rounds`` rounds in which each step has one turn.

    Args:
        steps: name → function. It must leave nothing behind: what it keeps alive would be counted for the next.
        rounds: turns of each step, ≥ 1. Every second round goes through the steps backwards.
        warmups: runs of each step before it is measured, ≥ 0: compilation, the allocator's first requests.
        device: where the steps run; None means the current CUDA device, or the CPU where there is none.

    Returns:
        A measurement per name, in the order of ``steps``. A step that raises, running out of memory included, has its
        ``error`` in place of times and does not stop the others.

    Raises:
        ValueError: ``rounds`` or ``warmups`` too small.
    """
    if rounds < 1 or warmups < 0:
        raise ValueError(f"rounds must be ≥ 1 and warmups ≥ 0, got {rounds} and {warmups}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    times: dict[str, list[float]] = {}
    peaks: dict[str, int | None] = {}
    errors: dict[str, str] = {}

    def attempt(name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        finally:
            if name in errors:  # only now: the exception's traceback held the step's buffers
                _free(device)

    def warm_up(step: Callable[[], object]) -> int | None:
        for _ in range(warmups):
            step()
        return _peak(step, device)

    for name, step in steps.items():
        peaks[name] = attempt(name, partial(warm_up, step))
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            if name not in errors:
                elapsed = attempt(name, partial(_time, steps[name], device))
                times.setdefault(name, []).append(elapsed)
    return {
        name: Measurement(error=errors[name]) if name in errors else Measurement(tuple(times[name]), peaks[name])
        for name in steps
    }


def provenance() -> dict[str, Any]:
    """What the numbers were measured with: machine, GPU, driver, versions, date (UTC)."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with its build, unlike the package's version
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "cuda": torch.version.cuda,
        "gpu": None,
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "driver": _driver(),
        }
    return found


def _peak(step: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        step()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _time(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one turn: of one run on the CPU, on a GPU the median of several after it has settled."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        settled = time.perf_counter() + _SETTLE_SECONDS
        while time.perf_counter() < settled:
            step()
            torch.cuda.synchronize()
        times: list[float] = []
        enough = time.perf_counter() + _TURN_SECONDS
        while not times or time.perf_counter() < enough:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _driver() -> str | None:
    """The NVIDIA driver's version as its kernel module states it; None where that is not to be read."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        pass
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)
