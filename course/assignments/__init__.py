"""The four assignments: what is asked, what it is worth, and how it is looked at."""

from ..marking import Assignment
from .chunking import CHUNKING
from .fused import FUSED
from .gradient import GRADIENT
from .kernel import KERNEL

ASSIGNMENTS: dict[int, Assignment] = {one.number: one for one in (GRADIENT, CHUNKING, FUSED, KERNEL)}
