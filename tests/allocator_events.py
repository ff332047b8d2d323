"""What PyTorch's real CPU allocator did during a step, for comparing the simulator with.

Buffers of at most 512 B are left out: PyTorch wraps the number of ``x * 2`` in a tensor, which is CPU memory whatever
the device, and which no dispatch mode sees.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flce_ref.memory import Timeline

GRAIN = 512  # bytes: what the simulator rounds to


def real_events(step: Callable[..., Any], *inputs: Any) -> list[int]:
    """Allocations (+bytes) and frees (−bytes) of ``step`` and its backward, in order, from the profiler.

    What the step returns is alive until the end, as in the simulation.
    """
    gc.collect()
    gc.disable()  # a collection frees cycles at an arbitrary event
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = step(*inputs)
            loss = result if isinstance(result, Tensor) else result[0]
            if loss.requires_grad:
                loss.backward()
    finally:
        gc.enable()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return [-(-size // GRAIN) * GRAIN if size > 0 else size // GRAIN * GRAIN for size in sizes if abs(size) > GRAIN]


def simulated_events(timeline: Timeline) -> list[int]:
    """The same of a timeline, without what it was given."""
    events = [(a.start, a.bytes) for a in timeline.allocations if a.start]
    events += [(a.end, -a.bytes) for a in timeline.allocations if a.end is not None]
    return [size for _, size in sorted(events) if abs(size) > GRAIN]


def without_passing(events: list[int]) -> list[int]:
    """``events`` without the buffers that are freed before anything else happens, those inside kernels among them."""
    kept: list[int] = []
    for size in events:
        if kept and size < 0 and kept[-1] == -size:
            kept.pop()
        else:
            kept.append(size)
    return kept
