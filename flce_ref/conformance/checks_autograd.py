"""What autograd may ask: any upstream gradient, twice, of some inputs only, under no_grad and autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from .cases import LEAVES, Problem, bias_for, make, upstream_for
from .compare import EXACT, GRADIENTS, agree, compared, largest, like_plain, overall, worst, worst_of
from .reference import Result, execute, plain, truth
from .registry import Finding, check
from .subject import Subject


@check(
    "upstream.scalar",
    "an upstream gradient of −2.7",
    "The upstream gradient should multiply dx and dw.",
)
def upstream_scalar(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device), GRADIENTS, upstream=-2.7)


@check(
    "upstream.per_token",
    'one upstream gradient per token under "none"',
    "Each token's gradient should be multiplied by its own upstream gradient, before the sum over tokens.",
    needs=("reduction",),
)
def upstream_per_token(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3, reduction="none")
    return agree(subject, problem, GRADIENTS, upstream=upstream_for(problem))


@check(
    "upstream.expanded",
    "a stride-0 upstream gradient",
    "An expanded upstream gradient, as .sum() makes it, should be read by its strides.",
    needs=("reduction",),
)
def upstream_expanded(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, reduction="none")

    def expanded_by_sum(problem: Problem) -> Tensor:
        total: Tensor = subject(problem).sum()
        return 1.7 * total

    return compared(execute(expanded_by_sum, problem), truth(problem, 1.7), GRADIENTS)


@check(
    "upstream.strided",
    "an upstream gradient with stride 2",
    "A strided upstream gradient should be read by its strides.",
    needs=("reduction",),
)
def upstream_strided(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, reduction="none")
    factor = upstream_for(problem)

    def interleaved(problem: Problem) -> Tensor:
        # The gradient of a reshaped stack's column arrives with a stride of 2.
        loss = subject(problem)
        total: Tensor = _StridedUpstream.apply(loss, factor)
        return total

    return compared(execute(interleaved, problem), truth(problem, factor), GRADIENTS)


class _StridedUpstream(torch.autograd.Function):
    """Σ factor · loss, whose backward hands `factor` back as every second element of a wider buffer of NaN."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor.to(loss.dtype))
        return (loss * factor).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        wide = torch.full((factor.numel(), 2), float("nan"), dtype=factor.dtype, device=factor.device)
        wide[:, 0] = factor * upstream
        return wide[:, 0], None


@check(
    "upstream.composed",
    "the loss inside a larger expression",
    "The loss should be an ordinary node of the graph: gradients of exp(loss) and of a second path add up.",
)
def upstream_composed(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)

    def used_twice(problem: Problem) -> Tensor:
        loss = subject(problem)
        composed: Tensor = torch.exp(0.1 * loss) + 0.25 * loss
        return composed

    loss = truth(problem).loss
    upstream = 0.1 * torch.exp(0.1 * loss) + 0.25
    return compared(execute(used_twice, problem), truth(problem, upstream), GRADIENTS)


@check(
    "backward.twice",
    "a second backward under retain_graph",
    "Each backward should give the same gradients: saved gradients are not scaled in place while the graph is kept.",
)
def backward_twice(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device).leaves()
    expected = truth(problem, 0.3)
    loss = subject(problem)
    leaves, upstream = (problem.input, problem.linear_weight), torch.full_like(loss, 0.3)
    kept = [
        Result(loss, *torch.autograd.grad(loss, leaves, upstream, retain_graph=again)) for again in (True, True, False)
    ]
    # Compared only now, so that a backward that reuses the buffers of the one before is seen too.
    return worst_of(compared(result, expected, GRADIENTS) for result in kept)


@check(
    "backward.accumulates",
    ".grad that already holds something",
    "backward() should add to .grad once, and touch nothing else of the caller's.",
)
def backward_accumulates(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device).leaves()
    expected = truth(problem)
    leaves = (problem.input, problem.linear_weight)
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, 0.5)
    subject(problem).backward()
    found = Result(expected.loss, *(leaf.grad - 0.5 for leaf in leaves))  # type: ignore[arg-type, operator]
    return compared(found, expected, GRADIENTS)


@check(
    "backward.second_derivative",
    "a derivative of the gradient",
    "A double backward should be right or raise an error: never silently leave out the Hessian.",
)
def second_derivative(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    found = []
    for function in (_in_double(plain), subject):
        leaves = problem.leaves()
        # Squared, so that the upstream gradient depends on the inputs too: a backward written as g · dx then returns
        # something, which is not the second derivative.
        squared = function(leaves) ** 2
        try:
            dx = torch.autograd.grad(squared, leaves.input, create_graph=True)[0]
            found.append(torch.autograd.grad(dx.square().sum(), leaves.input)[0])
        except Exception:
            return Finding(0.0, EXACT, "it raised an error")
    error = largest(found[1], found[0])
    return Finding(error, EXACT, f"the second derivative is off by {error:.2g}, and no error was raised")


def _in_double(function: Callable[[Problem], Tensor]) -> Callable[[Problem], Tensor]:
    """The function computed in float64, differentiable with respect to the problem's own leaves."""
    return lambda problem: function(
        problem.but(input=problem.input.double(), linear_weight=problem.linear_weight.double())
    )


@check(
    "frozen.gradients",
    "every combination of frozen input, linear_weight, linear_bias",
    "Each gradient should come whichever others are needed, and none that is not.",
)
def frozen_gradients(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    if subject.accepts(linear_bias=bias_for(make(subject.device, vocabulary=8))):
        problem = problem.but(linear_bias=bias_for(problem))
    found = []
    for frozen in chain.from_iterable(combinations(LEAVES, count) for count in (0, 1, 2)):
        for reduction in ("mean", "none"):
            if all(getattr(problem, name) is None for name in LEAVES if name not in frozen):
                continue
            finding = agree(subject, problem.but(reduction=reduction), frozen=frozen)
            found.append(Finding(finding.error, EXACT, f"{finding.detail}, frozen: {', '.join(frozen) or 'nothing'}"))
    return worst_of(found)


@check(
    "no_grad.loss",
    "the loss under torch.no_grad() and inference_mode",
    "The loss should be the same without gradients, and carry no graph.",
)
def no_grad_loss(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device).leaves()
    errors = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss = subject(problem)
        if loss.requires_grad or loss.grad_fn is not None:
            return Finding(float("inf"), EXACT, "the loss carries a graph")
        errors.append(largest(loss, truth(problem).loss))
    return Finding(max(errors), EXACT, f"the loss is off by {max(errors):.2g}")


@check(
    "tied_embedding",
    "linear_weight that is also the embedding",
    "Gradients of both uses of a tied weight should add up.",
)
def tied_embedding(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    words = make(subject.device, seed=5).target

    def gradient(function: Callable[[Problem], Tensor], weight: Tensor) -> Tensor:
        weight = weight.detach().requires_grad_()
        loss = function(problem.but(input=weight[words], linear_weight=weight))
        return torch.autograd.grad(loss, weight)[0]

    expected = gradient(plain, problem.linear_weight.double())
    error = largest(gradient(subject, problem.linear_weight), expected)
    return Finding(error, EXACT, f"the gradient of the tied weight is off by {error:.2g}")


@check(
    "micro_batches",
    "two micro-batches, one global token count",
    "Sums over micro-batches divided by the global number of valid tokens should be the mean of the whole batch.",
    needs=("reduction",),
)
def micro_batches(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)

    def in_two(problem: Problem) -> Tensor:
        n_valid = (problem.target != -100).sum()
        parts = (slice(0, 11), slice(11, None))
        losses = [
            subject(problem.but(input=problem.input[part], target=problem.target[part], reduction="sum"))
            for part in parts
        ]
        mean: Tensor = (losses[0] + losses[1]) / n_valid
        return mean

    return compared(execute(in_two, problem), truth(problem))


def _autocast(function: Callable[[Problem], Tensor], problem: Problem) -> Tensor:
    with torch.autocast(problem.input.device.type, dtype=torch.bfloat16):
        return function(problem)


@check(
    "autocast.mixed",
    "bfloat16 input, float32 linear_weight under autocast",
    "Mixed dtypes should work as in F.linear, each gradient in the dtype of its tensor.",
)
def autocast_mixed(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=300, vocabulary=256)
    problem = problem.but(input=problem.input.bfloat16())
    expected = truth(problem)
    allowed, _ = worst(execute(partial(_autocast, plain), problem), expected, ("loss", "dx", "dw"), overall)
    found = execute(partial(_autocast, subject), problem)
    if found.dx is None or found.dw is None or (found.dx.dtype, found.dw.dtype) != (torch.bfloat16, torch.float32):
        return Finding(float("inf"), 0.0, "dx should be bfloat16 and dw float32")
    error, part = worst(found, expected, ("loss", "dx", "dw"), overall)
    return like_plain(error, part, allowed, torch.bfloat16)


@check(
    "autocast.applied",
    "float32 tensors under autocast",
    "Autocast should take the products to bfloat16, as it does for F.linear: dw should not be float32's.",
)
def autocast_applied(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    within, without = execute(partial(_autocast, subject), problem), execute(subject, problem)
    ignored = largest(within.dw, without.dw) < 1e-6  # type: ignore[arg-type]
    return Finding(float(ignored), 0.0, "dw was computed in float32" if ignored else "")
