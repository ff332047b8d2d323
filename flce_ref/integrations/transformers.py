"""The fused loss in a causal language model of Hugging Face transformers: its logits are never made in training.

    >>> from flce_ref.integrations.transformers import use_fused_loss   # doctest: +SKIP
    >>> handle = use_fused_loss(model)                                  # doctest: +SKIP
    >>> model(input_ids=ids, labels=ids).loss.backward()                # doctest: +SKIP
    >>> handle.remove()                                                 # doctest: +SKIP

The model's own ``forward`` still runs, so auxiliary losses and outputs are what they were. Only its head and its loss
are exchanged, and only in calls that train: there the head projects no token, and the loss takes the hidden states.
Needs the extra ``[transformers]``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import linear_cross_entropy

try:
    from transformers import PreTrainedModel
except ImportError as error:
    raise ImportError(
        "flce_ref.integrations.transformers needs the package transformers: pip install 'flce-ref[transformers]'"
    ) from error

# Of linear_cross_entropy: what a model's config or its labels decide already can't be given.
OPTIONS = ("z_loss", "label_smoothing", "chunk_size", "accum_dtype", "kernel", "skip_ignored", "schedule")


class FusedLossHandle:
    """What :func:`use_fused_loss` did to a model; :meth:`remove` undoes it."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear, options: dict[str, Any]) -> None:
        self._model, self._head, self._options = model, head, options
        self._scale, self._softcap = _scale_and_softcap(model)
        # Where a caller looks up what forward accepts, as Trainer and generate do, it finds the model's own parameters.
        self.__signature__ = inspect.signature(model.forward)
        self._own_forward = model.forward
        self._forward_was_exchanged = "forward" in model.__dict__  # by accelerate, for one
        self._own_loss = model.loss_function
        self._hidden_states: Tensor | None = None
        self._training = self._removed = False
        # Not a hook: PEFT calls the model's forward directly, which runs none.
        model.forward = self  # type: ignore[method-assign, assignment]
        head.forward = self._project  # type: ignore[method-assign, assignment]
        model.loss_function = self._loss

    def remove(self) -> None:
        """Give the model its own head and loss back; a second call does nothing."""
        if "forward" in self._head.__dict__:
            del self._head.forward
            del self._model._loss_function
            if self._model.__dict__.get("forward") is self:  # else wrapped since, and self only passes calls on
                if self._forward_was_exchanged:
                    self._model.forward = self._own_forward  # type: ignore[method-assign]
                else:
                    del self._model.forward
            self._removed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; whether it trains holds for this call alone, also if it raises."""
        labels = self.__signature__.bind_partial(*args, **kwargs).arguments.get("labels")
        self._training = self._model.training and labels is not None and not self._removed
        try:
            return self._own_forward(*args, **kwargs)
        finally:
            self._training, self._hidden_states = False, None

    def _project(self, hidden_states: Tensor) -> Tensor:
        """The head: logits, but in training those of no token, (…, 0, V)."""
        if self._training:
            self._hidden_states = hidden_states
            hidden_states = hidden_states[..., :0, :]
        return F.linear(hidden_states, self._head.weight, self._head.bias)

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As transformers' ``ForCausalLMLoss``: the mean over valid tokens, or the sum over ``num_items_in_batch``."""
        if not self._training:
            own: Tensor = self._own_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return own
        hidden_states, self._hidden_states = self._hidden_states, None
        assert hidden_states is not None
        if shift_labels is None:  # the labels move, not the hidden states: those would have to be copied
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if self._scale != 1:
            hidden_states = hidden_states * self._scale
        loss: Any = linear_cross_entropy(
            hidden_states, self._head.weight, shift_labels.to(hidden_states.device), linear_bias=self._head.bias,
            reduction="mean" if num_items_in_batch is None else "sum", ignore_index=ignore_index,
            softcap=self._softcap, **self._options,
        )  # fmt: skip
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        result: Tensor = loss if num_items_in_batch is None else loss / num_items_in_batch
        return result


def use_fused_loss(model: PreTrainedModel, **options: Any) -> FusedLossHandle:
    """Let ``model`` compute its training loss without logits, until the returned handle's ``remove()``.

    In calls with ``labels`` while ``model.training``, the loss and its gradients are those of before, from
    :func:`flce_ref.linear_cross_entropy`, and ``logits`` of the output have length 0. Calls in evaluation mode, calls
    without labels and ``generate`` are unchanged. Only this instance is touched, none of its parameters is replaced.

    Args:
        model: a causal language model (``…ForCausalLM``) whose head is a plain ``nn.Linear``. A soft cap of the logits
            (Gemma 2) and a constant scale (Cohere, Granite) are taken from its config.
        options: ``z_loss``, ``label_smoothing``, ``chunk_size``, ``accum_dtype``, ``kernel``, ``skip_ignored`` or
            ``schedule`` of :func:`flce_ref.linear_cross_entropy`.

    Raises:
        TypeError: no transformers model, or an option that is none of those.
        ValueError: a model whose loss would change: another head, a loss function of its own, logits that are not its
            head's (found by a forward pass of two tokens), or one that has the fused loss already.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; accepted of a wrapper, such as "
            "PeftModel or DistributedDataParallel, is the model inside"
        )
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise TypeError(f"{unknown[0]} is no option of use_fused_loss; accepted are {', '.join(OPTIONS)}")
    head, name = model.get_output_embeddings(), type(model).__name__
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(f"model must have an nn.Linear as its head, {name} has {type(head).__name__}")
    if "forward" in head.__dict__:
        raise ValueError(f"model must have its own head, that of this {name} was exchanged before: call remove() first")
    if hasattr(model, "_loss_function"):
        raise ValueError(f"model must have the loss of its class, this {name} was given another loss_function")
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise ValueError(f"model must have the loss ForCausalLM, {name} has {model.loss_type}")
    _check_logits(model, head)
    return FusedLossHandle(model, head, options)


def _scale_and_softcap(model: PreTrainedModel) -> tuple[float, float | None]:
    """What the config says is done to the head's logits."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return float(scale), getattr(config, "final_logit_softcapping", None)


@torch.no_grad()
def _check_logits(model: PreTrainedModel, head: nn.Linear) -> None:
    """Hold the logits of two tokens to what the head and the config say; whatever else a model does shows here."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    training = model.training
    model.eval()  # no dropout
    try:
        ids = torch.tensor([[0, 1]], device=head.weight.device)
        logits = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
        model.train(training)
    scale, softcap = _scale_and_softcap(model)
    expected = F.linear(seen[-1], head.weight, head.bias).float() * scale if seen else logits.new_full((), float("nan"))
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    rounding = 4 * torch.finfo(head.weight.dtype).eps * expected.abs().amax().item()
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=0.01, atol=rounding):
        raise ValueError(
            f"model must make its logits by its head, a constant scale and a soft cap, which its config names; "
            f"{type(model).__name__} does something else"
        )
