"""The row kernels on this GPU: are they right, and how fast is each layout, against the time of copying the chunk.

    python benchmarks/kernel_check.py --out kernel.json

First a smoke test against float64 (the tests proper are ``pytest -m gpu``), then the time of one launch on C rows of V
bfloat16 logits. Two floors: copying the chunk to another buffer, and doubling it in place; both read and write every
byte once. ``--sanitize`` runs a few small launches of everything and times nothing, for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref import kernels  # noqa: E402
from flce_ref.benchmark import provenance  # noqa: E402
from flce_ref.kernels import cuda, cuda_tiles  # noqa: E402
from flce_ref.kernels.cuda import Layout  # noqa: E402
from tests.kernel_cases import EVERYTHING, check_case, make_case  # noqa: E402
from tests.tile_cases import check_tiles, run_tiles  # noqa: E402

Launch = Callable[[Tensor], object]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What costs time for every logit, alone and together.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "smoothing": {"label_smoothing": 0.1},
    "weighted smoothing": {"label_smoothing": 0.1, "weighted": True},
    "everything": {name: value for name, value in EVERYTHING.items() if name != "upstream"},
}


def variants(itemsize: int, vocab_size: int) -> Iterator[Layout]:
    """Every layout that this GPU can launch for rows of ``vocab_size``."""
    gpu: Any = torch.cuda.get_device_properties(0)
    hopper = (gpu.major, gpu.minor) >= (9, 0)
    for cluster in (1, 2, 4, 8) if hopper else (1,):
        for threads in (256, 512, 1024):
            for hold_row, bulk_copy in ((False, False), (True, False), (True, True))[: 3 if hopper else 2]:
                wide = Layout(cluster, threads, 1, hold_row, bulk_copy)
                need = wide.held_bytes(vocab_size, itemsize) + 12 * cluster * threads // 32 + 2048
                if need > gpu.shared_memory_per_block_optin:
                    continue
                resident = min(gpu.shared_memory_per_multiprocessor // need, 2048 // threads)
                for min_blocks in sorted({1, max(1, min(resident, 1536 // threads))}):
                    yield Layout(cluster, threads, min_blocks, hold_row, bulk_copy)


def launches(
    target: Tensor, vocab_size: int, itemsize: int, options: dict[str, Any], every_layout: bool
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of each kernel and layout; whether it can run shows when it does."""
    case = make_case(1, vocab_size, torch.bfloat16, device="cuda", **options)
    arguments = target, case.objective
    for name in kernels.KERNELS:
        if name != "cuda":
            module = importlib.import_module(f"flce_ref.kernels.{name}")
            yield name, lambda logits, m=module: m.cross_entropy_(logits, *arguments)
    yield "cuda (chosen)", lambda logits: cuda.cross_entropy_(logits, *arguments)
    yield "cuda (loss only)", lambda logits: cuda.cross_entropy_(logits, *arguments, write_grad=False)
    for layout in variants(itemsize, vocab_size) if every_layout else ():
        name = f"cuda cluster={layout.cluster} threads={layout.threads} min_blocks={layout.min_blocks}"
        name += " hold" * layout.hold_row + " bulk" * layout.bulk_copy
        yield name, lambda logits, x=layout: cuda.cross_entropy_(logits, *arguments, layout=x)


def time_all(
    rows: int, vocab_size: int, dtype: torch.dtype, rounds: int, options: dict[str, Any], every_layout: bool
) -> list[dict]:
    """Median milliseconds of each launch, in turns, on fresh logits each time."""
    fresh = (torch.randn(rows, vocab_size, device="cuda") * 3).to(dtype)
    logits = fresh.clone()
    target = torch.randint(0, vocab_size, (rows,), device="cuda")
    steps: dict[str, Launch] = {"floor: copy": lambda z: z.copy_(fresh), "floor: in place": lambda z: z.mul_(2)}
    steps |= dict(launches(target, vocab_size, dtype.itemsize, options, every_layout))
    errors: dict[str, str] = {}
    events: dict[str, list] = {name: [] for name in steps}
    for turn in range(-2, rounds):
        for name, launch in steps.items():
            if name in errors:
                continue
            logits.copy_(fresh)  # also keeps the GPU busy while the launch is prepared
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            try:
                begin.record()
                launch(logits)
                end.record()
                if turn == -2:
                    torch.cuda.synchronize()
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
                traceback.print_exc(limit=3)
            if turn >= 0:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    gigabytes = 2 * rows * vocab_size * dtype.itemsize / 1e9
    rows_out = []
    for name in steps:
        times = sorted(b.elapsed_time(e) for b, e in events[name]) if name not in errors else []
        median = times[len(times) // 2] if times else None
        rows_out.append(
            {
                "name": name,
                "median_ms": median,
                "min_ms": times[0] if times else None,
                "gb_per_s": gigabytes / median * 1e3 if median else None,
                "error": errors.get(name),
            }
        )
    return rows_out


def smoke() -> list[dict]:
    """Each kernel and several layouts against float64; a wrong or failing one is reported and the rest go on."""
    shapes = ((3, 1003), (9, 151552))
    runs: list[tuple[str, Any, dict[str, Any]]] = []
    for name in kernels.KERNELS:
        module = importlib.import_module(f"flce_ref.kernels.{name}")
        runs.append((name, module.cross_entropy_, {}))
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    for cluster, hold, bulk in (
        (1, False, False), (1, True, False), (1, True, True), (2, True, False), (4, True, True), (8, True, False)
    ):  # fmt: skip
        if hopper or not (cluster > 1 or bulk):
            layout = Layout(cluster, 256, 1, hold, bulk)
            runs.append((str(layout), cuda.cross_entropy_, {"layout": layout}))
    results = []
    for name in ("cuda_tiles", "triton_tiles"):
        runs.append((name, partial(check_tiles, importlib.import_module(f"flce_ref.kernels.{name}")), {"width": 1000}))
    for name, kernel, extra in runs:
        failures = []
        for rows, vocab_size in shapes:
            layout = extra.get("layout")
            if layout and layout.held_bytes(vocab_size, 4) > 200_000:
                continue
            for dtype in (torch.bfloat16, torch.float32):
                for options in ({}, EVERYTHING):
                    case = make_case(rows, vocab_size, dtype, device="cuda", **options)
                    for row_stride, offset in ((vocab_size, 0), (vocab_size + 3, 1)):
                        try:
                            if "width" in extra:
                                kernel(case, extra["width"], row_stride, offset)
                            else:
                                check_case(kernel, case, row_stride, offset, **extra)
                        except Exception as error:
                            failures.append(f"{rows} × {vocab_size} {dtype} stride {row_stride}: {error}")
        print(f"{'FAILED' if failures else 'right ':7} {name}", *failures[:3], sep="\n        ", flush=True)
        results.append({"kernel": name, "failures": failures[:20], "failed": len(failures)})
    return results


def sanitize() -> int:
    """A few small launches of every kernel and layout, without PyTorch's own kernels around them where possible."""
    for rows, vocab_size in ((1, 1), (3, 7), (4, 1003), (2, 32003)):
        for dtype in DTYPES.values():
            for options in ({}, EVERYTHING):
                case = make_case(rows, vocab_size, dtype, device="cuda", **options)
                arguments = case.objective, case.grad_loss, case.grad_lse
                for layout in (None, Layout(1, 128, 1), Layout(1, 128, 1, True), Layout(2, 128, 1, True),
                               Layout(2, 128, 1, True, True), Layout(8, 256, 1, True)):  # fmt: skip
                    target = case.target.clone()
                    for bad in (None, -1, vocab_size, 2**40):
                        target[0] = target[0] if bad is None else bad
                        cuda.cross_entropy_(case.logits.clone(), target, *arguments, layout=layout)
                for width in {1, 7, min(vocab_size, 5000)} if vocab_size < 10 else {600, 5000}:
                    run_tiles(cuda_tiles, case, width)
    torch.cuda.synchronize()
    print("every launch came back")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151552)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--layouts", nargs="*", choices=OBJECTIVES, default=["plain"], help="objectives to time in every layout"
    )
    parser.add_argument("--sanitize", action="store_true", help="small launches only, for compute-sanitizer")
    parser.add_argument("--no-smoke", action="store_true", help="timing only")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernel_check.py needs a CUDA device", file=sys.stderr)
        return 1
    if args.sanitize:
        return sanitize()
    for name, state in kernels.available().items():
        print(f"{name}: {state}")
    about = {
        "what": "The row kernels: each checked, then the time of one launch in every layout, against copying the chunk",
        "command": " ".join(["python", "benchmarks/kernel_check.py", *sys.argv[1:]]),
    }
    document: dict[str, Any] = {"provenance": provenance() | about, "available": kernels.available()}
    document["smoke"] = [] if args.no_smoke else smoke()
    for label, options in OBJECTIVES.items():
        print(f"\n{args.rows} rows of {args.vocab} logits, {args.dtype}, {label}")
        every_layout = label in args.layouts
        table = time_all(args.rows, args.vocab, DTYPES[args.dtype], args.rounds, options, every_layout)
        floor = table[0]["median_ms"]
        for row in sorted(table, key=lambda r: r["median_ms"] or 1e9):
            print(f"  {row['median_ms']:8.4f} ms {row['median_ms'] / floor:6.3f} × copy {row['gb_per_s']:7.0f} GB/s  "
                  f"{row['name']}" if row["median_ms"] else f"  failed: {row['name']}: {row['error']}")  # fmt: skip
        document[label] = {"rows": args.rows, "vocab": args.vocab, "dtype": args.dtype, "table": table}
        if args.out:
            args.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return int(any(r["failed"] for r in document["smoke"]))


if __name__ == "__main__":
    sys.exit(main())
