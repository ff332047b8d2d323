"""Cutting the vocabulary: time, step peak and errors of ``schedule="vocab_tiled"`` on this GPU.

    python benchmarks/vocab_tiled.py --out book/data/h200/vocab_tiled.json

Three tables. ``widths``: the schedule at every width of a tile, beside the floor (the three products of ``head.py``),
the fused schedule, and Cut Cross-Entropy where it is installed. ``filter``: gradients below ``filter_eps`` left out, on
two random heads and on a trained one (``trained_head.py``), with the error that this makes and the probability that it
loses. ``sweep``: the two ways to cut over N, V and D. All times are those of steps measured in turns
(``flce_ref.benchmark.measure``), all peaks are above the inputs, all errors are against float32 arithmetic on the same
inputs: of gradients ‖got − true‖ / ‖true‖. ``--part`` (repeated) runs some of the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from head import errors_of, free, products, true_values  # noqa: E402
from peers import Step, versions, with_grad  # noqa: E402
from trained_head import Head, random_head, renumbered, trained_head  # noqa: E402

from flce_ref import explain, kernels, linear_cross_entropy, models  # noqa: E402
from flce_ref.benchmark import measure, provenance  # noqa: E402
from flce_ref.schedules.filtering import NEARLY_ALL  # noqa: E402
from flce_ref.schedules.plan import default_tile_width  # noqa: E402

FLOOR = "floor: three products, pieces of 4096"
WIDTHS = (1024, 2048, 4096, 8192, 16384)
THRESHOLDS = (2**-14, 2**-12, 2**-10)
SWEPT_HEADS = ("gravity-16b-a3b", "llama-3-8b", "gemma-3-4b")
SWEPT_TOKENS = (256, 1024, 4096, 16384, 65536)
GIB = 2**30


def tiled(**options: Any) -> Step:
    return with_grad(partial(linear_cross_entropy, schedule="vocab_tiled", **options))


def fused(**options: Any) -> Step:
    return with_grad(partial(linear_cross_entropy, **options))


def four_products(x: Tensor, w: Tensor, y: Tensor, width: int) -> tuple[Tensor, ...]:
    """What the schedule is made of without its kernels: logits of every tile twice, dw, dx summed in float32."""
    with torch.no_grad():
        dx, dw = x.new_zeros(x.shape, dtype=torch.float32), torch.empty_like(w)
        buffer = x.new_empty(len(x) * width)
        for backward in (False, True):
            for start in range(0, len(w), width):
                words = w[start : start + width]
                tile = buffer[: len(x) * len(words)].view(len(x), len(words))
                torch.mm(x, words.T, out=tile)
                if backward:
                    torch.mm(tile.T, x, out=dw[start : start + width])
                    torch.addmm(dx, tile, words, out_dtype=torch.float32, out=dx)
    return ()


def cut_steps(unavailable: dict[str, str]) -> dict[str, Step]:
    """Cut Cross-Entropy as it comes, which filters, and without its filter."""
    try:
        from cut_cross_entropy import linear_cross_entropy as cut
    except Exception as error:
        unavailable["cut-cross-entropy"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return {}
    return {
        "cut-cross-entropy": with_grad(lambda x, w, y: cut(x, w, y)),
        "cut-cross-entropy without filter": with_grad(lambda x, w, y: cut(x, w, y, filter_eps=None)),
    }


def table_of(steps: dict[str, Step], head: Head, rounds: int, truth: bool = True) -> list[dict[str, Any]]:
    """One row per step: times, peak and, with ``truth``, errors."""
    free()
    results = measure({name: partial(step, *head) for name, step in steps.items()}, rounds=rounds, warmups=1)
    free()
    true = true_values(*head) if truth else ()
    rows = []
    for name, result in results.items():
        row = {"name": name, **result.as_dict()}
        if truth and result.error is None:
            row |= errors_of(steps[name], head, true)
        rows.append(row)
        free()
    return rows


# ---------------------------------------------------------------- the three tables


def widths(a: argparse.Namespace, unavailable: dict[str, str]) -> dict[str, Any]:
    head = random_head(a.tokens, a.vocab, a.hidden, a.device, deviation=0.9)
    steps: dict[str, Step] = {FLOOR: partial(products, rows=4096)}
    default = default_tile_width(a.tokens, a.vocab, a.hidden)
    if a.device.type == "cuda":  # mixed-precision products
        steps["floor: four products, tiles of the default width"] = partial(four_products, width=default)
    steps["vocab_tiled default"] = tiled()
    steps |= {f"vocab_tiled, T = {width}": tiled(chunk_size=width) for width in WIDTHS if width < a.vocab}
    steps["vocab_tiled default, bf16 dx"] = tiled(accum_dtype=torch.bfloat16)
    for kernel in ("triton", "eager"):
        if kernels.available()[kernel] == "usable" and (kernel != "eager" or a.device.type == "cuda"):
            steps[f"vocab_tiled default, {kernel} kernel"] = tiled(kernel=kernel)
    steps["fused default"] = fused()
    steps |= {f"fused bf16 dw, chunk {c}": fused(accum_dtype=torch.bfloat16, chunk_size=c) for c in (512, 1024)}
    steps["naive"] = fused(schedule="naive")
    steps |= cut_steps(unavailable)
    table = table_of(steps, head, a.rounds)
    floor = table[0]["median_ms"]
    for row in table:
        row["over_floor"] = row["median_ms"] and row["median_ms"] / floor
    return {"default_width": default, "table": table}


def filtering(a: argparse.Namespace, unavailable: dict[str, str]) -> dict[str, Any]:
    """Every head with every threshold; the trained one also with its words renumbered at random."""
    head, training = trained_head(a.tokens, a.vocab, a.hidden, a.device, a.training)
    print(
        "trained: {loss_on_new_pairs:.3f} where {loss_of_the_language:.3f} is possible".format(**training), flush=True
    )
    heads: dict[str, Callable[[], Head]] = {
        "random, flat": lambda: random_head(a.tokens, a.vocab, a.hidden, a.device, deviation=0.9),
        "random, sharp": lambda: random_head(a.tokens, a.vocab, a.hidden, a.device, deviation=3.0),
        "trained": lambda: head,
        "trained, renumbered": lambda: renumbered(head),
    }
    found = []
    for name, make in heads.items():
        free()
        given = make()
        steps = {"exact": tiled(), "fused default": fused()}
        steps |= {f"filter_eps = {power_of(eps)}": tiled(filter_eps=eps) for eps in THRESHOLDS}
        steps["filter_eps = 2^-12, T = 1024"] = tiled(filter_eps=2**-12, chunk_size=min(1024, a.vocab))
        steps |= cut_steps(unavailable)
        rows = table_of(steps, given, a.rounds)
        for row in rows:
            if row["name"].startswith("filter_eps"):
                eps = next(e for e in THRESHOLDS if power_of(e) in row["name"])
                width = 1024 if "T =" in row["name"] else default_tile_width(a.tokens, a.vocab, a.hidden)
                row |= {"filter_eps": eps, "width": width, **left_out(given, eps, width)}
        unseen = errors_of_unseen_words(steps, given)
        found.append({"head": name, **spread(given), "table": [row | unseen.get(row["name"], {}) for row in rows]})
    return {"training": training, "heads": found}


def sweep(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways to cut, each with its own default, over three heads and lengths: measured and predicted."""
    found = []
    for model_id in a.swept_heads:
        model = models.get(model_id)
        vocab, hidden = model.vocab_size, model.hidden_size
        for tokens in a.swept_tokens:
            free()
            head = random_head(tokens, vocab, hidden, a.device, deviation=0.9)
            low = {"accum_dtype": torch.bfloat16, "chunk_size": min(1024, tokens)}
            options: dict[str, dict[str, Any]] = {"fused": {}, "fused, bf16 dw, chunk 1024": low}
            options["vocab_tiled"] = {"schedule": "vocab_tiled"}
            for row in table_of({n: fused(**o) for n, o in options.items()}, head, 2, truth=False):
                predicted = explain(*head, **options[row["name"]])
                row |= {"model": model_id, "tokens": tokens, "vocab": vocab, "hidden": hidden}
                row |= {"chunk_size": predicted.chunk_size, "predicted_peak_bytes": predicted.step_peak_bytes}
                found.append(row)
            del head
    return found


# ---------------------------------------------------------------- what a filter leaves out


def probabilities(head: Head, rows: int = 512) -> Any:
    """(first row, softmax (rows, V) in float32) of every block of tokens."""
    for start in range(0, len(head.input), rows):
        with torch.no_grad():
            yield start, (head.input[start : start + rows] @ head.weight.T).float().softmax(1)


def left_out(head: Head, eps: float, width: int) -> dict[str, float]:
    """Shares of all (token, tile) pairs that are needed and that are made, and of probability that is left out."""
    vocab, tiles = len(head.weight), -(-len(head.weight) // width)
    highest, mass = (torch.empty(len(head.input), tiles, device=head.input.device) for _ in range(2))
    for start, p in probabilities(head):
        p = torch.nn.functional.pad(p, (0, tiles * width - vocab)).view(len(p), tiles, width)
        highest[start : start + len(p)], mass[start : start + len(p)] = p.amax(2), p.sum(2)
    needed = (highest >= eps).scatter_(1, head.target[:, None] // width, True)
    made = needed | (needed.double().mean(0) > NEARLY_ALL)
    return {
        "pairs_needed": needed.double().mean().item(),
        "pairs_made": made.double().mean().item(),
        "probability_left_out": mass.masked_fill(made, 0).sum(1).mean().item(),
    }


def spread(head: Head) -> dict[str, Any]:
    """Words that a token has above each threshold, words that any token has, and the mean of sorted probabilities."""
    above, anyone = dict.fromkeys(THRESHOLDS, 0), {}
    ranks = [rank for k in range(20) for rank in (2**k,) if rank <= len(head.weight)]
    curve = torch.zeros(len(ranks), device=head.weight.device, dtype=torch.float64)
    for start, p in probabilities(head):
        for eps in THRESHOLDS:
            above[eps] += (p >= eps).sum().item()
            anyone[eps] = anyone.get(eps, False) | (p >= eps).any(0)
        if start < 1024:
            curve += p.sort(1, descending=True).values[:, [rank - 1 for rank in ranks]].double().sum(0)
    n = len(head.input)
    return {
        "words_above": {power_of(eps): count / n for eps, count in above.items()},
        "words_above_for_any": {power_of(eps): int(mask.sum()) for eps, mask in anyone.items()},
        "sorted": {"rank": ranks, "mean_probability": (curve / min(n, 1024)).tolist()},
    }


def errors_of_unseen_words(steps: dict[str, Step], head: Head) -> dict[str, dict[str, float]]:
    """The relative error of dw in the rows of words that are no target in this batch."""
    free()
    unseen = torch.ones(len(head.weight), dtype=torch.bool, device=head.weight.device)
    unseen[head.target] = False
    true = true_values(*head)[2][unseen]
    found = {}
    for name, step in steps.items():
        try:
            got = step(*head)[2][unseen]
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        found[name] = {"dw_error_unseen": ((got.float() - true).norm() / true.norm()).item()}
    return found


def power_of(eps: float) -> str:
    return f"2^{torch.tensor(eps).log2().round().int().item()}"


# ---------------------------------------------------------------- the command


def main() -> int:
    a = arguments()
    if a.device.type == "cpu":
        print("on the CPU: this tries the script out; times mean nothing and peaks are not counted", file=sys.stderr)
    began = time.perf_counter()
    torch.manual_seed(0)
    print(*(f"kernel {name}: {state}" for name, state in kernels.available().items()), sep="\n", flush=True)
    about = {
        "what": "The vocabulary cut into tiles: time, step peak and errors by width, with filtered gradients, by size",
        "command": " ".join(["python benchmarks/vocab_tiled.py", *(f"--part {part}" for part in a.part)]),
        "peers": versions(),
    }
    document: dict[str, Any] = {"provenance": provenance() | about}
    document |= {"tokens": a.tokens, "vocab": a.vocab, "hidden": a.hidden, "dtype": "bf16", "rounds": a.rounds}
    document["unavailable"] = unavailable = {}
    parts: dict[str, Callable[[], Any]] = {
        "widths": lambda: widths(a, unavailable), "filter": lambda: filtering(a, unavailable), "sweep": lambda: sweep(a)
    }  # fmt: skip
    for name, run in parts.items():
        if name in a.part:
            document[name] = run()
            show(name, document[name])
            document["seconds"] = time.perf_counter() - began
            if a.out:
                a.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"\n{document['seconds']:.0f} s")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, size in (("tokens", 8192), ("vocab", 151552), ("hidden", 2048), ("rounds", 3), ("training", 400)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--part", action="append", choices=("widths", "filter", "sweep"), help="default: all three")
    parser.add_argument("--swept-heads", nargs="*", default=SWEPT_HEADS, help="models of the sweep")
    parser.add_argument("--swept-tokens", nargs="*", type=int, default=SWEPT_TOKENS, help="lengths of the sweep")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path, help="JSON to write")
    a = parser.parse_args()
    a.part = a.part or ["widths", "filter", "sweep"]
    if a.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no CUDA device; --device cpu tries the script out at small sizes")
    return a


def show(name: str, found: Any) -> None:
    print(f"\n{name}")
    if name == "filter":
        for head in found["heads"]:
            print(f"{head['head']}: words above {head['words_above']}, for any token {head['words_above_for_any']}")
            lines(head["table"])
    else:
        lines(found["table"] if name == "widths" else found)


def lines(table: list[dict[str, Any]]) -> None:
    columns = {"dx_error": ".2e", "dw_error": ".2e", "dw_error_unseen": ".2e", "pairs_made": ".3f",
               "probability_left_out": ".4f", "over_floor": ".3f"}  # fmt: skip
    for row in table:
        if row["error"]:
            print(f"   failed: {row['name']}: {row['error']}")
            continue
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:8.4f} GiB"
        more = " ".join(f"{key} {row[key]:{form}}" for key, form in columns.items() if row.get(key) is not None)
        where = f"{row['model']} N = {row['tokens']}: " if "model" in row else ""
        print(f"{row['median_ms']:10.3f} ms {peak}  {where}{row['name']}  {more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
