"""Assignment 2: chunks, what they keep, and the checkpoint that keeps nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from flce_ref.conformance.compare import worst_of
from flce_ref.conformance.registry import Finding
from flce_ref.conformance.subject import Subject
from flce_ref.memory.head_step import HeadStep

from .. import loss_checks as checks
from ..adapters import Loss, Numbers
from ..marking import Assignment, Item, asked
from ..sandbox import Failed, Sandbox

CHAPTER = "04-chunking-and-the-plateau"

# tokens, hidden size, vocabulary, chunks: each of the three moments of the plateau is the largest in one.
STEPS = ((3072, 256, 131_072, 2), (3072, 1024, 131_072, 4), (3072, 256, 131_072, 64))


def chunked(sandbox: Sandbox) -> Loss:
    return Loss(sandbox, "chunked_loss")


def of_the_checkpointed(check: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
    """The same check on the student's other function, whether or not its targets are shifted as those of the first."""

    def on_the_other(subject: Subject) -> Finding:
        adapter: Loss = subject.function  # type: ignore[assignment]
        others = [replace(adapter, function="checkpointed_loss", shift=shift) for shift in {0, adapter.shift}]
        findings = [check(Subject(other, subject.device, subject.settings)) for other in others]
        return min(findings, key=lambda finding: finding.error)

    return on_the_other


@cache
def simulated_peak(schedule: str, tokens: int, hidden: int, vocabulary: int, chunks: int) -> int:
    return HeadStep(schedule, vocabulary, hidden, chunk_size=tokens // chunks).timeline(tokens).step_peak_bytes


def predicted(subject: Subject, function: str, expected: float, within: float, **options: float) -> Finding:
    """A number that the student's formula gives, against the true one."""
    adapter: Loss = subject.function  # type: ignore[assignment]
    found = Numbers(adapter.sandbox).one(function, **options)
    if found.dim():
        raise Failed(f"{function} should return one number, it returned an array")
    told = ", ".join(f"{name}={value}" for name, value in options.items())
    error = abs(found.item() / expected - 1) if found.isfinite() else math.inf
    return Finding(error, within, f"{function}({told}) is {found.item():.6g} and should be {expected:.6g}")


def step_peaks(schedule: str, function: str) -> Callable[[Subject], Finding]:
    def check(subject: Subject) -> Finding:
        return worst_of(
            predicted(
                subject, function, simulated_peak(schedule, tokens, hidden, vocabulary, chunks), 0.02,
                tokens=tokens, hidden_size=hidden, vocab_size=vocabulary, element_bytes=2, chunks=chunks,
            )
            for tokens, hidden, vocabulary, chunks in STEPS
        )  # fmt: skip

    return check


def kept(subject: Subject) -> Finding:
    return worst_of(
        predicted(
            subject, "kept_bytes", 8192 * 32000 * size, 1e-9,
            tokens=8192, vocab_size=32000, element_bytes=size, chunks=chunks,
        )
        for size, chunks in ((2, 1), (2, 8), (4, 64))
    )  # fmt: skip


def best(subject: Subject) -> Finding:
    return worst_of(
        predicted(subject, "best_chunk_count", 3 * tokens / (2 * hidden), 0.01, tokens=tokens, hidden_size=hidden)
        for tokens, hidden in ((8192, 2048), (65536, 4096))
    )


CHUNKING = Assignment(
    number=2,
    title="Chunking and its plateau",
    functions=("chunked_loss", "checkpointed_loss", "kept_bytes", "chunked_step_peak", "best_chunk_count",
               "checkpointed_step_peak"),
    adapter=chunked,
    modules=("torch", "torch._dynamo"),  # what the first checkpoint imports takes seconds
    settings=checks.SETTINGS,
    shiftable="loss",
    to_be_used=("checkpoint",),
    to_review={
        "linear_cross_entropy": "PyTorch's own function of that name does the chunking itself",
        "Function": "autograd is to keep, or not to keep, what it keeps by itself",
    },
    items=(
        Item("loss", "the loss of a few equal chunks", 10, (checks.LOSS,), CHAPTER, "The loop"),
        Item("gradients", "dx and dw", 10,
             (asked("dx", "dx should be that of the whole batch at once, row by row.",
                    lambda subject: checks.direction("dx", subject)),
              asked("dw", "dw should be that of the whole batch at once.",
                    lambda subject: checks.direction("dw", subject)),
              asked("length", "They should be multiplied by 1/N once.", checks.length)),
             CHAPTER, "The loop"),
        Item("last chunk", "29 tokens in chunks of 8", 10, (checks.LAST_CHUNK,), CHAPTER, "The loop"),
        Item("one division", "ignored tokens, unequally many in each chunk", 15, (checks.ONE_DIVISION,),
             CHAPTER, "1. A mean of means"),
        Item("checkpoint: values", "loss, dx and dw of checkpointed_loss", 10,
             (asked("checkpoint.values", "Loss and gradients should be those of the whole batch at once.",
                    of_the_checkpointed(checks.values)),),
             CHAPTER, "Checkpoint each chunk"),
        Item("checkpoint: memory", "what checkpointed_loss holds", 15,
             (asked("checkpoint.memory",
                    "Logits of all tokens should never be alive together: keep a chunk's inputs and make it again.",
                    of_the_checkpointed(checks.holds_no_logits)),),
             CHAPTER, "Checkpoint each chunk", requires=("checkpoint: values",)),
        Item("kept", "what n chunks keep until backward", 5,
             (asked("kept", "The log-probabilities of all chunks together are as many as without chunks.", kept),),
             CHAPTER, "The staircase"),
        Item("plateau", "the step peak of n chunks", 15,
             (asked("plateau", "The step peak should be the largest of three moments, within 2 % of the simulated one.",
                    step_peaks("chunked", "chunked_step_peak")),),
             CHAPTER, "The way down, buffer by buffer"),
        Item("best count", "the number of chunks with the lowest peak", 5,
             (asked("best", "The second and the third moment should be equal there.", best),),
             CHAPTER, "The way down, buffer by buffer"),
        Item("checkpointed peak", "the step peak of n checkpointed chunks", 5,
             (asked("checkpointed_peak", "The staircase is gone; the sum of dw is not.",
                    step_peaks("checkpointed", "checkpointed_step_peak")),),
             CHAPTER, "Checkpoint each chunk"),
    ),
)  # fmt: skip
