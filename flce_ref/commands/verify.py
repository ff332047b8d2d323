"""``verify``: hold an implementation to the conformance suite."""

from __future__ import annotations

import argparse

from flce_ref.commands.common import Subparsers, add_command, checked


@checked
def seconds(text: str) -> float:
    """Read a number of seconds, up to a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise ValueError(f"expected a number of seconds > 0 and up to 86400, got {text!r}")
    return value


def add_verify(subparsers: Subparsers) -> None:
    """Declare ``verify``."""
    parser = add_command(subparsers, "verify", run_verify, "hold an implementation to the conformance suite")
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="keyword argument of every call: a Python literal, a torch dtype or a string (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="seconds that one check may take (default 600)"
    )
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda, cuda:1 (default %(default)s)")


def run_verify(args: argparse.Namespace) -> int:
    """Print the report of the suite on one function, run in a process of its own; fail if any check does."""
    from flce_ref.conformance.supervised import run_supervised
    from flce_ref.conformance.target import parse_setting

    try:
        settings = dict(parse_setting(setting) for setting in args.settings)
        report = run_supervised(args.target, args.device, settings, args.timeout)
    except ValueError as error:
        args.parser.error((str(error).splitlines() or [""])[0])
    if args.json:
        args.print_json(report.to_dict())
    else:
        print(report)
    return 0 if report.ok else 1
