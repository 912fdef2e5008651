"""Points in the order of a k-d tree's leaves, tiles of them, and what bounds a row's sum over one from below."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import device

from ..arrays import array_namespace

TOGETHER = 16  # tiles of columns that are first looked at together


def order(points: Any, size: int) -> Any:
    """Return the indices of finite points (n, d) in the order of a k-d tree's leaves, which have ``size`` points each.

    The widest dimension of a node is split in the middle, level by level. Where the library has a partition in linear
    time (NumPy), the nodes of a level are split side by side, as one array: for that the points are first cut into
    parts of ``size`` times powers of two, the largest first, and what is left is the last leaf. Other libraries sort
    all points of a level at once, by node and by where they are in it. The same points give the same order.
    """
    xp = array_namespace(points)
    if points.shape[1] == 1:
        return xp.argsort(points[:, 0], stable=False)
    if not hasattr(xp, "argpartition"):
        return _sorted(xp, points, size)
    n, start = points.shape[0], 0
    where, along = xp.arange(n), xp.asarray(points.T, order="C", copy=True)  # coordinates one after the other
    while n - start > size:
        most = size << (((n - start) // size).bit_length() - 1)
        if most < n - start:
            nodes, inside = _split(xp, where[None, start:], along[:, None, start:], most)
            where[start:], along[:, start:] = nodes[0, :], inside[:, 0, :]
        stop = start + most
        nodes, inside = where[None, start:stop], along[:, None, start:stop]
        while nodes.shape[1] > size:
            half = nodes.shape[1] // 2
            nodes, inside = _split(xp, nodes, inside, half)
            nodes, inside = xp.reshape(nodes, (-1, half)), xp.reshape(inside, (inside.shape[0], -1, half))
        where[start:stop] = xp.reshape(nodes, (-1,))
        start = stop
    return where


def _split(xp: Any, nodes: Any, along: Any, at: int) -> tuple[Any, Any]:
    """Nodes' indices (k, length) and coordinates (d, k, length), the ``at`` least along the widest dimension first."""
    widest = xp.argmax(xp.max(along, axis=2) - xp.min(along, axis=2), axis=0)  # (k,)
    places = xp.argpartition(along[widest, xp.arange(nodes.shape[0]), :], at, axis=1)
    return xp.take_along_axis(nodes, places, axis=1), xp.take_along_axis(along, places[None, :, :], axis=2)


def _sorted(xp: Any, points: Any, size: int) -> Any:
    """The order of all leaves, by sorts of all points.

    Nodes are as wide as a power of two of leaves, but for the last one. While they have more than 256 leaves they are
    split into four along one dimension, then in halves: the fewer sorts the better, and shapes matter last.
    Coordinates are kept one after the other, in the order so far: rows of a few numbers are gathered slowly on a GPU,
    and what has been put in order is nearly where it was.
    """
    n, on = points.shape[0], device(points)
    where, along = xp.arange(n, device=on), xp.asarray(points.T, copy=True)
    width = size << (-(-n // size) - 1).bit_length()
    while width > size:
        moved = _within(xp, along, width)
        where, along = where[moved], along[:, moved]
        width //= 4 if width > 256 * size else 2
    return where


def _within(xp: Any, along: Any, width: int) -> Any:
    """Where points (d, n) go that are sorted within nodes of ``width`` points, along each one's widest dimension.

    A GPU's time is that of the launches: a block of threads sorts up to 4096 numbers, all nodes at once. In wider nodes
    numbers of 31 bits, which begin with the node's, sort in half the time of 63. To index is a launch, to take four.
    """
    n, blocks = along.shape[1], by_tile(along, width, axis=1)  # (d, nodes, width)
    low, nodes = xp.min(blocks, axis=2), blocks.shape[1]
    extents, node = xp.max(blocks, axis=2) - low, xp.arange(nodes, device=device(along))
    widest = xp.argmax(extents, axis=0)
    place = blocks[widest, node, ...]  # (nodes, width)
    if width <= 4096:
        if nodes * width > n:
            xp.reshape(place, (-1,))[n:] = math.inf  # what fills the last node stays last
        return xp.reshape(xp.argsort(place, axis=1, stable=True) + width * node[:, None], (-1,))[:n]
    low, extents = low[widest, node][:, None], extents[widest, node][:, None]
    steps = max((1 << 31) // nodes, 1 << 8)
    place = (place - low) * (steps / xp.where(extents > 0.0, extents, xp.ones_like(extents)))
    key = node[:, None] * steps + xp.clip(xp.astype(place, xp.int64), max=steps - 1)
    key = xp.astype(key, xp.int32) if nodes * steps <= 1 << 31 else key
    return xp.argsort(xp.reshape(key, (-1,))[:n], axis=0, stable=True)


def by_tile(x: Any, size: int, axis: int = 0) -> Any:
    """(n, …) as (tiles, size, …), the last tile filled with its last point; likewise along another axis."""
    xp, before, n, after = array_namespace(x), x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if n % size:
        last = xp.take(x, xp.full_like(xp.arange(-n % size, device=device(x)), n - 1), axis=axis)
        x = xp.concat([x, last], axis=axis)
    return xp.reshape(x, (*before, -1, size, *after))


class Tiles(NamedTuple):
    """Tiles of consecutive points, k of them. Coordinates come first, so that each is contiguous."""

    low: Any  # (d, k), their boxes
    high: Any
    centre: Any = None  # (d, k), their weighted means, and of columns only, as all that follows
    square: Any = None  # (k,), weighted mean squares of the distances from there
    slip: Any = None  # (k,), how far off the centre may be by rounding
    log_weight: Any = None  # (k,), logs of their weights' sums


class Index(NamedTuple):
    order: Any  # (n,), of the columns as they came
    size: int  # columns of a tile, but for the last one
    fine: Tiles
    coarse: Tiles  # :data:`TOGETHER` tiles at a time
    log_weight: float  # log of the weights' sum


def index(points: Any, log_weights: Any, size: int, leaf: int = 0, where: Any = None) -> Index:
    """Return the order of finite columns (n, d), and their tiles, of ``size`` columns each.

    ``leaf`` points stand together in the order, by default ``size``, which is a multiple; ``where``: such an order.
    """
    where = order(points, leaf or size) if where is None else where
    xp, weights = array_namespace(points), log_weights[where]
    along = xp.stack([points[where, a] for a in range(points.shape[1])])
    fine, coarse = (_columns(along, weights, s) for s in (size, TOGETHER * size))
    top = xp.max(fine.log_weight)
    return Index(where, size, fine, coarse, float(top + xp.log(xp.sum(xp.exp(fine.log_weight - top)))))


def levels(points: Any, log_weights: Any, found: Index) -> list[Tiles]:
    """Return the tiles of columns, tiles of tiles, and so on, the largest ones first: 64 at most, or coarse ones."""
    made, size = [found.coarse, found.fine], TOGETHER * found.size
    while made[0].log_weight.shape[0] > 64:
        size *= TOGETHER
        along = array_namespace(points).stack([points[found.order, a] for a in range(points.shape[1])])
        made.insert(0, _columns(along, log_weights[found.order], size))
    return made


def _columns(along: Any, log_weights: Any, size: int) -> Tiles:
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
