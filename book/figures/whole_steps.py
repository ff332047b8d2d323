"""Chapter 1: a whole training step around the loss, and the loss by itself."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from make_figures import save, write_json

from flce_ref.memory import Timeline
from flce_ref.memory.plot import plot
from flce_ref.memory.whole_step import Spike, loss_spike, simulate_whole_step
from flce_ref.models import get, head_sizes

MODEL, TIED = get("smollm3-3b"), True  # its released configuration says tie_word_embeddings
TOKENS = 2**17
GIB = 2**30
RUNS = (("naive", True), ("fused", True), ("naive", False), ("fused", False))  # schedule, checkpointing


def whole_step() -> None:
    timelines = {run: _simulated(*run) for run in RUNS}
    spikes = {run: loss_spike(timeline) for run, timeline in timelines.items()}
    _write(timelines, spikes)
    _draw_steps([timelines[run] for run in RUNS[:3]])
    _draw_spikes(timelines, spikes)


def _simulated(schedule: str, checkpointing: bool) -> Timeline:
    title = f"{MODEL.name}, {schedule} loss, {'each layer checkpointed' if checkpointing else 'nothing checkpointed'}"
    return simulate_whole_step(MODEL, TOKENS, tied=TIED, checkpointing=checkpointing, schedule=schedule, title=title)


def _write(timelines: dict[tuple[str, bool], Timeline], spikes: dict[tuple[str, bool], Spike]) -> None:
    given = timelines[RUNS[0]].allocations
    by_category = {c: sum(a.bytes for a in given if a.start == 0 and a.category == c) for c in ("weight", "input")}
    runs: list[dict[str, Any]] = []
    for (schedule, checkpointing), timeline in timelines.items():
        spike = spikes[schedule, checkpointing]
        runs.append(
            {
                "schedule": schedule,
                "checkpointing": checkpointing,
                "peak_bytes": timeline.peak_bytes,
                "foot_bytes": spike.foot,
                "loss_bytes": spike.height,
                "elsewhere_bytes": spike.elsewhere,
                "peaks_in_loss": spike.top == timeline.peak_bytes,
                "n_events": timeline.n_events,
                "loss_events": spike.end - spike.start,
            }
        )
    write_json(
        "simulated/whole_step.json",
        {
            "what": "forward and backward of one sequence, simulated; all bytes absolute but loss_bytes: foot = alive "
            "just before the loss, loss = its highest point above the foot, elsewhere = highest outside the loss",
            "name": MODEL.name,
            "model": MODEL.id,
            "source": MODEL.source,
            "simplified": "rotary positions in every layer; the model leaves them out in every fourth",
            "tokens": TOKENS,
            "dtype": "bfloat16",
            "optimizer": "AdamW, its two moments in bfloat16; its update is after the step and not counted",
            "num_layers": MODEL.num_layers,
            "hidden_size": MODEL.hidden_size,
            "vocab_size": MODEL.vocab_size,
            "logits_bytes": head_sizes(MODEL, 1, TOKENS).logits_bytes,
            "layer_output_bytes": head_sizes(MODEL, 1, TOKENS).hidden_bytes,
            "parameter_bytes": by_category["weight"],
            "moment_bytes": next(a.bytes for a in given if a.label.startswith("AdamW")),
            "given_bytes": sum(by_category.values()),
            "runs": runs,
        },
    )


def _draw_steps(timelines: list[Timeline]) -> None:
    """The first two on one scale; more are in the interactive page only, for they need another."""
    figure, axes = plt.subplots(2, 1, figsize=(7.4, 6.4))
    top = timelines[0].peak_bytes
    for ax, timeline in zip(axes, timelines[:2]):
        plot(timeline, ax, legend=ax is axes[1], top_bytes=top)
        for bands in ax.collections:
            bands.set_rasterized(True)  # thousands of outlines would take ten times the bytes of their picture
    axes[0].set_xlabel("")
    alt = " ".join(t.alt_text() for t in timelines[:2])
    save("whole-step", figure, f"Two plots on one scale, one above the other. {alt}", timelines)


def _draw_spikes(timelines: dict[tuple[str, bool], Timeline], spikes: dict[tuple[str, bool], Spike]) -> None:
    figure, ax = plt.subplots(figsize=(7.0, 3.4))
    styles = {("naive", True): "-", ("naive", False): ":", ("fused", True): "-"}
    for (run, style), colour in zip(styles.items(), ("#E69F00", "#0072B2", "#009E73")):
        spike, live = spikes[run], timelines[run].live_bytes()
        events = np.arange(spike.start - 1, spike.end)
        above = (live[events] - spike.foot) / GIB
        text = f"{run[0]}, {'checkpointed' if run[1] else 'nothing checkpointed'}"
        width = 3.2 if style == ":" else 1.6
        ax.step(events - spike.start + 1, above, style, where="post", color=colour, linewidth=width, label=text)
    ax.set_xlabel("allocator events since the loss began")
    ax.set_ylabel("alive above the foot, GiB")
    ax.legend()
    checkpointed, plain, fused = (f"{spikes[run].height / GIB:.2f} GiB" for run in styles)
    save(
        "loss-spike",
        figure,
        "Bytes alive above what was alive when the loss began, while it has buffers of its own. The naive loss rises "
        f"in three steps to {checkpointed} with every layer checkpointed and to {plain} with none: the two lines "
        f"are one. The fused loss rises to {fused} and stays there.",
    )
