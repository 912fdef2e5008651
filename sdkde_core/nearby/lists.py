"""For tiles of rows, the tiles of columns that can matter to them; see the package for why the others cannot."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from ..protocol import TOLERANCES, Problem, Reduction
from .tiles import TOGETHER, Index, Tiles, boxes, by_tile

__all__ = ["FINE", "PARTS", "Lists", "lists", "threshold"]

#: Shares of the tolerance: what is dropped as a tile of tiles, as a tile, and what a backend may drop by its terms.
COARSE, FINE, TERMS = 0.01, 0.05, 0.04

#: Coarse tiles by which a row's sum is bounded from below: those looked at closely, and in all.
NEAREST, MANY = 4, 64

#: Tiles of terms at the cut that rows may leave out.
PARTS = 32.0

#: Halvings of the factor by which a threshold may be too small.
STEPS = 6

#: Relative rounding of squares of distances, with room.
SLACK = 1e-12


class Lists(NamedTuple):
    """The tiles of columns that rows need: b tiles of rows.

    Parameters
    ----------
    tiles : (l,) array of int
        Tiles of columns, tile of rows by tile of rows, in order.
    ends : (b + 1,) array of int
        Where those of each begin, and the end.
    floors : (b, scales) array
        What the log sums of a tile's rows are at least.
    cuts : (b, scales) array
        Of its listed tiles, a row may leave out those with no term above exp(cut), if the sum of
        (their largest term / exp(cut))^0.9 is at most :data:`PARTS`.
    """

    tiles: Any
    ends: Any
    floors: Any
    cuts: Any


def lists(problem: Problem, columns: Index, rows: Any, height: int) -> Lists:
    """Return for every tile of rows the tiles of columns that can matter.

    Parameters
    ----------
    problem : Problem
        Its reduction, precision, scales and features are used.
    columns : Index
    rows : (m, d) float64 array
        Rows that are neighbours, in order, finite; some hundreds: what is far from all of them is left out at once.
    height : int
        Rows of a tile, but for the last one.
    """
    xp = array_namespace(rows)
    scales: tuple[float, ...] = problem.scales or (1.0,)
    floors = _floors(xp, problem, columns, rows, height)
    every, some = boxes(rows, rows.shape[0]), boxes(rows, height)

    kept: Any = None
    needed: Any = None
    near = _nearest(xp, every, columns.coarse)
    share = xp.exp(columns.coarse.log_weight - columns.log_weight)
    share = xp.maximum(share, xp.full_like(share, 1.0 / share.shape[0]))
    for s, scale in enumerate(scales):
        mass = _mass(xp, problem, columns, columns.coarse, near, xp.min(floors[:, s : s + 1], axis=0), scale)
        part = mass >= COARSE * _allowed(problem) * share / xp.sum(share)
        kept = part if kept is None else kept | part
    where = _members(xp, xp.nonzero(xp.reshape(kept, (-1,)))[0])
    where = where[where < columns.fine.log_weight.shape[0]]
    fine = Tiles(*(x[..., where] for x in columns.fine))

    near = _nearest(xp, some, fine)
    for s, scale in enumerate(scales):
        mass = _mass(xp, problem, columns, fine, near, floors[:, s], scale)
        part = mass >= threshold(xp, mass, FINE * _allowed(problem))
        needed = part if needed is None else needed | part
    counts = xp.sum(xp.astype(needed, xp.int64), axis=1)
    ends = xp.concat([xp.zeros((1,), dtype=xp.int64, device=device(rows)), xp.cumulative_sum(counts)])
    return Lists(where[xp.nonzero(needed)[1]], ends, floors, _cuts(xp, problem, columns, floors))


def _allowed(problem: Problem) -> float:
    return TOLERANCES[problem.precision][problem.reduction].absolute


def _members(xp: Any, coarse: Any) -> Any:
    """The fine tiles of coarse ones, (…, k) as (…, k · TOGETHER); some may be beyond the last."""
    within = coarse[..., None] * TOGETHER + xp.arange(TOGETHER, device=device(coarse))
    return xp.reshape(within, (*coarse.shape[:-1], -1))


def _floors(xp: Any, problem: Problem, columns: Index, rows: Any, height: int) -> Any:
    """What the log sums of a tile's rows are at least, (b, scales): from the nearest tiles, or from coarse ones."""
    blocks = by_tile(rows, height)  # (b, height, d)
    middle = xp.mean(blocks, axis=1)  # (b, d)
    coarse, fine = columns.coarse, columns.fine
    alone, found = "exclude_self" in problem.requires, []
    apart = sum((middle[:, a, None] - coarse.centre[a, :]) ** 2 for a in range(problem.d))  # (b, k)
    for scale in problem.scales or (1.0,):
        order = xp.argsort(0.5 / scale**2 * (apart + coarse.square) - coarse.log_weight, axis=1)
        which = _members(xp, order[:, :NEAREST])  # (b, k)
        there = which < fine.log_weight.shape[0]
        which = xp.where(there, which, xp.zeros_like(which))
        near = _log_sums(xp, blocks, fine, which, there, scale, alone)
        which = order[:, :MANY]
        far = _log_sums(xp, blocks, coarse, which, which >= 0, scale, alone)
        found.append(xp.min(xp.maximum(near, far), axis=1))
    return xp.stack(found, axis=1)


def _log_sums(xp: Any, blocks: Any, columns: Tiles, which: Any, there: Any, scale: float, alone: bool) -> Any:
    """What log sums of rows over some tiles, (b, k), are at least, (b, height).

    ``alone``: a row's own column, which may be any, is left out.
    """
    square = 0.0
    for a in range(blocks.shape[2]):
        away = blocks[:, :, a, None] - columns.centre[a, :][which][:, None, :]
        square = square + away * away  # (b, height, k)
    square = square + 2.0 * xp.sqrt(square) * columns.slip[which][:, None, :] + columns.square[which][:, None, :]
    weight = columns.without if alone else columns.log_weight
    several = weight > -math.inf  # of tiles with one column nothing may be left
    spread = xp.where(several, columns.log_weight - weight, xp.zeros_like(weight))
    square = square * (xp.exp(spread) * (1.0 + SLACK))[which][:, None, :]
    weight = xp.where(there, weight[which], xp.full_like(square[:, 0, :], -math.inf))
    terms = weight[:, None, :] - 0.5 / scale**2 * square
    top = xp.max(terms, axis=2)
    safe = xp.where(top > -math.inf, top, xp.zeros_like(top))
    return xp.log(xp.sum(xp.exp(terms - safe[:, :, None]), axis=2)) + safe


def _nearest(xp: Any, rows: Tiles, columns: Tiles) -> Any:
    """Squares of the least distances between boxes, (b, k), rounded down."""
    total = 0.0
    for a in range(rows.low.shape[0]):
        gap = xp.maximum(columns.low[a, :] - rows.high[a, :, None], rows.low[a, :, None] - columns.high[a, :])
        gap = xp.maximum(gap, xp.zeros_like(gap))
        total = total + gap * gap
    return total * (1.0 - SLACK)


def _mass(xp: Any, problem: Problem, columns: Index, tiles: Tiles, near: Any, floor: Any, scale: float) -> Any:
    """What tiles can add to a result, relative to the row's sum, (b, k); right where that is less than 1."""
    exponent = 0.5 / scale**2 * near
    logs = (tiles.log_weight - floor[:, None]) - exponent
    mass = xp.exp(xp.minimum(logs, xp.zeros_like(logs)))
    if problem.reduction is Reduction.MEAN:
        mass = mass * (xp.maximum(xp.sqrt(2.0 * exponent), xp.ones_like(mass)) + _reach(xp, columns, floor)[:, None])
    if problem.reduction is Reduction.LAPLACE:
        mass = mass * (1.0 + exponent / (1.0 + 0.5 * problem.d))
    return mass


def _reach(xp: Any, columns: Index, floor: Any) -> Any:
    """What a shift is at most, over the scale, (b,)."""
    return xp.sqrt(2.0 * xp.maximum(columns.log_weight - floor, xp.zeros_like(floor)))


def threshold(xp: Any, mass: Any, allowed: float) -> Any:
    """A number for each row such that all smaller ones together are at most ``allowed``, (b, 1); by bisection."""
    good = xp.full_like(mass[:, :1], allowed / mass.shape[1])
    factor = mass.shape[1] ** 0.5
    for _ in range(STEPS):
        tried = good * factor
        sums = xp.sum(xp.where(mass < tried, mass, xp.zeros_like(mass)), axis=1, keepdims=True)
        good = xp.where(sums <= allowed * (1.0 - 1e-9), tried, good)
        factor **= 0.5
    return good


def _cuts(xp: Any, problem: Problem, columns: Index, floors: Any) -> Any:
    """Logs of the terms that may be left out, (b, scales); see the package."""
    cuts = math.log(TERMS * _allowed(problem) / (PARTS * columns.size)) + floors
    depth = xp.maximum(columns.log_weight - cuts, xp.zeros_like(cuts))  # ½ r² of such a term at most
    if problem.reduction is Reduction.MEAN:
        cuts = cuts - xp.log(2.0 * (xp.sqrt(2.0 * depth) + _reach(xp, columns, floors)))
    if problem.reduction is Reduction.LAPLACE:
        cuts = cuts - xp.log(2.0 * (1.0 + depth / (1.0 + 0.5 * problem.d)))
    return cuts
