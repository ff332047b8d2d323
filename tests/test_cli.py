"""The command line as a shell sees it: what is printed where, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from flce_ref import __main__ as cli
from flce_ref.commands import common
from flce_ref.models import MODELS

ROW = {  # the contract of ``models --json``
    "id": str,
    "name": str,
    "vocab_size": int,
    "hidden_size": int,
    "source": str,
    "hidden_gb": float,
    "logits_gb": float,
    "ratio": float,
}


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m flce_ref`` with these arguments."""
    return subprocess.run(
        [sys.executable, "-m", "flce_ref", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        timeout=120,
    )


def python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that imports what the commands share as ``common``."""
    script = "from flce_ref.commands import common\n" + script
    return subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=120)


# ---------------------------------------------------------------- models


def test_models_json_holds_the_contract_and_nothing_else() -> None:
    done = shell("models", "--batch", "4", "--seq", "4096", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [{key: type(value) for key, value in row.items()} for row in rows] == [ROW] * len(MODELS)
    assert [row["id"] for row in rows] == [model.id for model in MODELS]


def test_models_json_is_not_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0  # the defaults are the source document's B = 4, S = 4096, bf16
    row = next(row for row in json.loads(capsys.readouterr().out) if row["id"] == "gpt-oss-120b")
    assert row["hidden_gb"] == 4 * 4096 * 2880 * 2 / 1e9
    assert row["logits_gb"] == 4 * 4096 * 201_088 * 2 / 1e9
    assert row["ratio"] == 201_088 / 2880


def test_models_table_holds_the_source_documents_row() -> None:
    done = shell("models", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("gpt-oss-120b"))
    assert row.split()[-5:] == ["201,088", "2,880", "0.09", "6.59", "70×"]
    assert "B = 4, S = 4,096, bfloat16" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "factor"),
    [
        (["--batch", "8"], 2),
        (["--seq", "8_192"], 2),
        (["--dtype", "fp32"], 2),
        (["--dtype", "float64"], 4),
        (["--batch", "1", "--seq", "1048576", "--dtype", "fp16"], 64),
    ],
)
def test_models_sizes_follow_the_arguments(
    arguments: list[str], factor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*extra: str) -> list[dict[str, float]]:
        assert cli.main(["models", "--json", *extra]) == 0
        document: list[dict[str, float]] = json.loads(capsys.readouterr().out)
        return document

    for default, changed in zip(rows(), rows(*arguments), strict=True):
        assert changed["logits_gb"] == pytest.approx(factor * default["logits_gb"])
        assert changed["hidden_gb"] == pytest.approx(factor * default["hidden_gb"])
        assert changed["ratio"] == default["ratio"]


@pytest.mark.parametrize(
    ("columns", "header"),
    [
        (10, ["id", "V", "D", "hidden", "logits", "ratio"]),
        (80, ["id", "name", "V", "D", "hidden", "logits", "ratio"]),
        (300, ["id", "name", "V", "D", "hidden", "logits", "ratio", "source"]),
    ],
)
def test_models_table_fits_the_terminal(
    columns: int, header: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == header
    assert len(lines) == 4 + len(MODELS)
    if columns >= 80:
        assert max(map(len, lines[2:])) <= columns
    ends = {line.index("×") for line in lines[4:]}
    assert len(ends) == 1, "the ratios are not aligned"


def test_models_where_the_terminal_has_only_ascii() -> None:
    done = shell("models", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert " 70?" in done.stdout


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["modles"], "invalid choice: 'modles'"),
        (["models", "--batch", "0"], "argument --batch: expected an integer ≥ 1, got '0'"),
        (["models", "--seq", "9" * 400], "argument --seq: expected an integer up to 10**60, got one of 400 digits"),
        (["verify", "flce_ref:linear_cross_entropy", "--device", "meta"], "cannot be called on meta tensors"),
        (["models", "--batch", "-1"], "argument --batch: expected an integer ≥ 1, got '-1'"),
        (["models", "--seq", "4k", "--json"], "argument --seq: expected an integer ≥ 1, got '4k'"),
        (["models", "--dtype", "int8"], "argument --dtype: unknown dtype 'int8'; accepted: bf16, fp16, fp32, fp64 or"),
        (["models", "--js"], "unrecognized arguments: --js"),
    ],
)
def test_wrong_usage_is_status_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert message in err


def test_wrong_usage_in_a_shell() -> None:
    done = shell("models", "--batch", "0", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument --batch: expected an integer ≥ 1, got '0'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"  {add.__name__.removeprefix('add_')} " in listed for add in cli.COMMANDS)


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_reader_that_leaves_early_sees_no_traceback(json_flag: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flce_ref", "models", *json_flag],
            stdout=writer,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=120,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# ---------------------------------------------------------------- one JSON document on standard output


def test_with_json_all_other_output_goes_to_standard_error() -> None:
    done = python(
        "import ctypes, subprocess, sys\n"
        "print('before')\n"
        "with common.only_json_on_stdout() as print_json:\n"
        "    print('from Python')\n"
        "    ctypes.CDLL(None).printf(b'from C\\n')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"from a child\")'], check=True)\n"
        "    print_json({'answer': 42})\n"
        "print('after')\n"
    )
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == ["from C", "from Python", "from a child"]
    assert done.stdout == 'before\n{\n  "answer": 42\n}\nafter\n'


def test_a_command_that_fails_before_its_document_prints_none() -> None:
    done = python("with common.only_json_on_stdout() as print_json:\n    raise RuntimeError('no luck')\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no luck" in done.stderr


def test_a_second_document_is_refused() -> None:
    with common.only_json_on_stdout() as print_json:
        print_json([])
        with pytest.raises(RuntimeError, match="one JSON document"):
            print_json([])


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"), common.only_json_on_stdout() as print_json:
        print_json(float("nan"))


# ---------------------------------------------------------------- the parts that commands share


def test_table_aligns_and_drops_the_expendable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"what": ["a", "bcd"], "n": ["1", "1000"], "note": ["x" * 20, ""]}
    monkeypatch.setenv("COLUMNS", "80")
    wide = common.table(columns, left=("what", "note"), expendable=("note",))
    assert wide.splitlines() == [
        "what     n  note",
        "----  ----  " + "-" * 20,
        "a        1  " + "x" * 20,
        "bcd   1000",
    ]
    monkeypatch.setenv("COLUMNS", "20")
    narrow = common.table(columns, left=("what", "note"), expendable=("note",))
    assert narrow.splitlines() == ["what     n", "----  ----", "a        1", "bcd   1000"]


@pytest.mark.parametrize("text", ["bf16", "fp16", "fp32", "fp64", "bfloat16", "float16", "float32", "float64"])
def test_dtype_names(text: str) -> None:
    dtype = common.dtype(text)
    assert str(dtype).removeprefix("torch.") == common.DTYPES.get(text, text)


@pytest.mark.parametrize("text", ["", "float", "int32", "Tensor", "float8_e4m3fn"])
def test_other_attributes_of_torch_are_no_dtypes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="unknown dtype"):
        common.dtype(text)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_said_in_one_line(options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "flce_ref", "models", *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "standard output can't be written" in done.stderr
    assert "Traceback" not in done.stderr
