"""The inputs of a check: one linear cross-entropy to compute, with every option it is computed under."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LEAVES = ("input", "linear_weight", "linear_bias")


@dataclass(frozen=True)
class Problem:
    """One linear cross-entropy: input (…, D), linear_weight (V, D), target (…), and its options."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call: only what differs from the default, so that a target is asked for no more
        than the check is about."""
        given: dict[str, Any] = {}
        for name in ("linear_bias", "weight", "softcap"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        for name, default in (("reduction", "mean"), ("ignore_index", -100), ("label_smoothing", 0.0), ("z_loss", 0.0)):
            if getattr(self, name) != default:
                given[name] = getattr(self, name)
        return given

    def leaves(self, frozen: tuple[str, ...] = ()) -> Problem:
        """The same problem on fresh autograd leaves, not copied, so that strides stay; `frozen` ones without grad."""
        changed = {
            name: tensor.detach().requires_grad_(name not in frozen)
            for name in LEAVES
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **changed)

    def but(self, **changes: Any) -> Problem:
        """The same problem with some fields changed."""
        return replace(self, **changes)


def make(
    device: torch.device | str = "cpu",
    *,
    tokens: int = 37,
    hidden: int = 16,
    vocabulary: int = 101,
    dtype: torch.dtype = torch.float32,
    ignored: float = 0.0,
    spread: float = 1.5,
    seed: int = 0,
    **fields: Any,
) -> Problem:
    """A random problem whose logits have standard deviation `spread`; a share `ignored` of its targets is ignore_index.

    Drawn on the CPU from a generator of its own, so that every device sees the same numbers and no global state moves.
    """
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(tokens, hidden, generator=generator)
    linear_weight = torch.randn(vocabulary, hidden, generator=generator) * (spread / hidden**0.5)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    if ignored:
        dropped = torch.randperm(tokens, generator=generator)[: round(tokens * ignored)]
        target[dropped] = fields.get("ignore_index", -100)
    return Problem(input.to(device, dtype), linear_weight.to(device, dtype), target.to(device), **fields)


def bias_for(problem: Problem, seed: int = 1) -> Tensor:
    """A linear_bias (V,) large enough that adding it twice, or to the wrong row, can't be missed."""
    return _random_like_vocabulary(problem, seed) * 2


def class_weight_for(problem: Problem, seed: int = 2) -> Tensor:
    """A class weight (V,) between 0.2 and 3."""
    return _random_like_vocabulary(problem, seed, uniform=True) * 2.8 + 0.2


def upstream_for(problem: Problem, seed: int = 3) -> Tensor:
    """One upstream gradient per token, of both signs, of the target's shape and in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.target.shape, generator=generator).to(problem.target.device)


def exact(device: torch.device | str, *, offset: float = 0.0, tokens: int = 48, vocabulary: int = 96) -> Problem:
    """A float32 problem whose logits are exact in float32, whatever order they are summed in: multiples of 1/64, plus a
    common `offset` that enters through one more hidden dimension. What is then wrong is the loss's own arithmetic."""
    generator = torch.Generator().manual_seed(4)
    hidden = 8
    input = torch.randint(-8, 9, (tokens, hidden), generator=generator) / 8
    linear_weight = torch.randint(-8, 9, (vocabulary, hidden), generator=generator) / 8
    input = torch.cat([input, torch.ones(tokens, 1)], dim=1)
    linear_weight = torch.cat([linear_weight, torch.full((vocabulary, 1), offset)], dim=1)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    return Problem(input.to(device), linear_weight.to(device), target.to(device))


def confident(device: torch.device | str, dtype: torch.dtype, *, level: float = 0.0, **fields: Any) -> Problem:
    """Every token is sure of its target (p ≈ 0.999), with logits that are exact in any dtype: row i of the input picks
    column i of the weight, which holds level + 12 at the target and `level` elsewhere."""
    tokens, vocabulary = 48, 160
    each = torch.arange(tokens)
    linear_weight = torch.full((vocabulary, tokens), level)
    linear_weight[3 * each, each] += 12.0
    input, target = torch.eye(tokens), 3 * each
    return Problem(input.to(device, dtype), linear_weight.to(device, dtype), target.to(device), **fields)


def _random_like_vocabulary(problem: Problem, seed: int, uniform: bool = False) -> Tensor:
    draw = torch.rand if uniform else torch.randn
    values = draw(problem.linear_weight.shape[0], generator=torch.Generator().manual_seed(seed))
    return values.to(problem.linear_weight)
