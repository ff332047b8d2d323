"""Chapter 12: what every peer scores in the conformance suite, as tables."""

from __future__ import annotations

from typing import Any

from make_figures import read_json
from the_chunk import write_table

SHORT = {
    "torch-native": "F.linear_cross_entropy",
    "torch.compile": "torch.compile",
    "liger-kernel": "Liger",
    "cut-cross-entropy": "Cut Cross-Entropy",
    "quack-kernels": "QuACK",
    "flce-ref": "this library",
}


def runs() -> list[tuple[str, dict[str, Any]]]:
    """(where it ran, run) for every configuration that gave a score."""
    places = ("CPU", "torch_native_verify.json"), ("H200", "h200/verify_peers.json")
    return [(place, run) for place, file in places for run in read_json(file)["runs"] if "checks" in run]


def name_of(run: dict[str, Any]) -> str:
    return f"{SHORT[run['peer']]}, {run['configuration'].replace('LinearCrossEntropyOptions', 'options')}"


def raised(check: dict[str, Any]) -> bool:
    """Whether a failed row is one where the implementation raised an exception, rather than gave a wrong answer."""
    return " It raised " in check["reason"]


def scores() -> None:
    """One line a configuration: rows passed, refused by name, stopped by another exception, wrong."""
    rows = []
    for place, run in runs():
        failed = [check for check in run["checks"] if check["status"] == "failed"]
        stopped = sum(map(raised, failed))
        counts = run["summary"]["passed"], run["summary"]["unsupported"], stopped, len(failed) - stopped
        rows.append((name_of(run), place, *map(str, counts)))
    write_table("scores.csv", ["implementation", "on", "passed", "refused", "raised", "wrong"], rows)


def wrong_answers() -> None:
    """One line for each row that was answered wrongly by somebody: who, and what should be."""
    found: dict[str, tuple[str, list[str]]] = {}
    for _, run in runs():
        for check in run["checks"]:
            if check["status"] == "failed" and not raised(check):
                should = check["reason"].split(" Found:")[0]
                _, who = found.setdefault(check["id"], (should, []))
                peer = SHORT[run["peer"]]
                if peer not in who:
                    who.append(peer)
    rows = [(id, should, ", ".join(who)) for id, (should, who) in sorted(found.items())]
    write_table("wrong_answers.csv", ["row", "what should be", "wrong in"], rows)


def tables() -> None:
    scores()
    wrong_answers()
