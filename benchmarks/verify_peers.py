"""Peers put through the conformance suite: what each of them scores, and what it fails.

    python benchmarks/verify_peers.py --device cuda --out book/data/h200/verify_peers.json
    python benchmarks/verify_peers.py --only torch-native --out book/data/torch_native_verify.json

Each peer is wrapped in a few lines that give it the suite's calling shape: they rename arguments, flatten tokens, and
refuse what the peer has no word for; they compute nothing. Every peer runs in a process of its own, since a kernel that
reads out of bounds takes the whole CUDA context along. What fails is a finding, not an error of this script: the exit
status is 0. A peer that is not installed, or whose process dies, is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import versions  # noqa: E402

from flce_ref import linear_cross_entropy, verify  # noqa: E402
from flce_ref.benchmark import provenance  # noqa: E402

#: Enough for the slowest, which compiles or tunes a kernel for every new shape.
TIMEOUT_SECONDS = 420
#: What a peer may be asked; its wrapper names those it takes, and the rest are refused by name.
Implementation = Callable[..., Tensor]


def torch_native(configuration: dict[str, Any] | None, input: Tensor, linear_weight: Tensor, target: Tensor,
                 chunk_size: int | None = None, **options: Any) -> Tensor:  # fmt: skip
    """PyTorch's own function (2.13 and later); configuration None is ``options=None``, which holds all logits."""
    if configuration is None:
        if chunk_size is not None:
            raise TypeError("options=None has no chunk_size")
        return F.linear_cross_entropy(input, linear_weight, target, **options)
    chunking = {} if chunk_size is None else {"batch_chunk_size": chunk_size, "chunking_method": None}
    chosen = torch.nn.LinearCrossEntropyOptions(**configuration, **chunking)
    return F.linear_cross_entropy(input, linear_weight, target, options=chosen, **options)


@cache
def compiled_plain() -> Implementation:
    from flce_ref.conformance.reference import plain_linear_cross_entropy

    return torch.compile(plain_linear_cross_entropy)


def torch_compile(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return compiled_plain()(input, linear_weight, target, **options)


def liger(accum_dtype: torch.dtype | None, input: Tensor, linear_weight: Tensor, target: Tensor, *,
          linear_bias: Tensor | None = None, weight: Tensor | None = None, reduction: str = "mean",
          ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
          softcap: float | None = None) -> Tensor:  # fmt: skip
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ce_weight=weight, ignore_index=ignore_index, lse_square_scale=z_loss, label_smoothing=label_smoothing,
        reduction=reduction, softcap=softcap, accum_dtype=accum_dtype,
    )  # fmt: skip
    value = loss(linear_weight, input.reshape(-1, input.shape[-1]), target.reshape(-1), linear_bias)
    return value.reshape(target.shape) if reduction == "none" else value


def cut(filter_eps: str | None, input: Tensor, linear_weight: Tensor, target: Tensor, *, reduction: str = "mean",
        ignore_index: int = -100, softcap: float | None = None) -> Tensor:  # fmt: skip
    from cut_cross_entropy import linear_cross_entropy as peer

    return peer(input, linear_weight, target, ignore_index, softcap, reduction, filter_eps=filter_eps)


def quack(input: Tensor, linear_weight: Tensor, target: Tensor, *, reduction: str = "mean", ignore_index: int = -100,
          chunk_size: int = 4096) -> Tensor:  # fmt: skip
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as peer

    if reduction == "none":
        raise TypeError("chunked_linear_cross_entropy has no reduction 'none'")
    x = input.reshape(-1, input.shape[-1])
    return peer(x, linear_weight, target.reshape(-1), chunk_size, ignore_index, reduction, tuned=False)


#: Name → implementation; the part before the comma is what ``--only`` takes.
PEERS: dict[str, Implementation] = {
    "torch-native, options=None": partial(torch_native, None),
    "torch-native, LinearCrossEntropyOptions()": partial(torch_native, {}),
    "torch-native, LinearCrossEntropyOptions(allow_retain_graph=True)": partial(
        torch_native, {"allow_retain_graph": True}
    ),
    'torch-native, LinearCrossEntropyOptions(acc_policy="accurate")': partial(torch_native, {"acc_policy": "accurate"}),
    "torch.compile, of the plain loss": torch_compile,
    "liger-kernel, default": partial(liger, None),
    "liger-kernel, accum_dtype=torch.float32": partial(liger, torch.float32),
    "cut-cross-entropy, default": partial(cut, "high"),
    "cut-cross-entropy, filter_eps=None": partial(cut, None),
    "quack-kernels, default": quack,
    "flce-ref, default": linear_cross_entropy,
}


def missing(name: str) -> str | None:
    """Why a peer can't be run here at all, or None."""
    package = name.split(",")[0]
    if package == "torch-native":
        has = hasattr(F, "linear_cross_entropy")
        return None if has else f"F.linear_cross_entropy came with PyTorch 2.13, this is {torch.__version__}"
    if package in ("liger-kernel", "cut-cross-entropy", "quack-kernels") and package not in versions():
        return "not installed"
    return None


def run_one(name: str, device: str, out: Path) -> None:
    """In a process of its own: the report of one peer, as JSON."""
    report = verify(PEERS[name], device)
    print(name, report.summary, *(f"  failed: {row.id}: {row.reason}" for row in report.failed), sep="\n")
    out.write_text(json.dumps({"checks": report.to_dict()["checks"], "summary": report.summary}), encoding="utf-8")


def supervised(name: str, device: str) -> dict[str, Any]:
    """What a peer scored, or why there is no score."""
    configuration = {"peer": name.split(", ")[0], "configuration": name.split(", ", 1)[1]}
    if reason := missing(name):
        return configuration | {"unavailable": reason}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        command = [sys.executable, __file__, "--device", device, "--out", str(out), "--one", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return configuration | {"unavailable": f"did not finish in {TIMEOUT_SECONDS} s"}
        print(done.stdout, end="", flush=True)
        if done.returncode or not out.exists():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return configuration | {"unavailable": f"its process ended with status {done.returncode}; it said: {said}"}
        return configuration | json.loads(out.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda (default %(default)s)")
    parser.add_argument("--only", action="append", help="a peer (the part of its name before the comma); repeatable")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--jobs", type=int, default=6, help="peers at a time (default %(default)s)")
    parser.add_argument("--one", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.device, args.out)
        return 0
    chosen = [name for name in PEERS if not args.only or name.split(",")[0] in args.only]
    if not chosen:
        parser.error(f"argument --only: no peer is called {', '.join(args.only)}")
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(partial(supervised, device=args.device), chosen))
    for run in runs:
        if "unavailable" in run:
            print(f"{run['peer']}, {run['configuration']}: {run['unavailable']}")
    only = "".join(f" --only {name}" for name in args.only or ())
    about = {
        "what": "Implementations of linear cross-entropy held to flce_ref.verify",
        "command": f"python benchmarks/verify_peers.py --device {args.device}{only} --out {args.out.as_posix()}",
        "peers": versions(),
    }
    document = {"provenance": provenance() | about, "device": args.device, "runs": runs}
    args.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
