"""What every test module shares: a fixed seed, `gpu` tests skipped without a GPU, hypothesis without a clock."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# The machine's load must not decide whether a test passes, nor may the day: the same examples on every run.
hypothesis.settings.register_profile("flce", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("flce")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
