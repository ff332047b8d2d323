"""The private calls of PyTorch that the simulator makes, each behind one function that says what is lost without it.

PyTorch has no public way to ask which autograd node is running, who else holds a tensor, or what Python function is
registered for an operator. Each function looks the private call up when it runs and returns None where there is none,
so that a PyTorch without it costs accuracy (which the Timeline's notes say), not a crash.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def current_node() -> Any | None:
    """The autograd node that is running, or None outside backward.

    Without it: blocks allocated in backward are not named after the operator whose gradient they are part of.
    """
    get = getattr(torch._C, "_current_autograd_node", None)
    return None if get is None else get()


def node_number(node: Any | None) -> int | None:
    """The sequence number that autograd gave ``node`` when the forward pass made it; None for no node."""
    get = getattr(node, "_sequence_nr", None)
    return None if get is None else get()


def next_node_number() -> int | None:
    """The sequence number that the next autograd node of this thread will get.

    An operator's node is made just before the operator is dispatched: what runs now belongs to this number minus one.
    Without it: blocks allocated in backward are not traced to a line of the forward pass.
    """
    get = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", None)
    return None if get is None else get()


def holders(tensor: Tensor) -> tuple[int, int] | None:
    """How many references exist to ``tensor``'s storage and to ``tensor``; only differences mean anything.

    Without it: sums of gradients are booked as new buffers even where autograd adds in place.
    """
    storage_users = getattr(torch._C, "_storage_Use_Count", None)
    tensor_users = getattr(tensor, "_use_count", None)
    if storage_users is None or tensor_users is None:
        return None
    return storage_users(tensor.untyped_storage()._cdata), tensor_users()


def register_rules_of_collectives() -> None:
    """Let PyTorch's collectives run on fake tensors in a process that uses them.

    Newer versions register the rules by themselves; 2.8 does when this module of a tool of its own is imported. Without
    them: a step with collectives can't be simulated.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch.distributed._tools.fake_collectives")


def run_shape_rule(mode: FakeTensorMode, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``operator`` on fake tensors by its own rule for the meta device, past FakeTensorMode's preparations.

    Without it: simulations of many chunks take several times as long.
    """
    try:
        from torch._subclasses.fake_tensor import in_kernel_invocation_manager
    except ImportError:
        return operator(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        outputs = operator(*args, **kwargs)
    if isinstance(outputs, list | tuple):
        return type(outputs)(_as_fake(mode, output) for output in outputs)
    return _as_fake(mode, outputs)


def new_fake(mode: FakeTensorMode, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> FakeTensor:
    """A new fake CPU tensor, as FakeTensorMode makes it of a meta tensor."""
    with torch._C._DisableTorchDispatch():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), torch.device("cpu"))


def _as_fake(mode: FakeTensorMode, output: Any) -> Any:
    """An operator that writes to an argument returns that argument, which is a fake tensor already."""
    if not isinstance(output, Tensor) or isinstance(output, FakeTensor):
        return output
    return FakeTensor(mode, output, torch.device("cpu"))


def python_body(operator: torch._ops.OpOverload, device_types: tuple[str, ...]) -> Callable[..., Any] | None:
    """The Python function that computes ``operator`` on the first of ``device_types`` that has one, or None.

    Finds what ``torch.library.custom_op`` and ``Library.impl`` registered. Without the private registries: the operator
    is booked by its outputs.
    """
    name = operator._schema.name
    definition = _custom_op_definition(name)
    if definition is not None:
        functions: dict[str | None, Callable[..., Any]] = definition._backend_fns
        device = next((device for device in (*device_types, None) if device in functions), "")
        return functions.get(device)
    if operator._schema.overload_name:
        name += f".{operator._schema.overload_name}"
    for key in (*(device.upper() for device in device_types), "CompositeExplicitAutograd"):
        if _registered_from_python(name, key):
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
            return lambda *args, **kwargs: operator.redispatch(keys, *args, **kwargs)
    return None


def _custom_op_definition(name: str) -> Any | None:
    try:
        from torch._library.custom_ops import OPDEFS
    except ImportError:
        return None
    definition = OPDEFS.get(name)
    return definition if hasattr(definition, "_backend_fns") else None


def _registered_from_python(name: str, key: str) -> bool:
    """Whether the dispatcher's table says that the kernel of ``key`` was registered by a Python file."""
    dump = getattr(torch._C, "_dispatch_dump", None)
    if dump is None or not hasattr(torch._ops.OpOverload, "redispatch"):
        return False
    entry = re.search(rf"^{key}(?:\[alias\])?: registered at (.+?):\d+ ::", dump(name), re.MULTILINE)
    return entry is not None and not entry[1].endswith((".cpp", ".cu", ".h", ".cc", ".cxx", "/dev/null"))


def set_allocation_label(text: str) -> str | None:
    """Attach ``text`` to what the CUDA allocator hands out from here on, in this thread; returns the text until now.

    None, and no effect, where CUDA is not in use or PyTorch cannot label. Without it: recordings lack these labels.
    """
    if not torch.cuda.is_initialized():
        return None
    setter = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    getter = getattr(torch.cuda.memory, "_get_memory_metadata", None)
    if setter is None or getter is None:
        return None
    before: str = getter()
    setter(text)
    return before


def is_recording() -> bool | None:
    """Whether the CUDA allocator's history is being recorded; None where PyTorch does not say.

    Without it: a recording that somebody else began is taken over instead of being refused.
    """
    ask = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return None if ask is None else ask()
