"""Chapter 10: the recorded training runs, and how far they drift apart."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from make_figures import read_json, save, write_json

GIB = 2**30


def training() -> None:
    """Loss curves of the three runs, and their distance from the naive one."""
    runs = read_json("h200/train.json")["runs"]
    losses = {name: np.array(run["losses"]) for name, run in runs.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.6))
    left.plot(losses["naive"], linewidth=4, alpha=0.4, label="naive")
    left.plot(losses["fused"], label="fused")
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    apart = {name: np.maximum(np.abs(losses[name] - losses["naive"]), 1e-6) for name in losses if name != "naive"}
    noise = np.array([distance for name, distance in apart.items() if name != "fused"])
    for number, distance in enumerate(noise):
        label = None if number else "naive, reordered"
        right.semilogy(distance, linewidth=1, color="C0", alpha=0.5, label=label)
    right.semilogy(apart["fused"], linewidth=1.5, color="C1", label="fused")
    right.set(xlabel="step", ylabel="difference from naive")
    right.legend()
    states = 16 * runs["fused"]["parameters"]
    derived = {
        "last_loss": {name: float(np.mean(values[-20:])) for name, values in losses.items()},
        "largest": {"noise": float(noise.max()), "fused": float(apart["fused"].max())},
        "mean": {"noise": sorted(map(float, noise.mean(axis=1))), "fused": float(apart["fused"].mean())},
        "step_saved": 1 - runs["fused"]["step_ms"] / runs["naive"]["step_ms"],
        "parameters_million": runs["fused"]["parameters"] / 1e6,
        "states_bytes": states,
    }
    write_json("derived/training.json", derived)
    said = "; ".join(f"{name} {value:.3f}" for name, value in derived["last_loss"].items())
    save(
        "training",
        figure,
        f"Left, the losses of the naive and the fused run lie on each other; means of the last 20 steps: {said}. "
        "Right, on a logarithmic axis, the differences from the naive run, all small at first and growing: at most "
        f"{derived['largest']['noise']:.2f} for the reordered runs, {derived['largest']['fused']:.2f} for the fused.",
    )
