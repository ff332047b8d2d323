"""Where flce_ref's own schedules are known to fall short, and why: these are there to be compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HOLDS_LOGITS = "autograd keeps the log-probabilities of every token until backward"
_ROUNDS_DW = "autograd sums the chunks' dw in the weight's own dtype"

# schedule → check id → why it fails
KNOWN: dict[str, dict[str, str]] = {
    "naive": {"memory.holds_no_logits": _HOLDS_LOGITS, "memory.holds_no_logits.allocator": _HOLDS_LOGITS},
    "chunked": {
        "memory.holds_no_logits": f"{_HOLDS_LOGITS}, however many chunks there are",
        "memory.holds_no_logits.allocator": f"{_HOLDS_LOGITS}, however many chunks there are",
        "precision.dw_many_chunks.bfloat16": _ROUNDS_DW,
        "precision.dw_many_chunks.float16": _ROUNDS_DW,
    },
    "checkpointed": {
        "precision.dw_many_chunks.bfloat16": _ROUNDS_DW,
        "precision.dw_many_chunks.float16": _ROUNDS_DW,
    },
}

# What these schedules inherit from F.cross_entropy, which they call. Whether it has the weakness depends on its device
# and version, so that it is expected exactly where plain PyTorch fails the same row.
INHERITED: dict[str, str] = {
    "precision.confident.bfloat16": "F.cross_entropy loses the gradient of a confident token in bfloat16 here",
    "precision.confident.float16": "F.cross_entropy loses the gradient of a confident token in float16 here",
    "precision.loss_digits.bfloat16": "F.cross_entropy loses the digits of a small loss in bfloat16 here",
    "precision.loss_digits.float16": "F.cross_entropy loses the digits of a small loss in float16 here",
    "precision.float16_mean": "autograd folds 1/N into the float16 gradient of the logits",
}


def expected_failure(
    function: Callable[..., Any], settings: dict[str, Any], id: str, plain_fails: Callable[[], bool]
) -> str | None:
    """Why flce_ref's own function is known to fail the row `id` under this `schedule`; None for anything else.

    `plain_fails()` says whether plain PyTorch fails that row here.
    """
    from flce_ref import linear_cross_entropy

    schedule = settings.get("schedule", "fused")
    if function is not linear_cross_entropy or schedule not in KNOWN:
        return None
    if id in INHERITED and plain_fails():
        return INHERITED[id]
    return KNOWN[schedule].get(id)
