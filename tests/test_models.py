"""Published models: the numbers, how a model is looked up, and the sizes of its head."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flce_ref.models import MODELS, Model, get, head_sizes

# Parameters as the publishers state them (embedding once where it is tied to the head; Gemma 3: the language model).
# They depend on every number of a row, and none of them is written in `models.py`.
PUBLISHED_PARAMETERS = {
    "llama-3-8b": (8_030_261_248, False),
    "llama-3-70b": (70_553_706_496, False),
    "llama-3.1-405b": (406e9, False),
    "qwen3-0.6b": (596_049_920, True),
    "qwen3-8b": (8.2e9, False),
    "qwen3-32b": (32.8e9, False),
    "gemma-3-4b": (3_880_263_168, True),
    "gemma-3-27b": (27.0e9, True),
    "mistral-nemo": (12.2e9, False),
    "mistral-small-3": (23.6e9, False),
    "phi-4": (14.7e9, False),
    "phi-4-mini": (3.84e9, True),
    "olmo-2-7b": (7.3e9, False),
    "olmo-3.1-32b": (32.2e9, False),
    "smollm3-3b": (3.08e9, True),
}


def parameters(model: Model, tied: bool) -> int:
    """Count the matrices of a decoder with a gated MLP and grouped-query attention (norms are left out)."""
    assert model.intermediate_size and model.num_heads and model.num_kv_heads and model.head_dim
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if tied else 2)
    return model.num_layers * (attention + mlp) + embeddings


def test_ids_are_unique_lower_case_and_each_model_has_a_source() -> None:
    ids = [model.id for model in MODELS]
    assert len(set(ids)) == len(ids) >= 16
    assert all(id == id.lower() and not set(id) & set(" /,") for id in ids)
    assert all(model.source.startswith("https://huggingface.co/") for model in MODELS)
    assert len({model.source for model in MODELS}) == len(MODELS)
    assert len({model.name for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize(
    ("id", "vocab_size", "hidden_size"),
    [
        ("gpt-oss-120b", 201_088, 2880),  # the source document's row
        ("gravity-16b-a3b", 151_552, 2048),  # the head that the source document measures
        ("llama-3-8b", 128_256, 4096),  # a head that was measured on an H200
    ],
)
def test_heads_that_the_book_measures(id: str, vocab_size: int, hidden_size: int) -> None:
    assert (get(id).vocab_size, get(id).hidden_size) == (vocab_size, hidden_size)


def test_a_layer_is_described_completely_or_not_at_all() -> None:
    described = set()
    for model in MODELS:
        shape = (model.intermediate_size, model.num_heads, model.num_kv_heads, model.head_dim)
        assert all(shape) or shape == (None,) * 4, model.id
        if model.num_heads and model.num_kv_heads:
            assert model.num_heads % model.num_kv_heads == 0
            described.add(model.id)
    assert described == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("id", PUBLISHED_PARAMETERS)
def test_numbers_add_up_to_the_published_parameters(id: str) -> None:
    published, tied = PUBLISHED_PARAMETERS[id]
    assert parameters(get(id), tied) == pytest.approx(published, rel=0.004)  # rounded to three digits, norms


def test_models_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODELS[0].vocab_size = 1  # type: ignore[misc]


def test_get_ignores_case() -> None:
    assert get("GPT-OSS-120B") is get("gpt-oss-120b") is MODELS[0]


def test_get_unknown_suggests_near_ids_and_lists_all() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-oss-120'\. Did you mean gpt-oss-120b") as caught:
        get("gpt-oss-120")
    assert all(model.id in str(caught.value) for model in MODELS)


@pytest.mark.parametrize("nonsense", ["", "zzzzzz", 7])
def test_get_nonsense_suggests_nothing(nonsense: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown model {nonsense!r}\. Known: gpt-oss-120b"):
        get(nonsense)


def test_the_source_documents_row() -> None:
    sizes = head_sizes(get("gpt-oss-120b"), batch=4, seq=4096)
    assert (round(sizes.hidden_bytes / 1e9, 2), round(sizes.logits_bytes / 1e9, 2)) == (0.09, 6.59)
    assert round(sizes.ratio) == 70


def test_the_source_documents_allocation() -> None:
    """`Tried to allocate 37.00 GiB` is the bf16 logits of 128K tokens of Gravity-16B."""
    sizes = head_sizes(get("gravity-16b-a3b"), batch=1, seq=128 * 1024)
    assert sizes.logits_bytes / 2**30 == 37.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_head_sizes_are_those_of_tensors(model: Model, dtype: torch.dtype) -> None:
    sizes = head_sizes(model, 3, 1_048_576, dtype)
    hidden = torch.empty(3, 1_048_576, model.hidden_size, dtype=dtype, device="meta")
    logits = torch.empty(3, 1_048_576, model.vocab_size, dtype=dtype, device="meta")
    assert (sizes.hidden_bytes, sizes.logits_bytes) == (hidden.nbytes, logits.nbytes)
    assert sizes.ratio == pytest.approx(logits.nbytes / hidden.nbytes)


@pytest.mark.parametrize(
    ("batch", "seq", "dtype", "error", "message"),
    [
        (0, 1, torch.bfloat16, ValueError, "batch must be at least 1, got 0"),
        (1, -4, torch.bfloat16, ValueError, "seq must be at least 1, got -4"),
        (1.5, 1, torch.bfloat16, TypeError, "batch must be an integer, got 1.5"),
        (1, "8", torch.bfloat16, TypeError, "seq must be an integer, got '8'"),
        (1, 1, "bf16", TypeError, "dtype must be a torch.dtype such as torch.bfloat16, got 'bf16'"),
        (1, 1, torch.int32, ValueError, "dtype must be a floating-point one such as torch.bfloat16, got torch.int32"),
    ],
)
def test_bad_arguments_are_named(batch: int, seq: int, dtype: torch.dtype, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        head_sizes(MODELS[0], batch, seq, dtype)
