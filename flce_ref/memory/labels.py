"""Names for what the simulator booked: which buffer is the logits of chunk 3, which the dw accumulator.

A name is derived from what is known once the step is over: the operator that made a buffer and those that read it, the
autograd node it was made for, its shape, and which inputs it descends from. Names that a caller gave, by the parameters
of the step or by :func:`label`, are used where these say nothing more precise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from .private import set_allocation_label
from .timeline import Frame

_scope: ContextVar[str] = ContextVar("flce_ref.memory.label", default="")

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul"})
_READS_TILES = "flce_ref::write_grad_"
_READ_LOGITS = frozenset({"aten::_log_softmax", "aten::logsumexp", "flce_ref::cross_entropy_", _READS_TILES})
_UNFILLED = frozenset(
    f"aten::{prefix}{name}"
    for prefix in ("", "new_")
    for name in ("empty", "zeros", "empty_strided", "empty_like", "zeros_like")
)
_REPACKED = frozenset({"aten::_to_copy", "aten::clone", "aten::mul", "aten::div", "aten::cat", "aten::slice_backward"})


@contextlib.contextmanager
def label(text: str) -> Iterator[None]:
    """Name what is allocated inside: ``with label("block 3"): …``. The innermost name wins.

    Simulated, the buffers made in the backward of what ran inside get the name too. Recorded (see
    :func:`flce_ref.memory.record`), the name is attached to what the allocator hands out inside.

    Raises:
        TypeError: if ``text`` is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    token = _scope.set(text)
    outside = set_allocation_label(text)
    try:
        yield
    finally:
        _scope.reset(token)
        if outside is not None:
            set_allocation_label(outside)


def current_label() -> str:
    """The innermost :func:`label` in force, or ""."""
    return _scope.get()


@dataclass(slots=True, eq=False)
class Operation:
    """One operator of the step, as far as names depend on it."""

    name: str  # "aten::mm"
    operands: tuple[tuple[Block, int], ...]  # the buffers it reads, each with the offset of the view that it reads
    frames: tuple[Frame, ...]
    scope: str


@dataclass(slots=True, eq=False)
class Block:
    """One buffer of the simulated step."""

    bytes: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: Operation
    in_backward: bool = False
    gradient_of: Operation | None = None  # the forward operator for whose autograd node it was made
    summed: bool = False  # whether it is autograd's sum of two contributions to a gradient
    end: int | None = None
    role: str = ""  # inputs: "input", "weight", "target" or "other"
    name: str = ""  # inputs: the parameter's name
    written_by: list[Operation] = field(default_factory=list)  # products into a buffer that existed before
    read_by: set[str] = field(default_factory=set)  # operators that have it as their first argument
    final_gradient_of: Block | None = None


class Names:
    """Label and category of every block, by :meth:`of`, in the order in which the blocks were made."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._heads = _heads(blocks)
        self._vocabulary = {head.shape[0] for head in self._heads}
        self._hidden = {head.shape[1] for head in self._heads}
        self._rows = max((_rows(b) for b in blocks if b.role == "target"), default=0)
        self._chunk_at: dict[int, int] = {}  # offset of a chunk's first row in the input → its number, from 1
        self._chunk: dict[Block, int | None] = {}
        self._named: dict[Block, tuple[str, str]] = {}
        for block in blocks:
            for operation in (block.made_by, *block.written_by):
                self._count_chunk(block, operation)
        for block in blocks:
            self._chunk[block] = self._chunk_of(block)
            self._named[block] = self._name(block)

    def of(self, block: Block) -> tuple[str, str]:
        """Label and category."""
        return self._named[block]

    def _name(self, block: Block) -> tuple[str, str]:
        if block.role:
            return block.name, block.role if block.role in ("weight", "workspace") else "input"
        if block.final_gradient_of is not None:
            return self._gradient_of_input(block)
        label, category = self._of_head(block)
        if label:
            return label, category
        if block.made_by.scope:
            return block.made_by.scope, "activation"
        if block.in_backward and block.gradient_of is not None:
            return f"gradient of {_short(block.gradient_of.name)}", "activation"
        if len(block.shape) < 2:
            return "values per row, and scalars", "other"
        if block.in_backward:
            return "", "other"
        return f"output of {_short(block.made_by.name)}", "activation"

    def _gradient_of_input(self, block: Block) -> tuple[str, str]:
        given = block.final_gradient_of
        assert given is not None
        how = ", summed over chunks" if block.summed else ""
        if given in self._heads:
            if block.made_by.name in _UNFILLED:
                # Filled by products in forward, it is the sum itself; made in backward, it is a scaled copy of the sum.
                return ("dw (returned)" if block.in_backward else self._accumulator(block)), "dw"
            return f"dw{how}", "dw"
        if given.role == "input":
            return f"dx{how}", "dx"
        return f"gradient of {given.name}", "dw" if given.role == "weight" else "other"

    def _of_head(self, block: Block) -> tuple[str, str]:
        """The names that only the head's tensors have."""
        op = block.made_by.name
        if self._is_logits(block):
            if len(block.written_by) > 1:
                return "logits buffer", "logits"
            return self._numbered("logits", block), "logits"
        if self._is_tile(block):
            return "buffer for a tile of logits", "logits"
        if op == "aten::_log_softmax":
            return self._numbered("log-probabilities", block), "log-probabilities"
        if op == "aten::nll_loss_backward":
            return self._numbered("gradient of the log-probabilities", block), "dlogits"
        if op == "aten::_log_softmax_backward_data":
            return self._numbered("dlogits", block), "dlogits"
        if len(block.shape) >= 2 and block.shape[-1] in self._vocabulary and not self._like_head(block):
            return self._wide(block)
        if self._like_head(block):
            return self._dw(block)
        if len(block.shape) >= 2 and block.shape[-1] in self._hidden:
            return self._dx(block)
        return "", ""

    def _wide(self, block: Block) -> tuple[str, str]:
        """(…, V): logits or their gradient in another form."""
        op = _short(block.made_by.name)
        parents = {self._named[p][1] for p, _ in block.made_by.operands if p in self._named}
        if block.made_by.name == "aten::_to_copy":
            kind = "dlogits" if block.in_backward and "logits" not in parents else "logits"
            return self._numbered(f"{kind} in {_dtype(block)}", block), kind
        kind = "dlogits" if block.in_backward else "logits"
        return self._numbered(f"{kind}: {op}", block), kind

    def _dw(self, block: Block) -> tuple[str, str]:
        """(V, D), or transposed, and not an input."""
        op = block.made_by.name
        if block.summed:
            return "dw, summed over chunks", "dw"
        if op in _PRODUCTS:
            return self._numbered("dw", block), "dw"
        if op in _UNFILLED:
            return self._accumulator(block), "dw"
        parents = {self._named[p][1] for p, _ in block.made_by.operands if p in self._named}
        if op == "aten::_to_copy" and "weight" in parents:
            return f"linear_weight in {_dtype(block)}", "weight"
        return f"dw: {_short(op)}", "dw"

    def _accumulator(self, block: Block) -> str:
        return f"dw accumulator ({_dtype(block)})"

    def _dx(self, block: Block) -> tuple[str, str]:
        """(…, D) that descends from dlogits, or a buffer for all rows of it."""
        op = block.made_by.name
        parents = [self._named[p][1] for p, _ in block.made_by.operands if p in self._named]
        if op in _PRODUCTS and {"dlogits", "logits"} & set(parents):
            return self._numbered("dx", block), "dx"
        if op in _UNFILLED and self._rows and _rows(block) == self._rows and not block.made_by.scope:
            return "dx", "dx"
        if block.made_by.scope or not block.in_backward or "dx" not in parents:
            return "", ""
        if block.summed:
            return "dx, summed over chunks", "dx"
        if op == "aten::slice_backward":
            return self._numbered("dx", block) + ", padded to all rows", "dx"
        return ("dx", "dx") if op in _REPACKED else ("", "")

    def _is_logits(self, block: Block) -> bool:
        if not block.shape or block.shape[-1] not in self._vocabulary:
            return False
        return any(self._is_head_product(operation) for operation in (block.made_by, *block.written_by))

    def _is_tile(self, block: Block) -> bool:
        """(N, T): filled by the input times some rows of the head's weight, and never added to."""
        if len(block.shape) != 2 or block.made_by.name not in _UNFILLED or self._like_head(block):
            return False
        factors = [[b for b, _ in op.operands] for op in block.written_by if self._is_head_product(op)]
        return bool(factors) and all(
            block not in read and all(b.shape[-1:] != (v,) for b in read for v in self._vocabulary) for read in factors
        )

    def _is_head_product(self, operation: Operation) -> bool:
        return operation.name in _PRODUCTS and any(
            block in self._heads or self._is_copy_of_head(block) for block, _ in operation.operands
        )

    def _is_copy_of_head(self, block: Block) -> bool:
        return block.made_by.name == "aten::_to_copy" and any(p in self._heads for p, _ in block.made_by.operands)

    def _like_head(self, block: Block) -> bool:
        return any(block.shape in (head.shape, head.shape[::-1]) for head in self._heads)

    def _count_chunk(self, block: Block, operation: Operation) -> None:
        """Number the chunks by the rows of the input that the product reads, so that recomputed ones keep theirs."""
        if self._is_logits(block) and self._is_head_product(operation):
            self._chunk_at.setdefault(self._first_row(operation), len(self._chunk_at) + 1)

    def _first_row(self, operation: Operation) -> int:
        offsets = [offset for block, offset in operation.operands if block not in self._heads]
        return offsets[-1] if offsets else 0

    def _chunk_of(self, block: Block) -> int | None:
        if self._is_logits(block):
            return None if len(block.written_by) > 1 else self._chunk_at.get(self._first_row(block.made_by))
        chunks = {self._chunk.get(parent) for parent, _ in block.made_by.operands} - {None}
        return chunks.pop() if len(chunks) == 1 else None

    def _numbered(self, text: str, block: Block) -> str:
        chunk = self._chunk[block]
        return text if chunk is None or len(self._chunk_at) < 2 else f"{text} of chunk {chunk}"


def _heads(blocks: Sequence[Block]) -> set[Block]:
    """The (V, D) weights of the step: factors of the logits; where none are seen but there are targets, all weights."""
    found = set()
    for block in blocks:
        if block.read_by & _READ_LOGITS:
            while block.made_by.name in ("aten::_to_copy", "aten::clone") and block.made_by.operands:
                block = block.made_by.operands[0][0]
            for operation in (block.made_by, *block.written_by):
                if operation.name in _PRODUCTS:
                    factors = (_source(factor) for factor, _ in operation.operands)
                    found |= {f for f in factors if f.role == "weight" and _makes_columns_of(f, block)}
    if not found and any(block.role == "target" for block in blocks):
        found = {block for block in blocks if block.role == "weight"}
    return {head for head in found if len(head.shape) == 2}


def _makes_columns_of(weight: Block, logits: Block) -> bool:
    """Whether each row of ``weight`` makes one column of ``logits`` or, where those are a tile, some rows do."""
    words, columns = weight.shape[:1], logits.shape[-1:]
    return words == columns or (_READS_TILES in logits.read_by and words > columns)


def _source(block: Block) -> Block:
    """The buffer that ``block`` is a copy of, in another dtype."""
    while block.made_by.name == "aten::_to_copy" and block.made_by.operands:
        block = block.made_by.operands[0][0]
    return block


def _rows(block: Block) -> int:
    size = 1
    for extent in block.shape if block.role == "target" else block.shape[:-1]:
        size *= extent
    return size


def _short(operator: str) -> str:
    return operator.removeprefix("aten::").strip("_")


def _dtype(block: Block) -> str:
    return str(block.dtype).removeprefix("torch.")
