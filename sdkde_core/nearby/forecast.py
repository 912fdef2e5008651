"""The share of the pairs that lists would leave, for prices: estimated from some points, or for typical data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import device

from ..arrays import array_namespace
from ..engine.repeats import places
from ..protocol import Problem
from .lists import added


def rough_share(
    problem: Problem, rows: Any, columns: Any, log_weights: Any, size: int, height: int, out: float,
    few: tuple[int, int] = (64, 2048),
) -> float:  # fmt: skip
    """Estimate the share of the pairs that is left, from few points, quickly, on any device.

    Tiles are taken to be as wide as cubes that hold a tile's points, and to lie nearer than their points by that
    width. How densely points lie beside a row, and in how many dimensions, is seen from its distances to the nearest of
    the sample. A row's sum is that over the sample. The share is 1 where the sample is too small to tell, or a number
    is not finite.

    ``rows`` (r, d) and ``columns`` (k, d) are all, or some; ``log_weights`` (k,) are these columns' among all n.
    ``size`` and ``height``: columns and rows of a tile. ``out``: what may be left out of a row's sum, relative to that.
    ``few``: rows and columns that are looked at, at most.
    """
    if columns.shape[0] <= 64 or not rows.shape[0] or not problem.m:
        return 1.0
    xp, on = array_namespace(columns), device(columns)
    some, thin = (xp.asarray(places(x.shape[0], most), device=on) for x, most in zip((rows, columns), few))
    k, d = thin.shape[0], columns.shape[1]
    tall = height * problem.n / problem.m  # of as many columns as lie where a tile of rows does
    with np.errstate(all="ignore"):
        taken = (rows, some), (columns, thin), (log_weights, thin)  # as float32: half the time
        rows, columns, log_weights = (xp.astype(xp.take(x, at, axis=0), xp.float32) for x, at in taken)
        square = xp.zeros((rows.shape[0], k), dtype=columns.dtype, device=on)
        for a in range(d):
            square = square + (rows[:, a, None] - columns[None, :, a]) ** 2
        others = xp.sort(xp.where(square > 0.0, square, xp.full_like(square, math.inf)), axis=1, stable=False)
        # The distances to the 4 and 16 nearest of the sample say how densely points lie, and in how many dimensions.
        near, far = (0.5 * xp.log(others[:, at - 1]) for at in (4, 16))
        apart = float(xp.sort(far - near, stable=False)[rows.shape[0] // 2])
        if not apart > 0.0:  # NaN too
            return 1.0
        within = min(max(math.log(4.0) / apart, 1.0), float(d))
        ball = 0.5 * within * math.log(math.pi) - math.lgamma(0.5 * within + 1.0)  # log volume of a ball of radius 1
        many = math.log(problem.n / k)
        wide = sum(math.exp((ball + math.log(points / 4) - many) / within) for points in (size, tall))
        halved = math.log2(max(2.0, problem.n / max(size, tall)))  # dimensions: in others a tile is as wide as all
        nearest = math.sqrt(min(1.0, halved / within)) * xp.sqrt(square) - (wide * xp.exp(near))[:, None]
        nearest = xp.where(nearest > 0.0, nearest, xp.zeros_like(nearest))
        terms = log_weights + many - 0.5 * square
        most = xp.max(terms, axis=1, keepdims=True)
        log_sum = (most + xp.log(xp.sum(xp.exp(terms - most), axis=1, keepdims=True)))[:, 0]
        total = many + float(xp.max(log_weights) + xp.log(xp.sum(xp.exp(log_weights - xp.max(log_weights)))))
        mass = added(xp, problem, total, log_weights + many, nearest**2, log_sum)
        left = xp.cumulative_sum(xp.sort(mass, axis=1, stable=False), axis=1) > out
        return float(xp.mean(xp.astype(left, xp.float32)))


def typical_share(problem: Problem, size: int, height: int, out: float) -> float:
    """Estimate the share of the pairs that is left, for a price: that of a normal sample with the problem's extent.

    Let σ be the standard deviation in bandwidths. The farthest of n points is at some (√d + √(2 log n)) σ, which is the
    extent. Where that is far beyond the usual one, either the bandwidth is small or a few points are far out: σ is
    then taken a third of the way from four times the usual one, in logs.

    A row at a distance of √d σ has the log sum ℓ = −½ d (log(1 + σ²) + σ² / (1 + σ²)). Where few columns are within a
    bandwidth, it is that of the nearest ``size`` columns, in a ball whose radius follows from the density at the row.
    A tile is left out if its part is below ``out`` of that: where it is farther than R = √(2 (−ℓ − log out)).
    Tiles of a k-d tree are halved log₂(n / size) times, so about 3.7 σ 2^(−log₂(n / size) / d) wide (fitted to
    counts). Two coordinates differ by √2 σ z with z normal, and their boxes by the mean of both widths less. The sum of
    the squares over d dimensions is close to a gamma variable with its mean and variance. R² is a quantile of that
    variable (Wilson and Hilferty's cube root). The share is within a third of what was counted for normal samples of a
    million in 4 to 10 dimensions (benchmarks/notes/choice.md).
    """
    n, m, d = problem.n, problem.m, problem.d
    if not 2 * size < n or not m:
        return 1.0
    usual = n ** (1.0 / (d + 4)) / 0.9
    sigma = max(problem.extent, 1e-3) / (math.sqrt(d) + math.sqrt(2.0 * math.log(n)))
    if sigma > 4.0 * usual:
        sigma = 4.0 * usual * (sigma / (4.0 * usual)) ** (1.0 / 3.0)
    log_ball = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1.0)
    log_density = -0.5 * d * (math.log(2.0 * math.pi) + 2.0 * math.log(sigma) + 1.0)
    square = math.exp(2.0 / d * (math.log(size / n) - log_density - log_ball))
    among_many = 0.5 * d * (math.log1p(sigma**2) + sigma**2 / (1.0 + sigma**2))
    log_sum = -max(among_many, math.log(n / size) + 0.5 * square * d / (d + 2.0))
    wide = sum(0.5 * 3.7 * (size_of / of) ** (1.0 / d) for size_of, of in ((size, n), (min(height, m), m)))
    t = wide / math.sqrt(2.0)
    beyond, at = 0.5 * math.erfc(t / math.sqrt(2.0)), math.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
    second = 2.0 * ((1.0 + t * t) * beyond - t * at)  # E max(|z| − t, 0)², and to the fourth power
    fourth = 2.0 * ((t**4 + 6.0 * t * t + 3.0) * beyond - (t**3 + 5.0 * t) * at)
    if not second > 1e-9:
        return 1.0
    shape = d * second**2 / (fourth - second**2)
    over_mean = -(log_sum + math.log(out)) / (sigma**2 * d * second)
    z = (max(over_mean, 0.0) ** (1.0 / 3.0) - 1.0 + 1.0 / (9.0 * shape)) * math.sqrt(9.0 * shape)
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
