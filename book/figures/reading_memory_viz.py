"""Appendix "Reading Memory Viz": a recorded training step and its spike, and three heads that can be told apart.

``python book/figures/reading_memory_viz.py`` reads recordings made on an H200 (``book/data/h200``) and writes two
figures, and the numbers of the page: ``book/data/reading_memory_viz.json`` and ``.csv``. Two runs give the same bytes.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import matplotlib.pyplot as plt
from make_figures import DATA, FIGURES, read_json, save, write_json

from flce_ref.memory import Timeline, compare, name_by_size
from flce_ref.memory.plot import plot
from flce_ref.models import get

AROUND = 22  # events shown on either side of the spike
HEADS = {"naive": "all tokens at once", "chunked8": "8 chunks", "flce": "fused, chunks of 1,024"}


def main() -> None:
    plt.style.use(FIGURES.parent / "flce.mplstyle")
    run = read_json("h200/whole_step.json")
    step = Timeline.from_json((DATA / "h200/whole_step_naive.json").read_text(encoding="utf-8"))
    model = get(run["model"])
    logits = run["tokens"] * model.vocab_size * 2
    alike = [a for a in step.allocations if a.bytes == logits]
    foot = int(step.live_bytes()[alike[0].start - 1])
    document = {
        "what": "a recorded training step, read as the appendix says; all bytes absolute",
        "model": model.id,
        "name": model.name,
        "tokens": run["tokens"],
        "vocab_size": model.vocab_size,
        "logits_bytes": logits,
        "n_events": step.n_events,
        "given_bytes": step.input_bytes,
        "foot_bytes": foot,
        "peak_bytes": step.peak_bytes,
        "height_bytes": step.peak_bytes - foot,
        "peak_event": step.peak_event,
    }
    write_json("reading_memory_viz.json", document)
    with (DATA / "reading_memory_viz.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["allocated", "freed", "made in", "so it is"])
        for a in alike:
            table.writerow([f"{a.start:,}", f"{a.end:,}", f"`{a.frames[0].name}`" if a.frames else "no stack", a.label])
    spike(step, alike[0].start, max(a.end or 0 for a in alike))
    heads()


def spike(step: Timeline, first: int, last: int) -> None:
    begin, end = (first - AROUND) // 10 * 10, last + AROUND
    around = window(step, begin, end)
    figure = plt.figure(figsize=(7.4, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.2))  # so that only the lower one gives way to its labels
    plot(step, upper.subplots(), title=f"the whole step, {step.n_events:,} events", legend=False, labels=False)
    close = plot(around, lower.subplots(), title=f"events {begin:,} to {end:,}")
    close.xaxis.set_major_formatter(lambda event, _: f"{event + begin:,.0f}")
    alt = (
        f"Two plots. Above a whole recorded step: {step.alt_text()} The curve climbs gently, rises like a wall before "
        f"its first third, falls back at once and goes down in a sawtooth. Below, {around.n_events} events: logits and "
        "then log-probabilities rise as two blocks, one falls; after the start of backward two more blocks of the same "
        "height rise on the one that is left."
    )
    save("reading-memory-viz", figure, alt, [step])


def window(timeline: Timeline, first: int, last: int) -> Timeline:
    """The states ``first`` to ``last`` as a timeline of their own."""
    inside = [a for a in timeline.allocations if a.start <= last and (a.end is None or a.end > first)]
    moved = tuple(
        replace(a, start=max(a.start - first, 0), end=None if a.end is None or a.end > last else a.end - first)
        for a in inside
    )
    backward = None if timeline.backward_start is None else timeline.backward_start - first
    return Timeline(timeline.title, moved, last - first, backward, timeline.source)


def heads() -> None:
    shape = read_json("h200/provenance.json")["shape"]
    sizes = {key: shape[key] for key in ("tokens", "vocab_size", "hidden_size")}
    timelines = [
        replace(name_by_size(Timeline.from_snapshot(DATA / f"h200/snap_{name}.pickle"), **sizes), title=title)
        for name, title in HEADS.items()
    ]
    shapes = "Two broad towers and a thin third block on the second; a staircase up and down again; a low plateau."
    alt = " ".join(timeline.alt_text() for timeline in timelines)
    save("three-heads", compare(timelines), f"Three plots on one scale. {shapes} {alt}", timelines)


if __name__ == "__main__":
    main()
