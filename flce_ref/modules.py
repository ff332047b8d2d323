"""The front door as a module, for those who configure a loss once and call it in a training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .arguments import check_flags, check_objective, check_schedule
from .functional import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """:func:`flce_ref.linear_cross_entropy` with its options fixed.

    The head's weight stays with the model that owns it (it is often tied to the embedding) and is passed to each call::

        loss_fn = LinearCrossEntropyLoss(label_smoothing=0.1)
        loss = loss_fn(hidden, lm_head.weight, labels)

    Args:
        weight: class weights (V,), kept as a buffer; or None.
        reduction, ignore_index, label_smoothing, z_loss, softcap: as in :func:`flce_ref.linear_cross_entropy`.
        **how: ``schedule``, ``chunk_size``, ``accum_dtype``, ``kernel``, ``skip_ignored``, ``return_lse`` and
            ``filter_eps``, likewise.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        **how: Any,
    ) -> None:
        super().__init__()
        check_objective(reduction, ignore_index, label_smoothing, z_loss, softcap)
        known = {"schedule", "chunk_size", "accum_dtype", "kernel", "skip_ignored", "return_lse", "filter_eps"}
        if unknown := sorted(set(how) - known):
            raise TypeError(f"unknown argument {unknown[0]!r}; accepted are {', '.join(sorted(known))}")
        given = {
            "schedule": "fused",
            "chunk_size": None,
            "accum_dtype": None,
            "kernel": "auto",
            "filter_eps": None,
        } | how
        check_flags(skip_ignored=given.pop("skip_ignored", False), return_lse=given.pop("return_lse", False))
        # Which accum_dtype goes with the inputs is seen in a call: for now, assume that it does.
        accum = given["accum_dtype"]
        check_schedule(**given, compute_dtype=accum if isinstance(accum, torch.dtype) else torch.float32)
        self.register_buffer("weight", weight, persistent=False)
        self.options: dict[str, Any] = {
            "reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
            "z_loss": z_loss, "softcap": softcap, **how,
        }  # fmt: skip

    def forward(
        self, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Loss of ``input`` (…, D) under the head ``linear_weight`` (V, D) against ``target`` (…)."""
        return linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=self.weight, **self.options
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
