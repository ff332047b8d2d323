"""Forward + backward of one language-model head on this GPU: the library at every chunk size, the peers, the floor.

    python benchmarks/head.py --out head.json

All in one process and in turns (``flce_ref.benchmark.measure``). The floor is the three matrix products alone, in
pieces of 4096 rows. A step's peak is above input, weight and target. Peers that are not installed are listed as such;
a step that fails is listed with its error, and the rest go on; where a failure left the GPU unusable for this process,
a new one goes on without that step. ``loss``, ``dx`` and ``dw`` are errors against float32
arithmetic on the same inputs: of the loss absolute, of the gradients relative (‖got − true‖ / ‖true‖).

Default sizes: N = 8192 tokens, V = 151552, D = 2048, bfloat16. ``--tokens``, ``--vocab`` and ``--hidden`` change them,
``--only`` and ``--skip`` take regular expressions of names, ``--ideas`` adds ``ideas.py``. ``all_heads.py`` runs this
for long sequences and for other models' heads.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shlex
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from peers import Step, peer_steps, versions, with_grad  # noqa: E402

from flce_ref import kernels, linear_cross_entropy  # noqa: E402
from flce_ref.benchmark import measure, provenance  # noqa: E402

FLOOR = "floor: three products, pieces of 4096"


def products(x: Tensor, w: Tensor, y: Tensor, rows: int) -> tuple[Tensor, ...]:
    """The three products of every piece and nothing else: logits, dx, dw (bfloat16, summed by addmm)."""
    with torch.no_grad():
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        buffer = x.new_empty(min(rows, len(x)), len(w))
        for start in range(0, len(x), rows):
            piece = x[start : start + rows]
            logits = buffer[: len(piece)]
            torch.mm(piece, w.T, out=logits)
            torch.mm(logits, w, out=dx[start : start + rows])
            torch.addmm(dw, logits.T, piece, beta=int(start > 0), out=dw)
    return ()


def library_steps(n: int) -> dict[str, Step]:
    """The library's schedules; fused at every chunk size, with dw summed in float32 and in bfloat16."""
    steps: dict[str, Step] = {"flce_ref default": with_grad(linear_cross_entropy)}
    for accum, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for chunk in (256, 512, 1024, 2048, 4096, 8192):
            if chunk <= n and not (name == "fp32" and chunk < 1024):
                options = {"chunk_size": chunk, "accum_dtype": accum}
                steps[f"flce_ref {name} dw, chunk {chunk}"] = with_grad(partial(linear_cross_entropy, **options))
    for kernel in ("triton", "eager"):
        steps[f"flce_ref default, {kernel} kernel"] = with_grad(partial(linear_cross_entropy, kernel=kernel))
    for schedule in ("chunked", "checkpointed"):
        options = {"schedule": schedule, "chunk_size": -(-n // 8)}
        steps[f"{schedule} in 8"] = with_grad(partial(linear_cross_entropy, **options))
    return steps


def true_values(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float32 throughout (no TF32), chunk by chunk."""
    doubles = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    loss = linear_cross_entropy(*doubles, y, chunk_size=1024)
    return loss.detach(), *torch.autograd.grad(loss, doubles)


def errors_of(step: Step, inputs: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> dict[str, float]:
    results = step(*inputs)
    if not results:
        return {}
    loss, *gradients = results
    found = {"loss_error": abs(loss.double() - true[0].double()).item()}
    for name, got, truth in zip(("dx_error", "dw_error"), gradients, true[1:]):
        norm = difference = 0.0
        for g, t in zip(got.split(8192), truth.split(8192)):  # the whole in float64 would not fit beside the rest
            norm += t.double().square().sum().item()
            difference += (g.double() - t.double()).square().sum().item()
        found[name] = (difference / norm) ** 0.5
    return found


def half_ignored(steps: dict[str, Step], y: Tensor) -> dict[str, Step]:
    """A few steps on targets of which every second is ignored."""
    sparse = y.clone()
    sparse[::2] = -100
    skip = partial(linear_cross_entropy, skip_ignored=True)
    low = partial(skip, accum_dtype=torch.bfloat16, chunk_size=1024)
    chosen = {name: steps[name] for name in ("naive", "liger-kernel", "cut-cross-entropy") if name in steps}
    chosen |= {"flce_ref default": steps.get("flce_ref default", with_grad(linear_cross_entropy))}
    chosen |= {"flce_ref skip_ignored": with_grad(skip), "flce_ref skip_ignored, bf16 dw, chunk 1024": with_grad(low)}
    return {f"half ignored: {name}": lambda x, w, _, s=step: s(x, w, sparse) for name, step in chosen.items()}


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    args = arguments()
    if not torch.cuda.is_available():
        print("head.py needs a CUDA device", file=sys.stderr)
        return 1
    began = time.perf_counter()
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    x = torch.randn(args.tokens, args.hidden, device="cuda", dtype=dtype).requires_grad_()
    w = (torch.randn(args.vocab, args.hidden, device="cuda", dtype=dtype) * 0.02).requires_grad_()
    y = torch.randint(0, args.vocab, (args.tokens,), device="cuda")
    inputs = x, w, y
    print(*(f"kernel {name}: {state}" for name, state in kernels.available().items()), sep="\n", flush=True)

    unavailable = dict(failure.split("=", 1) for failure in args.failed)
    steps = {name: step for name, step in all_steps(args, y, unavailable).items() if name not in unavailable}
    results = measure(
        {name: partial(step, *inputs) for name, step in steps.items()}, rounds=args.rounds, warmups=args.warmups
    )
    culprit = next((name for name, result in results.items() if "CUDA" in (result.error or "")), None)
    if culprit and not gpu_answers():
        print(f"again without {culprit}: {results[culprit].error}", file=sys.stderr, flush=True)
        again = [sys.executable, *sys.argv, "--failed", f"{culprit}={results[culprit].error}"]
        os.execv(sys.executable, again)
    errors = {} if args.no_truth else all_errors(steps, {name for name in steps if results[name].error is None}, inputs)
    table = []
    floor = results[FLOOR].median_ms
    for name, result in results.items():
        row = {"name": name, **result.as_dict(), **errors.get(name, {})}
        row["over_floor"] = result.median_ms / floor if floor and result.median_ms else None
        table.append(row)
    sizes = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden, "dtype": args.dtype}
    about = {
        "what": "Forward and backward of one head in turns with its peers: median times, step peaks, errors",
        "command": " ".join(["python", "benchmarks/head.py", *(shlex.quote(word) for word in sys.argv[1:])]),
        "peers": versions(),
    }
    document: dict[str, Any] = {"provenance": provenance() | about, **sizes, "unavailable": unavailable}
    document |= {"rounds": args.rounds, "seconds": time.perf_counter() - began, "table": table}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    show(document)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, size in (("tokens", 8192), ("vocab", 151552), ("hidden", 2048), ("rounds", 5), ("warmups", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--only", type=re.compile, help="regular expression of the steps to run, beside the floor")
    parser.add_argument("--skip", type=re.compile, help="... of the steps not to run")
    parser.add_argument("--ideas", action="store_true", help="also what ideas.py tries")
    parser.add_argument("--no-truth", action="store_true", help="time and memory only")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument(
        "--failed", action="append", default=[], metavar="STEP=ERROR", help="a step not to run again, and why"
    )
    return parser.parse_args()


def all_steps(args: argparse.Namespace, y: Tensor, unavailable: dict[str, str]) -> dict[str, Step]:
    """Everything that was asked for, the floor first; peers that are missing go into ``unavailable``."""
    steps = {FLOOR: partial(products, rows=4096)}
    steps |= {f"products in pieces of {r}": partial(products, rows=r) for r in (1024, 2048, 8192)}
    steps |= library_steps(args.tokens) | peer_steps(unavailable)
    if args.ideas:
        from ideas import ideas

        steps |= ideas()
    steps |= half_ignored(steps, y)
    return {name: step for name, step in steps.items() if name == FLOOR or wanted(name, args.only, args.skip)}


def gpu_answers() -> bool:
    """False after an illegal access or the like: then nothing more can be done in this process."""
    try:
        return bool(torch.ones(1, device="cuda").item())
    except Exception:
        return False


def all_errors(steps: dict[str, Step], names: set[str], inputs: tuple[Tensor, ...]) -> dict[str, dict[str, float]]:
    """Errors of the steps called ``names`` on all targets, by name."""
    free()
    true = true_values(*inputs)
    errors = {}
    for name in steps:
        if name in names and not name.startswith("half ignored"):
            try:
                errors[name] = errors_of(steps[name], inputs, true)
            except Exception:
                traceback.print_exc(limit=3)
            free()
    return errors


def wanted(name: str, only: re.Pattern[str] | None, skip: re.Pattern[str] | None) -> bool:
    return (only is None or bool(only.search(name))) and not (skip and skip.search(name))


def show(document: dict[str, Any]) -> None:
    print("\nN = {tokens}, V = {vocab}, D = {hidden}, {dtype}; {seconds:.0f} s".format(**document))
    print(f"{'ms':>9} {'÷ floor':>8} {'peak GiB':>9} {'loss':>9} {'dx':>9} {'dw':>9}  step")
    for row in sorted(document["table"], key=lambda r: r["median_ms"] or 1e9):
        if row["error"]:
            print(f"   failed: {row['name']}: {row['error']}")
            continue
        errors = (f"{row[key]:9.2e}" if key in row else " " * 9 for key in ("loss_error", "dx_error", "dw_error"))
        peak = row["peak_bytes"] / 2**30
        print(f"{row['median_ms']:9.3f} {row['over_floor']:8.3f} {peak:9.3f}", *errors, f" {row['name']}")
    for name, reason in document["unavailable"].items():
        print(f"   not measured: {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
