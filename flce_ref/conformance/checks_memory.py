"""What is allocated, what stays alive after forward, and what the chunk costs in memory and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .cases import Problem, make
from .reference import execute
from .registry import Finding, check
from .subject import Subject
from .tracker import StorageTracker, step_peak

CHUNKS = (64, 256, 1024)


@check(
    "memory.holds_no_logits",
    "elements alive after forward, ÷ N · V",
    "Between forward and backward nothing of N · V elements should be alive, beyond inputs and outputs.",
)
def holds_no_logits(subject: Subject, dtype: torch.dtype) -> Finding:
    # Outputs of N elements and gradients of 4 · (N + V) are nothing beside N · V.
    tokens, vocabulary = 8192, 1024
    shares = {}
    for reduction in ("mean", "none"):
        problem = make(subject.device, tokens=tokens, hidden=4, vocabulary=vocabulary, reduction=reduction).leaves()
        with StorageTracker(problem.input, problem.linear_weight, problem.target) as tracker:
            loss = subject(problem)
        shares[reduction] = tracker.alive() / (tokens * vocabulary)
        del loss
    worst = max(shares, key=lambda reduction: shares[reduction])
    return Finding(shares[worst], 0.5, f'{shares[worst]:.2f} · N · V elements are alive under "{worst}"')


@check(
    "memory.holds_no_logits.allocator",
    "bytes allocated after forward, ÷ 4 · N · V",
    "The allocator should know of no logits either: it also sees what compiled code and extensions allocate.",
    device="cuda",
)
def allocator_holds_no_logits(subject: Subject, dtype: torch.dtype) -> Finding:
    tokens, vocabulary = 8192, 1024
    problem = make(subject.device, tokens=tokens, hidden=4, vocabulary=vocabulary).leaves()
    subject(problem)  # libraries allocate workspaces of their own in a first call
    before = torch.cuda.memory_allocated(subject.device)
    loss = subject(problem)
    held = torch.cuda.memory_allocated(subject.device) - before
    del loss
    share = held / (4 * tokens * vocabulary)
    # Logits kept in half the input's width take half as much.
    return Finding(
        share, 0.25, f"{held / 2**20:.1f} MiB are allocated, float32 logits would be {tokens * vocabulary / 2**18:.1f}"
    )


def _allocations(subject: Subject, problem: Problem, elements: int, step: Callable[[Problem], object]) -> int:
    """How many buffers of at least `elements` elements `step` allocates."""
    with StorageTracker(problem.input, problem.linear_weight, problem.target) as tracker:
        step(problem)
    return sum(size >= elements for size in tracker.allocated)


def _declare_frozen() -> None:
    for name, buffer, tokens, vocabulary in (("linear_weight", "(V, D)", 8, 256), ("input", "(N, D)", 256, 8)):

        @check(
            f"frozen.{name}",
            f"{buffer} buffers with a frozen {name}",
            f"If {name} needs no gradient, that should cost no {buffer} buffer.",
        )
        def frozen_work(
            subject: Subject, dtype: torch.dtype, name: str = name, tokens: int = tokens, vocabulary: int = vocabulary
        ) -> Finding:
            problem = make(subject.device, tokens=tokens, hidden=512, vocabulary=vocabulary).leaves(frozen=(name,))
            count = _allocations(subject, problem, 256 * 512, lambda problem: subject(problem).backward())
            return Finding(float(count), 0.0, f"{count} such buffers were allocated")


_declare_frozen()


@check(
    "no_grad.work",
    "buffers of V · D or N · D elements under torch.no_grad()",
    "Without gradients none should be computed, whatever requires_grad says.",
)
def no_grad_work(subject: Subject, dtype: torch.dtype) -> Finding:
    count = 0
    for tokens, vocabulary in ((8, 256), (256, 8)):
        problem = make(subject.device, tokens=tokens, hidden=512, vocabulary=vocabulary).leaves()
        with torch.no_grad():
            count += _allocations(subject, problem, 256 * 512, subject)
    return Finding(float(count), 0.0, f"{count} such buffers were allocated")


def _step_problem(subject: Subject, dtype: torch.dtype) -> Problem:
    if subject.device.type == "cuda":
        return make(subject.device, tokens=8192, hidden=1024, vocabulary=32_000, dtype=dtype)
    return make(subject.device, tokens=2048, hidden=64, vocabulary=1024, dtype=dtype)


def _declare_measurements() -> None:
    for size in (*CHUNKS, None):
        name = "default" if size is None else str(size)
        needs = () if size is None else ("chunk_size",)

        @check(
            f"measured.step_peak.chunk_{name}",
            f"step peak above the inputs in MiB, chunk {name}",
            "Memory against the chunk: a smaller chunk should not cost more.",
            needs=needs,
        )
        def peak(subject: Subject, dtype: torch.dtype, size: int | None = size) -> Finding:
            problem = _step_problem(subject, dtype)
            extra = {} if size is None else {"chunk_size": size}
            known = (problem.input, problem.linear_weight, problem.target)
            mebibytes = step_peak(lambda: _step(subject, problem, extra), subject.device, *known) / 2**20
            return Finding(mebibytes, None, f"{mebibytes:.2f} MiB; all logits would be {_logits(problem):.2f} MiB")

        @check(
            f"measured.latency.chunk_{name}",
            f"forward + backward in ms, chunk {name}",
            "Time against the chunk: too small a chunk should show here.",
            needs=needs,
        )
        def latency(subject: Subject, dtype: torch.dtype, size: int | None = size) -> Finding:
            problem = _step_problem(subject, dtype)
            extra = {} if size is None else {"chunk_size": size}
            milliseconds = _median_ms(lambda: _step(subject, problem, extra), subject.device)
            return Finding(milliseconds, None, f"{milliseconds:.1f} ms, median of 5")


def _step(subject: Subject, problem: Problem, extra: dict[str, int]) -> None:
    execute(lambda problem: subject(problem, **extra), problem)


def _logits(problem: Problem) -> float:
    return problem.target.numel() * problem.linear_weight.shape[0] * problem.input.element_size() / 2**20


def _median_ms(step: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Median wall time of `step` after one warm-up; on CUDA with the device's queue empty at both ends."""
    taken = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[1:])


_declare_measurements()
