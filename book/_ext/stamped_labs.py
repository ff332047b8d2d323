"""Sphinx extension: every lab opens on Colab from its page, with the library in the version of the page.

Under the title of a lab, or of an assignment, stands a button that opens the stamped notebook on Colab, and the lab
that a page offers for download is stamped too (see ``notebooks/stamp.py``). Where the build doesn't know which GitHub
repository it is of, there is no button, and the download is the notebook as it is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))

import stamp  # noqa: E402


def notebook_of(docname: str) -> str:
    """The notebook that is run from a page: the lab itself, or an assignment's starter from its handout."""
    if handout := re.fullmatch(r"book/course-(\d)-(\w+)", docname):
        return f"course/starters/{handout[1]}_{handout[2]}.ipynb"
    return f"{docname}.ipynb"


def add_button(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Insert the button after the title of a lab or of a handout."""
    where, path = stamp.origin(pages=app.config.html_baseurl), notebook_of(docname)
    if where is None or path not in stamp.paths() or app.builder.format != "html":
        return
    title = next(doctree.findall(nodes.title))
    classes = ["sd-btn", "sd-btn-outline-primary"]
    button = nodes.reference("", "Open on Colab", refuri=where.colab(path), internal=False, classes=classes)
    title.parent.insert(title.parent.index(title) + 1, nodes.paragraph("", "", button))


def stamp_downloads(app: Sphinx, exception: Exception | None) -> None:
    """Replace the notebooks that pages offer for download by stamped ones."""
    where = stamp.origin(pages=app.config.html_baseurl)
    if exception is not None or where is None or app.builder.format != "html":
        return
    for path in stamp.paths():
        published = Path(app.outdir, "_sources", path)
        if published.is_file():
            notebook = json.loads((ROOT / path).read_text(encoding="utf-8"))
            text = json.dumps(stamp.stamped(notebook, path, where), indent=1, ensure_ascii=False)
            published.write_text(text + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", add_button)
    app.connect("build-finished", stamp_downloads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
