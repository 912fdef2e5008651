"""Direct sums on a CPU; points that come several times, as in zero-inflated data and counts, are summed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import each, new_lock
from sdkde_core.protocol import Columns, Partial, Problem

from .modes import Array


class Distinct:
    """All columns. Equal ones are merged, with the sum of their weights, where they are many; and so are equal rows."""

    def __init__(self, columns: Columns, spread: Callable[..., Any]) -> None:
        self._columns, self._spread, self._lock = columns, spread, new_lock()
        self._near: Neighbours | None = None

    def reduce(self, problem: Problem, rows: Array) -> Partial:
        """Answer for some rows; see :meth:`sdkde_core.nearby.Neighbours.reduce`."""
        columns = self._columns
        with self._lock:
            if self._near is None:
                if many(columns.points):
                    first, group = distinct(columns.points)
                    weights = merged_weights(columns.log_weights, first, group)
                    columns = Columns(columns.points[first], weights)
                self._near = Neighbours(columns)
        if not many(rows):
            return self._near.reduce(problem, rows, spread=self._spread)
        first, group = distinct(rows)
        return each(self._near.reduce(problem, rows[first], spread=self._spread), lambda x: x[group])


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
    """Whether a tenth of a sample or more repeats other points: then it pays to find all that do."""
    some = points[:: -(-len(points) // (1 << 12))]
    return len(distinct(some)[0]) < 0.9 * len(some)


def merged_weights(log_weights: Array, first: Array, group: Array) -> Array:
    """Return the log of every group's weight, (g,)."""
    most = np.full(len(first), -np.inf)
    np.maximum.at(most, group, log_weights)
    return most + np.log(np.bincount(group, np.exp(log_weights - most[group])))
