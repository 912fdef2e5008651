"""Plots of prepared densities, of the moves of debiasing, and of how a bandwidth was chosen.

Public as ``sdkde_core.plots``. Each function draws into the axes or the figure it is given, else into a new figure of
pyplot, and returns what it drew into. So plots are laid over one another by passing the axes on. Without a display
pyplot draws into memory, for ``ax.figure.savefig``. matplotlib is imported when a plot is drawn, pyplot only where a
figure has to be made: ``pip install 'sdkde-core[plot]'``, which an ImportError says where it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from ..api import prepare
from ..arrays import Array, numbers, to_host
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.selection import Selection
from ..estimator.integrals import thresholds
from ..estimator.mixture import components, indices
from ..estimator.prepared import Prepared
from ..messages import optional

__all__ = ["COLOURS", "DARK", "STYLE", "contours", "curves", "moves", "pairs", "scatter", "selection"]


#: A colour for each method. They stay apart where a kind of cone is missing; line styles help.
COLOURS = {"kde": "#8d99ae", "sdkde": "#d1495b", "laplace": "#00798c"}
DARK = "#2b2d42"

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}  # of new figures, for rc_context


def curves(densities: Any, samples: Any = None, *, ax: Any = None, limits: tuple[float, float] | None = None) -> Any:
    """Draw densities of one dimension as curves, with a rug of the samples.

    Where a signed density is below zero the area is hatched, and the legend says so. TypeError or ValueError for what
    is no prepared density, or not of one dimension.

    Parameters
    ----------
    densities : Prepared, or dict of str to Prepared
        From :func:`sdkde_core.prepare`, by label; a single one is labelled by its method.
    samples : (n,) or (n, 1) array_like, optional
        For the rug; of more than 2000 some are left out evenly.
    ax : matplotlib.axes.Axes, optional
    limits : (float, float), optional
        Where the curves begin and end. Default: the middle 99 percent of the samples, and some bandwidths more.
    """
    drawn = _labelled(densities, 1, "pass density.marginal(j) for dimension j, or draw them all with plots.pairs")
    rug = None if samples is None else _points_of(samples, 1)
    if limits is not None:
        ends = np.asarray(limits, dtype=np.float64)
        if ends.shape != (2,) or not np.isfinite(ends).all() or ends[0] >= ends[1]:
            raise ValueError(f"limits is {limits!r}; pass two finite numbers, the lower one first")
        limits = float(ends[0]), float(ends[1])
    ax = _axes_of(ax)
    _draw_curves(ax, drawn, rug, limits)
    ax.set_ylabel("density")
    _name_axes(ax, drawn[0].density)
    ax.legend(frameon=False)
    return ax


def contours(densities: Any, samples: Any = None, *, ax: Any = None, shares: Sequence[float] = (0.5, 0.8, 0.95)) -> Any:
    """Draw densities of two dimensions as contours that enclose given shares of the probability.

    A contour is the border of the smallest region with its share, found on a grid. A single density is filled; several
    are lines. Where a signed density is below zero, by more than a thousandth of its highest value, it is hatched.
    TypeError or ValueError for what is no prepared density, or not of two dimensions.

    Parameters
    ----------
    densities : Prepared, or dict of str to Prepared
        As for :func:`curves`.
    samples : (n, 2) array_like, optional
        Drawn as dots; of more than 2000 some are left out evenly.
    ax : matplotlib.axes.Axes, optional
        The ``ContourSet`` that it gets has the density at each contour in ``levels``.
    shares : sequence of float
        Between 0 and 1.
    """
    drawn = _labelled(densities, 2, "pass density.marginal((i, j)), or draw all pairs with plots.pairs")
    enclosed = _shares_of(shares)
    dots = None if samples is None else _points_of(samples, 2)
    ax = _axes_of(ax)
    _draw_contours(ax, drawn, dots, enclosed, labels=True)
    _name_axes(ax, drawn[0].density)
    if len(drawn) > 1:
        for one in drawn:
            ax.plot([], [], color=one.colour, label=one.label, **one.line)
        ax.legend(frameon=False)
    return ax


def moves(density: Prepared, samples: Any, *, ax: Any = None) -> Any:
    """Draw arrows from the samples to where debiasing has moved them, in two dimensions.

    ValueError for another method, other dimensions, or other samples than it was prepared from.

    Parameters
    ----------
    density : Prepared
        Of the method sdkde. Of more dimensions pass ``density.marginal((i, j))`` and ``samples[:, [i, j]]``.
    samples : (n, 2) array_like
        What it was prepared from; of more than 2000 some are left out evenly.
    ax : matplotlib.axes.Axes, optional
    """
    _labelled(density, 2, "pass density.marginal((i, j)) and samples[:, [i, j]]")
    if density.method != "sdkde":
        raise ValueError(f"density has method={density.method!r}, which moves no samples; prepare with method='sdkde'")
    start = _points_of(samples, 2)
    if len(start) != density.n_train:
        raise ValueError(f"samples are {len(start)}, but density was prepared from {density.n_train}: pass those")
    step = density.mixture().means[: len(start)] - start
    ax = _axes_of(ax)
    few = _some(len(start))
    look = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.0025, "color": DARK, "alpha": 0.75}
    ax.quiver(*start[few].T, *step[few].T, **look)
    _name_axes(ax, density)
    return ax


def scatter(
    points: Any, density: Prepared | None = None, *, ax: Any = None, colorbar: bool = True, cmap: Any = "viridis",
    size: float | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Draw points of two dimensions as dots, coloured by the density where they are, the densest last.

    The dots are an image in vector formats. A million points take seconds with finufft
    (``pip install 'sdkde-core[fourier]'``), most of them to estimate the density, and without it much longer: then pass
    a density of some of the points, ``prepare(points[::20])``. ValueError for other shapes, TypeError for another
    density.

    Parameters
    ----------
    points : (n, 2) array_like
        Of a data frame the columns' names become the labels of the axes.
    density : Prepared, optional
        Default: :func:`sdkde_core.prepare` of the points.
    ax : matplotlib.axes.Axes, optional
        Its last ``PathCollection`` has the densities, in ascending order: ``ax.collections[-1].set_norm("log")``.
    colorbar : bool
        Draw a colour bar beside the axes.
    cmap : str or matplotlib.colors.Colormap
    size : float, optional
        Area of a dot in square points; by default from 0.5 for many points to 20 for few.
    **options
        For :func:`sdkde_core.prepare`, such as ``bandwidth``, where no density is given.

    Examples
    --------
    >>> import numpy as np
    >>> from sdkde_core import plots
    >>> x = np.random.default_rng(0).normal(size=(2000, 2))
    >>> ax = plots.scatter(x, bandwidth=0.3)
    """
    if isinstance(points, Prepared):
        raise TypeError("points is a Prepared; pass the points first and the density second: scatter(points, density)")
    xy = _points_of(points, 2, "points")
    if density is None:
        density = prepare(points, **options)
    elif not isinstance(density, Prepared):
        raise TypeError(f"density is {_kind(density)}; pass what sdkde_core.prepare returns, or None")
    elif options:
        name = next(iter(options))
        raise TypeError(f"{name}= is for the density of the points, but density was passed: leave one out")
    _labelled(density, 2, "pass density.marginal((i, j)) and points[:, [i, j]]")
    values = to_host(density.estimate(xy))
    order = np.argsort(values, kind="stable")
    ax = _axes_of(ax)
    area = float(np.clip(2e4 / max(len(xy), 1), 0.5, 20.0)) if size is None else size
    drawn = ax.scatter(*xy[order].T, s=area, c=values[order], cmap=cmap, linewidths=0, rasterized=True)
    if colorbar:
        ax.figure.colorbar(drawn, ax=ax, label="density")
    _name_axes(ax, density)
    return ax


def pairs(
    densities: Any, samples: Any = None, *, dims: Sequence[Any] | None = None, labels: Sequence[str] | None = None,
    shares: Sequence[float] = (0.5, 0.8, 0.95), figure: Any = None,
) -> Any:  # fmt: skip
    """Draw every marginal density of one dimension and of two: curves on the diagonal, contours below.

    Returns the figure. TypeError or ValueError for what are no prepared densities of the same dimensions.

    Parameters
    ----------
    densities : Prepared, or dict of str to Prepared
        As for :func:`curves`.
    samples : (n, d) array_like, optional
        Drawn as dots and rugs; of more than 2000 some are left out evenly.
    dims : sequence of int, optional
        Which dimensions, of a data frame also by name; all by default, which must be 8 at most.
    labels : sequence of str, optional
        Their names, as many as are drawn; those of a data frame's columns by default.
    shares : sequence of float
        That the contours enclose.
    figure : matplotlib.figure.Figure or SubFigure, optional
    """
    drawn = _labelled(densities)
    d = drawn[0].density.n_dimensions
    if dims is None and d > 8:
        raise ValueError(f"densities have {d} dimensions, too many to draw all pairs of; pass some as dims=[...]")
    fitted = drawn[0].density._fitted
    shown = indices("dims", fitted, range(d) if dims is None else dims)
    if labels is None:
        labels = [fitted.names[j] if fitted.names else f"x{j}" for j in shown]
    if len(labels) != len(shown):
        raise ValueError(f"labels are {len(labels)}, but {len(shown)} dimensions are drawn: pass one for each")
    enclosed = _shares_of(shares)
    points = None if samples is None else _points_of(samples, d)
    k = len(shown)
    with _style():
        if figure is None:
            from matplotlib import pyplot

            figure = pyplot.figure(figsize=(2.3 * k + 0.7, 2.3 * k + 0.4), layout="constrained")
        panels = figure.subplots(k, k, sharex="col", squeeze=False)
    for row, column in zip(*np.tril_indices(k)):
        ax, kept = panels[row, column], [shown[column], shown[row]][: 1 + (row != column)]
        marginals = [one._replace(density=one.density.marginal(kept)) for one in drawn]
        part = None if points is None else points[:, kept]
        if row == column:
            _draw_curves(ax, marginals, part, None)
            ax.set_yticks([])
        else:
            _draw_contours(ax, marginals, part, enclosed, labels=False)
            ax.tick_params(labelleft=column == 0)
    for place, name in enumerate(labels):
        panels[place, 0].set_ylabel(name)
        panels[-1, place].set_xlabel(name)
        for ax in panels[place, :place]:
            ax.set_ylim(panels[place, place].get_xlim())
        for ax in panels[place, place + 1 :]:
            ax.remove()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper right", frameon=False)
    return figure


def selection(chosen: Any, *, ax: Any = None) -> Any:
    """Draw the criteria by which a bandwidth was chosen from the data, over the multiples looked at, and the choice.

    ``chosen`` (Prepared, Bandwidth or Selection) is what ``prepare`` or ``select_bandwidth`` returned. ValueError where
    its bandwidth was not chosen from the data, TypeError for something else.
    """
    found = chosen.bandwidth if isinstance(chosen, Prepared) else chosen
    if isinstance(found, Bandwidth):
        if found.selection is None:
            what = f"a bandwidth of the rule {found.rule!r}, which does not look for the best one in the data"
            instead = "pass sdkde_core.select_bandwidth(x), or a density prepared with bandwidth='auto'"
            raise ValueError(f"chosen is {what}; {instead}")
        found = found.selection
    if not isinstance(found, Selection):
        raise TypeError(f"chosen is {_kind(chosen)}; pass what sdkde_core.select_bandwidth or prepare returns")
    ax = _axes_of(ax)
    criteria = (("least squares", found.least_squares, DARK, "-"), ("likelihood", found.likelihood, "#edae49", "--"))
    for name, curve, colour, line in criteria:
        if np.isfinite(curve).any():
            ax.plot(found.multiples, curve / max(curve.max(), 1e-300), line, marker=".", color=colour, label=name)
    ax.axvline(found.multiple, color=COLOURS[found.method], lw=2, label=f"{found.rule}: {found.multiple:.3g}")
    ax.set(xscale="log", xlabel="bandwidth over the normal reference", ylabel="criterion less its least, scaled")
    ax.set_title(found.method, loc="left", fontweight="bold")
    ax.legend(frameon=False)
    return ax


# --- what the functions above draw with: style, ranges, curves, and contours that enclose shares of the probability ---


class _Drawn(NamedTuple):
    label: str
    density: Prepared
    colour: str

    @property
    def line(self) -> dict[str, Any]:
        return {"lw": 1.5, "ls": "--"} if self.density.method == "laplace" else {"lw": 2, "ls": "-"}


def _labelled(densities: Any, d: int | None = None, instead: str = "") -> list[_Drawn]:
    """The densities by label, with colours. All have ``d`` dimensions; None: the number that the first has."""
    if isinstance(densities, Prepared):
        densities = {densities.method: densities}
    if not isinstance(densities, Mapping) or not densities:
        raise TypeError(f"densities is {_kind(densities)}; pass what sdkde_core.prepare returns, or a dict of those")
    drawn: list[_Drawn] = []
    for label, density in densities.items():
        if not isinstance(density, Prepared):
            raise TypeError(f"densities[{label!r}] is {_kind(density)}; pass what sdkde_core.prepare returns")
        d = d or density.n_dimensions
        if density.n_dimensions != d:
            instead = instead or "pass densities of the same samples"
            raise ValueError(f"densities[{label!r}] has {density.n_dimensions} dimensions instead of {d}; {instead}")
        taken = {one.colour for one in drawn}
        known = COLOURS.get(density.method, "#8d96a3"), "#edae49", "#c77dff", DARK, *COLOURS.values()
        drawn.append(_Drawn(str(label), density, next((one for one in known if one not in taken), DARK)))
    return drawn


def _kind(value: Any) -> str:
    return "an empty dict" if isinstance(value, Mapping) and not value else f"of type {type(value).__name__}"


def _points_of(samples: Any, d: int, name: str = "samples") -> Array:
    x = numbers(name, samples)
    x = x[:, None] if x.ndim == 1 and d == 1 else x
    if x.ndim != 2 or x.shape[1] != d:
        raise ValueError(f"{name} has shape {x.shape}, but the density has {d} dimensions: pass shape (n, {d})")
    return x


def _shares_of(shares: Sequence[float]) -> Array:
    found = np.unique(np.asarray(shares, dtype=np.float64))[::-1]
    if not found.size or not (found > 0).all() or not (found < 1).all():
        raise ValueError(f"shares is {shares!r}; pass numbers between 0 and 1, such as (0.5, 0.8, 0.95)")
    return found


def _style() -> Any:
    """:data:`STYLE`, for what is made within; ImportError without matplotlib."""
    return optional("matplotlib", "plots need matplotlib", "plot").rc_context(STYLE)


def _name_axes(ax: Any, density: Prepared) -> None:
    """Label axes that have no label by the names of the columns, where there are names."""
    for axis, name in zip((ax.xaxis, ax.yaxis), density._fitted.names):
        if not axis.get_label_text():
            axis.set_label_text(name)


def _axes_of(ax: Any) -> Any:
    if ax is not None:
        return ax
    with _style():
        from matplotlib import pyplot

        return pyplot.subplots(layout="constrained")[1]


def _some(n: int) -> slice:
    """Which of n samples to draw: at most 2,000, as more would be a black bar."""
    return slice(None, None, -(-n // 2000) or 1)


def _draw_curves(ax: Any, drawn: Sequence[_Drawn], rug: Array | None, limits: tuple[float, float] | None) -> None:
    """Draw curves over what is in the axes; ``rug``: the samples for it, (n, 1)."""
    x = grid([one.density for one in drawn], 0, 8, 400, 4000, limits=limits)
    ax.axhline(0, color="#adb5bd", lw=0.8, zorder=0).sticky_edges.y.append(0)  # a density begins on the axis
    ax.margins(x=0)
    for one in drawn:
        y = one.density.estimate(x)
        ax.plot(x, y, color=one.colour, label=one.label, **one.line)
        if (y < 0).any():
            look = {"facecolor": "none", "edgecolor": one.colour, "hatch": "//////", "lw": 0}
            ax.fill_between(x, y, 0, where=y < 0, interpolate=True, label=f"{one.label} < 0", **look)
    if rug is not None:
        there = rug[(rug >= x[0]) & (rug <= x[-1])]
        there = there[_some(len(there))]
        alpha = float(np.clip(100 / max(len(there), 1), 0.1, 0.5))
        look = {"color": DARK, "alpha": alpha, "ms": 6, "transform": ax.get_xaxis_transform(), "label": "_samples"}
        ax.plot(there, np.full(len(there), 0.015), "|", **look)  # at a height that is a part of the axes'


def _draw_contours(ax: Any, drawn: Sequence[_Drawn], dots: Array | None, shares: Array, labels: bool) -> None:
    """Draw contours over what is in the axes; ``dots`` are the samples, shares descend, and ``labels`` writes them."""
    tail = min(0.005, (1 - shares[0]) / 8)  # so that the largest share is within
    x, y = (grid([one.density for one in drawn], j, 2, 80, 200, tail) for j in (0, 1))
    cell = (x[1] - x[0]) * (y[1] - y[0])
    for one in drawn:
        where = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
        values = to_host(one.density.estimate(where)).reshape(len(y), len(x))
        levels = thresholds(values.ravel(), values.ravel() * cell, shares)  # ascending, as the shares descend
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
        ms = float(np.clip(50.0 / np.sqrt(len(there) or 1), 2.0, 5.0))
        ax.plot(*there[_some(len(there))].T, ".", color=DARK, alpha=0.35, ms=ms, mew=0, zorder=1.5, label="_samples")


def grid(
    densities: Sequence[Prepared], j: int, per_bandwidth: int, fewest: int, most: int, tail: float = 0.005,
    limits: Any = None,
) -> Array:  # fmt: skip
    """Points of dimension ``j`` to draw all densities at: so many for the smallest of their bandwidths.

    They span the samples less the share ``tail`` at each end, a tenth more and four bandwidths, within supports.
    """
    ends, widths = [], []
    for one in densities:
        several = [part for _, _, part in one.parts] or [one]
        kernels = [_kernels(density._fitted, j) for density in several]
        h, spans = min(found[2] for found in kernels), list[Array]()
        for x, weights, width in kernels:
            x, weights = x[weights > 0], weights[weights > 0]
            inner = np.quantile(x, [tail, 1 - tail], weights=weights, method="inverted_cdf")
            if len(x) == 1:  # a normal, which is as wide as its kernel
                inner = x[0] + 2.5 * width * np.array([-1.0, 1.0])
            spans.append(np.array([*inner, x.min() - 4.0 * width, x.max() + 4.0 * width]))
        low, high, first, last = (f(column) for f, column in zip((min, max, min, max), zip(*spans)))
        more = 0.1 * (high - low) + 4.0 * h
        maps = [density._fitted.coordinates and density._fitted.coordinates.maps[j] for density in several]
        least, greatest = np.array([getattr(m, "outer", getattr(m, "ends", (-math.inf, math.inf))) for m in maps]).T
        ends.append((max(low - more, first, least.min()), min(high + more, last, greatest.max())))
        widths.append(h)
    low, high = limits or (float(min(low for low, _ in ends)), float(max(high for _, high in ends)))
    return np.linspace(low, high, int(np.clip(per_bandwidth * (high - low) / min(widths), fewest, most)))


def _kernels(fitted: Any, j: int) -> tuple[Array, Array, float]:
    """Where the kernels of a density are in dimension ``j`` (n,), their weights (n,), and how wide they are."""
    maps = fitted.coordinates
    found = components(fitted if maps is None else fitted.first)
    means, h = found.means, float(np.sqrt(found.covariance[j, j]))
    if maps is not None:  # in data units as wide as in the middle
        means = maps.inverse(means)
        h /= float(np.exp(np.median(maps.log_slopes(means)[:, j])))
    return means[:, j], found.weights, h


def page(density: Prepared) -> str:
    """What a notebook shows of a density, a table and curves, as HTML; where that fails the text of ``repr`` alone."""
    try:
        fitted, how = density._fitted, density.method
        rows = {
            "method": how if density.kernel == "gaussian" else f"{how}, {density.kernel} kernel",
            "samples": f"{density.n_train:,} × {density.n_dimensions}",
            "bandwidth": "" if density.parts else str(fitted.request.annotated(density.bandwidth)),
            "coordinates": "" if fitted.coordinates is None else str(fitted.coordinates),
            "parts": ", ".join(dict.fromkeys(label for label, _, _ in density.parts)),
            "backend": f"{density.backend} on {density.device}, precision {density.precision}",
        }
        cells = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text)
        return f"<div><b>Prepared</b><table>{''.join(cells)}</table>{_curves(density)}</div>"
    except Exception:  # a notebook shows the object whatever is wrong
        return f"<pre>{escape(repr(density))}</pre>"


def _curves(density: Prepared) -> str:
    """The curve of each of up to six columns; none of so many samples or parts that it would take a second."""
    d, fitted = density.n_dimensions, density._fitted
    if d > 6 or density.n_train * d > 200_000 or len(density.parts) > 20 or (d > 1 and density.kernel != "gaussian"):
        return ""
    drawn, names = [], fitted.names or [f"column {j}" for j in range(d)]
    for j, name in enumerate(names):
        one = density if d == 1 else density.marginal(j)
        x = grid([one], 0, 4, 80, 160)
        y = np.asarray(one.estimate(x), dtype=np.float64)
        low, high = min(0.0, y.min()), y.max()
        places = zip((x - x[0]) * 178.0 / (x[-1] - x[0]) + 1.0, 58.0 - 56.0 * (y - low) / (high - low))
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        drawn.append(
            f'<figure style="display:inline-block;margin:4px"><svg width="180" height="60" role="img">'
            f'<polyline points="{line}" fill="none" stroke="{COLOURS.get(density.method, DARK)}" stroke-width="1.5"/>'
            f"</svg><figcaption>{escape(name)}: {x[0]:.4g} to {x[-1]:.4g}</figcaption></figure>"
        )
    return "".join(drawn)
