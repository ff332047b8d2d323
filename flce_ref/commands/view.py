"""``view``: draw a snapshot or a stored timeline."""

from __future__ import annotations

import argparse
import sys

from flce_ref.commands.common import Subparsers, add_command, output, picture, positive_int


def add_view(subparsers: Subparsers) -> None:
    """Declare ``view``."""
    parser = add_command(subparsers, "view", run_view, "draw a Memory Viz snapshot or a stored timeline", json=False)
    parser.add_argument(
        "file", metavar="FILE", help="pickle of torch.cuda.memory._dump_snapshot, or Timeline.to_json()"
    )
    parser.add_argument("--plot", type=picture, metavar="OUT", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--html", type=output, metavar="OUT", help="interactive page to write")
    parser.add_argument(
        "--device", type=int, metavar="I", help="which device (default: all in the page, else the busiest)"
    )
    group = parser.add_argument_group("names by size", "all three: name logits, dx and dw by their sizes")
    group.add_argument("--tokens", type=positive_int, metavar="N")
    group.add_argument("--vocab", type=positive_int, metavar="V")
    group.add_argument("--hidden", type=positive_int, metavar="D")


def run_view(args: argparse.Namespace) -> int:
    """Read FILE and write what was asked for."""
    from pathlib import Path

    from flce_ref.memory import name_by_size
    from flce_ref.memory.snapshot import read_timelines
    from flce_ref.memory.viewer import to_html

    if not args.plot and not args.html:
        args.parser.error("say what to write: --plot OUT.png, --html OUT.html or both")
    shape = (args.tokens, args.vocab, args.hidden)
    if any(shape) and not all(shape):
        args.parser.error("--tokens, --vocab and --hidden are needed together")
    try:
        timelines = read_timelines(args.file, args.device)
        if all(shape):
            tokens, vocab, hidden = shape
            timelines = [name_by_size(t, tokens=tokens, vocab_size=vocab, hidden_size=hidden) for t in timelines]
        if args.html:
            Path(args.html).write_text(to_html(timelines), encoding="utf-8")
        if args.plot:
            timelines[0].save_plot(args.plot)
    except (ValueError, OSError, ImportError) as error:
        print(f"view: {error}", file=sys.stderr)
        return 1
    for timeline in timelines:
        print(timeline.alt_text())
    return 0
