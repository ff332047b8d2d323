"""Assignment 4: a row kernel in Triton, run by Triton's interpreter."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ref.conformance.cases import Problem, confident, exact, make
from flce_ref.conformance.compare import agree, worst_of
from flce_ref.conformance.registry import Finding
from flce_ref.conformance.subject import Subject

from ..adapters import RowKernel
from ..marking import Assignment, Item, asked, exactly
from ..sandbox import Sandbox

GRADIENT, ROW, PRECISION = "02-the-gradient", "07-the-kernel", "06-precision"
WORDS = 128  # a power of two: a block of so many needs no mask
IGNORED = -100
NOTHING = Finding(math.inf, 0.0, "the logits were left as they are, or overwritten by zeros or by what is no number")


def kernel(sandbox: Sandbox) -> RowKernel:
    return RowKernel(sandbox, "cross_entropy_")


def problem() -> Problem:
    return make(tokens=7, vocabulary=WORDS)


def logits_of(one: Problem) -> Tensor:
    return F.linear(one.input, one.linear_weight)


def run(subject: Subject, logits: Tensor, target: Tensor, block: int = WORDS, gap: int = 0) -> tuple[Tensor, Tensor]:
    """What the kernel makes of the logits: loss (C,) and dlogits (C, V), in float64."""
    adapter: RowKernel = subject.function  # type: ignore[assignment]
    loss, dlogits = adapter.rows(logits, target, IGNORED, block, gap)
    return loss.double(), dlogits.double()


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], where: str) -> Finding:
    """Two runs of the student's own kernel agree, and the first did something: what it did is judged elsewhere."""
    if not first[1].isfinite().all() or not first[1].any():
        return NOTHING
    return worst_of(exactly(f"{name} {where}", b, a) for name, a, b in zip(("the loss", "the gradient"), first, second))


def loss(subject: Subject) -> Finding:
    return agree(subject, problem(), ("loss",))


def gradient(subject: Subject) -> Finding:
    one = problem()
    expected = torch.softmax(logits_of(one).double(), 1) - F.one_hot(one.target, WORDS)
    return exactly("the gradient", run(subject, logits_of(one), one.target)[1], expected)


def blocks(subject: Subject) -> Finding:
    one = problem()
    whole, pieces = (run(subject, logits_of(one), one.target, block) for block in (WORDS, 32))
    return same(whole, pieces, "in four blocks instead of one")


def tail(subject: Subject) -> Finding:
    """101 words in a block of 128: as 128 words, the last 27 of them with logits of −1e30."""
    one = problem()
    z, y = logits_of(one), one.target % 101
    filled = z.clone()
    filled[:, 101:] = -1e30
    loss, dlogits = run(subject, filled, y)
    return same((loss, dlogits[:, :101]), run(subject, z[:, :101], y), "of 101 words in a block of 128")


def stride(subject: Subject) -> Finding:
    one = problem()
    close, apart = (run(subject, logits_of(one), one.target, gap=gap) for gap in (0, 32))
    return same(close, apart, "of rows that lie apart")


def ignored(subject: Subject) -> Finding:
    one = problem()
    y = one.target.clone()
    y[[1, 4]] = IGNORED
    counts = y != IGNORED
    all_rows, found = run(subject, logits_of(one), one.target), run(subject, logits_of(one), y)
    zeros = [torch.zeros_like(part[~counts]) for part in found]
    before, after = ((loss[counts], dlogits[counts]) for loss, dlogits in (all_rows, found))
    return worst_of(
        (same(before, after, "of other rows"),
         exactly("the loss of ignored rows", found[0][~counts], zeros[0], 0.0),
         exactly("the gradient of ignored rows", found[1][~counts], zeros[1], 0.0))
    )  # fmt: skip


def large(subject: Subject) -> Finding:
    """A common offset of 1e4 in logits that float32 holds exactly, and logits in the thousands."""
    one, moved = (exact("cpu", offset=offset, tokens=7, vocabulary=WORDS) for offset in (0.0, 1e4))
    first, second = (run(subject, logits_of(p), p.target) for p in (one, moved))
    loss, dlogits = run(subject, logits_of(make(tokens=7, vocabulary=WORDS, spread=1500.0)), one.target)
    finite = float(loss.isfinite().all() and dlogits.isfinite().all())
    overflow = Finding(1.0 - finite, 0.0, "loss or gradient is no number where logits are in the thousands")
    return worst_of((same(first, second, "with 1e4 added to every logit"), overflow))


def rounding(subject: Subject) -> Finding:
    """dlogits at targets with p ≈ 0.999, in bfloat16 as in float32 on the same logits."""
    one = confident("cpu", torch.float32)
    rows = slice(WORDS // 3)
    z, y = F.linear(one.input, one.linear_weight)[rows, :WORDS], one.target[rows]
    wide, narrow = (run(subject, z.to(dtype), y)[1].gather(1, y[:, None]) for dtype in (torch.float32, torch.bfloat16))
    if not wide.isfinite().all() or not wide.all():
        return NOTHING
    return exactly("the gradient at targets, in bfloat16,", narrow, wide, 2.0**-6)


KERNEL = Assignment(
    number=4,
    title="A row kernel in Triton",
    functions=("cross_entropy_",),
    adapter=kernel,
    settings={"block": WORDS},
    modules=("torch", "triton", "triton.language"),
    environment={"TRITON_INTERPRET": "1"},
    to_be_used=("jit",),
    to_review={
        "softmax": "tl.softmax and torch.softmax do what the kernel is to do",
        "log_softmax": "the kernel is to do this",
        "logsumexp": "the kernel is to do this",
        "cross_entropy": "the kernel is to do this",
    },
    items=(
        Item("loss", "the loss of each row, in one block", 15,
             (asked("loss", "The loss of a row should be log Σ exp(z − max) − (z[y] − max).", loss),),
             ROW, "One pass fewer: the online softmax"),
        Item("gradient", "the row overwritten, in one block", 20,
             (asked("gradient", "Each logit should be overwritten by softmax − one-hot.", gradient),),
             GRADIENT, "One token"),
        Item("blocks", "a row in several blocks", 15,
             (asked("blocks", "Where the maximum rises, what was summed before should be moved to the new one.",
                    blocks),),
             ROW, "One pass fewer: the online softmax", requires=("loss", "gradient")),
        Item("tail", "a vocabulary that is no multiple of the block", 10,
             (asked("tail", "Loads and stores should be masked beyond the last word.", tail),),
             ROW, "One contract, three ways", requires=("loss", "gradient")),
        Item("stride", "rows that do not lie side by side", 10,
             (asked("stride", "A row should start at its number times logits.stride(0).", stride),),
             ROW, "One contract, three ways", requires=("loss", "gradient")),
        Item("ignored rows", "rows whose target is ignore_index", 10,
             (asked("ignored", "An ignored row should have loss 0 and be overwritten by zeros.", ignored),),
             GRADIENT, "Options: three numbers per row", requires=("loss", "gradient")),
        Item("large logits", "a common offset, logits in the thousands", 10,
             (asked("large", "The maximum should be subtracted before exp, and lse never be formed.", large),),
             GRADIENT, "The direction that does not matter", requires=("loss", "gradient")),
        Item("rounding", "tokens with p ≈ 0.999 in bfloat16", 10,
             (asked("rounding", "The one-hot should be subtracted in float32, before p is rounded.", rounding),),
             PRECISION, "First place: the one-hot", requires=("loss", "gradient")),
    ),
)  # fmt: skip
