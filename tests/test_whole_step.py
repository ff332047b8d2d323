"""The decoder around the loss: it computes, it allocates what it says, and the loss is found in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flce_ref.memory import Timeline
from flce_ref.memory.whole_step import Decoder, loss_spike, merge_given, simulate_whole_step
from flce_ref.models import Model, get

TINY = Model("tiny", "Tiny", 512, 32, "nowhere", 3, 64, 4, 2, 8)
TOKENS = 2048
LOGITS = TOKENS * TINY.vocab_size * 2


@pytest.fixture(scope="module")
def steps() -> dict[tuple[str, bool], Timeline]:
    """Every schedule with and without checkpointing, at a size whose logits outweigh the rest."""
    wide = replace(TINY, vocab_size=16_384)
    return {
        (schedule, checkpointing): simulate_whole_step(wide, TOKENS, schedule=schedule, checkpointing=checkpointing)
        for schedule in ("naive", "fused")
        for checkpointing in (True, False)
    }


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_computes_the_same_with_and_without_checkpointing(tied: bool) -> None:
    results = []
    for checkpointing in (True, False):
        torch.manual_seed(0)
        decoder = Decoder(TINY, tied=tied, checkpointing=checkpointing)
        ids = torch.randint(TINY.vocab_size, (1, 9))
        loss = decoder(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append((loss, {name: p.grad for name, p in decoder.named_parameters()}))
    torch.testing.assert_close(results[0], results[1])
    assert all(gradient is not None for gradient in results[0][1].values())
    assert ("head.weight" in results[0][1]) != tied


def test_the_decoder_is_causal() -> None:
    decoder = Decoder(TINY)
    ids = torch.randint(TINY.vocab_size, (1, 8))
    target = torch.full_like(ids, -100)
    target[0, 3] = 5  # the only token that counts, so later ones must not matter
    other = ids.clone()
    other[0, 4:] = (other[0, 4:] + 1) % TINY.vocab_size
    earlier = ids.clone()
    earlier[0, 2] = (earlier[0, 2] + 1) % TINY.vocab_size
    torch.testing.assert_close(decoder(ids, target), decoder(other, target))
    assert not torch.isclose(decoder(ids, target), decoder(earlier, target))


def test_the_parameters_are_those_of_the_published_model() -> None:
    with torch.device("meta"):
        decoder = Decoder(get("smollm3-3b"), tied=True)
    assert f"{sum(p.numel() for p in decoder.parameters()) / 1e9:.2f}" == "3.08"


def test_the_naive_loss_is_the_peak_and_three_logits_high(steps: dict[tuple[str, bool], Timeline]) -> None:
    logits = TOKENS * 16_384 * 2
    for checkpointing in (True, False):
        spike = loss_spike(steps["naive", checkpointing])
        assert spike.top == steps["naive", checkpointing].peak_bytes > spike.elsewhere
        assert spike.height == pytest.approx(3 * logits, rel=0.01)


def test_checkpointing_leaves_the_height_of_the_spike_alone(steps: dict[tuple[str, bool], Timeline]) -> None:
    for schedule in ("naive", "fused"):
        with_it, without = (loss_spike(steps[schedule, checkpointing]) for checkpointing in (True, False))
        assert with_it.height == without.height
        assert with_it.foot < without.foot


def test_the_fused_loss_lowers_the_step(steps: dict[tuple[str, bool], Timeline]) -> None:
    naive, fused = steps["naive", True], steps["fused", True]
    assert loss_spike(fused).height < loss_spike(naive).height
    assert loss_spike(fused).foot == pytest.approx(loss_spike(naive).foot, rel=0.01)
    assert fused.peak_bytes < naive.peak_bytes


def test_what_the_step_is_given_is_one_block_for_each_kind(steps: dict[tuple[str, bool], Timeline]) -> None:
    given = {a.label: a for a in steps["naive", True].allocations if a.start == 0}
    assert set(given) == {"parameters (30 tensors)", "AdamW's moments (60 tensors)", "tokens", "target"}
    parameters, moments = given["parameters (30 tensors)"], given["AdamW's moments (60 tensors)"]
    assert moments.bytes == 2 * parameters.bytes
    assert merge_given(steps["naive", True]).peak_bytes == steps["naive", True].peak_bytes


def test_a_step_without_logits_has_no_spike() -> None:
    with pytest.raises(ValueError, match="no allocation is named"):
        loss_spike(Timeline("empty", (), 0, None, "simulated"))


@pytest.mark.parametrize(
    ("model", "tokens", "message"),
    [(get("gpt-oss-20b"), 8, "not described layer by layer"), (TINY, 0, "tokens must be at least 1, got 0")],
)
def test_what_cannot_be_simulated_is_said(model: Model, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_whole_step(model, tokens)
