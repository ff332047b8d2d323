"""Tiles of the vocabulary in CUDA C++ (``tiles.cu``): the contract of :mod:`flce_ref.kernels.eager`, one launch each.

Compiled and launched as the row kernel is: see :mod:`flce_ref.kernels.cuda`.
"""

from __future__ import annotations

import functools
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from ..objective import GradCoefficients, Objective, RowStats
from .cuda import compile_file, launch, vector


def merge_stats_(
    running: RowStats,
    tile: Tensor,
    target: Tensor,
    first_column: int,
    objective: Objective,
    highest: Tensor | None = None,
) -> None:
    """As :func:`flce_ref.kernels.eager.merge_stats_`, for a tile (C, T) whose columns have stride 1."""
    rows, width = tile.shape
    sums = None
    if objective.label_smoothing and objective.class_weight is not None:
        sums = torch.stack([torch.as_tensor(w) for w in objective.weights_about(first_column, width)])
    given = [vector(target, rows, torch.int64), _weights(objective, first_column, width), vector(sums, 2)]
    _launch("merge_stats", tile, first_column, objective, [*given, *_written(*running, highest)])


def write_grad_(
    tile: Tensor, target: Tensor, first_column: int, stats: RowStats, by: GradCoefficients, objective: Objective
) -> None:
    """As :func:`flce_ref.kernels.eager.write_grad_`, for a tile (C, T) whose columns have stride 1."""
    rows, width = tile.shape
    given = [vector(target, rows, torch.int64), _weights(objective, first_column, width)]
    given += [vector(t, rows) for t in (stats.max, stats.sumexp, *by)]
    _launch("write_grad", tile, first_column, objective, given, objective.ignore_index)


def threads_for(width: int, itemsize: int) -> int:
    """Threads of the one block that reads a row of ``width`` logits: about four accesses of 16 bytes for each."""
    threads = 32
    while threads < 256 and 64 * threads < width * itemsize:
        threads *= 2
    return threads


def compile_tiles(arch: str, dtype: torch.dtype, threads: int, smoothing: bool, softcap: bool) -> Any:
    """Machine code of both kernels for ``arch`` ("sm_90"), as a ``cuda.core.ObjectCode``; needs NVRTC but no GPU."""
    return compile_file("tiles.cu", arch, dtype, CLUSTER=1, THREADS=threads, SMOOTHING=smoothing, SOFTCAP=softcap)


def _launch(
    name: str, tile: Tensor, first_column: int, objective: Objective, tensors: list[Tensor | None], *options: int
) -> None:
    rows, width = tile.shape
    if rows == 0:
        return
    device, softcap = tile.get_device(), objective.softcap
    threads = threads_for(width, tile.element_size())
    kernel = _kernel(name, device, tile.dtype, threads, objective.label_smoothing > 0, softcap is not None)
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    launch(
        kernel, device, rows, threads, 0,
        tile.data_ptr(), tile.stride(0), width, first_column, *pointers, *options, c_float(softcap or 0.0),
    )  # fmt: skip


def _weights(objective: Objective, first_column: int, width: int) -> Tensor | None:
    weight = objective.class_weight
    return None if weight is None else vector(weight[first_column : first_column + width], width)


def _written(*results: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same tensors: the kernel writes to their addresses, so that they can't be brought into another form."""
    for result in results:
        if result is not None and not (result.dtype == torch.float32 and result.is_contiguous()):
            raise ValueError(
                f"statistics must be contiguous float32, got {result.dtype} with strides {result.stride()}"
            )
    return results


@functools.cache
def _kernel(name: str, device: int, dtype: torch.dtype, threads: int, smoothing: bool, softcap: bool) -> Any:
    gpu = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        return compile_tiles(f"sm_{gpu.major}{gpu.minor}", dtype, threads, smoothing, softcap).get_kernel(name)
