"""The rows that no implementation can do without: loss, gradients, reductions, ignore_index."""

from __future__ import annotations

import torch

from .cases import make
from .compare import GRADIENTS, agree
from .registry import Finding, check
from .subject import Subject

PARTS = {
    "loss": "the mean over tokens of lse − z[y]",
    "dx": "(softmax − one-hot) W / N",
    "dw": "(softmax − one-hot)ᵀ x / N",
}


def _declare_parts() -> None:
    for part, formula in PARTS.items():

        @check(part, f"{part} of a plain call", f"{part} should be {formula}.", core=True)
        def plain_call(subject: Subject, dtype: torch.dtype, part: str = part) -> Finding:
            return agree(subject, make(subject.device), (part,))

        should = {
            "loss": "Ignored tokens should count neither in the sum nor in the denominator of the mean.",
            "dx": "Rows of ignored tokens should have a zero gradient, the others 1 / n_valid of theirs.",
            "dw": "Ignored tokens should add nothing to dw.",
        }[part]

        @check(f"ignore_index.{part}", f"{part} with a third of the targets ignored", should, core=True)
        def some_ignored(subject: Subject, dtype: torch.dtype, part: str = part) -> Finding:
            return agree(subject, make(subject.device, ignored=1 / 3), (part,))


def _declare_reductions() -> None:
    for reduction, should in {
        "sum": "The sum should be divided by nothing, neither in the loss nor in the gradients.",
        "mean": 'Naming "mean" should be the same as leaving it out.',
        "none": "The loss should have the target's shape, and each token's gradient should be that of its own loss.",
    }.items():

        @check(f"reduction.{reduction}", f'loss, dx, dw under "{reduction}"', should, core=True)
        def reduced(subject: Subject, dtype: torch.dtype, reduction: str = reduction) -> Finding:
            # named in the call too: a Problem leaves out what is the default
            return agree(subject, make(subject.device, reduction=reduction), reduction=reduction)


_declare_parts()
_declare_reductions()


@check(
    "ignore_index.none",
    'loss, dx, dw under "none" with a third ignored',
    "Each ignored token should have loss 0 and gradient 0.",
    core=True,
)
def ignored_under_none(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, ignored=1 / 3, reduction="none"))


@check(
    "ignore_index.in_vocabulary",
    "an ignore_index that is a word of the vocabulary",
    "Targets equal to ignore_index should be ignored, also where they are valid indices.",
    core=True,
)
def ignored_in_vocabulary(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, ignored=1 / 3, ignore_index=3))


@check(
    "ignore_index.any_value",
    "an ignore_index far outside the vocabulary",
    "ignore_index should be compared with, never used as an index.",
    core=True,
)
def ignored_by_any_value(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, ignored=1 / 3, ignore_index=1_000_000_007))


@check(
    "ignore_index.all.loss",
    "mean loss with every target ignored",
    "The mean over no tokens should be NaN, as in PyTorch.",
    core=True,
)
def all_ignored_loss(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, ignored=1.0), ("loss",))


@check(
    "ignore_index.all.gradients",
    "gradients of the mean with every target ignored",
    "The gradients should be zero although the loss is NaN, as in PyTorch.",
    core=True,
)
def all_ignored_gradients(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, ignored=1.0), GRADIENTS)


@check(
    "ignore_index.all.sum",
    "sum with every target ignored",
    "A sum over no tokens should be 0, with zero gradients.",
    core=True,
)
def all_ignored_sum(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, ignored=1.0, reduction="sum"))
