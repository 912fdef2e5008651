"""Few samples: single draws at which the default might look wrong, beside KDE with Silverman's rule.

    python benchmarks/few.py [--seed 1] [--draws 1000] [--sizes 2,4,8,20,50]

Of the normal, the exponential, a bimodal law and t₃: the geometric mean of the integrated squared error of the default
over that of KDE with Silverman's rule on the same draw, and the worst draw; errors on 2,001 points.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

import sdkde_core

LAWS: dict[str, tuple[Callable[[Any, int], Any], Callable[[Any], Any], tuple[float, float]]] = {
    "normal": (lambda rng, n: rng.normal(size=n), stats.norm.pdf, (-8.0, 8.0)),
    "exponential": (lambda rng, n: rng.exponential(size=n), stats.expon.pdf, (-6.0, 20.0)),
    "bimodal": (
        lambda rng, n: rng.choice([-1.5, 1.5], n) + 0.5 * rng.normal(size=n),
        lambda x: 0.5 * stats.norm.pdf(x, -1.5, 0.5) + 0.5 * stats.norm.pdf(x, 1.5, 0.5),
        (-8.0, 8.0),
    ),
    "t3": (lambda rng, n: rng.standard_t(3, size=n), lambda x: stats.t.pdf(x, 3), (-40.0, 40.0)),
}


def ratio(x: Any, density: Callable[[Any], Any], ends: tuple[float, float]) -> float:
    """The error of the default over that of KDE with Silverman's rule."""
    y = np.linspace(min(ends[0], x.min() - 5.0), max(ends[1], x.max() + 5.0), 2001)
    methods: list[dict[str, Any]] = [{}, {"method": "kde", "bandwidth": "silverman"}]
    ours, theirs = (np.sum((sdkde_core.estimate(x, y, backend="numpy", **how) - density(y)) ** 2) for how in methods)
    return float(ours / theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 8, 20, 50])
    given = parser.parse_args()
    print("| n | law | geometric mean | worst draw |\n|---:|---|---:|---:|")
    for n in given.sizes:
        for k, (name, (draw, density, ends)) in enumerate(LAWS.items()):
            rng = np.random.default_rng([given.seed, n, k])
            ratios = [ratio(draw(rng, n), density, ends) for _ in range(given.draws)]
            print(f"| {n} | {name} | {np.exp(np.mean(np.log(ratios))):.2f} | {max(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
