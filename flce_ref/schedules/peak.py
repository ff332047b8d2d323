"""The step peak of each schedule in closed form: bytes above the inputs, predicted before anything runs.

Terms of N·V, V·D and N·D elements are counted; those of N or V elements, the allocator's rounding and the workspaces of
libraries are not (well under 1 % at the sizes of a language model). The memory simulator, which counts every buffer, is
held to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .filtering import NEARLY_ALL
from .plan import Plan


@dataclass(frozen=True)
class Head:
    """Sizes of one call. The dtypes are counted in bytes per element; ``needs`` says which gradients are wanted."""

    n: int
    d: int
    v: int
    compute_bytes: int  # of logits and dlogits, and of input and weight while they are multiplied
    input_bytes: int  # of input and dx
    weight_bytes: int  # of linear_weight and the dw that the caller receives
    needs_dx: bool
    needs_dw: bool
    softcap: bool = False
    uses_lse: bool = False  # by a z-loss
    returns_lse: bool = False  # beside the loss, and not differentiated
    needs_db: bool = False

    @property
    def needs_gradients(self) -> bool:
        return self.needs_dx or self.needs_dw or self.needs_db

    @property
    def dx(self) -> int:
        return self.n * self.d * self.input_bytes if self.needs_dx else 0

    @property
    def dw(self) -> int:
        return self.v * self.d * self.weight_bytes if self.needs_dw else 0

    def logits(self, rows: int) -> int:
        return rows * self.v * self.compute_bytes

    @property
    def kept(self) -> int:
        """Logits-sized buffers that plain autograd keeps for backward: log-probabilities, tanh, and logits for lse."""
        return 1 + self.softcap + self.uses_lse

    @property
    def transient(self) -> int:
        """Logits-sized buffers alive beside those while one loss is differentiated."""
        return 3 if self.uses_lse else 2


def plain_peak(head: Head, chunk_size: int, checkpointed: bool) -> int:
    """Naive (``chunk_size`` = N), chunked and checkpointed: what autograd holds, at its worst moment.

    An lse that is returned keeps logits until the caller lets go of it, taken to be before backward.

    Backward walks the chunks from the last to the first. The candidates are the last chunk's loss, the next one's (now
    beside a gradient of the weight), and the moment when the first two gradients of the weight are summed out of place:
    both and their sum are alive. Later sums are in place.
    """
    n_chunks = ceil(head.n / chunk_size)
    chunk = head.logits(min(chunk_size, head.n))
    if not head.needs_gradients:
        return (2 + head.softcap) * chunk
    everything = 0 if checkpointed else head.kept * head.logits(head.n)  # kept from forward by all chunks together
    own = head.kept * chunk
    dx_of_chunk = head.dx // max(1, n_chunks)
    one_loss = max(everything, own) + head.transient * chunk
    if head.returns_lse and not head.uses_lse:  # in forward, while the last chunk's lse is taken
        one_loss = max(one_loss, (head.kept + 1) * (chunk if checkpointed else head.logits(head.n)) + chunk)
    if n_chunks <= 1:
        return max(one_loss, chunk + head.dx + head.dw)
    second_loss = max(everything - own, own) + head.transient * chunk + head.dw + dx_of_chunk
    if checkpointed:
        second_loss += head.dx - 2 * dx_of_chunk  # the same at every later chunk, the last of them with most of dx
    summed = max(0, everything - 2 * own) + 3 * head.dw + 2 * dx_of_chunk
    return max(one_loss, second_loss, summed, head.dw + 2 * head.dx)


def fused_peak(head: Head, plan: Plan) -> int:
    """Fused, in forward or (recomputed) in backward: the buffer beside the sums, or the sums beside their copies."""
    buffer = head.logits(min(plan.chunk_size, head.n))
    accumulator = head.v * head.d * plan.accum_dtype.itemsize if head.needs_dw else 0
    final = head.dw if plan.accum_dtype.itemsize != head.weight_bytes else 0  # otherwise scaled in place
    # Autocast copies input and weight to the dtype of the products; dx comes back in that dtype and is cast last.
    x_copy, w_copy = (
        size * head.compute_bytes if own != head.compute_bytes else 0
        for size, own in ((head.n * head.d, head.input_bytes), (head.v * head.d, head.weight_bytes))
    )
    computed_dx = head.n * head.d * head.compute_bytes if head.needs_dx else 0
    in_forward = x_copy + w_copy + buffer + computed_dx + accumulator
    in_backward = computed_dx + accumulator + final + (head.dx if x_copy else 0)
    return max(in_forward, in_backward)


def tiled_peak(head: Head, plan: Plan) -> int:
    """Cut along the vocabulary: in backward, the tile beside dw and the sum of dx, or that sum beside its copy.

    With ``plan.filter_eps`` the most that it can be: a tile that just not nearly all tokens need.
    """
    width = min(plan.chunk_size, head.v)
    buffer = head.n * width * head.compute_bytes
    # Autocast copies input to the dtype of the products; of the weight a tile, and the next one before that is gone.
    x_copy = head.n * head.d * head.compute_bytes if head.input_bytes != head.compute_bytes else 0
    w_copies = 2 * width * head.d * head.compute_bytes if head.weight_bytes != head.compute_bytes else 0
    in_forward = x_copy + w_copies + buffer
    if not head.needs_gradients:
        return in_forward
    accum_bytes = plan.accum_dtype.itemsize
    sum_of_dx = head.n * head.d * accum_bytes if head.needs_dx else 0
    computed_dx = head.n * head.d * head.compute_bytes if head.needs_dx and accum_bytes != head.compute_bytes else 0
    gathered = 0
    if plan.filter_eps is not None and width < head.v:
        rows = int(NEARLY_ALL * head.n)
        gathered = rows * head.d * (head.compute_bytes + (accum_bytes if head.needs_dx else 0))
    in_backward = x_copy + w_copies + buffer + head.dw + sum_of_dx + gathered
    at_the_end = x_copy + head.dw + sum_of_dx + computed_dx
    cast_of_dx = head.dw + computed_dx + (head.dx if x_copy else 0)
    return max(in_forward, in_backward, at_the_end, cast_of_dx)
