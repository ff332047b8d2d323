"""Names for allocations that a real run recorded without any.

Two sources, both of which can be checked by a reader: the Python stack (only forward has one: CUDA's autograd thread
runs no Python), and, when the shapes of the head are given, the sizes. What neither settles stays unnamed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flce_ref.memory.timeline import CATEGORIES, Allocation, Frame, Timeline

_BY_LENGTH = sorted((c for c in CATEGORIES if c != "other"), key=len, reverse=True)
_WORD = {name: re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])") for name in _BY_LENGTH}

#: Below this, what cross_entropy allocates is its result and its divisor, not log-probabilities.
_LARGE = 1 << 20
_ELEMENT_SIZES = (2, 4, 8)


def category_of(label: str) -> str:
    """The category that ``label`` names ("log-probabilities of chunk 3"), else "other"."""
    return next((name for name in _BY_LENGTH if _WORD[name].search(label)), "other")


def first_backward_frame(stacks: Sequence[Sequence[Frame]]) -> int | None:
    """Index of the first stack inside ``Tensor.backward`` or ``torch.autograd.backward`` / ``grad``, else None."""
    for index, frames in enumerate(stacks):
        for frame in frames:
            if frame.name in ("backward", "grad") and frame.filename.endswith(
                ("torch/_tensor.py", "torch/autograd/__init__.py")
            ):
                return index
    return None


def name_by_stack(allocations: Sequence[Allocation], backward_start: int | None) -> list[Allocation]:
    """Name what ``F.cross_entropy`` makes, the logits that it read, and the gradients of both.

    * The first large buffer that a call of ``F.cross_entropy`` or ``F.log_softmax`` allocates is its log-probabilities.
    * The newest buffer of that size that was alive then and is not yet named is the logits.
    * Autograd walks back through ``nll_loss`` and then ``log_softmax``; so, of the buffers of that size which backward
      allocates without a Python stack, the first is the gradient of the log-probabilities, and one made while that is
      alive is dlogits.

    Named allocations are left alone.
    """
    named = list(allocations)
    unnamed_by_size: dict[int, list[int]] = {}
    sizes: set[int] = set()
    gradients: list[Allocation] = []
    call: tuple[Frame, ...] = ()
    for index, allocation in enumerate(named):
        before_backward = backward_start is None or allocation.start < backward_start
        frames = allocation.frames
        if allocation.label or allocation.category != "other":
            pass
        elif before_backward and _in_cross_entropy(frames):
            if allocation.bytes >= _LARGE and frames != call:
                _name_logits(named, unnamed_by_size.get(allocation.bytes, []), allocation)
                named[index] = _named(allocation, "log-probabilities", "log-probabilities")
                sizes.add(allocation.bytes)
        elif not before_backward and not frames and allocation.bytes in sizes:
            gradients = [g for g in gradients if g.end is None or g.end > allocation.start]
            label = "dlogits" if len(gradients) % 2 else "gradient of the log-probabilities"
            gradients.append(allocation)
            named[index] = _named(allocation, label, "dlogits")
        elif allocation.start > 0:
            unnamed_by_size.setdefault(allocation.bytes, []).append(index)
        # Consecutive allocations with one stack belong to one call.
        call = frames if _in_cross_entropy(frames) and allocation.bytes >= _LARGE else call
        if not _in_cross_entropy(frames):
            call = ()
    return _number_chunks(named)


def name_by_size(timeline: Timeline, *, tokens: int, vocab_size: int, hidden_size: int) -> Timeline:
    """Name what a head of N × D by D × V must be by its size; elements of 2, 4 and 8 B are tried.

    Args:
        timeline: usually a snapshot's.
        tokens: N, the rows of one step.
        vocab_size: V.
        hidden_size: D.

    Returns:
        The timeline with labels added where there was none. A size that two things share stays unnamed: so does a
        buffer of C = D rows of logits, which is as large as the weight.

    Raises:
        ValueError: if a size is not positive.
    """
    for name, value in (("tokens", tokens), ("vocab_size", vocab_size), ("hidden_size", hidden_size)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected 1 or more")
    sizes = _HeadSizes(tokens, vocab_size, hidden_size)
    before = Counter(a.bytes for a in timeline.allocations if a.start == 0)
    chunks = {a.bytes // vocab_size * hidden_size for a in timeline.allocations if sizes.is_logits(a.bytes)}

    def named(a: Allocation) -> Allocation:
        if a.start == 0:
            label, category = sizes.given(a.bytes)
            several = f"{label}, or one of {before[a.bytes]} buffers of its size"
            return a if not label else _named(a, label if before[a.bytes] == 1 else several, category)
        if a.label:
            return a
        if a.bytes in sizes.weights:
            return _named(a, "dw", "dw")
        if a.bytes in sizes.inputs:
            return _named(a, "dx", "dx")
        if a.bytes in chunks and a.bytes >= _LARGE:
            return _named(a, "dx of a chunk", "dx")
        return _named(a, "logits, later their gradient", "logits") if sizes.is_logits(a.bytes) else a

    note = f"labels by size: N = {tokens}, V = {vocab_size}, D = {hidden_size}"
    allocations = tuple(named(a) for a in timeline.allocations)
    return replace(timeline, allocations=allocations, notes=(*timeline.notes, note))


class _HeadSizes:
    """Bytes of the tensors of a head, for every element size of a floating type."""

    def __init__(self, tokens: int, vocab_size: int, hidden_size: int) -> None:
        self.target = tokens * 8
        self.weights = {vocab_size * hidden_size * e for e in _ELEMENT_SIZES}
        self.inputs = {tokens * hidden_size * e for e in _ELEMENT_SIZES}
        self._row_sizes = [vocab_size * e for e in _ELEMENT_SIZES]
        self._tokens = tokens

    def given(self, size: int) -> tuple[str, str]:
        """Label and category of a block of ``size`` bytes that was there before the step."""
        if size in self.weights:
            return "linear_weight", "weight"
        if size in self.inputs:
            return "input", "input"
        return ("target", "input") if size == self.target else ("", "")

    def is_logits(self, size: int) -> bool:
        """Whether this is several whole rows of logits, at most N, and not a weight."""
        if size < _LARGE or size in self.weights:
            return False
        return any(size % row == 0 and 1 < size // row <= self._tokens for row in self._row_sizes)


def _in_cross_entropy(frames: Sequence[Frame]) -> bool:
    return bool(frames) and (
        frames[0].name in ("cross_entropy", "log_softmax") and frames[0].filename.endswith("torch/nn/functional.py")
    )


def _name_logits(named: list[Allocation], candidates: list[int], reader: Allocation) -> None:
    """Name the newest of ``candidates`` that was alive when ``reader`` was allocated."""
    for index in reversed(candidates):
        end = named[index].end
        if (end is None or end > reader.start) and not named[index].label:
            named[index] = _named(named[index], "logits", "logits")
            return


def _number_chunks(named: list[Allocation]) -> list[Allocation]:
    """Append "of chunk k" where forward made several; from 1, as they were made."""
    for label in ("logits", "log-probabilities"):
        indices = [i for i, a in enumerate(named) if a.label == label and a.category == label]
        for number, index in enumerate(indices if len(indices) > 1 else (), start=1):
            named[index] = _named(named[index], f"{label} of chunk {number}", label)
    return named


def _named(allocation: Allocation, label: str, category: str) -> Allocation:
    return replace(allocation, label=label, category=category)
