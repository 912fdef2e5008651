"""How many pairs of tiles :func:`lists` would leave, from some of the rows and columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol import TOLERANCES, Problem, Reduction, Sample
from .lists import FINE, MANY, NEAREST, threshold
from .order import by_tile, order
from .tiles import TOGETHER

__all__ = ["boxes", "share"]

Array = NDArray[Any]

#: Rows and columns of a sample that are looked at, about.
ROWS, COLUMNS = 48, 1 << 12

#: Points of a sample whose box is taken, at least.
NODE = 8

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
    thin = -(-len(sample.columns) // COLUMNS)
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
    total, needed = float(np.logaddexp.reduce(weights)), np.zeros(square.shape, bool)
    for scale in problem.scales or (1.0,):
        found = [
            _floors(rows, columns, weights, apart, inside, row_widths, scale, least * TOGETHER * size * known / n)
            for inside, least in ((widths, NEAREST), (wide, MANY))
        ]
        floor = np.maximum(*found)
        half = 0.5 / scale**2 * square
        mass = np.exp(np.minimum(weights - half - floor[:, None], 0.0))
        if problem.reduction is Reduction.MEAN:
            mass *= np.maximum(np.sqrt(2.0 * half), 1.0) + np.sqrt(2.0 * np.maximum(total - floor, 0.0))[:, None]
        if problem.reduction is Reduction.LAPLACE:
            mass *= 1.0 + half / (1.0 + 0.5 * problem.d)
        needed |= mass >= threshold(np, mass, FINE * TOLERANCES[problem.precision][problem.reduction].absolute)
    return float(needed.mean())


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
    rows: Array, columns: Array, weights: Array, apart: Array, widths: Array, beside: Array, scale: float, number: float
) -> Array:
    """What :func:`lists` would take for the least log sums of rows' tiles, by the nearest so many columns, (b,)."""
    few = int(min(max(1.0, round(number)), len(columns)))
    near = np.argpartition(apart, few - 1, axis=1)[:, :few]
    spread = (widths * widths).sum(axis=1) / 12.0  # mean squares of distances from the middle of a tile
    terms = weights[near] - 0.5 / scale**2 * (np.take_along_axis(apart, near, axis=1) + spread[near])
    top = terms.max(axis=1, keepdims=True)
    parts = np.exp(terms - top)
    sums = parts.sum(axis=1)
    slope = np.stack([(parts * columns[near, a]).sum(axis=1) / sums for a in range(columns.shape[1])], axis=1) - rows
    steps = beside * beside / 12.0  # mean squares of rows' distances from the middle of their tile
    below = LEAST * np.sqrt((slope * slope * steps).sum(axis=1)) + 0.5 * steps.sum(axis=1)
    return np.log(sums) + top[:, 0] - below / scale**2
