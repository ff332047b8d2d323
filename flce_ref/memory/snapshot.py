"""Memory Viz files: the pickles of ``torch.cuda.memory._dump_snapshot``, read and written.

Reading admits any such file: many devices, blocks allocated before the recording began (or whose allocation has fallen
out of the ring buffer), out-of-memory events, missing frames. Pickle is code, so only plain values are built.

Writing fills in all that PyTorch's own tools look at: ``torch.cuda._memory_viz`` and the page
https://docs.pytorch.org/memory_viz. That page's reader handles pickle protocols 2 to 4, and throws when events have
categories but none of them is "unknown".
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flce_ref.memory.caching_allocator import SMALL_SEGMENT, Replay, ordered_events, replay
from flce_ref.memory.naming import category_of, first_backward_frame, name_by_stack
from flce_ref.memory.timeline import CATEGORIES, Allocation, Frame, Timeline

_PROTOCOL = 4
_EXTRA = "flce_ref"  # our own entry of the snapshot; PyTorch's tools pass over keys they do not know
_FOREIGN = {
    b"PK\x03\x04": "a zip archive (torch.save writes those; a zipped snapshot has to be unpacked first)",
    b"\x1f\x8b": "a gzip file (unpack it first)",
}
_BEFORE = "alive before recording"


# ---------------------------------------------------------------- reading


def read_snapshot(path: str | Path, device: int | None = None) -> Timeline:
    """Read one device of a Memory Viz pickle.

    Args:
        path: a file written by ``torch.cuda.memory._dump_snapshot``, by
            :meth:`~flce_ref.memory.Timeline.to_snapshot`, or by pickling what ``torch.cuda.memory._snapshot`` returned.
        device: index of the device; None takes the one with the most events, and a note names the others.

    Returns:
        The timeline. Sizes are the requested bytes that the file holds, lives end at ``free_completed``, as Memory Viz
        draws them. What was alive before the first event has category "input": the step was given it.

    Raises:
        ValueError: if the file is not such a pickle, is damaged, holds more than plain values, or has no such device.
        OSError: if it cannot be opened.
    """
    return timeline_of(load(path), device, title=Path(path).name)


def read_timelines(path: str | Path, device: int | None = None) -> list[Timeline]:
    """Every device of a snapshot, the busiest first, or the one asked for; or the one timeline of a stored JSON file.

    Raises:
        ValueError: as :func:`read_snapshot` and :meth:`Timeline.from_json`; also for ``device`` with a JSON file.
        OSError: if the file cannot be opened.
    """
    if Path(path).suffix == ".json":
        if device is not None:
            raise ValueError(f"device: got {device}, but a stored timeline is of one device and does not say which")
        return [Timeline.from_json(Path(path).read_text(encoding="utf-8"))]
    snapshot = load(path)
    name = Path(path).name
    every = devices(snapshot)
    if device is not None or len(every) < 2:
        return [timeline_of(snapshot, device, title=name)]
    return [timeline_of(snapshot, index, title=f"{name}, device {index}") for index in every]


def load(path: str | Path) -> dict[str, Any]:
    """Unpickle a snapshot, building plain values only; errors as :func:`read_snapshot`."""
    data = Path(path).read_bytes()
    name = Path(path).name
    for magic, what in _FOREIGN.items():
        if data.startswith(magic):
            raise ValueError(f"{name}: not a Memory Viz snapshot but {what}")
    if not data.startswith(b"\x80"):
        raise ValueError(f"{name}: not a pickle (it begins with {data[:8]!r}), expected a Memory Viz snapshot")
    try:
        snapshot = _PlainUnpickler(io.BytesIO(data)).load()
    except _RefusedError as error:
        raise ValueError(f"{name}: refused: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything: EOFError, KeyError, UnicodeDecodeError …
        raise ValueError(f"{name}: truncated or damaged pickle ({type(error).__name__}: {error})") from error
    if isinstance(snapshot, list):  # torch.cuda.memory_snapshot(): the segments alone
        snapshot = {"segments": snapshot, "device_traces": []}
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} & snapshot.keys():
        raise ValueError(f"{name}: a pickle, but not a Memory Viz snapshot: it has no 'segments' or 'device_traces'")
    return snapshot


class _RefusedError(Exception):
    """The pickle asks for something that is not a plain value."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds None, bool, int, float, str, bytes, list, tuple, dict and set, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise _RefusedError(f"it names the Python object {module}.{name}; a snapshot holds plain values only")

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("it refers to objects outside the file; a snapshot holds plain values only")


def devices(snapshot: dict[str, Any]) -> list[int]:
    """The devices that a snapshot says anything about, the one with the most events first."""
    traces = snapshot.get("device_traces") or []
    events = {index: len(trace) for index, trace in enumerate(traces) if trace}
    for segment in snapshot.get("segments") or []:
        events.setdefault(int(segment.get("device", 0)), 0)
    return sorted(events, key=lambda index: (-events[index], index))


def timeline_of(
    snapshot: dict[str, Any], device: int | None = None, *, title: str, source: str = "snapshot"
) -> Timeline:
    """The timeline of one device of an unpickled snapshot, as :func:`read_snapshot` describes it.

    Raises:
        ValueError: if the device does not occur in it, or its structure is not a snapshot's.
    """
    try:
        known = devices(snapshot)
        if device is None and known:
            device = known[0]
        if device is not None and device in known:
            return _timeline_of(snapshot, device, title, source, known)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{title}: not as Memory Viz writes them ({type(error).__name__}: {error})") from error
    if not known:
        raise ValueError(f"{title}: it holds neither events nor memory of any device")
    raise ValueError(f"device: got {device}, expected one of {', '.join(map(str, sorted(known)))}")


def _timeline_of(snapshot: dict[str, Any], device: int, title: str, source: str, known: list[int]) -> Timeline:
    reader = _Reader(device)
    traces = snapshot.get("device_traces") or []
    for event in traces[device] if device < len(traces) else []:
        reader.add(event)
    reader.add_survivors(snapshot.get("segments") or [])
    extra = snapshot.get(_EXTRA)
    if isinstance(extra, dict):
        return reader.own_timeline(extra)
    others = [str(other) for other in sorted(known) if other != device]
    if others:
        reader.notes.append(f"device {device}; the file also holds device {', '.join(others)}")
    return reader.timeline(title, source, _annotated_backward(snapshot, device))


class _Reader:
    """Follows a trace by address. Nothing here is quadratic: a training run's file has 10⁵ events and more."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.notes: list[str] = []
        self.n_events = 0
        self.rows: list[list[Any]] = []  # [bytes, start, end, label, category or "", frames]
        self.live: dict[int, int] = {}  # address → row
        self.times: list[int | None] = []  # of each event
        # By identity, as long as the snapshot lives: torch shares the dict of a line among the stacks that contain it.
        self.lines: dict[int, Frame] = {}
        self.stacks: dict[tuple[int, ...], tuple[Frame, ...]] = {}

    def add(self, event: dict[str, Any]) -> None:
        action = event["action"]
        if action == "alloc":
            self._lost_free(event["addr"])
            self._count(event)
            self.live[event["addr"]] = len(self.rows)
            self._row(event, self.n_events, None)
        elif action == "free_completed":
            self._count(event)
            row = self.live.pop(event["addr"], None)
            if row is None:
                self._row(event, 0, self.n_events)
            else:
                self.rows[row][2] = self.n_events
        elif action == "oom":
            self.notes.append(
                f"out of memory after event {self.n_events}: {_gib(event['size'])} requested, "
                f"{_gib(event.get('device_free', 0))} free on the device"
            )

    def _count(self, event: dict[str, Any]) -> None:
        self.n_events += 1
        self.times.append(event.get("time_us"))

    def _row(self, event: dict[str, Any], start: int, end: int | None) -> None:
        # The frames and the label of a free say who freed it, not who made it, except in files of ours.
        label = event.get("user_metadata") or ""
        frames = self._frames(event.get("frames") or ())
        self.rows.append([int(event["size"]), start, end, str(label), event.get("category", ""), frames])

    def _lost_free(self, address: int) -> None:
        """An address handed out twice: its free was not recorded. It ends at the event before the new allocation."""
        row = self.live.pop(address, None)
        if row is not None:
            self.rows[row][2] = max(self.n_events, self.rows[row][1] + 1)
            self.notes.append(f"a free before event {self.n_events + 1} was not recorded")

    def _frames(self, frames: Any) -> tuple[Frame, ...]:
        """Python frames if there are any, else the C++ ones that have a name."""
        key = tuple(map(id, frames))
        if key not in self.stacks:
            every = [self._frame(frame) for frame in frames]
            python = [f for f in every if f.filename.endswith(".py") or f.filename.startswith("<")]
            self.stacks[key] = tuple(python or [f for f in every if f.name != "??"])
        return self.stacks[key]

    def _frame(self, frame: dict[str, Any]) -> Frame:
        if id(frame) not in self.lines:
            self.lines[id(frame)] = Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"]))
        return self.lines[id(frame)]

    def add_survivors(self, segments: Iterable[dict[str, Any]]) -> None:
        """What the final state holds and the trace did not allocate: it was there before."""
        for segment in segments:
            if segment.get("device", 0) != self.device:
                continue
            address = segment.get("address") or 0
            for block in segment["blocks"]:
                address = block.get("address", address)
                if str(block["state"]).startswith("active") and address not in self.live:
                    self._row({**block, "size": block.get("requested_size", block["size"])}, 0, None)
                address += block["size"]

    def allocations(self) -> list[Allocation]:
        order = sorted(range(len(self.rows)), key=lambda i: self.rows[i][1])
        return [Allocation(*self.rows[i]) for i in order]

    def own_timeline(self, extra: dict[str, Any]) -> Timeline:
        """A file of ours: categories and the rest are in it."""
        for row in self.rows:
            row[4] = row[4] if row[4] in CATEGORIES else "other"
        return Timeline(
            str(extra["title"]),
            tuple(self.allocations()),
            self.n_events,
            extra["backward_start"],
            extra["source"],
            tuple(map(str, extra["notes"])),
        )

    def timeline(self, title: str, source: str, annotated: int | None) -> Timeline:
        before = [row for row in self.rows if row[1] == 0]
        for row in self.rows:
            if row[1] == 0:
                row[3:] = [_BEFORE, "input", () if row[2] else row[5]]
            else:
                row[4] = row[4] if row[4] in CATEGORIES else category_of(row[3])
        if before:
            total = _gib(sum(row[0] for row in before))
            self.notes.append(f"{len(before)} blocks ({total}) were allocated before the first recorded event")
        allocations = self.allocations()
        backward_start = annotated
        if backward_start is None:
            index = first_backward_frame([a.frames for a in allocations])
            backward_start = None if index is None else max(allocations[index].start, 1)
        named = name_by_stack(allocations, backward_start)
        return Timeline(title, tuple(named), self.n_events, backward_start, source, tuple(self.notes))


def _annotated_backward(snapshot: dict[str, Any], device: int) -> int | None:
    """First event after a ``record_function("… backward …")`` began; None if none was recorded."""
    times = [
        note["time_us"]
        for note in snapshot.get("external_annotations") or []
        if note.get("stage") == "START"
        and "backward" in str(note.get("name", "")).lower()
        and note.get("device", device) == device
    ]
    if not times:
        return None
    started = min(times)
    counted = 0
    for event in snapshot["device_traces"][device]:
        if event["action"] in ("alloc", "free_completed"):
            counted += 1
            if event.get("time_us", 0) >= started:
                return counted
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


# ---------------------------------------------------------------- writing


def write_snapshot(timeline: Timeline, path: str | Path) -> None:
    """Write a Memory Viz pickle (protocol 4). Reading it back gives an equal timeline.

    Segments and addresses, which a timeline does not have, are those of
    ``flce_ref.memory.caching_allocator``; ``time_us`` counts events. Labels are stored as ``user_metadata``.
    """
    Path(path).write_bytes(pickle.dumps(as_snapshot(timeline), protocol=_PROTOCOL))


def as_snapshot(timeline: Timeline) -> dict[str, Any]:
    """The object that :func:`write_snapshot` pickles: what ``torch.cuda.memory._snapshot`` would have returned."""
    placed = replay(timeline)
    stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}
    return {
        "segments": [_segment(timeline, index, placed, stacks) for index in range(len(placed.segments))],
        "device_traces": [_trace(timeline, placed, stacks)],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1},
        "external_annotations": [],
        _EXTRA: {
            "title": timeline.title,
            "source": timeline.source,
            "backward_start": timeline.backward_start,
            "notes": list(timeline.notes),
        },
    }


def _category(allocation: Allocation) -> str:
    return "unknown" if allocation.category == "other" else allocation.category


def _frame_list(stacks: dict[tuple[Frame, ...], list[dict[str, Any]]], frames: tuple[Frame, ...]) -> list[Any]:
    """One list a stack, so that the pickle stores each once."""
    if frames not in stacks:
        stacks[frames] = [{"filename": f.filename, "line": f.line, "name": f.name} for f in frames]
    return stacks[frames]


def _trace(timeline: Timeline, placed: Replay, stacks: dict[tuple[Frame, ...], list[Any]]) -> list[dict[str, Any]]:
    trace: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int, event: int, allocation: Allocation | None = None) -> None:
        trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": event,
                "compile_context": "N/A",
                "user_metadata": allocation.label if allocation else "",
                "frames": _frame_list(stacks, allocation.frames if allocation else ()),
                "category": _category(allocation) if allocation else "unknown",
            }
        )

    segments = iter([segment for segment in placed.segments if segment.event > 0])
    segment = next(segments, None)
    for event, frees, owner in ordered_events(timeline):
        allocation = timeline.allocations[owner]
        if event == 0:
            continue
        address = placed.addresses[owner]
        if frees:
            add("free_requested", address, allocation.bytes, event, allocation)
            add("free_completed", address, allocation.bytes, event, allocation)
            continue
        if segment is not None and segment.first.address <= address < segment.first.address + segment.size:
            add("segment_alloc", segment.first.address, segment.size, event, allocation)
            trace[-1]["category"] = "unknown"
            segment = next(segments, None)
        add("alloc", address, allocation.bytes, event, allocation)
    # The record of the snapshot itself: it also makes sure that some event is of category "unknown".
    add("snapshot", 0, 0, timeline.n_events + 1)
    return trace


def _segment(
    timeline: Timeline, index: int, placed: Replay, stacks: dict[tuple[Frame, ...], list[Any]]
) -> dict[str, Any]:
    segment = placed.segments[index]
    blocks = []
    for block in segment.blocks():
        owner = None if block.owner is None else timeline.allocations[block.owner]
        entry = {
            "address": block.address,
            "size": block.size,
            "requested_size": block.size if owner is None else owner.bytes,
            "state": "inactive" if owner is None else "active_allocated",
            "frames": _frame_list(stacks, owner.frames if owner else ()),
        }
        if owner is not None:
            entry |= {"user_metadata": owner.label, "category": _category(owner)}
        blocks.append(entry)
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": 0,
        "address": segment.first.address,
        "total_size": segment.size,
        "allocated_size": sum(block["size"] for block in active),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": 0,
        "segment_type": "small" if segment.size == SMALL_SEGMENT and segment.first.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
