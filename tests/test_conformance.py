"""The conformance suite: its truth is true, it passes what is right, and each mistake fails the check that names it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from wrong_implementations import WRONG, Right

from flce_ref import linear_cross_entropy
from flce_ref.__main__ import main
from flce_ref.conformance import Report, Row, verify
from flce_ref.conformance.cases import bias_for, class_weight_for, make, upstream_for
from flce_ref.conformance.compare import largest, like_plain, overall, worst
from flce_ref.conformance.expected import KNOWN
from flce_ref.conformance.reference import execute, plain, plain_linear_cross_entropy, truth
from flce_ref.conformance.registry import CHECKS
from flce_ref.conformance.runner import run
from flce_ref.conformance.target import load, parse_setting
from flce_ref.conformance.tracker import StorageTracker

CORE = {
    "loss", "dx", "dw", "reduction.mean", "reduction.sum", "reduction.none",
    "ignore_index.loss", "ignore_index.dx", "ignore_index.dw", "ignore_index.in_vocabulary",
}  # fmt: skip
VERDICTS = [id for id in CHECKS if not id.startswith("measured.")]


# ---------------------------------------------------------------- the truth, against autograd


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_truth_is_what_autograd_finds_in_float64(reduction, softcap, z_loss, smoothing):
    problem = make(
        dtype=torch.float64,
        ignored=1 / 3,
        reduction=reduction,
        softcap=softcap,
        z_loss=z_loss,
        label_smoothing=smoothing,
    )
    problem = problem.but(linear_bias=bias_for(problem), weight=class_weight_for(problem))
    upstream = upstream_for(problem).double() if reduction == "none" else -2.7
    error, part = worst(execute(plain, problem, upstream), truth(problem, upstream))
    assert error < 1e-13, part


def test_the_truth_of_lse_is_what_autograd_finds():
    problem = make(dtype=torch.float64, ignored=1 / 3, softcap=3.0)
    factor = upstream_for(problem).double()

    def with_lse(problem):
        z = 3.0 * torch.tanh(F.linear(problem.input, problem.linear_weight) / 3.0)
        return plain(problem) + (factor * torch.logsumexp(z, -1) * (problem.target != -100)).sum()

    error, part = worst(execute(with_lse, problem), truth(problem, lse_upstream=factor), ("dx", "dw"))
    assert error < 1e-13, part


def test_every_target_ignored_has_a_nan_mean_and_zero_gradients():
    problem = make(dtype=torch.float64, ignored=1.0)
    for result in (truth(problem), execute(plain, problem)):
        assert result.loss.isnan()
        assert not result.dx.any() and not result.dw.any()


# ---------------------------------------------------------------- how errors are measured


def test_one_wrong_element_among_thousands_counts_in_full():
    right = torch.ones(10_000)
    wrong = right.clone()
    wrong[77] = 2.0
    assert largest(wrong, right) == 1.0
    assert overall(wrong, right) == pytest.approx(0.01)


@pytest.mark.parametrize("measure", [largest, overall])
def test_what_is_not_comparable_is_infinitely_wrong(measure):
    right = torch.ones(3)
    for wrong in (None, torch.ones(2), torch.tensor([1.0, 1.0, math.nan]), torch.tensor([1.0, math.inf, 1.0])):
        assert measure(wrong, right) == math.inf
    assert measure(torch.tensor(math.nan), torch.tensor(math.nan)) == 0.0
    assert measure(torch.tensor(1.0), torch.tensor(math.nan)) == math.inf


def test_the_tracker_sees_what_saved_tensor_hooks_do_not():
    kept = []
    x = torch.ones(8)
    with StorageTracker(x) as tracker:
        kept.append(x * 2)
        (x * 3).sum()
        view = x[2:]
    assert tracker.alive() == 8
    assert tracker.allocated.count(8) == 2
    assert view.numel() == 6


def test_the_tracker_counts_what_a_buffer_has_grown_to():
    with StorageTracker() as tracker:
        grown = torch.empty(0)
        grown.resize_(1000)
    assert tracker.alive() == grown.numel() == 1000


# ---------------------------------------------------------------- implementations that are right


def verify_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flce_ref", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=600)


def test_ours_passes_everything():
    done = verify_command("flce_ref:linear_cross_entropy", "--json")
    document = json.loads(done.stdout)
    assert document["summary"] == {
        "passed": len([id for id in VERDICTS if CHECKS[id].device is None]),
        "failed": 0, "expected_failure": 0, "unsupported": 0,
        "measured": len(CHECKS) - len(VERDICTS),
    }, done.stdout  # fmt: skip
    assert done.returncode == 0


def test_a_right_implementation_passes_everything_that_it_supports():
    report = run(Right(), only=VERDICTS)
    assert report.ok, str(report)
    refused = {row.id for row in report.checks if row.status == "unsupported"}
    assert refused == {"label_smoothing", "softcap", "return_lse", "return_lse.gradient", "combinations.softcap"}


def test_the_cut_of_the_vocabulary_passes_everything():
    report = verify(linear_cross_entropy, schedule="vocab_tiled")
    assert report.ok, str(report)
    assert {row.status for row in report.checks} == {"passed", "measured"}


@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed"])
def test_the_other_schedules_fail_only_as_expected(schedule):
    report = verify(linear_cross_entropy, schedule=schedule)
    assert report.ok, str(report)
    known = {row.id: row.reason for row in report.checks if row.status == "expected_failure"}
    assert ("memory.holds_no_logits" in known) == (schedule != "checkpointed")
    assert ("precision.dw_many_chunks.bfloat16" in known) == (schedule != "naive")
    assert all(reason.startswith("Known: ") for reason in known.values())


def test_an_expected_failure_that_passes_is_a_failure(monkeypatch):
    monkeypatch.setitem(KNOWN, "naive", {"loss": "a rumour"})
    report = run(linear_cross_entropy, settings={"schedule": "naive"}, only=["loss"])
    assert report["loss"].status == "failed"
    assert "a rumour" in report["loss"].reason


def test_low_precision_accumulation_is_seen_through_the_settings():
    report = run(
        linear_cross_entropy,
        settings={"accum_dtype": torch.bfloat16},
        only=["precision.dw_many_chunks.bfloat16", "precision.dx.bfloat16"],
    )
    assert [row.id for row in report.failed] == ["precision.dw_many_chunks.bfloat16"]


# ---------------------------------------------------------------- implementations that are wrong


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_fails_the_check_that_names_it(name):
    implementation = WRONG[name]()
    # The one slow check runs only where it has something to say.
    only = [id for id in VERDICTS if id != "precision.float16_mean" or id == implementation.caught_by]
    failed = {row.id for row in run(implementation, only=only).failed}
    assert implementation.caught_by in failed
    others = {id for id in failed - {implementation.caught_by} if not any(fnmatch(id, p) for p in implementation.also)}
    assert not others, "it failed what has nothing to do with its mistake"


def test_every_core_row_is_named_by_some_mistake_or_fails_without_gradients():
    def no_gradient(input, linear_weight, target, **options):
        return plain_linear_cross_entropy(input, linear_weight, target, **options).detach()

    failed = {row.id for row in run(no_gradient, only=CORE).failed}
    assert failed == CORE


def test_core_rows_cannot_be_unsupported_and_others_can():
    def refuses(input, linear_weight, target, **options):
        raise NotImplementedError(f"not today: {options}")

    report = run(refuses, only=[*CORE, "softcap"])
    assert {row.id for row in report.failed} == CORE
    assert report["softcap"].status == "unsupported"
    assert all(CHECKS[id].core for id in CORE)


def test_an_error_that_does_not_name_the_argument_is_a_failure():
    def broken(input, linear_weight, target, **options):
        raise ValueError("something else")

    assert run(broken, only=["softcap"])["softcap"].status == "failed"


def test_a_crash_is_reported_and_survived():
    def crashes(input, linear_weight, target, **options):
        if (target >= len(linear_weight)).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return plain_linear_cross_entropy(input, linear_weight, target, **options)

    row = run(crashes, only=["target.out_of_range"])["target.out_of_range"]
    assert row.status == "failed"
    assert "died" in row.reason


KEPT: list = []

HIDING_PLACES = {
    "a list on ctx": lambda ctx, z: ctx.__dict__.setdefault("kept", []).append(z),
    "a tuple on ctx": lambda ctx, z: setattr(ctx, "kept", (*getattr(ctx, "kept", ()), z)),
    "closures": lambda ctx, z: ctx.__dict__.setdefault("again", []).append(lambda: z),
    "a list of the module's": lambda ctx, z: KEPT.append(z),
    "views of one row": lambda ctx, z: KEPT.append(z[:1]),
    "copies of half the width": lambda ctx, z: KEPT.append(z.bfloat16()),
    "numpy arrays": lambda ctx, z: KEPT.append(z.numpy()),
    "storages": lambda ctx, z: KEPT.append(z.untyped_storage()),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_logits_are_found_wherever_they_are_kept(place):
    class Hides(Right):
        def keep(self, ctx, z):
            HIDING_PLACES[place](ctx, z)

    try:
        row = run(Hides(), only=["memory.holds_no_logits"])["memory.holds_no_logits"]
    finally:
        KEPT.clear()
    assert row.status == "failed"
    assert 0.99 < row.error < 1.1


def test_logits_behind_the_loss_are_found():
    """The loss is a view of one element of a buffer that holds them all."""

    def loss_within_logits(input, linear_weight, target, reduction="mean"):
        loss = plain_linear_cross_entropy(input, linear_weight, target, reduction=reduction)
        with torch.no_grad():
            return torch.cat([F.linear(input, linear_weight).flatten(), loss.flatten()])[-loss.numel() :]

    assert run(loss_within_logits, only=["memory.holds_no_logits"]).failed


def test_views_of_the_inputs_are_not_logits():
    class KeepsInputs(Right):
        def operands(self, x, w):
            self.kept = [x.T, w[1:], *([x[:1000]] * 5000), *w.split(2)]
            return x, w

    assert run(KeepsInputs(), only=["memory.holds_no_logits"]).ok


def returns_none(*args, **options):
    print("on standard output")


def returns_a_pair(*args, **options):
    return plain_linear_cross_entropy(*args, **options), {}


def returns_one_element(*args, **options):
    return plain_linear_cross_entropy(*args, **options).reshape(-1)[:1]


def exits(*args, **options):
    sys.exit(0)


def raises_in_backward(*args, **options):
    loss = plain_linear_cross_entropy(*args, **options)
    if loss.requires_grad:
        loss.register_hook(lambda upstream: 1 / 0)
    return loss


def zeroes_its_inputs(input, linear_weight, target, **options):
    loss = plain_linear_cross_entropy(input, linear_weight, target, **options)
    for tensor in (input, linear_weight, target):
        tensor.detach().zero_()
    return loss


@pytest.mark.parametrize(
    "broken", [returns_none, returns_a_pair, returns_one_element, exits, raises_in_backward, zeroes_its_inputs]
)
def test_whatever_a_function_does_the_run_ends_with_a_report(broken):
    report = run(broken, only=[id for id in VERDICTS if "float16" not in id])
    assert report["reduction.none"].status == "failed"
    json.loads(report.to_json())


LEAKS = {
    "gradient mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "TF32 of cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast on the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "seed": lambda: torch.manual_seed(0),
    "torch.nn.functional.linear": lambda: setattr(F, "linear", F.bilinear),
    "torch.logsumexp": lambda: delattr(torch, "logsumexp"),
    "torch.Tensor.exp": lambda: setattr(torch.Tensor, "exp", torch.Tensor.log),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_changed_global_state_fails_the_check_and_reaches_no_other(leak):
    left = []

    def leaks(*args, **options):
        loss = linear_cross_entropy(*args, **options)
        if not left:
            left.append(LEAKS[leak]())
        return loss

    numbers = torch.get_rng_state()
    report = run(leaks, only=["loss", "dx", "dw", "bias", "precision.loss.float32"])
    assert [row.id for row in report.failed] == ["loss"]
    assert leak in report["loss"].reason
    assert torch.equal(torch.get_rng_state(), numbers)


class Unspeakable(BaseException):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Unspeakable, GeneratorExit, SystemExit])
def test_any_exception_but_an_interruption_is_a_failed_row(error):
    def raises(*args, **options):
        raise error

    report = run(raises, only=["loss", "softcap", "backward.second_derivative", "frozen.gradients"])
    assert report["loss"].status == report["softcap"].status == report["frozen.gradients"].status == "failed"
    assert error.__name__ in report["loss"].reason


def test_an_interruption_ends_the_run():
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, only=["loss"])


def test_a_huge_output_and_a_huge_message_are_failed_rows():
    def huge(input, linear_weight, target, **options):
        return input.sum().expand(2**40)

    def talks(*args, **options):
        raise RuntimeError("x" * 10**6)

    assert "(1099511627776,)" in run(huge, only=["loss"])["loss"].reason
    assert len(run(talks, only=["loss"])["loss"].reason) < 1000


def test_a_call_that_never_returns_is_given_up(monkeypatch):
    def hangs(input, linear_weight, target, **options):
        while target.max() == 101:
            time.sleep(0.1)
        return linear_cross_entropy(input, linear_weight, target, **options)

    monkeypatch.setattr("flce_ref.conformance.checks_targets.FORK_PATIENCE", 1.0)
    report = run(hangs, only=["target.out_of_range", "target.negative"])
    assert "target 101: no answer in 1 s" in report["target.out_of_range"].reason
    assert report["target.negative"].status == "passed"


def test_no_bound_is_infinite():
    assert like_plain(math.inf, "loss", math.inf, torch.float32).bound < 1


# ---------------------------------------------------------------- the report


def test_the_report_is_json_and_a_table():
    rows = (
        Row("a", "what", "float32", math.inf, 1e-5, "failed", "It should be."),
        Row("b.c", "what", "float32", None, None, "unsupported", "Refused."),
    )
    report = Report("m:f", "cpu", "2.13", rows)
    document = json.loads(report.to_json())
    assert list(document) == ["target", "device", "torch", "checks", "summary"]
    assert list(document["checks"][0]) == ["id", "what", "dtype", "error", "bound", "status", "reason"]
    assert document["checks"][0]["error"] is None
    assert document["summary"] == {"passed": 0, "failed": 1, "expected_failure": 0, "unsupported": 1, "measured": 0}
    assert not report.ok
    assert "failed: a: It should be." in str(report)
    with pytest.raises(KeyError, match="nothing"):
        report["nothing"]


def test_not_a_function_is_a_type_error():
    with pytest.raises(TypeError, match="callable, got int"):
        verify(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("chunk_size=16", 16),
        ("softcap=None", None),
        ("schedule=naive", "naive"),
        ("schedule='naive'", "naive"),
        ("accum_dtype=float32", torch.float32),
        ("accum_dtype=torch.bfloat16", torch.bfloat16),
        ("z_loss=1e-4", 1e-4),
    ],
)
def test_settings_are_literals_dtypes_or_strings(text, value):
    assert parse_setting(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize("text", ["chunk_size", "=3", "chunk size=3"])
def test_a_setting_without_its_form_is_refused(text):
    with pytest.raises(ValueError, match="key=value"):
        parse_setting(text)


def test_targets_are_found_by_module_and_by_file(tmp_path):
    assert load("flce_ref:linear_cross_entropy") is linear_cross_entropy
    path = tmp_path / "some_loss.py"
    path.write_text("def loss(x, w, y): ...\nlimit = 3\n")
    assert load(f"{path}:loss").__name__ == "loss"
    for name, said in {
        "flce_ref": "MODULE:FUNCTION",
        "no_such_module:f": "importing 'no_such_module' failed",
        f"{path}:lose": "it has: loss",
        f"{path}:limit": "can't be called",
        f"{tmp_path / 'absent.py'}:f": "importing",
    }.items():
        with pytest.raises(ValueError, match=said):
            load(name)


def test_the_command_prints_one_json_document_and_fails_with_status_1():
    done = verify_command("wrong_implementations.py:mean_over_all_tokens", "--json", "--set", "chunk_size=64")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["target"] == "wrong_implementations.py:mean_over_all_tokens"
    assert "ignore_index.loss" in [row["id"] for row in document["checks"] if row["status"] == "failed"]


def test_the_command_survives_a_function_that_prints_and_exits(tmp_path):
    path = tmp_path / "noisy.py"
    path.write_text(
        "import os, sys\ndef loss(*args, **options):\n    os.write(1, b'noise')\n    sys.exit(print('more'))\n"
    )
    done = verify_command(f"{path}:loss", "--json")
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["passed"] + summary["unsupported"] + summary["measured"] == 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(0)", "loss: The function ended the process, exit code 0."),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "loss: The function ended the process, exit code -11."),
        ("time.sleep(60)", "loss: The function gave no answer in 3 s."),
    ],
)
def test_the_command_reports_a_function_that_ends_its_process_or_never_returns(tmp_path, body, said):
    path = tmp_path / "ends.py"
    path.write_text(f"import os, signal, time\ndef loss(*args, **options):\n    {body}\n")
    done = verify_command(f"{path}:loss", "--json", "--timeout", "3" if "sleep" in body else "600")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    first, *others = document["checks"]
    assert f"{first['id']}: {first['reason']}" == said
    assert all(row["status"] == "failed" and row["reason"].startswith("Not reached: ") for row in others)
    assert document["summary"]["failed"] == len([id for id in CHECKS if CHECKS[id].device is None])
    if "SIGSEGV" in body:
        assert "plain_call" in done.stderr  # where it was: the function that checks the loss, the first row


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon", "1e9"])
def test_a_timeout_is_a_number_of_seconds(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "flce_ref:linear_cross_entropy", "--timeout", seconds])
    assert "--timeout: expected a number of seconds" in capsys.readouterr().err


def test_the_command_says_what_is_wrong_with_its_arguments():
    for arguments in (["flce_ref:nothing"], ["nowhere:f"], ["flce_ref:linear_cross_entropy", "--set", "naive"], []):
        done = verify_command(*arguments)
        assert done.returncode == 2
        assert "error:" in done.stderr


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_that_cannot_compute_is_refused(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with pytest.raises(ValueError, match=rf"device must be .* \(cpu, or cuda .*\), got '{device}'"):
        verify(linear_cross_entropy, device)
