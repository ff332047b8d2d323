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


@check(
    "bias",
    "loss, dx, dw with a bias",
    "linear_bias should be added to every logit once, the target's included.",
    needs=("linear_bias",),
)
def bias(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    return agree(subject, problem.but(linear_bias=bias_for(problem)), ("loss", "dx", "dw"))


@check(
    "bias.gradient",
    "the bias's own gradient",
    "The gradient of linear_bias should be dlogits summed over tokens.",
    needs=("linear_bias",),
)
def bias_gradient(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    return agree(subject, problem.but(linear_bias=bias_for(problem)), ("dbias",))


@check(
    "class_weight.mean",
    'class weight under "mean"',
    "The mean should divide by the sum of the targets' weights, not by their number.",
    needs=("weight",),
)
def class_weight_mean(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    return agree(subject, problem.but(weight=class_weight_for(problem)))


@check(
    "class_weight.sum",
    'class weight under "sum"',
    "Each token's loss should be multiplied by the weight of its target.",
    needs=("weight",),
)
def class_weight_sum(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, reduction="sum")
    return agree(subject, problem.but(weight=class_weight_for(problem)))


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
    "label_smoothing",
    "label smoothing 0.1",
    "The target distribution should be (1 − ε) one-hot + ε / V.",
    needs=("label_smoothing",),
)
def label_smoothing(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, label_smoothing=0.1))


@check("z_loss", "z-loss 0.01", "z_loss · lse² should be added to each token's loss.", needs=("z_loss",))
def z_loss(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, z_loss=0.01))


@check(
    "z_loss.ignored",
    "z-loss with a third of the targets ignored",
    "Ignored tokens should have no z-loss, and its mean should divide by the valid ones.",
    needs=("z_loss",),
)
def z_loss_ignored(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, z_loss=0.01, ignored=1 / 3))


@check(
    "z_loss.class_weight",
    "z-loss beside a class weight",
    "The z-loss's mean should divide by the number of valid tokens, the cross-entropy's by their weights.",
    needs=("z_loss", "weight"),
)
def z_loss_class_weight(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, z_loss=0.01, ignored=1 / 3)
    return agree(subject, problem.but(weight=class_weight_for(problem)))


@check(
    "softcap",
    "soft-capped logits",
    "Logits should be softcap · tanh(z / softcap), and dlogits multiplied by 1 − tanh².",
    needs=("softcap",),
)
def softcap(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, softcap=3.0, spread=4.0))


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
    if subject.accepts(linear_bias=bias_for(small)):
        axes["linear_bias"] = (None, bias_for(problem))
    if subject.accepts(weight=class_weight_for(small)):
        axes["weight"] = (None, class_weight_for(problem))
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
