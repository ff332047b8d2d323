"""What a run of the suite says: one row per check, and their sum."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("passed", "failed", "expected_failure", "unsupported", "measured")


@dataclass(frozen=True)
class Row:
    """One check: the error it measured, the bound it was held to (None: no verdict), and a sentence why."""

    id: str
    what: str
    dtype: str
    error: float | None
    bound: float | None
    status: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The rows of one run of `verify`. `str(report)` is an aligned table; `to_json()` the document of the command."""

    target: str
    device: str
    torch: str
    checks: tuple[Row, ...]

    @property
    def summary(self) -> dict[str, int]:
        """How many rows have each status, every status listed."""
        counts = Counter(row.status for row in self.checks)
        return {status: counts[status] for status in STATUSES}

    @property
    def ok(self) -> bool:
        """True when no row failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that failed."""
        return tuple(row for row in self.checks if row.status == "failed")

    def __getitem__(self, id: str) -> Row:
        """The row of that id."""
        for row in self.checks:
            if row.id == id:
                return row
        raise KeyError(f"no check has the id {id!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; an error that is not a finite number becomes None, since JSON has no word for it."""
        checks = [asdict(row) for row in self.checks]
        for row in checks:
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"] = None
        return {
            "target": self.target,
            "device": self.device,
            "torch": self.torch,
            "checks": checks,
            "summary": self.summary,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as one JSON document."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        table = [("status", "check", "dtype", "error", "bound", "what")]
        table += [
            (row.status.replace("_", " "), row.id, row.dtype, _number(row.error), _number(row.bound), row.what)
            for row in self.checks
        ]
        widths = [max(len(line[column]) for line in table) for column in range(5)]
        lines = [f"{self.target} on {self.device}, torch {self.torch}", ""]
        for *cells, what in table:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "  " + what)
        told = [row for row in self.checks if row.status in ("failed", "expected_failure", "unsupported")]
        if told:
            lines += [""] + [f"{row.status.replace('_', ' ')}: {row.id}: {row.reason}" for row in told]
        counted = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in self.summary.items() if count)
        return "\n".join([*lines, "", counted])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
