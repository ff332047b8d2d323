"""Fused linear cross-entropy: the loss of a language model's last layer without its logits."""

from typing import TYPE_CHECKING, Any

from .explanation import Explanation, explain
from .functional import linear_cross_entropy
from .modules import LinearCrossEntropyLoss

if TYPE_CHECKING:
    from .conformance import verify

__version__ = "0.1.0"
__all__ = ["Explanation", "LinearCrossEntropyLoss", "explain", "linear_cross_entropy", "verify"]


def __getattr__(name: str) -> Any:
    # Only those who verify an implementation pay for importing the suite.
    if name == "verify":
        from .conformance import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
