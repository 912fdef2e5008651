"""Direct sums on a CPU; points that come several times, as in zero-inflated data and counts, are summed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import each
from sdkde_core.protocol import Columns, Partial, Problem

from .modes import Array


@dataclass(frozen=True)
class Distinct:
    """All columns. Equal ones are merged, with the sum of their weights, where they are many; and so are equal rows."""

    columns: Columns
    spread: Callable[..., Any]  # see Neighbours.reduce

    @functools.cached_property
    def _near(self) -> Neighbours:
        columns = self.columns
        if many(columns.points):
            first, group = distinct(columns.points)
            columns = Columns(columns.points[first], merged_weights(columns.log_weights, first, group))
        return Neighbours(columns)

    def reduce(self, problem: Problem, rows: Array) -> Partial:
        if not many(rows):
            return self._near.reduce(problem, rows, spread=self.spread)
        first, group = distinct(rows)
        return each(self._near.reduce(problem, rows[first], spread=self.spread), lambda x: x[group])


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
