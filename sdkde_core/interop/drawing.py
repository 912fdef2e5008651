"""What plots are drawn with: style, ranges, curves, and contours that enclose shares of the probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, numbers
from ..estimator.mixture import components
from ..estimator.prepared import Prepared
from ..messages import optional

#: A colour for each method. They stay apart where a kind of cone is missing; line styles help.
COLOURS = {"kde": "#8d99ae", "sdkde": "#d1495b", "laplace": "#00798c"}
DARK = "#2b2d42"

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}  # of new figures, for rc_context


class Drawn(NamedTuple):
    """A density with its label and colour."""

    label: str
    density: Prepared
    colour: str

    @property
    def line(self) -> dict[str, Any]:
        return {"lw": 1.5, "ls": "--"} if self.density.method == "laplace" else {"lw": 2, "ls": "-"}


def labelled(densities: Any, d: int | None = None, instead: str = "") -> list[Drawn]:
    """The densities by label, with colours; of ``d`` dimensions, else of as many as the first."""
    if isinstance(densities, Prepared):
        densities = {densities.method: densities}
    if not isinstance(densities, Mapping) or not densities:
        raise TypeError(f"densities is {kind(densities)}; pass what sdkde_core.prepare returns, or a dict of those")
    drawn: list[Drawn] = []
    for label, density in densities.items():
        if not isinstance(density, Prepared):
            raise TypeError(f"densities[{label!r}] is {kind(density)}; pass what sdkde_core.prepare returns")
        d = d or density.n_dimensions
        if density.n_dimensions != d:
            instead = instead or "pass densities of the same samples"
            raise ValueError(f"densities[{label!r}] has {density.n_dimensions} dimensions instead of {d}; {instead}")
        taken = {one.colour for one in drawn}
        known = COLOURS[density.method], "#edae49", "#c77dff", DARK, *COLOURS.values()
        free = (colour for colour in known if colour not in taken)
        drawn.append(Drawn(str(label), density, next(free, DARK)))
    return drawn


def kind(value: Any) -> str:
    """What ``value`` is, for a message."""
    return "an empty dict" if isinstance(value, Mapping) and not value else f"of type {type(value).__name__}"


def points_of(samples: Any, d: int) -> Array:
    """The samples on the host, (n, d)."""
    x = numbers("samples", samples)
    x = x[:, None] if x.ndim == 1 and d == 1 else x
    if x.ndim != 2 or x.shape[1] != d:
        raise ValueError(f"samples has shape {x.shape}, but the density has {d} dimensions: pass shape (n, {d})")
    return x


def shares_of(shares: Sequence[float]) -> Array:
    """The shares, descending."""
    found = np.unique(np.asarray(shares, dtype=np.float64))[::-1]
    if not found.size or not (found > 0).all() or not (found < 1).all():
        raise ValueError(f"shares is {shares!r}; pass numbers between 0 and 1, such as (0.5, 0.8, 0.95)")
    return found


def style() -> Any:
    """:data:`STYLE`, for what is made within; ImportError without matplotlib."""
    return optional("matplotlib", "plots need matplotlib", "plot").rc_context(STYLE)


def axes_of(ax: Any) -> Any:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    with style():
        from matplotlib import pyplot

        return pyplot.subplots(layout="constrained")[1]


def _grid(
    drawn: Sequence[Drawn],
    j: int,
    per_bandwidth: int,
    fewest: int,
    most: int,
    tail: float = 0.005,
    limits: tuple[float, float] | None = None,
) -> Array:
    """Points of dimension ``j`` to draw all densities at: so many for the smallest of their bandwidths.

    By default they span the samples less the share ``tail`` at each end, a tenth more and four bandwidths.
    """
    ends, widths = [], []
    for one in drawn:
        means, weights, covariance = components(one.density._fitted)
        means, weights = means[weights > 0], weights[weights > 0]
        x, h = means[:, j], float(np.sqrt(covariance[j, j]))
        low, high = np.quantile(x, [tail, 1 - tail], weights=weights, method="inverted_cdf")
        more = 0.1 * (high - low) + 4.0 * h
        ends.append((max(low - more, x.min() - 4.0 * h), min(high + more, x.max() + 4.0 * h)))
        widths.append(h)
    low, high = limits or (float(min(low for low, _ in ends)), float(max(high for _, high in ends)))
    return np.linspace(low, high, int(np.clip(per_bandwidth * (high - low) / min(widths), fewest, most)))


def some(n: int) -> slice:
    """Which of n samples to draw: at most 2,000, as more would be a black bar."""
    return slice(None, None, -(-n // 2000) or 1)


def draw_curves(ax: Any, drawn: Sequence[Drawn], rug: Array | None, limits: tuple[float, float] | None) -> None:
    """Draw curves over what is in the axes; ``rug``: the samples for it, (n, 1)."""
    x = _grid(drawn, 0, 8, 400, 4000, limits=limits)
    baseline = ax.axhline(0, color="#adb5bd", lw=0.8, zorder=0)
    baseline.sticky_edges.y.append(0)  # a density begins on the axis
    ax.margins(x=0)
    for one in drawn:
        y = one.density.estimate(x)
        ax.plot(x, y, color=one.colour, label=one.label, **one.line)
        if (y < 0).any():
            look = {"facecolor": "none", "edgecolor": one.colour, "hatch": "//////", "lw": 0}
            ax.fill_between(x, y, 0, where=y < 0, interpolate=True, label=f"{one.label} < 0", **look)
    if rug is not None:
        there = rug[(rug >= x[0]) & (rug <= x[-1])]
        there = there[some(len(there))]
        alpha = float(np.clip(100 / max(len(there), 1), 0.1, 0.5))
        look = {"color": DARK, "alpha": alpha, "ms": 6, "transform": ax.get_xaxis_transform(), "label": "_samples"}
        ax.plot(there, np.full(len(there), 0.015), "|", **look)  # at a height that is a part of the axes'


def draw_contours(ax: Any, drawn: Sequence[Drawn], dots: Array | None, shares: Array, labels: bool) -> None:
    """Draw contours over what is in the axes; ``dots`` are the samples, shares descend, and ``labels`` writes them."""
    tail = min(0.005, (1 - shares[0]) / 8)  # so that the largest share is within
    x, y = (_grid(drawn, j, 2, 80, 200, tail) for j in (0, 1))
    where = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    cell = (x[1] - x[0]) * (y[1] - y[0])
    for one in drawn:
        values = one.density.estimate(where).reshape(len(y), len(x))
        # The densities above which the shares lie; ascending, as the shares descend.
        heights = np.sort(values, axis=None)[::-1]
        levels = np.interp(shares, np.maximum.accumulate(np.cumsum(heights)) * cell, heights)
        if len(drawn) == 1:
            shades = [(one.colour, alpha) for alpha in np.linspace(0.2, 0.7, len(levels))]
            ax.contourf(x, y, values, [*levels, 2 * values.max()], colors=shades, zorder=1)
        lines = ax.contour(x, y, values, levels, colors=one.colour, linewidths=1.2, linestyles=one.line["ls"])
        if labels and one is drawn[0]:  # those of the others lie beside them
            ax.clabel(lines, fmt={level: f"{100 * share:g}%" for level, share in zip(levels, shares)}, fontsize=8)
        floor = -1e-3 * values.max()  # far out all of laplace's is negative
        if values.min() < floor:
            below = ax.contourf(x, y, values, [2 * values.min(), floor], colors="none", hatches=["////"])
            below.set(edgecolor=one.colour, linewidth=0)
    if dots is not None:
        there = dots[((dots >= [x[0], y[0]]) & (dots <= [x[-1], y[-1]])).all(axis=1)]
        ax.plot(*there[some(len(there))].T, ".", color=DARK, alpha=0.35, ms=2, mew=0, zorder=1.5, label="_samples")
