"""Grade a submission: ``python -m course.grade --assignment 1..4 FILE(.py|.ipynb) [--json]``.

The student's code runs in a process of its own and computes numbers for inputs that it is sent; the numbers are judged
here. See `book/course.md` for what that guarantees, and what it doesn't.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from . import submission
from .assignments import ASSIGNMENTS
from .marking import Mark, mark
from .report import Graded
from .sandbox import LIMITS, MIB, Ended, Failed, Limits, Sandbox

PR_SET_DUMPABLE = 4
TO_REVIEW = {
    "flce_ref": "the submission is to stand on its own",
    "modules": "that a library can't be imported is not to be worked around",
    "importlib": "a submission needs no imports but plain ones",
    "__import__": "a submission needs no imports but plain ones",
    "exec": "a submission needs no code made while it runs",
    "ctypes": "a submission needs nothing below Python",
}
SAME_USER = (
    "The submission ran as the user who ran the grader, and so could read and delete what that user can. As root, the "
    "grader gives it a user of its own."
)


def grade(number: int, path: Path, limits: Limits = LIMITS) -> Graded:
    """The marks of the submission at `path`; whatever is wrong with it costs points and raises nothing.

    Raises:
        OSError: this system can't keep the limits.
        RuntimeError: no process for student code can be started here.
    """
    assignment = ASSIGNMENTS[number]
    try:
        source = submission.read(path, assignment.functions)
    except ValueError as error:
        return nothing(number, str(error))
    with Sandbox(source.text, assignment.modules, environment=dict(assignment.environment), limits=limits) as sandbox:
        return graded(number, source, sandbox)


def graded(number: int, source: submission.Source, sandbox: Sandbox) -> Graded:
    """The marks of a submission that the sandbox has been given."""
    assignment = ASSIGNMENTS[number]
    try:
        functions = sandbox.load()
    except (Failed, Ended) as error:
        return nothing(number, _placed(str(error), source), source.remarks)
    missing = [name for name in assignment.functions if name not in functions]
    marks, shifted = mark(assignment, sandbox)
    marks = [replace(one, reasons=tuple(_placed(reason, source) for reason in one.reasons)) for one in marks]
    remarks = [*source.remarks, *([shifted] if shifted else [])]
    if missing:
        remarks.append(f"Not defined: {', '.join(missing)}.")
    names = {**TO_REVIEW, **assignment.to_review}
    remarks += [f"For the marker: {found}." for found in submission.mentions(source, names, assignment.to_be_used)]
    if os.geteuid() != 0:
        remarks.append(SAME_USER)
    return Graded(assignment, tuple(marks), tuple(remarks))


def _placed(reason: str, source: submission.Source) -> str:
    """The reason with lines of the text that was run told as lines of the student's file."""
    return re.sub(r"\(line (\d{1,6}): ", lambda found: f"({source.place(int(found[1]))}: ", reason)


def nothing(number: int, why: str, remarks: tuple[str, ...] = ()) -> Graded:
    """No points at all, for one reason."""
    assignment = ASSIGNMENTS[number]
    return Graded(assignment, tuple(Mark(item, False, (why,)) for item in assignment.items), remarks)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course.grade", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="the submission, .py or .ipynb")
    parser.add_argument("--assignment", type=int, choices=sorted(ASSIGNMENTS), required=True)
    parser.add_argument("--json", action="store_true", help="print Gradescope's results.json")
    parser.add_argument("--seconds", type=float, default=LIMITS.call_seconds, help="for one call (%(default)g)")
    parser.add_argument("--memory", type=int, default=LIMITS.memory_bytes // MIB, metavar="MIB",
                        help="above what Python and torch take (%(default)d)")  # fmt: skip
    given = parser.parse_args(arguments)
    if not given.file.is_file():
        parser.error(f"FILE must be a file, got {str(given.file)!r}")
    torch.set_num_threads(1)  # the machine may be shared; what is computed here is small
    # Nobody but root may look into this process from now on, not even one of the same user.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    limits = replace(LIMITS, call_seconds=given.seconds, memory_bytes=given.memory * MIB)
    try:
        result = grade(given.assignment, given.file, limits)
    except (OSError, RuntimeError) as error:  # of this machine, not of the submission
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result.to_gradescope(), indent=2, ensure_ascii=False) if given.json else result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
