"""Sphinx extension: formulas are typeset while the book is built, so that a page needs no script for them.

A reader gets boxes that have their final size at once: nothing moves, nothing is computed on a phone. The work is
MathJax's, out of the PyPI package ``sphinx-mathjax-offline`` and never committed; QuickJS runs it. Beside the boxes
stands MathML, hidden from sight, for readers of the screen. A formula that MathJax can't read is a warning, and so an
error under ``-W``.
"""

from __future__ import annotations

import importlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)

# The parts of MathJax, in the order in which they build on each other, as files and as it calls them itself.
PARTS = {
    "core": "core",
    "adaptors/liteDOM": "adaptors/liteDOM",
    "input/tex": "input/tex",
    "output/chtml": "output/chtml",
    "output/chtml/fonts/tex": "output/chtml/fonts/tex.js",
    "a11y/assistive-mml": "a11y/assistive-mml",
}
# ``scale``: MathJax's letters are smaller than those of the text around them. ``adaptiveCSS``: with all rules, as pages
# that are not built anew use some, too; light_pages drops those that no page uses. Unknown macros are errors.
SETTINGS: dict[str, Any] = {
    "loader": {"load": []},
    "chtml": {"adaptiveCSS": False, "fontURL": "fonts", "scale": 1.2},
    "tex": {"packages": {"[-]": ["noundefined"]}},
}
SHEET = "mathjax/mathjax.css"
#: An inline formula of more symbols than this is wider than half the column of a phone: flce.css lets it break.
LONG = 22


def mathjax() -> Path:
    package = importlib.import_module("sphinx-mathjax-offline")  # its name is no identifier
    return Path(str(package.__file__)).parent / "static" / "mathjax"


class Typesetter:
    """MathJax in an engine of its own."""

    def __init__(self) -> None:
        import quickjs

        scripts = {name: (mathjax() / f"{name}.js").read_text(encoding="utf-8") for name in ("startup", *PARTS)}
        self._engine = quickjs.Context()
        self._engine.eval(
            f"var global = globalThis, MathJax = {json.dumps(SETTINGS)}; MathJax.startup = {{ready() {{}}}}"
        )
        self._engine.eval(scripts.pop("startup"))
        self._engine.eval(f"MathJax.loader.preLoad({json.dumps([*PARTS.values()])[1:-1]})")
        for script in scripts.values():
            self._engine.eval(script)
        self._engine.eval("MathJax.startup.defaultReady(); const dom = MathJax.startup.adaptor")

    def __call__(self, tex: str, display: bool) -> str:
        """The formula as HTML. Raises ValueError with MathJax's words if it can't be read."""
        metrics = json.dumps({"display": display, "em": 16, "ex": 8, "scale": 1})
        html = self._text(f"dom.outerHTML(MathJax.tex2chtml({json.dumps(tex)}, {metrics}))")
        if "data-mjx-error" in html:
            raise ValueError(html.split('data-mjx-error="')[1].split('"')[0])
        if not display and html.count("<mjx-c ") > LONG:
            html = html.replace('class="MathJax"', 'class="MathJax long"', 1)
        return html

    def style_sheet(self) -> str:
        return self._text("dom.textContent(MathJax.chtmlStylesheet())")

    def _text(self, expression: str) -> str:
        text = json.loads(self._engine.eval(f"JSON.stringify({expression})"))
        assert isinstance(text, str)
        return text


typesetter = cache(Typesetter)


def typeset(node: nodes.Node, tex: str, display: bool) -> str:
    try:
        return typesetter()(tex, display)
    except ValueError as error:
        logger.warning("formula %s: %s", tex, error, location=node)
        return ""


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(self.starttag(node, "span", "", CLASS="math notranslate nohighlight"))
    self.body.append(typeset(node, node.astext(), display=False) + "</span>")
    raise nodes.SkipNode


def visit_displaymath(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, _("Link to this equation"))
        self.body.append("</span>")
    tex = node.astext() if node["nowrap"] else aligned(node.astext())
    self.body.append(typeset(node, tex, display=True) + "</div>\n")
    raise nodes.SkipNode


def aligned(tex: str) -> str:
    """Equations apart by an empty line stand below each other, and so do the lines of one, as Sphinx has it."""
    parts = [
        rf"\begin{{split}}{part}\end{{split}}" if r"\\" in part else part for part in tex.split("\n\n") if part.strip()
    ]
    return parts[0] if len(parts) == 1 else r"\begin{aligned}" + r"\\".join(parts) + r"\end{aligned}"


def write_sheet(app: Sphinx) -> None:
    if app.builder.format != "html":
        return
    sheet = Path(app.outdir) / "_static" / SHEET
    shutil.copytree(mathjax() / "output/chtml/fonts/woff-v2", sheet.parent / "fonts", dirs_exist_ok=True)
    sheet.write_text(typesetter().style_sheet(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("typeset", (visit_math, None), (visit_displaymath, None))
    app.config.html_math_renderer = "typeset"
    app.add_css_file(SHEET)
    app.connect("builder-inited", write_sheet)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
