"""Assignment 3: the fused autograd function."""

from __future__ import annotations

from .. import loss_checks as checks
from ..adapters import Loss
from ..marking import Assignment, Item, asked
from ..sandbox import Sandbox

CHAPTER = "05-fusing"


def fused(sandbox: Sandbox) -> Loss:
    return Loss(sandbox, "fused_linear_cross_entropy")


FUSED = Assignment(
    number=3,
    title="The fused autograd function",
    functions=("fused_linear_cross_entropy",),
    adapter=fused,
    settings=checks.SETTINGS,
    shiftable="loss",
    to_be_used=("Function",),
    to_review={
        "linear_cross_entropy": "PyTorch's own function of that name is fused already",
        "checkpoint": "chunks are to be consumed, not made again",
        "enable_grad": "the gradient is to be computed by its formula, not by autograd inside of forward",
    },
    items=(
        Item("loss", "the mean loss of a few chunks", 10, (checks.LOSS,), CHAPTER, "2. The stream of token chunks"),
        Item("dx", "the direction of each row of dx", 10,
             (asked("dx", "Each row of dx should point along (softmax − one-hot) W.",
                    lambda subject: checks.direction("dx", subject)),),
             CHAPTER, "5. dx written, dw accumulated"),
        Item("dw", "the direction of dw", 10,
             (asked("dw", "dw should be the sum over all chunks of (softmax − one-hot)ᵀ x.",
                    lambda subject: checks.direction("dw", subject)),),
             CHAPTER, "5. dx written, dw accumulated"),
        Item("1/N", "the length of dx and dw", 5,
             (asked("length", "Gradients of a mean over N tokens should be multiplied by 1/N, once.", checks.length),),
             CHAPTER, "6. Backward only scales", requires=("dx", "dw")),
        Item("mean over tokens that count", "ignored tokens, unequally many in each chunk", 10, (checks.ONE_DIVISION,),
             "04-chunking-and-the-plateau", "The loop"),
        Item("ignored tokens", "the gradient of ignored tokens", 10,
             (asked("ignored", "Ignored tokens should have zero rows in dx and add nothing to dw.",
                    checks.ignored_gradient),),
             "02-the-gradient", "Options: three numbers per row"),
        Item("last chunk", "29 tokens in chunks of 8", 10, (checks.LAST_CHUNK,),
             CHAPTER, "2. The stream of token chunks"),
        Item("upstream gradient", "backward of −2.7 times the loss", 10,
             (asked("upstream", "Backward should multiply dx and dw by the upstream gradient.", checks.upstream),),
             CHAPTER, "One factor", requires=("dx", "dw")),
        Item("twice", "a second backward of the same graph", 5,
             (asked("twice", "Saved gradients should not be scaled in place while the graph is kept.", checks.twice),),
             CHAPTER, "6. Backward only scales", requires=("dx", "dw")),
        Item("frozen", "a frozen input, a frozen weight", 5,
             (asked("frozen", "Each gradient should come whether or not the other is needed.", checks.frozen),),
             CHAPTER, "1. A frozen head", requires=("dx", "dw")),
        Item("memory", "what the process holds", 10,
             (checks.memory("memory", "each chunk is turned into its gradient, consumed and overwritten."),),
             CHAPTER, "What it holds", requires=("dx", "dw")),
        Item("precision", "dw of a bfloat16 head in 128 chunks", 5,
             (asked("precision", "dw should be summed in float32: rounded after every chunk it drifts.",
                    checks.many_chunks),),
             "06-precision", "Third place: the sum of dw"),
    ),
)  # fmt: skip
