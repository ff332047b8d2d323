"""Sphinx extension: where each data file came from, read from the file itself.

``{measured} h200`` lists every file of ``book/data/h200`` with what it holds, and the device, day, versions and command
it was measured with; ``{measured}`` alone lists the files of ``book/data`` itself that say so. A JSON file says it in
its own keys, at the top or under ``provenance``: ``device`` or ``gpu``, ``measured`` or ``date``, ``versions``,
``command``, and ``what``, ``about`` or ``method``. ``NAME_more.json`` belongs to ``NAME.json``. Any other file is
named, with a sentence, under ``files`` in the folder's ``provenance.json``.

A file that none of this covers is an error: a number without its origin does not get into the book.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DATA = Path(__file__).parents[1] / "data"
SESSION = "provenance.json"


def origin(path: Path) -> tuple[str, str]:
    """What is in the file and the command that made it; and when, where and with what. Both as MyST text.

    Raises:
        LookupError: neither the file nor its folder says so, or not all of it.
    """
    own = _read(path)
    session = _read(path.with_name(SESSION)) if path.with_name(SESSION).is_file() else {}
    if path.name in session.get("files", {}):
        return session["files"][path.name], _circumstances(session)
    about = next((str(own[key]) for key in ("what", "about", "method") if key in own), "")
    owners = [other for other in path.parent.glob("*.json") if path.stem.startswith(f"{other.stem}_")]
    if not about and len(owners) == 1:
        return f"Belongs to {owners[0].name}.", origin(owners[0])[1]
    if not about or "command" not in own:
        missing = "command" if about else "what, about or method"
        raise LookupError(f"{path.name}: it has no {missing} of its own, and {SESSION} doesn't name it under files")
    return f"{about.rstrip('.')}. Made by `{own['command']}`.", _circumstances(own)


def _read(path: Path) -> dict[str, Any]:
    """The file's own provenance; nothing where it has none."""
    if path.suffix != ".json":
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        return {}
    nested = document.get("provenance")
    merged = document | nested if isinstance(nested, dict) else document
    return merged if {"measured", "date"} & merged.keys() else {}


def _circumstances(own: dict[str, Any]) -> str:
    gpu = own.get("gpu")
    gpu = gpu if isinstance(gpu, dict) else {"name": gpu}
    device = own.get("device") or gpu["name"] or own.get("system")
    driver = own.get("driver") or gpu.get("driver")
    day = str(own.get("measured") or own["date"])[:10]
    versions = {name: own[name] for name in ("python", "torch", "cuda") if own.get(name)} | own.get("versions", {})
    if not device or "torch" not in versions:
        raise LookupError(f"the provenance of {day} lacks the device or the version of torch")
    parts = [f"{device}", *([f"driver {driver}"] if driver else []), *(f"{name} {v}" for name, v in versions.items())]
    return f"{day}, {', '.join(parts)}"


class Measured(SphinxDirective):
    """Each data file, linked, and its origin; files of the same day, device and versions together."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        source = DATA.joinpath(*self.arguments)
        everything = bool(self.arguments)
        runs: dict[str, list[str]] = {}
        for path in sorted(source.iterdir()):
            if path.name != SESSION and (everything or (path.is_file() and _read(path))):
                self.env.note_dependency(str(path))
                try:
                    about, circumstances = origin(path)
                except LookupError as error:
                    raise self.error(f"measured: {error}") from error
                entry = [f"[{path.name}](data/{path.relative_to(DATA).as_posix()})", f": {about}", ""]
                runs.setdefault(circumstances, []).extend(entry)
        lines = [line for run, entries in sorted(runs.items()) for line in (f"**{run}**", "", *entries)]
        found = nodes.container()
        self.state.nested_parse(StringList(lines, source=str(source)), 0, found)
        return found.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
