"""Make the figures of the chapters and the data behind them: ``python book/figures/make_figures.py [NAME …]``.

Every figure is ``NAME.svg``, its alternative text ``NAME.txt`` and, for timelines, ``NAME.timelines.json`` for the
viewer, beside this file; ``{drawn} NAME`` puts them on a page. What was computed for it goes to ``book/data/``, where
``{value}`` reads it. Two runs give the same bytes. Without names, everything is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from flce_ref.memory import Timeline
from flce_ref.memory.viewer import contents

FIGURES = Path(__file__).parent
DATA = FIGURES.parent / "data"


def save(name: str, figure: Figure, alt: str, timelines: Sequence[Timeline] = ()) -> None:
    """Write the picture ``name``, its alternative text and, if ``timelines`` are given, what the viewer shows."""
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    (FIGURES / f"{name}.txt").write_text(alt + "\n", encoding="utf-8")
    if timelines:
        write_timelines(name, timelines)


def write_timelines(name: str, timelines: Sequence[Timeline]) -> None:
    """Write what the interactive viewer of figure ``name`` shows."""
    text = json.dumps(contents(timelines), separators=(",", ":"), ensure_ascii=False)
    (FIGURES / f"{name}.timelines.json").write_text(text + "\n", encoding="utf-8")


def write_json(name: str, document: Any) -> None:
    """Write ``book/data/name`` so that a diff shows one row a line."""
    text = json.dumps(document, ensure_ascii=False, indent=1)
    (DATA / name).parent.mkdir(exist_ok=True)
    (DATA / name).write_text(text + "\n", encoding="utf-8")


def read_json(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def main() -> None:
    import one_naive_step
    import the_chunk
    import the_kernel
    import the_plateau
    import the_spike
    import the_suite
    import the_tiles
    import the_training_run
    import whole_steps

    makers: dict[str, Callable[[], None]] = {
        "models": the_spike.models_table,
        "context": the_spike.context,
        "whole-step": whole_steps.whole_step,
        "whole-step-recorded": the_spike.whole_step_recorded,
        "naive-step": one_naive_step.naive_step,
        "chunked-step": the_plateau.chunked_step,
        "plateau": the_plateau.plateau,
        "dw-error": the_plateau.dw_error,
        "kernel-versions": the_kernel.kernel_versions,
        "roofline": the_kernel.roofline,
        "memory-and-time": the_chunk.memory_and_time,
        "parts-of-a-chunk": the_chunk.parts_of_a_chunk,
        "lengths": the_chunk.lengths,
        "chunk-tables": the_chunk.tables,
        "two-cuts": the_tiles.two_cuts,
        "which-cut": the_tiles.which_cut,
        "cut-times": the_tiles.cut_times,
        "tile-tables": the_tiles.table_of_cuts,
        "training": the_training_run.training,
        "suite-tables": the_suite.tables,
    }
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(makers)}; all without")
    names = parser.parse_args().names or list(makers)
    unknown = sorted(set(names) - set(makers))
    if unknown:
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(makers)}")
    plt.style.use(FIGURES.parent / "flce.mplstyle")
    for name in names:
        print(f"making {name}", file=sys.stderr, flush=True)
        makers[name]()


if __name__ == "__main__":
    # Under its own name too, so that the modules beside it find it imported already.
    sys.modules["make_figures"] = sys.modules["__main__"]
    main()
