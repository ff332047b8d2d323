"""The page for the reader in a hurry: each of its code blocks is run as it is printed and compared with plain PyTorch.

A block is found by its ``:name:``. It is given a small model and data, and what it leaves behind is checked.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce_ref

PAGE = (Path(__file__).parent.parent / "book" / "hurry.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```\{code-block\} python\n:name: recipe-(\S+)\n\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = dict(BLOCK.findall(PAGE))

B, S, D, V = 2, 1025, 8, 13  # S so that the chunks of 1024 rows don't divide the tokens
IGNORED = -100


class Model(nn.Module):
    """Embedding and one layer, in the place of a transformer; (B, S) → (B, S, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embedding(input_ids)).tanh()


@pytest.fixture
def given() -> dict[str, Any]:
    """What the page says is there, and the names that its blocks import nowhere."""
    torch.manual_seed(0)
    model, lm_head = Model().double(), nn.Linear(D, V, bias=False).double()
    input_ids = torch.randint(V, (B, S))
    targets = torch.randint(V, (B, S)).masked_fill(torch.rand(B, S) < 0.3, IGNORED)
    return {
        "torch": torch, "nn": nn, "F": F, "linear_cross_entropy": flce_ref.linear_cross_entropy,
        "model": model, "lm_head": lm_head, "embedding": model.embedding, "input_ids": input_ids, "targets": targets,
        "hidden": model(input_ids),
    }  # fmt: skip


def run(name: str, given: dict[str, Any]) -> SimpleNamespace:
    """Run the block ``name`` with ``given`` as its globals; what they are afterwards."""
    exec(compile(BLOCKS[name], f"hurry.md, recipe-{name}", "exec"), given)
    return SimpleNamespace(**given)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2), targets.flatten(), reduction=reduction)


def gradients(after: SimpleNamespace) -> list[Tensor | None]:
    return [p.grad for module in (after.model, after.lm_head) for p in module.parameters()]


def expected_gradients(given: dict[str, Any], loss_of: Callable[[nn.Module, nn.Linear], Tensor]) -> list[Tensor | None]:
    """Gradients of copies of model and head after the backward of ``loss_of(model, lm_head)``."""
    model, lm_head = copy.deepcopy((given["model"], given["lm_head"]))
    loss_of(model, lm_head).backward()
    return [p.grad for module in (model, lm_head) for p in module.parameters()]


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None], **tolerance: float) -> None:
    assert [g is None for g in actual] == [g is None for g in expected]
    assert any(g is not None and g.any() for g in expected)
    for a, e in zip(actual, expected):
        if a is not None:
            torch.testing.assert_close(a, e, **tolerance)


def test_every_python_block_has_a_name_and_a_test() -> None:
    assert len(re.findall(r"^```+\s*\{?(?:code-block\} )?python", PAGE, re.MULTILINE)) == len(BLOCKS)
    tested = {
        name.removeprefix("test_recipe_").replace("_", "-") for name in globals() if name.startswith("test_recipe_")
    }
    assert tested == set(BLOCKS)


def test_recipe_is_it_the_logits(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run("is-it-the-logits", given)
    assert capsys.readouterr().out == "37.00 GiB in torch.bfloat16\n74.00 GiB in torch.float32\n"


def test_recipe_three_lines(given: dict[str, Any]) -> None:
    expected = expected_gradients(
        given, lambda model, head: plain_loss(model(given["input_ids"]), head.weight, given["targets"])
    )
    assert_same(gradients(run("three-lines", given)), expected)


def test_recipe_library(given: dict[str, Any]) -> None:
    expected = expected_gradients(
        given, lambda model, head: plain_loss(model(given["input_ids"]), head.weight, given["targets"])
    )
    del given["linear_cross_entropy"]  # the block imports it
    after = run("library", given)
    torch.testing.assert_close(after.loss, plain_loss(after.hidden, after.lm_head.weight, after.targets))
    assert_same(gradients(after), expected)


def test_recipe_next_word(given: dict[str, Any]) -> None:
    after = run("next-word", given)
    expected = plain_loss(after.hidden[:, :-1], after.lm_head.weight, after.input_ids[:, 1:])
    torch.testing.assert_close(after.loss, expected)


def test_recipe_ignored(given: dict[str, Any]) -> None:
    given["is_prompt"] = torch.arange(S).expand(B, S) < 500
    before = given["targets"]
    after = run("ignored", given)
    expected = plain_loss(after.hidden[:, 500:], after.lm_head.weight, before[:, 500:])
    torch.testing.assert_close(after.loss, expected)


def test_recipe_accumulation(given: dict[str, Any]) -> None:
    ids, targets = given["input_ids"], given["targets"]
    given["micro_batches"] = [(ids[:1, :200], targets[:1, :200]), (ids[1:], targets[1:])]
    given["optimizer"] = torch.optim.SGD(given["lm_head"].parameters(), lr=0.0)

    def all_at_once(model: nn.Module, head: nn.Linear) -> Tensor:
        hidden = torch.cat([model(x).flatten(0, 1) for x, _ in given["micro_batches"]])
        return plain_loss(hidden, head.weight, torch.cat([y.flatten() for _, y in given["micro_batches"]]))

    expected = expected_gradients(given, all_at_once)
    assert_same(gradients(run("accumulation", given)), expected)


def test_recipe_data_parallel(given: dict[str, Any]) -> None:
    """Two processes with different numbers of valid tokens: the average of their gradients is that of one process."""
    given["targets"][0, :700] = IGNORED
    total = (given["targets"] != IGNORED).sum()
    expected = expected_gradients(
        given, lambda model, head: plain_loss(model(given["input_ids"]), head.weight, given["targets"])
    )
    losses = []
    for rank in range(2):
        mine = given | {name: given[name][rank : rank + 1] for name in ("hidden", "targets")}
        mine["dist"] = SimpleNamespace(all_reduce=lambda count: count.copy_(total), get_world_size=lambda: 2)
        losses.append(run("data-parallel", mine).loss)
    (sum(losses) / 2).backward()  # DistributedDataParallel's average over the processes
    assert_same(gradients(SimpleNamespace(**given)), expected)


def test_recipe_tied(given: dict[str, Any]) -> None:
    expected = expected_gradients(
        given, lambda model, _: plain_loss(model(given["input_ids"]), model.embedding.weight, given["targets"])
    )
    assert_same(gradients(run("tied", given)), expected)


def test_recipe_log_probabilities(given: dict[str, Any]) -> None:
    after = run("log-probabilities", given)
    all_words = F.linear(after.hidden, after.lm_head.weight).log_softmax(-1)
    valid = after.targets != IGNORED
    expected = all_words.gather(2, after.targets.clamp(min=0)[..., None])[..., 0].masked_fill(~valid, 0.0)
    assert not after.logprobs.requires_grad
    torch.testing.assert_close(after.logprobs, expected.detach())
    torch.testing.assert_close(after.of_sequence, expected.detach().sum(1))
    torch.testing.assert_close(after.perplexity, (-expected.detach()[valid]).mean().exp())


def test_recipe_autocast(given: dict[str, Any]) -> None:
    given["model"].float(), given["lm_head"].float()

    def plain(model: nn.Module, head: nn.Linear) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain_loss(model(given["input_ids"]), head.weight, given["targets"])

    expected = expected_gradients(given, plain)
    after = run("autocast", given)
    assert after.loss.dtype == torch.float32
    assert all(g is not None and g.dtype == torch.float32 for g in gradients(after))
    assert_same(gradients(after), expected, rtol=0.05, atol=1e-3)


def test_recipe_compile(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a code generator, which needs a C++ compiler here: that the graph has no break is what is claimed.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    expected = expected_gradients(
        given, lambda model, head: plain_loss(model(given["input_ids"]), head.weight, given["targets"])
    )
    after = run("compile", given)
    after.loss.backward()
    assert_same(gradients(after), expected)


class DecoderWithHead(nn.Module):
    """The two attributes of a Hugging Face decoder that the recipe uses, and the arguments of its body."""

    class Body(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return SimpleNamespace(last_hidden_state=super().forward(input_ids) * attention_mask[..., None])

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Body()
        self.lm_head = nn.Linear(D, V, bias=False)


def test_recipe_trainer(given: dict[str, Any]) -> None:
    after = run("trainer", given)
    lm = DecoderWithHead().double()
    labels, mask = given["targets"], torch.ones(B, S, dtype=torch.double)
    mask[1, 600:] = 0
    model = after.WithoutLogits(lm)
    hidden = lm.model(given["input_ids"], mask).last_hidden_state[:, :-1]

    mean = model(input_ids=given["input_ids"], labels=labels, attention_mask=mask)["loss"]
    torch.testing.assert_close(mean, plain_loss(hidden, lm.lm_head.weight, labels[:, 1:]))

    counted = model(
        input_ids=given["input_ids"], labels=labels, attention_mask=mask, num_items_in_batch=torch.tensor(77)
    )
    torch.testing.assert_close(counted["loss"], plain_loss(hidden, lm.lm_head.weight, labels[:, 1:], "sum") / 77)
