"""The picture of the README, light and dark, and its alternative text: ``python book/figures/readme_picture.py``.

One step of the head of Gravity-16B-A3B at 131,072 tokens in bfloat16, naive and fused, simulated, on one scale.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from flce_ref import linear_cross_entropy
from flce_ref.memory import Timeline, simulate
from flce_ref.memory.layout import COLOURS, lay_out, legend_categories, outline
from flce_ref.memory.step_inputs import head_inputs
from flce_ref.models import get

FIGURES = Path(__file__).parent
MODEL = get("gravity-16b-a3b")
TOKENS = 2**17
INK = {"light": "#1f2328", "dark": "#e6edf3"}
GIB = 2**30
GPU = "H100 80 GB"


def draw(timelines: dict[str, Timeline], gpu_gib: float, ink: str) -> None:
    """Both steps side by side, every allocation a band coloured by what it holds."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 4.0), sharey=True, layout="constrained")
    layouts = [lay_out(timeline) for timeline in timelines.values()]
    for ax, layout, (schedule, timeline) in zip(axes, layouts, timelines.items()):
        for band in layout.bands:
            polygons = [polygon / (1, GIB) for polygon in outline(band, layout.edges)]
            colours = {"facecolors": COLOURS[band.category], "edgecolors": "white"}
            ax.add_collection(PolyCollection(polygons, **colours, linewidths=0.3))
        ax.set_title(f"{schedule}: {timeline.peak_bytes / GIB:.1f} GiB", color=ink, fontweight="bold")
        ax.axhline(gpu_gib, color=ink, linewidth=1, linestyle=(0, (4, 3)))
        ax.set_xlim(0, timeline.n_events + 1)
        ax.set_xticks([])
        ax.set_xlabel("one forward and backward", color=ink)
        ax.tick_params(colors=ink)
        ax.spines[["left", "bottom"]].set_color(ink)
        ax.grid(False)
    axes[0].set_ylabel("memory in use, GiB", color=ink)
    axes[0].set_ylim(0, timelines["naive"].peak_bytes / GIB * 1.05)
    right = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    axes[1].annotate(f"all of an {GPU}", (1, gpu_gib), (-2, 4), color=ink, **right)
    handles = [Patch(color=COLOURS[name], label=name) for name in legend_categories(list(timelines.values()), layouts)]
    legend = {"loc": "outside lower center", "ncols": len(handles), "columnspacing": 1.2, "handlelength": 1.2}
    figure.legend(handles=handles, labelcolor=ink, **legend)


def alternative_text(timelines: dict[str, Timeline], gpu_gib: float) -> str:
    naive, fused = (timelines[schedule].peak_bytes / GIB for schedule in ("naive", "fused"))
    return (
        f"GPU memory during one forward and backward of the last layer at {TOKENS:,} tokens. Naive: three tensors of "
        f"the logits' size pile up to {naive:.1f} GiB, more than the {gpu_gib:.1f} GiB of an {GPU}. Fused, on the "
        f"same scale: a thin strip that never exceeds {fused:.1f} GiB."
    )


def main() -> None:
    timelines = {
        schedule: simulate(
            partial(linear_cross_entropy, schedule=schedule),
            *head_inputs(TOKENS, MODEL.vocab_size, MODEL.hidden_size),
            title=schedule,
        )
        for schedule in ("naive", "fused")
    }
    gpus = json.loads((FIGURES.parent / "data" / "gpus.json").read_text(encoding="utf-8"))["gpus"]
    gpu_gib = next(gpu["total_mib"] for gpu in gpus if gpu["name"] == GPU) / 1024
    plt.style.use(FIGURES.parent / "flce.mplstyle")
    for theme, ink in INK.items():
        draw(timelines, gpu_gib, ink)
        plt.savefig(FIGURES / f"readme-{theme}.svg", metadata={"Date": None, "Creator": None})
        plt.close()
    (FIGURES / "readme.txt").write_text(alternative_text(timelines, gpu_gib) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
