"""``models``: how large the logits of published models are."""

from __future__ import annotations

import argparse

from flce_ref.commands.common import DTYPES, Subparsers, add_command, dtype, positive_int, table


def add_models(subparsers: Subparsers) -> None:
    """Declare ``models``."""
    summary = "how large the logits of published models are (sources: --json, or a wide terminal)"
    parser = add_command(subparsers, "models", run_models, summary)
    parser.add_argument("--batch", type=positive_int, default=4, metavar="B", help="sequences (default %(default)s)")
    parser.add_argument(
        "--seq", type=positive_int, default=4096, metavar="S", help="tokens of each (default %(default)s)"
    )
    parser.add_argument("--dtype", type=dtype, default="bf16", help=f"{', '.join(DTYPES)} (default %(default)s)")


def run_models(args: argparse.Namespace) -> int:
    """Print hidden states (B, S, D) against logits (B, S, V) of every published model, in GB = 10⁹ bytes."""
    from flce_ref.models import MODELS, head_sizes

    sizes = [head_sizes(model, args.batch, args.seq, args.dtype) for model in MODELS]
    if args.json:
        args.print_json(
            [
                {
                    "id": model.id,
                    "name": model.name,
                    "vocab_size": model.vocab_size,
                    "hidden_size": model.hidden_size,
                    "source": model.source,
                    "hidden_gb": size.hidden_bytes / 1e9,
                    "logits_gb": size.logits_bytes / 1e9,
                    "ratio": size.ratio,
                }
                for model, size in zip(MODELS, sizes, strict=True)
            ]
        )
        return 0

    columns = {
        "id": [model.id for model in MODELS],
        "name": [model.name for model in MODELS],
        "V": [f"{model.vocab_size:,}" for model in MODELS],
        "D": [f"{model.hidden_size:,}" for model in MODELS],
        "hidden": [f"{size.hidden_bytes / 1e9:,.2f}" for size in sizes],
        "logits": [f"{size.logits_bytes / 1e9:,.2f}" for size in sizes],
        "ratio": [f"{size.ratio:.0f}×" for size in sizes],
        "source": [model.source for model in MODELS],
    }
    shape = f"B = {args.batch:,}, S = {args.seq:,}, {args.dtype}".replace("torch.", "")
    print(f"hidden (B, S, D) and logits (B, S, V) in GB (10⁹ bytes) at {shape}\n")
    print(table(columns, left=("id", "name", "source"), expendable=("source", "name")))
    return 0
