"""The figures of a lab as vectors, for print: the lab is run again, and its figures are asked for as SVG."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TIMEOUT_SECONDS = 300
PICTURE = re.compile(r'\bsrc="[^"]*\.png"')


def vector_figures(lab: Path) -> list[str]:
    """The SVG texts of what the cells of the notebook at ``lab`` draw, in order; the file is left as it is."""
    notebook = nbformat.read(lab, as_version=4)
    NotebookClient(
        notebook,
        timeout=TIMEOUT_SECONDS,
        kernel_name="python3",
        extra_arguments=["--InlineBackend.figure_formats=svg"],
        resources={"metadata": {"path": str(lab.parent)}},
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]


def with_vectors(page: str, figures: Sequence[str]) -> str:
    """The lab's page with its pictures replaced, one by one.

    Raises:
        ValueError: the page has more or fewer pictures than there are figures.
    """
    if (count := len(PICTURE.findall(page))) != len(figures):
        raise ValueError(f"the page has {count} pictures, the lab draws {len(figures)}")
    vectors = iter(base64.b64encode(figure.encode()).decode() for figure in figures)
    return PICTURE.sub(lambda _: f'src="data:image/svg+xml;base64,{next(vectors)}"', page)
