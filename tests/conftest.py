"""What test modules share: a fixed seed, hypothesis without a clock, a browser, and no `gpu` test without a GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

# The machine's load must not decide whether a test passes, nor may the day: the same examples on every run.
hypothesis.settings.register_profile("flce", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("flce")

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium: the one that the variable CHROMIUM names, or one on the path."""
    not_tested = "NOT TESTED IN A BROWSER"
    playwright = pytest.importorskip("playwright.sync_api", reason=f"{not_tested}: pip install 'flce-ref[test]'")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip(f"{not_tested}: no chromium found; apt-get install chromium, or set CHROMIUM to its path")
    with playwright.sync_playwright() as started:
        # Without its background networking the browser makes no request that no page asked for.
        launched = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield launched
        launched.close()
