"""A small decoder, corpora made by code, and a training loop: shared by ``train.py`` and lab 10."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flce_ref.memory.whole_step import Decoder
from flce_ref.models import Model

# (hidden states (B, N, D), weight of the head (V, D), target (B, N)) → loss
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def decoder(vocab_size: int, hidden_size: int, layers: int, heads: int, *, seed: int = 0) -> Decoder:
    """A decoder whose head is its embedding's weight, initialised as GPT-2 is: normal, standard deviation 0.02."""
    shape = Model(
        "small", "small", vocab_size, hidden_size, "", layers, 3 * hidden_size, heads, heads, hidden_size // heads
    )
    torch.manual_seed(seed)
    made = Decoder(shape, tied=True, checkpointing=False)
    for parameter in made.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return made


def questions(count: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sums as bytes, "17+25=42;", one after the other: tokens (count, length) and which of them are answers."""
    random = np.random.default_rng(seed)
    tokens = np.zeros((count, length), dtype=np.int64)
    answers = np.zeros((count, length), dtype=bool)
    for row in range(count):
        text, answer = b"", []
        while len(text) < length:
            a, b = random.integers(0, 50, 2)
            question, result = f"{a}+{b}=".encode(), f"{a + b};".encode()
            text += question + result
            answer += [False] * len(question) + [True] * len(result)
        tokens[row], answers[row] = list(text[:length]), answer[:length]
    return torch.from_numpy(tokens), torch.from_numpy(answers)


def chains(count: int, length: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Words (count, length): each has a successor that follows it three times of four; else a word by Zipf's law."""
    random = np.random.default_rng(seed)
    successor = random.permutation(vocab_size)
    words = np.zeros((count, length), dtype=np.int64)
    for t in range(length):
        drawn = random.zipf(1.2, count) % vocab_size
        follows = (random.random(count) < 0.75) & (t > 0)
        words[:, t] = np.where(follows, successor[words[:, t - 1]], drawn)
    return torch.from_numpy(words)


def train(
    model: Decoder,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_of: Loss,
    *,
    learning_rate: float = 3e-3,
    clip: float = 1.0,
    autocast: torch.dtype | None = None,
    on_step: Callable[[int], None] | None = None,
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of every step, of AdamW on ``batches`` of (tokens, target), both (B, N)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=next(model.parameters()).is_cuda)
    losses, norms = [], []
    for number, (tokens, target) in enumerate(batches):
        with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
            loss = loss_of(model.hidden_states(tokens), model.head.weight, target)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if on_step:
            on_step(number)
    return torch.stack(losses).tolist(), torch.stack(norms).tolist()


def next_words(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(input, target), both (B, N − 1): every word is to be predicted from those before it."""
    return tokens[:, :-1], tokens[:, 1:]
