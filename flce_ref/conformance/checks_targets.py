"""Targets of other dtypes, and targets that are no words: those are tried in a process that they may bring down."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from .cases import make
from .compare import agree
from .registry import Finding, check
from .subject import Subject

TOO_LARGE = (101, 2**40)  # V is 101
TOO_SMALL = (-1, -(2**40))
STARTED, HARMLESS = "started", "harmless"
# Seconds for one call; in a new process it may have to compile kernels first.
FORK_PATIENCE, SPAWN_PATIENCE = 15.0, 60.0


def _declare_target_dtypes() -> None:
    for target_dtype in (torch.int32, torch.uint8):
        name = str(target_dtype).removeprefix("torch.")

        @check(
            f"target.{name}",
            f"targets in {name}",
            f"{name} targets should mean what int64 ones do, or be refused (PyTorch itself takes int64 and uint8).",
            needs=("target", "dtype"),
        )
        def other_target_dtype(
            subject: Subject, dtype: torch.dtype, target_dtype: torch.dtype = target_dtype
        ) -> Finding:
            problem = make(subject.device)
            try:
                return agree(subject, problem.but(target=problem.target.to(target_dtype)))
            except RuntimeError as error:  # F.cross_entropy's own way of refusing
                raise NotImplementedError(str(error).splitlines()[0]) from error


_declare_target_dtypes()


@check(
    "target.out_of_range",
    "targets V and 2⁴⁰, in a subprocess",
    "A target that is no word should raise an exception or make the loss NaN: never crash, never pass for a loss.",
)
def out_of_range(subject: Subject, dtype: torch.dtype) -> Finding:
    return _harmless(subject, TOO_LARGE)


@check(
    "target.negative",
    "targets −1 and −2⁴⁰ beside ignore_index = −100, in a subprocess",
    "Only ignore_index should be ignored: another negative target is out of range like any other.",
)
def negative_target(subject: Subject, dtype: torch.dtype) -> Finding:
    return _harmless(subject, TOO_SMALL)


def _harmless(subject: Subject, targets: tuple[int, ...]) -> Finding:
    """Whether each of these targets raised an exception or made the loss NaN, when tried together with all others."""
    every = TOO_LARGE + TOO_SMALL
    while left := tuple(wrong for wrong in every if wrong not in subject.wrong_targets):
        subject.wrong_targets.update(_try_in_a_process(subject, left))  # one that dies has not tried them all
    for wrong in targets:
        if subject.wrong_targets[wrong] != HARMLESS:
            return Finding(1.0, 0.0, f"target {wrong}: {subject.wrong_targets[wrong]}")
    return Finding(0.0, 0.0)


def _try_in_a_process(subject: Subject, targets: tuple[int, ...]) -> dict[int, str]:
    """What each target led to, as far as one process came.

    On the CPU the process is forked, so that any function can be tried. CUDA can't be used after a fork, so there the
    function must be importable.
    """
    can_fork = subject.device.type != "cuda" and "fork" in multiprocessing.get_all_start_methods()
    patience = FORK_PATIENCE if can_fork else SPAWN_PATIENCE
    context: Any = multiprocessing.get_context("fork" if can_fork else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_each, args=(sender, subject, targets), daemon=True)
    outcomes: dict[int, str] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python ≥ 3.12 on forking beside PyTorch's threads
            process.start()
        sender.close()
        if not receiver.poll(patience) or receiver.recv() != STARTED:
            raise EOFError
    except Exception as error:
        raise NotImplementedError("the function can't be tried in a subprocess, which can't import it") from error
    try:
        for wrong in targets:
            outcomes[wrong] = receiver.recv() if receiver.poll(patience) else f"no answer in {patience:.0f} s"
            if outcomes[wrong] != HARMLESS:
                break  # whatever is left of the process, the others are tried in a new one
    except EOFError:
        process.join()
        outcomes[wrong] = f"the process died, exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return outcomes


def _try_each(sender: Connection, subject: Subject, targets: tuple[int, ...]) -> None:
    torch.set_num_threads(1)  # a forked child must not enter the parent's thread pool
    sender.send(STARTED)
    for wrong in targets:
        sender.send(_outcome(subject, wrong))


def _outcome(subject: Subject, wrong: int) -> str:
    problem = make(subject.device).leaves()
    problem.target[20] = wrong
    try:
        loss = subject(problem)
        value = float(loss.detach())
        if not math.isnan(value):
            return f"the loss was {value:.4g}"
        # Only now: after a fork autograd may refuse to run, which must not pass for the subject's own exception.
        loss.backward()
    except Exception:
        pass  # the subject's own way of refusing
    return HARMLESS if _device_lives(subject.device) else "a device assert ended the CUDA context"


def _device_lives(device: torch.device) -> bool:
    try:
        return torch.zeros(1, device=device).item() == 0
    except RuntimeError:
        return False
