"""Assignment 2, the reference solution: chunking and its plateau."""

import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def chunk_loss(x, linear_weight, y, ignore_index):
    """Σ of the losses of one chunk."""
    return F.cross_entropy(F.linear(x, linear_weight), y, ignore_index=ignore_index, reduction="sum")


def chunked_loss(input, linear_weight, target, chunk_size, ignore_index=-100):
    """The mean loss over tokens that count, the logits made chunk by chunk."""
    total = 0.0
    for x, y in zip(input.split(chunk_size), target.split(chunk_size)):
        total = total + chunk_loss(x, linear_weight, y, ignore_index)
    return total / (target != ignore_index).sum()


def checkpointed_loss(input, linear_weight, target, chunk_size, ignore_index=-100):
    """The same, each chunk computed again in backward."""
    total = 0.0
    for x, y in zip(input.split(chunk_size), target.split(chunk_size)):
        total = total + checkpoint(chunk_loss, x, linear_weight, y, ignore_index, use_reentrant=False)
    return total / (target != ignore_index).sum()


def kept_bytes(tokens, vocab_size, element_bytes, chunks):
    """What autograd keeps of all chunks until backward: their log-probabilities."""
    return tokens * vocab_size * element_bytes


def chunked_step_peak(tokens, hidden_size, vocab_size, element_bytes, chunks):
    """Step peak of chunked_loss and its backward, in bytes above the inputs, for two chunks or more."""
    logits = tokens * vocab_size * element_bytes
    weight = vocab_size * hidden_size * element_bytes
    n = chunks
    last = logits + 2 * logits / n  # all steps of the stairs, and two buffers of the last chunk
    last_but_one = logits + logits / n + weight  # one step less, and the first dw
    first_sum = logits - 2 * logits / n + 3 * weight  # two less, and two dw added into a third
    return max(last, last_but_one, first_sum)


def best_chunk_count(tokens, hidden_size):
    """The number of chunks with the lowest step peak, not rounded."""
    return 3 * tokens / (2 * hidden_size)


def checkpointed_step_peak(tokens, hidden_size, vocab_size, element_bytes, chunks):
    """Step peak of checkpointed_loss and its backward."""
    logits = tokens * vocab_size * element_bytes
    weight = vocab_size * hidden_size * element_bytes
    return max(3 * logits / chunks + weight, 3 * weight)
