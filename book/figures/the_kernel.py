"""Chapter 7: the row kernel version by version, and where it stands beside the products, under the GPU's roof."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from make_figures import read_json, save, write_json

# NVIDIA's figures for the H200 SXM: bfloat16 without sparsity, and memory bandwidth.
PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12
MEASURED = "h200/kernel_versions.json"
LABELS = {
    "row_loop": "one thread a row",
    "coalesced": "one block a row",
    "wide": "16 bytes a load",
    "online": "online softmax",
    "on_chip": "row kept on chip",
    "flce_ref triton": "library, Triton",
    "flce_ref cuda": "library, CUDA C++",
    "F.cross_entropy": "F.cross_entropy and backward",
}
# How often PyTorch carries the chunk, if a row takes more than 48 KiB (aten/src/ATen/native/cuda/SoftMax.cu):
# log-softmax reads it for the maximum, the sum and the result, and writes that; nll_loss's backward fills a gradient
# with zeros; log-softmax's backward reads it for its sum, again beside the result, and writes; a copy reads and writes.
PASSES_OF_PYTORCH = (3 + 3 + 1, 1 + 1 + 1 + 1)
SECTOR = 32  # bytes that come with any load


def sizes() -> list[dict[str, Any]]:
    return read_json(MEASURED)["sizes"]  # type: ignore[no-any-return]


def rows_of(size: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in size["table"]}


def kernel_versions() -> None:
    """Measured times of each version against what its traffic would take at the speed of a copy."""
    size = sizes()[0]
    rows = rows_of(size)
    copy_ms = rows["copy"]["median_ms"]
    derived: dict[str, Any] = {
        "copy_gb_per_s": 2 * size["chunk_bytes"] / copy_ms / 1e6,
        "copy_tb_per_s": 2 * size["chunk_bytes"] / copy_ms / 1e9,
        "versions": [],
    }
    for name in (name for name in LABELS if name in rows):
        passes = rows[name]["reads_writes"] or {"F.cross_entropy": PASSES_OF_PYTORCH}.get(name)
        reads, writes = passes or ((2, 1) if name == "flce_ref triton" else (1, 1))
        predicted = (reads + writes) / 2 * copy_ms
        ms = rows[name]["median_ms"]
        derived["versions"].append(
            {
                "name": name,
                "reads": reads,
                "writes": writes,
                "predicted_ms": predicted,
                "ms": ms,
                "times_copy": ms / copy_ms,
            }
        )
    loop = rows["row_loop"]["median_ms"]
    step_ns = loop * 1e6 / (3 * size["vocab"])
    sector_us = SECTOR / 2 * step_ns / 1e3
    under_way = SECTOR * size["rows"]
    derived |= {
        "row_loop_ns_per_logit": step_ns,
        "sector_us": sector_us,
        "row_loop_bytes_under_way": under_way,
        "row_loop_gb_per_s": under_way / sector_us / 1e3,
        "bytes_to_fill_the_bus": derived["copy_gb_per_s"] * 1e3 * sector_us,
    }
    write_json("derived/kernels.json", derived)

    figure, ax = plt.subplots(figsize=(7.0, 3.6))
    versions = derived["versions"][::-1]
    places = range(len(versions))
    ax.barh(places, [v["ms"] for v in versions], height=0.55, color="C0", label="measured")
    ax.plot([v["predicted_ms"] for v in versions], places, "D", color="C1", label="its bytes at the speed of a copy")
    ax.axvline(copy_ms, color="#7f7f7f", linestyle=":", label="one read, one write")
    for place, v in zip(places, versions):
        ax.text(v["ms"] * 1.08, place, f"{v['ms']:.2f}", va="center")
    ax.set_xscale("log")
    ax.set_xlim(0.15, 110)
    ax.set_yticks(places, [LABELS[v["name"]] for v in versions])
    ax.set_xlabel(f"ms for a chunk of {size['rows']:,} × {size['vocab']:,} bfloat16 logits (log scale)")
    ax.legend(loc="lower right")
    said = "; ".join(f"{LABELS[v['name']]} {v['ms']:.2f} ms" for v in derived["versions"])
    mark = f"A copy takes {copy_ms:.2f} ms; diamonds mark the time of each version's bytes."
    save("kernel-versions", figure, f"Bars of measured times: {said}. {mark}")


def roofline() -> None:
    """The parts of a fused step as (operations per byte, operations per second), under the H200's two roofs."""
    document = read_json("h200/products.json")
    v, d, ms = document["vocab"], document["hidden"], {row["rows"]: row for row in document["table"]}
    points = []
    for c in (256, 2048):
        flops = 2 * c * v * d
        moved = {
            "logits": 2 * (c * d + v * d + c * v),
            "dx": 2 * (c * v + v * d + c * d),
            "dw, added in fp32": 2 * (c * v + c * d) + 8 * v * d,
        }
        points += [(f"{name}, C = {c}", flops / b, flops / ms[c][name] * 1e3) for name, b in moved.items()]
    # Per logit: a comparison and a rescaled exponential for the statistics; a subtraction, an exponential, a product.
    chunk = rows_of(sizes()[0])["flce_ref cuda"]["median_ms"]
    logits = sizes()[0]["rows"] * sizes()[0]["vocab"]
    points.append(("row kernel, C = 2048", 5 * logits / (4 * logits), 5 * logits / chunk * 1e3))
    ridge = PEAK_FLOPS / PEAK_BYTES
    write_json(
        "derived/roofline.json",
        {
            "ridge": ridge,
            "row_kernel_share": ms[2048]["row kernel"]
            / sum(ms[2048][p] for p in ("logits", "dx", "dw, added in fp32")),
            "points": [{"name": n, "flop_per_byte": i, "flop_per_s": f, "tflop_per_s": f / 1e12} for n, i, f in points],
        },
    )
    figure, ax = plt.subplots(figsize=(7.0, 4.2))
    xs = [0.5, ridge, 5000]
    ax.plot(xs, [min(PEAK_FLOPS, PEAK_BYTES * x) / 1e12 for x in xs], color="#7f7f7f", label="H200, by its data sheet")
    styles = {"logits": ("o", "C0"), "dx": ("s", "C1"), "dw, added in fp32": ("^", "C2"), "row kernel": ("*", "C3")}
    for name, intensity, rate in points:
        part, c = name.split(", C = ")
        marker, color = styles[part]
        face = color if c == "2048" else "none"
        ax.plot(
            intensity,
            rate / 1e12,
            marker,
            color=color,
            markerfacecolor=face,
            markersize=9,
            linestyle="none",
            label=name,
        )
    ax.set(xscale="log", yscale="log", xlabel="operations per byte moved", ylabel="10¹² operations per second")
    ax.legend(loc="lower right", fontsize=8)
    said = "; ".join(f"{n}: {i:.0f} operations a byte, {f / 1e12:.0f} TFLOP/s" for n, i, f in points)
    save("roofline", figure, f"A roofline of the H200 with the parts of a fused step under it. {said}.")
