"""How much of the truth survives in low precision, each time against plain PyTorch in the same dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Problem, confident, make
from .compare import MULTIPLE, agree_like_plain, largest, like_plain, overall, worst
from .reference import Result, execute, plain, truth
from .registry import Finding, check
from .subject import Subject

HALF = (torch.bfloat16, torch.float16)
ALL = (torch.float32, *HALF)

# 1 − p[y] ≈ 0.001 is what is left of a sum near 1: the float32 roundings of that sum, whatever its order, count
# against it.
_LEFT_OF_ONE = 16 * 2.0**-23 / 1e-3


def _training_batch(subject: Subject, dtype: torch.dtype) -> Problem:
    """Many tokens of a small head; on CUDA a larger one, whose truth in float64 a small GPU can still hold."""
    if subject.device.type == "cuda":
        return make(subject.device, tokens=4096, hidden=256, vocabulary=8192, dtype=dtype)
    return make(subject.device, tokens=2048, hidden=32, vocabulary=256, dtype=dtype)


def _declare_parts() -> None:
    for part in ("loss", "dx", "dw"):

        @check(
            f"precision.{part}",
            f"{part}, default chunks",
            f"{part} should be within {MULTIPLE:g} × the error of F.cross_entropy(F.linear) in the same dtype.",
            dtypes=ALL,
            core=True,
        )
        def default_chunks(subject: Subject, dtype: torch.dtype, part: str = part) -> Finding:
            return agree_like_plain(subject, _training_batch(subject, dtype), (part,))


_declare_parts()


@check(
    "precision.dw_many_chunks",
    "dw summed over 128 chunks",
    "Chunks should be summed in float32: a dw rounded after every chunk drifts.",
    dtypes=ALL,
)
def many_chunks(subject: Subject, dtype: torch.dtype) -> Finding:
    # The sum, for a float16 mean may already have lost its small gradients before they are added up.
    problem = _training_batch(subject, dtype).but(reduction="sum")
    size = problem.input.shape[0] // 128
    return agree_like_plain(subject, problem, ("dw",), **subject.chunks_of(size))


def _plain_with_float32_logits(problem: Problem) -> Tensor:
    """F.cross_entropy(F.linear(…).float()): in bfloat16 the CPU's own cross_entropy gives such tokens loss 0."""
    return F.cross_entropy(
        F.linear(problem.input, problem.linear_weight).float(), problem.target, reduction=problem.reduction
    )


@check(
    "precision.confident",
    "dx of tokens with p[y] ≈ 0.999",
    "The one-hot should be subtracted before p is rounded: p[y] − 1 is all that is left of the gradient.",
    dtypes=HALF,
)
def confident_tokens(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = confident(subject.device, dtype, reduction="sum")
    return agree_like_plain(subject, problem, ("dx", "dw"), yardstick=_plain_with_float32_logits, floor=_LEFT_OF_ONE)


@check(
    "precision.loss_digits",
    "per-token loss of 0.001 beside an lse of 28",
    "lse − z[y] should be taken in float32: in the logits' dtype the small loss loses its digits.",
    dtypes=HALF,
    needs=("reduction",),
)
def loss_digits(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = confident(subject.device, dtype, level=16.0, reduction="none")
    return agree_like_plain(subject, problem, ("loss",), largest, _plain_with_float32_logits, _LEFT_OF_ONE)


@check(
    "precision.float16_mean",
    "float16 mean over 4,096 tokens",
    "1/N should not be folded into float16 dlogits, where p/N underflows: gradients should be as under a loss scale.",
    dtypes=(torch.float16,),
)
def float16_mean(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=4096, hidden=4, vocabulary=1024, dtype=dtype, spread=1.0)

    # The gradient of the mean times N: a loss scale as any float16 training has, which plain PyTorch gets as a sum.
    def scaled(problem: Problem) -> Tensor:
        return plain(problem.but(reduction="sum"))

    parts = ("dx", "dw")
    expected, found = truth(problem), execute(subject, problem)
    error, part = worst(found, expected, parts, overall)
    of_sum = Result(expected.loss, *(getattr(expected, part) * len(problem.target) for part in parts))
    allowed, _ = worst(execute(scaled, problem), of_sum, parts, overall)
    # Gradients of the mean are themselves stored in float16, some of them below its smallest normal number.
    stored = max(overall(getattr(expected, part).to(dtype), getattr(expected, part)) for part in parts)
    return like_plain(error, part, allowed + stored, dtype)


@check(
    "precision.float64",
    "float64 inputs",
    "float64 inputs should be computed in float64.",
    dtypes=(torch.float64,),
    needs=("input", "dtype", "float64"),
)
def float64(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree_like_plain(subject, make(subject.device, dtype=dtype), ("loss", "dx", "dw"), largest)
