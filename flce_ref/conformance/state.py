"""PyTorch's global state around a check: what a function under test changes for everybody is found and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

# What a seed is set to while a check runs: one that no function would choose by itself.
_SEED = 0x5EED_0F_F1CE


def _deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _autocast(device_type: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return (
        lambda: torch.is_autocast_enabled(device_type),
        lambda enabled: torch.set_autocast_enabled(device_type, enabled),
    )


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# name → (read, write)
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "TF32 of cuBLAS": _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    "TF32 of cuDNN": _attribute(torch.backends.cudnn, "allow_tf32"),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _deterministic,
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    "seed": (torch.default_generator.initial_seed, torch.default_generator.manual_seed),
}
# Whose public functions are compared by identity. What is new in a module is an import; what differs is a patch.
OWNERS: dict[str, Any] = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor}


_INHERITED = object()


@contextmanager
def restored() -> Iterator[Callable[[], list[str]]]:
    """Yield a function that names what differs from the state at the beginning; put all of it back at the end."""
    import torch._dynamo  # it wraps torch.manual_seed when it is first imported: not in the middle of a check

    numbers = torch.get_rng_state()
    torch.default_generator.manual_seed(_SEED)
    settings = {name: read() for name, (read, _) in SETTINGS.items()}
    functions = {name: _public(owner) for name, owner in OWNERS.items()}

    def changed() -> list[str]:
        found = [name for name, (read, _) in SETTINGS.items() if read() != settings[name]]
        return found + [f"{name}.{attribute}" for name in OWNERS for attribute in _patched(name, functions[name])]

    try:
        yield changed
    finally:
        for name, owner in OWNERS.items():
            for attribute in _patched(name, functions[name]):
                if functions[name][attribute] is _INHERITED:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, functions[name][attribute])
        for name, (read, write) in SETTINGS.items():
            if read() != settings[name]:
                write(settings[name])
        torch.set_rng_state(numbers)


def _public(owner: Any) -> dict[str, Any]:
    """A module's public functions, a class's public attributes; those it inherits are marked, to be uncovered again."""
    names = dir(owner) if isinstance(owner, type) else [name for name, value in vars(owner).items() if callable(value)]
    return {name: vars(owner).get(name, _INHERITED) for name in names if name[0] != "_"}


def _patched(name: str, before: dict[str, Any]) -> list[str]:
    now = vars(OWNERS[name])
    return [attribute for attribute, value in before.items() if now.get(attribute, _INHERITED) is not value]
