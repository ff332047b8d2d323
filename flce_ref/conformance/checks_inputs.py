"""Inputs of every shape, layout and size, wrong targets included, and what must not happen to them."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

from .cases import bias_for, class_weight_for, exact, make
from .compare import EXACT, agree, agree_like_plain, largest, worst
from .reference import execute, truth
from .registry import Finding, check
from .subject import Subject

OK = "ok"


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
    return _worst_of(agree(subject, make(subject.device, vocabulary=vocabulary)) for vocabulary in (1, 2, 7, 1021))


@check(
    "shape.large_vocabulary",
    "V = 262,147, targets at both ends",
    "Indices and sums should be wide enough for the largest vocabularies.",
)
def large_vocabulary(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=5, hidden=4, vocabulary=262_147)
    ends = torch.tensor([0, 65_536, 131_072, 262_144, 262_146], device=subject.device)
    return agree_like_plain(subject, problem.but(target=ends), ("loss", "dx", "dw"), largest)


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
    return _worst_of(agree(subject, shaped) for shaped in (batched, single))


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
    return _worst_of(agree(subject, problem.but(input=layout)) for layout in layouts)


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
    return _worst_of(agree(subject, problem.but(linear_weight=layout)) for layout in layouts)


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
    return _worst_of(agree(subject, problem.but(target=layout)) for layout in layouts)


def _declare_target_dtypes() -> None:
    for target_dtype in (torch.int32, torch.uint8):
        name = str(target_dtype).removeprefix("torch.")

        @check(
            f"target.{name}",
            f"targets in {name}",
            f"{name} targets should mean what int64 ones do, or be refused (PyTorch itself takes int64 and uint8).",
            needs=("target", "dtype"),
        )
        def other_target_dtype(
            subject: Subject, dtype: torch.dtype, target_dtype: torch.dtype = target_dtype
        ) -> Finding:
            problem = make(subject.device)
            try:
                return agree(subject, problem.but(target=problem.target.to(target_dtype)))
            except RuntimeError as error:  # F.cross_entropy's own way of refusing
                raise NotImplementedError(str(error).splitlines()[0]) from error


_declare_target_dtypes()


@check(
    "target.out_of_range",
    "targets V and 2⁴⁰, in a subprocess",
    "A target that is no word should raise an exception or make the loss NaN: never crash, never pass for a loss.",
)
def out_of_range(subject: Subject, dtype: torch.dtype) -> Finding:
    return _survives(subject, (101, 2**40))


@check(
    "target.negative",
    "targets −1 and −2⁴⁰ beside ignore_index = −100, in a subprocess",
    "Only ignore_index should be ignored: another negative target is out of range like any other.",
)
def negative_target(subject: Subject, dtype: torch.dtype) -> Finding:
    return _survives(subject, (-1, -(2**40)))


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
    error, part = worst(actual, expected)
    return Finding(error, EXACT, f"{part} is off by {error:.2g} of its largest element")


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
        return _worst_of(agree(subject, problem.but(reduction=reduction)) for reduction in ("none", "mean"))
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)


@check(
    "repeat.identical",
    "the same call twice",
    "Two calls should give the same bits.",
)
def repeat(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=1500)
    first, second = (execute(subject, problem) for _ in range(2))
    error, part = worst(first, second)
    return Finding(error, 0.0, f"{part} differs by {error:.2g}")


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
    return _worst_of(agree(subject, problem, chunk_size=size) for size in (1, 7, 16, 36, 37, 38))


@check(
    "chunk.combinations",
    "bias, class weight and per-token loss in chunks of 5",
    "Every option should mean the same at every chunk boundary.",
    needs=("chunk_size", "linear_bias", "weight"),
)
def chunk_combinations(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, ignored=1 / 3)
    problem = problem.but(linear_bias=bias_for(problem), weight=class_weight_for(problem))
    return _worst_of(
        agree(subject, problem.but(reduction=reduction), chunk_size=5) for reduction in ("mean", "sum", "none")
    )


@check(
    "shape.beyond_int32",
    "N · V > 2³¹, logits in one piece where chunk_size allows",
    "Offsets into the logits should be 64-bit: the last tokens' losses are looked at.",
    dtypes=(torch.bfloat16,),
    device="cuda",
)
def beyond_int32(subject: Subject, dtype: torch.dtype) -> Finding:
    problem = make(subject.device, tokens=16_400, hidden=16, vocabulary=131_077, dtype=dtype, reduction="none")
    with torch.no_grad():
        loss = subject(problem, **subject.chunks_of(16_400))[-16:]
    expected = truth(problem.but(input=problem.input[-16:], target=problem.target[-16:])).loss
    error = largest(loss, expected)
    return Finding(error, 2.0**-6, f"the last losses are off by {error:.2g}")


def _worst_of(findings: Iterable[Finding]) -> Finding:
    """The finding with the largest error (NaN counts as largest)."""
    return max(findings, key=lambda finding: (finding.error != finding.error, finding.error))


def _survives(subject: Subject, targets: tuple[int, ...], timeout: float = 60.0) -> Finding:
    """Try each wrong target in one subprocess: passed if each raised an exception, or made the loss NaN.

    On the CPU the process is forked, so that any function can be tried; CUDA can't be used after a fork, so there the
    function must be importable.
    """
    can_fork = subject.device.type != "cuda" and "fork" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if can_fork else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_targets, args=(sender, subject, targets), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python ≥ 3.12 on forking beside PyTorch's threads
        process.start()
    sender.close()
    outcome = OK
    try:
        for wrong in targets:
            outcome = receiver.recv() if receiver.poll(timeout) else f"no answer in {timeout:.0f} s"
            if outcome != OK:
                return Finding(1.0, 0.0, f"target {wrong}: {outcome}")
    except EOFError:
        process.join(timeout)
        return Finding(1.0, 0.0, f"target {wrong}: the process died, exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return Finding(0.0, 0.0)


def _try_targets(sender: Connection, subject: Subject, targets: tuple[int, ...]) -> None:
    torch.set_num_threads(1)  # a forked child must not enter the parent's thread pool
    for wrong in targets:
        problem = make(subject.device)
        problem.target[20] = wrong
        try:
            loss = float(execute(subject, problem).loss)
            sender.send(OK if math.isnan(loss) else f"the loss was {loss:.4g}")
        except Exception:
            sender.send(OK if _device_lives(subject.device) else "a device assert ended the CUDA context")


def _device_lives(device: torch.device) -> bool:
    try:
        return torch.zeros(1, device=device).item() == 0
    except RuntimeError:
        return False
