"""The memory timeline of a real run on a CUDA device, through the history that PyTorch's caching allocator keeps.

Recording costs a few microseconds an allocation: Python stacks only, for one with C++ frames can take minutes to read.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from types import CodeType
from typing import Any

import torch

from .private import is_recording
from .snapshot import devices, timeline_of
from .stacks import short_path
from .timeline import Frame, Timeline


@contextlib.contextmanager
def record(
    title: str = "recorded step", *, device: int | str | torch.device | None = None, max_entries: int = 1_000_000
) -> Iterator[Recording]:
    """Record what is allocated and freed on a CUDA device inside the block.

    >>> with record("my step") as recording:                    # doctest: +SKIP
    ...     loss = step(input, weight, target)
    ...     loss.backward()
    >>> recording.timeline.plot()                               # doctest: +SKIP

    Recording is off after the block, whatever happens in it. After an exception, an out-of-memory error included, the
    object has the timeline up to there, and the error goes on. What is inside :func:`flce_ref.memory.label` is named.
    It's the second step that is like all later ones: in the first, cuBLAS and others allocate what they keep.

    Args:
        title: of the timeline.
        device: the one to look at, as an index or ``"cuda:1"``; by default the current one. PyTorch records all.
        max_entries: how many entries the history keeps for each device, the last ones; an allocation and its free make
            three. If they do not suffice, the timeline's notes say so.

    Yields:
        The :class:`~flce_ref.memory.recorder.Recording`, whose ``timeline`` can be read after the block.

    Raises:
        RuntimeError: there is no CUDA device, or a recording is on already: PyTorch has one history, whose settings
            can't be read and so could not be brought back.
        ValueError: ``device`` is not a CUDA device of this machine, or ``max_entries`` is below 1.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "record needs a CUDA device and PyTorch sees none. flce_ref.memory.simulate(step, *inputs) gives the same "
            "timeline without one; Timeline.from_snapshot(path) reads a recording that was made elsewhere"
        )
    if max_entries < 1:
        raise ValueError(f"max_entries must be at least 1, got {max_entries}")
    recording = Recording(title, _index(device), max_entries, sys._getframe(2).f_code)
    if is_recording():
        raise RuntimeError(
            "the allocator's history is being recorded already, and PyTorch has only one; end that recording first: "
            "torch.cuda.memory._record_memory_history(None)"
        )
    torch.cuda.synchronize(recording.device)
    history = torch.cuda.memory._record_memory_history
    history("all", context="alloc", stacks="python", max_entries=max_entries, clear_history=True)
    try:
        yield recording
        torch.cuda.synchronize(recording.device)  # frees that wait for another stream are complete after this
    finally:
        try:
            recording._snapshot = torch.cuda.memory._snapshot()
        finally:
            history(None)


class Recording:
    """What :func:`~flce_ref.memory.record` yields.

    Attributes:
        title: of the timeline.
        device: index of the CUDA device.
    """

    def __init__(self, title: str, device: int, max_entries: int, recorded_in: CodeType) -> None:
        self.title, self.device = title, device
        self._max_entries = max_entries
        self._recorded_in = recorded_in
        self._snapshot: dict[str, Any] | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """What was recorded, as :func:`flce_ref.memory.snapshot.read_snapshot` reads it.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._snapshot is None:
            raise RuntimeError("the recording has not ended: read its timeline after the with block")
        snapshot = self._snapshot
        if self.device not in devices(snapshot):
            return Timeline(self.title, (), 0, None, "recorded", ("nothing was allocated",))
        timeline = timeline_of(snapshot, self.device, title=self.title, source="recorded")
        stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        allocations = []
        for a in timeline.allocations:
            if a.frames not in stacks:
                stacks[a.frames] = self._shortened(a.frames)
            allocations.append(replace(a, frames=stacks[a.frames]))
        self._snapshot = {}  # what was read is in the timeline, which is kept
        return replace(timeline, allocations=tuple(allocations), notes=(*timeline.notes, *self._overflow(snapshot)))

    def _shortened(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """Without what called the function that records (a notebook's machinery), and files as packages name them."""
        code = self._recorded_in
        lines = [line for *_, line in code.co_lines() if line is not None]
        inside = [
            i for i, f in enumerate(frames) if f.filename == code.co_filename and min(lines) <= f.line <= max(lines)
        ]
        kept = frames[: inside[-1] + 1] if inside else frames
        return tuple(Frame(short_path(f.filename), f.line, f.name) for f in kept)

    def _overflow(self, snapshot: dict[str, Any]) -> Iterator[str]:
        traces = snapshot.get("device_traces") or []
        if self.device < len(traces) and len(traces[self.device]) >= self._max_entries:
            yield (
                f"the history is full: it holds the last {self._max_entries} entries, and what came before them is "
                "missing (record with a larger max_entries)"
            )


def _index(device: int | str | torch.device | None) -> int:
    count = torch.cuda.device_count()
    accepted = f"expected one of cuda:0 … cuda:{count - 1}"
    if device is None:
        return int(torch.cuda.current_device())
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: got {device!r}, {accepted}") from error
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if parsed.type != "cuda" or not 0 <= index < count:
        raise ValueError(f"device: got {device!r}, {accepted}")
    return int(index)
