"""A model of PyTorch's CUDA caching allocator: where each block would lie, and how much memory would be reserved.

It replays a timeline's allocations and frees on one stream with the allocator's default settings, on a card that never
runs out: sizes rounded up to 512 B; separate pools for requests up to 1 MiB and above; segments of 2 MiB (small pool),
20 MiB (requests below 10 MiB) or the request rounded up to 2 MiB; best fit; a block is split when what remains could
serve its pool; neighbours are merged when freed; segments are never given back.

The rules and constants are those of ``c10/cuda/CUDACachingAllocator`` in PyTorch (``kMinBlockSize``, ``kSmallSize``,
``kSmallBuffer``, ``kMinLargeAlloc``, ``kLargeBuffer``, ``kRoundLarge``). "Reserved" is therefore an estimate: several
streams, ``PYTORCH_CUDA_ALLOC_CONF`` and retries after an out-of-memory error are not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from flce_ref.memory.timeline import Timeline

MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
MEDIUM_REQUEST = 10 << 20
MEDIUM_SEGMENT = 20 << 20
LARGE_ROUNDING = 2 << 20
_FIRST_ADDRESS = 0x7F0000000000  # where CUDA places device memory on Linux; any multiple of 2 MiB would do


def round_block(size: int) -> int:
    """Bytes that the allocator sets aside for a request of ``size`` bytes."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(rounded: int) -> int:
    """Bytes asked of CUDA when no cached block can hold ``rounded`` bytes."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if rounded < MEDIUM_REQUEST:
        return MEDIUM_SEGMENT
    return -(-rounded // LARGE_ROUNDING) * LARGE_ROUNDING


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; ``owner`` indexes the timeline's allocations, None when the block is free."""

    address: int
    size: int
    small: bool
    owner: int | None = None
    previous: Block | None = None
    next: Block | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory got from CUDA: its first block, its size, and the event that needed it (0: before the first)."""

    first: Block
    size: int
    event: int

    def blocks(self) -> list[Block]:
        """Its blocks at the end of the replay, by address."""
        blocks = []
        block: Block | None = self.first
        while block is not None:
            blocks.append(block)
            block = block.next
        return blocks


@dataclass(slots=True)
class Replay:
    """What the allocator would have done.

    Attributes:
        segments: in the order in which they were got from CUDA.
        addresses: one for each allocation of the timeline.
        reserved_bytes: int64 of shape (n_events + 1,): bytes held from CUDA in every state.
    """

    segments: list[Segment] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    reserved_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes held from CUDA."""
        return int(self.reserved_bytes.max())


def ordered_events(timeline: Timeline) -> list[tuple[int, bool, int]]:
    """The timeline as (event, whether it frees, index of the allocation), in order; event 0 comes first."""
    _, starts, ends = timeline.columns()
    freed = np.flatnonzero(ends <= timeline.n_events)
    events = np.concatenate([starts, ends[freed]])
    frees = np.concatenate([np.zeros(len(starts), bool), np.ones(len(freed), bool)])
    owners = np.concatenate([np.arange(len(starts)), freed])
    order = np.lexsort((owners, ~frees, events))
    return list(zip(events[order].tolist(), frees[order].tolist(), owners[order].tolist(), strict=True))


def replay(timeline: Timeline) -> Replay:
    """Run the timeline through the model."""
    result = Replay(addresses=[0] * len(timeline.allocations))
    blocks: list[Block | None] = [None] * len(timeline.allocations)
    # (size, address, block): the first entry not below (size, 0) is the best fit, lowest address first.
    cached: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
    grown = np.zeros(timeline.n_events + 1, np.int64)
    top = _FIRST_ADDRESS
    for event, frees, owner in ordered_events(timeline):
        if frees:
            block = blocks[owner]
            assert block is not None
            _release(block, cached[block.small])
            continue
        rounded = round_block(timeline.allocations[owner].bytes)
        block = _best_fit(cached[rounded <= SMALL_REQUEST], rounded)
        if block is None:
            size = segment_size(rounded)
            block = Block(top, size, rounded <= SMALL_REQUEST)
            result.segments.append(Segment(block, size, event))
            grown[event] += size
            top += -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        _split(block, rounded, cached[block.small])
        block.owner = owner
        blocks[owner] = block
        result.addresses[owner] = block.address
    result.reserved_bytes = np.cumsum(grown)
    return result


def _key(block: Block) -> tuple[int, int]:
    return block.size, block.address


def _best_fit(cached: list[tuple[int, int, Block]], rounded: int) -> Block | None:
    position = bisect_left(cached, (rounded, 0), key=lambda entry: entry[:2])
    return cached.pop(position)[2] if position < len(cached) else None


def _split(block: Block, rounded: int, cached: list[tuple[int, int, Block]]) -> None:
    """Cut what is not needed off the end of ``block``, unless it is too small to be of use to its pool."""
    rest = block.size - rounded
    if rest < MIN_BLOCK if block.small else rest <= SMALL_REQUEST:
        return
    tail = Block(block.address + rounded, rest, block.small, previous=block, next=block.next)
    if block.next is not None:
        block.next.previous = tail
    block.next = tail
    block.size = rounded
    insort(cached, (*_key(tail), tail), key=lambda entry: entry[:2])


def _release(block: Block, cached: list[tuple[int, int, Block]]) -> None:
    """Free ``block`` and merge it with free neighbours; the leftmost block survives, so segments keep their first."""
    block.owner = None
    for neighbour in (block.previous, block.next):
        if neighbour is None or neighbour.owner is not None:
            continue
        del cached[bisect_left(cached, _key(neighbour), key=lambda entry: entry[:2])]
        left, right = (neighbour, block) if neighbour is block.previous else (block, neighbour)
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left
        block = left
    insort(cached, (*_key(block), block), key=lambda entry: entry[:2])
