"""What a simulated step is given: fake twins of tensors and of modules' parameters, and tensors that take no memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def head_inputs(
    tokens: int, vocab_size: int, hidden_size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """``input`` (N, D), ``linear_weight`` (V, D), ``target`` (N,) of any size, for
    :func:`flce_ref.memory.simulate`.

    They are meta tensors: they take no memory and hold no values.

    Raises:
        ValueError: if a size is below 1.
    """
    for name, value in (("tokens", tokens), ("vocab_size", vocab_size), ("hidden_size", hidden_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return (
        torch.empty(tokens, hidden_size, dtype=dtype, device="meta", requires_grad=True),
        torch.empty(vocab_size, hidden_size, dtype=dtype, device="meta", requires_grad=True),
        torch.empty(tokens, dtype=torch.int64, device="meta"),
    )


def input_names(step: Callable[..., Any], inputs: Sequence[Any], labels: Sequence[str] | None) -> list[str]:
    """Names of ``inputs``: ``labels`` if given, else those of the step's parameters, else numbers.

    Raises:
        ValueError: if there are not as many labels as inputs.
    """
    if labels is not None:
        if len(labels) != len(inputs):
            raise ValueError(f"labels must name each of the {len(inputs)} inputs, got {len(labels)}: {list(labels)}")
        return list(labels)
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # builtins
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [positional[i] if i < len(positional) else f"input {i}" for i in range(len(inputs))]


class Given(NamedTuple):
    """A storage that the step is given."""

    base: Tensor  # fake, flat, the whole storage
    shape: tuple[int, ...]  # of the first tensor in it
    role: str  # "input", "weight", "target" or "other"
    name: str


class FakeInputs(contextlib.AbstractContextManager["FakeInputs"]):
    """Fake twins of the step's inputs; modules get fake parameters and buffers until the end of the context."""

    def __init__(self, names: Sequence[str]) -> None:
        self.tensors: list[Given] = []
        self._twins: dict[int, Tensor] = {}
        self._bases: dict[int, Tensor] = {}
        self._replaced: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._names_say_weight = any(_says_weight(name) for name in names)

    def __exit__(self, *_: object) -> None:
        for owner, key, original in reversed(self._replaced):
            owner[key] = original

    def fake(self, value: Any, name: str) -> Any:
        """``value`` with every tensor in it (in modules, lists, tuples and dicts too) replaced by a fake one."""
        if isinstance(value, Tensor):
            return self._twin(value, name, "")
        if isinstance(value, nn.Module):
            self._fake_module(value, name)
        elif isinstance(value, dict):
            return {key: self.fake(item, f"{name}.{key}") for key, item in value.items()}
        elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self.fake(item, f"{name}[{i}]") for i, item in enumerate(value))
        return value

    def _fake_module(self, module: nn.Module, name: str) -> None:
        for path, owner in module.named_modules(prefix=name):
            for tensors, role in ((owner._parameters, "weight"), (owner._buffers, "other")):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self._replaced.append((tensors, key, tensor))
                        tensors[key] = self._twin(tensor, f"{path}.{key}".lstrip("."), role)

    def _twin(self, tensor: Tensor, name: str, role: str) -> Tensor:
        """One fake for each tensor, sharing a storage where the originals do."""
        twin = self._twins.get(id(tensor))
        if twin is None:
            storage = tensor.untyped_storage()
            base = self._bases.get(storage._cdata)
            if base is None:
                elements = storage.nbytes() // tensor.element_size()
                base = torch.empty(elements, dtype=tensor.dtype, device="cpu")
                self._bases[storage._cdata] = base
                self.tensors.append(Given(base, tuple(tensor.shape), role or self._role(tensor, name), name))
            if base.dtype != tensor.dtype:
                base = base.view(tensor.dtype)
            twin = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
            self._twins[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        return twin

    def _role(self, tensor: Tensor, name: str) -> str:
        if not tensor.is_floating_point():
            return "target"
        if self._names_say_weight:
            return "weight" if _says_weight(name) else "input"
        # Unnamed (x, w, y): of the floating matrices the second is the head's, as F.linear takes them.
        earlier = [given.role for given in self.tensors if given.role in ("input", "weight")]
        return "weight" if tensor.ndim == 2 and earlier == ["input"] else "input"


def _says_weight(name: str) -> bool:
    return "weight" in name or name in ("w", "W")
