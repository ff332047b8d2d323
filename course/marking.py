"""How points are given: items, each a few checks of the conformance suite or like them, and a verdict for each.

A mistake is paid for once. Most items look at something that no other mistake changes: the direction of a gradient in
one, its length in another. One mistake changes everything, targets shifted by one, as when labels that are
shifted already are shifted again; where the loss is exactly that of shifted targets, its points are lost and the
other items are judged with the targets shifted back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flce_ref.conformance.compare import EXACT, largest
from flce_ref.conformance.registry import Check, Finding
from flce_ref.conformance.runner import run
from flce_ref.conformance.subject import Subject

from .sandbox import Failed, Sandbox


@dataclass(frozen=True)
class Item:
    """Something that is worth points.

    Attributes:
        id: one word or two, unique in its assignment.
        what: what is tested.
        points: for passing all of `checks`: ids of `flce_ref.conformance`, or checks made by :func:`asked`.
        chapter, section: where the book explains it: the name of a file in `book/` without its suffix, and a heading.
        requires: items of which at least one must be passed for this one to count: to hold no memory is easy for a
            function that does nothing.
    """

    id: str
    what: str
    points: int
    checks: tuple[str | Check, ...]
    chapter: str
    section: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """One assignment.

    Attributes:
        functions: what a submission must define.
        adapter: makes the subject of the checks out of a sandbox.
        settings: keyword arguments of every call.
        modules, environment: what the student's process starts with.
        to_review: names whose appearance in a submission a marker should look at, with the reason.
        to_be_used: names whose absence a marker should look at.
        shiftable: the id of the item whose loss tells shifted targets.
    """

    number: int
    title: str
    functions: tuple[str, ...]
    items: tuple[Item, ...]
    adapter: Callable[[Sandbox], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ("torch",)
    environment: Mapping[str, str] = field(default_factory=dict)
    to_review: Mapping[str, str] = field(default_factory=dict)
    to_be_used: tuple[str, ...] = ()
    shiftable: str | None = None

    @property
    def points(self) -> int:
        return sum(item.points for item in self.items)


@dataclass(frozen=True)
class Mark:
    """The verdict on one item; `reasons` say what should be and what was found."""

    item: Item
    passed: bool
    reasons: tuple[str, ...]

    @property
    def points(self) -> int:
        return self.item.points if self.passed else 0


def mark(assignment: Assignment, sandbox: Sandbox) -> tuple[list[Mark], str]:
    """A verdict on every item, and a remark on how they were reached, or nothing."""
    subject, remark = assignment.adapter(sandbox), ""
    marks: dict[str, Mark] = {}
    for item in assignment.items:
        marks[item.id] = _judged(item, assignment, subject, marks)
        if item.id == assignment.shiftable and not marks[item.id].passed:
            for shift in (1, -1):
                shifted = replace(subject, shift=shift)
                if _judged(item, assignment, shifted, marks).passed:
                    subject = shifted
                    remark = (
                        f"The loss is that of targets shifted by {shift}: row i of the input is compared with target "
                        f"i {'+' if shift > 0 else '−'} 1. That costs the points of {item.id!r}; the rest was judged "
                        "with the targets shifted back."
                    )
    return list(marks.values()), remark


def _judged(item: Item, assignment: Assignment, subject: Any, marks: Mapping[str, Mark]) -> Mark:
    if item.requires and not any(marks[id].passed for id in item.requires):
        return Mark(item, False, (f"Counts only together with {' or '.join(map(repr, item.requires))}.",))
    report = run(subject, settings=dict(assignment.settings), only=item.checks, name=assignment.title)
    failed = report.failed or [row for row in report.checks if row.status != "passed"]
    reasons = [row.reason.replace("It raised Failed: ", "It raised ") for row in failed or report.checks]
    reasons = [reason.replace("It raised Ended: ", "") for reason in reasons]
    return Mark(item, not failed, tuple(reasons))


def asked(id: str, should: str, function: Callable[[Subject], Finding]) -> Check:
    """A check of the course's own: `function` measures, `should` says what should be."""
    return Check(id, id, should, torch.float32, lambda subject, _: function(subject), core=True, needs=(), device=None)


# ---------------------------------------------------------------- how far off


def exactly(what: str, actual: Tensor, expected: Tensor, bound: float = EXACT) -> Finding:
    """Every element right, within what float32 costs; the detail names the worst one."""
    if actual.shape != expected.shape:
        raise Failed(f"{what} has the shape {tuple(actual.shape)}, {tuple(expected.shape)} is due")
    if not expected.isfinite().all():  # it may come from the student's own functions
        return Finding(math.inf, bound, f"{what} should be what is no number")
    error = largest(actual, expected)
    off = (actual.double() - expected.double()).abs().nan_to_num(nan=math.inf).flatten()
    worst = int(off.argmax()) if off.numel() else 0
    values = [f"{t.double().flatten()[worst].item():.6g}" for t in (actual, expected) if t.numel()]
    where = f"element {_index(worst, expected)} of {what}" if expected.dim() else what
    return Finding(error, bound, f"{where} is {' and should be '.join(values)}")


def up_to_a_factor(what: str, actual: Tensor | None, expected: Tensor, by_row: bool = False) -> Finding:
    """The direction right, of the whole or of each row, whatever its length: the length is another item's business."""
    if actual is None or actual.shape != expected.shape:
        raise Failed(f"{what} is missing or has a wrong shape; {tuple(expected.shape)} is due")
    a, e = (t.double().reshape(len(t) if by_row else 1, -1) for t in (actual, expected))
    factor = (a * e).sum(1, keepdim=True) / (a * a).sum(1, keepdim=True)
    error = (a * factor - e).abs().amax(1) / e.abs().amax(1)
    error = torch.where(factor[:, 0] > 0, error, math.inf)  # NaN, for a zero, and the opposite direction too
    worst = int(error.argmax())
    where = f"row {worst} of {what}" if by_row else what
    return Finding(error[worst].item(), EXACT, f"{where} points elsewhere, or is zero")


def _index(flat: int, like: Tensor) -> str:
    position = [int(i) for i in torch.unravel_index(torch.tensor(flat), like.shape)]
    return str(position[0] if len(position) == 1 else tuple(position))


@cache
def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that are the same everywhere, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()
