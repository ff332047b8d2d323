"""Every part of the objective, in every schedule, against the definition in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flce_ref import linear_cross_entropy
from flce_ref.kernels.eager import row_stats
from flce_ref.objective import Objective, RowStats, merge
from tests.oracle import oracle, problem

SCHEDULES = ("naive", "chunked", "checkpointed", "fused", "vocab_tiled")


def chunk(schedule: str, size: int | None) -> dict[str, int]:
    return {} if schedule == "naive" or size is None else {"chunk_size": size}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_combinations_match_the_definition(schedule: str, reduction: str) -> None:
    for ignore, smoothing, z_loss, cap, weighted, biased, use_lse in itertools.product(
        (-100, 3), (0.0, 0.1), (0.0, 0.01), (None, 2.0), (False, True), (False, True), (False, True)
    ):
        x, w, y = problem()
        y[2] = ignore
        bias = torch.linspace(-1, 1, 17, dtype=torch.float64).requires_grad_() if biased else None
        options = {
            "linear_bias": bias,
            "weight": torch.linspace(0.1, 2, 17, dtype=torch.float64) if weighted else None,
            "reduction": reduction,
            "ignore_index": ignore,
            "label_smoothing": smoothing,
            "z_loss": z_loss,
            "softcap": cap,
        }
        inputs = [t for t in (x, w, bias) if t is not None]
        true_loss, true_lse = oracle(x, w, y, **options)
        loss, lse = linear_cross_entropy(x, w, y, schedule=schedule, return_lse=True, **chunk(schedule, 5), **options)
        torch.testing.assert_close((loss, lse), (true_loss, true_lse))
        # Upstream gradients that differ from one and from token to token.
        up, up_lse = torch.randn_like(true_loss), torch.randn_like(true_lse) * use_lse
        truth = torch.autograd.grad((true_loss * up).sum() + (true_lse * up_lse).sum(), inputs)
        objective = (loss * up).sum() + ((lse * up_lse).sum() if use_lse else 0)
        torch.testing.assert_close(torch.autograd.grad(objective, inputs), truth)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 9), d=st.integers(1, 5), v=st.integers(1, 12), size=st.integers(1, 12),
    seed=st.integers(0, 2**31), reduction=st.sampled_from(["mean", "sum", "none"]), schedule=st.sampled_from(SCHEDULES),
)  # fmt: skip
def test_any_shape_and_chunk(n: int, d: int, v: int, size: int, seed: int, reduction: str, schedule: str) -> None:
    x, w, y = problem(n, d, v, seed=seed, ignored=(0, 3))
    truth, _ = oracle(x, w, y, reduction=reduction)
    loss = linear_cross_entropy(x, w, y, reduction=reduction, schedule=schedule, **chunk(schedule, size))
    torch.testing.assert_close(loss, truth, equal_nan=True)
    got, true = (torch.autograd.grad(value.sum() * 3, (x, w)) for value in (loss, truth))
    torch.testing.assert_close(got, true)


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(1, 11), min_size=1, max_size=4), seed=st.integers(0, 2**31), weighted=st.booleans())
def test_statistics_of_tiles_merge_in_any_grouping(cuts: list[int], seed: int, weighted: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    v, (logits, y) = 12, (torch.randn(5, 12, generator=g).double() * 30, torch.randint(0, 12, (5,), generator=g))
    logits[:, :2] = float("-inf")  # a masked, padded vocabulary: whole tiles may be −inf
    logits[torch.arange(5), y.clamp(min=2)] = 1.0
    weight = torch.rand(12, generator=g).double() if weighted else None
    objective = Objective(v, label_smoothing=0.0, class_weight=weight)
    edges = sorted({0, *cuts, v})
    tiles = [row_stats(logits[:, a:b], y, a, objective) for a, b in itertools.pairwise(edges)]
    whole = row_stats(logits, y, 0, objective)
    left, right = tiles[0], tiles[-1]
    for tile in tiles[1:]:
        left = merge(left, tile, 0.0, 0.0)
    for tile in reversed(tiles[:-1]):
        right = merge(tile, right, 0.0, 0.0)
    for merged in (left, right):
        torch.testing.assert_close(merged[:3], whole[:3])


def test_smoothed_sums_move_with_the_maximum() -> None:
    logits, y = torch.randn(4, 10, dtype=torch.float64) + 1e4, torch.tensor([0, 3, 7, 9])
    weight = torch.rand(10, dtype=torch.float64)
    objective = Objective(10, label_smoothing=0.2, class_weight=weight)
    a, b = row_stats(logits[:, :4], y, 0, objective), row_stats(logits[:, 4:], y, 4, objective)
    merged: RowStats = merge(a, b, weight[:4].sum(), weight[4:].sum())
    torch.testing.assert_close(merged, row_stats(logits, y, 0, objective))


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_tile_of_masked_words_adds_nothing_wherever_the_others_lie(offset: float) -> None:
    logits, y = torch.randn(4, 10, dtype=torch.float64) + offset, torch.tensor([4, 5, 7, 9])
    logits[:, :4] = float("-inf")
    objective = Objective(10)
    tiles = [row_stats(logits[:, a:b], y, a, objective) for a, b in ((0, 4), (4, 10))]
    for a, b in (tiles, reversed(tiles)):
        torch.testing.assert_close(merge(a, b, 0.0, 0.0), row_stats(logits, y, 0, objective))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_target_ignored_is_nan_with_zero_gradients(schedule: str) -> None:
    x, w, y = problem(ignored=tuple(range(13)))
    for weight in (None, torch.rand(17, dtype=torch.float64)):
        loss = linear_cross_entropy(x, w, y, weight=weight, schedule=schedule)
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, (x, w)):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_a_common_offset_of_the_logits_changes_nothing(offset: float) -> None:
    x, w, y = problem(dtype=torch.float32)
    base = linear_cross_entropy(x, w, y)
    base_grads = torch.autograd.grad(base, (x, w))
    bias = torch.full((17,), offset)
    # float32 logits near 1e4 are 2^-10 apart, so that is how far the inputs of the loss themselves have moved.
    bound = max(1e-6, offset * 2**-23)
    loss = linear_cross_entropy(x, w, y, linear_bias=bias)
    torch.testing.assert_close(loss, base, rtol=0, atol=bound)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), base_grads, rtol=0, atol=10 * bound)


def test_an_ignored_row_is_silent_whatever_its_logits() -> None:
    x, w, y = problem()
    with torch.no_grad():
        x[2] = float("inf")
    loss, lse = linear_cross_entropy(x, w, y, return_lse=True)
    assert loss.isfinite() and lse[2] == 0
    dx, _ = torch.autograd.grad(loss, (x, w))
    # dw is not finite: 0 · inf in dlogits.T @ x, as in every implementation that multiplies ignored rows.
    assert torch.equal(dx[2], torch.zeros_like(dx[2]))
    (skipped,) = torch.autograd.grad(linear_cross_entropy(x, w, y, skip_ignored=True), w)
    assert skipped.isfinite().all()
