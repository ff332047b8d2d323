"""Recording, on machines without a GPU: PyTorch's side of it is played by a stand-in."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from flce_ref.memory import record

MIB = 1 << 20


class Allocator:
    """What record() sees of PyTorch: a history that is on or off, and a trace of events for each of two devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.calls: list[tuple[Any, ...]] = []
        self.settings: dict[str, Any] = {}
        self.traces: list[list[dict[str, Any]]] = [[], []]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append(("synchronize", device)))
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record_history)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.on, raising=False)

    def record_history(self, enabled: str | None, **settings: Any) -> None:
        self.on = enabled is not None
        self.calls.append(("on" if self.on else "off",))
        self.settings = settings or self.settings
        if not self.on:  # as PyTorch: what was not read by now is lost
            self.traces = [[], []]

    def snapshot(self) -> dict[str, Any]:
        self.calls.append(("snapshot",))
        limit = self.settings["max_entries"]
        return {"segments": [], "device_traces": [trace[-limit:] for trace in self.traces]}

    def event(self, action: str, address: int = 0, size: int = MIB, device: int = 0) -> None:
        frames = []
        frame = sys._getframe(1)
        while frame is not None:
            frames.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
            frame = frame.f_back  # type: ignore[assignment]
        self.traces[device].append({"action": action, "addr": address, "size": size, "frames": frames})


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_a_block_is_recorded_and_recording_is_off_afterwards(allocator: Allocator) -> None:
    with record("my step") as recording:
        assert allocator.on
        allocator.event("alloc", 0x1000, 2 * MIB)
        allocator.event("alloc", 0x2000, 3 * MIB)
        allocator.event("free_requested", 0x1000, 2 * MIB)
        allocator.event("free_completed", 0x1000, 2 * MIB)
    assert not allocator.on
    # Read before it is switched off, which clears it, and after the device has finished.
    assert allocator.calls == [("synchronize", 0), ("on",), ("synchronize", 0), ("snapshot",), ("off",)]
    assert allocator.settings["clear_history"] and allocator.settings["stacks"] == "python"
    timeline = recording.timeline
    assert (timeline.title, timeline.source, timeline.n_events) == ("my step", "recorded", 3)
    assert [(a.bytes, a.start, a.end) for a in timeline.allocations] == [(2 * MIB, 1, 3), (3 * MIB, 2, None)]
    assert timeline.peak_bytes == 5 * MIB
    assert recording.timeline is timeline


def test_stacks_end_at_the_function_that_records(allocator: Allocator) -> None:
    def inner() -> None:
        allocator.event("alloc", 0x1000)

    with record() as recording:
        inner()
    (allocation,) = recording.timeline.allocations
    assert [f.name for f in allocation.frames] == ["inner", "test_stacks_end_at_the_function_that_records"]
    assert {f.filename for f in allocation.frames} == {"test_recorder.py"}  # not the file's place on this machine


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt(), ValueError("x")])
def test_an_exception_leaves_recording_off_and_the_partial_timeline(allocator: Allocator, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, record() as recording:
        allocator.event("alloc", 0x1000, 2 * MIB)
        allocator.traces[0].append({"action": "oom", "size": 37 << 30, "device_free": 5 << 30, "frames": []})
        raise error
    assert caught.value is error
    assert not allocator.on
    assert recording.timeline.peak_bytes == 2 * MIB
    assert "37.00 GiB requested, 5.00 GiB free" in recording.timeline.notes[0]


def test_recording_is_off_even_where_the_history_cannot_be_read(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    with pytest.raises(RuntimeError, match="no snapshot"), record() as recording:
        pass
    assert not allocator.on
    with pytest.raises(RuntimeError, match="after the with block"):
        _ = recording.timeline


def test_the_timeline_cannot_be_read_inside_the_block(allocator: Allocator) -> None:
    with record() as recording, pytest.raises(RuntimeError, match="after the with block"):
        _ = recording.timeline


def test_a_recording_that_is_on_already_is_left_alone(allocator: Allocator) -> None:
    with record(), pytest.raises(RuntimeError, match=r"_record_memory_history\(None\)"), record():
        pass
    assert [call for call in allocator.calls if call[0] in ("on", "off")] == [("on",), ("off",)]


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_the_device_that_was_asked_for(allocator: Allocator, device: int | str | torch.device) -> None:
    with record(device=device) as recording:
        allocator.event("alloc", 0x1000, MIB, device=0)
        allocator.event("alloc", 0x1000, 7 * MIB, device=1)
    assert recording.device == 1
    assert recording.timeline.peak_bytes == 7 * MIB
    assert ("synchronize", 1) in allocator.calls


@pytest.mark.parametrize("device", [2, -1, "cuda:7", "cpu", "nonsense", 1.5])
def test_other_devices_are_refused(allocator: Allocator, device: Any) -> None:
    with pytest.raises(ValueError, match=r"device: got .*, expected one of cuda:0 … cuda:1"), record(device=device):
        pass
    assert allocator.calls == []


def test_a_full_history_is_said(allocator: Allocator) -> None:
    with record(max_entries=2) as recording:
        for address in (0x1000, 0x2000, 0x3000):
            allocator.event("alloc", address)
    assert recording.timeline.peak_bytes == 2 * MIB
    assert any("last 2 entries" in note and "max_entries" in note for note in recording.timeline.notes)
    with record(max_entries=3) as recording:
        allocator.event("alloc", 0x1000)
    assert recording.timeline.notes == ()


def test_nothing_allocated(allocator: Allocator) -> None:
    with record() as recording:
        pass
    assert (recording.timeline.n_events, recording.timeline.peak_bytes) == (0, 0)
    assert recording.timeline.notes == ("nothing was allocated",)


def test_max_entries_is_checked(allocator: Allocator) -> None:
    with pytest.raises(ValueError, match="max_entries must be at least 1, got 0"), record(max_entries=0):
        pass


def test_without_cuda_the_error_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"flce_ref\.memory\.simulate\(step, \*inputs\)"), record():
        pass
