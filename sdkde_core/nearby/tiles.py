"""Tiles of points in order: boxes around them, and what bounds a row's sum over one from below."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from .order import by_tile, order

__all__ = ["TOGETHER", "Index", "Tiles", "index"]

#: Tiles of columns that are first looked at together.
TOGETHER = 16


class Tiles(NamedTuple):
    """Consecutive points, so many at a time; k tiles. Coordinates come first, so that each is contiguous.

    Parameters
    ----------
    low, high : (d, k) arrays
        Their boxes.
    centre : (d, k) array
        Their weighted means, and of columns only, as all that follows.
    square : (k,) array
        Weighted mean squares of the distances from there.
    slip : (k,) array
        How far off the centre may be by rounding.
    log_weight : (k,) array
        Logs of their weights' sums.
    without : (k,) array
        The same when the heaviest column is left out; −inf for a single one.
    """

    low: Any
    high: Any
    centre: Any = None
    square: Any = None
    slip: Any = None
    log_weight: Any = None
    without: Any = None


class Index(NamedTuple):
    """Columns in order.

    Parameters
    ----------
    order : (n,) array
        Of the columns as they came.
    size : int
        Columns of a tile, but for the last one.
    fine, coarse : Tiles
        Tiles, and :data:`TOGETHER` of them at a time.
    log_weight : float
        Log of the weights' sum.
    """

    order: Any
    size: int
    fine: Tiles
    coarse: Tiles
    log_weight: float


def index(points: Any, log_weights: Any, size: int, leaf: int = 0) -> Index:
    """Return columns' order and tiles.

    Parameters
    ----------
    points : (n, d) float64 array
        Finite.
    log_weights : (n,) float64 array
        Finite.
    size : int
        Columns of a tile.
    leaf : int, optional
        Points that stand together in the order, if fewer than that; ``size`` is a multiple.
    """
    where = order(points, leaf or size)
    sorted_points, weights = points[where, :], log_weights[where]
    fine, coarse = (_columns(sorted_points, weights, s) for s in (size, TOGETHER * size))
    xp = array_namespace(points)
    top = xp.max(fine.log_weight)
    return Index(where, size, fine, coarse, float(top + xp.log(xp.sum(xp.exp(fine.log_weight - top)))))


def _columns(points: Any, log_weights: Any, size: int) -> Tiles:
    xp, n = array_namespace(points), points.shape[0]
    blocks, logs = by_tile(points, size), by_tile(log_weights, size)
    there = xp.reshape(xp.arange(logs.shape[0] * size, device=device(points)), logs.shape) < n
    logs = xp.where(there, logs, xp.full_like(logs, -math.inf))
    low, high = xp.min(blocks, axis=1), xp.max(blocks, axis=1)  # (k, d)
    top = xp.max(logs, axis=1)
    shares = xp.exp(logs - top[:, None])  # (k, size), the largest is 1
    total = xp.sum(shares, axis=1)
    rest = xp.sum(shares, axis=1) - 1.0
    inside = blocks - low[:, None, :]
    mean = xp.sum(inside * shares[:, :, None], axis=1) / total[:, None]
    apart = inside - mean[:, None, :]
    square = xp.sum(xp.sum(apart * apart, axis=2) * shares, axis=1) / total
    width, away = (xp.sqrt(xp.sum(x * x, axis=1)) for x in (high - low, xp.abs(low) + xp.abs(high)))
    epsilon = 2.0**-52
    tiny = size * epsilon  # a sum of so many, less one, may be that by rounding alone
    without = xp.where(rest > tiny, xp.log(xp.where(rest > tiny, rest - tiny, xp.ones_like(rest))) + top, -math.inf)
    return Tiles(
        *(low.T, high.T, (low + mean).T, square),
        *(size * epsilon * width + epsilon * away, xp.log(total) + top, without),
    )
