"""A timeline as a small script-free SVG: what the interactive viewer shows where scripts do not run.

Text and lines take the colour of the text around the picture, so it follows the page's theme; each band names itself
in a ``<title>``. The same timeline gives the same bytes.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise

import numpy as np

from flce_ref.memory.layout import (
    COLOURS,
    Layout,
    format_bytes,
    lay_out,
    legend_categories,
    outline,
    peak_sentence,
    size_unit,
    spread,
    stacked_peak,
)
from flce_ref.memory.timeline import Timeline

_WIDTH, _HEIGHT = 780, 334
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 490, 34, 268
_LONGEST = 34  # characters of a label in the right margin


def to_svg(timeline: Timeline) -> str:
    """The timeline as one ``<svg>`` element, for embedding in HTML."""
    layout = lay_out(timeline, columns=400, most_bands=100)
    unit, scale = size_unit(layout.top)
    events = max(int(layout.edges[-1]), 1)
    across = (_RIGHT - _LEFT) / events
    up = (_BOTTOM - _TOP) / (max(layout.top, 1) * 1.1)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(peak_sentence(timeline))}" '
        'fill="currentColor" font-family="system-ui,sans-serif" font-size="12" style="max-width:100%;height:auto">',
        _text(_LEFT, 14, timeline.title, "start", ' font-size="14"'),
    ]
    parts += _axes(layout, unit, scale, across, up)
    for band in layout.bands:
        path = "".join(_path(polygon, across, up) for polygon in outline(band, layout.edges))
        what = f"{band.name}, {'at most ' if band.count > 1 else ''}{format_bytes(band.bytes)}"
        parts.append(
            f'<path d="{path}" fill="{COLOURS[band.category]}" stroke="#0006" stroke-width=".5">'
            f"<title>{escape(what)}</title></path>"
        )
    parts += _marks(timeline, layout, across, up)
    for index, category in enumerate(legend_categories([timeline], [layout])):
        x, y = _LEFT + 140 * (index % 5), 302 + 18 * (index // 5)
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="10" fill="{COLOURS[category]}"/>')
        parts.append(_text(x + 17, y + 9, category, "start"))
    return "".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, more: str) -> str:
    ends = f'x1="{_short(x1)}" y1="{_short(y1)}" x2="{_short(x2)}" y2="{_short(y2)}"'
    return f'<line {ends} stroke="currentColor" {more}/>'


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(polygon: np.ndarray, across: float, up: float) -> str:
    corners = [(_short(_LEFT + x * across), _short(_BOTTOM - y * up)) for x, y in polygon.tolist()]
    path = f"M{corners[0][0]} {corners[0][1]}"
    for (x0, y0), (x, y) in pairwise(corners):
        if x != x0:
            path += f"H{x}"
        if y != y0:
            path += f"V{y}"
    return path + "Z"


def _axes(layout: Layout, unit: str, scale: int, across: float, up: float) -> list[str]:
    parts = [_text(_LEFT - 6, _TOP - 8, unit, "end")]
    for value in nice_ticks(layout.top * 1.1 / scale, 6):
        y = _BOTTOM - value * scale * up
        parts.append(_line(_LEFT, y, _RIGHT, y, 'stroke-opacity=".25"'))
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    for value in nice_ticks(float(layout.edges[-1]), 6):
        if value == int(value):
            parts.append(_text(_LEFT + value * across, _BOTTOM + 15, f"{int(value):,}", "middle"))
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 28, "allocator event", "middle"))
    return parts


def _marks(timeline: Timeline, layout: Layout, across: float, up: float) -> list[str]:
    parts = []
    start = timeline.backward_start
    if start is not None and 0 < start <= timeline.n_events:
        x = _LEFT + start * across
        parts.append(_line(x, _TOP - 6, x, _BOTTOM, 'stroke-dasharray="4 3"'))
        parts.append(_text(x - 4, _TOP - 8, "forward", "end"))
        parts.append(_text(x + 4, _TOP - 8, "backward", "start"))
    x = _LEFT + (layout.edges[layout.peak] + layout.edges[layout.peak + 1]) / 2 * across
    parts.append(_text(x, _BOTTOM - layout.top * up - 3, "▼", "middle", ' font-size="9"'))
    groups = stacked_peak(layout)
    heights = [_BOTTOM - group.middle * up for group in groups]
    # spread() wants ascending positions; heights fall as the stack rises.
    places = spread(heights[::-1], 15, _TOP + 4, _BOTTOM)[::-1]
    for group, height, place in zip(groups, heights, places):
        parts.append(_line(x, height, _RIGHT + 8, place, 'stroke-opacity=".6" stroke-width=".7"'))
        name = group.text if len(group.text) <= _LONGEST else group.text[: _LONGEST - 1] + "…"
        parts.append(_text(_RIGHT + 12, place + 4, f"{name}, {format_bytes(group.bytes)}", "start"))
    peak = f"peak {format_bytes(timeline.peak_bytes)}, {format_bytes(timeline.step_peak_bytes)} above the inputs"
    parts.append(_text(_WIDTH - 4, 14, peak, "end", ' font-weight="bold"'))
    return parts


def nice_ticks(largest: float, most: int) -> list[float]:
    """At most ``most`` + 1 multiples of 1, 2 or 5 times a power of ten, from 0 to ``largest``."""
    if largest <= 0:
        return [0.0]
    power = 10.0 ** np.floor(np.log10(largest / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= most)
    return [round(i * step, 10) for i in range(int(largest / step) + 1)]
