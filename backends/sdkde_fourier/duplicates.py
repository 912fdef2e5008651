"""Points that come several times, as in zero-inflated data, counts and rounded numbers: summed once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHARE", "distinct", "many", "merged_weights"]

Array = NDArray[Any]

#: Points that are looked at for equal ones, and the share of them that are to repeat others.
SOME, SHARE = 1 << 12, 0.1


def distinct(points: Array) -> tuple[Array, Array]:
    """Return the index of one of each group of equal points, (g,), and the group of every point, (n,)."""
    order = np.lexsort(points.T)
    ordered = points[order]
    first = np.ones(len(points), bool)
    np.any(ordered[1:] != ordered[:-1], axis=1, out=first[1:])
    group = np.empty(len(points), np.intp)
    group[order] = np.cumsum(first) - 1
    return order[first], group


def many(points: Array) -> bool:
    """Whether so many points are equal, of some, that to find them all pays."""
    some = points[:: -(-len(points) // SOME)]
    return len(distinct(some)[0]) < (1.0 - SHARE) * len(some)


def merged_weights(log_weights: Array, first: Array, group: Array) -> Array:
    """Return the log of every group's weight, (g,)."""
    most = np.full(len(first), -np.inf)
    np.maximum.at(most, group, log_weights)
    return most + np.log(np.bincount(group, np.exp(log_weights - most[group])))
