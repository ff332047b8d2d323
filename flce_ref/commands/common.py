"""What the commands share: how they are declared, types of arguments, tables, and one JSON document on stdout."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Subparsers = Any  # argparse names the type of add_subparsers()'s result only privately

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
PICTURES = (".png", ".svg", ".pdf")


def add_command(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], summary: str, *, json: bool = True
) -> argparse.ArgumentParser:
    """Add the parser of a command that ``run(args)`` carries out; ``args.parser`` is that parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser)
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser


def checked(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Make ``convert`` an argparse type whose ValueError is shown (argparse would say "invalid value" instead)."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


@checked
def positive_int(text: str) -> int:
    """Read an integer from 1 to 10¹⁵; ``1_000_000`` is accepted as Python accepts it."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"expected an integer ≥ 1, got {text!r}")
    if value > 10**60:  # products of a few such numbers are still floats
        raise ValueError(f"expected an integer up to 10**60, got one of {len(text)} digits")
    return value


@checked
def output(text: str) -> str:
    """Read the name of a file to write."""
    if not text:
        raise ValueError("expected the name of a file to write, got ''")
    return text


@checked
def picture(text: str) -> str:
    """Read the name of a picture to write; its ending decides the format."""
    if not text.lower().endswith(PICTURES):
        raise ValueError(f"expected the name of a file that ends in {', '.join(PICTURES)}, got {text!r}")
    return text


@checked
def dtype(text: str) -> torch.dtype:
    """Read ``bf16`` or ``bfloat16`` (and so on, see `DTYPES`) as the torch dtype."""
    import torch

    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise ValueError(f"unknown dtype {text!r}; accepted: {', '.join(DTYPES)} or {', '.join(DTYPES.values())}")
    value: torch.dtype = getattr(torch, name)
    return value


@contextlib.contextmanager
def only_json_on_stdout() -> Iterator[Callable[[Any], None]]:
    """Yield the function that writes the JSON document on standard output; send all other output to standard error.

    The redirection is of the file descriptor where there is one, so that C libraries and child processes follow it.
    """
    stdout = sys.stdout
    stdout.flush()
    document = io.StringIO()

    def print_json(value: Any) -> None:
        if document.tell():
            raise RuntimeError("print_json() was called twice: standard output holds one JSON document")
        json.dump(value, document, indent=2, allow_nan=False)

    with contextlib.redirect_stdout(sys.stderr), _redirected_descriptor(stdout, sys.stderr):
        yield print_json
    if document.tell():
        print(document.getvalue(), file=stdout, flush=True)


@contextlib.contextmanager
def _redirected_descriptor(source: TextIO, destination: TextIO) -> Iterator[None]:
    """Let the descriptor of ``source`` write to ``destination``'s; no effect where one has none (captured output)."""
    try:
        descriptor, target = source.fileno(), destination.fileno()
    except (AttributeError, OSError):
        yield
        return
    saved = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, TypeError):
            ctypes.CDLL(None).fflush(None)  # what C code (a kernel's printf) has buffered belongs with the rest
        os.dup2(saved, descriptor)
        os.close(saved)


def table(columns: dict[str, list[str]], *, left: Sequence[str] = (), expendable: Sequence[str] = ()) -> str:
    """Align ``columns`` (header → cells) as text, those in ``left`` flush left, the others flush right.

    Columns in ``expendable`` are dropped, first named first, while a line is wider than the terminal (``COLUMNS``, or
    80 where there is none).
    """
    widths = {header: max(map(len, [header, *cells])) for header, cells in columns.items()}
    shown = list(columns)
    for header in expendable:
        if sum(widths[name] + 2 for name in shown) - 2 <= shutil.get_terminal_size().columns:
            break
        shown.remove(header)

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(widths[header]) if header in left else cell.rjust(widths[header])
            for header, cell in zip(shown, cells, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rows = zip(*(columns[header] for header in shown), strict=True)
    return "\n".join([line(shown), line(["-" * widths[header] for header in shown]), *map(line, rows)])
