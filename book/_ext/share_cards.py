"""The picture that stands for a page where its link is shared: its title, its first sentence, and the spike."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib.figure import Figure

SIZE = (1200, 630)  # pixels: what Open Graph's readers show uncut
SPIKE = [
    (0, 0.02),
    (0.30, 0.16),
    (0.42, 0.16),
    (0.45, 0.5),
    (0.47, 0.75),
    (0.5, 1.0),
    (0.54, 0.62),
    (0.56, 0.14),
    (1, 0.02),
]
FUSED = [(0, 0.02), (0.30, 0.16), (0.56, 0.18), (1, 0.02)]


def draw(path: Path, title: str, about: str, book: str) -> None:
    """Write the card to ``path``."""
    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor="#14181e")
    axes = figure.add_axes((0, 0, 1, 0.34))
    axes.set(xlim=(0, 1), ylim=(0, 1.15))
    axes.axis("off")
    axes.fill(*zip(*SPIKE, (1, 0), (0, 0)), color="#d55e00", alpha=0.85, linewidth=0)
    axes.fill(*zip(*FUSED, (1, 0), (0, 0)), color="#009e73", linewidth=0)
    ink = {"color": "#e6edf3", "va": "top", "x": 0.06, "parse_math": False}
    figure.text(y=0.92, s=book, fontsize=20, **(ink | {"color": "#9da7b1"}))
    lines = textwrap.wrap(title, 30, max_lines=2, placeholder=" …")
    figure.text(y=0.83, s="\n".join(lines), fontsize=44, fontweight="bold", linespacing=1.15, **ink)
    below = 0.83 - 0.13 * len(lines) - 0.03
    figure.text(
        y=below,
        s="\n".join(textwrap.wrap(about, 76, max_lines=3, placeholder=" …")),
        fontsize=20,
        linespacing=1.4,
        **ink,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})
