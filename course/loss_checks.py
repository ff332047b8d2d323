"""Checks of a loss of tensors, shared by assignments 2 and 3. Each looks at one thing and is blind to the others.

The subject is called with 32 tokens in chunks of 8 unless a check is about something else.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from flce_ref.conformance.cases import Problem, make
from flce_ref.conformance.compare import agree, like_plain, overall, worst_of
from flce_ref.conformance.reference import Result, execute, plain, truth
from flce_ref.conformance.registry import Check, Finding
from flce_ref.conformance.subject import Subject

from .adapters import Loss
from .marking import asked, exactly, up_to_a_factor
from .sandbox import MIB

SETTINGS = {"chunk_size": 8}


def small(tokens: int = 32) -> Problem:
    return make(tokens=tokens, vocabulary=101)


def ignoring() -> Problem:
    """As many tokens of each chunk as not are ignored, and all of the second one."""
    problem = small()
    problem.target[torch.tensor([1, 2, 5, *range(8, 16), 17, 30])] = -100
    return problem


def loss(subject: Subject) -> Finding:
    problem = small()
    return exactly("the loss", execute(subject, problem).loss, truth(problem).loss)


def one_division(subject: Subject) -> Finding:
    """The loss, and dx where tokens count: its direction only, if its length is wrong without ignored tokens too."""
    whole, problem = small(), ignoring()
    found, expected, counts = execute(subject, problem), truth(problem), problem.target >= 0
    lengths = [_part(result, "dx").double().norm() for result in (execute(subject, whole), truth(whole))]
    right_length = bool((lengths[0] / lengths[1] - 1).abs() < 1e-4)
    dx, due = (_part(result, "dx")[counts] for result in (found, expected))
    of_dx = exactly if right_length else up_to_a_factor
    return worst_of((exactly("the loss", found.loss, expected.loss), of_dx("dx where tokens count", dx, due)))


def last_chunk(subject: Subject) -> Finding:
    problem = small(tokens=29)
    return up_to_a_factor("dx", execute(subject, problem).dx, _part(truth(problem), "dx"), by_row=True)


def direction(part: str, subject: Subject, frozen: tuple[str, ...] = ()) -> Finding:
    """Of dx, row by row, or of dw."""
    problem = small()
    found = getattr(execute(subject, problem, frozen=frozen), part)
    return up_to_a_factor(part, found, _part(truth(problem), part), by_row=part == "dx")


def length(subject: Subject) -> Finding:
    """The lengths of dx and dw: what 1/N, and whatever else multiplies them, has to make right."""
    problem, findings = small(), []
    found, expected = execute(subject, problem), truth(problem)
    for part in ("dx", "dw"):
        ours, due = (_part(result, part).double().norm() for result in (found, expected))
        error = float((ours / due - 1).abs().nan_to_num(nan=math.inf))
        findings.append(Finding(error, 1e-4, f"{part} is {(ours / due).item():.4g} times as long as it should be"))
    return worst_of(findings)


def ignored_gradient(subject: Subject) -> Finding:
    """Ignored rows of dx are zero, and what stands in these rows of the input doesn't reach dw."""
    problem = ignoring()
    ignored = problem.target < 0
    found = execute(subject, problem)
    other = problem.input.clone()
    other[ignored] = 3.0
    again = execute(subject, problem.but(input=other))
    dx, dw = _part(found, "dx"), _part(found, "dw")
    if not (dx[~ignored].any(1).all() and dw.any()):
        return Finding(math.inf, 0.0, "the gradient of tokens that count is zero")
    return worst_of(
        (exactly("dx of ignored tokens", dx[ignored], torch.zeros_like(dx[ignored]), 0.0),
         exactly("dw, with other inputs at ignored tokens,", _part(again, "dw"), dw))
    )  # fmt: skip


def upstream(subject: Subject) -> Finding:
    problem = small()
    once, scaled = execute(subject, problem), execute(subject, problem, -2.7)
    return worst_of(
        exactly(f"{part} under an upstream gradient of −2.7", _part(scaled, part), -2.7 * _part(once, part))
        for part in ("dx", "dw")
    )


def twice(subject: Subject) -> Finding:
    problem = small().leaves()
    loss = subject(problem)
    leaves, factor = (problem.input, problem.linear_weight), torch.full_like(loss, 0.3)
    first, second = (torch.autograd.grad(loss, leaves, factor, retain_graph=True) for _ in range(2))
    return worst_of(exactly(f"{name} of the second backward", b, a) for name, a, b in zip(("dx", "dw"), first, second))


def frozen(subject: Subject) -> Finding:
    return worst_of((direction("dw", subject, ("input",)), direction("dx", subject, ("linear_weight",))))


def many_chunks(subject: Subject) -> Finding:
    """dw in bfloat16 over 128 chunks, against plain PyTorch in bfloat16; its length is not looked at."""
    problem = make(tokens=2048, hidden=32, vocabulary=256, dtype=torch.bfloat16)
    expected = _part(truth(problem), "dw")
    found = _part(execute(partial(subject, chunk_size=16), problem), "dw").double()
    found = found * ((found * expected).sum() / (found * found).sum())
    return like_plain(overall(found, expected), "dw", overall(execute(plain, problem).dw, expected), torch.bfloat16)


def holds_no_logits(subject: Subject) -> Finding:
    """What the kernel says that the process holds: during forward, and between forward and backward."""
    adapter: Loss = subject.function  # type: ignore[assignment]
    tokens, vocabulary = 8192, 2048
    logits = 4 * tokens * vocabulary
    problem = make(tokens=tokens, hidden=4, vocabulary=vocabulary).leaves()
    subject(problem, chunk_size=512)  # a first call allocates more
    subject(small(tokens=8).leaves())  # the graph of the large one is dropped
    before = adapter.sandbox.resident_bytes()
    value = subject(problem, chunk_size=512)
    held, peak = adapter.sandbox.resident_bytes() - before, adapter.sandbox.peak_bytes - before
    if not value.isfinite():
        return Finding(math.inf, 0.0, f"the loss of {tokens} tokens is {value.item()}")
    detail = (
        f"{held / MIB:.0f} MiB are held after forward, allowed are {logits / 4 / MIB:.0f}; during forward it is "
        f"{peak / MIB:.0f}, allowed are {logits / 2 / MIB:.0f}; all logits are {logits / MIB:.0f}"
    )
    return Finding(max(held / (logits / 4), peak / (logits / 2)), 1.0, detail)


def values(subject: Subject) -> Finding:
    """Loss, dx and dw, all strictly."""
    return agree(subject, small())


def _part(result: Result, part: str) -> torch.Tensor:
    tensor = getattr(result, part)
    if tensor is None:
        raise ValueError(f"there is no {part}")
    return tensor  # type: ignore[no-any-return]


LOSS = asked("loss", "The loss should be the mean over tokens of lse − z[y].", loss)
LAST_CHUNK = asked("last_chunk", "Every token should count, those of a short last chunk too.", last_chunk)
ONE_DIVISION = asked(
    "one_division",
    "Sums should be divided once, by the number of tokens that count in all chunks together.",
    one_division,
)


def memory(id: str, why: str) -> Check:
    return asked(id, f"Logits of all tokens should never be alive together: {why}", holds_no_logits)
