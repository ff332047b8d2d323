"""What a student hands in: a Python file, or a notebook of which the definitions are taken.

A notebook's code cells are put one under the other; lines for IPython (``%…``, ``!…``, cells of ``%%…``) are taken
out. Of what is left only that is run which the assignment's functions need: definitions, imports and assignments that
they mention, in turn or directly. Experiments, plots and self-checks in other cells are not run, so they can't fail.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Source:
    """The text that is run, and what was done to get it."""

    text: str
    remarks: tuple[str, ...] = ()
    cells: tuple[int, ...] = ()  # the first line of each code cell of a notebook

    def place(self, line: int) -> str:
        """Where the student finds a line of the text."""
        if not self.cells:
            return f"line {line}"
        cell = sum(first <= line for first in self.cells)
        return f"code cell {cell}, line {line - self.cells[cell - 1] + 1}" if cell else f"line {line}"


def read(path: Path, functions: tuple[str, ...]) -> Source:
    """The source of a submission that is to define `functions`.

    Raises:
        ValueError: it is neither a .py nor an .ipynb file, can't be read, or is no notebook; the message can be shown.
    """
    if path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"FILE must be a .py or .ipynb file, got {path.name!r}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"FILE can't be read: {error}") from None
    if len(raw) > MOST_BYTES:
        raise ValueError(f"FILE must be smaller than {MOST_BYTES // 2**20} MiB, got {len(raw) / 2**20:.1f} MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"FILE must be UTF-8 text: {error}") from None
    return Source(text) if path.suffix == ".py" else from_notebook(text, functions)


def from_notebook(text: str, functions: tuple[str, ...]) -> Source:
    """The definitions of a notebook.

    Raises:
        ValueError: the text is no notebook.
    """
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"FILE is not a notebook: {type(error).__name__}: {error}") from None
    remarks: list[str] = []
    kept: list[str] = []
    firsts: list[int] = []
    for number, source in enumerate(sources, start=1):
        lines, removed = without_magics(source)
        remarks += [f"Code cell {number}: not run, being for IPython: {line}" for line in removed]
        try:
            ast.parse("\n".join(lines))
        except (SyntaxError, ValueError) as error:
            remarks.append(f"Code cell {number} was left out, it is not Python: {error}")
            lines = []
        firsts.append(len(kept) + 1)
        kept += [*lines, ""]
    return Source(definitions("\n".join(kept) + "\n", functions), tuple(remarks), tuple(firsts))


def without_magics(source: str) -> tuple[list[str], list[str]]:
    """The lines of a cell with those for IPython emptied, and those."""
    lines = source.splitlines()
    if source.lstrip().startswith("%%"):
        return [], [next(line for line in lines if line.strip())]
    removed = [line for line in lines if line.lstrip().startswith(("%", "!")) and not _continues(line, lines)]
    return ["" if line in removed else line for line in lines], removed


def _continues(line: str, lines: list[str]) -> bool:
    """Whether the line, which starts with % or !, is part of Python: then the cell as it is can be parsed."""
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return False
    return True


def definitions(text: str, functions: tuple[str, ...]) -> str:
    """The text with every top-level statement emptied that the functions don't need; lines keep their numbers."""
    statements = ast.parse(text).body
    needed, kept = set(functions), set[int]()
    while True:
        found = {i for i, one in enumerate(statements) if i not in kept and needed & set(bound(one))}
        if not found:
            break
        kept |= found
        needed |= {node.id for i in found for node in ast.walk(statements[i]) if isinstance(node, ast.Name)}
    lines = text.splitlines()
    alive = {line for i in kept for line in _lines(statements[i])}
    return "\n".join(line if number in alive else "" for number, line in enumerate(lines, start=1)) + "\n"


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement defines; for one with a body (try, if, with) those of its body."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.If | ast.Try):
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from bound(child)
            elif isinstance(child, ast.ExceptHandler):
                yield from (name for one in child.body for name in bound(one))


def _lines(statement: ast.stmt) -> range:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return range(first, (statement.end_lineno or first) + 1)


def mentions(source: Source, names: Mapping[str, str], missing: tuple[str, ...] = ()) -> list[str]:
    """Those of `names` that the source uses, and those of `missing` that it doesn't; nothing if it can't be parsed."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    used: dict[str, int] = {}
    for node in ast.walk(tree):
        for name in _names(node):
            used.setdefault(name, getattr(node, "lineno", 0))
    found = [f"{source.place(used[name])} mentions {name}: {why}" for name, why in names.items() if name in used]
    return found + [f"nothing mentions {name}" for name in missing if name not in used]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield from alias.name.split(".")
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        yield node.value
