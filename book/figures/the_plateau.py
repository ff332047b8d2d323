"""Chapter 4: a chunked step, the step peak against the number of chunks, and what summing dw in bfloat16 costs."""

from __future__ import annotations

import csv
from functools import partial
from math import ceil
from typing import Any

import matplotlib.pyplot as plt
import torch
from make_figures import DATA, read_json, save, write_json
from one_naive_step import TOKENS, head, recorded
from the_spike import GRAVITY

from flce_ref import linear_cross_entropy
from flce_ref.memory import Timeline, simulate
from flce_ref.memory.plot import compare
from flce_ref.memory.step_inputs import head_inputs

COUNTS = (1, 2, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 1024)
# Measured in 8 chunks, as (V, D). For the first, two explanations of its peak nearly agree; for the others they do not.
HEADS = (
    ("Gravity-16B-A3B", GRAVITY.vocab_size, GRAVITY.hidden_size),
    ("GPT-OSS", 201_088, 2880),
    ("Gemma-3-sized", 262_144, 2560),
    ("Llama 3 8B", 128_256, 4096),
)
LONGER, LONGER_CHUNKS = 32_768, 256
GIB = 2**30


def chunked(chunks: int, schedule: str = "chunked", tokens: int = TOKENS) -> Timeline:
    """The simulated step of ``schedule`` with the tokens in ``chunks`` chunks."""
    step = partial(linear_cross_entropy, schedule=schedule, chunk_size=ceil(tokens / chunks))
    inputs = head_inputs(tokens, GRAVITY.vocab_size, GRAVITY.hidden_size)
    return simulate(step, *inputs, title=f"{schedule}, {chunks} chunks")


def predicted_step_peak(chunks: int, logits: float, weight: float) -> float:
    """The chapter's equation: the largest of three moments of backward, from the bytes of logits and weight."""
    share = logits / chunks
    last = logits + 2 * share
    if chunks == 1:
        return last
    return max(last, logits + share + weight, logits - 2 * share + 3 * weight)


def chunked_step() -> None:
    simulated, measured = chunked(8), recorded("snap_chunked8")
    titles = ["8 chunks, simulated", "8 chunks, recorded on an H200", "64 chunks, simulated", "8 chunks, checkpointed"]
    timelines = [simulated, measured, chunked(64), chunked(8, "checkpointed")]
    figure = compare(timelines, titles=titles)
    alt = " ".join(f"{title}: {timeline.alt_text()}" for title, timeline in zip(titles, timelines))
    shape = (
        "In forward a staircase of kept log-probabilities rises, in backward it is taken down again while gradients of "
        "the weight stand on it; only checkpointed there is no staircase."
    )
    save("chunked-step", figure, f"Four plots on one scale. {shape} {alt}", timelines)


def plateau() -> None:
    logits = TOKENS * GRAVITY.vocab_size * torch.bfloat16.itemsize
    weight = GRAVITY.vocab_size * GRAVITY.hidden_size * torch.bfloat16.itemsize
    rows = []
    for chunks in COUNTS:
        timeline = chunked(chunks)
        rows.append(
            {
                "chunks": chunks,
                "forward_peak_bytes": timeline.forward_peak_bytes,
                "step_peak_bytes": timeline.step_peak_bytes,
                "absolute_bytes": timeline.peak_bytes,
                "predicted_step_peak_bytes": predicted_step_peak(chunks, logits, weight),
                "checkpointed_step_peak_bytes": chunked(chunks, "checkpointed").step_peak_bytes,
            }
        )
    longer = chunked(LONGER_CHUNKS, tokens=LONGER)
    longer_checkpointed = chunked(LONGER_CHUNKS, "checkpointed", tokens=LONGER)
    document = {
        "what": f"chunked and checkpointed {GRAVITY.id} head at {TOKENS} tokens, bfloat16, by number of chunks",
        "logits_bytes": logits,
        "weight_bytes": weight,
        "input_bytes": simulate(linear_cross_entropy, *head()).input_bytes,
        "longer": {
            "tokens": LONGER,
            "chunks": LONGER_CHUNKS,
            "step_peak_bytes": longer.step_peak_bytes,
            "checkpointed_step_peak_bytes": longer_checkpointed.step_peak_bytes,
            "two_logits_bytes": 2 * LONGER // TOKENS * logits,
        },
        "measured": [{"chunks": n, "step_peak_gib": round(gib, 3)} for n, gib in measured_chunked().items()],
        "rows": rows,
    }
    write_json("simulated/plateau.json", document)
    draw_plateau(document)
    write_heads()


def draw_plateau(document: dict[str, Any]) -> None:
    """The step peak against the number of chunks: predicted, simulated, measured; and of both schedules."""
    rows, logits = document["rows"], document["logits_bytes"]
    counts = [row["chunks"] for row in rows]
    figure, ax = plt.subplots(figsize=(7.0, 4.2))
    hoped = [3 * logits / n / GIB for n in counts]
    ax.plot(counts, hoped, color="#7f7f7f", linestyle=":", label="hoped for: three buffers of one chunk")
    ax.plot(
        counts, [row["predicted_step_peak_bytes"] / GIB for row in rows], "-", color="C0", label="chunked, predicted"
    )
    ax.plot(
        counts,
        [row["step_peak_bytes"] / GIB for row in rows],
        "o",
        color="C0",
        markerfacecolor="none",
        label="chunked, simulated",
    )
    measured = measured_chunked()
    ax.plot(list(measured), list(measured.values()), "x", color="C3", markersize=7, label="measured on an H200")
    repaired = [row["checkpointed_step_peak_bytes"] / GIB for row in rows]
    ax.plot(counts, repaired, "s--", color="C2", markerfacecolor="none", label="each chunk checkpointed, simulated")
    again = measured_checkpointed()
    ax.plot(list(again), list(again.values()), "x", color="C3", markersize=7)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2**k for k in range(0, 11, 2)], [str(2**k) for k in range(0, 11, 2)])
    ax.set_ylim(0, None)
    ax.set_xlabel("chunks $n$")
    ax.set_ylabel("step peak, GiB above the inputs")
    offset = document["input_bytes"] / GIB
    absolute = ax.secondary_yaxis("right", functions=(lambda y: y + offset, lambda y: y - offset))
    absolute.set_ylabel("absolute, GiB")
    ax.legend()
    at = {row["chunks"]: row["step_peak_bytes"] / GIB for row in rows}
    lowest = min(at, key=at.__getitem__)
    save(
        "plateau",
        figure,
        f"Step peak against the number of chunks from 1 to 1,024. It falls from {at[1]:.2f} GiB to {at[lowest]:.2f} at "
        f"{lowest} chunks, rises again and levels off at {at[1024]:.2f}; prediction, simulation and measurement lie on "
        f"one curve. What one would hope for falls to {hoped[-1]:.2f}. With each chunk checkpointed the peak falls to "
        f"{repaired[-1]:.2f} and stays there, measured twice.",
    )


def measured_chunked() -> dict[int, float]:
    """Step peak in GiB by number of chunks, on an H200.

    The table is absolute and includes what the measuring program held; the row of 8 chunks was also measured above the
    inputs, which gives the difference.
    """
    rows = {row["chunks"]: row["absolute_gib"] for row in read_json("h200/plateau.json")["rows"]}
    held = rows[8] - measured_peer("chunked8")
    return {chunks: absolute - held for chunks, absolute in rows.items()}


def measured_checkpointed() -> dict[int, float]:
    return {chunks: measured_peer(f"checkpointed{chunks}") for chunks in (8, 32)}


def measured_peer(name: str, vocab_size: int = GRAVITY.vocab_size) -> float:
    """Step peak in GiB of a row of the measured peers, at ``TOKENS`` tokens and no ignored ones."""
    rows = read_json("h200/peers-2026-12-01.json")
    found = [r for r in rows if (r["name"], r["N"], r["V"], r.get("ign")) == (name, TOKENS, vocab_size, 0.0)]
    assert len(found) == 1, (name, vocab_size, len(found))
    return float(found[0]["peak_gib"])


def write_heads() -> None:
    """Four heads in 8 chunks: two ways to explain the peak against what was measured."""
    with (DATA / "simulated" / "chunked_heads.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["head", "$V$", "$D$", "$L$", "$W$", "$2L$", "{eq}`eq-plateau-peak`", "measured"])
        for name, vocab_size, hidden_size in HEADS:
            logits = TOKENS * vocab_size * torch.bfloat16.itemsize / GIB
            weight = vocab_size * hidden_size * torch.bfloat16.itemsize / GIB
            peaks = (2 * logits, predicted_step_peak(8, logits, weight), measured_peer("chunked8", vocab_size))
            sizes = [f"{size:.3f}" for size in (logits, weight, *peaks)]
            table.writerow([name, f"{vocab_size:,}", f"{hidden_size:,}", *sizes])


def dw_error() -> None:
    """The error of dw, summed over chunks as autograd does in bfloat16, at a size for a laptop."""
    tokens, vocab_size, hidden_size = 4096, 1024, 128
    errors = dw_errors((1, 8, 64, 1024), tokens, vocab_size, hidden_size)
    write_json(
        "simulated/dw_error.json",
        {
            "what": "relative error of dw, chunked in bfloat16 (Frobenius norm, against float64 of the same inputs)",
            "tokens": tokens,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "rows": [{"chunks": n, "relative_error": float(f"{error:.3g}")} for n, error in errors.items()],
        },
    )


def dw_errors(counts: tuple[int, ...], tokens: int, vocab_size: int, hidden_size: int) -> dict[int, float]:
    """By number of chunks, |dw − dw₆₄| / |dw₆₄| of the chunked schedule in bfloat16; random data, seed 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden_size, generator=generator).bfloat16()
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) * 0.02).bfloat16()
    y = torch.randint(vocab_size, (tokens,), generator=generator)

    def dw(dtype: torch.dtype, chunk_size: int) -> torch.Tensor:
        # A copy: to() returns the same tensor if the dtype is the same, and gradients would pile up in it.
        leaf = weight.to(dtype, copy=True).requires_grad_()
        linear_cross_entropy(x.to(dtype), leaf, y, schedule="chunked", chunk_size=chunk_size).backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    truth = dw(torch.float64, tokens)
    return {n: float((dw(torch.bfloat16, tokens // n) - truth).norm() / truth.norm()) for n in counts}
