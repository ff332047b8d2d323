"""The row kernel in CUDA C++ (``cross_entropy.cu``): compiled at run time, launched on PyTorch's current stream.

No compiler need be installed: NVRTC is a library, reached through ``cuda.core`` (extras ``[cuda12]``, ``[cuda13]``).
A configuration is compiled when it is first used, in a fraction of a second, and kept for the life of the process;
nothing here synchronises, and a launch can be captured into a CUDA graph once its configuration has been used before.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from ctypes import c_float
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..objective import Objective

FOLDER = Path(__file__).parent
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}

# Enough threads of a multiprocessor to keep its memory busy; more would leave each fewer than 40 registers.
_THREADS_PER_MULTIPROCESSOR = 1536
# Of the scaling: a few waves on any GPU there is, so that the last one costs little.
_BLOCKS = 8192
# What CUDA itself takes of the shared memory of each block.
_RESERVED_BYTES = 1024


@dataclass(frozen=True)
class Layout:
    """How one row of logits is spread over the GPU."""

    cluster: int = 1  # blocks per row; more than one needs thread block clusters (compute capability ≥ 9.0)
    threads: int = 512  # per block
    min_blocks: int = 1  # that the compiler leaves registers for on each multiprocessor
    hold_row: bool = False  # keep the row in shared memory from the first pass to the second
    bulk_copy: bool = False  # ... brought there by the copy engine (compute capability ≥ 9.0)

    def held_bytes(self, vocab_size: int, itemsize: int) -> int:
        """Shared memory that a block needs for its share of a row."""
        width = 16 // itemsize
        return -(-(vocab_size // width) // self.cluster) * 16 if self.hold_row else 0


def choose_layout(
    vocab_size: int, itemsize: int, capability: tuple[int, int], bytes_per_block: int, bytes_per_multiprocessor: int
) -> Layout:
    """The layout for rows of ``vocab_size`` logits, given the GPU's capability and shared memory.

    Blocks of different rows overlap one another's loads, sums and stores, so the smallest cluster that lets three share
    a multiprocessor is taken; failing that two, or one. A row that fits nowhere is read twice. Where the copy engine
    brings the row, fewer threads do: so measured on an H200 for rows of 32,000 to 262,144 logits.
    """
    hopper = capability >= (9, 0)
    sizes = (1, 2, 4, 8) if hopper else (1,)
    for wanted in (3, 2, 1):
        for cluster in sizes:
            vectors = -(-vocab_size * itemsize // (16 * cluster))
            long = vectors > 1024
            threads = (256 if hopper else 512) if long else 128
            layout = Layout(cluster, threads, hold_row=True, bulk_copy=hopper and long)
            need = layout.held_bytes(vocab_size, itemsize) + 12 * cluster * threads // 32 + _RESERVED_BYTES
            fit = bytes_per_multiprocessor // need if need <= bytes_per_block else 0
            if fit >= wanted:
                return replace(layout, min_blocks=min(fit, _THREADS_PER_MULTIPROCESSOR // threads))
    return Layout(threads=512, min_blocks=3)


@functools.cache
def problem(device: int) -> str | None:
    """Why the kernel cannot run on CUDA device number ``device``, or None if it can; found out by launching it once.

    Warns (once per device) where all packages are there but NVRTC or the driver refuses.
    """
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    try:
        cuda_core()
    except ImportError as error:
        return f"it needs the packages of flce-ref[cuda{torch.version.cuda.split('.')[0]}]: {error}"
    try:  # a row long enough to be spread over a cluster, where there are clusters
        logits = torch.zeros(1, 2**17, dtype=torch.bfloat16, device=torch.device("cuda", device))
        cross_entropy_(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), Objective(logits.shape[1]))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the CUDA C++ kernel of flce_ref can't be used: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return None


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
    write_grad: bool = True,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`flce_ref.kernels.eager.cross_entropy_`, for logits (C, V) on a CUDA device with columns of stride 1.

    A target that is no word makes NaN and reads nothing. ``layout`` is for measuring; None chooses.
    """
    rows, vocab_size = logits.shape
    device = logits.get_device()
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    if rows == 0:
        return loss, lse
    layout = layout or _layout(device, vocab_size, logits.element_size(), write_grad)
    held = layout.held_bytes(vocab_size, logits.element_size())
    smoothing, weight = objective.label_smoothing, objective.class_weight
    total_weight = weight.sum() if weight is not None and smoothing else None
    softcap = objective.softcap
    kernel = _kernel(device, logits.dtype, layout, bool(smoothing), softcap is not None, write_grad)
    # The kernel gets bare addresses: what stands there must be what it takes it for.
    vectors = [vector(target, rows, torch.int64), vector(weight, vocab_size), vector(total_weight, 1)]
    vectors += [vector(grad_loss, rows), vector(grad_lse, rows)]
    pointers = [0 if t is None else t.data_ptr() for t in vectors]
    launch(
        kernel, device, rows * layout.cluster, layout.threads, held,
        logits.data_ptr(), logits.stride(0), vocab_size, *pointers, loss.data_ptr(), lse.data_ptr(),
        objective.ignore_index, c_float(smoothing), c_float(objective.z_loss), c_float(softcap or 0.0),
    )  # fmt: skip
    return loss, lse


def scale(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """As :func:`flce_ref.kernels.eager.scale`, for contiguous tensors at addresses that are multiples of 16."""
    device = out.get_device()
    kernel = _scale_kernel(device, gradient.dtype, out.dtype)
    threads = 256
    blocks = max(1, min(-(-out.numel() * out.element_size() // (16 * threads)), _BLOCKS))
    launch(
        kernel, device, blocks, threads, 0, gradient.data_ptr(), out.data_ptr(), out.numel(), factor.data_ptr()
    )  # fmt: skip


def launch(kernel: Any, device: int, blocks: int, threads: int, shared_bytes: int, *arguments: Any) -> None:
    """Put ``kernel`` on the current stream of CUDA device number ``device``."""
    with torch.cuda.device(device):
        stream = _stream(device, torch.cuda.current_stream().cuda_stream)
        cuda_core().launch(stream, _launch_config(blocks, threads, shared_bytes), kernel, *arguments)


@functools.lru_cache(maxsize=256)
def _launch_config(blocks: int, threads: int, shared_bytes: int) -> Any:
    return cuda_core().LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes)


@functools.lru_cache(maxsize=256)
def _stream(device: int, handle: int) -> Any:
    return cuda_core().Stream.from_handle(handle)


def vector(values: Tensor | None, length: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """``values`` as a kernel takes them by their address: ``length`` of ``dtype``, contiguous."""
    if values is None or (values.dtype == dtype and values.shape == (length,) and values.is_contiguous()):
        return values
    return values.to(dtype).expand(length).contiguous()


def compile_cubin(
    arch: str, dtype: torch.dtype, layout: Layout, smoothing: bool, softcap: bool, write_grad: bool
) -> Any:
    """Machine code for ``arch`` ("sm_90"), as a ``cuda.core.ObjectCode``; needs NVRTC but no GPU."""
    return compile_file(
        "cross_entropy.cu", arch, dtype, CLUSTER=layout.cluster, THREADS=layout.threads, MIN_BLOCKS=layout.min_blocks,
        HOLD_ROW=layout.hold_row, BULK_COPY=layout.bulk_copy, SMOOTHING=smoothing, SOFTCAP=softcap,
        WRITE_GRAD=write_grad,
    )  # fmt: skip


def compile_scale(arch: str, source: torch.dtype, dtype: torch.dtype) -> Any:
    """Machine code of the scaling from ``source`` to ``dtype``, as :func:`compile_cubin`."""
    name = "float" if source == torch.float32 else "Scalar"
    return compile_file(
        "cross_entropy.cu", arch, dtype, SOURCE=name, CLUSTER=1, THREADS=256, MIN_BLOCKS=1, HOLD_ROW=0, BULK_COPY=0,
        SMOOTHING=0, SOFTCAP=0, WRITE_GRAD=0,
    )  # fmt: skip


def compile_file(file: str, arch: str, dtype: torch.dtype, **macros: int | str) -> Any:
    """``file`` of this folder, which may include others of it, compiled for logits of ``dtype`` with ``macros``."""
    core = cuda_core()
    defined = [(DTYPES[dtype], "1"), *((name, str(value if isinstance(value, str) else int(value)))
                                       for name, value in macros.items())]  # fmt: skip
    options = core.ProgramOptions(arch=arch, std="c++17", define_macro=defined, include_path=str(FOLDER))
    return core.Program(_source(file), "c++", options=options).compile("cubin")


@functools.cache
def _source(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


@functools.cache
def cuda_core() -> Any:
    """``cuda.core``, imported when it is first needed: it is an optional package."""
    core = importlib.import_module("cuda.core")
    if not hasattr(core, "Program"):
        raise ImportError("cuda-core is too old, 0.5 or newer is needed")
    return core


@functools.cache
def _layout(device: int, vocab_size: int, itemsize: int, write_grad: bool) -> Layout:
    if not write_grad:  # every logit is needed once only
        return Layout(threads=512 if vocab_size > 8192 else 128, min_blocks=3)
    gpu: Any = torch.cuda.get_device_properties(device)
    return choose_layout(
        vocab_size, itemsize, (gpu.major, gpu.minor),
        gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor,
    )  # fmt: skip


@functools.cache
def _kernel(device: int, dtype: torch.dtype, layout: Layout, smoothing: bool, softcap: bool, write_grad: bool) -> Any:
    """The configuration, compiled for ``device``, loaded, and allowed all the shared memory that a block can have."""
    gpu: Any = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        code = compile_cubin(f"sm_{gpu.major}{gpu.minor}", dtype, layout, smoothing, softcap, write_grad)
        kernel = code.get_kernel("cross_entropy")
        if layout.hold_row:
            _allow_shared_memory(kernel, device, gpu.shared_memory_per_block_optin)
    return kernel


@functools.cache
def _scale_kernel(device: int, source: torch.dtype, dtype: torch.dtype) -> Any:
    gpu = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        return compile_scale(f"sm_{gpu.major}{gpu.minor}", source, dtype).get_kernel("scale")


def _allow_shared_memory(kernel: Any, device: int, bytes_per_block: int) -> None:
    """More than 48 KiB per block must be asked for, and so must the largest split between shared memory and L1."""
    driver = importlib.import_module("cuda.bindings.driver")
    handle, cu_device = getattr(kernel, "handle", None) or kernel._handle, driver.CUdevice(device)
    attributes = driver.CUfunction_attribute

    def checked(status: Any, *result: Any) -> Any:
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"setting the shared memory of the kernel failed with {status.name}")
        return result

    static_size = attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    (static,) = checked(*driver.cuKernelGetAttribute(static_size, handle, cu_device))
    for name, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes_per_block - static),
        (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):
        checked(*driver.cuKernelSetAttribute(name, value, handle, cu_device))
