"""Simulated against measured memory of one step, on the GPU of this machine.

    python benchmarks/memory_agreement.py --out book/data/h200

runs every case of ``CASES`` three times and simulates it once, on tensors without values:

1. *cold*: with cuBLAS's workspaces given back before, so that their allocation falls into the step;
2. *warm*: as every later step of a training run. This is what the simulation is compared with;
3. *recorded*: with the allocator's history on, so that the lists of allocations can be compared, not only their peaks.

It writes ``memory_agreement.json``, the table, and ``memory_agreement_recordings.json``, the recorded timelines of
``RECORDED``. It prints the table, and exits with status 1 if a step peak differs by more than 2 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flce_ref import explain, linear_cross_entropy
from flce_ref.memory import Frame, Timeline, head_step, name_by_size, simulate
from flce_ref.memory.snapshot import timeline_of
from flce_ref.memory.stacks import short_path
from flce_ref.memory.step_inputs import head_inputs
from flce_ref.models import get

DTYPE = torch.bfloat16
LARGE = 1 << 20  # bytes; smaller buffers are compared by their sum only, in the peaks
MIB, GIB = 1 << 20, 1 << 30

#: The library's own schedules, as the arguments that they take for N tokens.
SCHEDULES: dict[str, Callable[[int], dict[str, Any]]] = {
    "naive": lambda n: {"schedule": "naive"},
    "chunked": lambda n: {"schedule": "chunked", "chunk_size": n // 8},
    "checkpointed": lambda n: {"schedule": "checkpointed", "chunk_size": n // 8},
    "fused": lambda n: {},
    "fused, bfloat16 dw": lambda n: {"accum_dtype": torch.bfloat16, "chunk_size": 1024},
}


#: What training scripts write by hand.
IDIOMS = {
    "logits kept": head_step.logits_kept,
    ".float()": head_step.float_logits,
    ".float(), kept": head_step.float_logits_kept,
}


@dataclass(frozen=True)
class Case:
    model: str  # whose V and D, of flce_ref.models
    tokens: int
    step: str  # of SCHEDULES or IDIOMS

    @property
    def sizes(self) -> tuple[int, int, int]:
        """N, V, D."""
        model = get(self.model)
        return self.tokens, model.vocab_size, model.hidden_size

    @property
    def options(self) -> dict[str, Any]:
        return SCHEDULES[self.step](self.tokens) if self.step in SCHEDULES else {}

    @property
    def function(self) -> Callable[..., Any]:
        return IDIOMS[self.step] if self.step in IDIOMS else partial(linear_cross_entropy, **self.options)

    def simulate(self, kernel: str) -> Timeline:
        """The timeline of the simulated step; ``kernel`` is the row kernel to follow."""
        names = ("input", "linear_weight", "target")
        return simulate(self.function, *head_inputs(*self.sizes, DTYPE), kernel=kernel, title=str(self), labels=names)

    def __str__(self) -> str:
        return f"{self.model}, N = {self.tokens}, {self.step}"


HEADS = (
    ("gravity-16b-a3b", 8192),
    ("gravity-16b-a3b", 32768),
    ("gpt-oss-20b", 32768),
    ("gemma-3-4b", 32768),
    ("llama-3-8b", 32768),
)
CASES = tuple(Case(model, tokens, step) for model, tokens in HEADS for step in SCHEDULES) + tuple(
    Case("gravity-16b-a3b", 8192, step) for step in IDIOMS
)
RECORDED = tuple(case for case in CASES if case.tokens == 8192 and case.step in SCHEDULES)


# ---------------------------------------------------------------- one case


def compare(case: Case) -> tuple[dict[str, Any], Timeline]:
    """The row of one case, and its recorded timeline."""
    tensors = cuda_inputs(case)
    options = case.options
    kernel = (explain(*tensors, **options).kernel if case.step in SCHEDULES else None) or "cuda"
    call = partial(case.function, *tensors)
    cold = measure(call, tensors, cold=True)
    warm = measure(call, tensors)
    recorded = record(case, call, tensors)
    workspace_bytes = give_back_workspaces()
    simulated = case.simulate(kernel)
    row = {
        "model": case.model,
        **dict(zip(("tokens", "vocab_size", "hidden_size"), case.sizes)),
        "step": case.step,
        "options": {name: str(value).removeprefix("torch.") for name, value in options.items()},
        "kernel": kernel,
        "input_bytes": simulated.input_bytes,
        "measured": warm,
        "cold_step_peak_bytes": cold["step_peak_bytes"],
        "workspace_bytes": workspace_bytes,
        "simulated": {
            "forward_peak_bytes": simulated.forward_peak_bytes,
            "step_peak_bytes": simulated.step_peak_bytes,
            "reserved_peak_bytes": simulated.estimated_reserved_bytes,
        },
        "large_buffers": compare_events(simulated, recorded),
    }
    return row, recorded


def cuda_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    tokens, vocab_size, hidden_size = case.sizes
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden_size, device="cuda", dtype=DTYPE)
    w = torch.randn(vocab_size, hidden_size, device="cuda", dtype=DTYPE).mul_(0.02)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(vocab_size, (tokens,), device="cuda")


def measure(call: Callable[[], Any], tensors: Iterable[Tensor], cold: bool = False) -> dict[str, int]:
    """Peaks of one step above what was allocated before it, in bytes: the inputs and, unless ``cold``, workspaces."""
    if cold:
        give_back_workspaces()
    release(tensors)
    before = torch.cuda.memory_allocated()
    requested_before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    forward_peak = torch.cuda.max_memory_allocated() - before
    loss_of(result).backward()
    torch.cuda.synchronize()
    return {
        "forward_peak_bytes": forward_peak,
        "step_peak_bytes": torch.cuda.max_memory_allocated() - before,
        "requested_step_peak_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"] - requested_before,
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
    }


def record(case: Case, call: Callable[[], Any], tensors: Iterable[Tensor]) -> Timeline:
    """The allocator's history of one step, with the names that sizes and Python stacks settle."""
    release(tensors)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)
    try:
        result = call()
        loss_of(result).backward()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)
    timeline = timeline_of(snapshot, torch.cuda.current_device(), title=str(case), source="recorded")
    tokens, vocab_size, hidden_size = case.sizes
    timeline = name_by_size(timeline, tokens=tokens, vocab_size=vocab_size, hidden_size=hidden_size)
    allocations = (
        replace(a, frames=tuple(Frame(short_path(f.filename), f.line, f.name) for f in a.frames))
        for a in timeline.allocations
    )
    return replace(timeline, allocations=tuple(allocations))


def loss_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def release(tensors: Iterable[Tensor]) -> None:
    """Drop gradients and garbage, and give cached memory back, so that no case profits from the one before."""
    for tensor in tensors:
        tensor.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def give_back_workspaces() -> int:
    """Free the workspaces that PyTorch keeps for cuBLAS, one for each thread's handle and stream; bytes freed."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


# ---------------------------------------------------------------- buffer by buffer


def large_events(timeline: Timeline) -> list[int]:
    """Allocations (+bytes) and frees (−bytes) of buffers of a MiB and more, in order, rounded up to 512 B."""
    events = []
    for a in timeline.allocations:
        size = -(-a.bytes // 512) * 512
        if size >= LARGE and a.start:  # not what was there before
            events.append((a.start, size))
            if a.end is not None:
                events.append((a.end, -size))
    return [size for _, size in sorted(events)]


def compare_events(simulated: Timeline, recorded: Timeline) -> dict[str, Any]:
    """Whether the large buffers of both come and go in the same order; if not, those that only one of them has."""
    ours, theirs = large_events(simulated), large_events(recorded)
    allocated, expected = (Counter(size for size in events if size > 0) for events in (ours, theirs))
    return {
        "same_events": ours == theirs,
        "events": len(theirs),
        "only_simulated": sorted((allocated - expected).elements(), reverse=True),
        "only_recorded": sorted((expected - allocated).elements(), reverse=True),
    }


# ---------------------------------------------------------------- the table


def difference_percent(row: dict[str, Any]) -> float:
    """Simulated above measured step peak, in per cent of the measured one."""
    measured = row["measured"]["step_peak_bytes"]
    return 100 * (row["simulated"]["step_peak_bytes"] - measured) / measured


def provenance() -> dict[str, Any]:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    triton = sys.modules.get("triton")
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": getattr(triton, "__version__", "not loaded"),
        },
        "allocator_settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        "measured": date.today().isoformat(),
        "command": "python benchmarks/memory_agreement.py --out book/data/h200",
        "dtype": str(DTYPE).removeprefix("torch."),
        "method": "Peaks in bytes above what was allocated before the step: the inputs and the library workspaces that "
        "PyTorch keeps between steps (workspace_bytes). cold_step_peak_bytes is that of a first step, above the inputs "
        "alone. requested: without the allocator's rounding and unsplit remainders. reserved: what the caching "
        "allocator held from CUDA, inputs and workspaces included. large_buffers compares every allocation and free of "
        "1 MiB and more with the allocator's history.",
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['model']:16} N={row['tokens']:6} {row['step']:18} {row['kernel']:6}"]
    for peaks in (row["simulated"], row["measured"]):
        parts.append(f"{peaks['forward_peak_bytes'] / GIB:8.4f} {peaks['step_peak_bytes'] / GIB:8.4f}")
    parts.append(f"{difference_percent(row):+7.3f} %")
    parts.append(f"cold {row['cold_step_peak_bytes'] / GIB:8.4f}, workspace {row['workspace_bytes'] / MIB:5.1f} MiB")
    buffers = row["large_buffers"]
    parts.append(
        "same events"
        if buffers["same_events"]
        else f"events differ; only simulated {buffers['only_simulated']}, only recorded {buffers['only_recorded']}"
    )
    return "  ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the two JSON files")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this compares with a GPU, and PyTorch sees none")
    args.out.mkdir(parents=True, exist_ok=True)

    for step in SCHEDULES:  # kernels are compiled and libraries loaded outside what is measured
        warm_up = Case("gravity-16b-a3b", 2048, step)
        tensors = cuda_inputs(warm_up)
        loss_of(warm_up.function(*tensors)).backward()
        del tensors

    print("GiB above the inputs: simulated forward peak and step peak, then the measured ones")
    document = provenance() | {"cases": []}
    recordings = {}
    for case in CASES:
        row, recorded = compare(case)
        document["cases"].append(row)
        if case in RECORDED:
            recordings[case.step] = json.loads(recorded.to_json())
        print(line(row), flush=True)
    table = args.out / "memory_agreement.json"
    table.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name in ("cases", "method"):
        document.pop(name)
    stored = json.dumps(document | {"recordings": recordings}, separators=(",", ":"))
    (args.out / "memory_agreement_recordings.json").write_text(stored + "\n", encoding="utf-8")
    worst = max(abs(difference_percent(row)) for row in json.loads(table.read_text())["cases"])
    print(f"largest difference of a step peak: {worst:.3f} %; written to {args.out}")
    return int(worst > 2)


if __name__ == "__main__":
    sys.exit(main())
