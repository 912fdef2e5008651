"""Points in the order of a k-d tree's leaves, tiles of them, and what bounds a row's sum over one from below."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

#: Tiles of columns that are first looked at together.
TOGETHER = 16


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
    """Return nodes, (k, length) indices, and their coordinates with the ``at`` least along the widest dimension first.

    Coordinates are (d, k, length).
    """
    widest = xp.argmax(xp.max(along, axis=2) - xp.min(along, axis=2), axis=0)  # (k,)
    places = xp.argpartition(along[widest, xp.arange(nodes.shape[0]), :], at, axis=1)
    return xp.take_along_axis(nodes, places, axis=1), xp.take_along_axis(along, places[None, :, :], axis=2)


def _sorted(xp: Any, points: Any, size: int) -> Any:
    """The order of all leaves, by sorts of all points.

    Coordinates are kept one after the other, in the order so far: rows of a few numbers are gathered slowly on a GPU,
    and what has been put in order is nearly where it was.
    """
    n, on = points.shape[0], device(points)
    where, along = xp.arange(n, device=on), xp.asarray(points.T, copy=True)
    for starts, longest, node in _nodes(xp, where // size, -(-n // size)):
        moved = _within(xp, along, starts, longest, node, size)
        where, along = where[moved], xp.take(along, moved, axis=1)
    return where


def _nodes(xp: Any, leaf: Any, leaves: int) -> Iterator[tuple[Any, int, Any]]:
    """The last three arguments but one of :func:`_within`, sort by sort; ``leaf`` is every point's.

    First nodes are stretches of whole parts, of 128 leaves each: node k of 2^level has those from
    ⌈k · parts / 2^level⌉ on. Two levels are split at once, along one dimension: the fewer sorts the better, and here
    shapes do not matter yet. Then every part is split in halves. So tiles of leaves, by powers of two, are nodes too.
    """
    part, on = 128, device(leaf)
    parts = -(-leaves // part)
    for level in range(0, (parts - 1).bit_length(), 2):
        starts = ((xp.arange((1 << level) + 1, device=on) * parts + (1 << level) - 1) >> level) * part
        yield starts, -(-parts // (1 << level)) * part, ((leaf // part) << level) // parts
    for wide in (128, 64, 32, 16, 8, 4, 2):
        if wide < 2 * leaves:
            yield xp.arange(-(-leaves // wide) + 1, device=on) * wide, wide, leaf // wide


def _within(xp: Any, along: Any, starts: Any, longest: int, node: Any, size: int) -> Any:
    """Where points (d, n) go that are sorted within their nodes, along each one's widest dimension.

    Nodes begin at the leaves ``starts``, (k + 1,), in which the end of the last may be beyond all points, and have
    ``longest`` at most; ``node`` (n,) are the points'.
    """
    d, n = along.shape
    count = starts.shape[0] - 1
    blocks = by_tile(along, size, axis=1)
    leaves = blocks.shape[1]
    last = xp.minimum(starts[1:, None], xp.full_like(starts[1:, None], leaves)) - 1
    within = starts[:-1, None] + xp.arange(min(longest, leaves), device=device(along))
    within = xp.reshape(xp.minimum(within, last), (-1,))  # (nodes · leaves,)
    low, high = (
        best(xp.reshape(xp.take(best(blocks, axis=2), within, axis=1), (d, count, -1)), axis=2)
        for best in (xp.min, xp.max)
    )
    widest = xp.argmax(high - low, axis=0)[None, :]  # (1, nodes)
    low, width = (xp.take_along_axis(x, widest, axis=0)[0, :] for x in (low, high - low))
    place = xp.take_along_axis(along, widest[:, node], axis=0)[0, :]
    steps = max((1 << 31) // max(count, n // size), 1 << 8)  # numbers of 31 bits sort in half the time of 63
    scale = steps / xp.where(width > 0.0, width, xp.ones_like(width))
    place = xp.astype((place - low[node]) * scale[node], xp.int64)
    key = node * steps + xp.minimum(place, xp.full_like(place, steps - 1))
    return xp.argsort(xp.astype(key, xp.int32) if count * steps <= 1 << 31 else key, axis=0, stable=True)


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
    """Columns in order."""

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
