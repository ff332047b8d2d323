"""Recording on a CUDA device: what the history holds is what was allocated, and it is off afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flce_ref.memory import record, simulate
from flce_ref.memory.labels import label

pytestmark = pytest.mark.gpu
N, V, D = 1024, 32_000, 512
MIB = 1 << 20


def naive(x: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, linear_weight), target)


@pytest.fixture
def head() -> tuple[torch.Tensor, ...]:
    x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(V, (N,), device="cuda")
    naive(x, w, y).backward()  # cuBLAS takes its workspace here
    x.grad = w.grad = None
    return x, w, y


def history_is_on() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def test_a_recorded_step_is_the_simulated_one(head: tuple[torch.Tensor, ...]) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with record("naive") as recording:
        loss = naive(*head)
        loss.backward()
    measured = torch.cuda.max_memory_allocated() - before
    assert not history_is_on()
    recorded = recording.timeline
    simulated = simulate(naive, *head)

    def above_start(timeline):  # type: ignore[no-untyped-def]
        live = timeline.live_bytes()
        return int(live.max() - live[0])

    assert recorded.source == "recorded" and recorded.backward_start is not None
    assert above_start(recorded) == pytest.approx(measured, rel=0.01)
    assert above_start(recorded) == pytest.approx(above_start(simulated), rel=0.01)
    large = [[a.bytes // MIB for a in t.allocations if a.start and a.bytes >= MIB] for t in (recorded, simulated)]
    assert large[0] == large[1]
    named = {a.label for a in recorded.allocations}
    assert {"logits", "log-probabilities", "gradient of the log-probabilities", "dlogits"} <= named
    forward = next(a for a in recorded.allocations if a.label == "logits")
    assert any(f.name == "naive" and f.filename == "test_recorder_gpu.py" for f in forward.frames)


def test_labels_reach_the_recording() -> None:
    if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
        pytest.skip(f"PyTorch {torch.__version__} cannot label allocations")
    with record() as recording, label("a buffer of mine"):
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    (mine,) = [a for a in recording.timeline.allocations if a.label == "a buffer of mine"]
    assert (mine.bytes, mine.end) == (kept.numel(), None)


def test_out_of_memory_leaves_recording_off_and_the_timeline_up_to_there() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError), record() as recording:
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(total * 2, dtype=torch.uint8, device="cuda")
    assert not history_is_on()
    assert 64 * MIB in [a.bytes for a in recording.timeline.allocations]
    assert any(note.startswith("out of memory after event") for note in recording.timeline.notes)
    del kept


def test_a_full_history_is_said() -> None:
    with record(max_entries=30) as recording:
        for _ in range(100):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert any("last 30 entries" in note for note in recording.timeline.notes)


def test_a_second_recording_is_refused_and_the_first_goes_on() -> None:
    with record() as recording:
        with pytest.raises(RuntimeError, match="being recorded already"), record():
            pass
        assert history_is_on()
        torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert recording.timeline.n_events == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_that_was_asked_for() -> None:
    with record(device=1) as recording:
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:0")
        torch.empty(5 * MIB, dtype=torch.uint8, device="cuda:1")
    live = recording.timeline.live_bytes()
    assert int(live.max() - live[0]) == 5 * MIB
