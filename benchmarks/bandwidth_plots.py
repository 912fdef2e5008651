"""Plots of what benchmarks/bandwidths.py recorded: errors by rule, and errors against n with their slopes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bandwidth_report import Line, Study, geometric, table, title
from densities import named
from numpy.typing import NDArray

__all__ = ["convergence", "plot_errors"]

Array = NDArray[Any]

COLOURS = {"kde": "#8d99ae", "sdkde": "#d1495b", "laplace": "#00798c"}
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
RATES = {"kde": 4, "sdkde": 8, "laplace": 8}  # r of the rate n^(−r/(r + d))


def plot_errors(lines: Sequence[Line], path: Path, rules: Sequence[str]) -> None:
    """Draw the ratio of every density by method: its rules as dots, the best h as a line; a panel for each d and n."""
    plt = _pyplot()
    study = Study(lines)
    known = [key for key in study.draws if key[0] not in study.real]
    groups = sorted({(study.dimension[name], n) for name, n in known})
    dimensions, sizes = sorted({d for d, _ in groups}), sorted({n for _, n in groups})
    heights = [
        1 + max(sum(study.dimension[name] == d and n == size for name, size in known) for n in sizes)
        for d in dimensions
    ]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(dimensions),
            len(sizes),
            figsize=(4.2 * len(sizes) + 1.5, 0.42 * sum(heights) + 1),
            height_ratios=heights,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        for (d, n), axes in zip(itertools.product(dimensions, sizes), panels.ravel()):
            names = [name for name, size in known if size == n and study.dimension[name] == d]
            axes.set_visible(bool(names))
            axes.set_title(f"d = {d}, n = {n:,}", loc="left", fontweight="bold")
            _panel(axes, study, n, names, rules)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(study.methods), frameon=False)
        figure.suptitle("ISE over that of KDE with Silverman's rule (left is better)", x=0.01, ha="left")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _panel(axes: Any, study: Study, n: int, names: Sequence[str], rules: Sequence[str]) -> None:
    markers = ("o", "s", "^", "D", "v")
    rows = [*names, "geometric mean"]
    for k, method in enumerate(study.methods):
        offset = 0.22 * (k - (len(study.methods) - 1) / 2)
        places = np.arange(len(rows)) + offset
        for rule, marker in zip([*rules, "best"], [*markers[: len(rules)], "|"]):
            values = [study.ratio(name, n, method, rule) for name in names]
            values.append(geometric(values))
            size = 90 if rule == "best" else 26
            axes.scatter(values, places, size, COLOURS[method], marker=marker, label=f"{method}, {rule}", zorder=2)
    axes.axvline(1, color="#2b2d42", lw=0.8, zorder=1)
    axes.axhline(len(names) - 0.5, color="#cccccc", lw=0.8, zorder=1)
    axes.set(xscale="log", yticks=range(len(rows)), yticklabels=rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:g}")


def convergence(lines: Sequence[Line], path: Path | None, rule: str, markdown: bool) -> None:
    """Print the mean ISE by n with fitted slopes, and draw it: of ``rule`` as solid lines, of the best h dashed."""
    study = Study(lines)
    names = [name for name in dict.fromkeys(name for name, _ in study.draws) if name not in study.real]
    fits = {
        (name, method, which): _fit(study, name, method, which)
        for name in names
        for method in study.methods
        for which in {"best", rule}
    }
    for name in names:
        d, sizes = named(name).d, sorted(n for key, n in study.draws if key == name)
        draws = min(len(study.draws[name, n]) for n in sizes)
        rows = []
        for method in study.methods:
            for which in dict.fromkeys(("best", rule)):
                means, slope, error = fits[name, method, which]
                theory = -RATES[method] / (RATES[method] + d)
                cells = (f"{1e3 * mean:.3g}" for mean in means)
                rows.append([f"{method}, {which}", *cells, f"{slope:.2f} ± {error:.2f}", f"{theory:.2f}"])
        title(f"{name}: mean ISE × 1000 of {draws} draws by n, and the slope of its logarithm", markdown)
        table(["", *map(str, sizes), "slope", "rate"], rows, markdown)
    if path is not None:
        _plot_convergence(study, names, fits, path, rule)


def _fit(study: Study, name: str, method: str, rule: str) -> tuple[list[float], float, float]:
    """The mean ISE for every n, the slope of its logarithm by that of n, and the slope's standard error."""
    sizes = sorted(n for key, n in study.draws if key == name)
    draws = [np.array(study.values(name, n, method, rule, "ise")) for n in sizes]
    means = [float(values.mean()) for values in draws]
    x = np.log(sizes) - np.mean(np.log(sizes))
    share = x / (x @ x)
    spread = [values.std() / values.mean() / math.sqrt(len(values)) for values in draws]
    return means, float(share @ np.log(means)), float(np.linalg.norm(share * spread))


def _plot_convergence(study: Study, names: Sequence[str], fits: dict[Any, Any], path: Path, rule: str) -> None:
    plt = _pyplot()
    styles = {"best": {"ls": "--", "lw": 1}} | {rule: {"marker": "o", "ms": 4, "lw": 2}}
    with plt.rc_context(STYLE):
        size = 5.4 * len(names), 4.2
        figure, panels = plt.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
        for name, axes in zip(names, panels[0]):
            d, sizes = named(name).d, sorted(n for key, n in study.draws if key == name)
            for method, (which, style) in itertools.product(study.methods, styles.items()):
                means, slope, _ = fits[name, method, which]
                chosen = "best h" if which == "best" else which
                label = f"{method}, {chosen}: slope −{-slope:.2f} (rate −{RATES[method] / (RATES[method] + d):.2f})"
                axes.plot(sizes, means, color=COLOURS[method], label=label, **style)
            axes.set(xscale="log", yscale="log", xlabel="samples")
            axes.set_title(f"{name.removesuffix(f'-{d}')}, d = {d}", loc="left", fontweight="bold")
            axes.legend(frameon=False)
        panels[0][0].set_ylabel("mean integrated squared error")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
