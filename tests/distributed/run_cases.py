"""Run every case for this number of ranks: ``torchrun --nproc-per-node W -m tests.distributed.run_cases FOLDER``.

Each rank writes the names of the cases that it has passed to ``FOLDER/RANK.json``. It stops at the first that fails,
with the traceback in ``FOLDER/RANK.txt``, and torchrun ends the others: they may be waiting for it. With ``--device
cuda`` each rank has a GPU and NCCL, otherwise all have the CPU and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import token_cases, trouble_cases, vocab_cases  # noqa: F401  they declare the cases
from tests.distributed.harness import TIMEOUT, World, cases_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo", timeout=TIMEOUT)
    world = World(dist.get_rank(), dist.get_world_size(), device)
    passed = []
    for name, function in cases_for(world.size).items():
        torch.manual_seed(0)
        try:
            function(world)
            dist.barrier()
        except Exception:
            text = f"{name}, rank {world.rank}\n{traceback.format_exc()}"
            (arguments.folder / f"{world.rank}.txt").write_text(text, encoding="utf-8")
            os._exit(1)  # at once: the process group would wait for the others
        passed.append(name)
    (arguments.folder / f"{world.rank}.json").write_text(json.dumps(passed), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
