"""What the grader says: a report to read, and the JSON that Gradescope reads."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from .marking import Assignment, Mark

WIDTH = 100


@dataclass(frozen=True)
class Graded:
    """The marks of one submission, and what else there is to say about it."""

    assignment: Assignment
    marks: tuple[Mark, ...]
    remarks: tuple[str, ...] = ()

    @property
    def score(self) -> int:
        return sum(mark.points for mark in self.marks)

    def to_gradescope(self) -> dict[str, Any]:
        """Gradescope's results.json."""
        tests = [
            {"name": mark.item.what, "score": mark.points, "max_score": mark.item.points, "output": told(mark)}
            for mark in self.marks
        ]
        return {"score": self.score, "output": "\n".join(self.remarks), "tests": tests}

    def __str__(self) -> str:
        one = self.assignment
        lines = [f"Assignment {one.number}: {one.title}", ""]
        for mark in self.marks:
            lines.append(f"{'+' if mark.passed else '-'} {mark.points:3d} of {mark.item.points:3d}  {mark.item.what}")
            if not mark.passed:
                lines += [textwrap.fill(line, WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14)
                          for line in told(mark).splitlines()]  # fmt: skip
        lines += ["", f"{self.score} of {one.points} points"]
        lines += [
            textwrap.fill(line, WIDTH, subsequent_indent="  ") for remark in self.remarks for line in ("", remark)
        ]
        return "\n".join(lines)


def told(mark: Mark) -> str:
    """What was tested, what should be and was found, and where the book explains it."""
    item = mark.item
    return "\n".join([*mark.reasons, f"See book/{item.chapter}.md, “{item.section}”."])
