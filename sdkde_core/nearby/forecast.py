"""How many pairs of tiles would be left, from some of the rows and columns: as :func:`lists` has it, and roughly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from ..protocol import TOLERANCES, Problem, Reduction, Sample
from .lists import FINE, MANY, NEAREST, threshold
from .order import by_tile, order
from .tiles import TOGETHER

__all__ = ["boxes", "places", "rough_share", "share"]

Array = NDArray[Any]

#: Rows and columns of a sample that are looked at, about; beyond so many dimensions fewer columns, as each costs more.
ROWS, COLUMNS, DIMENSIONS = 48, 1 << 12, 64

#: Points of a sample whose box is taken, at least.
NODE = 8

#: Nearest points of a sample: their distances say how densely points lie, and in how many dimensions.
NEAREST_OF, FARTHER_OF = 4, 16

#: Of a sample's places in their stretches: an irrational number, so that no period in the data meets it.
GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)

#: By how many standard deviations the least of a tile's rows is below their mean.
LEAST = 2.0


def share(problem: Problem, sample: Sample, size: int, height: int) -> float:
    """Return about what share of the pairs is left, if tiles have ``height`` rows and ``size`` columns.

    Every point of the sample stands for a tile, whose box follows from that of the point and its neighbours in the
    sample. Floors are those that :func:`lists` would find, by as many of the nearest columns.

    Parameters
    ----------
    problem : Problem
    sample : Sample
        Of its rows and columns.
    size, height : int
    """
    if len(sample.columns) <= 2 * NODE or problem.n <= 4 * size or not len(sample.rows):
        return 1.0
    thin = -(-len(sample.columns) * max(problem.d, DIMENSIONS) // (COLUMNS * DIMENSIONS))
    columns, weights = sample.columns[::thin], sample.log_weights[::thin]
    n, known = problem.n, len(columns)
    rows, row_widths = boxes(sample.rows, height * len(sample.rows) / problem.m, height, ROWS)
    centres, widths = boxes(columns, size * known / n, size)
    _, wide = boxes(columns, TOGETHER * size * known / n, TOGETHER * size)
    apart, square = np.zeros((2, len(rows), known))
    for a in range(problem.d):
        apart += (rows[:, a, None] - columns[:, a]) ** 2
        between = np.abs(rows[:, a, None] - centres[:, a]) - 0.5 * (row_widths[:, a, None] + widths[:, a])
        square += np.maximum(between, 0.0) ** 2
    weights = weights + math.log(n / known)
    total = float(np.logaddexp.reduce(weights))
    floor = np.maximum(
        *(
            _floors(rows, columns, weights, apart, inside, row_widths, least * TOGETHER * size * known / n)
            for inside, least in ((widths, NEAREST), (wide, MANY))
        )
    )
    half = 0.5 * square
    mass = np.exp(np.minimum(weights - half - floor[:, None], 0.0))
    if problem.reduction is Reduction.MEAN:
        mass *= np.maximum(np.sqrt(2.0 * half), 1.0) + np.sqrt(2.0 * np.maximum(total - floor, 0.0))[:, None]
    if problem.reduction is Reduction.LAPLACE:
        mass *= 1.0 + half / (1.0 + 0.5 * problem.d)
    needed = mass >= threshold(np, mass, FINE * TOLERANCES[problem.precision][problem.reduction].absolute)
    return float(needed.mean())


def places(n: int, most: int) -> NDArray[np.int64]:
    """Indices of up to ``most`` of n points: one of each of as many stretches of equal length."""
    step = -(-n // most)
    k = np.arange(n // step)
    return k * step + (step * (k * GOLDEN % 1.0)).astype(np.int64)


def rough_share(
    problem: Problem,
    rows: Any,
    columns: Any,
    log_weights: Any,
    size: int,
    height: int,
    out: float,
    few: tuple[int, int] = (64, 2048),
) -> float:
    """Return about what share of the pairs is left, from few points, quickly, on any device.

    Tiles are taken to be as wide as cubes that hold so many points, and to lie that much nearer than their points. How
    densely points lie beside a row, and in how many dimensions, is seen from its distances to the nearest of the
    sample. A row's sum is that over the sample.

    Parameters
    ----------
    problem : Problem
    rows : (r, d) array
        All rows, or some.
    columns : (k, d) array
        All columns, or some.
    log_weights : (k,) array
        Of these among all n.
    size, height : int
        Columns and rows of a tile.
    out : float
        What may be left out of a row's sum, relative to that.
    few : (int, int)
        Rows and columns that are looked at, at most.

    Returns
    -------
    float
        1 where the sample is too small to tell, or a coordinate is not finite.
    """
    if columns.shape[0] <= 4 * FARTHER_OF or not rows.shape[0]:
        return 1.0
    xp, on = array_namespace(columns), device(columns)
    some, thin = (xp.asarray(places(x.shape[0], most), device=on) for x, most in zip((rows, columns), few))
    rows, columns, log_weights = (
        xp.take(x, at, axis=0) for x, at in ((rows, some), (columns, thin), (log_weights, thin))
    )
    with np.errstate(all="ignore"):
        return _roughly(problem, rows, columns, log_weights, size, height * problem.n / problem.m, out)


def _roughly(
    problem: Problem, rows: Any, columns: Any, log_weights: Any, size: int, height: float, out: float
) -> float:
    """``height``: of as many columns as lie where a tile of rows does."""
    xp, (k, d) = array_namespace(columns), columns.shape
    rows, columns, log_weights = (xp.astype(x, xp.float32) for x in (rows, columns, log_weights))  # half the time
    square = xp.zeros((rows.shape[0], k), dtype=columns.dtype, device=device(columns))
    for a in range(d):
        square = square + (rows[:, a, None] - columns[None, :, a]) ** 2
    others = xp.sort(xp.where(square > 0.0, square, xp.full_like(square, math.inf)), axis=1, stable=False)
    near, far = (0.5 * xp.log(others[:, at - 1]) for at in (NEAREST_OF, FARTHER_OF))
    apart = float(xp.sort(far - near, stable=False)[rows.shape[0] // 2])
    if not apart > 0.0:  # NaN too
        return 1.0
    within = min(max(math.log(FARTHER_OF / NEAREST_OF) / apart, 1.0), float(d))
    ball = 0.5 * within * math.log(math.pi) - math.lgamma(0.5 * within + 1.0)  # log volume of a ball of radius 1
    many = math.log(problem.n / k)
    wide = sum(math.exp((ball + math.log(points / NEAREST_OF) - many) / within) for points in (size, height))
    halved = math.log2(max(2.0, problem.n / max(size, height)))  # dimensions: in others a tile is as wide as all
    nearest = math.sqrt(min(1.0, halved / within)) * xp.sqrt(square) - (wide * xp.exp(near))[:, None]
    half = 0.5 * xp.where(nearest > 0.0, nearest, xp.zeros_like(nearest)) ** 2
    terms = log_weights + many - 0.5 * square
    most = xp.max(terms, axis=1, keepdims=True)
    log_sum = most + xp.log(xp.sum(xp.exp(terms - most), axis=1, keepdims=True))
    total = many + float(xp.max(log_weights) + xp.log(xp.sum(xp.exp(log_weights - xp.max(log_weights)))))
    mass = xp.exp(xp.minimum(log_weights + many - half - log_sum, xp.zeros_like(half)))
    if problem.reduction is Reduction.MEAN:
        reach = xp.sqrt(2.0 * xp.maximum(total - log_sum, xp.zeros_like(log_sum)))
        mass = mass * (xp.maximum(xp.sqrt(2.0 * half), xp.ones_like(half)) + reach)
    if problem.reduction is Reduction.LAPLACE:
        mass = mass * (1.0 + half / (1.0 + 0.5 * d))
    left = xp.cumulative_sum(xp.sort(mass, axis=1, stable=False), axis=1) > out
    return float(xp.mean(xp.astype(left, xp.float32)))


def boxes(points: Array, expected: float, size: int, most: int = 0) -> tuple[Array, Array]:
    """Centres and widths of the tiles that some points of a sample are in, (k, d) each.

    Parameters
    ----------
    points : (known, d) array
    expected : float
        How many points of the sample a tile has.
    size : int
        How many it has of all.
    most : int
        Points that are returned, about; 0: all, as they came.

    Notes
    -----
    Where a tile has few points of the sample or none, it is a part of a larger node: halves of halves of that one's
    widest sides. As boxes end at points, those of k points are narrower than their node by (k − 1) / (k + 1).
    """
    node = min(max(NODE, round(expected)), len(points))  # no power of two: parts are cut off as of all points
    places = order(points, node)
    blocks = by_tile(points[places], node)
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    widths = high - low
    levels = max(0.0, math.log2(node / expected))
    if levels > 0.0:
        widths = widths * ((node + 1) / (node - 1))
        for _ in range(math.ceil(levels)):
            widest = np.argmax(widths, axis=1)
            widths[np.arange(len(widths)), widest] *= 2.0 ** -min(levels, 1.0)
            levels -= 1.0
        widths *= (size - 1) / (size + 1)
    where = np.empty(len(points), np.intp)
    where[places] = np.arange(len(points)) // node
    which = places[:: -(-len(points) // most)] if most else np.arange(len(points))
    middle, room = 0.5 * (low + high)[where[which]], 0.5 * np.maximum(high - low - widths, 0.0)[where[which]]
    return np.clip(points[which], middle - room, middle + room), widths[where[which]]


def _floors(
    rows: Array, columns: Array, weights: Array, apart: Array, widths: Array, beside: Array, number: float
) -> Array:
    """What :func:`lists` would take for the least log sums of rows' tiles, by the nearest so many columns, (b,)."""
    few = int(min(max(1.0, round(number)), len(columns)))
    near = np.argpartition(apart, few - 1, axis=1)[:, :few]
    spread = (widths * widths).sum(axis=1) / 12.0  # mean squares of distances from the middle of a tile
    terms = weights[near] - 0.5 * (np.take_along_axis(apart, near, axis=1) + spread[near])
    top = terms.max(axis=1, keepdims=True)
    parts = np.exp(terms - top)
    sums = parts.sum(axis=1)
    slope = np.stack([(parts * columns[near, a]).sum(axis=1) / sums for a in range(columns.shape[1])], axis=1) - rows
    steps = beside * beside / 12.0  # mean squares of rows' distances from the middle of their tile
    below = LEAST * np.sqrt((slope * slope * steps).sum(axis=1)) + 0.5 * steps.sum(axis=1)
    return np.log(sums) + top[:, 0] - below
