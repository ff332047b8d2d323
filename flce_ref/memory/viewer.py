"""The interactive viewer: timelines as one self-contained HTML page, or as a frame inside another page.

The page needs nothing from the network. Its data are columns of integers, so 10⁵ events take about a megabyte. Where
scripts do not run it shows the static pictures of :mod:`flce_ref.memory.svg`. The same timelines give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, TypeVar

from flce_ref.memory.layout import COLOURS, peak_sentence
from flce_ref.memory.svg import to_svg
from flce_ref.memory.timeline import CATEGORIES, Timeline

T = TypeVar("T", bound=Hashable)

_FRAME_HEIGHT = 690  # of the frame before its script has measured the content, in pixels
_SCRIPTS = ("viewer_data.js", "viewer_picture.js", "viewer.js")


def to_html(timelines: Sequence[Timeline]) -> str:
    """A self-contained page that shows the timelines, with a picker if there are several.

    Raises:
        ValueError: if there are none.
    """
    return _page(contents(timelines), "".join(to_svg(timeline) for timeline in timelines))


def to_iframe(timelines: Sequence[Timeline]) -> str:
    """The page in an ``<iframe srcdoc>``: what Jupyter, Colab and the built book show. The frame fits its content."""
    return _frame(contents(timelines), to_html(timelines))


def contents(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """What the page shows, as plain values for JSON: all of it but the viewer, for :func:`frame_of` to put around it.

    Raises:
        ValueError: if there are none.
    """
    if not timelines:
        raise ValueError("timelines: got none, expected one or more")
    return {"categories": CATEGORIES, "timelines": [_columns(timeline) for timeline in timelines]}


def frame_of(contents: dict[str, Any]) -> str:
    """The frame of stored :func:`contents`; it has no picture for readers without scripts."""
    return _frame(contents, _page(contents, ""))


def _page(contents: dict[str, Any], fallback: str) -> str:
    pieces = {
        "@TITLE@": escape(" | ".join(timeline["title"] for timeline in contents["timelines"])),
        "@STYLE@": _source("viewer.css"),
        "@FALLBACK@": fallback,
        "@DATA@": _json(contents),
        "@SCRIPT@": "\n".join(_source(name) for name in _SCRIPTS),
    }
    page = _source("viewer.html")
    for mark, text in pieces.items():
        # Each mark occurs once, and is replaced before any data that might contain one are put in after it.
        before, _, after = page.partition(mark)
        page = before + text + after
    return page


def _frame(contents: dict[str, Any], page: str) -> str:
    page = page.replace("&", "&amp;").replace("'", "&#39;")
    title = escape(" ".join(timeline["alt"] for timeline in contents["timelines"]))
    style = f"width:100%;height:{_FRAME_HEIGHT}px;border:0"
    return f'<iframe class="flce-memory" title="{title}" style="{style}" srcdoc=\'{page}\'></iframe>'


def _json(contents: dict[str, Any]) -> str:
    document = {**contents, "colours": [COLOURS[category] for category in contents["categories"]]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    # Inside <script>, "</script>" would end it and "<!--" would hide what follows.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _columns(timeline: Timeline) -> dict[str, Any]:
    """One timeline as columns, in the order of starts: z, l, c and f index ``sizes``, ``labels``, categories and
    ``stacks``; s holds differences of starts and d durations, 0 for what never ends."""
    allocations = sorted(timeline.allocations, key=lambda a: a.start)
    starts = [a.start for a in allocations]
    frames: dict[str, int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    sizes: dict[int, int] = {}
    labels: dict[str, int] = {}

    known: dict[int, int] = {}  # by identity: a deep stack is not hashed anew for each allocation
    for a in allocations:
        if id(a.frames) not in known:
            stack = tuple(_index(frames, f"{f.name} ({f.filename}:{f.line})") for f in a.frames)
            known[id(a.frames)] = _index(stacks, stack)

    return {
        "title": timeline.title,
        "alt": peak_sentence(timeline),
        "source": timeline.source,
        "notes": timeline.notes,
        "n": timeline.n_events,
        "b": timeline.backward_start,
        "z": [_index(sizes, a.bytes) for a in allocations],
        "s": [start - previous for previous, start in zip([0, *starts], starts)],
        "d": [0 if a.end is None else a.end - a.start for a in allocations],
        "l": [_index(labels, a.label) for a in allocations],
        "c": [CATEGORIES.index(a.category) for a in allocations],
        "f": [known[id(a.frames)] for a in allocations],
        "sizes": list(sizes),
        "labels": list(labels),
        "stacks": list(stacks),
        "frames": list(frames),
    }


def _index(table: dict[T, int], value: T) -> int:
    return table.setdefault(value, len(table))


@cache
def _source(name: str) -> str:
    """A file of this package without its indentation and comment lines: they are a third of every embedded copy."""
    lines = (files("flce_ref.memory") / name).read_text(encoding="utf-8").splitlines()
    kept = (line.strip() for line in lines)
    return "\n".join(line for line in kept if line and not line.startswith("//"))
