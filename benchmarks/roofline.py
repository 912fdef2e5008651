"""Roofline of the methods' passes on a GPU, from the cost model: docs/roofline.png.

    python benchmarks/roofline.py [--gpus a6000 h200] [-o docs/roofline.png]

Operations per byte of a 64 × 1024 tile that keeps nothing between tiles, against the card's memory, its Tensor Cores
and its fp32 units; and, per pass, the ceiling that its exponentials set: a marker above the roof says that the roof,
and not the exponentials, is what limits a kernel without reuse between tiles.
"""

from __future__ import annotations

import argparse
from typing import Any

import matplotlib
import numpy as np

from sdkde_core.choice import cards, cost
from sdkde_core.protocol import Problem, Reduction

PASSES = {
    Reduction.LOG_SUM: ("kde; last pass of sdkde", "o"),
    Reduction.MEAN: ("first pass of sdkde", "s"),
    Reduction.LAPLACE: ("laplace", "^"),
}
COLOURS = {4: "#8d99ae", 16: "#d1495b", 64: "#00798c"}
TILE = (64, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=["a6000", "h200"])
    parser.add_argument("-o", "--output", default="docs/roofline.png")
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cards = [cards.gpu(name) for name in arguments.gpus]
    figure, axes = plt.subplots(1, len(cards), figsize=(6.4 * len(cards), 5), sharey=True, layout="constrained")
    axes = np.atleast_1d(axes)
    for ax, card in zip(axes, cards):
        assert card is not None, f"unknown GPU among {arguments.gpus}"
        _draw(ax, card.at())
    axes[0].set_ylabel("TFLOP/s")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(arguments.output, dpi=130)
    print(arguments.output)


def _draw(ax: Any, on: cards.Processor) -> None:
    x = np.geomspace(1, 3000, 200)
    units = {"fp16": on.matrix_flops["float16"], "TF32": on.matrix_flops["tf32"], "fp32": on.scalar_flops}
    for label, peak in units.items():
        ax.plot(x, np.minimum(x * on.bandwidth, peak) / 1e12, color="#2b2d42", lw=1.2)
        ax.text(2900, peak / 1e12 * 1.06, label, ha="right", fontsize=9)
    ax.text(1.1, 1.3 * on.bandwidth / 1e12, f"memory, {on.bandwidth / 1e12:.2g} TB/s", rotation=37, fontsize=8)
    for d, colour in COLOURS.items():
        for reduction, (label, marker) in PASSES.items():
            work = cost.tiled(Problem(reduction, 32768, 32768, d, precision="fast"), *TILE)
            operations = sum(work.matrix_flops.values()) + work.scalar_flops
            ceiling = operations / cost.roofs(work, on)["exp"] / 1e12
            at = cost.intensity(work)
            ax.plot([at, at], [0.5, ceiling], color=colour, lw=0.8, alpha=0.5)
            ax.plot(at, ceiling, marker, color=colour, ms=8, label=label if d == 16 else None, zorder=3)
            if reduction is Reduction.MEAN:
                ax.text(at * 1.12, ceiling, f"d = {d}", color=colour, fontsize=9, va="center")
    ax.set(xscale="log", yscale="log", xlim=(1, 3000), ylim=(0.5, 2000), xlabel="operations per byte of a tile")
    ax.set_title(f"{on.name}: markers where the exponentials run out", loc="left", fontweight="bold", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
