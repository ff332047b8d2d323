"""Timing and peak memory of a step, and the command that prints them; what needs a GPU is in tests/gpu."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import torch

from flce_ref import benchmark
from flce_ref.__main__ import main
from flce_ref.benchmark import Measurement, measure, provenance

SMALL = ["--tokens", "64", "--vocab", "128", "--hidden", "16", "--rounds", "2"]


def test_steps_are_measured_in_turns_and_forwards_and_backwards() -> None:
    order: list[str] = []
    results = measure({name: lambda name=name: order.append(name) for name in "abc"}, rounds=2, warmups=1, device="cpu")
    assert order == [*"aabbcc", *"abc", *"cba"]  # a warm-up and the run for the peak, then the rounds
    assert all(len(r.times_ms) == 2 and r.peak_bytes is None and r.error is None for r in results.values())


def test_times_are_milliseconds() -> None:
    (result,) = measure({"sleep": lambda: time.sleep(0.02)}, rounds=3, warmups=0, device="cpu").values()
    assert all(20 <= t < 2000 for t in result.times_ms)
    assert result.median_ms == sorted(result.times_ms)[1]


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    runs = iter(range(100))

    def sometimes() -> None:
        if next(runs) == 4:
            raise RuntimeError("the fifth time\nwith details")

    results = measure({"always": lambda: 1 / 0, "later": sometimes, "fine": lambda: None}, rounds=4, device="cpu")
    assert results["always"] == Measurement(error="ZeroDivisionError: division by zero")
    assert results["later"] == Measurement(error="RuntimeError: the fifth time")
    assert results["later"].median_ms is None and len(results["fine"].times_ms) == 4


def test_on_a_gpu_a_turn_settles_and_is_the_median_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    times = iter([9.0, 1.0, 2.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            runs.append("event")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: object) -> float:
            return next(times)

    clock = iter([0.0, 0.1, 0.25, 0.25, 0.3, 0.35, 0.5])  # settles for two runs, then three are timed
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    for name, fake in (("Event", Event), ("_sleep", lambda cycles: None), ("synchronize", lambda: None),
                       ("device", lambda device: contextlib.nullcontext())):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    assert benchmark._time(lambda: runs.append("step"), torch.device("cuda")) == 2.0
    assert runs == ["step"] + 3 * ["event", "step", "event"]


@pytest.mark.parametrize("options", [{"rounds": 0}, {"warmups": -1}])
def test_wrong_counts(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rounds must be ≥ 1 and warmups ≥ 0"):
        measure({}, **options)


def test_provenance_says_what_was_measured_with() -> None:
    found = provenance()
    assert found["versions"]["torch"] == torch.__version__ and json.dumps(found)
    assert (found["gpu"] is None) == (not torch.cuda.is_available())


def test_the_command_prints_rows_with_provenance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", *SMALL]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == 64 and document["vocab_size"] == 128 and document["hidden_size"] == 16
    assert document["provenance"]["versions"]["torch"] and set(document["kernels"]) == {"cuda", "triton", "eager"}
    names = [row["step"] for row in document["rows"]]
    assert names[0] == "naive" and any("default" in name for name in names)
    assert all(row["error"] is None and len(row["times_ms"]) == 2 for row in document["rows"])
    assert all(row["predicted_peak_bytes"] > 0 for row in document["rows"])


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--dtype", "bf16", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "N = 64, V = 128, D = 16, bfloat16" in out
    assert "dw summed in bfloat16" in out and "÷ fastest" in out


@pytest.mark.parametrize("wrong", [["--vocab", "8"], ["--model", "no-such-model"], ["--tokens", "0"]])
def test_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", *wrong])
    assert exit.value.code == 2 and "error" in capsys.readouterr().err
