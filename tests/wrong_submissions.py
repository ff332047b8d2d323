"""Typical mistakes in the course's assignments: one place of a reference solution changed, and the items that it costs.

Assignment 3 is also graded with the implementations of `wrong_implementations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import wrong_implementations

COURSE = Path(__file__).parent.parent / "course"
SOLUTIONS = {number: next((COURSE / "solutions").glob(f"{number}_*.py")) for number in (1, 2, 3, 4)}


@dataclass(frozen=True)
class Mistake:
    """`old` in the reference solution of `assignment` is written as `new`; exactly `lost` are lost."""

    assignment: int
    name: str
    old: str
    new: str
    lost: frozenset[str]

    @property
    def source(self) -> str:
        right = SOLUTIONS[self.assignment].read_text(encoding="utf-8")
        assert right.count(self.old) == 1, f"{self.old!r} is there {right.count(self.old)} times"
        return right.replace(self.old, self.new)


def mistake(assignment: int, name: str, old: str, new: str, *lost: str) -> Mistake:
    return Mistake(assignment, name, old, new, frozenset(lost))


# In assignment 2 the two functions end alike: what makes a line that of the first.
END_OF_THE_FIRST = "ignore_index)\n    return total / (target != ignore_index).sum()\n\n\ndef checkpointed"
LOOP_OF_THE_FIRST = "target.split(chunk_size)):\n        total = total + chunk_loss"
CHUNKED = "def chunked_loss(input, linear_weight, target, chunk_size, ignore_index=-100):\n"
CHECKPOINTED = "def checkpointed_loss(input, linear_weight, target, chunk_size, ignore_index=-100):\n"
PEAK = "return max(last, last_but_one, first_sum)"
FUSED = "return FusedLinearCrossEntropy.apply(input, linear_weight, target, ignore_index, chunk_size)"
PLAIN = "return torch.nn.functional.cross_entropy(input @ linear_weight.T, target, ignore_index=ignore_index)"
EVERY_CHUNK = "for start in range(0, len(target), chunk_size):"
FIRST_LOAD = 'mask=column < V, other=-float("inf")).to(tl.float32)\n            new_max'
ZEROS = "tl.store(z_row + column, zeros.to(logits.dtype.element_ty), mask=column < "

MISTAKES = [
    # ---------------------------------------------------------------- 1: the gradient by hand
    mistake(1, "no maximum in lse", "largest = z.max(axis=1)", "largest = np.zeros(len(z))", "large logits"),
    mistake(1, "no maximum in softmax", "z - z.max(axis=1, keepdims=True)", "z", "large logits"),
    mistake(1, "softmax over columns", "e / e.sum(axis=1, keepdims=True)", "e / e.sum(axis=0)", "softmax", "mean"),
    mistake(1, "logarithm of base 2", "largest + np.log(", "largest + np.log2(", "log-sum-exp"),
    mistake(1, "sign of the loss", "return log_sum_exp(z) - z[np.arange(len(y)), y]",
            "return z[np.arange(len(y)), y] - log_sum_exp(z)", "token losses"),
    mistake(1, "mean over all tokens", "gradient / counts.sum()", "gradient / len(y)", "mean"),
    mistake(1, "a sum, not a mean", "gradient / counts.sum()", "gradient", "dlogits"),
    mistake(1, "gradient of ignored tokens", "    gradient[~counts] = 0\n", "", "ignored rows"),
    mistake(1, "1 subtracted in whole columns", "gradient[rows, y[rows]]", "gradient[:, y[rows]]", "dlogits"),
    mistake(1, "dx of a part of the weight", "gradient @ w,", "gradient[:, :5] @ w[:5],", "head: dx"),
    mistake(1, "dw transposed", "gradient.T @ x", "(gradient.T @ x).T", "head: dw"),
    mistake(1, "dw divided again", "gradient.T @ x", "gradient.T @ x / len(y)", "head: dw"),
    mistake(1, "smoothing not taken from the target", "-= 1 - label_smoothing", "-= 1", "options"),
    # ---------------------------------------------------------------- 2: chunking
    mistake(2, "mean of the chunks' means",
            f"chunk_loss(x, linear_weight, y, {END_OF_THE_FIRST}",
            "chunk_loss(x, linear_weight, y, ignore_index) / (y != ignore_index).sum()\n"
            "    return total / len(target.split(chunk_size))\n\n\ndef checkpointed", "one division"),
    mistake(2, "the last chunk is lost", LOOP_OF_THE_FIRST,
            LOOP_OF_THE_FIRST.replace(")):", ")[: len(target) // chunk_size]):"), "last chunk"),
    mistake(2, "mean over all tokens", END_OF_THE_FIRST,
            END_OF_THE_FIRST.replace("(target != ignore_index).sum()", "len(target)"), "one division"),
    mistake(2, "targets shifted", CHUNKED, f"{CHUNKED}    target = target.roll(-1)\n", "loss"),
    mistake(2, "detached weight", LOOP_OF_THE_FIRST,
            LOOP_OF_THE_FIRST.replace(")):\n", ")):\n        linear_weight = linear_weight.detach()\n"), "gradients"),
    mistake(2, "no checkpoint", "checkpoint(chunk_loss, x, linear_weight, y, ignore_index, use_reentrant=False)",
            "chunk_loss(x, linear_weight, y, ignore_index)", "checkpoint: memory"),
    mistake(2, "one checkpoint around everything", CHECKPOINTED, f"{CHECKPOINTED}    chunk_size = len(target)\n",
            "checkpoint: memory"),
    mistake(2, "one chunk's log-probabilities", "return tokens * vocab_size * element_bytes\n",
            "return tokens * vocab_size * element_bytes / chunks\n", "kept"),
    mistake(2, "two copies of the logits", PEAK, "return 2 * logits", "plateau"),
    mistake(2, "dw added in place", PEAK, "return max(last, last_but_one)", "plateau"),
    mistake(2, "no dw in the checkpointed peak", "3 * logits / chunks + weight, 3 * weight", "3 * logits / chunks, 0",
            "checkpointed peak"),
    mistake(2, "the other fraction", "3 * tokens / (2 * hidden_size)", "2 * tokens / (3 * hidden_size)", "best count"),
    # ---------------------------------------------------------------- 3: the fused function
    mistake(3, "dw of the last chunk only", "dw.addmm_(", "dw.zero_().addmm_(", "dw", "1/N", "frozen", "precision"),
    mistake(3, "plain autograd", FUSED, PLAIN, "memory"),
    mistake(3, "all logits, of which none are kept", EVERY_CHUNK, f"chunk_size = len(target)\n        {EVERY_CHUNK}",
            "memory"),
    mistake(3, "a sum, not a mean, in backward", "factor = upstream / n.clamp(min=1)", "factor = upstream", "1/N"),
    # ---------------------------------------------------------------- 4: the kernel
    mistake(4, "no maximum", "tl.maximum(row_max, tl.max(z, 0))", "row_max * 0.0", "large logits"),
    mistake(4, "the sum is not moved to the new maximum", "sumexp * tl.exp(row_max - new_max)", "sumexp", "blocks"),
    mistake(4, "the load is not masked", f", {FIRST_LOAD}", ").to(tl.float32)\n            new_max", "tail"),
    mistake(4, "the store is not masked", "gradient.to(logits.dtype.element_ty), mask=column < V)",
            "gradient.to(logits.dtype.element_ty))", "tail"),
    mistake(4, "rows taken for contiguous", "z_row = logits + row * row_stride", "z_row = logits + row * V", "stride"),
    mistake(4, "gradient of ignored rows left", f"{ZEROS}V)", f"{ZEROS}0)", "ignored rows"),
    mistake(4, "ignored rows are not skipped", "if y == ignore_index:", "if y == ignore_index - 1:", "ignored rows"),
    mistake(4, "no one-hot", "p - tl.where(column == y, 1.0, 0.0)", "p", "gradient"),
    mistake(4, "one-hot after rounding", "gradient = p -", "gradient = p.to(logits.dtype.element_ty).to(tl.float32) -",
            "rounding"),
    mistake(4, "p by a rounded lse", "p = tl.exp(z - row_max) / sumexp", "p = tl.exp(z - (row_max + tl.log(sumexp)))",
            "large logits"),
    mistake(4, "lse for the loss", "- (z_y - row_max))", "+ row_max)", "loss", "large logits"),
]  # fmt: skip

# Assignment 3: what wrong implementations of the library's tests cost.
IMPLEMENTATIONS = {
    "Right": frozenset[str](),
    "MeanOverAllTokens": frozenset({"mean over tokens that count"}),
    "GradientOfIgnored": frozenset({"ignored tokens"}),
    # A function of autograd for each chunk, so that autograd sums their dw in bfloat16.
    "MeanOfChunkMeans": frozenset({"mean over tokens that count", "precision"}),
    "ShiftsTarget": frozenset({"loss"}),
    "LosesLastChunk": frozenset({"last chunk"}),
    "SavesLogits": frozenset({"memory"}),
    "RoundsEveryChunk": frozenset({"precision"}),
    "DividesTwice": frozenset({"1/N"}),
    "IgnoresUpstream": frozenset({"upstream gradient"}),
    "ScalesInPlace": frozenset({"twice"}),
    "DropsDwOfFrozenInput": frozenset({"frozen"}),
    # Mistakes that the assignment doesn't ask about.
    "NoMaximum": frozenset(),
    "SubtractsAfterRounding": frozenset(),
    "NegativeMeansIgnored": frozenset(),
}


def implementation(name: str) -> str:
    """The wrong implementation as a submission for assignment 3."""
    text = Path(wrong_implementations.__file__).read_text(encoding="utf-8")
    return f"""{text}

def fused_linear_cross_entropy(input, linear_weight, target, ignore_index=-100, chunk_size=1024):
    return {name}()(input, linear_weight, target, ignore_index=ignore_index, chunk_size=chunk_size)
"""
