"""Sphinx extension: ``{calculator}`` is the interactive calculator, on the one page that asks for it.

Its models are those of ``flce_ref.models``, its GPUs those of ``book/data/gpus.json``; ``calculator/peaks.js`` says the
closed forms of ``flce_ref.schedules.peak`` in JavaScript. All of it stands inside the page: no other page loads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flce_ref.models import MODELS

PARTS = Path(__file__).parent / "calculator"
GPUS = Path(__file__).parents[1] / "data" / "gpus.json"
DTYPES = (("bfloat16", "bf16", 2), ("float16", "fp16", 2), ("float32", "fp32", 4))


def data() -> dict[str, Any]:
    """What the page is told: models, GPUs, dtypes, and the state it starts from."""
    gpus = json.loads(GPUS.read_text(encoding="utf-8"))["gpus"]
    first = MODELS[0]
    return {
        "models": [{"id": m.id, "name": m.name, "v": m.vocab_size, "d": m.hidden_size} for m in MODELS],
        "gpus": [{"id": gpu["name"].replace(" ", "-"), "name": gpu["name"], "mib": gpu["total_mib"]} for gpu in gpus],
        "dtypes": [{"id": id, "name": id, "short": short, "bytes": size} for id, short, size in DTYPES],
        "start": {
            "model": first.id,
            "v": first.vocab_size,
            "d": first.hidden_size,
            "batch": 1,
            "context": 2**17,
            "dtype": "bfloat16",
            "chunk": "",
            "gpu": "H100-80-GB",
            "used": 0,
        },
    }


def markup() -> str:
    """The calculator as a piece of HTML that needs nothing else."""
    page, style, peaks, script = (
        (PARTS / name).read_text(encoding="utf-8")
        for name in ("calculator.html", "calculator.css", "peaks.js", "calculator.js")
    )
    known = json.dumps(data(), ensure_ascii=False).replace("<", "\\u003c")
    return (
        f"<style>\n{style}</style>\n{page}"
        f'<script type="application/json" id="calculator-data">{known}</script>\n'
        f"<script>\n{peaks}{script}</script>\n"
    )


class Calculator(SphinxDirective):
    """The calculator."""

    def run(self) -> list[nodes.Node]:
        for path in (*PARTS.iterdir(), GPUS):
            self.env.note_dependency(str(path))
        return [nodes.raw("", markup(), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("calculator", Calculator)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
