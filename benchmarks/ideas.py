"""Ways to make the fused step faster that are not in the library: here to be measured, then adopted or written down.

Each is forward + backward of "mean" as one function, (input, weight, target) → (loss, dx, dw), built from the
library's parts, so that it can stand in the same table as the library and the peers (``head.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flce_ref import kernels
from flce_ref.kernels.ops import accumulate_product_, cross_entropy_
from flce_ref.objective import Objective
from flce_ref.schedules.fused import scaled

IGNORE = -100


def one_factor(target: Tensor, rows: slice) -> Tensor:
    """1/N as an upstream gradient per row: the row kernel then folds it into dlogits (harmless in bfloat16)."""
    n = (target != IGNORE).sum()
    return (1.0 / n).expand(rows.stop - rows.start)


def unscaled(x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """No scaling in backward at all: the bound of every way to avoid that pass (1/N is in dlogits)."""
    return _stream(x, w, y, chunk, accum, accumulate_product_, scale=False)


def own_product(x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dw by a Triton product that adds to memory through the copy engine, instead of reading dw to add to it."""
    return _stream(x, w, y, chunk, accum, triton_accumulate_, scale=True)


@torch.no_grad()
def _stream(
    x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype, accumulate: Any, scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (n, d), v = x.shape, w.shape[0]
    objective, kernel = Objective(v), kernels.resolve("auto", x.device, x.dtype)
    loss, dx = torch.empty(n, device=x.device), torch.empty_like(x)
    dw, buffer = torch.empty(v, d, dtype=accum, device=x.device), x.new_empty(min(chunk, n), v)
    for start in range(0, n, chunk):
        rows = slice(start, min(start + chunk, n))
        logits = buffer[: rows.stop - start]
        torch.mm(x[rows], w.T, out=logits)
        up = None if scale else one_factor(y, rows)
        loss[rows] = cross_entropy_(logits, y[rows], objective, kernel, True, up)[0]
        torch.mm(logits, w, out=dx[rows])
        accumulate(dw, logits.T, x[rows], start == 0)
    n_valid = (y != IGNORE).sum()
    if scale:
        dx, dw = (scaled(g, 1.0 / n_valid, x.dtype, kernel) for g in (dx, dw))
    return loss.sum() / n_valid, dx, dw.to(w.dtype)


def cublaslt(x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same products by cuBLASLt, whose heuristics choose other kernels than cuBLAS's."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return _stream(x, w, y, chunk, accum, accumulate_product_, scale=True)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@torch.no_grad()
def two_streams(x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two buffers of ``chunk`` rows: the row kernel of one on a second stream, the products of the other meanwhile."""
    (n, d), v = x.shape, w.shape[0]
    objective, kernel = Objective(v), kernels.resolve("auto", x.device, x.dtype)
    loss, dx = torch.empty(n, device=x.device), torch.empty_like(x)
    dw, buffers = torch.empty(v, d, dtype=accum, device=x.device), [x.new_empty(min(chunk, n), v) for _ in range(2)]
    main, side = torch.cuda.current_stream(), _side_stream()
    side.wait_stream(main)
    ready = [torch.cuda.Event() for _ in range(2)]
    starts = list(range(0, n, chunk))

    def make(i: int) -> None:
        rows = slice(starts[i], min(starts[i] + chunk, n))
        logits = buffers[i % 2][: rows.stop - rows.start]
        torch.mm(x[rows], w.T, out=logits)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss[rows] = cross_entropy_(logits, y[rows], objective, kernel)[0]
            ready[i % 2].record(side)

    def consume(i: int) -> None:
        rows = slice(starts[i], min(starts[i] + chunk, n))
        dlogits = buffers[i % 2][: rows.stop - rows.start]
        main.wait_event(ready[i % 2])
        torch.mm(dlogits, w, out=dx[rows])
        accumulate_product_(dw, dlogits.T, x[rows], i == 0)

    make(0)
    for i in range(len(starts)):
        if i + 1 < len(starts):
            make(i + 1)
        consume(i)
    main.wait_stream(side)
    n_valid = (y != IGNORE).sum()
    dx, dw = (scaled(g, 1.0 / n_valid, x.dtype, kernel) for g in (dx, dw))
    return loss.sum() / n_valid, dx, dw


_streams: list[torch.cuda.Stream] = []


def _side_stream() -> torch.cuda.Stream:
    """High priority: its blocks come first whenever a block of a product leaves a multiprocessor."""
    if not _streams:
        _streams.append(torch.cuda.Stream(priority=-1))
    return _streams[0]


def triton_accumulate_(out: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """``accumulate_product_`` for ``left`` = dlogits.T (V, C), by ``triton_product.py``."""
    from triton_product import accumulate_transposed_

    accumulate_transposed_(out, left.T, right, overwrite)


def ideas() -> dict[str, Any]:
    """Name → (input, weight, target) → (loss, dx, dw)."""
    fp32, bf16 = torch.float32, torch.bfloat16
    table: dict[str, Any] = {}
    for chunk in (1024, 4096):
        table[f"idea: unscaled, bf16 dw, chunk {chunk}"] = partial(unscaled, chunk=chunk, accum=bf16)
    for chunk, accum in ((1024, fp32), (2048, fp32), (512, bf16), (1024, bf16), (2048, bf16)):
        name = "fp32" if accum == fp32 else "bf16"
        table[f"idea: two streams, {name} dw, chunk 2 × {chunk}"] = partial(two_streams, chunk=chunk, accum=accum)
    for chunk, accum in ((2048, fp32), (4096, fp32), (1024, bf16)):
        name = "fp32" if accum == fp32 else "bf16"
        table[f"idea: cublaslt, {name} dw, chunk {chunk}"] = partial(cublaslt, chunk=chunk, accum=accum)
    for chunk in (1024, 2048):
        table[f"idea: own dw product, fp32 dw, chunk {chunk}"] = partial(own_product, chunk=chunk, accum=fp32)
    return table
