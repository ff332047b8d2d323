"""The conformance suite on a CUDA device: every schedule, and that it still catches there what it exists to catch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from wrong_implementations import ComputesDwOfFrozen, IgnoresUpstream, SavesLogits

from flce_ref import linear_cross_entropy, verify
from flce_ref.conformance.reference import plain_linear_cross_entropy
from flce_ref.conformance.registry import CHECKS
from flce_ref.conformance.runner import run
from flce_ref.conformance.tracker import StorageTracker

pytestmark = pytest.mark.gpu
HOLDS = ("memory.holds_no_logits", "memory.holds_no_logits.allocator")


@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
def test_every_schedule_passes_or_fails_as_expected(schedule: str) -> None:
    report = verify(linear_cross_entropy, "cuda", schedule=schedule)
    print(report)
    assert report.ok, str(report)
    assert len(report.checks) == len(CHECKS)
    status = "passed" if schedule in ("fused", "checkpointed", "vocab_tiled") else "expected_failure"
    assert [report[id].status for id in HOLDS] == [status, status]
    assert report["target.out_of_range"].status == "passed"
    for row in report.checks:
        if row.status == "measured":
            assert row.error is not None and row.error > 0


def test_allocations_of_backward_are_seen_in_autograds_own_thread() -> None:
    x, w = (torch.randn(rows, 16, device="cuda", requires_grad=True) for rows in (4, 32))
    with StorageTracker(x, w) as tracker:
        loss = F.linear(x, w).sum()
        forward = len(tracker.allocated)
        loss.backward()
    assert 32 * 16 in tracker.allocated[forward:]


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        (SavesLogits(), HOLDS[0]),
        (SavesLogits(), HOLDS[1]),
        (ComputesDwOfFrozen(), "frozen.linear_weight"),
        (IgnoresUpstream(), "upstream.scalar"),
    ],
)
def test_mistakes_are_caught(wrong: object, caught_by: str) -> None:
    assert run(wrong, "cuda", only=[caught_by])[caught_by].status == "failed"


def test_a_device_assert_stays_in_the_subprocess() -> None:
    row = run(plain_linear_cross_entropy, "cuda", only=["target.out_of_range"])["target.out_of_range"]
    assert row.status == "failed"
    assert "device assert" in row.reason or "died" in row.reason
    assert torch.ones(2, device="cuda").sum() == 2


def test_what_a_subprocess_cannot_import_is_not_called_wrong() -> None:
    def local(input: Tensor, linear_weight: Tensor, target: Tensor, **options: object) -> Tensor:
        return linear_cross_entropy(input, linear_weight, target, **options)

    row = run(local, "cuda", only=["target.out_of_range"])["target.out_of_range"]
    assert row.status == "unsupported"
    assert "subprocess" in row.reason
