"""The same small model trained with the naive and with the fused loss on this GPU: curves, time, memory, and a cap.

    python benchmarks/train.py --out book/data/h200/train.json

A decoder with a vocabulary of 151,552 words learns chains of words that code makes. Runs from the same seed, under
bfloat16 autocast: naive; naive with the tokens of every batch in another order inside the head, three times, which
changes nothing but the order of sums, and so shows how far right runs drift apart; fused; and naive and fused again
under a cap on this process's memory that only the fused one fits.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_training import Loss, chains, decoder, next_words, train
from torch import Tensor

from flce_ref import linear_cross_entropy
from flce_ref.benchmark import provenance

GIB = 2**30


def naive(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).flatten(0, -2).float(), y.flatten())


def reordered(how: int, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Naive, the tokens turned round by ``how`` places: the same sums, added up in another order."""
    return naive(x.flatten(0, -2).roll(how, 0), w, y.flatten().roll(how))


LOSSES: dict[str, Loss] = {
    "naive": naive,
    **{f"naive, reordered {k}": partial(reordered, 4099 * k) for k in (1, 2, 3)},
    "fused": linear_cross_entropy,  # type: ignore[dict-item]
}


def run(args: argparse.Namespace, loss_of: Loss, steps: int) -> dict[str, Any]:
    """One training run: losses, median time of a step, peak of a step above what lives through it."""
    gc.collect()
    torch.cuda.empty_cache()
    words = chains(steps * args.batch, args.length + 1, args.vocab).split(args.batch)
    batches = [next_words(w.cuda()) for w in words]
    model = decoder(args.vocab, args.hidden, args.layers, args.heads).cuda()
    parameters = sum(p.numel() for p in model.parameters())
    times: list[float] = []

    def on_step(_: int) -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    torch.cuda.reset_peak_memory_stats()
    autocast = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    losses, norms = train(model, batches, loss_of, learning_rate=1e-3, autocast=autocast, on_step=on_step)
    spans = sorted(b - a for a, b in pairwise(times[2:]))
    return {
        "parameters": parameters,
        "losses": [round(loss, 6) for loss in losses],
        "gradient_norms": [round(norm, 6) for norm in norms],
        "step_ms": 1e3 * spans[len(spans) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def under_cap(args: argparse.Namespace, cap: int) -> dict[str, Any]:
    """A few steps of naive and of fused with this process's memory capped to ``cap`` bytes."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total)
    found: dict[str, Any] = {"cap_bytes": cap}
    try:
        for name in ("naive", "fused"):
            try:
                found[name] = {"last_loss": run(args, LOSSES[name], 5)["losses"][-1]}
            except torch.OutOfMemoryError as error:
                found[name] = {"error": str(error).split(". GPU")[0]}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"steps": 100, "batch": 8, "length": 2048, "vocab": 151_552, "hidden": 768, "layers": 12, "heads": 12}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("train.py needs a CUDA device", file=sys.stderr)
        return 1
    run(args, naive, 4)  # warm-up
    runs = {name: run(args, loss_of, args.steps) for name, loss_of in LOSSES.items()}
    for name, result in runs.items():
        print(f"{name:24s} {result['losses'][0]:.4f} → {result['losses'][-1]:.4f}", end=" ")
        print(f"{result['step_ms']:.1f} ms a step, peak {result['peak_bytes'] / GIB:.2f} GiB")
    cap = (runs["naive"]["peak_bytes"] + runs["fused"]["peak_bytes"]) // 2
    capped = under_cap(args, cap)
    print(capped)
    about = {"what": "A small decoder trained with the naive and with the fused loss"}
    about["command"] = " ".join(["python", "benchmarks/train.py", *sys.argv[1:]])
    document = {"provenance": provenance() | about, **{k: getattr(args, k) for k in sizes}, "runs": runs, "cap": capped}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
