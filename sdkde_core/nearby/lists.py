"""For tiles of rows, the tiles of columns that can matter to them; see the package for why the others cannot."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import device

from ..arrays import array_namespace
from ..protocol import TOLERANCES, Problem, Reduction
from .tiles import TOGETHER, Index, Tiles, by_tile

COARSE, FINE = 0.01, 0.05  # shares of the tolerance: what is dropped as a tile of tiles, and as a tile
SLACK = 1e-12  # relative rounding of squares of distances, with room


def left_out(problem: Problem) -> float:
    """Return the largest share of a row's sum that lists leave out."""
    return (COARSE + FINE) * TOLERANCES[problem.precision][problem.reduction].absolute


class Lists(NamedTuple):
    """The tiles of columns that b tiles of rows need."""

    tiles: Any  # (l,), tiles of columns, tile of rows by tile of rows, in order
    ends: Any  # (b + 1,), where those of each begin, and the end
    floors: Any  # (b,), lower bounds on the log sums of each tile's rows
    cuts: Any  # (b,): of its listed tiles, a row may leave out those with no term above exp(cut)


def lists(
    problem: Problem, columns: Index, rows: Any, height: int, together: int = 0, least: float = -math.inf
) -> Lists:
    """Return for every tile of rows the tiles of columns that can matter, by the problem's reduction and precision.

    ``rows`` (m, d) float64 are finite, in an order that keeps neighbours together, ``height`` to a tile. What is far
    from all rows of a group is left out at once; a group has ``together`` rows, a multiple of ``height``, or all. Some
    hundreds are best. Memory is some 200 bytes for every tile of rows and column tile near its group. ``least``: a
    lower bound on rows' log sums, which other columns may add to.
    """
    xp, allowed = array_namespace(rows), TOLERANCES[problem.precision][problem.reduction].absolute
    blocks = by_tile(rows, height)
    floors = _floors(xp, columns, blocks)  # (b,)
    floors = xp.maximum(floors, xp.full_like(floors, least))
    tiles = blocks.shape[0]
    number = min(tiles, together // height) if together else tiles  # of tiles in a group
    low, high, least = (by_tile(x, number) for x in (xp.min(blocks, axis=1), xp.max(blocks, axis=1), floors))
    every = Tiles(xp.min(low, axis=1).T, xp.max(high, axis=1).T)  # (d, g)
    some = Tiles(xp.permute_dims(low, (2, 0, 1)), xp.permute_dims(high, (2, 0, 1)))  # (d, g, t)

    near = _nearest(xp, every, columns.coarse)
    share = xp.exp(columns.coarse.log_weight - columns.log_weight)
    share = xp.maximum(share, xp.full_like(share, 1.0 / share.shape[0]))
    mass = added(xp, problem, columns.log_weight, columns.coarse.log_weight, near, xp.min(least, axis=1))
    kept = mass >= COARSE * allowed * share / xp.sum(share)
    counts = xp.sum(xp.astype(kept, xp.int64), axis=1)
    first = xp.argsort(xp.astype(~kept, xp.int8), axis=1, stable=True)[:, : max(1, int(xp.max(counts)))]
    where, there = members(xp, first, columns.fine)  # (g, k)
    there = there & (xp.arange(where.shape[1], device=device(kept)) // TOGETHER < counts[:, None])

    near = _nearest(xp, some, Tiles(columns.fine.low[:, where], columns.fine.high[:, where]))  # (g, t, k)
    mass = added(xp, problem, columns.log_weight, columns.fine.log_weight[where][:, None, :], near, least)
    mass = xp.where(there[:, None, :], mass, xp.zeros_like(mass))
    needed = mass >= threshold(xp, mass, FINE * allowed)
    needed = xp.reshape(needed, (-1, needed.shape[2]))[:tiles, :]
    counts = xp.sum(xp.astype(needed, xp.int64), axis=1)
    ends = xp.cumulative_sum(counts, include_initial=True)
    tile, place = xp.nonzero(needed)

    listed = xp.astype(xp.maximum(counts, xp.ones_like(counts)), floors.dtype)
    cuts = math.log(0.04 * allowed / columns.size) - xp.log(listed) + floors  # 4 % of the tolerance; see the package
    depth = xp.maximum(columns.log_weight - cuts, xp.zeros_like(cuts))  # ½ r² of such a term at most
    if problem.reduction is Reduction.MEAN:
        cuts = cuts - xp.log(2.0 * (xp.sqrt(2.0 * depth) + _reach(xp, columns.log_weight, floors)))
    if problem.reduction is Reduction.LAPLACE:
        cuts = cuts - xp.log(2.0 * (1.0 + depth / (1.0 + 0.5 * problem.d)))
    return Lists(where[tile // number, place], ends, floors, cuts)


def members(xp: Any, coarse: Any, fine: Tiles) -> tuple[Any, Any]:
    """The fine tiles (b, k · TOGETHER) of coarse ones (b, k), 0 where there is none, and which fine tiles exist."""
    where = coarse[:, :, None] * TOGETHER + xp.arange(TOGETHER, device=device(coarse))
    where = xp.reshape(where, (coarse.shape[0], -1))
    there = where < fine.log_weight.shape[0]
    return xp.where(there, where, xp.zeros_like(where)), there


def _floors(xp: Any, columns: Index, blocks: Any) -> Any:
    """Lower bounds (b,) on the log sums of each tile's rows (b, height, d): from 64 coarse tiles, or fine ones.

    The coarse tiles are the nearest; the fine ones are those of the nearest four. Eight rows share one bound.
    """
    b, height, d = blocks.shape
    few = 8 if height % 8 == 0 else height
    rows = xp.reshape(blocks, (b, height // few, few, d))
    middle = xp.mean(blocks, axis=1)  # (b, d)
    coarse, fine = columns.coarse, columns.fine
    apart = sum((middle[:, a, None] - coarse.centre[a, :]) ** 2 for a in range(d))  # (b, k)
    order = xp.argsort(0.5 * (apart + coarse.square) - coarse.log_weight, axis=1, stable=True)
    near = _log_sums(xp, rows, fine, *members(xp, order[:, :4], fine))
    far = _log_sums(xp, rows, coarse, order[:, :64], order[:, :64] >= 0)
    floors = xp.min(xp.reshape(xp.maximum(near, far), (b, -1)), axis=1)
    # Beyond 1e105 bandwidths squares of squares overflow, to no number: then nothing is left out.
    return xp.where(xp.isnan(floors), xp.full_like(floors, -math.inf), floors)


def _log_sums(xp: Any, rows: Any, columns: Tiles, which: Any, there: Any) -> Any:
    """Lower bounds (b, p, few) on log sums of rows (b, p, few, d) over some tiles, (b, k); see the package."""
    d, weight = rows.shape[3], columns.log_weight[which]
    weight = xp.where(there, weight, xp.full_like(weight, -math.inf))[:, None, :]  # (b, 1, k)
    slip, spread = columns.slip[which][:, None, :], columns.square[which][:, None, :]
    middle = xp.mean(rows, axis=2)  # (b, p, d)
    square: Any = 0.0
    for a in range(d):
        square = square + (middle[:, :, a, None] - columns.centre[a, :][which][:, None, :]) ** 2  # (b, p, k)
    away = xp.sqrt(square)
    terms = weight - 0.5 * (1.0 + SLACK) * (square + 2.0 * away * slip + spread)
    top = xp.max(terms, axis=2)
    top = xp.where(top > -math.inf, top, xp.zeros_like(top))[:, :, None]
    parts = xp.exp(terms - top)
    total = xp.sum(parts, axis=2)  # (b, p)
    parts = parts / xp.where(total > 0.0, total, xp.ones_like(total))[:, :, None]
    off = parts * (slip + away * (away * slip + SLACK * (square + spread)))
    log_sum = (xp.log(total) + top[:, :, 0])[:, :, None]  # (b, p, 1)
    beside, length = 0.0, 0.0
    for a in range(d):
        slope = xp.sum(parts * (columns.centre[a, :][which][:, None, :] - middle[:, :, a, None]), axis=2)
        step = rows[:, :, :, a] - middle[:, :, a, None]  # (b, p, few)
        beside, length = beside + slope[:, :, None] * step, length + step * step
    curved = 0.5 * (1.0 + SLACK) * length
    return log_sum + beside - curved - 4.0 * xp.sum(off, axis=2)[:, :, None] * xp.sqrt(length)


def _nearest(xp: Any, rows: Tiles, columns: Tiles) -> Any:
    """Squares of the least distances between boxes, (…, b, k) of boxes (d, …, b) and (d, …, k), rounded down."""
    total: Any = 0.0
    for a in range(rows.low.shape[0]):
        low, high = columns.low[a, ...][..., None, :], columns.high[a, ...][..., None, :]
        gap = xp.maximum(low - rows.high[a, ...][..., :, None], rows.low[a, ...][..., :, None] - high)
        gap = xp.maximum(gap, xp.zeros_like(gap))
        total = total + gap * gap
    return total * (1.0 - SLACK)


def added(xp: Any, problem: Problem, log_weight: float, log_weights: Any, near: Any, floor: Any) -> Any:
    """Upper bounds on tiles' shares of a row's sum, (…, b, k), right below 1; ``log_weight``: of all columns."""
    exponent = 0.5 * near
    logs = (log_weights - floor[..., None]) - exponent
    mass = xp.exp(xp.minimum(logs, xp.zeros_like(logs)))
    if problem.reduction is Reduction.MEAN:
        reach = _reach(xp, log_weight, floor)[..., None]
        mass = mass * (xp.maximum(xp.sqrt(2.0 * exponent), xp.ones_like(mass)) + reach)
    if problem.reduction is Reduction.LAPLACE:
        mass = mass * (1.0 + exponent / (1.0 + 0.5 * problem.d))
    return mass


def _reach(xp: Any, log_weight: float, floor: Any) -> Any:
    """An upper bound on shifts, (b,); it holds for all columns too where these are a part of them."""
    return xp.sqrt(2.0 * xp.maximum(max(log_weight, 0.0) - floor, xp.zeros_like(floor)))


def threshold(xp: Any, mass: Any, allowed: float) -> Any:
    """A number for each row such that all smaller ones together are at most ``allowed``, (…, 1); by bisection."""
    good = xp.full_like(mass[..., :1], allowed / mass.shape[-1])
    factor = mass.shape[-1] ** 0.5  # by which it may be too small, halved in logs
    for _ in range(6):
        tried = good * factor
        sums = xp.sum(xp.where(mass < tried, mass, xp.zeros_like(mass)), axis=-1, keepdims=True)
        good = xp.where(sums <= allowed * (1.0 - 1e-9), tried, good)
        factor **= 0.5
    return good
