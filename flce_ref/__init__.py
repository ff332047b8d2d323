"""Fused linear cross-entropy: the loss of a language model's last layer without its logits."""

from .functional import linear_cross_entropy
from .modules import LinearCrossEntropyLoss

__version__ = "0.1.0"
__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]
