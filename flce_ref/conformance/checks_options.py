"""Options of the objective, alone and together: bias, class weight, smoothing, z-loss, softcap, lse."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from .cases import Problem, bias_for, class_weight_for, make, upstream_for
from .compare import EXACT, GRADIENTS, agree, compared, largest, worst_of
from .reference import execute, truth
from .registry import Finding, check
from .subject import Subject

TENSORS = {"linear_bias": bias_for, "weight": class_weight_for}


# id: (what, should, fields of the problem); a bias or class weight is given where the id names one
ALONE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bias": (
        "loss, gradients with a bias",
        "linear_bias should be added to every logit once, the target's included, its gradient be dlogits summed.",
        {},
    ),
    "bias.ignored": (
        "a bias with a third of the targets ignored",
        "Ignored tokens should add nothing to the gradient of linear_bias.",
        {"ignored": 1 / 3},
    ),
    "class_weight.mean": (
        'class weight under "mean"',
        "The mean should divide by the sum of the targets' weights, not by their number.",
        {},
    ),
    "class_weight.sum": (
        'class weight under "sum"',
        "Each token's loss should be multiplied by the weight of its target.",
        {"reduction": "sum"},
    ),
    "label_smoothing": (
        "label smoothing 0.1",
        "The target distribution should be (1 − ε) one-hot + ε / V.",
        {"label_smoothing": 0.1},
    ),
    "z_loss": ("z-loss 0.01", "z_loss · lse² should be added to each token's loss.", {"z_loss": 0.01}),
    "z_loss.ignored": (
        "z-loss with a third of the targets ignored",
        "Ignored tokens should have no z-loss, and its mean should divide by the valid ones.",
        {"z_loss": 0.01, "ignored": 1 / 3},
    ),
    "z_loss.class_weight": (
        "z-loss beside a class weight",
        "The z-loss's mean should divide by the number of valid tokens, the cross-entropy's by their weights.",
        {"z_loss": 0.01, "ignored": 1 / 3},
    ),
    "softcap": (
        "soft-capped logits",
        "Logits should be softcap · tanh(z / softcap), and dlogits multiplied by 1 − tanh².",
        {"softcap": 3.0, "spread": 4.0},
    ),
}


def _declare_options() -> None:
    for id, (what, should, fields) in ALONE.items():
        given = [name for part, name in (("bias", "linear_bias"), ("class_weight", "weight")) if part in id]
        needs = (*given, *(name for name in ("label_smoothing", "z_loss", "softcap") if name in fields))

        @check(id, what, should, needs=needs)
        def alone(
            subject: Subject, dtype: torch.dtype, given: list[str] = given, fields: dict[str, Any] = fields
        ) -> Finding:
            problem = make(subject.device, **fields)
            return agree(subject, problem.but(**{name: TENSORS[name](problem) for name in given}))


_declare_options()


@check(
    "class_weight.zero",
    "class weight 0 for every other word",
    "A token whose target weighs nothing should have loss 0 and gradient 0, and not count in the mean.",
    needs=("weight",),
)
def class_weight_zero(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    weight = class_weight_for(problem)
    weight[::2] = 0.0
    return agree(subject, problem.but(weight=weight))


@check(
    "return_lse",
    "the returned log-sum-exp",
    "lse should be log Σ exp z per token, 0 where ignored, in the target's shape.",
    needs=("return_lse",),
)
def returned_lse(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    _, lse = subject(problem, return_lse=True)
    error = largest(lse, truth(problem).lse)  # type: ignore[arg-type]
    return Finding(error, EXACT, f"lse is off by {error:.2g}")


@check(
    "return_lse.gradient",
    "gradients through the returned log-sum-exp",
    "A loss that uses lse as well should get both gradients: that of lse is softmax.",
    needs=("return_lse",),
)
def lse_gradient(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    factor = upstream_for(problem)

    def with_lse(problem: Problem) -> torch.Tensor:
        loss, lse = subject(problem, return_lse=True)
        total: torch.Tensor = loss + (factor * lse).sum()
        return total

    return compared(execute(with_lse, problem), truth(problem, lse_upstream=factor), GRADIENTS)


def _combined(subject: Subject, **always: Any) -> Finding:
    """The worst error over bias × class weight × smoothing × ignored × reduction, of those that the subject takes."""
    problem = make(subject.device, tokens=19, vocabulary=29, **always)
    partly_ignored = make(subject.device, tokens=19, vocabulary=29, ignored=1 / 3).target
    small = make(subject.device, vocabulary=8)  # what Subject.accepts tries an option on
    axes: dict[str, tuple[Any, ...]] = {
        "reduction": ("mean", "sum", "none"),
        "target": (problem.target, partly_ignored),
    }
    for name, tensor_for in TENSORS.items():
        if subject.accepts(**{name: tensor_for(small)}):
            axes[name] = (None, tensor_for(problem))
    if subject.accepts(label_smoothing=0.1):
        axes["label_smoothing"] = (0.0, 0.1)
    findings = []
    for values in product(*axes.values()):
        combination = problem.but(**dict(zip(axes, values, strict=True)))
        finding = agree(subject, combination)
        findings.append(replace(finding, detail=f"{finding.detail} with {', '.join(combination.options())}"))
    return worst_of(findings)


@check(
    "combinations",
    "bias × class weight × smoothing × ignored × reduction",
    "Options should mean together what they mean alone.",
)
def combinations(subject: Subject, dtype: torch.dtype) -> Finding:
    return _combined(subject)


@check(
    "combinations.z_loss",
    "the same, times z-loss",
    "z_loss should go with every other option.",
    needs=("z_loss",),
)
def combinations_z_loss(subject: Subject, dtype: torch.dtype) -> Finding:
    return _combined(subject, z_loss=0.01)


@check(
    "combinations.softcap",
    "the same, times z-loss and softcap",
    "softcap should go with every other option.",
    needs=("z_loss", "softcap"),
)
def combinations_softcap(subject: Subject, dtype: torch.dtype) -> Finding:
    return _combined(subject, z_loss=0.01, softcap=3.0)
