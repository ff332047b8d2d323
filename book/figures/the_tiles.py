"""Chapter 9: the two ways to cut the logits, where which needs less, tiles by width, and what a filter leaves out."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import torch
from make_figures import read_json, save, write_json
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter
from the_chunk import write_table

from flce_ref import explain, models
from flce_ref.memory import head_inputs
from flce_ref.schedules.plan import default_tile_width

GIB = 2**30
MODEL = models.get("gravity-16b-a3b")
N = 8192
GRAY = "#7f7f7f"
MEASURED = ("median_ms", "peak_bytes")
SHOWN = ("exact", "filter_eps = 2^-12", "cut-cross-entropy")
HEADS = {"gravity-16b-a3b": "Gravity", "llama-3-8b": "Llama 3", "gemma-3-4b": "Gemma 3"}


def two_cuts() -> None:
    """The (N, V) logits cut by tokens and by words: what is finished by a piece, and what it only adds to."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.3))
    for ax, words in zip(axes, (False, True)):
        _draw_cut(ax, words)
    alt = (
        "Two drawings of the logits, N tokens high and V words wide, with the input to the left and the weight above. "
        "Left, some rows are marked: with them some rows of dx are finished, and all of dw is added to. Right, some "
        "columns are marked: with them some rows of dw are finished, and all of dx is added to."
    )
    save("two-cuts", figure, alt)


def _draw_cut(ax: Axes, words: bool) -> None:
    ax.set(xlim=(-2.6, 10.2), ylim=(-6.2, 3.6), aspect="equal")
    ax.axis("off")

    def box(x: float, y: float, width: float, height: float, color: str = "", alpha: float = 1) -> None:
        style: dict[str, Any] = {"facecolor": color, "alpha": alpha, "linewidth": 0}
        if not color:
            style = {"fill": False, "edgecolor": GRAY, "linewidth": 1}
        ax.add_patch(Rectangle((x, y), width, height, **style))

    box(0, -6, 10, 6)  # logits
    box(-2.4, -6, 1.6, 6)  # dx
    box(0, 0.8, 10, 1.6)  # dw, lying on its side
    if words:
        box(4, -6, 1.6, 6, "C0", 0.5)
        box(4, 0.8, 1.6, 1.6, "C2", 0.6)
        box(-2.4, -6, 1.6, 6, "C1", 0.35)
    else:
        box(0, -3.6, 10, 1.2, "C0", 0.5)
        box(-2.4, -3.6, 1.6, 1.2, "C2", 0.6)
        box(0, 0.8, 10, 1.6, "C1", 0.35)
    done, added = ("dw", "dx") if words else ("dx", "dw")
    what = "a tile of T words" if words else "a chunk of C tokens"
    ax.set_title(f"{what}: {done} finished, {added} added to", fontsize=9)
    text = {"ha": "center", "va": "center", "fontsize": 9}
    ax.text(7.6 if words else 5, -5 if words else -3, "logits (N, V)" if words else "logits", **text)
    ax.text(-1.6, -5.4, "dx", **text)
    ax.text(9.2, 1.6, "dw", **text)


def table_of_cuts() -> None:
    """Products, operations and bytes of each cut of the Gravity head, and tables of what was measured."""
    v, d = MODEL.vocab_size, MODEL.hidden_size
    t = default_tile_width(N, v, d)
    inputs = head_inputs(N, v, d)
    peak = {s: explain(*inputs, schedule=s).step_peak_bytes for s in ("naive", "fused", "vocab_tiled")}
    both = 6 * v * d + 2 * N * d
    rows = [
        ("none", 3, "(N, V), three times", "–", peak["naive"]),
        (f"tokens, C = {d}", 3, "(C, V)", "dw", peak["fused"]),
        (f"words, T = {t}", 4, "(N, T)", "dx", peak["vocab_tiled"]),
        ("both", 4, "(C, T)", "dw and dx", both),
    ]
    write_table(
        "cuts.csv",
        ["cut", "products", "10¹² operations", "logits alive", "float32 sums", "step peak, GiB"],
        [(c, str(p), f"{2 * p * N * v * d / 1e12:.1f}", alive, sums, f"{b / GIB:.3f}")
         for c, p, alive, sums, b in rows],
    )  # fmt: skip
    measured = read_json("h200/vocab_tiled.json")
    rows = [
        (name, f"{r['median_ms']:.1f}", f"{r['over_floor']:.2f}", f"{r['peak_bytes'] / GIB:.3f}",
         *(f"{r[key]:.2%}" if key in r else "" for key in ("dx_error", "dw_error")))
        for name, r in ((_said(r["name"]), r) for r in measured["widths"]["table"] if r["median_ms"])
    ]  # fmt: skip
    write_table("tiled.csv", ["step", "ms", "÷ floor", "step peak, GiB", "error of dx", "error of dw"], rows)
    _table_of_filters(measured["filter"]["heads"])
    _derived(measured)


def _said(name: str) -> str:
    for ours, here in (("vocab_tiled", "words"), ("fused", "tokens"), ("cut-cross-entropy", "Cut Cross-Entropy")):
        name = name.replace(ours, here)
    return name


def _table_of_filters(heads: list[dict[str, Any]]) -> None:
    rows = []
    for head in heads:
        for r in head["table"]:
            if "T =" in r["name"] or (head["head"] != "trained" and r["name"] not in SHOWN):
                continue
            needed, rest = (f"{r[key]:.0%}" if key in r else "" for key in ("pairs_needed", "probability_left_out"))
            errors = (f"{r[key]:.1%}" for key in ("dx_error", "dw_error", "dw_error_unseen"))
            rows.append((head["head"], _said(r["name"]), f"{r['median_ms']:.1f}", needed, rest, *errors))
    names = ["head", "step", "ms", "needed", "p of the rest", "dx", "dw", "dw, other words"]
    write_table("filtered.csv", names, rows)


def _derived(measured: dict[str, Any]) -> None:
    """Ratios that the prose quotes."""
    table = {row["name"]: row for row in measured["widths"]["table"]}
    trained = {r["name"]: r for h in measured["filter"]["heads"] if h["head"] == "trained" for r in h["table"]}
    default, floor = table["vocab_tiled default"], table["floor: three products, pieces of 4096"]
    four = table["floor: four products, tiles of the default width"]
    sweep = {(r["model"], r["tokens"], r["name"]): r for r in measured["sweep"]}
    words_to_tokens = {
        (model, n): {key: sweep[model, n, "vocab_tiled"][key] / sweep[model, n, "fused"][key] for key in MEASURED}
        for model, n, _ in sweep
    }
    long = [ratio["median_ms"] for (_, n), ratio in words_to_tokens.items() if n >= 16_384]
    short = words_to_tokens["llama-3-8b", 256]
    sums = measured["tokens"] * measured["hidden"] * 8 * -(-measured["vocab"] // measured["widths"]["default_width"])
    write_json(
        "derived/tiles.json",
        {
            "over_four_products": default["median_ms"] / four["median_ms"],
            "four_over_floor": four["median_ms"] / floor["median_ms"],
            "over_fused": default["median_ms"] / table["fused default"]["median_ms"],
            "dx_traffic_bytes": sums,
            "ms_per_tile": (table["vocab_tiled, T = 1024"]["median_ms"] - table["vocab_tiled, T = 2048"]["median_ms"])
            / 74,
            "times_when_long": {"least": min(long), "most": max(long)},
            "llama_256": {"time": short["median_ms"], "peak": short["peak_bytes"]},
            "filter_saves": 1 - trained["filter_eps = 2^-12"]["median_ms"] / trained["exact"]["median_ms"],
        },
    )


def which_cut() -> None:
    """Step peak of both cuts against N, for the Gravity head in bytes and for three heads as a ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.8))
    lengths = [2**k for k in range(8, 20)]
    v, d = MODEL.vocab_size, MODEL.hidden_size
    peaks = [_peaks(n, v, d) for n in lengths]
    gradients = [2 * (v + n) * d / GIB for n in lengths]
    left.fill_between(lengths, gradients, color=GRAY, alpha=0.25, linewidth=0, label="the two gradients")
    for i, (name, style) in enumerate((("tokens", "-"), ("words", "--"))):
        left.plot(lengths, [pair[i] / GIB for pair in peaks], style, label=name)
    rows = {row["name"]: row["peak_bytes"] for row in read_json("h200/vocab_tiled.json")["widths"]["table"]}
    measured = [rows["fused default"] / GIB, rows["vocab_tiled default"] / GIB]
    left.plot([N, N], measured, "D", color="black", markerfacecolor="none", label="measured on an H200")
    said = []
    for (model_id, label), style in zip(HEADS.items(), ("-", "--", "-.")):
        v, d = models.get(model_id).vocab_size, models.get(model_id).hidden_size
        ratios = [words / tokens for tokens, words in (_peaks(n, v, d) for n in lengths)]
        right.plot(lengths, ratios, style, label=f"{label}, {v:,} × {d:,}")
        said.append(f"{label} {ratios[0]:.2f} at 256 tokens and {ratios[-1]:.2f} at 512K")
    right.axhline(1, color=GRAY, linestyle=":")
    left.set(ylabel="step peak, GiB (Gravity head)", ylim=(0.3, None), yscale="log")
    left.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    left.yaxis.set_minor_formatter(NullFormatter())
    right.set(ylabel="step peak, words ÷ tokens", ylim=(0, None))
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks([2**k for k in (8, 12, 16, 19)], ["256", "4K", "64K", "512K"])
        ax.set_xlabel("tokens")
        ax.legend(fontsize=7)
    alt = (
        "Left, step peak of the Gravity head against the number of tokens, both axes logarithmic: the cut of the words "
        "starts at a third of the cut of the tokens, little above the two gradients, and passes it at some 100,000 "
        f"tokens; measured at 8192 tokens {measured[1]:.2f} and {measured[0]:.2f} GiB. Right, the ratio for three "
        f"heads, three curves close together: {'; '.join(said)}. They pass 1 at two thirds of the vocabulary."
    )
    save("which-cut", figure, alt)


def cut_times() -> None:
    """How long both cuts take, measured over lengths and heads, as a ratio to the fused default."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.6), sharex=True)
    low = "fused, bf16 dw, chunk 1024"
    measured = read_json("h200/vocab_tiled.json")["sweep"]
    said = []
    for (model_id, label), style in zip(HEADS.items(), ("-", "--", "-.")):
        rows = {(r["tokens"], r["name"]): r for r in measured if r["model"] == model_id}
        lengths = sorted({n for n, _ in rows})
        for color, name in (("C1", "vocab_tiled"), ("C2", low)):
            for ax, key in zip(axes, MEASURED):
                ratios = [rows[n, name][key] / rows[n, "fused"][key] for n in lengths]
                what = "words" if name == "vocab_tiled" else "tokens, bf16 dw in chunks of 1024"
                ax.plot(lengths, ratios, style, marker=".", color=color, label=f"{label}: {what}")
                if ax is axes[0] and name == "vocab_tiled":
                    said.append(f"{label} {', '.join(f'{r:.2f}' for r in ratios)}")
    axes[0].axhline(4 / 3, color=GRAY, linestyle=":")
    axes[0].set(ylabel="time ÷ that of the fused default", ylim=(0, None))
    axes[1].set(ylabel="step peak ÷ that of the fused default", ylim=(0, 1.25))
    for ax in axes:
        ax.axhline(1, color=GRAY, linewidth=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [str(n) if n < 1024 else f"{n // 1024}K" for n in lengths])
        ax.set_xlabel("tokens")
    axes[1].legend(fontsize=6)
    alt = (
        "Measured on an H200 for 256, 1K, 4K, 16K and 64K tokens, relative to the fused default. Left, times of the "
        f"cut of the words: {'; '.join(said)}; a dotted line marks 4/3. Tokens with a bfloat16 sum lie about 1. Right, "
        "step peaks: the cut of the words begins at about a third and rises with the number of tokens."
    )
    save("cut-times", figure, alt)


def _peaks(n: int, v: int, d: int) -> tuple[int, int]:
    inputs = head_inputs(n, v, d, torch.bfloat16)
    tokens, words = (explain(*inputs, schedule=s).step_peak_bytes for s in ("fused", "vocab_tiled"))
    assert tokens is not None and words is not None
    return tokens, words
