"""A conformance suite for any implementation of fused linear cross-entropy: `verify`.

Read in this order: `reference` (the truth), `cases` (the inputs), `compare` (how far off is too far), the `checks_*`
(what is asked), `runner` (how a verdict is reached).
"""

from .report import Report, Row
from .runner import verify

__all__ = ["Report", "Row", "verify"]
