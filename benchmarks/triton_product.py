"""dw += dlogitsᵀ x in Triton for Hopper: float32 sums added to memory by the copy engine (a TMA reduction).

cuBLAS adds to a float32 dw by reading it in the epilogue, where every thread waits. A reduction needs no read: the tile
leaves for the memory system, which adds it, while the next tile is multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

CONFIG = {"BM": 128, "BN": 256, "BK": 64, "GROUP": 8}


@triton.jit
def _product(
    dlogits, x, out, V, D, C,
    OVERWRITE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n, steps = tl.cdiv(V, BM), tl.cdiv(D, BN), tl.cdiv(C, BK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        # GROUP tiles of dlogits at a time with all tiles of x: both stay in L2.
        group = tile // (GROUP * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP, GROUP)
        inside = tile % (GROUP * tiles_n)
        m, n = (group * GROUP + inside % height) * BM, inside // height * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            a = dlogits.load([k * BK, m])
            b = x.load([k * BK, n])
            acc = tl.dot(a.T, b, acc)
        # Two halves, so that the tile on its way out takes half the shared memory.
        halves = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1)
        low, high = tl.split(halves)
        if OVERWRITE:
            out.store([m, n], low)
            out.store([m, n + BN // 2], high)
        else:
            out.atomic_add([m, n], low)
            out.atomic_add([m, n + BN // 2], high)


def accumulate_transposed_(
    out: Tensor, dlogits: Tensor, x: Tensor, overwrite: bool, num_warps: int = 8, num_stages: int = 3
) -> None:
    """``out`` (V, D) float32 = or += dlogits (C, V)ᵀ x (C, D)."""
    (c, v), d = dlogits.shape, x.shape[1]
    block = CONFIG
    descriptors = (
        TensorDescriptor.from_tensor(dlogits, [block["BK"], block["BM"]]),
        TensorDescriptor.from_tensor(x, [block["BK"], block["BN"]]),
        TensorDescriptor.from_tensor(out, [block["BM"], block["BN"] // 2]),
    )
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else 4
    _product[(programs,)](
        *descriptors,
        v,
        d,
        c,
        OVERWRITE=overwrite,
        **block,
        PROGRAMS=programs,
        num_warps=num_warps,
        num_stages=num_stages,
    )
