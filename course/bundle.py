"""Pack the grader of one assignment for Gradescope: ``python -m course.bundle --assignment 1..4 OUT.zip``.

The archive holds the grader and the library that it is built on, in the versions that are installed here, and no
solution: what is not on the grading machine can't be read there.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import flce_ref

from .assignments import ASSIGNMENTS

COURSE = Path(__file__).parent
EXECUTABLE = {"setup.sh", "run_autograder"}
LEFT_OUT = {"solutions", "starters", "handouts", "gradescope", "__pycache__"}


def files() -> dict[str, Path]:
    """Every file of the archive, by its name in it."""
    found = {path.name: path for path in sorted((COURSE / "gradescope").iterdir()) if path.is_file()}
    for package in (COURSE, Path(str(flce_ref.__file__)).parent):
        for path in sorted(package.rglob("*")):
            if path.is_file() and not LEFT_OUT & set(path.relative_to(package).parts):
                found[f"{package.name}/{path.relative_to(package).as_posix()}"] = path
    return found


def pack(assignment: int, out: Path) -> None:
    """Write the archive; the same files give the same bytes."""
    contents = {name: path.read_bytes() for name, path in files().items()}
    contents["assignment"] = str(assignment).encode()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name)  # of a fixed date
            entry.external_attr = (0o755 if name in EXECUTABLE else 0o644) << 16
            archive.writestr(entry, contents[name], zipfile.ZIP_DEFLATED)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course.bundle", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.zip")
    parser.add_argument("--assignment", type=int, choices=sorted(ASSIGNMENTS), required=True)
    given = parser.parse_args(arguments)
    pack(given.assignment, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
