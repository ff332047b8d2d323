"""What one chunk of C rows costs, part by part, for every C: the three products and the row kernel.

    python benchmarks/products.py --out products.json

A product is computed in tiles, 128 × 256 say, and a multiprocessor takes one tile at a time: where the number of tiles
is a little above a multiple of the multiprocessors, most of them wait for the last tiles. dx (C, D) has few tiles, and
adding to dw (V, D) costs the same traffic however few rows are added. So the time per row depends on C.

The parts of a chunk run one after the other as in the fused schedule, sizes in turns, ``--rounds`` times; medians are
reported, in microseconds per row and as a share of what the chunk size with the least of it takes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref import kernels  # noqa: E402
from flce_ref.benchmark import provenance  # noqa: E402
from flce_ref.kernels.ops import accumulate_product_, cross_entropy_  # noqa: E402
from flce_ref.objective import Objective  # noqa: E402

PARTS = ("logits", "row kernel", "dx", "dw, added in fp32", "dw, added in bf16")


def parts_of(rows: int, x: Tensor, w: Tensor, y: Tensor, sums: tuple[Tensor, Tensor]) -> list[Callable[[], object]]:
    """The parts of a chunk of ``rows`` rows, in the order of ``PARTS``; they work on one buffer, as a chunk does."""
    (wide, narrow), v = sums, w.shape[0]
    x, y, buffer, dx = x[:rows], y[:rows], x.new_empty(rows, v), x.new_empty(rows, x.shape[1])
    kernel = kernels.resolve("auto", x.device, x.dtype)
    return [
        partial(torch.mm, x, w.T, out=buffer),
        partial(cross_entropy_, buffer, y, Objective(v), kernel),
        partial(torch.mm, buffer, w, out=dx),
        partial(accumulate_product_, wide, buffer.T, x, False),
        partial(accumulate_product_, narrow, buffer.T, x, False),
    ]


@torch.no_grad()
def sweep(sizes: list[int], x: Tensor, w: Tensor, y: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Median milliseconds of each part for each chunk size."""
    sums = torch.zeros(w.shape, dtype=torch.float32, device=w.device), torch.zeros_like(w)
    events: dict[int, list[list[torch.cuda.Event]]] = {size: [] for size in sizes}
    for turn in range(rounds + 2):  # the first two warm up
        for size in sizes if turn % 2 else reversed(sizes):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(PARTS) + 1)]
            parts = parts_of(size, x, w, y, sums)
            torch.cuda._sleep(1_000_000)  # so that the launches are queued when the first begins
            marks[0].record()
            for part, mark in zip(parts, marks[1:], strict=True):
                part()
                mark.record()
            if turn >= 2:
                events[size].append(marks)
    torch.cuda.synchronize()
    rows = []
    for size in sizes:
        times = zip(*([a.elapsed_time(b) for a, b in pairwise(m)] for m in events[size]), strict=True)
        rows.append({"rows": size} | dict(zip(PARTS, map(statistics.median, times), strict=True)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, size in (("vocab", 151552), ("hidden", 2048), ("first", 256), ("last", 4224), ("step", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("products.py needs a CUDA device", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    sizes = list(range(args.first, args.last + 1, args.step))
    x = torch.randn(args.last, args.hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(args.vocab, args.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    table = sweep(sizes, x, w, torch.randint(0, args.vocab, (args.last,), device="cuda"), args.rounds)
    least = {part: min(row[part] / row["rows"] for row in table) for part in PARTS}
    print(f"{'C':>6}", *(f"{part:>24}" for part in PARTS), sep="  ")
    for row in table:
        cells = (f"{row[p] / row['rows'] * 1e3:9.3f} µs/row {row[p] / row['rows'] / least[p]:6.3f}×" for p in PARTS)
        print(f"{row['rows']:6}", *(f"{cell:>24}" for cell in cells), sep="  ")
    about = {
        "what": "Milliseconds of the parts of a chunk of C rows: products, row kernel",
        "command": " ".join(["python", "benchmarks/products.py", *(shlex.quote(word) for word in sys.argv[1:])]),
    }
    sizes_of = {"vocab": args.vocab, "hidden": args.hidden, "dtype": "bf16", "rounds": args.rounds}
    if args.out:
        document = {"provenance": provenance() | about, **sizes_of, "parts": PARTS, "table": table}
        args.out.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
