"""``memory``: simulate one step of a head, without a GPU, and say what fits on a card."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flce_ref.commands.common import (
    DTYPES,
    Subparsers,
    add_command,
    checked,
    dtype,
    output,
    picture,
    positive_int,
    table,
)

if TYPE_CHECKING:
    from flce_ref.memory import Timeline
    from flce_ref.memory.head_step import HeadStep

# Named here, so that --help and wrong usage do not wait for torch; a test holds them to what is simulated.
SCHEDULES = ("naive", "chunked", "checkpointed", "fused", "vocab_tiled")
IDIOMS = ("naive-kept", "naive-float", "naive-float-kept")
KERNELS = ("cuda", "triton", "eager", "cpu")

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_GIB = 1 << 30
_EPILOG = """schedules:
  naive, chunked, checkpointed, fused,
  vocab_tiled                           those of flce_ref.linear_cross_entropy; "all" is these five
  naive-kept                            naive, and the logits have a name that outlives the loss
  naive-float                           naive with .float() on the logits
  naive-float-kept                      both, as many model files do

Peaks are above the inputs (input, weight and target). With --budget: the longest context that the head alone can
train (inputs and step peak within the budget), and the chunk size that makes the fewest chunks at --tokens."""


@checked
def budget(text: str) -> int:
    """Read ``80GiB`` (2³⁰) or ``80GB`` (10⁹) and so on as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)B\s*", text)
    size = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]] if match else 0.0
    if not match or (match[3] and not match[2]) or not 1 <= size < 2**60:
        raise ValueError(f"expected a size such as 80GiB (2³⁰ bytes) or 80GB (10⁹), got {text!r}")
    return int(size)


def add_memory(subparsers: Subparsers) -> None:
    """Declare ``memory``."""
    parser = add_command(subparsers, "memory", run_memory, "simulate the memory of one step of a head, without a GPU")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--model", metavar="ID", help="a published head: see the command models")
    parser.add_argument("--vocab", type=positive_int, metavar="V", help="with --hidden, instead of --model")
    parser.add_argument("--hidden", type=positive_int, metavar="D")
    parser.add_argument("--tokens", type=positive_int, metavar="N", required=True, help="rows of one step, B·S")
    parser.add_argument(
        "--schedule", choices=("all", *SCHEDULES, *IDIOMS), metavar="S", default="all", help="see below (default all)"
    )
    parser.add_argument(
        "--chunk-size",
        type=positive_int,
        metavar="C",
        help="rows of a chunk (default: about D), or words of a tile (2 D)",
    )
    parser.add_argument("--dtype", type=dtype, default="bf16", help=f"{', '.join(DTYPES)} (default %(default)s)")
    parser.add_argument(
        "--kernel", choices=KERNELS, default="cuda", help="the row kernel to follow (default %(default)s)"
    )
    parser.add_argument("--budget", type=budget, metavar="SIZE", help="what fits into so much memory, such as 80GiB")
    parser.add_argument("--plot", type=picture, metavar="OUT", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--html", type=output, metavar="OUT", help="interactive page to write")
    parser.add_argument("--snapshot", type=output, metavar="OUT", help="Memory Viz pickle to write, of one schedule")


@dataclass(frozen=True)
class Result:
    """One schedule's row."""

    step: HeadStep
    timeline: Timeline
    chunk_size: int | None
    max_tokens: int | None = None
    fit_chunk_size: int | None = None


def run_memory(args: argparse.Namespace) -> int:
    """Simulate, print a table or the JSON document, and write the files that were asked for."""
    steps = _steps(args)
    try:
        _check_files(args)
        results = [_result(step, args) for step in steps]
        _write(args, [result.timeline for result in results])
    except (OSError, ValueError, ImportError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.print_json(_document(args, results))
    else:
        _print(args, results)
    return 0


# ---------------------------------------------------------------- arguments


def _steps(args: argparse.Namespace) -> list[HeadStep]:
    """The steps to simulate; wrong usage ends the command with status 2."""
    from flce_ref.memory.head_step import HeadStep

    vocab_size, hidden_size = _head(args)
    schedules = SCHEDULES if args.schedule == "all" else (args.schedule,)
    steps = [HeadStep(s, vocab_size, hidden_size, args.dtype, args.kernel, args.chunk_size) for s in schedules]
    if args.chunk_size is not None and not any(step.has_chunks for step in steps):
        args.parser.error(f"argument --chunk-size: {args.schedule} has no chunks")
    if args.snapshot and len(steps) > 1:
        args.parser.error("argument --snapshot: a snapshot holds one step; name one with --schedule")
    _check_sizes(args, steps)
    if args.budget is not None:
        gradients = 2 * vocab_size * hidden_size * args.dtype.itemsize
        if args.budget < gradients:
            args.parser.error(
                f"argument --budget: {_gib(args.budget)} GiB do not hold the weight and its gradient, "
                f"{_gib(gradients)} GiB, which every schedule needs whatever the number of tokens"
            )
    return steps


def _head(args: argparse.Namespace) -> tuple[int, int]:
    from flce_ref.models import get

    if args.model is not None:
        if args.vocab or args.hidden:
            args.parser.error("argument --model: it sets the sizes of the head; leave out --vocab and --hidden")
        try:
            model = get(args.model)
        except ValueError as error:
            args.parser.error(f"argument --model: {error}")
        return model.vocab_size, model.hidden_size
    if not args.vocab or not args.hidden:
        args.parser.error("say which head: --model ID, or --vocab V and --hidden D")
    return args.vocab, args.hidden


def _check_sizes(args: argparse.Namespace, steps: Sequence[HeadStep]) -> None:
    from flce_ref.memory.head_step import MOST_CHUNKS

    step = steps[0]
    largest = max(args.tokens * step.vocab_size, (args.tokens + step.vocab_size) * step.hidden_size)
    if largest >= 2**58:  # sums of some of these, of 8 B an element, are to stay below 2⁶³
        args.parser.error(f"argument --tokens: a step of {args.tokens} tokens has tensors of 2⁵⁸ elements or more")
    for step in steps:
        total = step.cut(args.tokens)
        rows = step.chunk_rows(args.tokens) or total
        if -(-total // rows) > MOST_CHUNKS:
            what = "words" if step.schedule == "vocab_tiled" else "tokens"
            args.parser.error(
                f"argument --chunk-size: {total} {what} in chunks of {rows} are more than the {MOST_CHUNKS} "
                "chunks that can be simulated in minutes; take larger chunks"
            )


def _check_files(args: argparse.Namespace) -> None:
    """What can't be written is said before anything takes time."""
    for path in (Path(name) for name in (args.plot, args.html, args.snapshot) if name):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise IsADirectoryError(f"{path}: is a directory")


# ---------------------------------------------------------------- results


def _result(step: HeadStep, args: argparse.Namespace) -> Result:
    from flce_ref.memory.head_step import fewest_chunks, longest_context

    timeline, rows = step.timeline(args.tokens), step.chunk_rows(args.tokens)
    if args.budget is None:
        return Result(step, timeline, rows)
    fit = fewest_chunks(step, args.tokens, args.budget)
    return Result(step, timeline, rows, longest_context(step, args.budget), fit)


def _write(args: argparse.Namespace, timelines: Sequence[Timeline]) -> None:
    from flce_ref.memory.viewer import to_html

    if args.html:
        Path(args.html).write_text(to_html(timelines), encoding="utf-8")
    if args.snapshot:
        timelines[0].to_snapshot(args.snapshot)
    if args.plot and len(timelines) == 1:
        timelines[0].save_plot(args.plot)
    elif args.plot:
        from flce_ref.memory.plot import compare

        compare(timelines).savefig(args.plot, bbox_inches="tight", dpi=160, transparent=True)


def _document(args: argparse.Namespace, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "model": args.model and args.model.lower(),
        "tokens": args.tokens,
        "dtype": str(args.dtype).removeprefix("torch."),
        "kernel": args.kernel,
        "input_bytes": results[0].timeline.input_bytes,
        "schedules": [_row(result, args.budget is not None) for result in results],
    }


def _row(result: Result, with_budget: bool) -> dict[str, Any]:
    row = {
        "schedule": result.step.schedule,
        "chunk_size": result.chunk_size,
        "forward_peak_bytes": result.timeline.forward_peak_bytes,
        "step_peak_bytes": result.timeline.step_peak_bytes,
        "alive_at_peak": [{"label": label, "bytes": size} for label, size in result.timeline.alive_at_peak()],
    }
    return row | ({"max_tokens": result.max_tokens, "fit_chunk_size": result.fit_chunk_size} if with_budget else {})


def _print(args: argparse.Namespace, results: Sequence[Result]) -> None:
    from flce_ref.memory.layout import alive_in_words

    step = results[0].step
    head = f"{args.model}: " if args.model else ""
    kind = str(args.dtype).removeprefix("torch.")
    inputs = results[0].timeline.input_bytes
    print(
        f"{head}V = {step.vocab_size:,}, D = {step.hidden_size:,}, N = {args.tokens:,}, {kind}, kernel {args.kernel}\n"
        f"peaks in GiB (2³⁰ bytes) above the inputs, which take {_gib(inputs)}; absolute: with them\n"
    )
    columns = {
        "schedule": [r.step.schedule for r in results],
        "chunk": ["" if r.chunk_size is None else f"{r.chunk_size:,}" for r in results],
        "forward": [_gib(r.timeline.forward_peak_bytes or 0) for r in results],
        "step": [_gib(r.timeline.step_peak_bytes) for r in results],
        "absolute": [_gib(r.timeline.peak_bytes) for r in results],
    }
    if args.budget is not None:
        columns["longest context"] = [f"{r.max_tokens:,}" if r.max_tokens else "none" for r in results]
        columns["chunk that fits"] = [_fit(r) for r in results]
    print(table(columns, left=("schedule",)))
    if args.budget is not None:
        print(
            f"\nlongest context within {_gib(args.budget)} GiB, inputs included; chunk that fits at N = {args.tokens:,}"
        )
    for result in results:
        print(f"\nalive at the peak of {result.step.schedule}, GiB:")
        for group in alive_in_words(result.timeline):
            if group.bytes >= result.timeline.peak_bytes / 1000:
                print(f"  {group.bytes / _GIB:10.3f}  {group.text}")
        for note in result.timeline.notes:
            print(f"  note: {note}")


def _fit(result: Result) -> str:
    if not result.step.has_chunks:
        return ""
    return "none" if result.fit_chunk_size is None else f"{result.fit_chunk_size:,}"


def _gib(size: int) -> str:
    return f"{size / _GIB:,.3f}"
