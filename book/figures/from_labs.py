"""What the chapters take out of labs: ``python book/figures/from_labs.py [notebooks/NN_lab.ipynb …]``.

A chapter shows the figure that its lab draws and quotes the numbers that its lab measures, so the two can't disagree.
The lab's code cells are run in order. What a cell tagged ``figure:NAME`` has drawn becomes ``NAME.svg`` beside this
file, the cell's alternative text ``NAME.txt``, for ``{drawn} NAME``. Timelines that the lab's variable ``interactive``
has under NAME become ``NAME.timelines.json``; its variable ``for_the_chapter`` becomes ``book/data/labs/LAB.json``, for
``{value}``. Without arguments, every lab that has any of these is run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
from make_figures import write_timelines

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).resolve().parent
NUMBERS = FIGURES.parent / "data" / "labs"
NOTEBOOKS = FIGURES.parents[1] / "notebooks"
TAG, VARIABLE = "figure:", "for_the_chapter"


def figure_names(cell: nbformat.NotebookNode) -> list[str]:
    """The figures that the tags of a cell name."""
    return [tag.removeprefix(TAG) for tag in cell.metadata.get("tags", []) if tag.startswith(TAG)]


def has_something(path: Path) -> bool:
    """Whether a chapter takes anything from the lab at ``path``."""
    cells = nbformat.read(path, as_version=4).cells
    return any(figure_names(cell) or f"{VARIABLE} =" in cell.source for cell in cells)


def rounded(value: Any) -> Any:
    """``value`` with its floats cut to six digits: the last ones differ from run to run, and no chapter quotes them."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def collect(path: Path) -> None:
    """Run the lab at ``path``; write its figures, their texts and its numbers."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(path.parent)
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        exec(compile(cell.source, path.name, "exec"), namespace)
        for name in figure_names(cell):
            # No date and, by the style's hash salt, no random ids: an unchanged figure is an unchanged file.
            plt.savefig(FIGURES / f"{name}.svg", metadata={"Date": None, "Creator": None})
            (FIGURES / f"{name}.txt").write_text(cell.metadata["mystnb"]["image"]["alt"] + "\n", encoding="utf-8")
        plt.close("all")
    for name, timelines in namespace.get("interactive", {}).items():
        write_timelines(name, timelines)
    if VARIABLE in namespace:
        NUMBERS.mkdir(parents=True, exist_ok=True)
        text = json.dumps(rounded(namespace[VARIABLE]), ensure_ascii=False, indent=1)
        (NUMBERS / f"{path.stem}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for lab in [Path(name).resolve() for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        if has_something(lab):
            print(f"running {lab.name}", file=sys.stderr, flush=True)
            collect(lab)
