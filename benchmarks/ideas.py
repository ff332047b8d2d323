"""Ways to make the fused step faster that are not in the library: here to be measured, then adopted or written down.

Each is forward + backward of "mean" as one function, (input, weight, target) → (loss, dx, dw), built from the
library's parts, so that it can stand in the same table as the library and the peers (``head.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flce_ref import kernels, linear_cross_entropy
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


@torch.no_grad()
def overlapped(
    x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One buffer, made in parts: the row kernel of a part on a second stream, the logits of the next part meanwhile."""
    (n, d), v = x.shape, w.shape[0]
    objective, kernel = Objective(v), kernels.resolve("auto", x.device, x.dtype)
    losses, dx = [], torch.empty_like(x)
    dw, buffer = torch.empty(v, d, dtype=accum, device=x.device), x.new_empty(chunk, v)
    main, side, size = torch.cuda.current_stream(), _side_stream(), chunk // parts
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        for i in range(parts):
            part, logits = slice(start + i * size, start + (i + 1) * size), buffer[i * size : (i + 1) * size]
            torch.mm(x[part], w.T, out=logits)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                losses.append(cross_entropy_(logits, y[part], objective, kernel)[0])
        main.wait_stream(side)
        torch.mm(buffer, w, out=dx[rows])
        accumulate_product_(dw, buffer.T, x[rows], start == 0)
    n_valid = (y != IGNORE).sum()
    dx, dw = (scaled(g, 1.0 / n_valid, x.dtype, kernel) for g in (dx, dw))
    return torch.cat(losses).sum() / n_valid, dx, dw


@torch.no_grad()
def split_dx(x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dx of a chunk as two products over half the vocabulary each: twice the tiles, enough for all multiprocessors."""
    (n, d), v = x.shape, w.shape[0]
    objective, kernel = Objective(v), kernels.resolve("auto", x.device, x.dtype)
    losses, dx = [], torch.empty_like(x)
    dw, buffer = torch.empty(v, d, dtype=accum, device=x.device), x.new_empty(chunk, v)
    halves = torch.empty(2, chunk, d, dtype=torch.float32, device=x.device)
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        torch.mm(x[rows], w.T, out=buffer)
        losses.append(cross_entropy_(buffer, y[rows], objective, kernel)[0])
        left, right = buffer.view(chunk, 2, v // 2).transpose(0, 1), w.view(2, v // 2, d)
        torch.bmm(left, right, out_dtype=torch.float32, out=halves)
        torch.add(halves[0], halves[1], out=dx[rows])
        accumulate_product_(dw, buffer.T, x[rows], start == 0)
    n_valid = (y != IGNORE).sum()
    dx, dw = (scaled(g, 1.0 / n_valid, x.dtype, kernel) for g in (dx, dw))
    return torch.cat(losses).sum() / n_valid, dx, dw


@torch.no_grad()
def deferred(x: Tensor, w: Tensor, y: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last chunk's dw in backward: its product takes the scaled sum of the others and rounds only once more.

    cuBLAS adds to a matrix of the dtype it writes, so the sum is scaled and rounded to bfloat16 first; the factor of
    the product goes into x. The last chunk's dlogits stay alive next to both.
    """
    (n, d), v = x.shape, w.shape[0]
    objective, kernel = Objective(v), kernels.resolve("auto", x.device, x.dtype)
    losses, dx = [], torch.empty_like(x)
    dw, buffer = torch.empty(v, d, dtype=torch.float32, device=x.device), x.new_empty(chunk, v)
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        torch.mm(x[rows], w.T, out=buffer)
        losses.append(cross_entropy_(buffer, y[rows], objective, kernel)[0])
        torch.mm(buffer, w, out=dx[rows])
        if start + chunk < n:
            accumulate_product_(dw, buffer.T, x[rows], start == 0)
    n_valid = (y != IGNORE).sum()
    factor = 1.0 / n_valid
    dx, total = (scaled(g, factor, x.dtype, kernel) for g in (dx, dw))
    torch.addmm(total, buffer.T, x[n - chunk :] * factor, out=total)
    return torch.cat(losses).sum() / n_valid, dx, total


@torch.no_grad()
def fewer_launches(x: Tensor, w: Tensor, y: Tensor, chunk: int, accum: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The products and row kernels of the library, and hardly anything beside: what its small kernels could cost."""
    (n, d), v = x.shape, w.shape[0]
    objective, kernel = Objective(v), kernels.resolve("auto", x.device, x.dtype)
    losses, dx = [], torch.empty_like(x)
    dw, buffer = torch.empty(v, d, dtype=accum, device=x.device), x.new_empty(chunk, v)
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        torch.mm(x[rows], w.T, out=buffer)
        losses.append(cross_entropy_(buffer, y[rows], objective, kernel)[0])
        torch.mm(buffer, w, out=dx[rows])
        accumulate_product_(dw, buffer.T, x[rows], start == 0)
    factor = torch.full((1,), 1.0 / n, device=x.device)
    dx, dw = (scaled(g, factor, x.dtype, kernel) for g in (dx, dw))
    return torch.cat(losses).mean(), dx, dw


class Graphed:
    """The library's step in one CUDA graph, recorded at the first call: no launch waits for Python.

    Replays write the same tensors again, in memory that the graph keeps: the step peak says nothing here.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: tuple[Tensor, ...] = ()

    def step(self, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, w, y, **self.options)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    def __call__(self, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        if self.graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step(x, w, y)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results = self.step(x, w, y)
        self.graph.replay()
        return self.results


def ideas() -> dict[str, Any]:
    """Name → (input, weight, target) → (loss, dx, dw); chunks divide 8192, and halves of V are whole vectors."""
    fp32, bf16 = torch.float32, torch.bfloat16
    names = {fp32: "fp32", bf16: "bf16"}
    table: dict[str, Any] = {}

    def add(idea: str, step: Any, chunk: int, accum: torch.dtype = fp32, **options: Any) -> None:
        table[f"idea: {idea}, {names[accum]} dw, chunk {chunk}"] = partial(step, chunk=chunk, accum=accum, **options)

    for chunk in (1024, 2048, 4096):
        add("unscaled", unscaled, chunk, bf16)
    for parts in (2, 4):
        add(f"overlapped in {parts}", overlapped, 2048, fp32, parts=parts)
        add(f"overlapped in {parts}", overlapped, 1024, bf16, parts=parts)
    for chunk, accum in ((512, bf16), (1024, bf16), (1024, fp32), (2048, fp32)):
        add("dx in halves of V", split_dx, chunk, accum)
    for chunk, accum in ((2048, fp32), (1024, bf16)):
        add("fewer launches", fewer_launches, chunk, accum)
        table[f"idea: CUDA graph, {names[accum]} dw, chunk {chunk}"] = Graphed(chunk_size=chunk, accum_dtype=accum)
    for chunk in (2048, 4096):
        table[f"idea: last chunk deferred, fp32 dw, chunk {chunk}"] = partial(deferred, chunk=chunk)
    for chunk, accum in ((2048, fp32), (2048, bf16)):
        add("two streams, two buffers", two_streams, chunk, accum)
    for chunk, accum in ((4096, fp32), (1024, bf16)):
        add("cublaslt", cublaslt, chunk, accum)
    add("own dw product", own_product, 2048, fp32)
    add("logits that stay in L2", unscaled, 128, bf16)
    return table
