"""The simulator against the step peaks and allocator histories that were measured on an H200.

The table is made by ``benchmarks/memory_agreement.py``; here every case is simulated again.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_agreement import CASES, RECORDED, Case, compare_events
from flce_ref.memory import Timeline

H200 = Path(__file__).parent.parent / "book" / "data" / "h200"
KERNEL = "cuda"


@cache
def measured() -> dict[Case, dict[str, Any]]:
    """The stored rows by case."""
    document = json.loads((H200 / "memory_agreement.json").read_text(encoding="utf-8"))
    return {Case(row["model"], row["tokens"], row["step"]): row for row in document["cases"]}


@cache
def recordings() -> dict[str, Timeline]:
    document = json.loads((H200 / "memory_agreement_recordings.json").read_text(encoding="utf-8"))
    return {step: Timeline.from_json(json.dumps(stored)) for step, stored in document["recordings"].items()}


def test_every_case_was_measured_and_nothing_else_is_stored() -> None:
    assert set(measured()) == set(CASES)
    assert set(recordings()) == {case.step for case in RECORDED}
    assert {case.tokens for case in CASES if case.model == "gravity-16b-a3b"} == {8192, 32768}
    assert {case.model for case in CASES} == {"gravity-16b-a3b", "gpt-oss-20b", "gemma-3-4b", "llama-3-8b"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_simulated_peaks_are_the_measured_ones(case: Case) -> None:
    row = measured()[case]
    assert row["kernel"] == KERNEL
    timeline = case.simulate(KERNEL)
    assert timeline.input_bytes == row["input_bytes"]
    assert timeline.step_peak_bytes == pytest.approx(row["measured"]["step_peak_bytes"], rel=0.01)
    assert timeline.forward_peak_bytes == pytest.approx(row["measured"]["forward_peak_bytes"], rel=0.01)
    # What is left of the difference is blocks of the caching allocator that were larger than was asked for.
    assert timeline.step_peak_bytes == pytest.approx(row["measured"]["requested_step_peak_bytes"], rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_first_step_takes_more_by_at_most_the_workspaces_of_cublas(case: Case) -> None:
    row = measured()[case]
    extra = row["cold_step_peak_bytes"] - row["measured"]["step_peak_bytes"]
    workspace = 32 << 20  # one for each thread that multiplies, on Hopper
    assert row["workspace_bytes"] in (workspace, 2 * workspace)
    assert 0 <= extra <= row["workspace_bytes"]


@pytest.mark.parametrize("case", RECORDED, ids=str)
def test_large_buffers_come_and_go_as_recorded(case: Case) -> None:
    comparison = compare_events(case.simulate(KERNEL), recordings()[case.step])
    assert comparison["same_events"], comparison
    assert comparison["events"] == measured()[case]["large_buffers"]["events"] >= 4
