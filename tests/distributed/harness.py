"""Cases that all ranks run in step, and where the words and the tokens of a problem go.

A case is a function of a :class:`World`. It must make the same collectives on every rank; a rank on which it raises has
failed it. A rank that leaves the others waiting fails them too, after ``TIMEOUT``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import oracle

TIMEOUT = timedelta(seconds=30)
CASES: dict[str, tuple[Callable[[World], None], frozenset[int] | None]] = {}


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: str


def case(sizes: set[int] | None = None) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Declare a case, for all numbers of ranks or those in ``sizes``."""

    def declare(function: Callable[[World], None]) -> Callable[[World], None]:
        assert function.__name__ not in CASES, f"two cases are called {function.__name__}"
        CASES[function.__name__] = (function, None if sizes is None else frozenset(sizes))
        return function

    return declare


def cases_for(size: int) -> dict[str, Callable[[World], None]]:
    return {name: function for name, (function, sizes) in CASES.items() if sizes is None or size in sizes}


def split(total: int, world: World) -> list[int]:
    """``total`` rows over the ranks, unevenly: one of three or more ranks gets none."""
    shares = {1: [1], 2: [2, 1], 3: [3, 0, 1], 4: [2, 0, 4, 1]}.get(world.size) or [1 + r for r in range(world.size)]
    counts = [total * share // sum(shares) for share in shares]
    counts[-1] += total - sum(counts)
    return counts


def mine(tensor: Tensor, world: World, counts: list[int] | None = None) -> Tensor:
    """This rank's rows of ``tensor``, a leaf of its own that requires grad where ``tensor`` does."""
    part = tensor.detach().split(counts or split(tensor.shape[0], world))[world.rank].clone()
    return part.requires_grad_(tensor.requires_grad)


def close(got: Any, truth: Any, what: str = "") -> None:
    torch.testing.assert_close(got, truth, equal_nan=True, msg=lambda text: f"{what}\n{text}")


def true_values(
    tensors: tuple[Tensor, Tensor, Tensor | None], y: Tensor, up: Tensor, up_lse: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, lse and the gradients of Σ loss·up + Σ lse·up_lse, of one process with everything."""
    x, w, bias = tensors
    loss, lse = oracle(x, w, y, linear_bias=bias, **options)
    value = (loss * up).sum() + (0 if up_lse is None else (lse * up_lse).sum())
    return loss, lse, list(torch.autograd.grad(value, [t for t in tensors if t is not None]))


@contextmanager
def raises(kind: type[BaseException], message: str) -> Iterator[None]:
    """The block raises ``kind`` with a message that has ``message`` in it."""
    try:
        yield
    except kind as error:
        if not re.search(message, str(error)):
            raise AssertionError(f"expected {message!r} in the message, got {error!r}") from error
    else:
        raise AssertionError(f"expected {kind.__name__} with {message!r}, nothing was raised")


def everyone_has(value: Any) -> None:
    """Whether all ranks have got equal values."""
    all_values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_values, value)
    assert all(v == all_values[0] for v in all_values), all_values
