"""What an implementation allocates and keeps, seen at the operators: on the CPU and on CUDA alike.

Autograd's saved-tensor hooks can't answer this: `ctx.z = logits` evades them, and so does a custom operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Notes the storage of every tensor that an operator returns, and whether it is still alive.

    Sizes are in elements of the dtype in which the storage was first seen, so that one count serves every dtype.
    """

    def __init__(self, *known: Tensor | None) -> None:
        """`known`: tensors that existed before, whose storages don't count."""
        super().__init__()
        self._known = {_key(tensor): tensor for tensor in known if tensor is not None}
        self._alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.allocated: list[int] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        self._forget_freed()
        self.peak_bytes = max(self.peak_bytes, sum(bytes for _, _, bytes in self._alive.values()))
        return output

    def alive(self) -> int:
        """Elements still alive. Views count as the whole of what they keep alive."""
        self._forget_freed()
        return sum(elements for _, elements, _ in self._alive.values())

    def _note(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._known:
            return
        elements = storage.nbytes() // tensor.element_size()
        if key in self._alive and storage.nbytes() <= self._alive[key][2]:
            return  # seen before, and not grown by resize_ since
        self.allocated.append(elements)
        # A weak reference keeps the address of a freed storage from being taken by the next one.
        self._alive[key] = (StorageWeakRef(storage), elements, storage.nbytes())

    def _forget_freed(self) -> None:
        for key in [key for key, (reference, *_) in self._alive.items() if reference.expired()]:
            del self._alive[key]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def step_peak(step: Any, device: torch.device, *known: Tensor | None) -> int:
    """Highest bytes alive during `step()` above `known`: the allocator's own count on CUDA, storages between operators
    on the CPU (an operator's inner workspace is not seen there)."""
    if device.type != "cuda":
        tracker = StorageTracker(*known)
        with tracker:
            step()
        return tracker.peak_bytes
    step()  # libraries allocate workspaces of their own in a first call
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = int(torch.cuda.memory_allocated(device))
    step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
