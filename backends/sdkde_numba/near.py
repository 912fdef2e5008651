"""Sums over the pairs that matter: rows and columns in order, tile by tile of rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.nearby import Index, Lists, index
from sdkde_core.plugin import checkpoint, map_threads
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from .bounds import LeafSums, leaf_errors, takes_leaves
from .compiled import leaf_kernels
from .cpu_kernels import ABSENT
from .leaf_kernels import FACTORS, GROUP, LEAST, OF_TILES, SUMS, UNIT
from .price import HEIGHT, LEAF, SIZE

__all__ = ["Near", "leaf_bytes", "order_columns", "sum_leaves"]

Array = NDArray[Any]

#: Share of the tolerance for leaves that are left out; :data:`sdkde_core.nearby.lists` has its own.
LEFT_OUT = 0.15

#: Columns within half a bandwidth from which on it counts how many of them have the same value.
MANY = 64

LN2 = math.log(2.0)


class Near(NamedTuple):
    """Columns in order, and their leaves."""

    columns: Index
    place: Array  # (n,) of the columns as they came
    low: Array  # (d, leaves), their boxes
    high: Array  # (d, leaves)
    heavy: Array  # (leaves,), log2 of their weights, relative to the heaviest column
    peak: float  # log2 of the heaviest column's weight
    span: float  # log2 of the heaviest over the lightest
    tie: float  # see :func:`_tie`


def order_columns(columns: Columns) -> Near:
    """Put finite columns in order; their leaves are those of the packed columns, tile by tile."""
    (found,) = map_threads(lambda c: index(c.points, c.log_weights, SIZE, LEAF), [columns], 1, apart=True)
    n, place = len(found.order), np.empty(len(found.order), np.intp)
    place[found.order] = np.arange(n)
    points, weights = columns.points[found.order], columns.log_weights[found.order] / LN2
    starts, peak, lightest = np.arange(0, n, LEAF), float(weights.max()), float(weights.min())
    low, high = (f.reduceat(points, starts, axis=0).T.copy() for f in (np.minimum, np.maximum))
    with np.errstate(divide="ignore", under="ignore"):  # of the least weights nothing is left
        heavy = np.maximum(np.log2(np.add.reduceat(np.exp2(weights - peak), starts)), ABSENT[0])
    tie = max(_tie(points[:, c], weights - peak) for c in range(points.shape[1]))
    return Near(found, place, low, high, heavy, peak, peak - lightest, tie)


def _tie(x: Array, log_weights: Array) -> float:
    """The largest share of one value among the columns within half a bandwidth, where these are not few."""
    order = np.argsort(x)
    x, sums = x[order], np.concatenate([[0.0], np.cumsum(np.exp2(log_weights[order]))])
    starts = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1]]))
    values, ends = x[starts], np.append(starts[1:], len(x))
    low, high = np.searchsorted(x, values - 0.5), np.searchsorted(x, values + 0.5, "right")
    shares = (sums[ends] - sums[starts]) / np.maximum(sums[high] - sums[low], 1e-300)
    return float(np.max(shares[high - low >= MANY], initial=1.0 / MANY))


class _Room:
    """What the kernels write for a tile of rows, for so many tiles of columns."""

    def __init__(self, near: Near, d: int, mean: bool, tiles: int) -> None:
        most, groups = tiles * (SIZE // LEAF), HEIGHT // GROUP
        self.x, self.weights = np.empty((most, d, LEAF), np.float32), np.empty((most, LEAF), np.float32)
        self.boxes, self.heavies = np.empty((2, d, most), np.float32), np.empty(most, np.float32)
        self.halves, self.masses = np.empty((groups, most), np.float32), np.empty(most, np.float32)
        self.leaves, self.u = np.empty(most, np.intp), np.empty((HEIGHT, d), np.float32)
        self.chosen, self.ends = np.empty((groups, most + 1), np.intp), np.empty(groups, np.intp)
        self.sums = np.empty((HEIGHT, SUMS, LEAF))
        self.shifts = np.empty((HEIGHT, d, LEAF)) if mean else None
        self.whole = near.columns.log_weight / LN2 - near.peak

    def sum(
        self, problem: Problem, near: Near, columns: Array, log_weights: Array, tiles: Array, rows: Array, floor: float
    ) -> None:
        """Write the sums of a tile of rows, lane by lane."""
        kernels = leaf_kernels(problem.d, self.shifts is not None)
        allowed = LEFT_OUT * TOLERANCES[problem.precision][problem.reduction].absolute
        factor, centre = FACTORS[str(problem.reduction)], (0.0,) * problem.d
        self.sums[:] = 0.0
        if self.shifts is not None:
            self.shifts[:] = 0.0
        add = self.x, self.weights, self.chosen, self.ends, self.u, centre, self.sums, self.shifts
        count = kernels.list(
            *(columns, log_weights, near.low, near.high, near.heavy, tiles, rows, floor, self.whole, factor),
            *(OF_TILES * allowed, self.x, self.weights, self.boxes, self.heavies, self.halves, self.masses),
            *(self.leaves, self.u, self.chosen, self.ends),
        )
        kernels.add(*add)
        kernels.choose(
            *(self.sums, self.heavies, self.halves, self.masses, count, problem.d, self.whole, factor),
            *((1.0 - OF_TILES) * allowed, self.chosen, self.ends),
        )
        kernels.add(*add)


def leaf_bytes(problem: Problem, near: Near) -> int:
    """Return what :func:`sum_leaves` takes at most: as if all leaves mattered."""
    each = 4 * (problem.d + 1) * LEAF + 8 * problem.d + 16 + 12 * HEIGHT // GROUP
    return each * len(near.heavy) if takes_leaves(problem) else 0


def sum_leaves(
    problem: Problem, near: Near, columns: Array, log_weights: Array, rows: Array, found: Lists
) -> tuple[Partial, Array]:
    """Sum neighbouring rows over the leaves that can matter to them, in float32.

    Parameters
    ----------
    problem : Problem
    near : Near
    columns, log_weights : (tiles, c, SIZE) and (tiles, SIZE) float64 arrays
        As packed; weights log2, over the heaviest.
    rows : (m, d) array
    found : Lists
        Tiles of columns, for tiles of :data:`~sdkde_numba.price.HEIGHT` rows.

    Returns
    -------
    Partial
    again : (k,) array of int
        Rows whose errors may be beyond the tolerance.
    """
    (m, d), mean = rows.shape, problem.reduction is Reduction.MEAN
    sums, shifts = np.empty((m, SUMS)), np.empty((m, d)) if mean else None
    room = _Room(near, d, mean, int(np.max(np.diff(found.ends), initial=1)))
    for b, floor in enumerate(found.floors[:, 0] / LN2 - near.peak):
        checkpoint()
        here = slice(b * HEIGHT, (b + 1) * HEIGHT)
        tiles = found.tiles[found.ends[b] : found.ends[b + 1]]
        room.sum(problem, near, columns, log_weights, tiles, rows[here], floor)
        sums[here] = room.sums[: m - here.start].sum(axis=2)
        if shifts is not None and room.shifts is not None:
            shifts[here] = room.shifts[: m - here.start].sum(axis=2)
    total = sums[:, 0]
    log_sum = np.log(total) + LN2 * near.peak
    square, fourth = (2.0 * LN2) * sums[:, 1] / total, (2.0 * LN2) ** 2 * sums[:, 2] / total
    across = np.array([np.linalg.norm(np.ptp(rows[i : i + HEIGHT], axis=0)) for i in range(0, m, HEIGHT)]) / 2.0
    shift = None if shifts is None else shifts / (UNIT * total[:, None])
    known = near.tie, near.span
    errors = leaf_errors(
        problem, LeafSums(log_sum, total, square, fourth, shift, np.repeat(across, HEIGHT)[:m], *known)
    )
    again = np.flatnonzero(~((total >= LEAST) & (errors <= 1.0)))
    if problem.reduction is Reduction.LAPLACE:
        half, exponent = (1.0 + 0.5 * d) * total, -LN2 * sums[:, 1]  # Σ φ (1 + d/2), Σ φ (−½ r²)
        signed, scale = half + exponent, LN2 * near.peak
        partial = Partial(
            np.log(half - exponent) + scale,
            sign=np.sign(signed),
            log_magnitude=np.log(np.abs(signed)) + scale,
        )
    else:
        partial = Partial(log_sum, shift=shift)
    return partial, again
