"""Assignment 1: the gradient by hand, in NumPy, which has no autograd.

Each function is judged with what the student's functions before it give, so that a mistake in one is not paid for in
those that use it.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ref.conformance.compare import worst_of
from flce_ref.conformance.registry import Finding
from flce_ref.conformance.subject import Subject

from ..adapters import Numbers
from ..marking import Assignment, Item, asked, drawn, exactly

ROWS, WORDS = 9, 13
CHAPTER = "02-the-gradient"


def logits() -> Tensor:
    return 2 * drawn(ROWS, WORDS)


def targets(ignored: int = 0) -> Tensor:
    """So many rows, from the second on and every other one, carry −100."""
    y = (torch.arange(ROWS) * 5) % WORDS
    y[1 : 2 * ignored : 2] = -100
    return y


def ask(subject: Subject) -> Numbers:
    numbers: Numbers = subject.function  # type: ignore[assignment]
    return numbers


def lse(subject: Subject) -> Finding:
    return exactly("log_sum_exp(z)", ask(subject).one("log_sum_exp", logits()), torch.logsumexp(logits(), 1))


def softmax(subject: Subject) -> Finding:
    return exactly("softmax(z)", ask(subject).one("softmax", logits()), torch.softmax(logits(), 1))


def large_logits(subject: Subject) -> Finding:
    z, found = logits(), []
    for name in ("log_sum_exp", "softmax"):
        here = ask(subject).one(name, z)
        for offset in (1e4, -1e4):
            there = ask(subject).one(name, z + offset)
            moved = here + offset if name == "log_sum_exp" else here
            found.append(exactly(f"{name}(z {offset:+g})", there, moved))
    return worst_of(found)


def losses(subject: Subject) -> Finding:
    z, y = logits(), targets()
    expected = ask(subject).one("log_sum_exp", z) - z[torch.arange(ROWS), y]
    return exactly("token_losses(z, y)", ask(subject).one("token_losses", z, y), expected)


def gradient(subject: Subject) -> Finding:
    z, y = logits(), targets()
    expected = (ask(subject).one("softmax", z) - F.one_hot(y, WORDS)) / ROWS
    return exactly("dlogits(z, y)", ask(subject).one("dlogits", z, y), expected)


def ignored_rows(subject: Subject) -> Finding:
    y = targets(ignored=3)
    found = ask(subject).one("dlogits", logits(), y)
    if not found[y >= 0].any(1).all():
        return Finding(math.inf, 0.0, "rows of tokens that count are zero")
    return exactly("dlogits(z, y) at ignored rows", found[y < 0], torch.zeros(int((y < 0).sum()), WORDS), 0.0)


def divisor(subject: Subject) -> Finding:
    y = targets(ignored=3)
    own = ask(subject).one("dlogits", logits()[y >= 0], y[y >= 0])
    if not own.any():
        return Finding(math.inf, 0.0, "the gradient of the tokens that count is zero")
    return exactly("dlogits(z, y) at rows that count", ask(subject).one("dlogits", logits(), y)[y >= 0], own)


def head(part: str, subject: Subject) -> Finding:
    x, w, y = drawn(ROWS, 5, seed=1), drawn(WORDS, 5, seed=2), targets()
    z = x @ w.mT
    found = dict(zip(("loss", "dx", "dw"), ask(subject)("head", x, w, y, results=3)))
    if part == "loss":
        losses = ask(subject).one("token_losses", z, y)
        if not losses.any():
            return Finding(math.inf, 0.0, "token_losses is zero")
        return exactly("the loss", found["loss"], losses.mean())
    dlogits = ask(subject).one("dlogits", z, y)
    if not dlogits.any():
        return Finding(math.inf, 0.0, "dlogits is zero")
    return exactly(part, found[part], dlogits @ w if part == "dx" else dlogits.mT @ x)


def smoothed(subject: Subject) -> Finding:
    z, y, smoothing, z_loss = logits(), targets(), 0.1, 0.01
    p, lse = ask(subject).one("softmax", z), ask(subject).one("log_sum_exp", z)
    expected = (1 + 2 * z_loss * lse[:, None]) * p - (1 - smoothing) * F.one_hot(y, WORDS) - smoothing / WORDS
    found = ask(subject).one("dlogits_with_options", z, y, label_smoothing=smoothing, z_loss=z_loss)
    return exactly("dlogits_with_options(z, y, 0.1, 0.01)", found, expected)


GRADIENT = Assignment(
    number=1,
    title="The gradient by hand",
    functions=("log_sum_exp", "softmax", "token_losses", "dlogits", "head", "dlogits_with_options"),
    adapter=Numbers,
    modules=(),
    to_review={
        "torch": "the assignment is in NumPy, where every derivative has to be written out",
        "jax": "the assignment is in NumPy, where every derivative has to be written out",
        "scipy": "log-sum-exp and softmax are to be written out",
    },
    items=(
        Item("log-sum-exp", "log_sum_exp of each row", 10,
             (asked("lse", "log_sum_exp(z) should be log Σ exp(z) of each row, (N,).", lse),),
             CHAPTER, "One token"),
        Item("softmax", "softmax of each row", 10,
             (asked("softmax", "softmax(z) should be exp(z − lse) of each row, (N, V).", softmax),),
             CHAPTER, "One token"),
        Item("large logits", "both, with 1e4 added to every logit", 15,
             (asked("large", "An offset should be added to lse and change nothing else: subtract the maximum.",
                    large_logits),),
             CHAPTER, "The direction that does not matter"),
        Item("token losses", "the loss of each token", 10,
             (asked("losses", "token_losses(z, y) should be lse − z[y], (N,), with your own lse.", losses),),
             CHAPTER, "One token"),
        Item("dlogits", "the gradient of the mean loss", 15,
             (asked("dlogits", "dlogits(z, y) should be (softmax(z) − onehot(y)) / N, (N, V), with your own softmax.",
                    gradient),),
             CHAPTER, "One token"),
        Item("ignored rows", "rows of ignored tokens", 10,
             (asked("ignored", "The gradient of an ignored token should be zero.", ignored_rows),),
             CHAPTER, "Options: three numbers per row"),
        Item("mean", "what the mean divides by when tokens are ignored", 10,
             (asked("divisor", "The rows that count should be as without the ignored tokens: divide by the number that "
                    "count.", divisor),),
             CHAPTER, "Through the head"),
        Item("head: loss", "the loss of a head", 5,
             (asked("head.loss", "It should be the mean of your own token_losses(x wᵀ, y).", partial(head, "loss")),),
             CHAPTER, "Through the head"),
        Item("head: dx", "the gradient of the input", 5,
             (asked("head.dx", "dx should be dlogits W, (N, D), with your own dlogits.", partial(head, "dx")),),
             CHAPTER, "Through the head"),
        Item("head: dw", "the gradient of the weight", 5,
             (asked("head.dw", "dw should be dlogitsᵀ x, (V, D), with your own dlogits.", partial(head, "dw")),),
             CHAPTER, "Through the head"),
        Item("options", "label smoothing and z-loss", 5,
             (asked("options", "dlogits_with_options should be A p − B onehot(y) − s of each row, not divided by N.",
                    smoothed),),
             CHAPTER, "Options: three numbers per row"),
    ),
)  # fmt: skip
