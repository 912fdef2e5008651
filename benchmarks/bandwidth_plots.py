"""Plots of what benchmarks/bandwidths.py recorded: errors by rule, and errors against n with their slopes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bandwidth_report import Line, Study, geometric, table, title
from densities import named
from numpy.typing import NDArray

from sdkde_core.interop.plots import COLOURS, DARK, STYLE

__all__ = ["convergence", "plot_errors"]

Array = NDArray[Any]

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
    axes.axvline(1, color=DARK, lw=0.8, zorder=1)
    axes.axhline(len(names) - 0.5, color="#cccccc", lw=0.8, zorder=1)
    axes.set(xscale="log", yticks=range(len(rows)), yticklabels=rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:g}")


class Fit(NamedTuple):
    """The mean ISE for every n, and the line through its logarithm over that of n."""

    means: Array  # (sizes,)
    slope: float
    share: Array  # (sizes,) of each logarithm in the slope
    off: list[Array]  # for every size the draws, relative to their mean, less one

    @classmethod
    def of(cls, study: Study, name: str, method: str, rule: str) -> Fit:
        sizes = _sizes(study, name)
        draws = [np.array(study.values(name, n, method, rule, "ise")) for n in sizes]
        means = np.array([values.mean() for values in draws])
        x = np.log(sizes) - np.mean(np.log(sizes))
        share = x / (x @ x)
        return cls(means, float(share @ np.log(means)), share, [d / mean - 1 for d, mean in zip(draws, means)])

    def error(self, other: Fit | None = None) -> float:
        """The standard error of the slope, or of its difference from another's of the same draws."""
        off = self.off if other is None else [a - b for a, b in zip(self.off, other.off)]
        return float(np.linalg.norm([s * o.std() / math.sqrt(len(o)) for s, o in zip(self.share, off)]))


def _sizes(study: Study, name: str) -> list[int]:
    return sorted(n for key, n in study.draws if key == name)


def rate(method: str, d: int) -> float:
    """The power of n with which the best error shrinks."""
    return -RATES[method] / (RATES[method] + d)


def convergence(lines: Sequence[Line], path: Path | None, rule: str, markdown: bool) -> None:
    """Print the mean ISE by n with fitted slopes, and draw it: of ``rule`` as solid lines, of the best h dashed.

    Methods have the same draws. So the difference of their slopes has a smaller error than the slopes have.
    """
    study = Study(lines)
    names = [name for name in dict.fromkeys(name for name, _ in study.draws) if name not in study.real]
    rules = list(dict.fromkeys(("best", rule)))
    fits = {key: Fit.of(study, *key) for key in itertools.product(names, study.methods, rules)}
    for name in names:
        d, rows = named(name).d, []
        for which, method in itertools.product(rules, study.methods):
            fit = fits[name, method, which]
            cells = (f"{1e3 * mean:.3g}" for mean in fit.means)
            slope = f"{fit.slope:.2f} ± {fit.error():.2f}"
            rows.append([f"{method}, {which}", *cells, slope, f"{rate(method, d):.2f}"])
            if method != "kde" and "kde" in study.methods:
                kde = fits[name, "kde", which]
                cells = (f"{ratio:.2f}" for ratio in fit.means / kde.means)
                slope = f"{fit.slope - kde.slope:.3f} ± {fit.error(kde):.3f}"
                rows.append([f"{method} / kde, {which}", *cells, slope, f"{rate(method, d) - rate('kde', d):.3f}"])
        draws = min(len(study.draws[name, n]) for n in _sizes(study, name))
        title(f"{name}: mean ISE × 1000 of {draws} draws by n, and the slope of its logarithm", markdown)
        table(["", *map(str, _sizes(study, name)), "slope", "rate"], rows, markdown)
    if path is not None:
        _plot_convergence(study, names, fits, path, rule)


def _plot_convergence(study: Study, names: Sequence[str], fits: dict[Any, Any], path: Path, rule: str) -> None:
    plt = _pyplot()
    styles = {"best": {"ls": "--", "lw": 1}} | {rule: {"marker": "o", "ms": 4, "lw": 2}}
    with plt.rc_context(STYLE):
        size = 5.4 * len(names), 4.2
        figure, panels = plt.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
        for name, axes in zip(names, panels[0]):
            d, sizes = named(name).d, _sizes(study, name)
            for method, (which, style) in itertools.product(study.methods, styles.items()):
                fit = fits[name, method, which]
                chosen = "best h" if which == "best" else which
                label = f"{method}, {chosen}: slope −{-fit.slope:.2f} (rate −{-rate(method, d):.2f})"
                axes.plot(sizes, fit.means, color=COLOURS[method], label=label, **style)
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
