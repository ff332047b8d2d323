"""Forward + backward of one language-model head on this GPU: the library at every chunk size, the peers, the floor.

    python benchmarks/head.py --out head.json

All in one process and in turns (``flce_ref.benchmark.measure``). The floor is the three matrix products alone, in
pieces of 4096 rows. A step's peak is above input, weight and target. Peers that are not installed are listed as such;
a step that fails is listed with its error, and the rest go on. ``loss``, ``dx`` and ``dw`` are errors against float32
arithmetic on the same inputs: of the loss absolute, of the gradients relative (‖got − true‖ / ‖true‖).

Default sizes: N = 8192 tokens, V = 151552, D = 2048, bfloat16. ``--tokens``, ``--vocab`` and ``--hidden`` change them,
``--only`` and ``--skip`` take regular expressions of names, ``--ideas`` adds ``ideas.py``.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref import kernels, linear_cross_entropy  # noqa: E402
from flce_ref.benchmark import measure, provenance  # noqa: E402

# (input, weight, target) → (loss, dx, dw)
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
FLOOR = "floor: three products, pieces of 4096"


def with_grad(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    def step(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = loss_of(x, w, y)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    return step


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


def plain(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), y)


def plain_in_float32(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


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


def peer_steps(errors: dict[str, str]) -> dict[str, Step]:
    """Plain PyTorch, and the libraries that are installed; why others are not goes into ``errors``."""
    steps: dict[str, Step] = {"naive": with_grad(plain)}
    steps["torch.compile of naive"] = with_grad(torch.compile(plain, dynamic=False))
    steps["torch.compile of naive, float32 logits"] = with_grad(torch.compile(plain_in_float32, dynamic=False))
    for add in (_torch_native, _liger, _cut_cross_entropy, _quack):
        try:
            steps |= add()
        except Exception as error:
            errors[add.__name__.strip("_")] = f"{type(error).__name__}: {error}".splitlines()[0]
    return steps


def _torch_native() -> dict[str, Step]:
    native = getattr(F, "linear_cross_entropy", None)
    if native is None:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return {"torch native, chunked": with_grad(partial(native, options=options))}


def _liger() -> dict[str, Step]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    default, wide = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return {
        "liger-kernel": with_grad(lambda x, w, y: default(w, x, y)),
        "liger-kernel, fp32 dw": with_grad(lambda x, w, y: wide(w, x, y)),
    }


def _cut_cross_entropy() -> dict[str, Step]:
    from cut_cross_entropy import linear_cross_entropy as cut

    return {"cut-cross-entropy": with_grad(lambda x, w, y: cut(x, w, y))}


def _quack() -> dict[str, Step]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

    return {
        f"quack-kernels, chunk {chunk}": with_grad(partial(quack, chunk_size=chunk)) for chunk in (1024, 2048, 4096)
    }


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, size in (("tokens", 8192), ("vocab", 151552), ("hidden", 2048), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--only", type=re.compile, help="regular expression of the steps to run, beside the floor")
    parser.add_argument("--skip", type=re.compile, help="... of the steps not to run")
    parser.add_argument("--ideas", action="store_true", help="also what ideas.py tries")
    parser.add_argument("--no-truth", action="store_true", help="time and memory only")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
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

    unavailable: dict[str, str] = {}
    steps = {FLOOR: partial(products, rows=4096)}
    steps |= {f"products in pieces of {r}": partial(products, rows=r) for r in (1024, 2048, 8192)}
    steps |= library_steps(args.tokens) | peer_steps(unavailable)
    if args.ideas:
        try:
            from ideas import ideas

            steps |= ideas()
        except Exception:
            traceback.print_exc(limit=3)
    steps |= half_ignored(steps, y)
    steps = {name: step for name, step in steps.items() if name == FLOOR or wanted(name, args.only, args.skip)}

    results = measure({name: partial(step, *inputs) for name, step in steps.items()}, rounds=args.rounds)
    errors: dict[str, dict[str, float]] = {}
    if not args.no_truth:
        free()
        true = true_values(*inputs)
        for name, step in steps.items():
            if results[name].error is None and not name.startswith("half ignored"):
                try:
                    errors[name] = errors_of(step, inputs, true)
                except Exception:
                    traceback.print_exc(limit=3)
                free()
    table = []
    floor = results[FLOOR].median_ms
    for name, result in results.items():
        row = {"name": name, **result.as_dict(), **errors.get(name, {})}
        row["over_floor"] = result.median_ms / floor if floor and result.median_ms else None
        table.append(row)
    sizes = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden, "dtype": args.dtype}
    about = {
        "what": "Forward and backward of one head in turns with its peers: median times, step peaks, errors",
        "command": " ".join(["python", "benchmarks/head.py", *sys.argv[1:]]),
        "peers": versions(),
    }
    document: dict[str, Any] = {"provenance": provenance() | about, **sizes, "unavailable": unavailable}
    document |= {"rounds": args.rounds, "seconds": time.perf_counter() - began, "table": table}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    show(document)
    return 0


def wanted(name: str, only: re.Pattern[str] | None, skip: re.Pattern[str] | None) -> bool:
    return (only is None or bool(only.search(name))) and not (skip and skip.search(name))


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for package in ("liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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
