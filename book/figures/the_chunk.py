"""Chapter 8: memory against time for every chunk and every peer, what a chunk's parts cost, other lengths and heads."""

from __future__ import annotations

import csv
from math import ceil, inf
from typing import Any

import matplotlib.pyplot as plt
from make_figures import DATA, read_json, save, write_json
from matplotlib.ticker import NullFormatter

GIB = 2**30
FLOOR = "floor: three products, pieces of 4096"
MULTIPROCESSORS = 132
LENGTHS = (8192, 32768, 131072, 1048576)
TREAD = range(3328, 4224 + 1, 128)  # chunks for whose dx two waves of tiles are needed, and enough
HEADS = {"head": "Gravity-16B-A3B", "head_gpt-oss": "GPT-OSS", "head_gemma-3": "Gemma 3", "head_llama-3": "Llama 3"}
# Name in the data → name in the figure and in tables.
PEERS = {
    "naive": "naive",
    "torch.compile of naive": "torch.compile of naive",
    "torch.compile of naive, float32 logits": "torch.compile of naive, float32 logits",
    "chunked in 8": "chunked in 8",
    "checkpointed in 8": "checkpointed in 8",
    "liger-kernel": "Liger",
    "cut-cross-entropy": "Cut Cross-Entropy",
    "quack-kernels, chunk 4096": "QuACK, chunk 4096",
    "quack-kernels, chunk 1024": "QuACK, chunk 1024",
}


def table(name: str = "head") -> dict[str, dict[str, Any]]:
    """Rows of one measurement by the step's name; those that failed left out."""
    return {row["name"]: row for row in read_json(f"h200/{name}.json")["table"] if row["median_ms"]}


def chunks(rows: dict[str, dict[str, Any]], accum: str) -> list[tuple[int, dict[str, Any]]]:
    """(C, row) of the library's chunk sizes with dw summed in ``accum``, "fp32" or "bf16"."""
    prefix = f"flce_ref {accum} dw, chunk "
    return sorted((int(name.removeprefix(prefix)), row) for name, row in rows.items() if name.startswith(prefix))


def memory_and_time() -> None:
    """Every chunk size and every peer, as (step peak, time over the floor)."""
    rows = table()
    figure, ax = plt.subplots(figsize=(7.0, 4.8))
    for accum, style in (("fp32", "o-"), ("bf16", "s-")):
        found = chunks(rows, accum)
        xs, ys = [r["peak_bytes"] / GIB for _, r in found], [r["over_floor"] for _, r in found]
        ax.plot(xs, ys, style, label=f"flce_ref, dw summed in {accum}")
        for (c, _), x, y in zip(found, xs, ys):
            beside = (4, 5) if accum == "fp32" else (-10, -13)
            ax.annotate(str(c), (x, y), textcoords="offset points", xytext=beside, fontsize=8)
    shown = {name: label for name, label in PEERS.items() if name in rows}
    for (name, label), marker in zip(shown.items(), "Xdv^<>Ph*"):
        x, y = rows[name]["peak_bytes"] / GIB, rows[name]["over_floor"]
        ax.plot(x, y, marker, color="#7f7f7f", markersize=8, linestyle="none", label=label)
    ax.axhline(1, color="#7f7f7f", linestyle=":")
    ax.set(xscale="log", xlabel="step peak, GiB (log scale)", ylabel="time ÷ three bare products")
    ax.set_xticks([0.6, 1, 2, 4, 7], ["0.6", "1", "2", "4", "7"])
    ax.set_ylim(bottom=0.93)  # room for the numbers below the curve
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.legend(fontsize=8)
    said = "; ".join(
        f"{label}: {rows[name]['peak_bytes'] / GIB:.2f} GiB, {rows[name]['over_floor']:.2f}"
        for name, label in shown.items()
    )
    ours = "; ".join(
        f"{accum} in chunks of {c}: {r['peak_bytes'] / GIB:.2f} GiB, {r['over_floor']:.2f}"
        for accum in ("fp32", "bf16")
        for c, r in chunks(rows, accum)
    )
    alt = f"Step peak against time over the floor. The library, {ours}. Peers: {said}."
    save("memory-and-time", figure, alt)


def waves(rows: int, columns: int, cuts: int = 1, tile: tuple[int, int] = (128, 256)) -> float:
    """Waves of tiles in a (rows, columns) product on all multiprocessors, each tile's sum cut into ``cuts`` parts."""
    tiles = ceil(rows / tile[0]) * ceil(columns / tile[1])
    return ceil(cuts * tiles / MULTIPROCESSORS) / cuts


def parts_of_a_chunk() -> None:
    """What each part of a chunk costs per row, by the rows of a chunk; and dx by the wave rule."""
    document = read_json("h200/products.json")
    rows, d = document["table"], document["hidden"]
    sizes = [row["rows"] for row in rows]
    parts = ("logits", "dx", "dw, added in fp32", "dw, added in bf16", "row kernel")
    per_row = {part: [row[part] * 1e3 / row["rows"] for row in rows] for part in parts}
    total = {
        accum: [
            sum(row[p] for p in ("logits", "dx", f"dw, added in {accum}", "row kernel")) / row["rows"] for row in rows
        ]
        for accum in ("fp32", "bf16")
    }
    by_size = [
        {"rows": c} | {part: per_row[part][i] for part in parts} | {a: total[a][i] * 1e3 for a in total}
        for i, c in enumerate(sizes)
    ]
    write_json("derived/parts.json", {"rows": by_size})

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.6))
    for part, marker in zip(parts, "osv^*"):
        left.plot(sizes, per_row[part], marker + "-", markersize=3, label=part)
    left.set(xlabel="rows of a chunk", ylabel="µs per row", ylim=(0, 4))
    left.legend(fontsize=8)
    one_wave = next(row["dx"] for row in rows if row["rows"] == 2048)
    for cuts, style in ((1, ":"), (2, "-")):
        rule = [one_wave * waves(c, d, cuts) for c in sizes]
        label = "whole tiles" if cuts == 1 else "tiles cut in two"
        right.step(sizes, rule, style, where="pre", color="#7f7f7f", linewidth=1, label=label)
    right.plot(sizes, [row["dx"] for row in rows], "s", markersize=3, color="C1", label="dx, measured")
    right.set(xlabel="rows of a chunk", ylabel="ms for the chunk", ylim=(0, 4))
    right.legend(fontsize=8)
    first, last = by_size[0], by_size[-1]
    said = "; ".join(f"{part}: {first[part]:.2f} to {last[part]:.2f}" for part in parts)
    alt = (
        f"Left, µs per row from {sizes[0]} to {sizes[-1]} rows a chunk, {said}. Right, ms of dx for the whole chunk, "
        "beside the staircases that waves of whole tiles and of tiles cut in two would give: the measured times are a "
        "staircase as well, with treads up to 2048, from 2688 to 3072 and from 3328 to 4224 rows."
    )
    save("parts-of-a-chunk", figure, alt)


def lengths() -> None:
    """Time over the floor against the number of tokens."""
    names = {
        "flce_ref default": "default",
        "flce_ref fp32 dw, chunk 4096": "fp32, chunk 4096",
        "flce_ref bf16 dw, chunk 1024": "bf16, chunk 1024",
        "liger-kernel": "Liger",
        "cut-cross-entropy": "Cut Cross-Entropy",
        "torch.compile of naive, float32 logits": "torch.compile of naive, float32 logits",
        "naive": "naive",
    }
    tables = {n: table("head" if n == 8192 else f"head_{n}") for n in LENGTHS}
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 4.0))
    for (name, label), marker in zip(names.items(), "os^vdP*"):
        found = [(n, rows[name]) for n, rows in tables.items() if name in rows]
        xs = [n for n, _ in found]
        style: dict[str, Any] = {"label": label} | ({"color": "#7f7f7f"} if name == "naive" else {})
        left.plot(xs, [r["over_floor"] for _, r in found], marker + "-", **style)
        right.plot(xs, [r["peak_bytes"] / GIB for _, r in found], marker + "-", **style)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(LENGTHS, ["8K", "32K", "128K", "1M"])
        ax.set_xlabel("tokens")
    left.set_ylabel("time ÷ three bare products")
    right.set_yscale("log")
    right.set_ylabel("step peak, GiB")
    left.legend(fontsize=7)
    said = "; ".join(
        f"{label} at {n:,} tokens {rows[name]['over_floor']:.2f} and {rows[name]['peak_bytes'] / GIB:.2f} GiB"
        for name, label in names.items()
        for n, rows in tables.items()
        if name in rows
    )
    save("lengths", figure, f"Time over the floor and step peak against the number of tokens: {said}.")


def budget() -> None:
    """What the chapter derives from the parts: each one's share of the floor of the Gravity head at 8192 tokens."""
    head, document = read_json("h200/head.json"), read_json("h200/products.json")
    n, v, d = head["tokens"], head["vocab"], head["hidden"]
    steps, parts = table(), {row["rows"]: row for row in document["table"]}
    floor = steps[FLOOR]["median_ms"]
    bytes_per_ms = read_json("derived/kernels.json")["copy_gb_per_s"] * 1e6

    def share(c: int, part: str) -> float:
        """Of the floor, ``part`` for all tokens in chunks of c rows."""
        return parts[c][part] * n / c / floor  # type: ignore[no-any-return]

    shares = {}
    for name, c, accum in (("flce_ref default", 2048, "fp32"), ("flce_ref bf16 dw, chunk 1024", 1024, "bf16")):
        added = {
            "pieces": steps[f"products in pieces of {c}"]["over_floor"] - 1,
            "row_kernel": share(c, "row kernel"),
            "accumulation": share(c, f"dw, added in {accum}") - share(c, "dw, added in bf16"),
            "scaling": (6 if accum == "fp32" else 4) * v * d / bytes_per_ms / floor,
        }
        shares[name] = added | {"sum": sum(added.values()), "measured": steps[name]["over_floor"] - 1}
    product_us = parts[4096]["dw, added in bf16"] / 4096 * 1e3
    floor_flops_per_ms = 6 * n * v * d / floor
    write_json(
        "derived/chunk.json",
        {
            "shares": shares,
            "row_copy_over_floor": 4 * n * v / bytes_per_ms / floor,
            "floor_tflop_per_s": floor_flops_per_ms / 1e9,
            "equal_at": 4 * floor_flops_per_ms / bytes_per_ms,
            "extra_us": {str(c): parts[c]["dw, added in fp32"] / c * 1e3 - product_us for c in (256, 2048)},
            "wave_ms": parts[2048]["dx"],
            "half_waves": parts[3072]["dx"] / parts[2048]["dx"],
            "tread": max(parts[c]["dx"] for c in TREAD) / min(parts[c]["dx"] for c in TREAD) - 1,
            "bf16_gain": {str(c): _gain(steps, c) for c in (512, 1024, 2048, 4096)},
            "dx_error_ratio": steps["cut-cross-entropy"]["dx_error"] / steps["naive"]["dx_error"],
            "quack_dw_error_ratio": steps["quack-kernels, chunk 4096"]["dw_error"] / steps["naive"]["dw_error"],
            "million_dx": 2**20 * d * 2,
            "million_logits": 2**20 * v * 2,
        },
    )


def _gain(steps: dict[str, dict[str, Any]], c: int) -> float:
    """Share of the time that chunks of c rows save against chunks of half as many, dw summed in bfloat16."""
    half, whole = (steps[f"flce_ref bf16 dw, chunk {rows}"]["median_ms"] for rows in (c // 2, c))
    return 1 - whole / half  # type: ignore[no-any-return]


def aims() -> list[tuple[str, ...]]:
    """What the library was meant to reach at 8192 tokens of the Gravity head, and what it does."""
    steps = table()

    def reached(name: str) -> tuple[str, str]:
        return f"{steps[name]['over_floor']:.2f}", f"{steps[name]['peak_bytes'] / GIB:.2f}"

    skipped, full = (steps[n]["median_ms"] for n in ("half ignored: flce_ref skip_ignored", "flce_ref default"))
    return [
        ("default, in 1.80 GiB", "1.10 × floor", *reached("flce_ref default")),
        ("the fastest chunk, dw in float32", "1.05 × floor", *reached("flce_ref fp32 dw, chunk 8192")),
        ("dw in bfloat16, in 0.90 GiB", "1.12 × floor", *reached("flce_ref bf16 dw, chunk 1024")),
        ("dw in bfloat16, in 0.70 GiB", "1.30 × floor", *reached("flce_ref bf16 dw, chunk 256")),
        ("half of the targets skipped", "0.52 × default", f"{skipped / full:.2f}", reached("flce_ref default")[1]),
    ]


def tables() -> None:
    """The chapter's tables and shares: other heads, what was tried and not adopted, where the default's time goes."""
    budget()
    write_table("aims.csv", ["what", "aim", "reached", "step peak, GiB"], aims())
    write_table("heads.csv", ["head", "step", "ms", "÷ floor", "step peak, GiB", "error of dw"], _head_rows())
    write_table("ideas.csv", ["idea", "dw, chunk", "÷ floor", "against the library"], ideas())


def ideas() -> list[tuple[str, ...]]:
    """What was tried, beside the library's step with the same chunk, the best first; those without one at the end."""
    rows = table("ideas")
    same = "none: the default, by its other name"
    tried = {f"{same}, fp32 dw, chunk 2048": rows["flce_ref default"]}
    tried |= {name.removeprefix("idea: "): row for name, row in rows.items() if name.startswith("idea: ")}
    found = []
    for name, row in tried.items():
        idea, accum, chunk = name.rsplit(", ", 2)
        library = rows.get(f"flce_ref {accum}, {chunk}")
        change = row["median_ms"] / library["median_ms"] - 1 if library else inf
        shown = f"{change:+.1%}".replace("-", "−") if library else "–"
        setting = f"{accum.split()[0]}, {chunk.split()[1]}"
        found.append((change, (idea, setting, f"{row['over_floor']:.2f}", shown)))
    return [cells for _, cells in sorted(found)]


def _head_rows() -> list[tuple[str, ...]]:
    found = []
    for file, head in HEADS.items():
        steps = {"flce_ref default": "default", "flce_ref bf16 dw, chunk 1024": "bf16, chunk 1024", **PEERS}
        rows = table(file)
        for name, label in steps.items():
            if name in rows and " in 8" not in name:
                r = rows[name]
                error = f"{r['dw_error']:.1e}" if r.get("dw_error") else ""
                found.append(
                    (
                        head,
                        label,
                        f"{r['median_ms']:.1f}",
                        f"{r['over_floor']:.2f}",
                        f"{r['peak_bytes'] / GIB:.2f}",
                        error,
                    )
                )
    return found


def write_table(name: str, header: list[str], rows: list[tuple[str, ...]]) -> None:
    (DATA / "derived").mkdir(exist_ok=True)
    with open(DATA / "derived" / name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
