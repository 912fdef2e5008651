"""How many pairs of tiles :func:`lists` would leave, from some of the rows and columns."""

from __future__ import annotations

import math

import numpy as np

from ..protocol import TOLERANCES, Problem, Reduction, Sample
from .lists import FINE, threshold

__all__ = ["share"]

#: Rows and columns of a sample that are looked at, about.
ROWS, COLUMNS = 48, 1 << 12

#: Neighbours in a sample by which the density and the dimension around a row are judged.
FEW, SOME = 16, 128

#: How far boxes reach, in radii of balls with as many points, and how far floors are below log sums, nats: as measured.
BOXES, BELOW = 1.8, 2.0


def share(problem: Problem, sample: Sample, size: int, height: int) -> float:
    """Return about what share of the pairs is left, if tiles have ``height`` rows and ``size`` columns.

    Every column of the sample stands for a tile. Its distance from a row is less by the radii of both tiles, each that
    of the ball around the row which has so many of all points; the density there, and how the number grows with the
    radius, are judged by the row's neighbours in the sample.

    Parameters
    ----------
    problem : Problem
    sample : Sample
        Of its rows and columns.
    size, height : int
    """
    if len(sample.columns) <= SOME or problem.n <= 4 * size or not len(sample.rows):
        return 1.0
    thin = -(-len(sample.columns) // COLUMNS)
    rows, columns = sample.rows[:: -(-len(sample.rows) // ROWS)], sample.columns[::thin]
    n, known, weights = problem.n, len(columns), sample.log_weights[::thin]
    square = np.zeros((len(rows), known))
    for a in range(problem.d):
        square += (rows[:, a, None] - columns[:, a]) ** 2
    distance = np.sqrt(square)
    near = np.partition(distance, (FEW, SOME), axis=1)[:, [FEW, SOME]]  # itself may be the first
    near = np.maximum(near, 1e-300)
    dimension = np.clip(
        np.median(math.log(SOME / FEW) / np.log(np.maximum(near[:, 1] / near[:, 0], 1.01))), 1, problem.d
    )
    density = FEW * n / known / near[:, 0] ** dimension  # points in a ball: density · r^dimension
    radii = sum((points * n / of / density) ** (1.0 / dimension) for points, of in ((size, n), (height, problem.m)))
    gap = np.maximum(distance - BOXES * np.minimum(radii, near[:, 1])[:, None], 0.0)
    weights = weights + math.log(n / known)
    total, needed = float(np.logaddexp.reduce(weights)), np.zeros(distance.shape, bool)
    for scale in problem.scales or (1.0,):
        terms = weights - 0.5 / scale**2 * square
        top = np.max(terms, axis=1)
        floor = np.log(np.exp(terms - top[:, None]).sum(axis=1)) + top
        closest = (n / known / FEW) ** (-1.0 / dimension) * near[:, 0]
        floor = np.maximum(floor, float(weights.mean()) - math.log(n / known) - 0.5 / scale**2 * closest**2) - BELOW
        half = 0.5 / scale**2 * gap**2
        mass = np.exp(np.minimum(weights - half - floor[:, None], 0.0))
        if problem.reduction is Reduction.MEAN:
            mass *= np.sqrt(2.0 * half) + np.sqrt(2.0 * np.maximum(total - floor, 0.0))[:, None]
        if problem.reduction is Reduction.LAPLACE:
            mass *= 1.0 + half / (1.0 + 0.5 * problem.d)
        needed |= mass >= threshold(np, mass, FINE * TOLERANCES[problem.precision][problem.reduction].absolute)
    return float(needed.mean())
