"""How far a result is from the truth, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cases import Problem
from .reference import Result, execute, plain, truth
from .registry import Finding
from .subject import Subject

# What a float32 computation of the right thing stays below, and one of anything else doesn't.
EXACT = 1e-5
# In low precision: this multiple of the error of F.cross_entropy(F.linear(…)) in the same dtype on the same inputs …
MULTIPLE = 2.0
# … or one rounding of the result, where plain PyTorch happened to round luckily.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}

EVERYTHING = ("loss", "dx", "dw", "dbias")
GRADIENTS = ("dx", "dw", "dbias")


def largest(actual: Tensor | None, expected: Tensor) -> float:
    """max |actual − expected| / max |expected|: one wrong element among thousands counts in full. NaN where NaN is
    expected is right; any other non-finite value, a missing tensor or a wrong shape is infinitely wrong."""
    return _error(
        actual, expected, lambda difference, scale: float(difference.abs().max() / (scale.abs().max() or 1.0))
    )


def overall(actual: Tensor | None, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖: rounding errors of many elements, averaged."""
    return _error(actual, expected, lambda difference, scale: float(difference.norm() / (scale.norm() or 1.0)))


def worst(
    actual: Result, expected: Result, parts: tuple[str, ...] = EVERYTHING, measure: Callable[..., float] = largest
) -> tuple[float, str]:
    """The largest error among `parts` of a result, and the name of that part."""
    errors = {
        part: measure(getattr(actual, part), value) for part in parts if (value := getattr(expected, part)) is not None
    }
    part = max(errors, key=lambda name: errors[name])
    return errors[part], part


def compared(actual: Result, expected: Result, parts: tuple[str, ...] = EVERYTHING) -> Finding:
    """The finding that holds `actual` to `expected` within what float32 costs."""
    error, part = worst(actual, expected, parts)
    return Finding(error, EXACT, f"{part} is off by {error:.2g} of its largest element")


def agree(
    subject: Subject,
    problem: Problem,
    parts: tuple[str, ...] = EVERYTHING,
    upstream: Tensor | float = 1.0,
    frozen: tuple[str, ...] = (),
    **extra: Any,
) -> Finding:
    """Hold loss and gradients to the float64 truth, within what float32 costs."""
    expected = truth(problem, upstream)
    gone = {"input": "dx", "linear_weight": "dw", "linear_bias": "dbias"}
    parts = tuple(part for part in parts if part not in [gone[name] for name in frozen])
    return compared(execute(partial(subject, **extra), problem, upstream, frozen), expected, parts)


def agree_like_plain(
    subject: Subject,
    problem: Problem,
    parts: tuple[str, ...],
    measure: Callable[..., float] = overall,
    yardstick: Callable[[Problem], Tensor] = plain,
    floor: float = 0.0,
    **extra: Any,
) -> Finding:
    """Hold loss and gradients to the float64 truth, within a multiple of the error of plain PyTorch or ``floor``."""
    expected = truth(problem)
    allowed, _ = worst(execute(yardstick, problem), expected, parts, measure)
    error, part = worst(execute(partial(subject, **extra), problem), expected, parts, measure)
    return like_plain(error, part, allowed, problem.input.dtype, floor)


def like_plain(error: float, part: str, allowed: float, dtype: torch.dtype, floor: float = 0.0) -> Finding:
    """The finding that holds `error` to a multiple of the error that plain PyTorch is `allowed`.

    Where plain PyTorch itself gives no number at all, one rounding is allowed: an infinite bound would pass anything.
    """
    floor = max(floor, FLOOR[dtype])
    bound = max(MULTIPLE * allowed, floor) if math.isfinite(allowed) else floor
    return Finding(error, bound, f"{part} is off by {error:.2g}; plain PyTorch by {allowed:.2g}")


def worst_of(findings: Iterable[Finding]) -> Finding:
    """The finding with the largest error."""
    return max(findings, key=lambda finding: finding.error)


def _error(actual: Tensor | None, expected: Tensor, measure: Callable[[Tensor, Tensor], float]) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()) or actual.isinf().any():
        return float("inf")
    if not expected.numel():
        return 0.0
    expected = expected.nan_to_num()
    return measure(actual.nan_to_num() - expected, expected)
