"""``bench``: time and step peak of every schedule on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from flce_ref.commands.common import DTYPES, Subparsers, add_command, dtype, positive_int, table

if TYPE_CHECKING:
    import torch

    from flce_ref.benchmark import Measurement

_SMALL_GPU = 20 * 2**30


def add_bench(subparsers: Subparsers) -> None:
    """Declare ``bench``."""
    parser = add_command(subparsers, "bench", run_bench, "time and memory of every schedule on this machine")
    parser.add_argument("--model", metavar="ID", help="a published head: see the command models")
    parser.add_argument("--vocab", type=positive_int, metavar="V", help="with --hidden, instead of --model")
    parser.add_argument("--hidden", type=positive_int, metavar="D")
    parser.add_argument(
        "--tokens", type=positive_int, metavar="N", help="rows of one step, B·S (default: by the memory)"
    )
    parser.add_argument(
        "--dtype", type=dtype, help=f"{', '.join(DTYPES)} (default: bf16, or what the device computes in)"
    )
    parser.add_argument("--rounds", type=positive_int, metavar="R", help="turns of each step (default 10)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens and 3 rounds")


def run_bench(args: argparse.Namespace) -> int:
    """Measure forward + backward of each schedule in turns; print a table, or the rows with their provenance."""
    import torch

    from flce_ref import explain, kernels
    from flce_ref.benchmark import measure, provenance

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, vocab, hidden, dtype = _sizes(args, device)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    y = torch.randint(0, vocab, (tokens,), device=device)
    calls = _calls(tokens, hidden, dtype)
    results = measure(
        {name: _step(x, w, y, options) for name, options in calls.items()},
        rounds=args.rounds or (3 if args.quick else 10),
    )
    if args.json:
        rows = [
            {"step": name, "options": {k: str(v) for k, v in calls[name].items()}, **results[name].as_dict(),
             "predicted_peak_bytes": explain(x, w, y, **calls[name]).step_peak_bytes}
            for name in calls
        ]  # fmt: skip
        sizes = {
            "tokens": tokens,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "dtype": str(dtype).removeprefix("torch."),
        }
        args.print_json(
            {"provenance": provenance(), "device": str(device), "kernels": kernels.available(), **sizes, "rows": rows}
        )
    else:
        print(f"N = {tokens:,}, V = {vocab:,}, D = {hidden:,}, {dtype}".replace("torch.", ""), f"on {_name(device)}\n")
        print(_table(results))
        print(*(f"kernel {name}: {state}" for name, state in kernels.available().items()), sep="\n")
    for name, result in results.items():
        if result.error:
            print(f"bench: {name}: {result.error}", file=sys.stderr)
    return int(all(result.error for result in results.values()))


def _sizes(args: argparse.Namespace, device: torch.device) -> tuple[int, int, int, torch.dtype]:
    """N, V, D and dtype that were asked for, else ones that suit the device."""
    import torch

    from flce_ref.machine import half_dtype
    from flce_ref.models import get

    if bool(args.vocab) != bool(args.hidden) or (args.model and args.vocab):
        args.parser.error("give --model, or --vocab and --hidden together, or none of them")
    if device.type == "cpu":
        tokens, (vocab, hidden), best = 1024, (8192, 256), torch.float32
    else:
        gpu = torch.cuda.get_device_properties(device)
        tokens, (vocab, hidden) = 2048 if gpu.total_memory < _SMALL_GPU else 8192, (151552, 2048)
        best = half_dtype((gpu.major, gpu.minor))
    if args.model:
        try:
            model = get(args.model)
        except ValueError as error:
            args.parser.error(str(error))
        vocab, hidden = model.vocab_size, model.hidden_size
    tokens = args.tokens or (tokens // 4 if args.quick else tokens)
    return tokens, args.vocab or vocab, args.hidden or hidden, args.dtype or best


def _calls(tokens: int, hidden: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Name → options of ``linear_cross_entropy``."""
    import torch

    from flce_ref.schedules.plan import default_chunk_size

    eighth, default = -(-tokens // 8), default_chunk_size(tokens, hidden)
    calls: dict[str, dict[str, Any]] = {
        "naive": {"schedule": "naive"},
        "chunked, 8 chunks": {"schedule": "chunked", "chunk_size": eighth},
        "checkpointed, 8 chunks": {"schedule": "checkpointed", "chunk_size": eighth},
        f"fused, chunk {default} (default)": {},
    }
    for chunk in (default // 2, 2 * default, 4 * default):
        if 1 <= chunk <= tokens:
            calls[f"fused, chunk {chunk}"] = {"chunk_size": chunk}
    calls["vocab_tiled (default)"] = {"schedule": "vocab_tiled"}
    if dtype == torch.bfloat16:
        calls[f"fused, chunk {default}, dw summed in bfloat16"] = {"accum_dtype": torch.bfloat16}
    return calls


def _step(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, options: dict[str, Any]) -> Any:
    import torch

    from flce_ref import linear_cross_entropy

    return lambda: torch.autograd.grad(linear_cross_entropy(x, w, y, **options), (x, w))


def _table(results: dict[str, Measurement]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    fastest = min((r.median_ms for r in results.values() if r.median_ms), default=None)
    peaks = [None if r.peak_bytes is None else r.peak_bytes / 2**30 for r in results.values()]
    columns = {
        "step": list(results),
        "ms": [cell(r.median_ms, ".2f") for r in results.values()],
        "÷ fastest": [cell(r.median_ms and fastest and r.median_ms / fastest, ".2f") for r in results.values()],
        "step peak GiB": [cell(peak, ".3f") for peak in peaks],
    }
    return table(columns, left=("step",)) + "\n"


def _name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, where memory is not counted"
