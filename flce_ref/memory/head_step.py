"""One step of the head alone, under every schedule and as training scripts write it by hand: simulated, and fitted.

:func:`longest_context` and :func:`fewest_chunks` say what a card of given memory can train. Both search with the closed
form of :func:`flce_ref.explain`, which takes microseconds, and let the simulation decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ref.explanation import Explanation, explain
from flce_ref.functional import linear_cross_entropy
from flce_ref.memory.simulator import simulate
from flce_ref.memory.step_inputs import head_inputs
from flce_ref.memory.timeline import Timeline

SCHEDULES = ("naive", "chunked", "checkpointed", "fused", "vocab_tiled")

#: More chunks than this take minutes to simulate.
MOST_CHUNKS = 16_384

# Up to so many chunks a fit is simulated; above, the closed form decides, with an allowance for what it leaves out.
_CHECKED_CHUNKS = 256
_TILE = 128


def logits_kept(input: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The logits have a name, as in a model's forward that returns them: they outlive the loss."""
    logits = F.linear(input, linear_weight)
    return F.cross_entropy(logits, target), logits


def float_logits(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    """The loss is computed in float32."""
    return F.cross_entropy(F.linear(input, linear_weight).float(), target)


def float_logits_kept(input: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both, as many model files do."""
    logits = F.linear(input, linear_weight).float()
    return F.cross_entropy(logits, target), logits


#: What training scripts write, by the names that the command line gives it.
IDIOMS: dict[str, Callable[..., Any]] = {
    "naive-kept": logits_kept,
    "naive-float": float_logits,
    "naive-float-kept": float_logits_kept,
}


@dataclass(frozen=True)
class HeadStep:
    """A head of V × D and a way to compute its loss; ``chunk_size`` None is the default rule.

    A chunk has some of the tokens or, under vocab_tiled, where it is a tile, some of the words.

    ``schedule`` is one of ``SCHEDULES`` or ``IDIOMS``, ``kernel`` as :func:`flce_ref.memory.simulate` takes it.
    """

    schedule: str
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "cuda"
    chunk_size: int | None = None

    @property
    def has_chunks(self) -> bool:
        return self.schedule in SCHEDULES and self.schedule != "naive"

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return head_inputs(tokens, self.vocab_size, self.hidden_size, self.dtype)

    def input_bytes(self, tokens: int) -> int:
        return sum(t.numel() * t.element_size() for t in self.inputs(tokens))

    def _options(self, chunk_size: int | None) -> dict[str, Any]:
        chunk_size = chunk_size or self.chunk_size
        return {"schedule": self.schedule} | ({"chunk_size": chunk_size} if chunk_size and self.has_chunks else {})

    def explained(self, tokens: int, chunk_size: int | None = None) -> Explanation:
        """What would run; for the library's own schedules."""
        return explain(*self.inputs(tokens), **self._options(chunk_size))

    def cut(self, tokens: int) -> int:
        """How many of what is cut into chunks there are: tokens, or words."""
        return self.vocab_size if self.schedule == "vocab_tiled" else tokens

    def chunk_rows(self, tokens: int) -> int | None:
        """C, or T, at so many tokens; None without chunks."""
        return self.explained(tokens).chunk_size if self.has_chunks else None

    def timeline(self, tokens: int, chunk_size: int | None = None) -> Timeline:
        """The step, simulated."""
        function = IDIOMS.get(self.schedule) or partial(linear_cross_entropy, **self._options(chunk_size))
        title = f"{self.schedule}, {tokens:,} tokens"
        names = ("input", "linear_weight", "target")
        return simulate(function, *self.inputs(tokens), kernel=self.kernel, title=title, labels=names)


# ---------------------------------------------------------------- what fits


def longest_context(step: HeadStep, budget: int) -> int:
    """The tokens N with which inputs and step peak together are at most ``budget`` bytes, and with N + 1 are not; or 0.

    Exact up to 256 chunks, where simulations decide. Above, short by an allowance: a few in a thousand at D = 2048.
    The memory of a schedule with the default chunk rises with N but for small steps down, where the rule takes one
    chunk more.
    """
    if step.schedule in IDIOMS:
        return _largest(lambda n: _simulated(step, n) <= budget)
    guess = _largest(lambda n: _predicted(step, n) + _allowance(step, n) <= budget)
    if not _is_checked(step, max(guess, 1)):
        return guess
    left_out = _simulated(step, max(guess, 1)) - _predicted(step, max(guess, 1))
    guess = _largest(lambda n: _predicted(step, n) + left_out <= budget)
    return _largest_near(guess, lambda n: _simulated(step, n) <= budget)


def fewest_chunks(step: HeadStep, tokens: int, budget: int) -> int | None:
    """The chunk size that makes the fewest chunks with which ``tokens`` fit into ``budget`` bytes, inputs included.

    Sizes tried are N/1, N/2, … (of a tile V/1, V/2, …) rounded up to 128, so that chunks are about equal; below that,
    powers of two. None if no chunk fits, or the schedule has none.
    """
    if not step.has_chunks:
        return None
    for rows in _equal_chunks(step.cut(tokens)):
        if _predicted(step, tokens, rows) > budget:
            continue
        if _is_checked(step, tokens, rows):
            fits = _simulated(step, tokens, rows) <= budget
        else:
            fits = _predicted(step, tokens, rows) + _allowance(step, tokens, rows) <= budget
        if fits:
            return rows
    return None


def _equal_chunks(total: int) -> Iterator[int]:
    last, count = total, 1
    yield total
    while last > _TILE:
        count += 1
        rows = -(-total // count)
        rows = -(-rows // _TILE) * _TILE
        if rows < last:
            yield rows
            last = rows
        elif rows > _TILE:
            count = max(count, -(-total // (rows - _TILE)) - 1)  # the next count at which rows fall by a tile
    yield from (1 << bit for bit in range(6, -1, -1) if 1 << bit < total)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest n ≥ 1 that fits, of those between which it changes once; 0 if 1 does not."""
    return _largest_near(0, fits)


def _largest_near(guess: int, fits: Callable[[int], bool]) -> int:
    """As :func:`_largest`, asking little if ``guess`` is close."""
    low, high, stride = guess, max(guess, 1), 1
    while low > 0 and not fits(low):
        low, high, stride = max(0, low - stride), low, 2 * stride
    if low == guess:
        high = low + stride
        while fits(high):
            low, high, stride = high, high + 2 * stride, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@cache
def _simulated(step: HeadStep, tokens: int, rows: int | None = None) -> int:
    """Inputs and step peak, in bytes."""
    return step.timeline(tokens, rows).peak_bytes


@cache
def _predicted(step: HeadStep, tokens: int, rows: int | None = None) -> int:
    """The same in closed form: less by what has N or V elements, and by rounding."""
    peak = step.explained(tokens, rows).step_peak_bytes
    assert peak is not None
    return step.input_bytes(tokens) + peak


def _chunks(step: HeadStep, tokens: int, rows: int | None) -> int:
    return -(-step.cut(tokens) // (rows or step.chunk_rows(tokens) or tokens))


def _is_checked(step: HeadStep, tokens: int, rows: int | None = None) -> bool:
    return _chunks(step, tokens, rows) <= _CHECKED_CHUNKS


def _allowance(step: HeadStep, tokens: int, rows: int | None = None) -> int:
    """More than the closed form leaves out: values of each row, scalars of each chunk, values of each word."""
    wide = max(4, step.dtype.itemsize)
    per_row = (
        12 if step.schedule == "vocab_tiled" else 2
    )  # statistics, coefficients and their temporaries; loss and lse
    return (per_row * wide + 1) * tokens + 2048 * _chunks(step, tokens, rows) + 2 * wide * step.vocab_size
