"""The implementation under test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .cases import Problem, make


@dataclass
class Subject:
    """`function` with the keyword arguments that every call gets, and the device its inputs are on."""

    function: Callable[..., Any]
    device: torch.device
    settings: dict[str, Any]
    _accepted: dict[str, bool] = field(default_factory=dict)
    wrong_targets: dict[int, str] = field(default_factory=dict)  # what each led to, once it has been tried

    def __call__(self, problem: Problem, **extra: Any) -> Any:
        """Call the function on `problem`; `extra` wins over the settings.

        Raises:
            RuntimeError: it returned anything but one tensor, or (loss, lse) where return_lse asks for the pair.
        """
        options = {**self.settings, **problem.options(), **extra}
        returned = self.function(problem.input, problem.linear_weight, problem.target, **options)
        parts = returned if options.get("return_lse") and isinstance(returned, tuple) else (returned,)
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise RuntimeError(f"the function returned {type(returned).__name__}, where one tensor is due")
        if parts[0].numel() > max(problem.target.numel(), 1):  # before anything of that size is made of it
            raise RuntimeError(f"the loss has shape {tuple(parts[0].shape)}, the target {tuple(problem.target.shape)}")
        return returned

    def accepts(self, **option: Any) -> bool:
        """Whether a call on a small problem with this one option is not refused."""
        (name,) = option
        if name not in self._accepted:
            try:
                self(make(self.device, tokens=4, vocabulary=8), **option)
                self._accepted[name] = True
            except (Exception, SystemExit) as error:
                self._accepted[name] = not is_refusal(error, (name,))
        return self._accepted[name]

    def chunks_of(self, size: int) -> dict[str, Any]:
        """{"chunk_size": size}, or nothing where chunk_size is not an argument: then its own chunking is tried."""
        return {"chunk_size": size} if self.accepts(chunk_size=size) else {}


def is_refusal(error: BaseException, arguments: tuple[str, ...]) -> bool:
    """Whether `error` says "not supported": a NotImplementedError, or a TypeError / ValueError naming the argument."""
    if isinstance(error, NotImplementedError):
        return True
    said = message_of(error)
    named = any(re.search(rf"\b{name}\b", said) for name in arguments)
    return named and isinstance(error, TypeError | ValueError)


def message_of(error: BaseException) -> str:
    """str(error), also of an exception that can't say what it is."""
    try:
        return str(error)
    except Exception as another:
        return f"(its message can't be shown: {type(another).__name__})"
