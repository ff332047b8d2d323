"""More than one process, started by ``torchrun`` on this machine's CPU: words and tokens shared out over 1 to 4 ranks.

The cases are in ``tests/distributed``; all for one number of ranks run in one launch, since starting takes longest.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flce_ref.distributed import (
    global_mean,
    token_parallel_linear_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from tests.distributed.harness import TIMEOUT, cases_for
from tests.oracle import problem

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no torch.distributed with gloo"
)


def torchrun(ranks: int, module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node RANKS -m MODULE …``, which talks to nobody but itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", module, *map(str, arguments)]
    limit = 180 + 2 * TIMEOUT.total_seconds()
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def check_all_cases(folder: Path, ranks: int, *arguments: object) -> None:
    """Run all cases for this number of ranks; every rank must have passed every one."""
    finished = torchrun(ranks, "tests.distributed.run_cases", folder, *arguments)
    errors = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    assert finished.returncode == 0 and not errors, "\n".join(errors) or finished.stderr
    for module in ("vocab_cases", "token_cases", "trouble_cases"):
        importlib.import_module(f"tests.distributed.{module}")
    wanted = set(cases_for(ranks))
    passed = [set(json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    assert passed == [wanted] * ranks and len(wanted) > 10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_cases(ranks: int, tmp_path: Path) -> None:
    check_all_cases(tmp_path, ranks)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    finished = torchrun(2, "tests.distributed.dies", tmp_path)
    assert finished.returncode != 0
    told, waited = json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))
    assert told and waited < TIMEOUT.total_seconds()


@pytest.mark.parametrize("options", [{}, {"gradients": "summed"}])
def test_without_a_process_group_the_error_says_what_to_do(options: dict[str, str]) -> None:
    x, w, y = problem()
    call = token_parallel_linear_cross_entropy if options else vocab_parallel_linear_cross_entropy
    with pytest.raises(RuntimeError, match=r"no process group.*torchrun.*init_process_group"):
        call(x, w, y, **options)
    with pytest.raises(RuntimeError, match=r"no process group"):
        global_mean(torch.tensor(1.0), 1, gradients="summed")
