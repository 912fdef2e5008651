"""Sums of scattered rows, far out or between clusters, each over the columns that it needs; for NumPy arrays.

Rows that have no neighbours share no list of tiles. So each goes down a tree of tiles by itself, of :data:`TOGETHER`
branches: first towards a few tiles, whose columns bound its sum from below; then wherever a tile can add more than its
part of the tolerance (see the package for what it adds at most). All rows go down together, as a list of pairs of a row
and a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol import TOLERANCES, Problem, Reduction
from .lists import COARSE, FINE, SLACK, added
from .tiles import TOGETHER, Index, Tiles, levels

Array = NDArray[Any]


class Tree:
    """Columns (n, d) in the order of an index, tile by tile: ``columns`` as :func:`.sums._sum` takes them."""

    def __init__(self, points: Array, log_weights: Array, found: Index, columns: tuple[list[Array], Array]) -> None:
        self.levels, self.columns, self.log_weight = levels(points, log_weights, found), columns, found.log_weight

    @np.errstate(all="ignore")  # sums of exponentials underflow by design
    def sums(self, problem: Problem, rows: Array, least: float, most: float) -> tuple[Array, list[Array]]:
        """Logs of rows' largest terms, and sums over these as in :func:`.sums._sum`; for log sums up to ``most``."""
        floors = self._floors(rows)
        floors = np.where(floors > most, np.inf, np.maximum(floors, least))
        row, tile = self._pairs(problem, rows, floors)
        points, log_weights = self.columns
        mean, laplace = (problem.reduction is r for r in (Reduction.MEAN, Reduction.LAPLACE))
        top = np.full(len(rows), -1e300)
        sums = [np.zeros(len(rows)) for _ in range(1 + (problem.d if mean else 2 if laplace else 0))]
        step = max(1, (1 << 15) // log_weights.shape[1])  # pairs of points stay in the cache
        for start in range(0, len(row), step):
            r, t = row[start : start + step], tile[start : start + step]
            delta = [x[t] - rows[r, a, None] for a, x in enumerate(points)]
            exponent = -0.5 * sum(x * x for x in delta)
            term = exponent + log_weights[t]
            first = np.flatnonzero(np.diff(r, prepend=-1))  # where the pairs of each row begin
            which = r[first]
            before, top[which] = top[which], np.maximum(top[which], np.maximum.reduceat(term.max(axis=1), first))
            phi, fall = np.exp(term - top[r, None]), np.exp(before - top[which])
            half = 0.5 * problem.d
            factors = delta if mean else [1.0 + half + exponent, 1.0 + half - exponent] if laplace else []
            for whole, part in zip(sums, [phi, *(phi * x for x in factors)]):
                whole[which] = whole[which] * fall + np.add.reduceat(part.sum(axis=1), first)
        return top, sums

    def _floors(self, rows: Array) -> Array:
        """What the log sums of rows are at least, (b,): the sum over the columns of a few tiles that are nearest."""
        (b, d), few, best = rows.shape, 4, np.arange(self.levels[0].log_weight.size)[None, :]
        for k, level in enumerate(self.levels):
            best = _children(best) if k else np.repeat(best, b, axis=0)
            there = best < level.log_weight.size
            best = np.where(there, best, 0)
            near = sum(_gap(level, a, best, rows[:, a, None]) ** 2 for a in range(d))
            worth = np.where(there, level.log_weight[best] - 0.5 * near, -np.inf)
            if best.shape[1] > few:
                best = np.take_along_axis(best, np.argpartition(-worth, few, axis=1)[:, :few], axis=1)
        points, log_weights = self.columns
        best = np.sort(best, axis=1)
        again = np.pad(best[:, 1:] == best[:, :-1], ((0, 0), (1, 0)))
        terms = np.where(again[:, :, None], -np.inf, log_weights[best])
        terms -= 0.5 * sum((x[best] - rows[:, a, None, None]) ** 2 for a, x in enumerate(points))
        top: Array = np.maximum(terms.max(axis=(1, 2)), -1e300)
        return top + np.log(np.exp(terms - top[:, None, None]).sum(axis=(1, 2)))

    def _pairs(self, problem: Problem, rows: Array, floors: Array) -> tuple[Array, Array]:
        """Rows and tiles of columns that can matter to them, (p,) each, row by row."""
        b, tolerance = len(rows), TOLERANCES[problem.precision][problem.reduction].absolute
        row, tile = (x.ravel() for x in np.indices((b, self.levels[0].log_weight.size)))
        for k, level in enumerate(self.levels):
            if k:
                row, tile = np.repeat(row, TOGETHER), _children(tile[None, :])[0]
                there = tile < level.log_weight.size
                row, tile = row[there], tile[there]
            near = sum((_gap(level, a, tile, rows[row, a]) ** 2 for a in range(rows.shape[1])), np.zeros(len(row)))
            logs = level.log_weight[tile][:, None]
            mass = added(np, problem, self.log_weight, logs, (1.0 - SLACK) * near[:, None], floors[row])[:, 0]
            share = FINE if k + 1 == len(self.levels) else COARSE / max(1, len(self.levels) - 1)
            kept = mass >= share * tolerance / np.bincount(row, minlength=b)[row]
            row, tile = row[kept], tile[kept]
        return row, tile


def _gap(level: Tiles, a: int, tiles: Array, x: Array) -> Array:
    """How far coordinates x are from tiles' boxes in dimension a."""
    return np.maximum(np.maximum(level.low[a][tiles] - x, x - level.high[a][tiles]), 0.0)


def _children(tiles: Array) -> Array:
    """The tiles (b, k · TOGETHER) of the next level of tiles (b, k); some are not there."""
    return (tiles[:, :, None] * TOGETHER + np.arange(TOGETHER)).reshape(len(tiles), -1)
