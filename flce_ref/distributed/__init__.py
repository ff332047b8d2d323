"""The loss on more than one GPU: the words shared out over ranks, the tokens, or both.

Built on :mod:`torch.distributed`, whose default process group must be there (``torchrun``, ``init_process_group``).
"""

from .counting import Collective, count_collectives
from .tokens import global_mean, token_parallel_linear_cross_entropy
from .vocabulary import vocab_parallel_linear_cross_entropy

__all__ = [
    "Collective",
    "count_collectives",
    "global_mean",
    "token_parallel_linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
