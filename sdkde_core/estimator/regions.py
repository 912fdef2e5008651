"""Highest-density regions: where a density is above one value. The smallest region that holds a given mass is one.

Source: Hyndman, "Computing and graphing highest density regions", The American Statistician 50 (1996).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import Argument, Array, to_host
from .batches import densities
from .mapped import leaves
from .mixture import draws


def thresholds(values: Array, masses: Array, shares: Any) -> Array:
    """The values above which the shares of the mass lie, of points or cells with a density and a mass (k,) each."""
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(masses[order]) - 0.5 * masses[order]  # up to the middle of each
    return np.interp(shares, np.maximum.accumulate(reached), values[order])


def log_thresholds(fitted: Any, shares: Array, n: int, random_state: Any) -> Array:
    """The logs of the density above which the shares (k,) lie."""
    if (found := on_cells(fitted)) is not None:
        cells = np.arange(len(found[0]))
        parts = np.arange(0.0, len(cells) - 1.0, 1.0 / 16.0)  # sixteenths, between which sorting does not jump
        values, masses = (np.interp(parts, cells, x) for x in found[1:])
        return np.log(thresholds(values, masses / 16.0, shares))
    query = Argument.of("query", draws(fitted.current, n, random_state))
    logs = np.asarray(to_host(densities(fitted, query, log=True)), dtype=np.float64)
    return thresholds(logs, np.full(n, 1.0 / n), shares)


def on_cells(fitted: Any) -> tuple[Array, Array, Array] | None:
    """The middles of cells of a 32nd of a kernel's width, the density there, and the masses (k,), in one dimension.

    None in more dimensions, and where there would be more than 2^16 cells.
    """
    found = list[Array]()
    for leaf in [part.fitted for part in leaves(fitted)] or [fitted]:
        inner = leaf.current if leaf.coordinates is None else leaf.first.current
        points, log_weights, scales, centre = inner.on_host
        places, far = points[log_weights > -math.inf, 0], (9.0 if inner.request.kernel == "gaussian" else 40.0)
        low, high = places.min() - far * scales.max(), places.max() + far * scales.max()
        many = (high - low) / scales.min() * 32.0
        if many > 1 << 16 or fitted.problem.d > 1:
            return None
        z = centre[0] + float(inner.bandwidth.factor.reshape(-1)[0]) * np.linspace(low, high, math.ceil(many) + 1)
        if leaf.coordinates is not None:
            z = z if leaf.ends is None else np.clip(z, *leaf.ends[:, 0])
            z = leaf.coordinates.inverse(z[:, None])[:, 0]
        found.append(z[np.isfinite(z)])
    edges = np.unique(np.concatenate(found))
    middles = 0.5 * edges[1:] + 0.5 * edges[:-1]
    values = np.asarray(densities(fitted, Argument.of("query", middles), log=False), dtype=np.float64)
    return middles, values, values * np.diff(edges)
