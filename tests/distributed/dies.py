"""Rank 1 exits without a word where the others need it: ``torchrun … -m tests.distributed.dies FOLDER``.

Every other rank writes the error that it got, and how long it had waited, to ``FOLDER/rank.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from flce_ref.distributed import vocab_parallel_linear_cross_entropy
from tests.distributed.harness import TIMEOUT
from tests.oracle import problem


def main() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    x, w, y = problem()
    dist.barrier()
    if rank == 1:
        os._exit(3)
    began = time.monotonic()
    try:
        vocab_parallel_linear_cross_entropy(x, w, y)
    except Exception as error:
        waited = time.monotonic() - began
        (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps([str(error), waited]), encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
