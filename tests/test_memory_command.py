"""``python -m flce_ref memory``: the figures, what fits, the files, and what is said about wrong usage."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_ref import __main__ as cli
from flce_ref.commands import memory as command
from flce_ref.memory import Timeline, head_step, operators
from flce_ref.memory.head_step import IDIOMS, SCHEDULES, HeadStep, fewest_chunks, longest_context

GIB = 1 << 30
SMALL = ["--vocab", "4096", "--hidden", "64", "--tokens", "3000"]
GRAVITY = ["--model", "gravity-16b-a3b", "--tokens", "8192"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["memory", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


# ---------------------------------------------------------------- the figures


def test_json_holds_the_contract_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, *GRAVITY, "--schedule", "all")
    assert list(document) == ["model", "tokens", "dtype", "kernel", "input_bytes", "schedules"]
    assert document["model"] == "gravity-16b-a3b"
    assert (document["tokens"], document["dtype"], document["kernel"]) == (8192, "bfloat16", "cuda")
    assert document["input_bytes"] == (8192 + 151_552) * 2048 * 2 + 8192 * 8
    assert [row["schedule"] for row in document["schedules"]] == list(SCHEDULES)
    for row in document["schedules"]:
        assert list(row) == ["schedule", "chunk_size", "forward_peak_bytes", "step_peak_bytes", "alive_at_peak"]
        assert row["forward_peak_bytes"] <= row["step_peak_bytes"]
        alive = sum(item["bytes"] for item in row["alive_at_peak"])
        assert alive == row["step_peak_bytes"] + document["input_bytes"]
        assert {"input", "linear_weight", "target"} <= {item["label"] for item in row["alive_at_peak"]}
    assert [row["chunk_size"] for row in document["schedules"]] == [None, 2048, 2048, 2048, 4096]
    peaks = [row["step_peak_bytes"] / GIB for row in document["schedules"]]
    assert peaks[0] == pytest.approx(6.9375, abs=1e-4)  # as measured on an H200
    assert peaks[3] == pytest.approx(1.766, abs=1e-3)


@pytest.mark.parametrize(("schedule", "gib"), [("naive", 7.55), ("naive-kept", 9.86), ("naive-float-kept", 19.11)])
def test_what_training_scripts_write(schedule: str, gib: float, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, *GRAVITY, "--schedule", schedule)
    (row,) = document["schedules"]
    assert round((row["step_peak_bytes"] + document["input_bytes"]) / GIB, 2) == gib


def test_float_without_a_name_lies_between(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(capsys, *GRAVITY, "--schedule", "naive-float")["schedules"]
    logits = 8192 * 151_552 * 2
    assert row["step_peak_bytes"] == pytest.approx(6 * logits, rel=1e-5)  # three float32 copies


def test_options_change_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    def peak(*arguments: str) -> int:
        (row,) = run(capsys, *SMALL, "--schedule", "fused", *arguments)["schedules"]
        return int(row["step_peak_bytes"])

    assert peak("--chunk-size", "100") < peak() < peak("--dtype", "fp32")
    assert peak() < peak("--kernel", "eager")


def test_chunk_size_is_for_the_schedules_that_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, *SMALL, "--chunk-size", "500")["schedules"]
    assert [row["chunk_size"] for row in rows] == [None, 500, 500, 500, 500]


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_other_dtypes(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, *SMALL, "--dtype", dtype, "--budget", "12MB")
    assert all(row["step_peak_bytes"] > 0 and row["max_tokens"] > 10 for row in document["schedules"])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", *GRAVITY, "--chunk-size", "1024", "--budget", "80GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines[5:9]}
    assert rows["naive"] == ["naive", "4.625", "6.938", "7.547", "93,362"]
    assert rows["chunked"][1] == "1,024" and rows["fused"][-1] == "8,192"
    assert "       2.312  dlogits" in lines
    assert any(line.endswith("log-probabilities of 6 chunks") for line in lines)


# ---------------------------------------------------------------- what fits


@pytest.mark.parametrize("schedule", [*SCHEDULES, *IDIOMS])
def test_the_longest_context_fits_and_one_token_more_does_not(schedule: str) -> None:
    step = HeadStep(schedule, 4096, 64, chunk_size=512 if schedule in SCHEDULES[1:] else None)
    budget = 9_000_000
    longest = longest_context(step, budget)
    assert longest > 0
    assert step.timeline(longest).peak_bytes <= budget < step.timeline(longest + 1).peak_bytes


def test_a_context_of_very_many_chunks_is_a_little_short_at_most() -> None:
    step = HeadStep("fused", 4096, 64, chunk_size=128)
    budget = 30_000_000
    longest = longest_context(step, budget)
    assert -(-longest // 128) > 256  # so that no simulation has decided; D = 64 makes the allowance large
    assert 0.93 * budget < step.timeline(longest).peak_bytes <= budget


def test_no_context_fits_beside_the_sum_of_dw() -> None:
    # A float32 sum of dw, and its copy in bfloat16, beside the weight.
    assert longest_context(HeadStep("fused", 4096, 64), 2_000_000) == 0


def test_the_longest_context_of_chapter_1() -> None:
    assert longest_context(HeadStep("naive", 151_552, 2048), 80 * GIB) == 93_362


@pytest.mark.parametrize("schedule", ["chunked", "checkpointed", "fused", "vocab_tiled"])
@pytest.mark.parametrize("budget", [3_200_000, 20_000_000])
def test_the_chunk_that_fits_makes_the_fewest_chunks(schedule: str, budget: int) -> None:
    step = HeadStep(schedule, 4096, 64)
    tokens = 3000
    sizes = [tokens, 1536, 1024, 768, 640, 512, 384, 256, 128]
    if schedule == "vocab_tiled":
        sizes = [4096, 2048, 1408, 1024, 896, 768, 640, 512, 384, 256, 128]
    fits = [rows for rows in sizes if step.timeline(tokens, rows).peak_bytes <= budget]
    found = fewest_chunks(step, tokens, budget)
    assert found == (fits[0] if fits else found)
    if found is not None:
        assert step.timeline(tokens, found).peak_bytes <= budget


def test_no_chunk_for_what_has_none() -> None:
    assert fewest_chunks(HeadStep("naive", 4096, 64), 100, GIB) is None


@pytest.mark.parametrize("tokens", [1, 5, 128, 129, 1000, 131_072, 10**7])
def test_equal_chunks_fall_from_all_to_one(tokens: int) -> None:
    sizes = list(head_step._equal_chunks(tokens))
    assert sizes[0] == tokens and sizes[-1] == 1
    assert sizes == sorted(set(sizes), reverse=True)
    # Where tiles are small beside a chunk, every number of chunks is there.
    assert all(rows % 128 == 0 for rows in sizes[1:] if rows >= 128)
    counts = {-(-tokens // rows) for rows in sizes}
    assert set(range(1, min(8, tokens // 1024))) <= counts


def test_budget_adds_its_two_keys(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, *SMALL, "--budget", "2MB")["schedules"]
    assert all(list(row)[-2:] == ["max_tokens", "fit_chunk_size"] for row in rows)
    assert [row["fit_chunk_size"] for row in rows if row["schedule"] in ("naive", "fused")] == [None, None]
    assert next(row["max_tokens"] for row in rows if row["schedule"] == "fused") == 0
    assert cli.main(["memory", *SMALL, "--budget", "2MB"]) == 0
    fused = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fused"))
    assert fused.split()[-2:] == ["none", "none"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80GB", 80 * 10**9), ("1.5 MiB", 3 << 19), ("512B", 512), ("1TiB", 1 << 40)],
)
def test_budgets(text: str, size: int) -> None:
    assert command.budget(text) == size


# ---------------------------------------------------------------- the files


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, page, snapshot = (tmp_path / name for name in ("a.png", "a.html", "a.pickle"))
    files = ["--plot", str(plot), "--html", str(page), "--snapshot", str(snapshot)]
    (row,) = run(capsys, *SMALL, "--schedule", "naive", *files)["schedules"]
    assert plot.read_bytes().startswith(b"\x89PNG") and "<script>" in page.read_text(encoding="utf-8")
    assert Timeline.from_snapshot(snapshot).step_peak_bytes == row["step_peak_bytes"]
    assert pickle.loads(snapshot.read_bytes())["device_traces"]


def test_several_schedules_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, page = tmp_path / "a.svg", tmp_path / "a.html"
    run(capsys, *SMALL, "--plot", str(plot), "--html", str(page))
    assert "<svg" in plot.read_text(encoding="utf-8")
    assert all(f"{schedule}, 3,000 tokens" in page.read_text(encoding="utf-8") for schedule in SCHEDULES)


@pytest.mark.parametrize("option", ["--plot", "--html", "--snapshot"])
def test_what_cannot_be_written_is_said(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    for path, message in ((tmp_path / "none" / "a.png", "there is no directory"), (folder, "is a directory")):
        assert cli.main(["memory", *SMALL, "--schedule", "naive", option, str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"memory: {path}: ") and message in err


def test_a_picture_of_an_unknown_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.xyz", "a"):
        with pytest.raises(SystemExit) as exit:
            cli.main(["memory", *SMALL, "--schedule", "naive", "--plot", str(tmp_path / name)])
        assert exit.value.code == 2
        assert "--plot: expected the name of a file that ends in .png, .svg, .pdf, got" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "8"], "say which head: --model ID, or --vocab V and --hidden D"),
        (["--tokens", "8", "--vocab", "9"], "say which head"),
        (["--tokens", "8", "--hidden", "9"], "say which head"),
        (GRAVITY[:2], "the following arguments are required: --tokens"),
        (
            ["--tokens", "8", "--model", "gravity"],
            "argument --model: unknown model 'gravity'. Did you mean gravity-16b",
        ),
        ([*GRAVITY, "--vocab", "9"], "argument --model: it sets the sizes of the head"),
        ([*SMALL[:4], "--tokens", "0"], "argument --tokens: expected an integer ≥ 1, got '0'"),
        ([*SMALL[:4], "--tokens", "9" * 30], "argument --tokens: a step of"),
        (["--vocab", "9" * 18, "--hidden", "9", "--tokens", "9"], "tensors of 2⁵⁸ elements or more"),
        ([*SMALL, "--vocab", "-1"], "argument --vocab: expected an integer ≥ 1, got '-1'"),
        ([*SMALL, "--schedule", "fuse"], "argument --schedule: invalid choice: 'fuse'"),
        ([*SMALL, "--chunk-size", "0"], "argument --chunk-size: expected an integer ≥ 1, got '0'"),
        ([*SMALL, "--schedule", "naive", "--chunk-size", "9"], "argument --chunk-size: naive has no chunks"),
        ([*SMALL[:4], "--tokens", "1000000000"], "argument --chunk-size: 1000000000 tokens in chunks of"),
        ([*SMALL, "--dtype", "int8"], "argument --dtype: unknown dtype 'int8'"),
        ([*SMALL, "--kernel", "tpu"], "argument --kernel: invalid choice: 'tpu'"),
        ([*SMALL, "--budget", "80"], "argument --budget: expected a size such as 80GiB (2³⁰ bytes) or 80GB (10⁹)"),
        ([*SMALL, "--budget", "infGiB"], "argument --budget: expected a size"),
        ([*SMALL, "--budget=-3GiB"], "argument --budget: expected a size"),
        ([*SMALL, "--budget", "80gigs"], "argument --budget: expected a size"),
        ([*SMALL, "--budget", "80TiTiB"], "argument --budget: expected a size"),
        ([*SMALL, "--budget", "1_0GiB"], "argument --budget: expected a size"),
        ([*SMALL, "--html", ""], "argument --html: expected the name of a file to write"),
        ([*GRAVITY, "--budget", "1GiB"], "argument --budget: 1.000 GiB do not hold the weight and its gradient, 1.156"),
        ([*SMALL, "--snapshot", "x"], "argument --snapshot: a snapshot holds one step"),
    ],
)
def test_wrong_usage_is_status_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["memory", *arguments, "--json"])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert message in err


def test_the_names_in_the_help_are_those_that_are_simulated() -> None:
    assert command.SCHEDULES == SCHEDULES and tuple(IDIOMS) == command.IDIOMS
    assert command.KERNELS == operators.KERNELS
    with torch.device("meta"):
        x, w = torch.empty(8, 4, requires_grad=True), torch.empty(16, 4, requires_grad=True)
        for idiom in IDIOMS.values():
            result = idiom(x, w, torch.zeros(8, dtype=torch.int64))
            assert (result[0] if isinstance(result, tuple) else result).ndim == 0
