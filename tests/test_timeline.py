"""The timeline's numbers against a count by hand, its storage, and its static pictures."""

from __future__ import annotations

import random
import sys
import time
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flce_ref.memory import CATEGORIES, Allocation, Frame, Timeline, compare, name_by_size
from flce_ref.memory.layout import COLOURS, alive_in_words, lay_out, outline, spread, stacked_peak
from flce_ref.memory.svg import to_svg

MIB = 1 << 20


def random_timeline(seed: int, events: int, *, keep: int = 40) -> Timeline:
    """A timeline in which every event is one allocation or one free; some blocks are older, some are never freed."""
    rng = random.Random(seed)
    stacks = [(), (Frame("model.py", 7, "forward"), Frame("train.py", 3, "<module>"))]
    rows: list[list[Any]] = [[rng.randrange(1, 2000) * 512, 0, None] for _ in range(rng.randrange(4))]
    live = list(range(len(rows)))
    for event in range(1, events + 1):
        if live and (len(live) > keep or rng.random() < 0.45):
            rows[live.pop(rng.randrange(len(live)))][2] = event
        else:
            live.append(len(rows))
            rows.append([512 * rng.randrange(1, 1 << rng.randrange(1, 17)), event, None])
    allocations = tuple(
        Allocation(*row, rng.choice(["", "x", "logits of chunk 3"]), rng.choice(CATEGORIES), rng.choice(stacks))
        for row in rows
    )
    return Timeline(f"random {seed}", allocations, events, rng.choice([None, events // 2]), "simulated", ("a note",))


timelines = st.builds(random_timeline, st.integers(0, 10**6), st.integers(0, 120))


@pytest.fixture
def step() -> Timeline:
    """Weight 4 MiB and input 1 MiB are given; logits 8 and log-probabilities 8 MiB; dlogits 8, dw 4 in backward."""
    return Timeline(
        "a step",
        (
            Allocation(4 * MIB, 0, None, "linear_weight", "weight"),
            Allocation(1 * MIB, 0, None, "input", "input"),
            Allocation(8 * MIB, 1, 3, "logits", "logits"),
            Allocation(8 * MIB, 2, 5, "log-probabilities", "log-probabilities"),
            Allocation(8 * MIB, 4, 7, "dlogits", "dlogits"),
            Allocation(4 * MIB, 6, None, "dw", "dw"),
        ),
        n_events=7,
        backward_start=4,
        source="simulated",
    )


def test_numbers_of_a_step_counted_by_hand(step: Timeline) -> None:
    assert (step.live_bytes() // MIB).tolist() == [5, 13, 21, 13, 21, 13, 17, 9]
    assert step.peak_bytes == 21 * MIB
    assert step.peak_event == 2  # the first of two equal ones
    assert step.input_bytes == 5 * MIB
    assert step.step_peak_bytes == 16 * MIB
    assert step.forward_peak_bytes == 16 * MIB
    assert step.alive_at_peak() == [
        ("log-probabilities", 8 * MIB),
        ("logits", 8 * MIB),
        ("linear_weight", 4 * MIB),
        ("input", 1 * MIB),
    ]


@given(timelines)
def test_live_bytes_against_a_plain_loop(timeline: Timeline) -> None:
    def alive(a: Allocation, state: int) -> bool:
        return a.start <= state and (a.end is None or state < a.end)

    expected = [sum(a.bytes for a in timeline.allocations if alive(a, s)) for s in range(timeline.n_events + 1)]
    assert timeline.live_bytes().tolist() == expected
    assert timeline.peak_bytes == max(expected)
    assert timeline.alive_at(timeline.peak_event) == [a for a in timeline.allocations if alive(a, timeline.peak_event)]
    assert sum(size for _, size in timeline.alive_at_peak()) == timeline.peak_bytes


@given(timelines)
def test_json_gives_the_same_timeline_back(timeline: Timeline) -> None:
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "flce_ref.memory.Timeline/1"}', "\x00"])
def test_json_that_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text:"):
        Timeline.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"allocations": (Allocation(-1, 0, None),)}, r"allocations\[0\]: got bytes=-1"),
        ({"allocations": (Allocation(1, 2, 2),)}, "start < end"),
        ({"allocations": (Allocation(1, 4, None),)}, "n_events = 3"),
        ({"allocations": (Allocation(1, 0, None, category="grads"),)}, "category: got"),
        ({"source": "guessed"}, "source: got 'guessed'"),
        ({"n_events": -1}, "n_events: got -1"),
        ({"backward_start": 9}, "backward_start: got 9"),
    ],
)
def test_a_timeline_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"title": "", "allocations": (), "n_events": 3, "backward_start": None, "source": "simulated"} | change
    with pytest.raises(ValueError, match=message):
        Timeline(**arguments)


def test_alive_at_refuses_events_that_are_not_there(step: Timeline) -> None:
    with pytest.raises(ValueError, match="event: got 8, expected 0 to 7"):
        step.alive_at(8)


# ---------------------------------------------------------------- layout


@given(timelines, st.integers(1, 50), st.integers(0, 30))
def test_every_column_adds_up_and_no_peak_is_lost(timeline: Timeline, columns: int, most_bands: int) -> None:
    layout = lay_out(timeline, columns=columns, most_bands=most_bands)
    live = timeline.live_bytes()
    total = np.zeros(len(layout.events), np.int64)
    for band in layout.bands:
        here = slice(band.first, band.first + len(band.height))
        assert (band.bottom == total[here]).all()  # each lies on the ones before: no overlap, no gap
        total[here] += band.height
    assert (total == live[layout.events]).all()
    assert layout.top == timeline.peak_bytes
    assert live[layout.events[layout.peak]] == timeline.peak_bytes
    for column, event in enumerate(layout.events):
        assert live[event] == live[layout.edges[column] : layout.edges[column + 1]].max()


@given(timelines)
def test_outlines_enclose_the_bytes_of_their_bands(timeline: Timeline) -> None:
    layout = lay_out(timeline, columns=30)
    widths = np.diff(layout.edges)
    for band in layout.bands:
        area = 0.0
        for polygon in outline(band, layout.edges):
            x, y = polygon[:, 0], polygon[:, 1]
            area += abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2
        assert area == pytest.approx(float((band.height * widths[band.first :][: len(band.height)]).sum()))


def test_the_peak_is_named_bottom_to_top(step: Timeline) -> None:
    assert [group.text for group in stacked_peak(lay_out(step))] == [
        "linear_weight",
        "input",
        "logits",
        "log-probabilities",
    ]


def test_chunks_are_named_together() -> None:
    chunks = tuple(Allocation(MIB, k, None, f"log-probabilities of chunk {k}", "log-probabilities") for k in (1, 2, 3))
    timeline = Timeline("", chunks, 3, None, "simulated")
    assert [(g.text, g.bytes) for g in alive_in_words(timeline)] == [("log-probabilities of 3 chunks", 3 * MIB)]
    assert [g.text for g in stacked_peak(lay_out(timeline))] == ["log-probabilities of 3 chunks"]


def test_labels_are_spread_without_leaving_the_range() -> None:
    placed = spread([0.0, 0.1, 0.2, 9.9, 10.0], 1.0, 0.0, 10.0)
    assert placed == pytest.approx([0.0, 1.0, 2.0, 9.0, 10.0])


# ---------------------------------------------------------------- pictures


def test_plot_draws_the_bands_on_an_axis_in_gib(h200_naive: Timeline) -> None:
    ax = h200_naive.plot()
    assert ax.get_ylabel() == "allocated (GiB)"
    assert ax.get_ylim()[1] > h200_naive.peak_bytes / 2**30
    assert len(ax.collections) == len(lay_out(h200_naive).bands)
    tallest = max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths())
    assert tallest == pytest.approx(h200_naive.peak_bytes / 2**30)
    words = [text.get_text() for text in ax.texts]
    assert {"forward", "backward"} <= set(words)
    assert any("log-probabilities, 2.31 GiB" in word for word in words)
    assert "peak 7.61 GiB,\n6.94 GiB above the inputs" in words


def test_no_two_texts_of_a_plot_overlap_and_labels_leave_room_for_the_axes(h200_naive: Timeline) -> None:
    chunked = named("snap_chunked8.pickle")
    for figure in (
        h200_naive.plot().figure,
        compare([h200_naive, chunked]),
        compare([h200_naive, chunked], labels=True),
    ):
        figure.canvas.draw()
        for ax in figure.axes:
            boxes = [
                text.get_window_extent() for text in [*ax.texts, ax.title, *ax.get_xticklabels()] if text.get_text()
            ]
            assert not [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]
            assert ax.get_window_extent().width > figure.bbox.width / len(figure.axes) / 2


def test_compare_uses_one_scale_and_one_legend(step: Timeline, h200_naive: Timeline) -> None:
    figure = compare([step, h200_naive], titles=["small", "large"])
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > h200_naive.peak_bytes / 2**30
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["small", "large"]
    assert first.get_legend() is None
    assert second.get_legend() is None
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == sorted(names, key=CATEGORIES.index)
    assert "log-probabilities" in names


def test_compare_refuses_nothing_and_unmatched_titles(step: Timeline) -> None:
    with pytest.raises(ValueError, match="timelines: got none"):
        compare([])
    with pytest.raises(ValueError, match="titles: got 1, expected 2"):
        compare([step, step], titles=["one"])


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_timeline_gives_the_same_picture(step: Timeline, tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    step.save_plot(first)
    step.save_plot(second)
    assert first.read_bytes() == second.read_bytes()


def test_the_script_free_picture_is_wellformed_and_names_its_bands(h200_naive: Timeline) -> None:
    svg = to_svg(h200_naive)
    titles = [element.text for element in ET.fromstring(svg).iter("title")]
    assert "log-probabilities, 2.31 GiB" in titles
    assert "<script" not in svg
    assert svg == to_svg(h200_naive)


def test_alt_text_says_what_the_numbers_are(step: Timeline) -> None:
    assert step.alt_text() == (
        "a step: memory over 7 allocator events (simulated) peaks at 21.00 MiB, 16.00 MiB above the inputs, at event "
        "2, in forward; alive then: log-probabilities 8.00 MiB, logits 8.00 MiB, linear_weight 4.00 MiB, input 1.00 "
        "MiB."
    )


def test_an_empty_timeline_is_drawn_too() -> None:
    empty = Timeline("nothing", (), 0, None, "simulated")
    assert empty.peak_bytes == 0
    empty.plot()
    ET.fromstring(to_svg(empty))


def test_a_hundred_thousand_events_are_drawn_in_seconds() -> None:
    timeline = random_timeline(0, 100_000, keep=1500)
    begun = time.perf_counter()
    timeline.plot()
    to_svg(timeline)
    timeline.alt_text()
    # It takes half a second; something quadratic would take minutes.
    assert time.perf_counter() - begun < 20


def test_without_matplotlib_the_error_says_what_to_install(step: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"flce-ref\[viz\]"):
        step.plot()
    assert "<svg" in step._repr_html_()  # the interactive view does not need it


# What people without one kind of cone see, on linear RGB: Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "all three": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
# From linear RGB to cone responses and, by cube roots, to Oklab (Ottosson, 2020), where distances are perceived ones.
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


@pytest.mark.parametrize("vision", VISION)
def test_any_two_categories_can_be_told_apart(vision: str) -> None:
    assert list(COLOURS) == list(CATEGORIES)
    srgb = np.array([[int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)] for colour in COLOURS.values()])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(VISION[vision]).T, 0, 1)
    lab = np.cbrt(seen @ np.array(CONES).T) @ np.array(OKLAB).T
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1) + np.eye(len(lab))
    assert apart.min() > 0.075  # 0.076 is the least among Okabe and Ito's own


@pytest.fixture
def h200_naive() -> Timeline:
    return named("snap_naive.pickle")


def named(snapshot: str) -> Timeline:
    path = Path(__file__).parents[1] / "book/data/h200" / snapshot
    return name_by_size(Timeline.from_snapshot(path), tokens=8192, vocab_size=151552, hidden_size=2048)
