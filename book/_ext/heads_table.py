"""Sphinx extension: ``{heads} ID …`` is a table of published heads, computed by the library while the book is built.

A row has a model's V / D, its logits for one sequence of 131,072 tokens in bfloat16, and the step peaks that
``flce_ref.explain`` predicts for plain PyTorch and for the fused schedule. The model's name opens the calculator there.
"""

from __future__ import annotations

from functools import cache

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flce_ref import explain
from flce_ref.memory.step_inputs import head_inputs
from flce_ref.models import MODELS, head_sizes

TOKENS = 2**17
HEADER = ("| model | $V / D$ | logits | naive | fused |", "| :--- | ---: | ---: | ---: | ---: |")


@cache
def rows() -> dict[str, str]:
    """The row of every model as MyST, by its id; sizes in GiB."""
    found = {}
    for model in MODELS:
        inputs = head_inputs(TOKENS, model.vocab_size, model.hidden_size)
        head = head_sizes(model, batch=1, seq=TOKENS)
        sizes = [head.logits_bytes]
        sizes += [explain(*inputs, schedule=schedule).step_peak_bytes for schedule in ("naive", "fused")]
        link = f'<a href="calculator.html#model={model.id}&amp;context={TOKENS}">{model.name}</a>'
        cells = [link, f"{head.ratio:.0f}", *(f"{size / 2**30:.1f}" for size in sizes)]
        found[model.id] = f"| {' | '.join(cells)} |"
    return found


class Heads(SphinxDirective):
    """The table; its arguments are ids of ``flce_ref.models``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        ids = self.arguments[0].split()
        if unknown := [id for id in ids if id not in rows()]:
            raise self.error(f"heads: no model {', '.join(unknown)}; known: {', '.join(rows())}")
        found = nodes.container()
        self.state.nested_parse(StringList([*HEADER, *(rows()[id] for id in ids)], source=""), 0, found)
        return found.children


def setup(app: Sphinx) -> dict[str, bool]:
    rows()  # before autodoc puts names in the place of the defaults in the library's signatures
    app.add_directive("heads", Heads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
