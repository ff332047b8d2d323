"""``head.py`` for everything that is compared: long sequences and the heads of other models, one JSON each.

    python benchmarks/all_heads.py --out book/data/h200

writes ``head.json`` (8192 tokens of the 151,552 × 2048 head, every step), ``head_32768.json``, ``head_131072.json``,
``head_1048576.json`` and ``head_MODEL.json`` (8192 tokens). A configuration runs in a process of its own, so that one
that fails, or takes longer than ``--timeout``, costs the others nothing. ``--only NAME`` (repeated) runs some of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref import models  # noqa: E402

LIBRARY = "flce_ref default|flce_ref fp32 dw, chunk (4096|8192)|flce_ref bf16 dw, chunk (512|1024|2048)"
PEERS = "naive|torch.compile of naive, float32 logits|torch native, chunked|liger-kernel|cut-cross-entropy"
QUACK = "quack-kernels, chunk"
EVERYONE = f"^({LIBRARY}|{PEERS}|{QUACK} (1024|4096))$"
# A step of 2^20 tokens takes seconds, and N·V logits 296 GiB.
MILLION = f"^(flce_ref default|flce_ref bf16 dw, chunk (1024|4096)|liger-kernel|cut-cross-entropy|{QUACK} 4096)$"


def model_options(model_id: str) -> list[str]:
    model = models.get(model_id)
    return ["--vocab", str(model.vocab_size), "--hidden", str(model.hidden_size), "--only", EVERYONE]


def configurations() -> dict[str, list[str]]:
    """Name of the JSON → options of ``head.py``."""
    found = {
        "head": ["--rounds", "4"],
        "head_32768": ["--tokens", "32768", "--only", EVERYONE],
        "head_131072": ["--tokens", "131072", "--rounds", "2", "--warmups", "1", "--only", EVERYONE],
        "head_1048576": ["--tokens", "1048576", "--rounds", "1", "--warmups", "1", "--no-truth", "--only", MILLION],
    }
    for name, model_id in (("gpt-oss", "gpt-oss-20b"), ("llama-3", "llama-3-8b"), ("gemma-3", "gemma-3-4b")):
        found[f"head_{name}"] = model_options(model_id)
    return {name: options if "--rounds" in options else ["--rounds", "3", *options] for name, options in found.items()}


def run(name: str, options: list[str], out: Path, timeout: float) -> str | None:
    """Run one configuration; what went wrong, or None."""
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "benchmarks" / "head.py"), *options, "--out", str(out / f"{name}.json")]
    try:
        status = subprocess.run(command, timeout=timeout).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout:.0f} s"
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return f"exit status {status}" if status else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = configurations()
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--only", action="append", choices=known, help="a configuration to run; all of them if none is named"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one configuration")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = {}
    for name in args.only or known:
        reason = run(name, known[name], args.out, args.timeout)
        if reason:
            failed[name] = reason
    for name, reason in failed.items():
        print(f"{name}: {reason}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
