"""The memory of one training step, found by running it without data, without a GPU and without the memory.

The step runs under ``FakeTensorMode``: tensors have shapes, dtypes and storages but no elements. A dispatch mode sees
every operator that PyTorch executes, those of autograd's backward included, and books each new storage when it appears
and when the last reference to it goes. These are the allocations that a GPU's caching allocator would be asked for: the
operators, their outputs and the lifetimes are decided by PyTorch before any device is involved.

Two things are put right, because watching changes them:

* Autograd adds up the contributions to a gradient in place where nobody else holds the first one. Under any dispatch
  mode it takes its tensors for subclasses and adds out of place: one buffer too many. Such additions are recognised
  and done in place under autograd's own conditions (``can_accumulate_inplace`` in input_buffer.cpp).
  The same holds for the derivatives that fill a buffer of zeros (of ``gather``, ``max``, indexing).
* An operator of ``torch.library`` is one event; see :mod:`flce_ref.memory.operators`.

What it cannot see is what kernels allocate inside: cuBLAS's workspace (one per handle and stream, 32 MiB on Hopper),
temporaries of sorting and of some reductions, blocks that the caching allocator does not split. These are named where
simulation and measurement are compared.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import private
from .labels import Block, Names, Operation, current_label
from .operators import KERNELS, body_to_follow, workspace_bytes
from .progress import Progress
from .shapes import Shapes
from .stacks import Stacks
from .step_inputs import FakeInputs, Given, input_names
from .timeline import Allocation, Frame, Timeline

#: The CUDA caching allocator hands out multiples of this many bytes (``kMinBlockSize`` in CUDACachingAllocator).
ROUNDING = 512

_CPU = torch.device("cpu")
_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default
# Derivatives that write into fresh zeros; autograd calls these forms only for tensors that it takes for subclasses.
_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.scatter_add.default: Tensor.scatter_add_,
    torch.ops.aten.scatter.src: Tensor.scatter_,
    torch.ops.aten.scatter.value: Tensor.scatter_,
    torch.ops.aten.index_add.default: Tensor.index_add_,
    torch.ops.aten.index_put.default: Tensor.index_put_,
    torch.ops.aten.masked_scatter.default: Tensor.masked_scatter_,
}


def simulate(
    step: Callable[..., Any], *inputs: Any, kernel: str = "cuda", title: str | None = None,
    labels: Sequence[str] | None = None,
) -> Timeline:  # fmt: skip
    """The memory timeline of ``loss = step(*inputs)`` and ``loss.backward()``, without running either.

    Args:
        step: any callable returning a loss (0-d), or a tuple or list whose first element is the loss; what it returns
            is held until the end, as a training loop holds it. A module's own parameters are simulated with it; what
            else the step needs must be among the inputs. A loss that does not require grad gives a timeline of the
            forward alone.
        inputs: tensors on any device (only their shapes, dtypes, strides and ``requires_grad`` are used: see
            :func:`flce_ref.memory.head_inputs` for tensors that take no memory), modules, or any other values, which
            are passed on.
        kernel: the row kernel to follow: ``"cuda"`` or ``"triton"`` (the library's operators are booked by their
            outputs), ``"eager"`` (plain PyTorch on a GPU), or ``"cpu"`` (plain PyTorch on the CPU).
        title: of the timeline; by default the name of the step.
        labels: names of the inputs; by default those of the step's parameters. A name containing "weight" makes an
            input a weight. Intermediate buffers are named by :func:`flce_ref.memory.label`.

    Returns:
        The timeline, the same at every call. Sizes are rounded up to 512 B as the CUDA caching allocator rounds.

    Raises:
        ValueError: an unknown ``kernel``, ``labels`` that do not fit, or a loss that is not 0-d.
        TypeError: ``step`` is not callable, or returns no tensor.
        Exception: whatever the step raises, with a note saying how far the simulation had come.
    """
    if not callable(step):
        raise TypeError(f"step must be callable, got {type(step).__name__}")
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    name = title or str(getattr(step, "__name__", type(step).__name__))
    names = input_names(step, inputs, labels)
    private.register_rules_of_collectives()
    with _no_collection(), FakeTensorMode() as fakes, FakeInputs(names) as given:
        arguments = [given.fake(value, label) for value, label in zip(inputs, names)]
        module = given.fake(step, "") if isinstance(step, nn.Module) else None
        booker = _Booker(fakes, kernel, given.tensors, Progress(name))
        try:
            booker.run(step, arguments)
            booker.note_final_gradients([*arguments, module])
        except Exception as error:
            error.add_note(booker.where(name))
            raise
        finally:
            booker.close()
        return booker.timeline(name)


# ---------------------------------------------------------------- the books


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its block."""

    __slots__ = ("block", "key")

    key: int
    block: Block

    @classmethod
    def of(cls, storage: torch.UntypedStorage, key: int, block: Block, when_freed: Callable[[Any], None]) -> _Storage:
        reference = cls(storage, when_freed)
        reference.key, reference.block = key, block
        return reference


class _Booker(TorchDispatchMode):
    """Books every storage that appears and disappears while it is on."""

    def __init__(self, fakes: FakeTensorMode, kernel: str, inputs: Sequence[Given], progress: Progress) -> None:
        super().__init__()
        self._shapes = Shapes(fakes)
        self.kernel = kernel
        self.blocks: list[Block] = []
        self.events = 0
        self.forward_events: int | None = None  # events before backward; None until it begins
        self.phase = "forward"
        self.operator = "the first operator"
        self._alive: dict[int, _Storage] = {}
        self._stacks = Stacks(_Booker.run.__code__)
        self._made: dict[int, Operation] = {}  # autograd's number of a node → the operator it differentiates
        self._checked_node: int | None = None  # the node whose outputs autograd has just checked
        self._sole = _sole_holders()
        self._followed: dict[Any, Callable[..., Any] | None] = {}
        self._opened: dict[str, int] = {}
        self._opaque: dict[str, int] = {}
        self._workspaces: dict[str, int] = {}
        self._result: Any = None
        self._progress = progress
        source = Operation("input", (), (), "")
        for given in inputs:
            self._book(given.base, source)
            if storage := self._alive.get(given.base.untyped_storage()._cdata):
                block = storage.block
                block.shape, block.role, block.name = given.shape, given.role, given.name

    def run(self, step: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Forward and backward; what the step returned lives until the end, as in a training loop."""
        self._progress.first_node = private.next_node_number()
        with self:
            result = self._result = step(*arguments)
            loss = result[0] if isinstance(result, tuple | list) and result else result
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"step must return a loss, or a tuple whose first element is one, got {type(loss).__name__}"
                )
            if loss.ndim:
                raise ValueError(f"step must return a 0-d loss, got a tensor of shape {tuple(loss.shape)}")
            if loss.requires_grad:
                self._begin_backward()
                self._progress.last_node = private.next_node_number()
                loss.backward()

    def _begin_backward(self) -> None:
        if self.forward_events is None:
            self.forward_events, self.phase = self.events, "backward"

    def close(self) -> None:
        """Stop watching: what is alive now is alive at the end."""
        self._alive.clear()
        self._result = None
        self._progress.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = _on_cpu(kwargs or {})
        if func is _DEVICE:
            # Autograd asks for the device of each output of a node before it adds it to what is there already.
            self._checked_node = private.node_number(private.current_node())
            return getattr(args[0], "fake_device", None) or func(*args, **kwargs)
        self._progress.operator()
        node = private.current_node()
        if node is not None:  # also where the step itself calls backward
            self._begin_backward()
        in_place = self._in_place_of(func, args, node) if node is not None else None
        if in_place is not None:
            return in_place(*args)
        summed = func is _ADD and node is not None and self._checked_node == private.node_number(node)
        if not summed:
            self._checked_node = None
        operation = self._operation(func, args, node)
        self._note_readers(func, args, operation)
        outputs = self._execute(func, args, kwargs, operation)
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, FakeTensor):
                self._book(output, operation, node, summed)
        self._book_workspace(func, args, kwargs, operation)
        return outputs

    # ------------------------------------------------ operators

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operation: Operation) -> Any:
        """Run ``func`` on the fake tensors, through its Python body under the same watch where it has one to follow."""
        if func not in self._followed:
            self._followed[func] = body_to_follow(func, self.kernel) if hasattr(func, "_schema") else None
        body: Callable[..., Any] | None = self._followed[func]
        if body is None:
            if operation.name.partition("::")[0] in ("aten", "prim", "prims"):
                return self._shapes.run(func, args, kwargs)
            self._opaque[operation.name] = self._opaque.get(operation.name, 0) + 1
            return func(*args, **kwargs)
        self._opened[operation.name] = self._opened.get(operation.name, 0) + 1
        with self:
            return body(*args, **kwargs)

    def _book_workspace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operation: Operation) -> None:
        size = workspace_bytes(operation.name, self.kernel, args, kwargs)
        if not size or self._followed.get(func) is not None:
            return
        self.events += 2
        block = Block(_rounded(size), self.events - 1, (), torch.uint8, operation, end=self.events)
        block.role, block.name = "workspace", f"workspace of {operation.name}"
        self.blocks.append(block)
        if operation.name != "aten::sum":
            self._workspaces[operation.name] = max(size, self._workspaces.get(operation.name, 0))

    def _operation(self, func: Any, args: tuple[Any, ...], node: Any) -> Operation:
        """What is known about this call; the operator's own autograd node, if it has one, can look it up later."""
        self.operator = _qualified_name(func)
        frames, from_engine = self._stacks.current()
        scope = current_label()
        if node is not None:
            forward = self._made.get(private.node_number(node) or -1)
            frames = (*frames, Frame("<autograd>", 0, _node_name(node)), *(forward.frames if forward else ()))
            if from_engine and forward is not None:
                scope = scope or forward.scope
        operands = []
        for tensor in _tensors(args):
            storage = self._alive.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                operands.append((storage.block, int(tensor.storage_offset())))
        operation = Operation(self.operator, tuple(operands), self._stacks.shared(frames), scope)
        number = private.next_node_number()
        if number is not None and operands and not from_engine:
            self._made.setdefault(number - 1, operation)
        return operation

    def _note_readers(self, func: Any, args: tuple[Any, ...], operation: Operation) -> None:
        if args and isinstance(args[0], FakeTensor) and operation.operands:
            operation.operands[0][0].read_by.add(operation.name)

    def _in_place_of(self, func: Any, args: tuple[Any, ...], node: Any) -> Callable[..., Any] | None:
        """The in-place form that autograd's engine would have used, had it not been watched; else None."""
        if func is _ADD:
            if self._checked_node != private.node_number(node) or len(args) != 2 or not self._adds_in_place(*args):
                return None
            return Tensor.add_
        form = _IN_PLACE.get(func)
        if form is None or not self._stacks.current()[1] or not isinstance(args[0], FakeTensor):
            return None
        storage = self._alive.get(args[0].untyped_storage()._cdata)
        fresh = storage is not None and storage.block.made_by.name in _ZEROS and storage.block.start == self.events
        return form if fresh else None

    def _adds_in_place(self, old: Any, new: Any) -> bool:
        if self._sole is None or torch.is_grad_enabled():
            return False
        if not (isinstance(old, FakeTensor) and isinstance(new, FakeTensor) and self._stacks.current()[1]):
            return False
        if not _is_dense(old):
            return False
        held = private.holders(old)
        return held is not None and held[0] <= self._sole[0] and held[1] <= self._sole[1]

    # ------------------------------------------------ storages

    def _book(self, tensor: Tensor, operation: Operation, node: Any = None, summed: bool = False) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and other tensors without a storage
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if operation.operands and known.block.start and operation.name in _WRITERS:
                known.block.written_by.append(operation)
            if _rounded(size) == known.block.bytes:
                return
            self._end(known)  # resized: the old block is given back, a new one is taken
        if not size:
            return
        self.events += 1 if operation.name != "input" else 0
        block = Block(_rounded(size), self.events, tuple(tensor.shape), tensor.dtype, operation)
        block.in_backward, block.summed = node is not None, summed
        block.gradient_of = self._made.get(private.node_number(node) or -1) if node is not None else None
        self.blocks.append(block)
        self._alive[key] = _Storage.of(storage, key, block, self._end)

    def _end(self, storage: _Storage) -> None:
        if self._alive.pop(storage.key, None) is storage:
            self.events += 1
            storage.block.end = self.events

    def note_final_gradients(self, arguments: Sequence[Any]) -> None:
        """Remember which buffers are the inputs' gradients."""
        leaves: list[Tensor] = [t for t in _tensors(arguments) if t.is_leaf]
        leaves += [p for m in arguments if isinstance(m, nn.Module) for p in m.parameters()]
        for leaf in leaves:
            if leaf.grad is None:
                continue
            gradient = self._alive.get(leaf.grad.untyped_storage()._cdata)
            given = self._alive.get(leaf.untyped_storage()._cdata)
            if gradient is not None and given is not None:
                gradient.block.final_gradient_of = given.block

    # ------------------------------------------------ results

    def timeline(self, title: str) -> Timeline:
        names = Names(self.blocks)
        return Timeline(
            title=title,
            allocations=tuple(Allocation(b.bytes, b.start, b.end, *names.of(b), b.made_by.frames) for b in self.blocks),
            n_events=self.events,
            backward_start=None if self.forward_events is None else self.forward_events + 1,
            source="simulated",
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        for name, calls in sorted(self._opaque.items()):
            size = self._workspaces.get(name)
            extra = f" and a declared workspace of up to {size} B" if size else ""
            yield f"kernel {self.kernel!r}: {name} is booked by its outputs{extra} ({calls} calls)"
        for name, size in sorted(self._workspaces.items()):
            if name not in self._opaque:
                yield f"{name}: a workspace of up to {size} B is booked while it runs"
        if self._sole is None:
            yield "this PyTorch does not say who holds a tensor: sums of gradients are booked as new buffers"

    def where(self, title: str) -> str:
        """For an exception's note: how far the simulation had come."""
        live = sum(storage.block.bytes for storage in self._alive.values())
        return (
            f"while simulating the {self.phase} pass of {title!r}: after {self.events} allocations and frees, with "
            f"{live} bytes alive, in or after {self.operator}. The step runs on tensors without values: it can't read "
            "any (item, tolist, nonzero, boolean indexing), and every tensor it uses must be among the inputs."
        )


_ZEROS = frozenset({"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::full"})
_WRITERS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Whatever device a step names, its tensors are here: a PyTorch without CUDA aborts on fake CUDA tensors."""
    return kwargs | {"device": _CPU} if kwargs.get("device") not in (None, _CPU) else kwargs


def _rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def _tensors(values: Any) -> Iterator[FakeTensor]:
    for value in values:
        if isinstance(value, FakeTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in whatever order of dimensions."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != extent:
            return False
        extent *= size
    return True


@cache
def _qualified_name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return schema.name if schema is not None else str(func)


def _node_name(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


@cache
def _sole_holders() -> tuple[int, int] | None:
    """What `private.holders` says of a tensor that only autograd's sum holds, under a dispatch mode; None if unknown.

    Measured, because it differs between versions of PyTorch, on a graph whose sum is known to be of that kind.
    """
    seen: list[tuple[int, int] | None] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                seen.append(private.holders(args[0]))
            result = func(*args, **(kwargs or {}))
            refs.append(weakref.ref(result.untyped_storage()) if isinstance(result, Tensor) else None)
            return result

    refs: list[Any] = []
    with FakeTensorMode():
        x = torch.empty(4, requires_grad=True)
        loss = torch.stack([(x * 2).sum(), (x * 3).sum()]).sum()
        with Watch():
            loss.backward()
    return seen[0] if len(seen) == 1 else None


# ---------------------------------------------------------------- surroundings


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: a collection frees cycles at an arbitrary event."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
