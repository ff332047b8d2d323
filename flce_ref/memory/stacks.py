"""The Python stack of a simulated allocation, without what only the simulation put there."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from .timeline import Frame

# Files between an operator that the step calls and the simulator; custom operators come through torch/_library.
_MACHINERY = frozenset(
    f"flce_ref/memory/{name}.py" for name in ("operators", "private", "shapes", "simulator", "stacks")
) | {
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_ops.py",
    "torch/utils/_python_dispatch.py",
}


class Stacks:
    """The Python stack from an operator out to the step, without the machinery of simulation and of dispatch.

    ``outermost`` is the function that calls the step: it and what called it are left out.
    """

    def __init__(self, outermost: CodeType) -> None:
        self._outermost = outermost
        self._frames: dict[tuple[CodeType, int], Frame] = {}
        self._shared: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}

    def current(self) -> tuple[tuple[Frame, ...], bool]:
        """The frames, innermost first, and whether autograd's engine called the operator with no Python in between."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_machinery(frame.f_code):
            frame = frame.f_back
        from_engine = frame is not None and _is_engine(frame.f_code)
        frames = []
        while frame is not None and frame.f_code is not self._outermost and not _is_engine(frame.f_code):
            if not _is_machinery(frame.f_code):
                key = (frame.f_code, frame.f_lineno)
                if key not in self._frames:
                    self._frames[key] = Frame(short_path(key[0].co_filename), key[1], key[0].co_name)
                frames.append(self._frames[key])
            frame = frame.f_back
        return tuple(frames), from_engine

    def shared(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """``frames``, the same object for equal stacks."""
        return self._shared.setdefault(frames, frames)


@cache
def _is_machinery(code: CodeType) -> bool:
    return "torch/_library/" in code.co_filename.replace("\\", "/") or short_path(code.co_filename) in _MACHINERY


@cache
def _is_engine(code: CodeType) -> bool:
    return code.co_name == "_engine_run_backward"


@cache
def short_path(path: str) -> str:
    """A file as its package names it (``torch/nn/functional.py``), else by its name: never its place on a machine."""
    if path.startswith("<"):
        return path
    file = Path(path)
    if any(part.startswith("ipykernel_") for part in file.parts):
        return "<notebook>"
    top = file.parent
    while (top / "__init__.py").exists() and top != top.parent:
        top = top.parent
    return file.relative_to(top).as_posix()
