"""A run of the suite in a process of its own: a function that ends it, or never returns, has failed and is reported."""

from __future__ import annotations

import faulthandler
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from .registry import CHECKS, dtype_name
from .report import Report, Row
from .runner import rows_of
from .target import load

_USAGE, _STARTED, _DONE = "usage", "started", "done"
# Seconds more for the first answer: to start Python and import PyTorch and the function.
_START = 120.0


def run_supervised(target: str, device: str, settings: dict[str, Any], timeout: float) -> Report:
    """`verify` of the function that `target` names, each check given `timeout` seconds.

    The process is started anew, not forked: CUDA, and autograd's threads, can't be used after a fork. The first check
    that ends it or takes longer ends the run: that row and those that were not reached are `failed`.

    Raises:
        ValueError: the function can't be loaded, or nothing can be computed on `device` here.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, target, device, settings), name="verify")
    process.start()
    sender.close()
    rows: list[Row] = []
    started, end = False, ""
    try:
        while receiver.poll(timeout if started else timeout + _START):
            message, started = receiver.recv(), True
            if message == _STARTED:
                continue
            if message == _DONE:
                return Report(target, device, torch.__version__, tuple(rows))
            if not isinstance(message, Row):
                raise ValueError(message[1])
            rows.append(message)
        end = f"gave no answer in {timeout:g} s"
    except (EOFError, OSError):
        process.join(5)
        end = f"ended the process, exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Report(target, device, torch.__version__, (*rows, *_not_reached(rows, device, end)))


def _not_reached(rows: list[Row], device: str, end: str) -> list[Row]:
    """A failed row for the check that ended the run and for each one after it."""
    done = {row.id for row in rows}
    left = [check for check in CHECKS.values() if check.id not in done and check.device in (None, device.split(":")[0])]
    reasons = [f"The function {end}." if not i else f"Not reached: {left[0].id} {end}." for i in range(len(left))]
    return [
        Row(check.id, check.what, dtype_name(check.dtype), None, None, "failed", reason)
        for check, reason in zip(left, reasons, strict=True)
    ]


def _run(sender: Connection, target: str, device: str, settings: dict[str, Any]) -> None:
    faulthandler.enable(2)  # standard error: where a function that crashes the process was
    try:
        rows = rows_of(load(target), device, settings)
    except ValueError as error:
        sender.send((_USAGE, str(error)))
        return
    sender.send(_STARTED)
    for row in rows:
        sender.send(row)
    sender.send(_DONE)
