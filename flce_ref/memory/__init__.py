"""See where the memory of one step goes: simulate it, record it, read it from a file, and draw it.

``simulate`` needs no GPU; ``record`` needs CUDA. Both, and :meth:`Timeline.from_snapshot`, give a :class:`Timeline`,
which draws itself (``plot``, ``to_html``) and writes Memory Viz files (``to_snapshot``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flce_ref.memory.labels import label
from flce_ref.memory.naming import name_by_size
from flce_ref.memory.timeline import CATEGORIES, Allocation, Frame, Timeline

if TYPE_CHECKING:
    from flce_ref.memory.plot import compare
    from flce_ref.memory.recorder import record
    from flce_ref.memory.simulator import simulate
    from flce_ref.memory.step_inputs import head_inputs

__all__ = [
    "CATEGORIES",
    "Allocation",
    "Frame",
    "Timeline",
    "compare",
    "head_inputs",
    "label",
    "name_by_size",
    "record",
    "simulate",
]

# Drawing needs matplotlib and simulating needs much of torch: each is loaded when first asked for.
_LAZY = {"compare": "plot", "simulate": "simulator", "record": "recorder", "head_inputs": "step_inputs"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"flce_ref.memory.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
