"""Sphinx extension: numbers and pictures that come out of data files, so that none is typed into the prose.

``{value}`h200/peers-2026-12-01.json | name=chunked8, N=8192, V=151552, ign=0 / ms | .1f` `` prints one number. The
first part is a JSON file below ``book/data``; the second is a path into it, whose steps are keys or, for a list of
objects, ``key=value`` conditions that select exactly one; the third is a format specification, followed by a unit of
``UNITS`` to convert a number of bytes. A step can be left out: ``file | key``.

``{drawn} NAME`` is a figure of ``book/figures/NAME.svg`` whose alternative text is ``book/figures/NAME.txt``: both are
written by ``book/figures/make_figures.py``, from the same numbers. With ``:interactive:`` the viewer follows, folded,
on the timelines of ``book/figures/NAME.timelines.json``.

Whatever cannot be resolved is a warning, and so an error under ``-W``.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.parsers.rst.states import Inliner
from sphinx.application import Sphinx
from sphinx.directives.patches import Figure

from flce_ref.memory.viewer import frame_of

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9, "percent": 0.01, "k": 1000}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
BOOK = Path(__file__).parents[1]


def look_up(document: Any, path: str) -> Any:
    """Follow ``path`` ("key / name=x, N=8 / key") through nested objects and lists.

    Raises:
        LookupError: a key is missing, or not exactly one object meets the conditions.
    """
    for step in (part.strip() for part in path.split("/")):
        if isinstance(document, list) and "=" in step:
            # A comma may also stand inside a value: only one before the next key separates.
            conditions = [condition.split("=", 1) for condition in re.split(r",(?=\s*\w+=)", step)]
            wanted = {key.strip(): _parsed(value) for key, value in conditions}
            found = [row for row in document if all(row.get(key) == value for key, value in wanted.items())]
            if len(found) != 1:
                raise LookupError(f"{len(found)} rows meet {step!r}, expected one")
            document = found[0]
        elif isinstance(document, list):
            document = document[int(step)]
        elif isinstance(document, dict) and step in document:
            document = document[step]
        else:
            raise LookupError(f"nothing under {step!r}")
    return document


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value.strip()


def formatted(value: Any, specification: str) -> str:
    """``value`` under ``".2f GiB"``: a format specification and, separated by a space, a unit to convert bytes to."""
    pattern, _, unit = specification.strip().partition(" ")
    if unit:
        value = value / UNITS[unit]
    text = format(value, pattern)
    mantissa, e, exponent = text.partition("e")
    if e and isinstance(value, float):
        return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return text.replace("-", "\N{MINUS SIGN}") if isinstance(value, (int, float)) else text


def value_role(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Inliner,
    options: dict[str, Any] | None = None,
    content: list[str] | None = None,
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    file, _, rest = text.partition("|")
    path, _, specification = rest.partition("|")
    source = BOOK / "data" / file.strip()
    try:
        shown = formatted(look_up(json.loads(source.read_text(encoding="utf-8")), path.strip()), specification)
    except (OSError, LookupError, ValueError, TypeError) as error:
        message = inliner.reporter.error(f"value: {text!r}: {error}", line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    inliner.document.settings.env.note_dependency(str(source))
    return [nodes.inline(rawtext, shown, classes=["value"])], []


class Drawn(Figure):
    """A figure by its name alone; its alternative text and its interactive page lie beside the picture."""

    option_spec: ClassVar[dict[str, Any]] = {**Figure.option_spec, "interactive": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0].strip()
        picture, text = (BOOK / "figures" / f"{name}{suffix}" for suffix in (".svg", ".txt"))
        if not picture.is_file() or not text.is_file():
            raise self.error(
                f"drawn: {name!r} is not a figure of book/figures; make_figures.py writes {name}.svg and .txt"
            )
        self.arguments[0] = f"figures/{name}.svg"
        self.options["alt"] = " ".join(text.read_text(encoding="utf-8").split())
        self.options.setdefault("width", "100%")
        summary = self.options.pop("interactive", None)
        self.state.document.settings.env.note_dependency(str(text))
        found = super().run()
        return found if summary is None else [*found, self._interactive(name, summary)]

    def _interactive(self, name: str, summary: str) -> nodes.Node:
        stored = BOOK / "figures" / f"{name}.timelines.json"
        if not stored.is_file():
            raise self.error(f"drawn: {name!r} has no timelines; make_figures.py writes {stored.name}")
        self.state.document.settings.env.note_dependency(str(stored))
        frame = frame_of(json.loads(stored.read_text(encoding="utf-8")))
        markup = f'<details class="interactive"><summary>{html.escape(summary)}</summary>\n{frame}\n</details>'
        return nodes.raw("", markup, format="html")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("value", value_role)
    app.add_directive("drawn", Drawn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
