"""Chapter 8: memory against time for every chunk and every peer, what a chunk's parts cost, other lengths and heads."""

from __future__ import annotations

import csv
from math import ceil
from typing import Any

import matplotlib.pyplot as plt
from make_figures import DATA, read_json, save, write_json
from matplotlib.ticker import NullFormatter

GIB = 2**30
FLOOR = "floor: three products, pieces of 4096"
MULTIPROCESSORS = 132
LENGTHS = (8192, 32768, 131072, 1048576)
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
            ax.annotate(str(c), (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
    shown = {name: label for name, label in PEERS.items() if name in rows}
    for (name, label), marker in zip(shown.items(), "Xdv^<>Ph*"):
        x, y = rows[name]["peak_bytes"] / GIB, rows[name]["over_floor"]
        ax.plot(x, y, marker, color="#7f7f7f", markersize=8, linestyle="none", label=label)
    ax.axhline(1, color="#7f7f7f", linestyle=":")
    ax.set(xscale="log", xlabel="step peak, GiB (log scale)", ylabel="time ÷ three bare products")
    ax.set_xticks([0.6, 1, 2, 4, 7], ["0.6", "1", "2", "4", "7"])
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


def efficiency(rows: int, columns: int, tile: tuple[int, int]) -> float:
    """Share of the multiprocessors' time that tiles of a (rows, columns) product use: full waves over waves begun."""
    tiles = ceil(rows / tile[0]) * ceil(columns / tile[1])
    return tiles / (ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS) * rows / (ceil(rows / tile[0]) * tile[0])


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
    best = min(per_row["dx"])
    rule = [best / efficiency(c, d, (128, 256)) for c in sizes]
    right.plot(sizes, rule, ":", color="#7f7f7f", label="tiles of 128 × 256 in waves of 132")
    right.plot(sizes, per_row["dx"], "s-", markersize=3, color="C1", label="dx, measured")
    right.set(xlabel="rows of a chunk", ylabel="µs per row", ylim=(0.7, 1.8))
    right.legend(fontsize=8)
    first, last = by_size[0], by_size[-1]
    said = "; ".join(f"{part}: {first[part]:.2f} to {last[part]:.2f}" for part in parts)
    alt = (
        f"Left, µs per row from {sizes[0]} to {sizes[-1]} rows a chunk, {said}. Right, dx alone beside the time that "
        "full waves of tiles would give: it jumps where a wave begins, but less than the rule says."
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
        left.plot(xs, [r["over_floor"] for _, r in found], marker + "-", label=label)
        right.plot(xs, [r["peak_bytes"] / GIB for _, r in found], marker + "-", label=label)
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
    floor = table()[FLOOR]["median_ms"]
    bytes_per_ms = read_json("derived/kernels.json")["copy_gb_per_s"] * 1e6
    parts = {row["rows"]: row for row in document["table"]}

    def all_rows(part: str, c: int) -> float:
        """Milliseconds of ``part`` for all tokens in chunks of c rows."""
        return parts[c][part] * n / c  # type: ignore[no-any-return]

    fp32 = all_rows("dw, added in fp32", 2048) - all_rows("dw, added in bf16", 2048)
    shares = {
        "pieces_over_floor": table()["products in pieces of 2048"]["over_floor"] - 1,
        "row_copy_over_floor": 4 * n * v / bytes_per_ms / floor,
        "row_kernel_over_floor": all_rows("row kernel", 2048) / floor,
        "fp32_over_floor": fp32 / floor,
        "scale_over_floor": 6 * v * d / bytes_per_ms / floor,
    }
    write_json(
        "derived/chunk.json",
        shares
        | {
            "floor_tflop_per_s": 6 * n * v * d / floor / 1e9,
            "sum_over_floor": sum(shares.values()) - shares["row_copy_over_floor"],
            "fp32_extra_2048": fp32 * 1e3 / n,
            "million_dx": 2**20 * d * 2,
        },
    )


def tables() -> None:
    """The chapter's tables and shares: other heads, what was tried and not adopted, where the default's time goes."""
    budget()
    write_table("heads.csv", ["head", "step", "ms", "÷ floor", "step peak, GiB", "error of dw"], _head_rows())
    ideas = [
        (name.removeprefix("idea: "), f"{r['median_ms']:.2f}", f"{r['over_floor']:.3f}")
        for name, r in table("ideas").items()
        if name.startswith(("idea: ", "flce_ref"))
    ]
    write_table("ideas.csv", ["step", "ms", "÷ floor"], sorted(ideas, key=lambda row: float(row[1])))


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
