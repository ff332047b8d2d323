"""``cross_entropy.cu`` and ``tiles.cu`` compile for all architectures, as NVRTC can tell without a GPU."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import pytest
import torch

from flce_ref.kernels.cuda import DTYPES, FOLDER, Layout, choose_layout, compile_cubin, compile_scale
from flce_ref.kernels.cuda_tiles import compile_tiles, threads_for
from tests.test_kernels import GPUS

PACKAGES = ("cuda.core", "cuda.bindings")


def installed() -> bool:
    try:
        return all(importlib.util.find_spec(package) for package in PACKAGES)
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed(), reason="CROSS_ENTROPY.CU IS NOT COMPILED: pip install 'flce-ref[cuda13]' (no GPU is needed)"
    ),
]

# Compute capability → shared memory as in GPUS; 8.9 has 8.6's, 10.0 has 9.0's (CUDA programming guide).
ARCHITECTURES = {**GPUS, (8, 9): GPUS[8, 6], (10, 0): GPUS[9, 0]}
HEAD = 151552


def code_for(capability: tuple[int, int], dtype: torch.dtype, layout: Layout, **flags: bool) -> bytes:
    flags = {"smoothing": False, "softcap": False, "write_grad": True, **flags}
    return compile_cubin(f"sm_{capability[0]}{capability[1]}", dtype, layout, **flags).code


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_that_is_chosen(capability: tuple[int, int], dtype: torch.dtype) -> None:
    per_block, per_multiprocessor = (kib * 1024 for kib in ARCHITECTURES[capability])
    layout = choose_layout(HEAD, dtype.itemsize, capability, per_block, per_multiprocessor)
    for flags in ({}, {"smoothing": True, "softcap": True}):
        code = code_for(capability, dtype, layout, **flags)
        assert code.startswith(b"\x7fELF") and b"cross_entropy" in code


@pytest.mark.parametrize("layout", [Layout(4, 512, 3, True, True), Layout(1, 128, 1, True), Layout()], ids=str)
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)], ids=str)
def test_clusters_the_copy_engine_and_neither(capability: tuple[int, int], layout: Layout) -> None:
    assert code_for(capability, torch.bfloat16, layout).startswith(b"\x7fELF")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_without_gradient(dtype: torch.dtype) -> None:
    assert code_for((8, 0), dtype, Layout(threads=512, min_blocks=3), write_grad=False).startswith(b"\x7fELF")


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scaling(capability: tuple[int, int], dtype: torch.dtype) -> None:
    for source in {dtype, torch.float32}:
        assert b"scale" in compile_scale(f"sm_{capability[0]}{capability[1]}", source, dtype).code


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiles(capability: tuple[int, int], dtype: torch.dtype) -> None:
    threads = threads_for(4096, dtype.itemsize)
    for flag in (False, True):
        code = compile_tiles(f"sm_{capability[0]}{capability[1]}", dtype, threads, smoothing=flag, softcap=flag).code
        assert b"merge_stats" in code and b"write_grad" in code


def test_about_four_accesses_for_each_thread() -> None:
    assert [threads_for(width, 2) for width in (1, 1024, 4096, 8192, 151552)] == [32, 32, 128, 256, 256]


def test_nothing_of_cuda_is_included() -> None:
    """NVRTC comes without header files: a kernel may include those of its own folder only."""
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]:
        for name in re.findall(r"#\s*include\s*(\S+)", path.read_text(encoding="utf-8")):
            assert (FOLDER / name.strip('"')).is_file(), f"{path.name} includes {name}"


def test_the_quotient_that_stands_for_tanh() -> None:
    """Its coefficients, read from the source, in float32: right to 4e-7 everywhere, odd, and never above 1."""
    source = (FOLDER / "device.cuh").read_text(encoding="utf-8")
    body = source[source.index("float hyperbolic_tangent") :]
    coefficients = [[float(c) for c in re.findall(r"([0-9.e-]+)f\b", line)] for line in body.splitlines()[3:5]]
    x = np.concatenate([np.logspace(-30, 1.2, 100001), np.linspace(1, 12, 100001)]).astype(np.float32)
    s = np.minimum(x, np.float32(8)) ** 2
    p, q = (np.polynomial.Polynomial([1, *c[::-1]])(s.astype(np.float64)).astype(np.float32) for c in coefficients)
    got = np.minimum(x, np.float32(8)) * p * (np.float32(1) / q)
    assert np.abs(got / np.tanh(x.astype(np.float64)) - 1).max() < 4e-7 and got.max() <= 1
