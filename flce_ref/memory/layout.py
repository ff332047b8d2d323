"""From a timeline to bands that can be drawn: what lies where, at which column, in which colour.

A timeline may hold 10⁵ allocations where a picture has a thousand columns. Each column shows one state, the fullest of
those that fall into it, so a peak of one event is never lost; the largest allocations stay bands of their own, and the
others are summed per category.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flce_ref.memory.timeline import CATEGORIES, Allocation, Timeline

#: One colour a category. The first seven are Okabe and Ito's (2008), which people with the common colour vision
#: deficiencies tell apart; the last three were chosen so that this stays true of all ten (there is a test).
COLOURS = {
    "input": "#56B4E9",
    "weight": "#0072B2",
    "logits": "#D55E00",
    "log-probabilities": "#009E73",
    "dlogits": "#E69F00",
    "dx": "#F0E442",
    "dw": "#CC79A7",
    "activation": "#5E3C99",
    "workspace": "#7F4A1E",
    "other": "#BDBDBD",
}

_VISIBLE = 1 / 400  # of the peak: what is thinner than this is drawn only as part of a sum
_LABELLED = 1 / 25  # of the peak: thinner bands get no label
_CHUNK = re.compile(r" of chunk \d+$")


@dataclass(frozen=True, slots=True)
class Band:
    """One allocation, or the sum of several of one category, over the columns ``first, first + 1, …``.

    ``bottom`` and ``height`` are int64 arrays in bytes, one entry a column; a sum may have columns of height 0.
    """

    name: str
    category: str
    count: int
    bytes: int
    first: int
    bottom: np.ndarray
    height: np.ndarray


@dataclass(frozen=True, slots=True)
class Layout:
    """Bands in the order in which they are stacked.

    Attributes:
        events: the state that each column shows; shape (M,).
        edges: where columns begin and end, in events; shape (M + 1,). State i lies from i to i + 1.
        bands: bottom to top.
        top: bytes alive at the highest column; equals the timeline's peak.
        peak: column of the peak.
    """

    events: np.ndarray
    edges: np.ndarray
    bands: list[Band]
    top: int
    peak: int


@dataclass(frozen=True, slots=True)
class PeakGroup:
    """Neighbours in the stack, or everything alive at the peak, that a reader would call by one name."""

    text: str
    category: str
    bytes: int
    middle: float


def size_unit(largest: int) -> tuple[str, int]:
    """The unit to draw ``largest`` bytes in: GiB, or a smaller one where GiB would read as 0.00."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if largest >= scale / 10:
            return unit, scale
    return "B", 1


def format_bytes(size: int) -> str:
    """``size`` with three to four digits and its unit."""
    unit, scale = size_unit(size)
    return f"{size} B" if unit == "B" else f"{size / scale:.2f} {unit}"


def lay_out(timeline: Timeline, *, columns: int = 800, most_bands: int = 200) -> Layout:
    """Stack the timeline in at most ``columns`` columns and ``most_bands`` bands of one allocation each.

    Bands lie in the order in which they were allocated, as in Memory Viz; sums lie on top, the long-lived lowest.
    """
    live = timeline.live_bytes()
    edges = np.unique(np.linspace(0, len(live), min(columns, len(live)) + 1).astype(np.int64))
    events = np.array([a + int(live[a:b].argmax()) for a, b in pairwise(edges.tolist())], np.int64)
    peak = int(live[events].argmax())
    top = int(live[events[peak]])

    sizes, starts, ends = timeline.columns()
    first = np.searchsorted(events, starts)
    last = np.searchsorted(events, ends)
    span = last - first
    area = sizes.astype(np.float64) * span
    drawable = np.flatnonzero((span > 0) & (sizes > 0) & (sizes >= top * _VISIBLE))
    alone = np.sort(drawable[np.argsort(-area[drawable], kind="stable")[:most_bands]])
    alone = alone[np.argsort(starts[alone], kind="stable")]

    level = np.zeros(len(events), np.int64)
    bands = []
    for index in alone.tolist():
        where = slice(int(first[index]), int(last[index]))
        a = timeline.allocations[index]
        height = np.full(where.stop - where.start, a.bytes, np.int64)
        bands.append(Band(name_of(a), a.category, 1, a.bytes, where.start, level[where].copy(), height))
        level[where] += a.bytes
    rest = np.ones(len(sizes), bool)
    rest[alone] = False
    bands += _sums(timeline, rest & (span > 0), first, last, level)
    return Layout(events, edges, bands, top, peak)


def _sums(timeline: Timeline, which: np.ndarray, first: np.ndarray, last: np.ndarray, level: np.ndarray) -> list[Band]:
    """The allocations that ``which`` marks, summed per category and stacked on ``level``."""
    sizes, _, _ = timeline.columns()
    codes = np.array([CATEGORIES.index(a.category) for a in timeline.allocations], np.int64)
    groups = []
    for code, category in enumerate(CATEGORIES):
        members = np.flatnonzero(which & (codes == code))
        if len(members):
            change = np.zeros(len(level) + 1, np.int64)
            np.add.at(change, first[members], sizes[members])
            np.subtract.at(change, last[members], sizes[members])
            lifetime = float((last[members] - first[members]).mean())
            groups.append((-lifetime, category, members, np.cumsum(change[:-1])))
    bands = []
    for _, category, members, height in sorted(groups, key=lambda group: group[:2]):
        largest = int(height.max())
        if largest == 0:
            continue
        labels = {_CHUNK.sub("", name_of(timeline.allocations[i])) for i in members[:1000].tolist()}
        kind = labels.pop() if len(labels) == 1 else category
        name = kind if len(members) == 1 else f"{len(members):,} × {kind}"
        bands.append(Band(name, category, len(members), largest, 0, level.copy(), height))
        level += height
    return bands


def name_of(allocation: Allocation) -> str:
    """Its label; failing that the line that made it; failing that its category."""
    if allocation.label:
        return allocation.label
    if allocation.frames:
        frame = allocation.frames[0]
        return f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.line})"
    return "unnamed" if allocation.category == "other" else allocation.category


def legend_categories(timelines: Sequence[Timeline], layouts: Sequence[Layout]) -> list[str]:
    """The categories that can be seen in any of the pictures, in the order of CATEGORIES."""
    seen = set()
    for layout in layouts:
        seen |= {band.category for band in layout.bands if band.bytes >= layout.top * _VISIBLE}
    return [category for category in CATEGORIES if category in seen]


def stacked_peak(layout: Layout) -> list[PeakGroup]:
    """The stack at the peak, bottom to top, neighbours of one name joined, thin ones left out."""
    groups: list[list[Band]] = []
    for band in layout.bands:
        column = layout.peak - band.first
        if 0 <= column < len(band.height) and band.height[column]:
            if groups and _kind(groups[-1][-1]) == _kind(band):
                groups[-1].append(band)
            else:
                groups.append([band])
    result = []
    for group in groups:
        low = int(group[0].bottom[layout.peak - group[0].first])
        size = sum(int(band.height[layout.peak - band.first]) for band in group)
        if size >= layout.top * _LABELLED:
            name = group[0].name if group[0].count == 1 or len(group) == 1 else group[0].category
            result.append(PeakGroup(_joined(name, len(group)), group[0].category, size, low + size / 2))
    return result


def _kind(band: Band) -> tuple[str, str]:
    return _CHUNK.sub("", band.name), band.category


def _joined(name: str, count: int) -> str:
    if count == 1:
        return name
    return f"{_CHUNK.sub('', name)} of {count} chunks" if _CHUNK.search(name) else f"{count} × {name}"


def alive_in_words(timeline: Timeline) -> list[PeakGroup]:
    """Everything alive at the peak, joined by name, largest first."""
    members: dict[tuple[str, str], list[Allocation]] = {}
    for a in timeline.alive_at(timeline.peak_event):
        members.setdefault((_CHUNK.sub("", name_of(a)), a.category), []).append(a)
    groups = [
        PeakGroup(_joined(name_of(of[0]), len(of)), category, sum(a.bytes for a in of), 0.0)
        for (_, category), of in members.items()
    ]
    return sorted(groups, key=lambda group: (-group.bytes, group.text))


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ascending ``positions`` as little as needed so that neighbours are ``gap`` apart and all lie in the range.

    Where they do not fit, the range gives way at its upper end.
    """
    placed: list[float] = []
    for position in positions:
        placed.append(max(position, placed[-1] + gap if placed else low))
    excess = placed[-1] - high if placed else 0.0
    for index in range(len(placed) - 1, -1, -1):
        if excess <= 0:
            break
        limit = low + index * gap
        upper = high if index == len(placed) - 1 else placed[index + 1] - gap
        placed[index] = max(limit, min(placed[index], upper))
    return placed


def outline(band: Band, edges: np.ndarray) -> list[np.ndarray]:
    """The band as closed step polygons (x in events, y in bytes), one (K, 2) array for each run of columns."""
    filled = np.concatenate([[False], band.height > 0, [False]])
    begins, stops = np.flatnonzero(filled[1:] & ~filled[:-1]), np.flatnonzero(filled[:-1] & ~filled[1:])
    polygons = []
    for begin, stop in zip(begins.tolist(), stops.tolist()):
        low, high = band.bottom[begin:stop], band.bottom[begin:stop] + band.height[begin:stop]
        x = edges[band.first + begin : band.first + stop + 1]
        floor, ceiling = _steps(x, low), _steps(x, high)
        polygons.append(np.concatenate([floor, ceiling[::-1]]))
    return polygons


def _steps(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The corners of a step function with value ``y[i]`` from ``x[i]`` to ``x[i + 1]``."""
    changes = np.flatnonzero(np.diff(y)) + 1
    starts = np.concatenate([[0], changes])
    stops = np.concatenate([changes, [len(y)]])
    corners = np.empty((2 * len(starts), 2), np.float64)
    corners[0::2, 0], corners[1::2, 0] = x[starts], x[stops]
    corners[0::2, 1] = corners[1::2, 1] = y[starts]
    return corners


def peak_sentence(timeline: Timeline) -> str:
    """One sentence for those who cannot see the picture; every number is the timeline's."""
    peak, above = timeline.peak_bytes, timeline.step_peak_bytes
    sentence = (
        f"{timeline.title}: memory over {timeline.n_events:,} allocator events ({timeline.source}) peaks at "
        f"{format_bytes(peak)}"
    )
    if above != peak:
        sentence += f", {format_bytes(above)} above the inputs"
    sentence += f", at event {timeline.peak_event:,}"
    if timeline.backward_start is not None:
        sentence += ", in backward" if timeline.peak_event >= timeline.backward_start else ", in forward"
    groups = [g for g in alive_in_words(timeline) if g.bytes >= peak * _LABELLED]
    if groups:
        alive = [f"{g.text} {format_bytes(g.bytes)}" for g in groups]
        sentence += "; alive then: " + ", ".join(alive)
    return sentence + "."
