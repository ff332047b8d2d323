"""Runs the checks on one implementation and writes the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

# isort: off
# Importing a file of checks declares them; a report lists them in this order.
from . import checks_core, checks_options, checks_inputs, checks_targets  # noqa: F401
from . import checks_autograd, checks_precision, checks_memory  # noqa: F401

# isort: on
from .expected import expected_failure
from .reference import plain_linear_cross_entropy
from .registry import CHECKS, Check, Finding, dtype_name
from .report import Report, Row
from .state import restored
from .subject import Subject, is_refusal, message_of


def verify(function: Callable[..., Any], device: torch.device | str = "cpu", **settings: Any) -> Report:
    """Hold an implementation of linear cross-entropy to the float64 truth, to PyTorch's semantics and to its memory.

    Args:
        function: called as ``function(input (…, D), linear_weight (V, D), target (…), **options)``; returns the loss.
            Options are those of :func:`flce_ref.linear_cross_entropy`. One that it refuses, by a NotImplementedError or
            by a TypeError or ValueError that names the argument, makes the rows about it ``unsupported``; but loss, dx,
            dw, the reductions and ignore_index must work.
        device: where the inputs are.
        settings: keyword arguments for every call, such as ``schedule="chunked"``.

    Global state of PyTorch that a call changes (the default dtype, a seed, a patched function) fails the check that saw
    it and is put back, so that no check depends on another. A function that may end the process is better given to the
    command line, which runs it in one of its own.

    Returns:
        A :class:`~flce_ref.conformance.report.Report`: ``.ok``, ``.checks``, ``.summary``, ``str()``, ``.to_json()``.

    Raises:
        TypeError: `function` is not callable.
        ValueError: nothing can be computed on `device` here.
    """
    return run(function, device, settings)


def run(
    function: Callable[..., Any],
    device: torch.device | str = "cpu",
    settings: dict[str, Any] | None = None,
    only: Iterable[str | Check] | None = None,
    name: str | None = None,
) -> Report:
    """`verify`, restricted to the checks in `only`, ids or checks of the caller's own; `name` is the report's."""
    rows = tuple(rows_of(function, device, settings, only))
    return Report(name or _name(function), str(device), torch.__version__, rows)


def rows_of(
    function: Callable[..., Any],
    device: torch.device | str = "cpu",
    settings: dict[str, Any] | None = None,
    only: Iterable[str | Check] | None = None,
) -> Iterator[Row]:
    """The rows of `run`, each as soon as it is known; what is wrong with the arguments is raised at once."""
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    try:
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # "Torch not compiled with CUDA enabled"
        reason = str(error).splitlines()[0]
        accepted = "cpu, or cuda where there is one"
        raise ValueError(
            f"device must be one that can compute here ({accepted}), got {str(device)!r}: {reason}"
        ) from None
    subject = Subject(function, torch.device(device), settings or {})
    yardstick = Subject(plain_linear_cross_entropy, subject.device, {})
    chosen = CHECKS.values() if only is None else [CHECKS[one] if isinstance(one, str) else one for one in only]
    return (_row(check, subject, yardstick) for check in chosen if check.device in (None, subject.device.type))


def _row(check: Check, subject: Subject, yardstick: Subject) -> Row:
    row = _judge(check, subject)
    why = expected_failure(subject.function, subject.settings, row.id, partial(_fails, check, yardstick))
    return row if why is None else _as_expected(row, why)


def _judge(check: Check, subject: Subject) -> Row:
    """Run one check and give its verdict."""

    def row(status: str, reason: str, error: float | None = None, bound: float | None = None) -> Row:
        return Row(check.id, check.what, dtype_name(check.dtype), error, bound, status, reason)

    error: BaseException | None = None
    with restored() as changed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                finding = check.function(subject, check.dtype)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # a subject that calls sys.exit() must not end the run as a success
            error = raised
        leaked = changed()
    if leaked:
        return row("failed", f"No call should change global state. Changed afterwards: {', '.join(leaked)}.")
    if error is not None:
        said = f"{type(error).__name__}: {_first_line(error)}"
        if not check.core and is_refusal(error, check.needs):
            return row("unsupported", f"Refused: {said}")
        return row("failed", f"{check.should} It raised {said}")
    return row(*_verdict(check, finding), finding.error, finding.bound)


def _fails(check: Check, subject: Subject) -> bool:
    return _judge(check, subject).status == "failed"


def _verdict(check: Check, finding: Finding) -> tuple[str, str]:
    if finding.bound is None:
        return "measured", f"{check.should} Found: {finding.detail}."
    if finding.error <= finding.bound:
        return "passed", check.should
    return "failed", f"{check.should} Found: {finding.detail or f'{finding.error:.2g}'}."


def _as_expected(row: Row, why: str) -> Row:
    """Turn an expected failure into one, and its success into a failure: the table must be true both ways."""
    if row.status == "failed":
        return Row(row.id, row.what, row.dtype, row.error, row.bound, "expected_failure", f"Known: {why}. {row.reason}")
    reason = f"Expected to fail, since {why}; it is {row.status}. Take it off the table of expected failures."
    return Row(row.id, row.what, row.dtype, row.error, row.bound, "failed", reason)


def _first_line(error: BaseException) -> str:
    return (message_of(error).strip().splitlines() or [""])[0][:400]


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
