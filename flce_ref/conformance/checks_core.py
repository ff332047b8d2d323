"""The rows that no implementation can do without: loss, gradients, reductions, ignore_index."""

from __future__ import annotations

from typing import Any

import torch

from .cases import make
from .compare import EVERYTHING, GRADIENTS, agree
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


# id: (what, should, fields of the problem, parts that are looked at)
IGNORED: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "none": (
        'loss, dx, dw under "none" with a third ignored',
        "Each ignored token should have loss 0 and gradient 0.",
        {"ignored": 1 / 3, "reduction": "none"},
        EVERYTHING,
    ),
    "in_vocabulary": (
        "an ignore_index that is a word of the vocabulary",
        "Targets equal to ignore_index should be ignored, also where they are valid indices.",
        {"ignored": 1 / 3, "ignore_index": 3},
        EVERYTHING,
    ),
    "any_value": (
        "an ignore_index far outside the vocabulary",
        "ignore_index should be compared with, never used as an index.",
        {"ignored": 1 / 3, "ignore_index": 1_000_000_007},
        EVERYTHING,
    ),
    "all.loss": (
        "mean loss with every target ignored",
        "The mean over no tokens should be NaN, as in PyTorch.",
        {"ignored": 1.0},
        ("loss",),
    ),
    "all.gradients": (
        "gradients of the mean with every target ignored",
        "The gradients should be zero although the loss is NaN, as in PyTorch.",
        {"ignored": 1.0},
        GRADIENTS,
    ),
    "all.sum": (
        "sum with every target ignored",
        "A sum over no tokens should be 0, with zero gradients.",
        {"ignored": 1.0, "reduction": "sum"},
        EVERYTHING,
    ),
}


def _declare_ignored() -> None:
    for name, (what, should, fields, parts) in IGNORED.items():

        @check(f"ignore_index.{name}", what, should, core=True)
        def ignored(
            subject: Subject,
            dtype: torch.dtype,
            fields: dict[str, Any] = fields,
            parts: tuple[str, ...] = parts,
        ) -> Finding:
            return agree(subject, make(subject.device, **fields), parts)


_declare_parts()
_declare_reductions()
_declare_ignored()
