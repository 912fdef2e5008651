"""Plots of prepared densities, of the moves of debiasing, and of how a bandwidth was chosen.

Public as ``sdkde_core.plots``. Each function draws into the axes or the figure it is given, else into a new figure of
pyplot, and returns what it drew into. So plots are laid over one another by passing the axes on. Without a display
pyplot draws into memory, for ``ax.figure.savefig``. matplotlib is imported when a plot is drawn, pyplot only where a
figure has to be made: ``pip install 'sdkde-core[plot]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bandwidth.matrix import Bandwidth
from ..bandwidth.selection import Selection
from ..estimator.mixture import indices
from ..estimator.prepared import Prepared
from . import drawing
from .drawing import COLOURS, DARK, STYLE

__all__ = ["COLOURS", "DARK", "STYLE", "contours", "curves", "moves", "pairs", "selection"]


def curves(densities: Any, samples: Any = None, *, ax: Any = None, limits: tuple[float, float] | None = None) -> Any:
    """Draw densities of one dimension as curves, with a rug of the samples.

    Where a signed density is below zero the area is hatched, and the legend says so.

    Parameters
    ----------
    densities : Prepared, or dict of str to Prepared
        From :func:`sdkde_core.prepare`, by label; a single one is labelled by its method.
    samples : (n,) or (n, 1) array_like, optional
        For the rug; of more than 2000 some are left out evenly.
    ax : matplotlib.axes.Axes, optional
    limits : (float, float), optional
        Where the curves begin and end; by default where the samples are, less half a percent at each end, and some
        bandwidths more.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        matplotlib is missing; so do the other functions.
    TypeError, ValueError
        Not a prepared density, or not of one dimension.
    """
    drawn = drawing.labelled(
        densities, 1, "pass density.marginal(j) for dimension j, or draw them all with plots.pairs"
    )
    rug = None if samples is None else drawing.points_of(samples, 1)
    if limits is not None:
        ends = np.asarray(limits, dtype=np.float64)
        if ends.shape != (2,) or not np.isfinite(ends).all() or ends[0] >= ends[1]:
            raise ValueError(f"limits is {limits!r}; pass two finite numbers, the lower one first")
        limits = float(ends[0]), float(ends[1])
    ax = drawing.axes_of(ax)
    drawing.draw_curves(ax, drawn, rug, limits)
    ax.set_ylabel("density")
    ax.legend(frameon=False)
    return ax


def contours(densities: Any, samples: Any = None, *, ax: Any = None, shares: Sequence[float] = (0.5, 0.8, 0.95)) -> Any:
    """Draw densities of two dimensions as contours that enclose given shares of the probability.

    A contour is the border of the smallest region with its share: of where the density is above one value, which is
    found on a grid. A single density is filled; several are lines. Where a signed density is below zero, by more than
    a thousandth of its highest value, it is hatched.

    Parameters
    ----------
    densities : Prepared, or dict of str to Prepared
        As for :func:`curves`.
    samples : (n, 2) array_like, optional
        Drawn as dots; of more than 2000 some are left out evenly.
    ax : matplotlib.axes.Axes, optional
    shares : sequence of float
        Between 0 and 1.

    Returns
    -------
    matplotlib.axes.Axes
        Its ``ContourSet`` has the density at each contour in ``levels``.

    Raises
    ------
    TypeError, ValueError
        Not a prepared density, not of two dimensions, or shares that are not between 0 and 1.
    """
    drawn = drawing.labelled(densities, 2, "pass density.marginal((i, j)), or draw all pairs with plots.pairs")
    enclosed = drawing.shares_of(shares)
    dots = None if samples is None else drawing.points_of(samples, 2)
    ax = drawing.axes_of(ax)
    drawing.draw_contours(ax, drawn, dots, enclosed, labels=True)
    if len(drawn) > 1:
        for one in drawn:
            ax.plot([], [], color=one.colour, label=one.label, **one.line)
        ax.legend(frameon=False)
    return ax


def moves(density: Prepared, samples: Any, *, ax: Any = None) -> Any:
    """Draw arrows from the samples to where debiasing has moved them, in two dimensions.

    Parameters
    ----------
    density : Prepared
        Of the method sdkde. Of more dimensions pass ``density.marginal((i, j))`` and ``samples[:, [i, j]]``.
    samples : (n, 2) array_like
        What it was prepared from; of more than 2000 some are left out evenly.
    ax : matplotlib.axes.Axes, optional
        That of :func:`contours`, for instance.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError, ValueError
        Another method, other dimensions, or other samples than it was prepared from.
    """
    drawing.labelled(density, 2, "pass density.marginal((i, j)) and samples[:, [i, j]]")
    if density.method != "sdkde":
        raise ValueError(f"density has method={density.method!r}, which moves no samples; prepare with method='sdkde'")
    start = drawing.points_of(samples, 2)
    if len(start) != density.n_train:
        raise ValueError(f"samples are {len(start)}, but density was prepared from {density.n_train}: pass those")
    step = density.mixture().means - start
    ax = drawing.axes_of(ax)
    few = drawing.some(len(start))
    look = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.0025, "color": DARK, "alpha": 0.75}
    ax.quiver(*start[few].T, *step[few].T, **look)
    return ax


def pairs(
    densities: Any,
    samples: Any = None,
    *,
    dims: Sequence[Any] | None = None,
    labels: Sequence[str] | None = None,
    shares: Sequence[float] = (0.5, 0.8, 0.95),
    figure: Any = None,
) -> Any:
    """Draw every marginal density of one dimension and of two: curves on the diagonal, contours below.

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

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    TypeError, ValueError
        Not prepared densities of the same dimensions, or ``dims``, ``labels`` or ``shares`` that do not fit.
    """
    drawn = drawing.labelled(densities)
    d = drawn[0].density.n_dimensions
    if dims is None and d > 8:
        raise ValueError(f"densities have {d} dimensions, too many to draw all pairs of; pass some as dims=[...]")
    fitted = drawn[0].density._fitted
    shown = indices("dims", fitted, range(d) if dims is None else dims)
    if labels is None:
        labels = [fitted.names[j] if fitted.names else f"x{j}" for j in shown]
    if len(labels) != len(shown):
        raise ValueError(f"labels are {len(labels)}, but {len(shown)} dimensions are drawn: pass one for each")
    enclosed = drawing.shares_of(shares)
    points = None if samples is None else drawing.points_of(samples, d)
    k = len(shown)
    with drawing.style():
        if figure is None:
            from matplotlib import pyplot

            figure = pyplot.figure(figsize=(2.3 * k + 0.7, 2.3 * k + 0.4), layout="constrained")
        panels = figure.subplots(k, k, sharex="col", squeeze=False)
    for row, column in zip(*np.tril_indices(k)):
        ax, kept = panels[row, column], [shown[column], shown[row]][: 1 + (row != column)]
        marginals = [one._replace(density=one.density.marginal(kept)) for one in drawn]
        part = None if points is None else points[:, kept]
        if row == column:
            drawing.draw_curves(ax, marginals, part, None)
            ax.set_yticks([])
        else:
            drawing.draw_contours(ax, marginals, part, enclosed, labels=False)
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

    Parameters
    ----------
    chosen : Prepared, Bandwidth or Selection
        Of a bandwidth that was chosen: what ``prepare`` or ``select_bandwidth`` returned.
    ax : matplotlib.axes.Axes, optional

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError, ValueError
        Something else, or a bandwidth that was not chosen from the data.
    """
    found = chosen.bandwidth if isinstance(chosen, Prepared) else chosen
    if isinstance(found, Bandwidth):
        if found.selection is None:
            raise ValueError(
                f"chosen is a bandwidth of the rule {found.rule!r}, which does not look for the best one in the data; "
                "pass sdkde_core.select_bandwidth(x), or a density prepared with bandwidth='auto'"
            )
        found = found.selection
    if not isinstance(found, Selection):
        raise TypeError(f"chosen is {drawing.kind(chosen)}; pass what sdkde_core.select_bandwidth or prepare returns")
    ax = drawing.axes_of(ax)
    criteria = (("least squares", found.least_squares, DARK, "-"), ("likelihood", found.likelihood, "#edae49", "--"))
    for name, curve, colour, line in criteria:
        if np.isfinite(curve).any():
            ax.plot(found.multiples, curve / max(curve.max(), 1e-300), line, marker=".", color=colour, label=name)
    ax.axvline(found.multiple, color=COLOURS[found.method], lw=2, label=f"{found.rule}: {found.multiple:.3g}")
    ax.set(xscale="log", xlabel="bandwidth over the normal reference", ylabel="criterion less its least, scaled")
    ax.set_title(found.method, loc="left", fontweight="bold")
    ax.legend(frameon=False)
    return ax
