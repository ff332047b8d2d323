"""``verify``: hold an implementation to the conformance suite."""

from __future__ import annotations

import argparse

from flce_ref.commands.common import Subparsers, add_command


def add_verify(subparsers: Subparsers) -> None:
    """Declare ``verify``."""
    parser = add_command(subparsers, "verify", run_verify, "hold an implementation to the conformance suite")
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="keyword argument of every call: a Python literal, a torch dtype or a string (repeatable)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda, cuda:1 (default %(default)s)")


def run_verify(args: argparse.Namespace) -> int:
    """Print the report of the suite on one function; fail if any check does."""
    import faulthandler

    import torch

    from flce_ref.conformance.runner import run
    from flce_ref.conformance.target import load, parse_setting

    try:
        function = load(args.target)
        settings = dict(parse_setting(setting) for setting in args.settings)
        torch.zeros(1, device=args.device).item()  # on the meta device nothing can be computed
    except (ValueError, RuntimeError, AssertionError) as error:  # Assertion: "Torch not compiled with CUDA enabled"
        args.parser.error(str(error).splitlines()[0])
    faulthandler.enable(2)  # standard error; a function that crashes the process: which check it was in
    report = run(function, args.device, settings, name=args.target)
    if args.json:
        args.print_json(report.to_dict())
    else:
        print(report)
    return 0 if report.ok else 1
