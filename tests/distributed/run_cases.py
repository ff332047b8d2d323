"""Run every case for this number of ranks: ``torchrun --nproc-per-node W -m tests.distributed.run_cases OUT.json``.

``OUT.json`` has, for each case, what went wrong by rank; nothing for one that passed everywhere. With ``--device cuda``
each rank has a GPU and NCCL, otherwise all have the CPU and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import token_cases, trouble_cases, vocab_cases  # noqa: F401  they declare the cases
from tests.distributed.harness import TIMEOUT, World, cases_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo", timeout=TIMEOUT)
    world = World(dist.get_rank(), dist.get_world_size(), device)
    found: dict[str, dict[str, str]] = {}
    for name, function in cases_for(world.size).items():
        torch.manual_seed(0)
        wrong = None
        try:
            function(world)
        except Exception:
            wrong = traceback.format_exc()
        results: list[str | None] = [None] * world.size
        dist.all_gather_object(results, wrong)
        found[name] = {f"rank {rank}": text for rank, text in enumerate(results) if text}
    if world.rank == 0:
        arguments.out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
