"""Ranks that are about to run collectives together make sure first that they mean the same: an error, not a hang.

A collective that one rank leaves out, or enters with another shape, blocks the others until a timeout or mixes up their
numbers. So every rank describes its arguments, or the error that they caused, and sees everyone's description before
any goes on. What is wrong with one is then known to all, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..call import Arguments, check

T = TypeVar("T")


class Facts(NamedTuple):
    """What a rank tells the others: ``shared`` by name, to be equal on every rank, and ``own``, whatever it is."""

    shared: dict[str, Any]
    own: Any = None


def agree(describe: Callable[[], tuple[T, Facts]], group: dist.ProcessGroup) -> tuple[T, list[Any]]:
    """What ``describe`` made of this rank's arguments, and the ``own`` facts of every rank in the group's order.

    One ``all_gather_object``: two small collectives, for which the host waits. Where the group has a CPU backend beside
    NCCL (``init_process_group()`` without naming one) they go past the GPU, whose queue is worked off meanwhile.

    Raises:
        Exception: whatever ``describe`` raised on this rank.
        RuntimeError: it raised on another rank; the message names that rank and its error.
        ValueError: ranks disagree on a shared fact; the message names it and who has what.
    """
    made: T
    error: Exception | None = None
    told: Facts | str
    try:
        made, told = describe()
    except Exception as raised:  # first the others must hear of it
        error, told = raised, f"{type(raised).__name__}: {raised}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, told, group=group)
    if error is not None:
        raise error
    for rank, facts in enumerate(everyone):
        if isinstance(facts, str):
            raise RuntimeError(f"rank {rank} of the group can't take part: {facts}")
    for name, expected in everyone[0].shared.items():
        for rank, facts in enumerate(everyone):
            if facts.shared[name] != expected:
                got = facts.shared[name]
                raise ValueError(f"ranks disagree on {name}: rank 0 of the group has {expected!r}, rank {rank} {got!r}")
    return made, [facts.own for facts in everyone]


def facts_about(a: Arguments, is_shard: bool) -> dict[str, Any]:
    """What must be equal on every rank whichever way the work is shared out, by the name under which errors show it."""
    compute_dtype = check(a, is_shard)
    options = ("reduction", "ignore_index", "label_smoothing", "z_loss", "softcap", "return_lse", "skip_ignored")
    return {
        "the hidden size": a.input.shape[-1],
        "the dtype of input": str(a.input.dtype),
        "the dtype of the products": str(compute_dtype),
        "whether there is a linear_bias": a.linear_bias is not None,
        "the class weights": None if a.weight is None else (str(a.weight.dtype), tuple(a.weight.shape)),
        **{name: getattr(a, name) for name in options},
    }


def process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default one; RuntimeError if there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group: start the program with torchrun and call torch.distributed.init_process_group()"
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen
