"""How a check is declared, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .subject import Subject


@dataclass(frozen=True)
class Finding:
    """What a check measured. It passes when error ≤ bound (never when error is NaN); bound None is a measurement."""

    error: float
    bound: float | None
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """One declared check.

    Attributes:
        id: dotted name, subject first.
        what: what is looked at, in a few words.
        should: a sentence naming what should be; it becomes the reason of the row.
        dtype: what the inputs are made in.
        function: takes the Subject and the dtype, returns a Finding.
        core: a core row can't be unsupported.
        needs: arguments whose refusal (a TypeError or ValueError that names one) makes the row unsupported.
        device: the only device type it runs on, or None.
    """

    id: str
    what: str
    should: str
    dtype: torch.dtype
    function: Callable[[Subject, torch.dtype], Finding]
    core: bool
    needs: tuple[str, ...]
    device: str | None


CHECKS: dict[str, Check] = {}


def check(
    id: str,
    what: str,
    should: str,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    core: bool = False,
    needs: tuple[str, ...] = (),
    device: str | None = None,
) -> Callable[[Callable[[Subject, torch.dtype], Finding]], Callable[[Subject, torch.dtype], Finding]]:
    """Declare the decorated function as a check; several dtypes make one row each, the dtype a suffix of the id."""

    def declare(function: Callable[[Subject, torch.dtype], Finding]) -> Callable[[Subject, torch.dtype], Finding]:
        for dtype in dtypes:
            row_id = id if len(dtypes) == 1 else f"{id}.{dtype_name(dtype)}"
            if row_id in CHECKS:
                raise ValueError(f"two checks have the id {row_id!r}")
            CHECKS[row_id] = Check(row_id, what, should, dtype, function, core, needs, device)
        return function

    return declare


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")
