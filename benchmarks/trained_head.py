"""Heads to filter gradients on: two random ones, and one that has learned a language of ``vocab_size`` words.

The language has what matters here of a natural one. Every word has a few successors that follow it nine times out of
ten, and else any word may, by Zipf's law. Words are numbered by how frequent they are, as the merges of a byte-pair
encoder nearly are. The model predicts a word from the one before it: an embedding, a normalisation, a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce_ref import linear_cross_entropy

SUCCESSORS = 32
HOW_OFTEN = 0.9


class Head(NamedTuple):
    """What a step of a head takes, in bfloat16."""

    input: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    target: Tensor  # (N,)


def random_head(tokens: int, vocab_size: int, hidden_size: int, device: torch.device, deviation: float) -> Head:
    """Logits of standard deviation ``deviation``, and targets that have nothing to do with them."""
    x = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16)
    w = torch.randn(vocab_size, hidden_size, device=device, dtype=torch.bfloat16)
    w *= deviation / hidden_size**0.5
    return Head(x.requires_grad_(), w.requires_grad_(), torch.randint(0, vocab_size, (tokens,), device=device))


class Language:
    """Pairs of a word and its successor."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words, self._few = (_zipf(size, device) for size in (vocab_size, SUCCESSORS))
        self._successors = _draw(self._words, vocab_size * SUCCESSORS).view(vocab_size, SUCCESSORS)

    def pairs(self, count: int) -> tuple[Tensor, Tensor]:
        """(count,) words and the words after them."""
        word, other = _draw(self._words, count), _draw(self._words, count)
        follower = self._successors[word, _draw(self._few, count)]
        return word, torch.where(torch.rand(count, device=word.device) < HOW_OFTEN, follower, other)

    def loss(self, word: Tensor, target: Tensor) -> float:
        """The mean loss of a model that knows the language."""
        follows = (self._few * (self._successors[word] == target[:, None])).sum(1)
        return -torch.log(HOW_OFTEN * follows + (1 - HOW_OFTEN) * self._words[target]).mean().item()


def _zipf(size: int, device: torch.device) -> Tensor:
    """Probabilities of ``size`` words by their rank."""
    inverse = 1 / torch.arange(1, size + 1, device=device, dtype=torch.float64)
    return inverse / inverse.sum()


def _draw(probabilities: Tensor, count: int) -> Tensor:
    uniform = torch.rand(count, device=probabilities.device, dtype=torch.float64)
    return torch.searchsorted(probabilities.cumsum(0), uniform).clamp_(max=len(probabilities) - 1)


class Bigrams(nn.Module):
    """Hidden states of words: what all have in common and what is each one's own, normalised."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.randn(hidden_size))
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, word: Tensor) -> Tensor:
        return F.rms_norm(self.common + self.embedding(word), self.common.shape)


def trained_head(
    tokens: int, vocab_size: int, hidden_size: int, device: torch.device, steps: int
) -> tuple[Head, dict[str, Any]]:
    """A head after ``steps`` steps, with hidden states and targets that it has not seen; and how training went."""
    language, model = Language(vocab_size, device), Bigrams(vocab_size, hidden_size).to(device)
    # A step of Adam moves a logit by up to lr · Σ |x_d|, so the head's rate falls with D.
    rates = {model.head.weight: 0.3 / hidden_size, model.embedding.weight: 1e-2, model.common: 1e-2}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": rate, "rate": rate} for p, rate in rates.items()], weight_decay=0, fused=True
    )
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * min(1, (step + 1) / 20, (steps - step) / (0.5 * steps))
        word, target = language.pairs(tokens)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = linear_cross_entropy(model(word), model.head.weight, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    word, target = language.pairs(tokens)
    with torch.no_grad():
        x, w = model(word).bfloat16(), model.head.weight.detach().bfloat16()
        last = linear_cross_entropy(x, w, target).item()
    about = {"steps": steps, "losses": [float(loss) for loss in losses[:: max(1, steps // 50)]]}
    about |= {"loss_on_new_pairs": last, "loss_of_the_language": language.loss(word, target)}
    return Head(x.requires_grad_(), w.requires_grad_(), target), about


def renumbered(head: Head) -> Head:
    """The same head with its words in random order: the same loss, the same probabilities."""
    order = torch.randperm(len(head.weight), device=head.weight.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return Head(head.input, head.weight.detach()[order].requires_grad_(), place[head.target])
