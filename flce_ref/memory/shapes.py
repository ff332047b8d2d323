"""The outputs of PyTorch's own operators on fake tensors, found faster than FakeTensorMode finds them.

FakeTensorMode follows a rule written in Python for most operators, and remembers the answers; but the place of an input
in its storage is part of the question, so that every chunk of a loop over views is new to it. Here views follow their
rule in C++, and the layouts of new outputs are remembered by what they depend on. Everything else goes to
FakeTensorMode, and so does each question when it is first asked. A loop over 1024 chunks takes half the time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from . import private

# Operators without devices, values or special cases: nothing for FakeTensorMode to add to their own rule.
_VIEWS_AND_WRITES = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "squeeze", "t", "transpose",
        "unsqueeze", "view", "addmm", "mm", "copy_",
    )
)  # fmt: skip
_UNPREDICTABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_SIMPLE = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Layout(NamedTuple):
    """All that tells two new fake tensors apart."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Shapes:
    """Runs operators of the ``aten`` namespace under ``mode``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, list[_Layout] | None] = {}  # None: not to be remembered

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``operator(*args, **kwargs)`` returns: fake tensors like FakeTensorMode's own."""
        key = _question(operator, args, kwargs)
        if key is None:
            return operator(*args, **kwargs)
        if not _makes_new_outputs(operator):
            direct = operator._schema.name in _VIEWS_AND_WRITES
            return private.run_shape_rule(self._mode, operator, args, kwargs) if direct else operator(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            outputs = tuple(private.new_fake(self._mode, *layout) for layout in known)
            return outputs if len(operator._schema.returns) > 1 else outputs[0]
        outputs = operator(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _answer(operator, args, outputs)
        return outputs


def _question(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the outputs' shapes depend on, hashable; None if they may depend on more."""
    if not isinstance(operator, torch._ops.OpOverload) or any(tag in operator.tags for tag in _UNPREDICTABLE):
        return None
    parts: list[Any] = [operator]
    for value in (*args, *kwargs, *kwargs.values()):
        for item in (len(value), *value) if isinstance(value, list | tuple) else (value,):
            if isinstance(item, FakeTensor):
                if item.constant is not None or item.layout is not torch.strided:
                    return None
                parts.append(_layout(item))
            elif isinstance(item, _SIMPLE):
                parts.append((type(item), item))  # 1 and 1.0 are equal, their products with a tensor are not
            else:
                return None
    return tuple(parts)


def _answer(operator: Any, args: tuple[Any, ...], outputs: Any) -> list[_Layout] | None:
    """The outputs' layouts, if new tensors of these layouts would do in their place."""
    if len(operator._schema.returns) == 1:
        outputs = (outputs,)
    # Some schemas do not say that an output shares an input's storage: that of _unsafe_view, for one.
    taken = {item.untyped_storage()._cdata for item in args if isinstance(item, FakeTensor)}
    layouts = []
    for output in outputs:
        if not isinstance(output, FakeTensor) or output.constant is not None or output.layout is not torch.strided:
            return None
        storage = output.untyped_storage()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(output.shape, output.stride()))
        if storage._cdata in taken or storage.nbytes() != (extent * output.element_size() if output.numel() else 0):
            return None
        taken.add(storage._cdata)
        layouts.append(_layout(output))
    return layouts


def _layout(tensor: Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@cache
def _makes_new_outputs(operator: Any) -> bool:
    """Whether no output of this operator shares memory with an input."""
    return all(argument.alias_info is None for argument in (*operator._schema.arguments, *operator._schema.returns))
