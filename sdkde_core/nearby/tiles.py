"""Tiles of points in order: boxes around them, and what bounds a row's sum over one from below."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from .order import by_tile, order

#: Tiles of columns that are first looked at together.
TOGETHER = 16


class Tiles(NamedTuple):
    """Tiles of consecutive points, k of them. Coordinates come first, so that each is contiguous."""

    low: Any  # (d, k), their boxes
    high: Any
    centre: Any = None  # (d, k), their weighted means, and of columns only, as all that follows
    square: Any = None  # (k,), weighted mean squares of the distances from there
    slip: Any = None  # (k,), how far off the centre may be by rounding
    log_weight: Any = None  # (k,), logs of their weights' sums


class Index(NamedTuple):
    """Columns in order."""

    order: Any  # (n,), of the columns as they came
    size: int  # columns of a tile, but for the last one
    fine: Tiles
    coarse: Tiles  # :data:`TOGETHER` tiles at a time
    log_weight: float  # log of the weights' sum


def index(points: Any, log_weights: Any, size: int, leaf: int = 0) -> Index:
    """Return the order of finite columns (n, d), and their tiles, of ``size`` columns each.

    ``leaf`` points stand together in the order, by default ``size``, which is a multiple.
    """
    where = order(points, leaf or size)
    xp, weights = array_namespace(points), log_weights[where]
    along = xp.stack([points[where, a] for a in range(points.shape[1])])
    fine, coarse = (_columns(along, weights, s) for s in (size, TOGETHER * size))
    top = xp.max(fine.log_weight)
    return Index(where, size, fine, coarse, float(top + xp.log(xp.sum(xp.exp(fine.log_weight - top)))))


def _columns(along: Any, log_weights: Any, size: int) -> Tiles:
    """Tiles of points (d, n) in order."""
    xp, n = array_namespace(along), along.shape[1]
    blocks, logs = by_tile(along, size, axis=1), by_tile(log_weights, size)
    if n % size:
        logs[-1, n % size :] = -math.inf
    low, high, top = xp.min(blocks, axis=2), xp.max(blocks, axis=2), xp.max(logs, axis=1)
    shares = xp.exp(logs - top[:, None])  # (k, size), the largest is 1
    total = xp.sum(shares, axis=1)
    inside = blocks - low[:, :, None]
    mean = xp.sum(inside * shares, axis=2) / total
    inside -= mean[:, :, None]
    square = xp.sum(xp.sum(inside * inside * shares, axis=2), axis=0) / total
    width, away = (xp.sqrt(xp.sum(x * x, axis=0)) for x in (high - low, xp.abs(low) + xp.abs(high)))
    epsilon = 2.0**-52
    slip = size * epsilon * width + epsilon * away
    return Tiles(low, high, low + mean, square, slip, xp.log(total) + top)
