"""The command line: ``python -m flce_ref COMMAND``; the commands are in :mod:`flce_ref.commands`.

* Exit status: 0 fine, 1 something failed, 2 wrong usage (argparse's own, or ``args.parser.error(message)``).
* With ``--json``, which `add_command` declares, ``args.print_json(document)`` writes the one document on standard
  output. Whatever else is printed meanwhile, by libraries and child processes too, goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

from flce_ref.commands.bench import add_bench
from flce_ref.commands.common import Subparsers, only_json_on_stdout
from flce_ref.commands.memory import add_memory
from flce_ref.commands.models import add_models
from flce_ref.commands.verify import add_verify
from flce_ref.commands.view import add_view

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (add_models, add_memory, add_view, add_verify, add_bench)


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
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"python -m flce_ref: standard output can't be written: {error.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
