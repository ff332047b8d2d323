"""Chapter 4: a chunked step, the step peak against the number of chunks, and what summing dw in bfloat16 costs."""

from __future__ import annotations

from functools import partial
from math import ceil

import matplotlib.pyplot as plt
import torch
from make_figures import read_json, save, write_json
from one_naive_step import TOKENS, head, recorded
from the_spike import GRAVITY

from flce_ref import linear_cross_entropy
from flce_ref.memory import Timeline, simulate
from flce_ref.memory.plot import compare
from flce_ref.memory.step_inputs import head_inputs

COUNTS = (1, 2, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
LONGER = 32_768


def chunked(chunks: int, schedule: str = "chunked", tokens: int = TOKENS) -> Timeline:
    """The simulated step of ``schedule`` with the tokens in ``chunks`` chunks."""
    step = partial(linear_cross_entropy, schedule=schedule, chunk_size=ceil(tokens / chunks))
    inputs = head_inputs(tokens, GRAVITY.vocab_size, GRAVITY.hidden_size)
    return simulate(step, *inputs, title=f"{schedule}, {chunks} chunks")


def predicted_step_peak(chunks: int, logits: float, weight: float) -> float:
    """Equation (4.3): the largest of the three moments of backward, from the bytes of logits and weight."""
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
        "In forward a staircase of kept log-probabilities rises, in backward it is taken down again while gradients of the "
        "weight stand on it; only checkpointed there is no staircase."
    )
    save("chunked-step", figure, f"Four plots on one scale. {shape} {alt}", timelines)


def plateau() -> None:
    logits = TOKENS * GRAVITY.vocab_size * torch.bfloat16.itemsize
    weight = GRAVITY.vocab_size * GRAVITY.hidden_size * torch.bfloat16.itemsize
    inputs = simulate(linear_cross_entropy, *head()).input_bytes
    rows = []
    for chunks in COUNTS:
        timeline = chunked(chunks)
        rows.append(
            {
                "chunks": chunks,
                "forward_peak_bytes": timeline.forward_peak_bytes,
                "step_peak_bytes": timeline.step_peak_bytes,
                "absolute_bytes": timeline.peak_bytes,
                "predicted_absolute_bytes": predicted_step_peak(chunks, logits, weight) + inputs,
                "checkpointed_step_peak_bytes": chunked(chunks, "checkpointed").step_peak_bytes,
            }
        )
    longer = chunked(512, tokens=LONGER)
    naive = simulate(partial(linear_cross_entropy, schedule="naive"), *head())
    fused = simulate(linear_cross_entropy, *head())
    write_json(
        "simulated/plateau.json",
        {
            "what": f"chunked and checkpointed {GRAVITY.id} head at {TOKENS} tokens, bfloat16, by number of chunks",
            "logits_bytes": logits,
            "weight_bytes": weight,
            "input_bytes": inputs,
            "naive_absolute_bytes": naive.peak_bytes,
            "fused_absolute_bytes": fused.peak_bytes,
            "longer": {"tokens": LONGER, "chunks": 512, "absolute_bytes": longer.peak_bytes},
            "rows": rows,
        },
    )

    gib = 2**30
    measured = read_json("h200/plateau.json")["rows"]
    figure, ax = plt.subplots(figsize=(7.0, 4.0))
    counts = [row["chunks"] for row in rows]
    hoped = [(3 * logits / n + inputs) / gib for n in counts]
    ax.plot(counts, hoped, color="#7f7f7f", linestyle=":", label="hoped for: three buffers of one chunk")
    ax.plot(counts, [row["predicted_absolute_bytes"] / gib for row in rows], "-", label="predicted")
    ax.plot(counts, [row["absolute_bytes"] / gib for row in rows], "o", label="simulated", markerfacecolor="none")
    xs, ys = [row["chunks"] for row in measured], [row["absolute_gib"] for row in measured]
    ax.plot(xs, ys, "x", color="C3", label="measured on an H200", markersize=7)
    repaired = [(row["checkpointed_step_peak_bytes"] + inputs) / gib for row in rows]
    ax.plot(counts, repaired, "--", color="C2", label="each chunk checkpointed (simulated)")
    ax.set_xscale("log", base=2)
    ax.set_xticks([2**k for k in range(0, 11, 2)], [str(2**k) for k in range(0, 11, 2)])
    ax.set_ylim(0, None)
    ax.set_xlabel("chunks $n$")
    ax.set_ylabel("peak, absolute, GiB")
    ax.legend()
    at = {row["chunks"]: row["absolute_bytes"] / gib for row in rows}
    lowest = min(at, key=at.__getitem__)
    save(
        "plateau",
        figure,
        f"Absolute peak against the number of chunks from 1 to 1,024. It falls from {at[1]:.2f} GiB to {at[lowest]:.2f} at "
        f"{lowest} chunks, rises again and levels off at {at[1024]:.2f}; prediction, simulation and measurement lie on one "
        f"curve. What one would hope for falls to {hoped[-1]:.2f}. With each chunk checkpointed the peak falls to "
        f"{repaired[-1]:.2f} and stays there.",
    )


def dw_error() -> None:
    """The error of dw, summed over chunks as autograd does in bfloat16, at a size that a laptop computes in a second."""
    rows = [{"chunks": n, "relative_error": error} for n, error in dw_errors((1, 8, 64, 1024)).items()]
    write_json(
        "simulated/dw_error.json",
        {
            "what": "relative error of dw (Frobenius norm, against float64 of the same bfloat16 inputs) in plain chunked bfloat16",
            "tokens": 4096,
            "vocab_size": 1024,
            "hidden_size": 128,
            "rows": rows,
        },
    )


def dw_errors(counts: tuple[int, ...], tokens: int = 4096, vocab_size: int = 1024, hidden_size: int = 128) -> dict[int, float]:
    """By number of chunks, |dw − dw₆₄| / |dw₆₄| of the chunked schedule in bfloat16; random data, seed 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden_size, generator=generator).bfloat16()
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) * 0.02).bfloat16()
    y = torch.randint(vocab_size, (tokens,), generator=generator)

    def dw(dtype: torch.dtype, chunk_size: int) -> torch.Tensor:
        leaf = weight.to(dtype).requires_grad_()
        linear_cross_entropy(x.to(dtype), leaf, y, schedule="chunked", chunk_size=chunk_size).backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    truth = dw(torch.float64, tokens)
    return {n: float((dw(torch.bfloat16, tokens // n) - truth).norm() / truth.norm()) for n in counts}
