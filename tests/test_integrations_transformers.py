"""The fused loss in models of Hugging Face transformers, against the same models without it. Nothing is downloaded."""

from __future__ import annotations

import copy
import functools
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="THE INTEGRATION IS NOT TESTED: pip install transformers")

from flce_ref.integrations.transformers import use_fused_loss  # noqa: E402

SMALL = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, tied": ("llama", {"tie_word_embeddings": True}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE, router loss": (
        "qwen3_moe",
        {"output_router_logits": True, "num_experts": 8, "moe_intermediate_size": 16},
    ),
    "Gemma2, soft cap": ("gemma2", {"final_logit_softcapping": 0.5}),
    "Gemma3": ("gemma3_text", {}),
    "GPT-OSS": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Phi, head with a bias": ("phi", {}),
    "GPT-2": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Cohere, logit scale": ("cohere", {"logit_scale": 0.25}),
    "Granite, logits scaling": ("granite", {"logits_scaling": 3.0}),
    "Mixtral, router loss": ("mixtral", {"output_router_logits": True, "num_local_experts": 4}),
    "Mamba, no attention": ("mamba", {"state_size": 4}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, extra = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, **extra)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def batch() -> tuple[Tensor, Tensor]:
    """Token ids (3, 17) and labels of which the prompts are ignored."""
    ids = torch.randint(3, 101, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    return ids, labels


def step(model: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output of a forward and, after its backward, every parameter's gradient."""
    ids, labels = batch()
    model.zero_grad()
    output = model(input_ids=ids, **{"labels": labels, **options})
    output.loss.backward()
    return output, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@every_model
@pytest.mark.parametrize("items", [None, 77, torch.tensor(77)], ids=["mean", "int", "tensor"])
def test_loss_and_gradients_are_the_models_own(name: str, items: Any) -> None:
    model = made(name)
    options = {} if items is None else {"num_items_in_batch": items}
    expected, expected_grads = step(model, **options)
    handle = use_fused_loss(model, chunk_size=8)
    output, grads = step(model, **options)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
    assert output.logits.shape == (3, 0, 101)
    handle.remove()
    again, again_grads = step(model, **options)
    torch.testing.assert_close((again.loss, again.logits), (expected.loss, expected.logits), rtol=0, atol=0)
    torch.testing.assert_close(again_grads, expected_grads, rtol=0, atol=0)
    assert not hasattr(model, "_loss_function") and "forward" not in model.lm_head.__dict__
    handle.remove()


@pytest.mark.parametrize("name", ["Llama", "Gemma2, soft cap"])
def test_bfloat16_is_as_near_to_the_truth_as_the_model_is(name: str) -> None:
    truth, true_grads = step(made(name, torch.float64))
    rounded = made(name).bfloat16()
    plain, plain_grads = step(rounded)
    use_fused_loss(rounded)
    fused, fused_grads = step(rounded)

    def off(grads: dict[str, Tensor]) -> float:
        errors = [((grads[k].double() - g).norm() / g.norm()).item() for k, g in true_grads.items()]
        return max(errors)

    assert abs(fused.loss - truth.loss) <= 2 * abs(plain.loss - truth.loss) + 1e-3
    assert off(fused_grads) <= 1.5 * off(plain_grads)


def test_the_given_shift_and_what_a_trainer_does_in_two_micro_batches() -> None:
    model = made("Llama")
    use_fused_loss(model)
    ids, labels = batch()
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    whole, grads = step(model)
    given, given_grads = step(model, shift_labels=shifted)
    torch.testing.assert_close((given.loss, given_grads), (whole.loss, grads))
    items = (shifted != -100).sum()
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 3)):
        model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=items).loss.backward()
    torch.testing.assert_close({k: p.grad for k, p in model.named_parameters()}, grads)


@every_model
def test_evaluation_and_generation_are_unchanged(name: str) -> None:
    model = made(name).eval()
    ids, labels = batch()
    expected = model(input_ids=ids, labels=labels)
    words = model.generate(ids[:, :6], max_new_tokens=5, do_sample=False)
    use_fused_loss(model)
    for _ in range(2):
        output = model(input_ids=ids, labels=labels)
        torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits), rtol=0, atol=0)
        assert torch.equal(model.generate(ids[:, :6], max_new_tokens=5, do_sample=False), words)
        step(model.train())
        model.eval()
    assert model.train()(input_ids=ids).logits.shape == (3, 17, 101)


def test_a_direct_call_of_forward_is_the_same_as_a_call_of_the_model() -> None:
    """PEFT's tuners call ``model.forward``, past every hook; a call that trained or failed leaves nothing behind."""
    model = made("Llama")
    own_signature = inspect.signature(model.forward)
    handle = use_fused_loss(model)
    ids, labels = batch()
    assert inspect.signature(model.forward) == own_signature
    assert model.forward(input_ids=ids, labels=labels).logits.shape == (3, 0, 101)
    assert model.forward(input_ids=ids).logits.shape == (3, 17, 101)
    with pytest.raises(ValueError, match="target"):
        model(input_ids=ids, labels=labels[:, :-1])
    assert model.lm_head(torch.zeros(2, 32)).shape == (2, 101)
    handle.remove()
    assert "forward" not in model.__dict__


def test_a_copy_trains_itself() -> None:
    model = made("Llama")
    use_fused_loss(model)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.lm_head.weight)
    output, grads = step(other)
    assert output.logits.shape == (3, 0, 101) and grads["lm_head.weight"].any()
    torch.testing.assert_close(output.loss, torch.tensor(101.0).log())
    assert all(p.grad is None for p in model.parameters())


def test_a_forward_wrapped_before_or_after_comes_back() -> None:
    model = made("Llama")
    before = model.forward = functools.partial(model.forward)
    handle = use_fused_loss(model)
    handle.remove()
    assert model.forward is before
    handle = use_fused_loss(model)
    after = model.forward = functools.partial(model.forward)
    assert step(model)[0].logits.shape == (3, 0, 101)
    handle.remove()
    assert model.forward is after and step(model)[0].logits.shape == (3, 17, 101)


def test_no_logits_are_made_in_training() -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            # The weight itself, (101, 32), is seen transposed.
            if isinstance(out, Tensor) and out.shape[-1:] == (101,) and out.shape != (32, 101):
                self.elements = max(self.elements, out.numel())
            return out

    model = made("Llama")
    with Largest() as plain:
        step(model)
    use_fused_loss(model, chunk_size=8)
    with Largest() as fused:
        step(model)
    assert plain.elements >= 3 * 17 * 101 and fused.elements <= 8 * 101


def test_gradient_checkpointing_and_compile() -> None:
    model = made("Llama")
    expected, expected_grads = step(model)
    use_fused_loss(model)
    model.gradient_checkpointing_enable()
    output, grads = step(model)
    torch.testing.assert_close((output.loss, grads), (expected.loss, expected_grads), rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_disable()
    output, grads = step_compiled(model)
    torch.testing.assert_close((output.loss, grads), (expected.loss, expected_grads), rtol=1e-4, atol=1e-6)


def step_compiled(model: Any) -> tuple[Any, dict[str, Tensor]]:
    before = model.forward
    model.forward = torch.compile(before, backend="aot_eager")
    try:
        return step(model)
    finally:
        model.forward = before


def test_options_reach_the_loss() -> None:
    model = made("Llama")
    plain, _ = step(model)
    use_fused_loss(model, z_loss=0.1)
    assert step(model)[0].loss > plain.loss + 0.1


def test_what_would_change_the_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        use_fused_loss(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reduction is no option"):
        use_fused_loss(made("Llama"), reduction="none")
    model = made("Llama")
    use_fused_loss(model)
    with pytest.raises(ValueError, match="call remove"):
        use_fused_loss(model)
    model = made("Llama")
    model.loss_function = lambda *_, **__: torch.zeros(())
    with pytest.raises(ValueError, match="another loss_function"):
        use_fused_loss(model)
    model = made("Llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="LlamaForCausalLM has Sequential"):
        use_fused_loss(model)


def test_logits_that_are_not_the_heads_are_refused() -> None:
    model = made("Llama")
    own = type(model).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.__class__ = type("Doubled", (type(model),), {"forward": doubled})
    with pytest.raises(ValueError, match="Doubled does something else"):
        use_fused_loss(model)
    assert model.training


def test_without_the_package_the_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import flce_ref\n"
        "try: import flce_ref.integrations.transformers\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "flce-ref[transformers]" in done.stdout
