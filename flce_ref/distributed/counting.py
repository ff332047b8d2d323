"""What a piece of code sends: its collectives, seen as PyTorch hands them to the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Those of torch.distributed, and those that DTensor makes.
_NAMESPACES = ("c10d", "_c10d_functional")
_SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Collective(NamedTuple):
    """One collective of one rank: its name (``"allreduce_"``), and the tensor that this rank put in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the tensor. A ring all-reduce of it among R ranks sends 2 (R − 1) / R times as many from each."""
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


@contextmanager
def count_collectives() -> Iterator[list[Collective]]:
    """A list that fills with the collectives started inside the ``with``, those of backward included, in order.

    >>> with count_collectives() as sent:  # doctest: +SKIP
    ...     vocab_parallel_linear_cross_entropy(x, words, y).backward()
    >>> sum(c.bytes for c in sent)  # doctest: +SKIP
    """
    counter = _Counter()
    with counter:
        yield counter.seen


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in _NAMESPACES and name not in _SENDS_NOTHING:
            # A collective with outputs of its own has them first, and what is put in second.
            given = [tensors for argument in args if (tensors := list(_tensors_in(argument)))]
            self.seen += [Collective(name, tuple(t.shape), t.dtype) for t in given[-1]]
        return func(*args, **(kwargs or {}))


def _tensors_in(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors_in(item)
