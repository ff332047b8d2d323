"""The whole training step of chapter 1, recorded on the GPU of this machine and simulated at the same length.

    python benchmarks/record_whole_step.py --out book/data/h200

takes SmolLM3 3B's shape with random weights, every layer checkpointed, and AdamW's moments in bfloat16; it records
forward and backward of one sequence with the naive loss and with the fused one, at the longest of ``LENGTHS`` at which
the naive one fits. It writes ``whole_step.json``, what was measured beside what was simulated, and the timelines
``whole_step_naive.json`` and ``whole_step_fused.json``, for ``python -m flce_ref view``. Exits with status 1 if a peak
differs by more than 1 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

# The naive step fills nearly the whole card: it must not fail for holes between cached segments.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from flce_ref.memory import Allocation, Timeline, record
from flce_ref.memory.whole_step import Decoder, loss_spike, merge_given, simulate_whole_step
from flce_ref.models import get

MODEL, TIED = get("smollm3-3b"), True
LENGTHS = (131_072, 98_304, 65_536, 32_768)
WARM_UP = 2048  # tokens of the step in which AdamW makes its moments and libraries take what they keep
SMALL = 1 << 16  # bytes; smaller blocks are left out of the stored timelines
GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the three JSON files")
    parser.add_argument("--tokens", type=int, metavar="N", help="this length only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this records on a GPU, and PyTorch sees none")
    args.out.mkdir(parents=True, exist_ok=True)

    decoder, _optimizer = warm_decoder()  # whose moments are to stay
    print(f"{MODEL.name}: {torch.cuda.memory_allocated() / GIB:.2f} GiB before the step", flush=True)
    tokens, naive = longest(decoder, (args.tokens,) if args.tokens else LENGTHS)
    document = provenance() | {"name": MODEL.name, "model": MODEL.id, "tokens": tokens, "runs": [naive]}
    document["runs"].append(run(decoder, "fused", tokens))
    for row in document["runs"]:
        timeline = row.pop("timeline")
        (args.out / f"whole_step_{row['schedule']}.json").write_text(timeline.to_json() + "\n", encoding="utf-8")
        row |= compared(row, timeline, tokens)
        print(line(row), flush=True)
    (args.out / "whole_step.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(max(abs(row["difference_percent"]) for row in document["runs"]) > 1)


# ---------------------------------------------------------------- the runs


def warm_decoder() -> tuple[Decoder, torch.optim.Optimizer]:
    """The decoder after one short step of training, without gradients, and its optimizer."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(MODEL, tied=TIED, schedule="naive").to(torch.bfloat16)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-5, fused=True)
    for schedule in ("fused", "naive"):
        decoder.schedule = schedule
        decoder(*sequence(WARM_UP)).backward()
    optimizer.step()
    release(decoder)
    return decoder, optimizer


def sequence(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(MODEL.vocab_size, (1, tokens + 1), device="cuda")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def release(decoder: Decoder) -> None:
    decoder.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def longest(decoder: Decoder, lengths: tuple[int, ...]) -> tuple[int, dict[str, Any]]:
    """The first length at which a naive step fits, and that step."""
    for tokens in lengths:
        try:
            return tokens, run(decoder, "naive", tokens)
        except torch.OutOfMemoryError as error:
            print(f"{tokens} tokens do not fit: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        release(decoder)  # outside the handler, whose exception holds the step's tensors
    raise SystemExit("no length fits on this GPU")


def run(decoder: Decoder, schedule: str, tokens: int) -> dict[str, Any]:
    """One recorded step: its schedule, peaks, duration and timeline."""
    decoder.schedule = schedule
    inputs = sequence(tokens)
    release(decoder)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with record(f"{MODEL.name}, {schedule} loss, each layer checkpointed") as recording:
        decoder(*inputs).backward()
    return {
        "schedule": schedule,
        "checkpointing": True,
        "seconds": round(time.perf_counter() - started, 1),
        "before_bytes": before,
        "measured_peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "timeline": named(recording.timeline),
    }


# ---------------------------------------------------------------- the timelines


def named(timeline: Timeline) -> Timeline:
    """With the names that the simulated one has, without small blocks, and with the two inner lines of each stack.

    The decoder labels what its layers make in forward and when they run again; the naive loss is named by its Python
    stack, the fused one here by its buffers' sizes. What backward makes and never frees are the parameters' gradients.
    """
    named_blocks = tuple(_named(a, timeline) for a in timeline.allocations if a.bytes >= SMALL or a.start == 0)
    return merge_given(replace(timeline, allocations=named_blocks))


def _named(a: Allocation, timeline: Timeline) -> Allocation:
    label, category = a.label, a.category
    backward = timeline.backward_start or timeline.n_events + 1
    if a.start == 0:
        label, category = "parameters and AdamW's moments", "input"
    elif a.start < backward and any(frame.filename == "flce_ref/schedules/fused.py" for frame in a.frames):
        label, category = _of_fused(a.bytes)
    elif a.start >= backward and a.end is None:
        label, category = "gradient of a parameter", "dw"
    elif category == "other":
        category = "activation"
    return replace(a, label=label, category=category, frames=a.frames[:2])


def _of_fused(size: int) -> tuple[str, str]:
    """What the fused schedule makes in forward, in bfloat16: dw is summed in float32; a chunk has hidden_size rows."""
    if size == MODEL.vocab_size * MODEL.hidden_size * 4:
        return "dw accumulator", "dw"
    if size == MODEL.vocab_size * MODEL.hidden_size * 2:
        return "logits of one chunk, then their gradient (one buffer)", "logits"
    return ("dx", "dx") if size % (MODEL.hidden_size * 2) == 0 and size > 1 << 26 else ("values per row", "other")


def compared(row: dict[str, Any], recorded: Timeline, tokens: int) -> dict[str, Any]:
    """What the two timelines say of the same step, in bytes, everything included."""
    simulated = simulate_whole_step(MODEL, tokens, tied=TIED, schedule=row["schedule"])
    result: dict[str, Any] = {}
    for name, timeline in (("recorded", recorded), ("simulated", simulated)):
        spike = loss_spike(timeline)
        result[name] = {
            "peak_bytes": timeline.peak_bytes,
            "foot_bytes": spike.foot,
            "loss_bytes": spike.height,
            "elsewhere_bytes": spike.elsewhere,
            "peaks_in_loss": spike.top == timeline.peak_bytes,
            "n_events": timeline.n_events,
        }
    measured = row["measured_peak_bytes"]
    result["difference_percent"] = round(100 * (simulated.peak_bytes - measured) / measured, 3)
    return result


# ---------------------------------------------------------------- the report


def provenance() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True)
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "allocator_settings": os.environ["PYTORCH_CUDA_ALLOC_CONF"],
        "measured": date.today().isoformat(),
        "command": "python benchmarks/record_whole_step.py --out book/data/h200",
        "method": "Random weights and tokens, bfloat16, AdamW with its moments in bfloat16, each layer checkpointed; "
        "one forward and backward after one short warm-up step. Bytes are absolute; measured_peak_bytes is "
        "max_memory_allocated, recorded is read off the allocator's history, simulated is the same step simulated on "
        "the same machine's CPU. loss_bytes is above the foot, which is what was alive when the loss began.",
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['schedule']:6} {row['seconds']:6.1f} s, measured peak {row['measured_peak_bytes'] / GIB:7.3f} GiB"]
    for name in ("recorded", "simulated"):
        sizes = (row[name][f"{key}_bytes"] / GIB for key in ("peak", "foot", "loss", "elsewhere"))
        parts.append(f"{name}: peak {{:.3f}}, foot {{:.3f}}, loss +{{:.3f}}, elsewhere {{:.3f}}".format(*sizes))
    return "; ".join([*parts, f"difference {row['difference_percent']:+.3f} %"])


if __name__ == "__main__":
    sys.exit(main())
