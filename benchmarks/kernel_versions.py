"""The row kernel built up version by version (chapter 7): each checked against float64, then timed on this GPU.

    python benchmarks/kernel_versions.py --out book/data/h200/kernel_versions.json

The versions are in ``kernel_versions.cu``. Beside them: a copy of the chunk, which is all the traffic that must be; the
library's kernels; and ``F.cross_entropy`` forward and backward. A version that needs more on-chip memory than this GPU
has for a row is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref.benchmark import measure, provenance  # noqa: E402
from flce_ref.kernels import cuda, implementation, problem  # noqa: E402
from flce_ref.objective import Objective  # noqa: E402

VERSIONS = ("row_loop", "coalesced", "wide", "online", "on_chip")
SOURCE = Path(__file__).with_name("kernel_versions.cu")
#: Shared memory that a block has without asking for more.
HELD_BYTES = 48 * 1024 - 2048
#: How often a version carries the chunk's C · V · itemsize bytes over the memory bus, if no cache helps: reads, writes.
PASSES = {"row_loop": (3, 1), "coalesced": (3, 1), "wide": (3, 1), "online": (2, 1), "on_chip": (1, 1)}


def threads(version: str) -> int:
    """Threads per block. One thread per row: few to a block, so that the rows are spread over the multiprocessors."""
    return 32 if version == "row_loop" else 512 if version != "on_chip" else 256


def cluster(version: str, capability: tuple[int, int]) -> int:
    """Blocks that share a row: thread block clusters are Hopper's (compute capability 9.0)."""
    return 8 if version == "on_chip" and capability >= (9, 0) else 1


def compiled(version: str, arch: str, dtype: torch.dtype, blocks: int) -> Any:
    """Machine code of ``kernel_versions.cu`` for ``arch`` ("sm_90"); needs NVRTC but no GPU."""
    return cuda.compile_file(str(SOURCE), arch, dtype, THREADS=threads(version), CLUSTER=blocks, SMOOTHING=0, SOFTCAP=0)


@cache
def _kernel(version: str, dtype: torch.dtype, device: int) -> tuple[Any, int]:
    capability = torch.cuda.get_device_capability(device)
    blocks = cluster(version, capability)
    code = compiled(version, "sm_{}{}".format(*capability), dtype, blocks)
    return code.get_kernel(version), blocks


def run(version: str, logits: Tensor, target: Tensor) -> Tensor:
    """Loss per row (C,) float32 of contiguous ``logits`` (C, V), which become softmax − one-hot.

    Raises:
        ValueError: V is no multiple of a 16-byte vector, or its row does not fit the on-chip memory of ``on_chip``.
    """
    from cuda.core import LaunchConfig, Stream, launch

    rows, vocab_size = logits.shape
    if not logits.is_contiguous() or vocab_size * logits.element_size() % 16:
        raise ValueError(f"logits must be contiguous, with rows of a multiple of 16 bytes, got {tuple(logits.shape)}")
    kernel, blocks = _kernel(version, logits.dtype, logits.get_device())
    held = -(-vocab_size * logits.element_size() // (16 * blocks)) * 16 if version == "on_chip" else 0
    if held > HELD_BYTES:
        raise ValueError(f"a row of {vocab_size} logits takes {held} bytes of each of {blocks} blocks' shared memory")
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    size = threads(version)
    grid = -(-rows // size) if version == "row_loop" else rows * blocks
    launch(
        Stream.from_handle(torch.cuda.current_stream().cuda_stream),
        LaunchConfig(grid=grid, block=size, shmem_size=held),
        kernel, logits.data_ptr(), rows, vocab_size, target.data_ptr(), loss.data_ptr(),
    )  # fmt: skip
    return loss


def check(step: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, vocab_size: int) -> dict[str, float]:
    """Largest errors of loss and gradient of ``step`` against float64, on 33 rows."""
    torch.manual_seed(1)
    logits = (3 * torch.randn(33, vocab_size, device="cuda")).to(dtype)
    target = torch.randint(0, vocab_size, (33,), device="cuda")
    z = logits.double()
    true_loss = F.cross_entropy(z, target, reduction="none")
    true_grad = z.softmax(1) - F.one_hot(target, vocab_size)
    loss = step(logits, target)
    return {
        "loss_error": (loss - true_loss).abs().max().item(),
        "gradient_error": (logits.double() - true_grad).abs().max().item(),
    }


def plain(logits: Tensor, target: Tensor) -> Tensor:
    """PyTorch: the loss of each row, and its gradient copied over the logits."""
    with torch.enable_grad():
        z = logits.detach().requires_grad_()
        loss = F.cross_entropy(z, target, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), z)
    logits.copy_(grad)
    return loss.detach().float()


def library(kernel: str, logits: Tensor, target: Tensor) -> Tensor:
    return implementation(kernel, logits)(logits, target, Objective(logits.shape[1]))[0]


def steps(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Name → (logits, target) → loss per row: the versions, the library's kernels, PyTorch."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {name: partial(run, name) for name in VERSIONS}
    device = torch.device("cuda", torch.cuda.current_device())
    for kernel in ("cuda", "triton", "eager"):
        if problem(kernel, device, dtype) is None:
            found[f"flce_ref {kernel}"] = partial(library, kernel)
    return found | {"F.cross_entropy": plain}


def measured(rows: int, vocab_size: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Check and time everything on a chunk (rows, vocab_size)."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(rows, vocab_size, device="cuda")).to(dtype)
    target = torch.randint(0, vocab_size, (rows,), device="cuda")
    other = torch.empty_like(logits)
    table = []
    timed: dict[str, Callable[[], object]] = {"copy": partial(other.copy_, logits)}
    for name, step in steps(dtype).items():
        row: dict[str, Any] = {"name": name, "reads_writes": PASSES.get(name)}
        try:
            row |= check(step, dtype, vocab_size)
            timed[name] = partial(step, logits, target)
        except ValueError as error:
            row["error"] = str(error)
        table.append(row)
    results = measure(timed, rounds=rounds)
    chunk_bytes = logits.numel() * logits.element_size()
    for row in [{"name": "copy", "reads_writes": (1, 1)}, *table]:
        if result := results.get(row["name"]):
            row |= {"median_ms": result.median_ms, "peak_bytes": result.peak_bytes, "error": result.error}
            if result.median_ms:
                row["gb_per_s_of_one_read_one_write"] = 2 * chunk_bytes / result.median_ms / 1e6
        if row["name"] == "copy":
            table.insert(0, row)
    return {"rows": rows, "vocab": vocab_size, "chunk_bytes": chunk_bytes, "table": table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, action="append", help="repeatable; default 151552, 128256 and 32000")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernel_versions.py needs a CUDA device", file=sys.stderr)
        return 1
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    sizes = [measured(args.rows, v, dtype, args.rounds) for v in args.vocab or (151552, 128256, 32000)]
    for size in sizes:
        print(f"\nC = {size['rows']}, V = {size['vocab']}, {args.dtype}: {size['chunk_bytes'] / 2**20:.0f} MiB")
        for row in size["table"]:
            time = f"{row['median_ms']:9.4f} ms" if row.get("median_ms") else "   failed   "
            print(time, f"{row['name']:20s}", row.get("gradient_error", ""), row.get("error") or "")
    about = {
        "what": "The row kernel version by version, a copy of the chunk, and PyTorch",
        "command": " ".join(["python", "benchmarks/kernel_versions.py", *sys.argv[1:]]),
    }
    document = {"provenance": provenance() | about, "dtype": args.dtype, "sizes": sizes}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
