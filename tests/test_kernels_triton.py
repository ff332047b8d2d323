"""The Triton kernel's tests, which need a process of their own: the interpreter must be asked for before the import."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("triton_interpreted.py")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="THE TRITON KERNEL IS NOT TESTED: pip install triton (Linux only)",
)
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, cwd=TESTS.parents[1], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"^(\d+) passed", run.stdout, re.MULTILINE)
    assert passed and int(passed[1]) > 60 and "skipped" not in run.stdout, run.stdout
