"""Chapter 3: one naive step simulated and recorded, event by event, and the ways of writing it that cost more."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from make_figures import DATA, save, write_json
from the_spike import GRAVITY
from torch import Tensor

from flce_ref.memory import Timeline, name_by_size, simulate
from flce_ref.memory.plot import compare
from flce_ref.memory.step_inputs import head_inputs

TOKENS = 8192
LOGITS = TOKENS * GRAVITY.vocab_size * torch.bfloat16.itemsize
LARGE = 1 << 20  # below this, scalars and values per row


def naive(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), y)


def logits_returned(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, y), logits


def as_float(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), y)


def returned_then_float(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.float(), y), logits


def float_returned(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, y), logits


def by_hand(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    z = F.linear(x, weight)
    return (torch.logsumexp(z, 1) - z.gather(1, y[:, None]).squeeze(1)).mean()


def without_grad(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return naive(x, weight, y)


# What a model file would say, and a step that does it.
IDIOMS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("`cross_entropy(linear(x, W), y)`", naive),
    ("`logits = linear(x, W)`, returned beside the loss", logits_returned),
    ("`.float()` on the logits, no name", as_float),
    ("bfloat16 `logits` returned, `.float()` for the loss", returned_then_float),
    ("`logits = linear(x, W).float()`, returned", float_returned),
)


def head(x_grad: bool = True, weight_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, y = head_inputs(TOKENS, GRAVITY.vocab_size, GRAVITY.hidden_size)
    return x.requires_grad_(x_grad), weight.requires_grad_(weight_grad), y


def recorded(name: str) -> Timeline:
    """A step recorded on an H200, with the buffers that only their size tells apart named by it."""
    timeline = Timeline.from_snapshot(DATA / "h200" / f"{name}.pickle")
    return name_by_size(timeline, tokens=TOKENS, vocab_size=GRAVITY.vocab_size, hidden_size=GRAVITY.hidden_size)


def naive_step() -> None:
    simulated, measured = simulate(naive, *head(), title="naive"), recorded("snap_naive")
    variants = {
        "by hand": simulate(by_hand, *head()),
        "frozen weight": simulate(naive, *head(weight_grad=False)),
        "frozen input": simulate(naive, *head(x_grad=False)),
        "no grad": simulate(without_grad, *head()),
    }
    idioms = [(code, simulate(step, *head())) for code, step in IDIOMS]
    write_json(
        "simulated/naive_step.json",
        {
            "what": f"naive steps of {GRAVITY.id} at {TOKENS} tokens, bfloat16; peaks above the inputs unless absolute",
            "logits_bytes": LOGITS,
            "input_bytes": simulated.input_bytes,
            "forward_peak_bytes": simulated.forward_peak_bytes,
            "step_peak_bytes": simulated.step_peak_bytes,
            "variants": [{"name": name, "step_peak_bytes": t.step_peak_bytes} for name, t in variants.items()],
            "idioms": [{"code": code, "absolute_bytes": t.peak_bytes} for code, t in idioms],
        },
    )
    with (DATA / "simulated" / "idioms.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["the step", "absolute peak, GiB", "above the inputs"])
        for code, timeline in idioms:
            multiple = f"${timeline.step_peak_bytes / LOGITS:.0f} L$"
            table.writerow([code, f"{timeline.peak_bytes / 2**30:.2f}", multiple])
    write_events(measured)

    figure = compare([simulated, measured], titles=["simulated", "recorded on an H200"], columns=1, labels=True)
    alt = " ".join(f"{where}: {t.alt_text()}" for where, t in (("Simulated", simulated), ("Recorded", measured)))
    save("naive-step", figure, f"Two plots of the same shape. {alt}", [simulated, measured])


def write_events(timeline: Timeline) -> None:
    """The allocations and frees above ``LARGE``, in order, as a table; scalars are left out."""
    before = sum(a.bytes for a in timeline.alive_at(0))
    events = []
    for a in timeline.allocations:
        if a.bytes >= LARGE and a.start > 0:
            events.append((a.start, "allocated", a))
            if a.end is not None:
                events.append((a.end, "freed", a))
    live = timeline.live_bytes()
    with (DATA / "h200" / "naive_events.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["event", "pass", "what", "GiB", "alive, GiB"])
        for event, verb, a in sorted(events, key=lambda row: row[0]):
            assert timeline.backward_start is not None
            where = "forward" if event < timeline.backward_start else "backward"
            alive = f"{(live[event] - before) / 2**30:.4f}"
            alive = f"**{alive}**" if event == timeline.peak_event else alive
            sign = "+" if verb == "allocated" else "−"
            table.writerow([event, where, f"{a.label} {verb}", f"{sign}{a.bytes / 2**30:.4f}", alive])
