"""Inputs of every shape, layout and size, and what must not happen to them."""

from __future__ import annotations

from functools import partial

import torch

from .cases import bias_for, class_weight_for, exact, make
from .compare import agree, agree_like_plain, compared, largest, worst, worst_of
from .reference import Result, execute, truth
from .registry import Finding, check
from .subject import Subject


@check(
    "shape.no_tokens",
    "N = 0",
    "No tokens should give a NaN mean, an empty dx and a zero dw, as in PyTorch.",
    needs=("input", "target"),
)
def no_tokens(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, tokens=0))


@check(
    "shape.no_tokens.sum",
    "N = 0 under sum",
    "A sum over no tokens should be 0.",
    needs=("input", "target", "reduction"),
)
def no_tokens_sum(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, tokens=0, reduction="sum"))


@check("shape.one_token", "N = 1", "One token should be a batch like any other.")
def one_token(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree(subject, make(subject.device, tokens=1))


@check(
    "shape.odd_vocabulary",
    "V = 1, 2, 7, 1021: not multiples of 8",
    "No vocabulary size should need padding, and none should be padded with words that count.",
)
def odd_vocabulary(subject: Subject, dtype: torch.dtype) -> Finding:
    return worst_of(agree(subject, make(subject.device, vocabulary=vocabulary)) for vocabulary in (1, 2, 7, 1021))


@check(
    "shape.large_vocabulary",
    "V = 262,147, targets at both ends",
    "Indices and sums should be wide enough for the largest vocabularies.",
)
def large_vocabulary(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=5, hidden=4, vocabulary=262_147)
    ends = torch.tensor([0, 65_536, 131_072, 262_144, 262_146], device=subject.device)
    problem = problem.but(target=ends)
    error, part = worst(execute(subject, problem), truth(problem))
    # A float32 sum over so many words loses digits, plain PyTorch's too; too narrow an index or sum loses far more.
    return Finding(error, 1e-3, f"{part} is off by {error:.2g} of its largest element")


@check(
    "shape.long",
    "N = 4,099 tokens, a prime",
    "Every token should count, those of a short last chunk too, whatever the chunk.",
)
def long_input(subject: Subject, dtype: torch.dtype) -> Finding:
    # What each token adds to dw is seen only if none is lost among thousands: one target per word of the vocabulary.
    problem = make(subject.device, tokens=4099, vocabulary=47)
    return agree(subject, problem.but(reduction="sum"))


@check(
    "shape.leading",
    "input (2, 3, 5, D) and a single token (D,)",
    "Any leading shape should do, with target, per-token loss and dx shaped alike.",
    needs=("input", "target"),
)
def leading_shape(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=30, reduction="none")
    batched = problem.but(input=problem.input.reshape(2, 3, 5, -1), target=problem.target.reshape(2, 3, 5))
    single = problem.but(input=problem.input[0], target=problem.target[0], reduction="mean")
    return worst_of(agree(subject, shaped) for shaped in (batched, single))


@check(
    "layout.input",
    "input transposed, strided, expanded",
    "Strides of input should make no difference.",
    needs=("input",),
)
def input_layout(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    x = problem.input
    layouts = (x.mT.contiguous().mT, x.repeat_interleave(2, dim=1)[:, ::2], x[:1].expand_as(x), x.flip(0))
    return worst_of(agree(subject, problem.but(input=layout)) for layout in layouts)


@check(
    "layout.linear_weight",
    "linear_weight transposed, strided, expanded",
    "Strides of linear_weight should make no difference.",
    needs=("linear_weight",),
)
def weight_layout(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    w = problem.linear_weight
    layouts = (w.mT.contiguous().mT, w.repeat_interleave(2, dim=0)[::2], w[:, :1].expand_as(w))
    return worst_of(agree(subject, problem.but(linear_weight=layout)) for layout in layouts)


@check(
    "layout.target",
    "target strided and expanded",
    "Strides of target should make no difference.",
    needs=("target",),
)
def target_layout(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device)
    y = problem.target
    layouts = (torch.stack([y, y + 1], dim=1)[:, 0], y[:1].expand_as(y))
    return worst_of(agree(subject, problem.but(target=layout)) for layout in layouts)


@check(
    "logits.times_1000",
    "logits a thousand times larger",
    "Nothing should overflow, and the loss should be as exact as PyTorch's.",
)
def huge_logits(subject: Subject, dtype: torch.dtype) -> Finding:
    return agree_like_plain(subject, make(subject.device, spread=1500.0), ("loss", "dx", "dw"), largest)


@check(
    "logits.common_offset",
    "1e4 added to every logit",
    "softmax should not notice a common offset: max and Σ exp(z − max), not exp(z − lse).",
)
def common_offset(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = exact(subject.device, offset=1e4)
    expected, actual = truth(problem), execute(subject, problem)
    # The offset's own column of dx is 1e4 · Σ dlogits: nothing but the rounding of a zero.
    expected.dx[:, -1] = actual.dx[:, -1] = 0.0  # type: ignore[index]
    return compared(actual, expected)


@check("inputs.unmodified", "the caller's tensors", "Forward and backward should write to no tensor of the caller's.")
def unmodified(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    tensors = {"input": problem.input, "linear_weight": problem.linear_weight, "target": problem.target}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    execute(subject, problem)
    changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]
    return Finding(float(len(changed)), 0.0, f"changed: {', '.join(changed)}")


@check(
    "outputs.all_written",
    "every uninitialised buffer filled with NaN",
    "Every element that is returned should have been written, those of ignored rows too.",
)
def all_written(subject: Subject, dtype: torch.dtype) -> Finding:
    was, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Deterministic mode fills what torch.empty returns with NaN; warn_only, since nothing is asked for but that.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        problem = make(subject.device, ignored=1 / 3, reduction="none")
        return worst_of(agree(subject, problem.but(reduction=reduction)) for reduction in ("none", "mean"))
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)


@check(
    "calls.interleaved",
    "two forwards, then their two backwards",
    "A call should leave alone what an earlier one still needs: no buffer is shared between calls.",
)
def interleaved_calls(subject: Subject, dtype: torch.dtype) -> Finding:
    problems = [make(subject.device, seed=seed).leaves() for seed in (0, 9)]
    losses = [subject(problem) for problem in problems]
    gradients = [
        torch.autograd.grad(loss, (problem.input, problem.linear_weight))
        for loss, problem in zip(losses, problems, strict=True)
    ]
    return worst_of(
        compared(Result(loss.detach(), *gradient), truth(problem))
        for loss, gradient, problem in zip(losses, gradients, problems, strict=True)
    )


@check(
    "chunk.invariance",
    "chunk_size 1, 7, 16, N − 1, N, N + 1",
    "The chunk should change when the logits exist, and nothing else; the mean divides once, not per chunk.",
    needs=("chunk_size",),
)
def chunk_invariance(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    # One chunk of seven is ignored throughout.
    problem.target[7:14] = -100
    return worst_of(agree(subject, problem, chunk_size=size) for size in (1, 7, 16, 36, 37, 38))


@check(
    "chunk.combinations",
    "bias, class weight and per-token loss in chunks of 5",
    "Every option should mean the same at every chunk boundary.",
    needs=("chunk_size", "linear_bias", "weight"),
)
def chunk_combinations(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    problem = problem.but(linear_bias=bias_for(problem), weight=class_weight_for(problem))
    return worst_of(
        agree(subject, problem.but(reduction=reduction), chunk_size=5) for reduction in ("mean", "sum", "none")
    )


@check(
    "shape.beyond_int32",
    "N · V > 2³¹, logits in one piece where chunk_size allows",
    "Offsets into the logits should be 64-bit: loss and dx of the last tokens are looked at.",
    dtypes=(torch.bfloat16,),
    device="cuda",
)
def beyond_int32(subject: Subject, dtype: torch.dtype) -> Finding:
    free, _ = torch.cuda.mem_get_info(subject.device)
    if free < 24 * 2**30:  # plain PyTorch holds these logits three times, and may widen them
        raise NotImplementedError(f"this row needs 24 GiB of free device memory, there are {free / 2**30:.1f}")
    problem = make(subject.device, tokens=16_400, hidden=16, vocabulary=131_077, dtype=dtype, reduction="sum")
    last = slice(-16, None)
    expected = truth(problem.but(input=problem.input[last], target=problem.target[last], reduction="none"))
    whole = subject.chunks_of(len(problem.target))
    with torch.no_grad():
        loss = subject(problem.but(reduction="none"), **whole)
    # Under "sum" a row of dx depends on its own token only.
    dx = execute(partial(subject, **whole), problem).dx
    assert dx is not None
    error, part = worst(Result(loss[last], dx[last]), expected, ("loss", "dx"))
    return Finding(error, 2.0**-6, f"the last tokens' {part} is off by {error:.2g}")
