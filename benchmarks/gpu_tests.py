"""Run the tests marked ``gpu`` and the labs on this machine's GPU, and keep what they printed, with its provenance.

    python benchmarks/gpu_tests.py --out book/data/h200

writes ``gpu_tests.json``: for each run its date, command, exit status, seconds, pytest's counts and its last lines. The
labs run under ``--nbval-lax``: their cells must not fail, assertions included, but print this machine's numbers. A run
that is skipped keeps what the file has of it. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref.benchmark import provenance  # noqa: E402

N_WORKERS = 8
WORKERS = ["-n", str(N_WORKERS), "-q", "-p", "no:cacheprovider"]
RUNS = {
    "tests": ["-m", "gpu", "tests", *WORKERS, "--dist", "worksteal"],
    "labs": [
        "--nbval-lax",
        "--nbval-current-env",
        "--nbval-cell-timeout=240",
        "notebooks",
        *WORKERS,
        "--dist",
        "loadfile",
    ],
}
SANITIZER = ["bash", "tests/gpu/sanitize.sh"]


def run(command: list[str], lines: int) -> dict[str, Any]:
    """The outcome of ``command``, whose output is also shown as it comes."""
    date, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        printed.append(line.rstrip())
    status = process.wait()
    shown = " ".join(["python", *command[1:]] if command[0] == sys.executable else command)
    return {
        "date": date,
        "command": shown,
        "exit_status": status,
        "seconds": round(time.perf_counter() - began, 1),
        "output": [without_paths(line) for line in printed[-lines:]],
    }


def without_paths(line: str) -> str:
    """A line without the places where this checkout and this Python happen to lie."""
    for prefix, name in ((sys.prefix, "python"), (str(ROOT), ".")):
        line = line.replace(prefix, name).replace(os.path.relpath(prefix, ROOT), name)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write gpu_tests.json to")
    parser.add_argument("--skip", action="append", default=[], choices=(*RUNS, "sanitizer"), help="a run to leave out")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Each worker's share of the cores: eight that take all of them each make cells time out.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // N_WORKERS)))
    commands = {name: [sys.executable, "-m", "pytest", *options] for name, options in RUNS.items()}
    commands["sanitizer"] = SANITIZER
    file = args.out / "gpu_tests.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else {}
    document: dict[str, Any] = {
        "provenance": provenance()
        | {
            "what": "What the tests marked gpu, the labs and compute-sanitizer printed",
            "command": "python benchmarks/gpu_tests.py --out book/data/h200",
        },
        "runs": {name: outcome for name, outcome in recorded.items() if name in args.skip},
    }
    for name, command in commands.items():
        if name not in args.skip:
            document["runs"][name] = run(command, lines=60 if name == "sanitizer" else 25)
            text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
            file.write_text(text, encoding="utf-8")
    return int(any(outcome["exit_status"] for outcome in document["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
