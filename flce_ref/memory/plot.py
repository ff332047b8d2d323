"""Timelines as static figures, with matplotlib (the extra ``viz``).

Backgrounds are transparent and text is a grey that reads on white and on near-black, so one figure serves the light
and the dark theme. The same timeline gives the same figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flce_ref.memory.layout import (
    COLOURS,
    Layout,
    format_bytes,
    lay_out,
    legend_categories,
    outline,
    size_unit,
    spread,
    stacked_peak,
)
from flce_ref.memory.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#7f7f7f"
_HEADROOM = 1.16  # of the y axis above the peak: room for its text and for "forward | backward"


def plot(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    legend: bool = True,
    labels: bool = True,
    top_bytes: int | None = None,
) -> Axes:
    """Draw each allocation as a band over the allocator's events, stacked as Memory Viz stacks them.

    Args:
        timeline: what to draw; 10⁵ events take about a second.
        ax: where; None makes a new figure.
        title: replaces the timeline's.
        legend: name the categories' colours below the axes.
        labels: name what is alive at the peak, at the right of the axes.
        top_bytes: height of the y axis, to put several plots on one scale; None fits the peak.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    plt = _pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(7.4, 3.8), layout="constrained", facecolor="none")
    layout = lay_out(timeline)
    highest = max(top_bytes or layout.top, 1)
    unit, scale = size_unit(highest)
    _draw_bands(ax, layout, scale)
    ax.set_xlim(0, max(int(layout.edges[-1]), 1))
    ax.set_ylim(0, highest * _HEADROOM / scale)
    ax.set_title(title if title is not None else timeline.title, loc="left", color=_INK)
    ax.set_xlabel("allocator event", color=_INK)
    ax.set_ylabel(f"allocated ({unit})", color=_INK)
    _style(ax)
    _mark_backward(ax, timeline, layout.top / scale)
    _mark_peak(ax, layout, scale, text="" if labels else f"peak {format_bytes(timeline.peak_bytes)}")
    if labels:
        _label_peak(ax, timeline, layout, scale)
    if legend:
        handles = _handles([timeline], [layout])
        ax.legend(handles=handles, ncols=_balanced(len(handles), 5), loc="upper left", **_LEGEND, **_BELOW)
    return ax


def compare(
    timelines: Sequence[Timeline], *, titles: Sequence[str] | None = None, columns: int = 2, labels: bool = False
) -> Figure:
    """Draw several timelines on one scale, under one legend.

    Args:
        timelines: one or more.
        titles: one for each, instead of their own.
        columns: plots side by side.
        labels: name what is alive at each peak.

    Raises:
        ValueError: if there are no timelines, or not one title for each.
        ImportError: if matplotlib is not installed.
    """
    if not timelines:
        raise ValueError("timelines: got none, expected one or more")
    if titles is not None and len(titles) != len(timelines):
        raise ValueError(f"titles: got {len(titles)}, expected {len(timelines)}, one for each timeline")
    plt = _pyplot()
    columns = max(1, min(columns, len(timelines)))
    rows = math.ceil(len(timelines) / columns)
    width = 7.4 if labels or columns == 1 else 4.6  # labels take the right half
    figure: Figure
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, 2.9 * rows + 0.5), sharey=True, squeeze=False, layout="constrained"
    )
    figure.patch.set_alpha(0)
    top = max(timeline.peak_bytes for timeline in timelines)
    for index, (ax, timeline) in enumerate(zip(axes.flat, timelines)):
        title = titles[index] if titles is not None else None
        plot(timeline, ax, title=title, legend=False, labels=labels, top_bytes=top)
        if index % columns:
            ax.set_ylabel("")
    for ax in axes.flat[len(timelines) :]:
        ax.set_visible(False)
    handles = _handles(timelines, [lay_out(timeline) for timeline in timelines])
    figure.legend(handles=handles, ncols=_balanced(len(handles), 3 * columns), loc="outside lower left", **_LEGEND)
    return figure


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the plot to ``path``, in the format of its suffix; the same timeline gives the same bytes.

    Raises:
        ValueError: if matplotlib cannot write such a file.
        ImportError: if matplotlib is not installed.
    """
    plt = _pyplot()
    no_date = {".svg": "Date", ".pdf": "CreationDate", ".ps": "CreationDate", ".eps": "CreationDate"}
    key = no_date.get(Path(path).suffix)
    with plt.rc_context({"svg.hashsalt": "flce-ref"}):
        figure = plt.figure(figsize=(7.4, 3.8), layout="constrained")
        plot(timeline, figure.add_subplot())
        metadata = {key: None} if key else None
        figure.savefig(path, bbox_inches="tight", dpi=160, transparent=True, metadata=metadata)
    plt.close(figure)


_LEGEND: dict[str, Any] = {
    "frameon": False,
    "labelcolor": _INK,
    "fontsize": "small",
    "handlelength": 1.2,
    "handleheight": 0.9,
    "columnspacing": 1.4,
}


_BELOW: dict[str, Any] = {"bbox_to_anchor": (0, -0.16)}


def _balanced(count: int, most: int) -> int:
    """Columns of a legend of ``count`` entries, at most ``most`` of them, in rows of nearly one length."""
    rows = max(1, math.ceil(count / most))
    return max(1, math.ceil(count / rows))


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("drawing a plot needs matplotlib: pip install 'flce-ref[viz]'") from error
    return plt


def _draw_bands(ax: Axes, layout: Layout, scale: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    for band in layout.bands:
        fill = np.array(to_rgb(COLOURS[band.category]))
        polygons = [polygon / (1, scale) for polygon in outline(band, layout.edges)]
        # Outlines part neighbours of one colour; of many thin bands they would be all that is left to see.
        outlined = band.count == 1 and band.bytes > layout.top / 50
        edge, width = (fill * 0.72, 0.5) if outlined else (fill, 0.2)
        ax.add_collection(PolyCollection(polygons, facecolors=[fill], edgecolors=[edge], linewidths=width))


def _style(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    ax.set_facecolor("none")
    ax.grid(False)
    ax.grid(True, axis="y", color=_INK, alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(colors=_INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_INK)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _mark_backward(ax: Axes, timeline: Timeline, peak: float) -> None:
    start = timeline.backward_start
    if start is None or not 0 < start <= timeline.n_events:
        return
    # The line ends at the height of the peak, and the words stand above the peak's own text: they never cross.
    ax.plot([start, start], [0, peak], color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    style: dict[str, Any] = {"va": "bottom", "fontsize": "small", "color": _INK, "textcoords": "offset points"}
    share = start / (timeline.n_events + 1)
    # Near an edge there is room for one of the two words only.
    if share > 0.16:
        ax.annotate("forward", (start, peak), (-4, 14), ha="right", **style)
    if share < 0.84:
        ax.annotate("backward", (start, peak), (4, 14), ha="left", **style)


def _mark_peak(ax: Axes, layout: Layout, scale: int, text: str) -> None:
    x, y = _peak_middle(layout), layout.top / scale
    ax.plot([x], [y], marker="v", color=_INK, markersize=6, clip_on=False, zorder=5)
    offset, side = (-7, "right") if x > layout.edges[-1] * 0.62 else (7, "left")
    style: dict[str, Any] = {"fontsize": "small", "fontweight": "bold", "color": _INK}
    ax.annotate(text, (x, y), (offset, 3), textcoords="offset points", ha=side, va="bottom", **style)


def _label_peak(ax: Axes, timeline: Timeline, layout: Layout, scale: int) -> None:
    """Name the stack at the peak in the right margin, under its sum, each name joined to its band by a thin line."""
    low, high = ax.get_ylim()
    x, margin = _peak_middle(layout), ax.get_xlim()[1] * 1.015
    style: dict[str, Any] = {"fontsize": "small", "color": _INK, "annotation_clip": False}
    total = f"peak {format_bytes(timeline.peak_bytes)}"
    if timeline.input_bytes:
        total += f",\n{format_bytes(timeline.step_peak_bytes)} above the inputs"
    ax.annotate(total, (margin, high), va="top", fontweight="bold", **style)
    groups = stacked_peak(layout)
    line = (high - low) / 14
    places = spread([group.middle / scale for group in groups], line, low, high - 2.5 * line)
    for group, place in zip(groups, places):
        ax.plot([x], [group.middle / scale], marker="o", markersize=2.5, color="black", zorder=6)
        ax.annotate(
            f"{group.text}, {format_bytes(group.bytes)}",
            xy=(x, group.middle / scale),
            xytext=(margin, place),
            va="center",
            arrowprops={"arrowstyle": "-", "color": _INK, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
            **style,
        )


def _peak_middle(layout: Layout) -> float:
    return float(layout.edges[layout.peak] + layout.edges[layout.peak + 1]) / 2


def _handles(timelines: Sequence[Timeline], layouts: Sequence[Layout]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=COLOURS[category], label=category) for category in legend_categories(timelines, layouts)]
