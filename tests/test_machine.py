"""What the labs choose on machines that are not here: a T4, an A100, one whose memory is taken, none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from flce_ref.machine import GIB, Machine, this_machine
from flce_ref.memory import head_inputs, simulate

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))


def pretend(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], free: float, cached: float = 0.0
) -> Machine:
    """The machine that the labs find when torch says that there is such a GPU with `free` GiB, `cached` by PyTorch."""
    for function, value in {
        "is_available": True,
        "get_device_name": name,
        "get_device_capability": capability,
        "mem_get_info": (int((free - cached) * GIB), 80 * GIB),
        "memory_reserved": int((cached + 1) * GIB),
        "memory_allocated": GIB,
        "is_bf16_supported": True,  # as a T4 says
    }.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value, **__: value)
    return this_machine()


def per_token(gib: float) -> Callable[[int], int]:
    return lambda n: int(n * gib * GIB)


@pytest.mark.parametrize(
    ("name", "capability", "half"),
    [("Tesla T4", (7, 5), torch.float16), ("NVIDIA A100", (8, 0), torch.bfloat16), ("H100", (9, 0), torch.bfloat16)],
)
def test_the_half_precision_dtype_is_one_that_is_computed_in(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], half: torch.dtype
) -> None:
    machine = pretend(monkeypatch, name, capability, 14.0)
    assert (machine.device, machine.name, machine.half) == ("cuda", name, half)


@pytest.mark.parametrize(
    ("free", "tokens", "said"),
    [
        (79.0, 8192, "8,192 tokens in bfloat16 take 8.00 GiB; 79.00 are free on A100."),
        (8.0, 4096, "4,096 tokens in bfloat16 take 4.00 GiB; 8.00 are free on A100."),
        (0.52, 256, "256 tokens in bfloat16 take 0.25 GiB; 0.52 are free on A100."),
        (0.5, 0, "Left out: 256 tokens take 0.25 GiB, 0.50 are free on A100."),
    ],
)
def test_the_size_follows_the_free_memory_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: float, tokens: int, said: str
) -> None:
    machine = pretend(monkeypatch, "A100", (8, 0), free)
    assert machine.tokens(8192, per_token(1 / 1024)) == tokens
    assert capsys.readouterr().out.strip() == said


def test_memory_that_pytorch_holds_without_using_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = pretend(monkeypatch, "A100", (8, 0), free=10.0, cached=9.0)
    assert machine.free_bytes() == 10 * GIB


def test_without_a_gpu_nothing_is_run_and_the_price_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = this_machine()
    assert (machine.device, machine.tokens(8192, per_token(1 / 1024))) == ("cpu", 0)
    assert capsys.readouterr().out == "No GPU here. On one, 8,192 tokens would take 8.00 GiB.\n"


def test_a_t4_has_room_for_the_naive_step_of_the_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = pretend(monkeypatch, "Tesla T4", (7, 5), 14.56)

    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ w.T, y)

    def needs(n: int) -> int:
        return simulate(loss, *head_inputs(n, 151_552, 2048, machine.half)).peak_bytes

    assert machine.tokens(16384, needs) == 8192


def test_a_lab_runs_as_if_on_another_machine(tmp_path: Path) -> None:
    from run_pretended import MACHINES, run

    source = (
        "from flce_ref.machine import this_machine\n"
        "machine = this_machine()\n"
        "if machine.tokens(2**20, lambda n: n * 2**20):\n"
        "    raise RuntimeError('there is no such GPU')\n"
        "assert machine.device == 'cpu'"
    )
    path = tmp_path / "lab.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), path)
    found = run(path, MACHINES["T4"])
    assert found["ran"] and found["chosen"] == [{"tokens": 2**13, "of": 2**20, "GiB": 8.0, "dtype": "float16"}]
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), path)
    assert run(path, None) == {"ran": False, "error": "ZeroDivisionError: division by zero"}


def test_what_the_labs_chose_on_pretended_machines_fits_them() -> None:
    document = json.loads((ROOT / "book/data/labs/pretended.json").read_text(encoding="utf-8"))
    assert "2.8.0" in document["runs"]
    for one in document["runs"].values():
        assert set(one["labs"]) == {"none", *document["machines"]}
        assert all(found["ran"] for by_lab in one["labs"].values() for found in by_lab.values())
        for name, (_, capability, free) in document["machines"].items():
            chosen = [choice for found in one["labs"][name].values() for choice in found["chosen"]]
            assert len(chosen) >= 4
            assert {choice["dtype"] for choice in chosen} == {"bfloat16" if capability[0] >= 8 else "float16"}
            assert all(0 < choice["tokens"] <= choice["of"] and choice["GiB"] < free for choice in chosen)
