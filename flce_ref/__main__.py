"""The command line: ``python -m flce_ref COMMAND``.

A command is two functions of this file: ``add_X(subparsers)`` declares its arguments and ``run_X(args)`` does the work
and returns the exit status; `COMMANDS` lists the first of each pair. ``run_X`` imports what it needs itself, so that no
command pays for another's imports.

* Exit status: 0 fine, 1 something failed, 2 wrong usage (argparse's own, or ``args.parser.error(message)``).
* With ``--json``, which `add_command` declares, ``args.print_json(document)`` writes the one document on standard
  output. Whatever else is printed meanwhile, by libraries and child processes too, goes to standard error.
"""

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


# ---------------------------------------------------------------- models


def add_models(subparsers: Subparsers) -> None:
    """Declare ``models``."""
    summary = "how large the logits of published models are (sources: --json, or a wide terminal)"
    parser = add_command(subparsers, "models", run_models, summary)
    parser.add_argument("--batch", type=positive_int, default=4, metavar="B", help="sequences (default %(default)s)")
    parser.add_argument(
        "--seq", type=positive_int, default=4096, metavar="S", help="tokens of each (default %(default)s)"
    )
    parser.add_argument("--dtype", type=dtype, default="bf16", help=f"{', '.join(DTYPES)} (default %(default)s)")


def run_models(args: argparse.Namespace) -> int:
    """Print hidden states (B, S, D) against logits (B, S, V) of every published model, in GB = 10⁹ bytes."""
    from flce_ref.models import MODELS, head_sizes

    sizes = [head_sizes(model, args.batch, args.seq, args.dtype) for model in MODELS]
    if args.json:
        args.print_json(
            [
                {
                    "id": model.id,
                    "name": model.name,
                    "vocab_size": model.vocab_size,
                    "hidden_size": model.hidden_size,
                    "source": model.source,
                    "hidden_gb": size.hidden_bytes / 1e9,
                    "logits_gb": size.logits_bytes / 1e9,
                    "ratio": size.ratio,
                }
                for model, size in zip(MODELS, sizes, strict=True)
            ]
        )
        return 0

    columns = {
        "id": [model.id for model in MODELS],
        "name": [model.name for model in MODELS],
        "V": [f"{model.vocab_size:,}" for model in MODELS],
        "D": [f"{model.hidden_size:,}" for model in MODELS],
        "hidden": [f"{size.hidden_bytes / 1e9:,.2f}" for size in sizes],
        "logits": [f"{size.logits_bytes / 1e9:,.2f}" for size in sizes],
        "ratio": [f"{size.ratio:.0f}×" for size in sizes],
        "source": [model.source for model in MODELS],
    }
    shape = f"B = {args.batch:,}, S = {args.seq:,}, {args.dtype}".replace("torch.", "")
    print(f"hidden (B, S, D) and logits (B, S, V) in GB (10⁹ bytes) at {shape}\n")
    print(table(columns, left=("id", "name", "source"), expendable=("source", "name")))
    return 0


# ---------------------------------------------------------------- view


def add_view(subparsers: Subparsers) -> None:
    """Declare ``view``."""
    parser = add_command(subparsers, "view", run_view, "draw a Memory Viz snapshot or a stored timeline", json=False)
    parser.add_argument(
        "file", metavar="FILE", help="pickle of torch.cuda.memory._dump_snapshot, or Timeline.to_json()"
    )
    parser.add_argument("--plot", metavar="OUT", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--html", metavar="OUT", help="interactive page to write")
    parser.add_argument(
        "--device", type=int, metavar="I", help="which device (default: all in the page, else the busiest)"
    )
    group = parser.add_argument_group("names by size", "all three: name logits, dx and dw by their sizes")
    group.add_argument("--tokens", type=positive_int, metavar="N")
    group.add_argument("--vocab", type=positive_int, metavar="V")
    group.add_argument("--hidden", type=positive_int, metavar="D")


def run_view(args: argparse.Namespace) -> int:
    """Read FILE and write what was asked for."""
    from pathlib import Path

    from flce_ref.memory import name_by_size
    from flce_ref.memory.snapshot import read_timelines
    from flce_ref.memory.viewer import to_html

    if not args.plot and not args.html:
        args.parser.error("say what to write: --plot OUT.png, --html OUT.html or both")
    shape = (args.tokens, args.vocab, args.hidden)
    if any(shape) and not all(shape):
        args.parser.error("--tokens, --vocab and --hidden are needed together")
    try:
        timelines = read_timelines(args.file, args.device)
        if all(shape):
            tokens, vocab, hidden = shape
            timelines = [name_by_size(t, tokens=tokens, vocab_size=vocab, hidden_size=hidden) for t in timelines]
        if args.html:
            Path(args.html).write_text(to_html(timelines), encoding="utf-8")
        if args.plot:
            timelines[0].save_plot(args.plot)
    except (ValueError, OSError, ImportError) as error:
        print(f"view: {error}", file=sys.stderr)
        return 1
    for timeline in timelines:
        print(timeline.alt_text())
    return 0


# ---------------------------------------------------------------- verify


def add_verify(subparsers: Subparsers) -> None:
    """Declare ``verify``."""
    parser = add_command(subparsers, "verify", run_verify, "hold an implementation to the conformance suite")
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="keyword argument of every call: a Python literal, a torch dtype or a string (repeatable)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda, cuda:1 (default %(default)s)")


def run_verify(args: argparse.Namespace) -> int:
    """Print the report of the suite on one function; fail if any check does."""
    import torch

    from flce_ref.conformance.runner import run
    from flce_ref.conformance.target import load, parse_setting

    try:
        function = load(args.target)
        settings = dict(parse_setting(setting) for setting in args.settings)
        torch.empty(1, device=args.device)
    except (ValueError, RuntimeError, AssertionError) as error:  # Assertion: "Torch not compiled with CUDA enabled"
        args.parser.error(str(error))
    report = run(function, args.device, settings, name=args.target)
    if args.json:
        args.print_json(report.to_dict())
    else:
        print(report)
    return 0 if report.ok else 1


# ---------------------------------------------------------------- the commands, and what they share

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (add_models, add_view, add_verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (wrong usage raises ``SystemExit(2)``, as argparse does)."""
    parser = argparse.ArgumentParser(
        prog="python -m flce_ref", description="Fused linear cross-entropy: the reference.", allow_abbrev=False
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(subparsers)

    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "×" shows "?" instead of a traceback
    try:
        if not getattr(args, "json", False):
            status: int = args.run(args)
            sys.stdout.flush()
        else:
            with only_json_on_stdout() as args.print_json:
                status = args.run(args)
        return status
    except BrokenPipeError:
        # The reader (head, less) left. Python flushes stdout once more at exit: let that go nowhere, silently.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
    """Read an integer ≥ 1; ``1_000_000`` is accepted as Python accepts it."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"expected an integer ≥ 1, got {text!r}")
    return value


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


if __name__ == "__main__":
    sys.exit(main())
