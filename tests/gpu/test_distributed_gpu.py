"""The cases of ``tests/distributed`` on several GPUs of one machine, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.test_distributed import check_all_cases

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two or more GPUs, there are {GPUS}")]


@pytest.mark.parametrize("ranks", [n for n in (2, 3, 4, 8) if n <= max(GPUS, 2)])
def test_all_cases(ranks: int, tmp_path: Path) -> None:
    check_all_cases(tmp_path, ranks, "--device", "cuda")
