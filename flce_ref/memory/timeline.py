"""What is alive when: the record of one step's allocations, and the numbers read off it.

The simulator, the recorder and the snapshot reader all produce a :class:`Timeline`; the plot, the interactive viewer
and the snapshot writer all consume one. It holds plain values only, so it can be compared, stored and sent.

Events are counted as PyTorch's Memory Viz counts them: every allocation is one event and every free is one event.
They are numbered from 1, and state ``i`` is what is alive *after* event ``i``; state 0 is what was alive before the
first event. An allocation is therefore alive in the states ``start, start + 1, …, end - 1``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What an allocation is for; also the order in which categories appear in legends.
CATEGORIES = (
    "input",
    "weight",
    "logits",
    "log-probabilities",
    "dlogits",
    "dx",
    "dw",
    "activation",
    "workspace",
    "other",
)
SOURCES = ("simulated", "recorded", "snapshot")

_JSON_FORMAT = "flce_ref.memory.Timeline/1"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a Python stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block of memory, from its allocation to its free.

    Attributes:
        bytes: size as booked: rounded up to 512 B as the CUDA caching allocator rounds; as recorded for a real run.
        start: event at which it is allocated; 0 for what was alive before the first event.
        end: event at which it is freed; None if it is still alive after the last one.
        label: what it is, for a reader ("log-probabilities of chunk 3"); "" when unknown.
        category: one of :data:`~flce_ref.memory.CATEGORIES`.
        frames: the Python stack that allocated it, innermost first; empty when unknown.
    """

    bytes: int
    start: int
    end: int | None
    label: str = ""
    category: str = "other"
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every allocation of one step, and what follows from them.

    Attributes:
        title: one line saying what ran.
        allocations: in the order of their start.
        n_events: allocations and frees, as Memory Viz counts them (see the module's text).
        backward_start: first event of the backward pass; None when unknown.
        source: "simulated", "recorded" or "snapshot".
        notes: what a reader must know to trust the numbers: opaque operators, truncated history, OOM events.

    Raises:
        ValueError: if a size is negative, a lifetime does not fit in the events, or a category or source is unknown.
    """

    title: str
    allocations: tuple[Allocation, ...]
    n_events: int
    backward_start: int | None
    source: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source: got {self.source!r}, expected one of {', '.join(SOURCES)}")
        if self.n_events < 0:
            raise ValueError(f"n_events: got {self.n_events}, expected 0 or more")
        # A step whose backward allocates nothing begins it just past the last event.
        if self.backward_start is not None and not 0 <= self.backward_start <= self.n_events + 1:
            raise ValueError(f"backward_start: got {self.backward_start}, expected 0 to {self.n_events + 1}, or None")
        unknown = {allocation.category for allocation in self.allocations} - set(CATEGORIES)
        if unknown:
            raise ValueError(f"category: got {sorted(unknown)}, expected one of {', '.join(CATEGORIES)}")
        sizes, starts, ends = self.columns()
        wrong = (sizes < 0) | (starts < 0) | (ends <= starts) | (starts > self.n_events) | (ends > self.n_events + 1)
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            bad = self.allocations[index]
            raise ValueError(
                f"allocations[{index}]: got bytes={bad.bytes}, start={bad.start}, end={bad.end}; "
                f"expected bytes >= 0 and 0 <= start < end <= n_events = {self.n_events}"
            )

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sizes in bytes, starts and ends as int64 arrays of shape (len(allocations),); a None end is n_events + 1."""
        count = len(self.allocations)
        never = self.n_events + 1
        sizes = np.fromiter((a.bytes for a in self.allocations), np.int64, count)
        starts = np.fromiter((a.start for a in self.allocations), np.int64, count)
        ends = np.fromiter((never if a.end is None else a.end for a in self.allocations), np.int64, count)
        return sizes, starts, ends

    def live_bytes(self) -> np.ndarray:
        """Bytes alive in every state: int64 of shape (n_events + 1,); entry 0 is before the first event."""
        sizes, starts, ends = self.columns()
        change = np.zeros(self.n_events + 2, np.int64)
        np.add.at(change, starts, sizes)
        np.subtract.at(change, ends, sizes)
        return np.cumsum(change[:-1])

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive in any state, the inputs included ("absolute")."""
        return int(self.live_bytes().max())

    @property
    def peak_event(self) -> int:
        """First state in which ``peak_bytes`` are alive."""
        return int(self.live_bytes().argmax())

    @property
    def input_bytes(self) -> int:
        """Bytes that the step was given, of category "input" or "weight" and alive before the first event."""
        return sum(a.bytes for a in self.allocations if a.start == 0 and a.category in ("input", "weight"))

    @property
    def step_peak_bytes(self) -> int:
        """Peak of one forward + backward above the inputs, in bytes."""
        return self.peak_bytes - self.input_bytes

    @property
    def forward_peak_bytes(self) -> int | None:
        """Peak of the forward pass above the inputs, in bytes; None when it is unknown where backward begins."""
        if self.backward_start is None:
            return None
        return int(self.live_bytes()[: max(self.backward_start, 1)].max()) - self.input_bytes

    @property
    def estimated_reserved_bytes(self) -> int:
        """Most bytes that the caching allocator would hold from CUDA, in a replay of its rules."""
        from flce_ref.memory.caching_allocator import replay

        return replay(self).peak_reserved_bytes

    def alive_at(self, event: int) -> list[Allocation]:
        """The allocations alive in the state after ``event``, oldest first."""
        if not 0 <= event <= self.n_events:
            raise ValueError(f"event: got {event}, expected 0 to {self.n_events}")
        _, starts, ends = self.columns()
        return [self.allocations[i] for i in np.flatnonzero((starts <= event) & (event < ends))]

    def alive_at_peak(self) -> list[tuple[str, int]]:
        """What is alive at the peak: (label, bytes), merged by label, largest first.

        An allocation without a label goes under its category.
        """
        merged: dict[str, int] = {}
        for allocation in self.alive_at(self.peak_event):
            name = allocation.label or allocation.category
            merged[name] = merged.get(name, 0) + allocation.bytes
        return sorted(merged.items(), key=lambda item: (-item[1], item[0]))

    def to_json(self) -> str:
        """The timeline as one JSON document; frames are stored once each. Read back by :meth:`from_json`."""
        frames: dict[Frame, int] = {}
        rows = []
        for a in self.allocations:
            stack = [frames.setdefault(frame, len(frames)) for frame in a.frames]
            rows.append([a.bytes, a.start, a.end, a.label, a.category, stack])
        document: dict[str, Any] = {"format": _JSON_FORMAT}
        document |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "allocations"}
        document["frames"] = [[frame.filename, frame.line, frame.name] for frame in frames]
        document["allocations"] = rows
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: if ``text`` is not such a document.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"text: not a JSON document ({error})") from error
        if not isinstance(document, dict) or document.get("format") != _JSON_FORMAT:
            raise ValueError(f"text: not a stored timeline, expected a JSON object with format {_JSON_FORMAT!r}")
        try:
            frames = [Frame(filename, line, name) for filename, line, name in document["frames"]]
            allocations = tuple(
                Allocation(size, start, end, label, category, tuple(frames[i] for i in stack))
                for size, start, end, label, category, stack in document["allocations"]
            )
            return cls(
                document["title"],
                allocations,
                document["n_events"],
                document["backward_start"],
                document["source"],
                tuple(document["notes"]),
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"text: damaged timeline ({type(error).__name__}: {error})") from error

    @classmethod
    def from_snapshot(cls, path: str | Path, device: int | None = None) -> Timeline:
        """Read a Memory Viz pickle; see :func:`flce_ref.memory.snapshot.read_snapshot`."""
        from flce_ref.memory.snapshot import read_snapshot

        return read_snapshot(path, device)

    def to_snapshot(self, path: str | Path) -> None:
        """Write a Memory Viz pickle; see :func:`flce_ref.memory.snapshot.write_snapshot`."""
        from flce_ref.memory.snapshot import write_snapshot

        write_snapshot(self, path)

    def plot(
        self, ax: Axes | None = None, *, title: str | None = None, legend: bool = True, labels: bool = True
    ) -> Axes:
        """Draw with matplotlib; see :func:`flce_ref.memory.plot.plot`."""
        from flce_ref.memory.plot import plot

        return plot(self, ax, title=title, legend=legend, labels=labels)

    def save_plot(self, path: str | Path) -> None:
        """Write the plot as a picture; see :func:`flce_ref.memory.plot.save`."""
        from flce_ref.memory.plot import save

        save(self, path)

    def alt_text(self) -> str:
        """What the plot shows, in a sentence for those who cannot see it; every number is this timeline's."""
        from flce_ref.memory.layout import peak_sentence

        return peak_sentence(self)

    def to_html(self, others: Sequence[Timeline] = ()) -> str:
        """A self-contained interactive page; see :func:`flce_ref.memory.viewer.to_html`."""
        from flce_ref.memory.viewer import to_html

        return to_html([self, *others])

    def _repr_html_(self) -> str:
        from flce_ref.memory.viewer import to_iframe

        return to_iframe([self])
