"""Run the labs as if on other machines: what would they choose on a T4, on an A100, without a GPU?

    python notebooks/run_pretended.py --log book/data/labs/pretended.json [LAB.ipynb …]

Every cell of every lab is run, on the CPU. Before the first one, :func:`flce_ref.machine.this_machine` is replaced by
one that describes the pretended GPU. A cell that asks how many tokens fit gets its answer worked out and noted, and
then 0: there is no such GPU to run them on. The log says which labs ran, what they chose, and with which versions. With
another PyTorch, run this with another interpreter; what it finds is added to the log under that version.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

# name → (as torch reports it, compute capability, GiB free): a fresh Colab runtime's T4, and a 40 GiB A100.
MACHINES: dict[str, tuple[str, tuple[int, int], float] | None] = {
    "none": None,
    "T4": ("Tesla T4", (7, 5), 14.6),
    "A100": ("NVIDIA A100-SXM4-40GB", (8, 0), 39.0),
}

PRETEND = """
import json
from dataclasses import dataclass, field
from flce_ref import machine as _machine

@dataclass(frozen=True)
class _Pretended(_machine.Machine):
    free_gib: float = 0.0

    def free_bytes(self):
        return int(self.free_gib * 2**30)

    def tokens(self, most, needs):
        on_it = _Pretended("cuda", self.name, self.half, self.free_gib)
        n = _machine.Machine.tokens(on_it, most, needs)
        taken = needs(n) if n else needs(most)
        half = str(self.half).removeprefix("torch.")
        print("CHOSE", json.dumps({"tokens": n, "of": most, "GiB": round(taken / 2**30, 2), "dtype": half}))
        return 0  # there is no such GPU here

_name, _capability, _free = %r
_machine.this_machine = lambda: _Pretended("cpu", _name, _machine.half_dtype(_capability), _free)
"""


def run(path: Path, pretended: tuple[str, tuple[int, int], float] | None, timeout: int = 600) -> dict[str, Any]:
    """Run the lab at `path` and say how it went; the file is left as it is."""
    notebook = nbformat.read(path, as_version=4)
    if pretended is not None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(PRETEND % (pretended,)))
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    started = time.monotonic()
    try:
        client.execute()
    except CellExecutionError as error:
        return {"ran": False, "error": f"{error.ename}: {error.evalue}"[:300]}
    printed = [o.text for c in notebook.cells for o in c.get("outputs", ()) if o.get("name") == "stdout"]
    chosen = [
        json.loads(line.removeprefix("CHOSE "))
        for text in printed
        for line in text.splitlines()
        if line.startswith("CHOSE ")
    ]
    result: dict[str, Any] = {"ran": True, "seconds": round(time.monotonic() - started)}
    return result | {"chosen": chosen} if pretended else result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("labs", nargs="*", type=Path, metavar="LAB.ipynb", help="by default all")
    parser.add_argument("--log", type=Path, metavar="FILE", help="add the results to this JSON file")
    given = parser.parse_args(arguments)
    labs = given.labs or sorted(Path(__file__).parent.glob("*.ipynb"))
    results: dict[str, dict[str, Any]] = {}
    for name, pretended in MACHINES.items():
        for lab in labs:
            results.setdefault(name, {})[lab.stem] = found = run(lab, pretended)
            print(f"{name:5s} {lab.stem:24s} {found}", flush=True)
            for choice in found.get("chosen", ()):
                assert pretended is not None and choice["GiB"] <= pretended[2], f"{choice} does not fit"
    if given.log:
        _add(given.log, results)
    return 0 if all(found["ran"] for by_lab in results.values() for found in by_lab.values()) else 1


def _add(log: Path, results: dict[str, dict[str, Any]]) -> None:
    """Put the results of this PyTorch into the log; labs that were not run now keep theirs."""
    document = json.loads(log.read_text(encoding="utf-8")) if log.exists() else {}
    version = torch.__version__.partition("+")[0]
    document |= {
        "what": "The labs run on a CPU as if on other machines: what each chose and whether it ran to its end",
        "command": "python notebooks/run_pretended.py --log book/data/labs/pretended.json",
        "machines": {name: pretended for name, pretended in MACHINES.items() if pretended},
    }
    runs = document.setdefault("runs", {})
    before = runs.get(version, {}).get("labs", {})
    runs[version] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": version},
        "system": platform.system(),
        "labs": {name: before.get(name, {}) | by_lab for name, by_lab in results.items()},
    }
    log.write_text(json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
