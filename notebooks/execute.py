"""Execute the labs in place and leave nothing in the files but sources and outputs: ``make labs``.

Two runs of the same lab give the same file, so a diff shows what changed in substance: no time stamps, no name of the
kernel or of the machine, streams joined as nbval joins them, cell ids counted from the top.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_CELL_METADATA = ("tags", "mystnb")  # what the book reads: hidden input, captions, alternative texts
TIMEOUT_SECONDS = 300


def execute(path: Path) -> None:
    """Run every cell of the notebook at ``path`` in its own folder and write it back; a failing cell raises."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    normalise(notebook)
    nbformat.write(notebook, path)


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Drop from ``notebook`` what depends on when, where and with which editor it was executed."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat_minor = 5
    for number, cell in enumerate(notebook.cells, start=1):
        cell["id"] = f"cell-{number}"
        kept = {key: cell.metadata[key] for key in KEPT_CELL_METADATA if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)


def main(names: list[str]) -> None:
    paths = [Path(name) for name in names] or sorted(Path(__file__).parent.glob("*.ipynb"))
    for path in paths:
        print(f"executing {path.name}", flush=True)
        execute(path)


if __name__ == "__main__":
    main(sys.argv[1:])
