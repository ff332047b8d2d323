"""The words shared out over ranks: the front door of :mod:`flce_ref.schedules.vocab_parallel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..call import Arguments, prepare
from ..functional import bind, run
from ..schedules.vocab_parallel import Shard
from .agreement import Facts, agree, facts_about, process_group


@torch.compiler.disable
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    trust_ranks: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flce_ref.linear_cross_entropy` for a weight whose rows, the words, are shared out over ranks.

    Every rank passes the same tokens and its own words. All get the same loss and the whole ``dx``; ``dw`` is that of a
    rank's own words. All or none must call backward, on the same function of what they got.

    Args:
        input: (…, D), the same on every rank; or a replicated ``DTensor``.
        linear_weight: this rank's words (v, D), in the order of the group's ranks; v may differ, and may be 0. Or a
            ``DTensor`` on a mesh of one dimension, ``Shard(0)`` as ``ColwiseParallel`` makes it. One that is
            ``Replicate()`` has all words on every rank: then nothing is sent.
        target: indices into the whole vocabulary, the same on every rank; or a replicated ``DTensor``.
        group: the ranks that share out the words of a plain ``linear_weight``; None: the default group.
        trust_ranks: leave out the agreement on shapes and options, for which the host waits once per call. Ranks that
            do not agree then hang until the group's timeout, and plain shards must be of one size.
        **options: as in :func:`flce_ref.linear_cross_entropy`, without ``schedule``. ``linear_bias`` is that of this
            rank's words (v,); ``weight`` has the class weights of the whole vocabulary (V,) on every rank.

    Returns:
        What :func:`flce_ref.linear_cross_entropy` returns for the whole weight.

    Raises:
        TypeError, ValueError, IndexError: as in :func:`flce_ref.linear_cross_entropy`; on every rank a ValueError for
            arguments on which the ranks disagree. On CUDA, a target that is out of range, or that differs between
            ranks, makes the loss and its gradients NaN.
        RuntimeError: the arguments of another rank, which is named, are wrong; or there is no process group.

    ``torch.compile`` runs it as it is, between two graphs.
    """
    place = _place_of(linear_weight, group)

    def local_arguments() -> Arguments:
        if "schedule" in options:
            raise TypeError("schedule can't be chosen: a vocabulary that is shared out has one schedule")
        return _local(bind(input, linear_weight, target, **options), place)

    def describe() -> tuple[Arguments, Facts]:
        arguments = local_arguments()
        return arguments, _facts(arguments, place)

    if place.group is None:
        arguments = local_arguments()
        return run(prepare(arguments), arguments)
    if trust_ranks:
        arguments = local_arguments()
        first_word, vocab_size = _by_equal_shards(place, arguments.linear_weight.shape[0])
    else:
        arguments, everyone = agree(describe, place.group)
        first_word, vocab_size = _by_what_all_have(place, everyone, arguments.ignore_index)
    return run(prepare(arguments, vocab_size, Shard(first_word, place.group)), arguments)


class _Place(NamedTuple):
    """Where the words are: shared out over ``group`` (None: all are here), this rank's at ``position``.

    ``mesh`` and ``vocab_size`` are those of a DTensor.
    """

    group: dist.ProcessGroup | None
    position: int
    mesh: Any = None
    vocab_size: int | None = None


def _place_of(linear_weight: Any, group: dist.ProcessGroup | None) -> _Place:
    if not _is_dtensor(linear_weight):
        group = process_group(group)
        return _Place(group, dist.get_rank(group))
    if group is not None:
        raise ValueError("group must be None where linear_weight is a DTensor, which brings its own ranks")
    mesh, placements = linear_weight.device_mesh, linear_weight.placements
    if mesh.ndim != 1 or not (placements[0].is_shard(0) or placements[0].is_replicate()):
        raise ValueError(
            f"linear_weight must be Shard(0) or Replicate() on a mesh of one dimension, got {placements} on a mesh of "
            f"shape {tuple(mesh.shape)}; or pass linear_weight.to_local() and the group that shares out the words"
        )
    return _Place(
        mesh.get_group() if placements[0].is_shard() else None, mesh.get_local_rank(), mesh, linear_weight.shape[0]
    )


def _local(a: Arguments, place: _Place) -> Arguments:
    """The arguments with this rank's plain tensors in place of DTensors."""
    local = {}
    for field in fields(a):
        name, value = field.name, getattr(a, field.name)
        if not _is_dtensor(value):
            continue
        words = name in ("linear_weight", "linear_bias") and place.group is not None
        if value.device_mesh != place.mesh or not (
            value.placements[0].is_shard(0) if words else value.placements[0].is_replicate()
        ):
            raise ValueError(
                f"{name} must be a plain tensor or a DTensor on the mesh of linear_weight, "
                f"{'sharded like it' if words else 'replicated'}; got {value.placements} on {value.device_mesh}"
            )
        local[name] = value.to_local()
    return replace(a, **local)


def _facts(a: Arguments, place: _Place) -> Facts:
    """Of its own a rank has its position, the number of its words, and the smallest and largest target it was given."""
    shared = facts_about(a, is_shard=True)
    kernels.resolve(a.kernel, a.input.device, a.input.dtype)  # a kernel that can't run here is to be found now
    shared |= {
        "the shape of input": tuple(a.input.shape),
        "whether input requires grad": torch.is_grad_enabled() and a.input.requires_grad,
        "chunk_size": a.chunk_size,
    }
    extremes: tuple[int, ...] = ()
    if a.target.device.type == "cpu":  # elsewhere, to look is to wait; bad targets make NaN there
        valid = a.target[a.target != (-100 if a.ignore_index is None else a.ignore_index)]
        extremes = (int(valid.min()), int(valid.max())) if valid.numel() else ()
    return Facts(shared, (place.position, a.linear_weight.shape[0], extremes))


def _by_what_all_have(place: _Place, everyone: Sequence[Any], ignore_index: int | None) -> tuple[int, int]:
    """(first word of this rank, words of all ranks) from the own facts of every rank."""
    vocab_size = sum(v for _, v, _ in everyone)
    if vocab_size == 0:
        raise ValueError("linear_weight must have a row on one rank at least, got none on any")
    for rank, (_, _, extremes) in enumerate(everyone):
        for value in extremes:
            if not 0 <= value < vocab_size:
                raise IndexError(
                    f"target {value} of rank {rank} is out of range: accepted are 0 … {vocab_size - 1} and "
                    f"ignore_index={ignore_index}"
                )
    return sum(v for position, v, _ in everyone if position < place.position), vocab_size


def _by_equal_shards(place: _Place, v: int) -> tuple[int, int]:
    """The same without asking: a DTensor is cut into pieces of ⌈V / R⌉ rows, of a plain weight all have v."""
    assert place.group is not None
    ranks = dist.get_world_size(place.group)
    vocab_size = ranks * v if place.vocab_size is None else place.vocab_size
    return min(place.position * -(-vocab_size // ranks), vocab_size), vocab_size


def _is_dtensor(value: object) -> bool:
    return type(value).__name__ == "DTensor"  # by its name: to import it takes a second
