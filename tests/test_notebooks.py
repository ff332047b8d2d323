"""Every committed lab was executed from top to bottom, without an error, and can be shown to a reader as it is.

nbval compares outputs but passes a notebook that was never executed; this catches what it lets through.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

LABS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:home|root|Users|tmp|private|opt|usr|var|mnt|srv|work)/[\w.-]+|\b[A-Z]:\\\w")
IMAGES = {"image/png", "image/jpeg", "image/svg+xml"}
NOT_TEXT = {"image/png", "image/jpeg"}  # base64, where a slash means nothing


def faults(notebook: NotebookNode) -> list[str]:
    """What is wrong with an executed lab, one sentence each."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not cells:
        return ["has no code cell"]
    found = []
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        found.append(f"cells were not executed once each, in order: execution counts {counts}")
    for number, cell in enumerate(cells, start=1):
        found += [f"code cell {number} {fault}" for fault in cell_faults(cell)]
    if not re.search(r"^\s*assert\b", cells[-1].source, re.MULTILINE):
        found.append("does not end in a cell with assertions")
    return found


def cell_faults(cell: NotebookNode) -> Iterator[str]:
    if match := MACHINE_PATH.search(cell.source):
        yield f"names a path of the machine it was written on: {match.group()}"
    if cell.source.rstrip().endswith(";"):
        yield "ends in a semicolon, which nbval can't compare"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"raised {output.ename}"
        if output.get("name") == "stderr":
            yield f"wrote to stderr: {output.text[:80]!r}"
        for text in output_texts(output):
            if match := MACHINE_PATH.search(text):
                yield f"shows a path of the machine it ran on: {match.group()}"
        if IMAGES & set(output.get("data", {})) and not cell.metadata.get("mystnb", {}).get("image", {}).get("alt"):
            yield "shows an image without alternative text (cell metadata mystnb.image.alt)"


def output_texts(output: NotebookNode) -> Iterator[str]:
    yield output.get("text", "")
    yield from output.get("traceback", [])
    yield from (str(data) for mime, data in output.get("data", {}).items() if mime not in NOT_TEXT)


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_lab_was_executed_in_order_and_is_fit_to_show(path: Path) -> None:
    assert faults(nbformat.read(path, as_version=4)) == []


def good_lab() -> NotebookNode:
    figure = new_output("display_data", data={"image/png": "aaaa/tmp/aaaa", "text/plain": "<Figure>"})
    alt = {"mystnb": {"image": {"alt": "a line"}}}
    return new_notebook(
        cells=[
            new_code_cell("print(1)", execution_count=1, outputs=[new_output("stream", name="stdout", text="1\n")]),
            new_code_cell("plot()", execution_count=2, outputs=[figure], metadata=alt),
            new_code_cell("assert True", execution_count=3),
        ]
    )


def test_a_good_lab_has_no_faults() -> None:
    assert faults(good_lab()) == []


BREAKAGES = {
    "never executed": (lambda cells: [cell.update(execution_count=None) for cell in cells], "execution counts"),
    "executed out of order": (lambda cells: cells[0].update(execution_count=4), "execution counts"),
    "error kept": (
        lambda cells: cells[0].outputs.append(new_output("error", ename="ValueError", evalue="", traceback=[])),
        "raised ValueError",
    ),
    "warning on stderr": (lambda cells: cells[0].outputs[0].update(name="stderr"), "stderr"),
    "path of the machine": (lambda cells: cells[0].outputs[0].update(text="see /tmp/ipykernel_1/2.py"), "path"),
    "path in a traceback": (
        lambda cells: cells[0].outputs.append(new_output("error", ename="E", evalue="", traceback=["/home/me/x.py"])),
        "path",
    ),
    "image without a text": (lambda cells: cells[1].metadata.clear(), "alternative text"),
    "path in the source": (lambda cells: cells[0].update(source="open('/home/me/x.json')"), "written on"),
    "semicolon": (lambda cells: cells[1].update(source="plot();"), "semicolon"),
    "no assertion at the end": (lambda cells: cells[-1].update(source="done = True"), "assertions"),
    "no code": (lambda cells: [cell.update(cell_type="markdown") for cell in cells], "no code cell"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_each_fault_is_found(name: str) -> None:
    breakage, words = BREAKAGES[name]
    lab = copy.deepcopy(good_lab())
    breakage(lab.cells)
    assert any(words in fault for fault in faults(lab))
