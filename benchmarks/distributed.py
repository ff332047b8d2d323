"""One head on 1, 2, 4 and 8 GPUs: words or tokens shared out; time, step peak and what is sent, per rank.

    python benchmarks/distributed.py --out book/data/h200/distributed.json

starts ``torchrun`` once for each number of ranks and gathers what they measured. The tokens are ``--tokens`` in all:
with the words shared out every rank has all of them, with the tokens shared out 1/R, and the gradient of the weight is
then summed over the ranks as DDP does it. A step is forward and backward. Its time is that of the slowest rank, in
milliseconds, between CUDA events; a fixed number of steps is timed after a fixed number that is not, since ranks must
make the same number. Its peak is above the inputs, the largest of the ranks. ``sent`` counts a rank's collectives and
their bytes. ``loss``, ``dx`` and ``dw`` are differences from one GPU with the whole weight (‖got − one‖ / ‖one‖).
``all_reduce`` times the collective alone; ``bus_gb_per_s`` is 2 (R − 1) / R · bytes / time, in 10⁹.

``--device cpu`` with small sizes tries the script itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref import linear_cross_entropy  # noqa: E402
from flce_ref.benchmark import provenance  # noqa: E402
from flce_ref.distributed import (  # noqa: E402
    count_collectives,
    token_parallel_linear_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)

WARMUPS, TIMED = 5, 20
Step = Callable[[], tuple[Tensor, ...]]


def words_of(rank: int, ranks: int, vocab: int) -> slice:
    """A rank's words: pieces of ⌈V / R⌉, as DTensor cuts them."""
    piece = -(-vocab // ranks)
    return slice(min(rank * piece, vocab), min((rank + 1) * piece, vocab))


def steps(a: argparse.Namespace, x: Tensor, w: Tensor, y: Tensor) -> dict[str, tuple[Step, dict[str, Any]]]:
    """name → (step, what is said about it). A step gives loss, dx and dw of what this rank has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    words = w[words_of(rank, ranks, a.vocab)].clone().requires_grad_()
    rows = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
    own_x, own_y, whole = x[rows].clone().requires_grad_(), y[rows], w.clone().requires_grad_()
    x = x.clone().requires_grad_()

    def by_words(**options: Any) -> Step:
        def step() -> tuple[Tensor, ...]:
            loss = vocab_parallel_linear_cross_entropy(x, words, y, **options)
            return loss.detach(), *torch.autograd.grad(loss, (x, words))

        return step

    def by_tokens(reduce_dw: bool) -> Step:
        def step() -> tuple[Tensor, ...]:
            loss = token_parallel_linear_cross_entropy(own_x, whole, own_y, gradients="summed")
            dx, dw = torch.autograd.grad(loss, (own_x, whole))
            if reduce_dw:
                dist.all_reduce(dw)
            return loss.detach(), dx, dw

        return step

    found: dict[str, tuple[Step, dict[str, Any]]] = {}
    for chunk in a.chunks:
        for trust in (False, True):
            name = f"words, chunk {chunk}, {'trusted' if trust else 'agreed'}"
            about = {"shared_out": "words", "chunk_size": chunk, "agreement": not trust}
            if trust and a.vocab % ranks:
                continue  # trusted shards of a plain weight are of one size
            found[name] = by_words(chunk_size=chunk, trust_ranks=trust), about
    for reduce_dw in (False, True):
        name = "tokens" + (", dw summed" if reduce_dw else "")
        found[name] = by_tokens(reduce_dw), {"shared_out": "tokens", "dw_summed": reduce_dw}
    return found


def timed(step: Callable[[], object], device: str) -> list[float]:
    """Milliseconds of ``TIMED`` steps in a row, of this rank."""
    for _ in range(WARMUPS):
        step()
    dist.barrier()
    times = []
    for _ in range(TIMED):
        if device == "cpu":
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def peak_of(step: Callable[[], object], device: str) -> int | None:
    """Bytes above those alive before the step, of this rank."""
    if device == "cpu":
        return None
    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def over_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def difference(got: Tensor, one: Tensor) -> float:
    norm = one.float().norm().item()
    return (got.float() - one.float()).norm().item() / norm if norm else 0.0


def measured(a: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """A row for each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    g = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, a.dtype)
    x = torch.randn(a.tokens, a.hidden, generator=g, device=device).to(dtype)
    w = (torch.randn(a.vocab, a.hidden, generator=g, device=device) * 0.02).to(dtype)
    y = torch.randint(0, a.vocab, (a.tokens,), generator=g, device=device)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = linear_cross_entropy(*leaves, y)
    one = loss.detach(), *torch.autograd.grad(loss, leaves)
    words = words_of(rank, ranks, a.vocab)
    rows = slice(rank * a.tokens // ranks, (rank + 1) * a.tokens // ranks)
    table = []
    for name, (step, about) in steps(a, x, w, y).items():
        with count_collectives() as sent:
            got = step()
        by_words = about["shared_out"] == "words"
        compared = (one[0], one[1], one[2][words]) if by_words else (one[0], one[1][rows], one[2])
        errors = [difference(g, o) for g, o in zip(got, compared)]
        if not by_words and not about["dw_summed"]:
            errors[2] = float("nan")  # a share of the gradient
        kinds = Counter(f"{c.name} {list(c.shape)} {c.dtype}".replace("torch.", "") for c in sent)
        peaks = over_ranks(peak_of(step, device))
        times = [max(turn) for turn in zip(*over_ranks(timed(step, device)))]
        worst = [max(values) for values in zip(*over_ranks(errors))]
        table.append({
            "ranks": ranks, "name": name, **about,
            "median_ms": statistics.median(times), "times_ms": times,
            "peak_bytes": None if peaks[0] is None else max(peaks),
            "sent": {"collectives": len(sent), "bytes": sum(c.bytes for c in sent), "kinds": dict(kinds)},
            "loss_difference": worst[0], "dx_difference": worst[1],
            "dw_difference": None if worst[2] != worst[2] else worst[2],
        })  # fmt: skip
        if rank == 0:
            print(f"{ranks} ranks  {name:36s} {table[-1]['median_ms']:9.3f} ms", file=sys.stderr, flush=True)
        del got
    return table


def all_reduces(a: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """The collective alone, for what a chunk's statistics, its dx, all of dx and all of dw take."""
    ranks, dtype = dist.get_world_size(), getattr(torch, a.dtype)
    chunk = a.chunks[0]
    table = []
    for what, shape, kind in (
        ("statistics of a chunk", (3, chunk), torch.float32),
        ("dx of a chunk", (chunk, a.hidden), dtype),
        ("dx", (a.tokens, a.hidden), dtype),
        ("dw", (a.vocab, a.hidden), dtype),
    ):
        tensor = torch.zeros(shape, dtype=kind, device=device)
        times = [max(turn) for turn in zip(*over_ranks(timed(lambda t=tensor: dist.all_reduce(t), device)))]
        ms, size = statistics.median(times), tensor.nbytes
        speed = 2 * (ranks - 1) / ranks * size / ms / 1e6
        table.append({"ranks": ranks, "what": what, "bytes": size, "median_ms": ms, "bus_gb_per_s": speed})
    return table


def work(a: argparse.Namespace) -> None:
    """What one rank does."""
    device = a.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if a.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    found = {"steps": measured(a, device), "all_reduce": all_reduces(a, device)}
    if dist.get_rank() == 0:
        a.out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default: 1, 2, 4, 8 as there are GPUs")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151552)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 8192])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        work(a)
        return
    ranks = a.ranks or [n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()]
    if not ranks:
        parser.error("there is no GPU; to try the script, --device cpu --ranks 1 2 --tokens 64 --vocab 100 --hidden 16")
    document: dict[str, Any] = {
        "provenance": {
            **provenance(),
            "what": "One head on several GPUs, its words or its tokens shared out: times, step peaks, what is sent",
            "command": " ".join(["python", "benchmarks/distributed.py", *sys.argv[1:]]),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if a.device == "cuda" else None,
            "environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
        },
        **{name: getattr(a, name) for name in ("tokens", "vocab", "hidden", "dtype")},
        "warmups": WARMUPS, "timed": TIMED, "steps": [], "all_reduce": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for n in ranks:
            out = Path(folder) / f"{n}.json"
            options = [s for name in ("tokens", "vocab", "hidden", "dtype", "device")
                       for s in (f"--{name}", str(getattr(a, name)))]  # fmt: skip
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), __file__,
                 "--worker", "--out", str(out), *options, "--chunks", *map(str, a.chunks)],
                check=True,
            )  # fmt: skip
            part = json.loads(out.read_text(encoding="utf-8"))
            for name in ("steps", "all_reduce"):
                document[name] += part[name]
            a.out.write_text(
                json.dumps(document, indent=1) + "\n", encoding="utf-8"
            )  # what there is, if the rest fails


if __name__ == "__main__":
    main()
