"""Chapter 1: the heads of published models, the step peak against the context length, a recorded training step."""

from __future__ import annotations

import csv
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
from make_figures import DATA, read_json, save, write_json

from flce_ref import linear_cross_entropy
from flce_ref.memory import Timeline, simulate
from flce_ref.memory.step_inputs import head_inputs
from flce_ref.memory.whole_step import simulate_whole_step
from flce_ref.models import MODELS, get, head_sizes

GRAVITY = get("gravity-16b-a3b")
SCHEDULES = ("naive", "chunked", "checkpointed", "fused")
CONTEXTS = [2**exponent for exponent in range(12, 21)]
BATCH, SEQUENCE = 4, 4096  # the source's example
DECODER, DECODER_TOKENS = get("smollm3-3b"), 2**17  # what was recorded whole


def models_table() -> None:
    rows = []
    for model in MODELS:
        sizes = head_sizes(model, BATCH, SEQUENCE)
        rows.append(
            {
                "id": model.id,
                "name": model.name,
                "vocab_size": model.vocab_size,
                "hidden_size": model.hidden_size,
                "source": model.source,
                "hidden_gb": sizes.hidden_bytes / 1e9,
                "logits_gb": sizes.logits_bytes / 1e9,
                "ratio": sizes.ratio,
            }
        )
    write_json("models.json", rows)
    with (DATA / "models.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "$V$", "$D$", "hidden, GB", "logits, GB", "ratio"])
        for row in rows:
            sizes = [f"{row['hidden_gb']:.2f}", f"{row['logits_gb']:.2f}", f"{row['ratio']:.0f}"]
            table.writerow([row["name"], f"{row['vocab_size']:,}", f"{row['hidden_size']:,}", *sizes])


def context() -> None:
    peaks = []
    for schedule in SCHEDULES:
        step = partial(linear_cross_entropy, schedule=schedule)
        for tokens in CONTEXTS:
            inputs = head_inputs(tokens, GRAVITY.vocab_size, GRAVITY.hidden_size)
            timeline = simulate(step, *inputs, title=f"{schedule}, {tokens} tokens")
            peaks.append({"schedule": schedule, "tokens": tokens, "step_peak_bytes": timeline.step_peak_bytes})
    write_json(
        "simulated/context.json",
        {
            "what": "step peak of the head alone (above input, weight and target), bfloat16, default chunk sizes",
            "model": GRAVITY.id,
            "logits_128k_bytes": head_sizes(GRAVITY, 1, 2**17).logits_bytes,
            "peaks": peaks,
        },
    )

    figure, ax = plt.subplots(figsize=(7.0, 4.2))
    for schedule, marker in zip(SCHEDULES, "osD^"):
        gib = [p["step_peak_bytes"] / 2**30 for p in peaks if p["schedule"] == schedule]
        ax.plot(CONTEXTS, gib, marker=marker, label=schedule)
        ax.annotate(schedule, (CONTEXTS[-1], gib[-1]), (8, 0), textcoords="offset points", va="center")
    for gpu in read_json("gpus.json")["gpus"]:
        gib = gpu["total_mib"] / 1024
        ax.axhline(gib, color="#7f7f7f", linewidth=0.9, linestyle=":")
        below = gpu["name"] == "H200"  # the next line above it is close
        shift = (0, -10 if below else 2)
        ax.annotate(gpu["name"], (CONTEXTS[0], gib), shift, textcoords="offset points", fontsize="small")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(CONTEXTS[::2], [f"{n // 1024}K" if n < 2**20 else "1M" for n in CONTEXTS[::2]])
    ticks = 2.0 ** np.arange(0, 11, 2)
    ax.set_yticks(ticks, [f"{tick:.0f}" for tick in ticks])
    ax.set_xlabel("tokens $N$")
    ax.set_ylabel("step peak, GiB")

    at = {(p["schedule"], p["tokens"]): p["step_peak_bytes"] / 2**30 for p in peaks}
    ends = "; ".join(
        f"{s}: {at[s, CONTEXTS[0]]:.1f} GiB at {CONTEXTS[0]:,} tokens, {at[s, 2**17]:.1f} at 131,072, "
        f"{at[s, 2**20]:.1f} at 1,048,576"
        for s in SCHEDULES
    )
    save(
        "context",
        figure,
        f"Step peak against the number of tokens on logarithmic axes. {ends}. The first two are parallel straight "
        "lines and pass the memory of every GPU drawn; the last two are nearly flat and stay below all of them.",
    )


def whole_step_recorded() -> None:
    """The training step of chapter 1 as recorded on an H200, and the simulated one laid over it."""
    figure, axes = plt.subplots(2, 1, figsize=(7.0, 5.2), sharex=True, sharey=True)
    recordings = []
    for ax, loss in zip(axes, ("naive", "fused")):
        text = (DATA / "h200" / f"whole_step_{loss}.json").read_text(encoding="utf-8")
        recorded = Timeline.from_json(text)
        simulated = simulate_whole_step(DECODER, DECODER_TOKENS, tied=True, schedule=loss)
        recordings.append(recorded)
        for timeline, name, style in (
            (recorded, "recorded on an H200", {"color": "C1", "linewidth": 3.0}),
            (simulated, "simulated", {"color": "C0", "linewidth": 0.9}),
        ):
            ax.plot(progress(timeline), timeline.live_bytes() / 2**30, label=name, **style)
        ax.set_title(f"{'plain' if loss == 'naive' else loss} loss")
        ax.set_ylabel("alive, GiB")
    axes[0].legend()
    axes[0].set_ylim(0, None)
    axes[1].set_xticks([0, 1, 2], ["forward begins", "backward begins", "ends"])
    alt = " ".join(timeline.alt_text() for timeline in recordings)
    shape = (
        "Two plots on one scale, one above the other, in each a recorded and a simulated curve that lie on each other."
    )
    save("whole-step-recorded", figure, f"{shape} {alt}", recordings)


def progress(timeline: Timeline) -> np.ndarray:
    """For each state, how far the step has come: 0 to 1 in forward, 1 to 2 in backward.

    A real step has a few events more than a simulated one, of a few bytes; this lays the two over each other.
    """
    start = timeline.backward_start
    assert start is not None
    forward = np.linspace(0, 1, start, endpoint=False)
    return np.concatenate([forward, np.linspace(1, 2, timeline.n_events + 1 - start)])
