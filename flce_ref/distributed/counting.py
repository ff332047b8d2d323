"""What a piece of code sends: its collectives, seen as PyTorch hands them to the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
    """The collectives started inside the ``with``, those of backward included, in order::

    with count_collectives() as sent:
        vocab_parallel_linear_cross_entropy(x, words, y).backward()
    print(sum(c.bytes for c in sent))
    """
    counter = _Counter()
    with counter:
        yield counter.seen


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # Where a collective has an output list, it comes first and what is put in second.
            tensors = [a for a in args if isinstance(a, Tensor) or (isinstance(a, list) and a)]
            put_in = tensors[-1] if tensors else None
            for tensor in put_in if isinstance(put_in, list) else [put_in]:
                if isinstance(tensor, Tensor):
                    self.seen.append(Collective(func._schema.name.split("::")[1], tuple(tensor.shape), tensor.dtype))
        return func(*args, **(kwargs or {}))
