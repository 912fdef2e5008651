"""Densities of two dimensions on regular grids, for maps and contours: ``plots.raster`` and ``plots.Raster``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, numbers, to_host
from ..estimator.mixture import components
from ..estimator.prepared import Prepared


class Raster(NamedTuple):
    """Values on a regular grid."""

    x: Array  #: (k,), coordinates of the columns of ``values``, in data units
    y: Array  #: (l,), of the rows
    values: Array  #: (l, k), the density or its log at each (x, y)

    @property
    def cell(self) -> tuple[float, float]:
        """Width and height of a cell in data units; negative where coordinates descend."""
        (width, height) = (float((a[-1] - a[0]) / (len(a) - 1)) for a in (self.x, self.y))
        return width, height

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Outer edges of the first and last column, and of the first and last row: for ``imshow(origin="lower")``.

        They are half a cell farther out than the coordinates, which are the middles of cells.
        """
        (x, y), (width, height) = self[:2], self.cell
        ends = x[0] - width / 2, x[-1] + width / 2, y[0] - height / 2, y[-1] + height / 2
        left, right, bottom, top = map(float, ends)
        return left, right, bottom, top


def raster(density: Prepared, x: Any = None, y: Any = None, *, log: bool = False) -> Raster:
    """Evaluate a density of two dimensions on a regular grid.

    Parameters
    ----------
    density : Prepared
        From :func:`sdkde_core.prepare`.
    x, y : int or (k,) array_like, optional
        How many columns and rows, over where the samples are; or their coordinates in data units, at least two and
        evenly spaced, such as those of another raster. Default: two for a bandwidth, from 80 to 200.
    log : bool
        Return log p̂, which is right where p̂ underflows.

    Returns
    -------
    Raster
        With ``x`` (k,), ``y`` (l,), ``values`` (l, k), ``cell`` and ``extent``. Pass coordinates ``y`` that descend for
        an image whose first row is the northern one.

    Raises
    ------
    TypeError, ValueError
        No prepared density of two dimensions, or coordinates that are not evenly spaced.

    Examples
    --------
    >>> import numpy as np
    >>> from sdkde_core import plots, prepare
    >>> ready = prepare(np.random.default_rng(0).normal(size=(200, 2)), bandwidth=0.4)
    >>> found = plots.raster(ready, x=np.linspace(-3, 3, 61), y=40)
    >>> found.values.shape
    (40, 61)
    """
    if not isinstance(density, Prepared):
        raise TypeError(f"density is of type {type(density).__name__}; pass what sdkde_core.prepare returns")
    if density.n_dimensions != 2:
        instead = "pass density.marginal((i, j))" if density.n_dimensions > 2 else "use density.estimate(x)"
        raise ValueError(f"density has {density.n_dimensions} dimensions instead of 2; {instead}")
    axes = [_axis(name, density, j, given) for j, (name, given) in enumerate((("x", x), ("y", y)))]
    return evaluated(density, axes[0], axes[1], log)


def evaluated(density: Prepared, x: Array, y: Array, log: bool = False) -> Raster:
    """The density at every pair of coordinates (k,) and (l,)."""
    where = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    return Raster(x, y, to_host(density.estimate(where, log=log)).reshape(len(y), len(x)))


def _axis(name: str, density: Prepared, j: int, given: Any) -> Array:
    if given is None:
        return grid([density], j, 2, 80, 200)
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        if given < 2:
            raise ValueError(f"{name} is {given}; pass a number of cells, at least 2, or their coordinates")
        return grid([density], j, 2, int(given), int(given))
    at = numbers(name, given)
    step = np.diff(at) if at.ndim == 1 and at.size > 1 else np.zeros(1)
    if not (np.isfinite(at).all() and step[0] and np.allclose(step, step.mean(), rtol=1e-3, atol=0.0)):
        raise ValueError(
            f"{name} has shape {at.shape}, and is not evenly spaced; pass a number of cells, or two or more finite "
            "coordinates at equal distances, as from numpy.linspace"
        )
    return at


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
