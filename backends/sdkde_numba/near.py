"""Sums over the pairs that matter: rows and columns in order, tile by tile of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.nearby import Index, Lists, Neighbours, index, order
from sdkde_core.plugin import concatenate, exponents, map_threads
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from .bounds import LEAF, LN2, TILE, Array, leaf_errors
from .compiled import call
from .cpu_kernels import ABSENT, ROWS, reduce_groups
from .leaf_kernels import GROUP, UNIT, add_leaves, choose_leaves, list_leaves


class Near(NamedTuple):
    """Columns in order, and their leaves."""

    columns: Index
    low: Array  # (d, leaves), their boxes
    high: Array  # (d, leaves)
    heavy: Array  # (leaves,), log2 of their weights, relative to the heaviest column
    peak: float  # log2 of the heaviest column's weight
    span: float  # log2 of the heaviest over the lightest
    tie: float  # see :func:`_tie`; for MEAN
    neighbours: Neighbours  # for rows that are far from all


def order_columns(columns: Columns, mean: bool, threads: int) -> Near:
    """Put finite columns in order; their leaves are those of the packed columns, tile by tile."""
    weights = columns.log_weights / LN2
    peak, lightest = float(weights.max()), float(weights.min())
    (found,) = map_threads(lambda c: index(c.points, c.log_weights, TILE, LEAF), [columns], 1, apart=True)
    points, shares = columns.points[found.order], np.exp2(weights[found.order] - peak)
    starts = np.arange(0, len(points), LEAF)
    low, high = (f.reduceat(points, starts, axis=0).T.copy() for f in (np.minimum, np.maximum))
    with np.errstate(divide="ignore"):  # of the least weights nothing is left
        heavy = np.maximum(np.log2(np.add.reduceat(shares, starts)), ABSENT[0])
    ties = map_threads(lambda x: _tie(x, shares), points.T if mean else [], threads, apart=True)
    neighbours = Neighbours(columns, found.order)
    return Near(found, low, high, heavy, peak, peak - lightest, max(ties, default=1.0), neighbours)


def _tie(x: Array, weights: Array) -> float:
    """The largest share that one value has in a tile of columns in order: these stand together in all coordinates."""
    if len(x) < TILE:
        return 1.0
    x, weights = (a[: len(a) // TILE * TILE].reshape(-1, TILE) for a in (x, weights))
    order = np.argsort(x, axis=1)
    x, weights = np.take_along_axis(x, order, axis=1), np.take_along_axis(weights, order, axis=1)
    first = np.ones(x.shape, bool)
    first[:, 1:] = x[:, 1:] != x[:, :-1]
    sums = np.bincount(np.cumsum(first) - 1, weights.reshape(-1))  # of each value in each tile
    tiles = np.maximum(weights.sum(axis=1), 1e-300)
    return float(np.max(sums / np.repeat(tiles, first.sum(axis=1))))


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An empty array that begins with a line of the cache: a vector that lies in two takes twice as long to read."""
    size, line = math.prod(shape) * np.dtype(dtype).itemsize, 64
    found = np.empty(size + line, np.uint8)
    start = -found.ctypes.data % line
    return found[start : start + size].view(dtype).reshape(shape)


def sum_leaves(
    problem: Problem, near: Near, columns: Array, log_weights: Array, rows: Array, found: Lists
) -> tuple[Partial, Array]:
    """Sum neighbouring rows (m, d) over the leaves that can matter to them, in float32.

    ``columns`` and ``log_weights`` are as packed, the latter log2, over the heaviest. The second result is the indices
    of rows whose errors may be beyond the tolerance.
    """
    (m, d), parts, mean = rows.shape, [], problem.reduction is Reduction.MEAN
    most = int(np.max(np.diff(found.ends), initial=1)) * (TILE // LEAF)  # leaves of a list
    groups, middle = TILE // GROUP, np.empty(d)
    x, weights, boxes, u = aligned((most, d, LEAF)), aligned((most, LEAF)), aligned((2, d, most)), aligned((TILE, d))
    heavies, masses, halves = aligned((most,)), aligned((most,)), aligned((groups, most))
    leaves, chosen, ends = np.empty(most, np.intp), np.empty((groups, most + 1), np.intp), np.empty(groups, np.intp)
    # Σ φ, then Σ φ r² and Σ φ r⁴, then shifts. Log sums in few dimensions need no moments: E[r²] ≤ 2 (log Σ w − ℓ).
    wanted = True, problem.reduction is not Reduction.LOG_SUM or d > 8, mean
    sums = [np.zeros((TILE, many, LEAF)) if wish else None for many, wish in zip((1, 2, d), wanted)]
    # The log weight of all columns of the problem: these may be a part of them.
    whole = float(max(near.columns.log_weight, 0.0) / LN2 - near.peak)
    counted = whole, {"log_sum": 0, "mean": 1, "laplace": 2}[problem.reduction.value]
    # What leaves that are left out may add; the lists of tiles have a share of their own.
    allowed = 0.15 * TOLERANCES[problem.precision][problem.reduction].absolute
    of_tiles, of_groups = 0.1 * allowed, 0.9 * allowed  # for all rows together, and for GROUP of them
    variant, add = (d, *wanted), (x, weights, chosen, ends, u, (0.0,) * d, *sums)
    for b, floor in enumerate(found.floors / LN2 - near.peak):
        listed, some = found.tiles[found.ends[b] : found.ends[b + 1]], rows[b * TILE : (b + 1) * TILE]
        for kept in sums:
            if kept is not None:
                kept[:] = 0.0
        count = call(
            *(list_leaves, (), columns, log_weights, near.low, near.high, near.heavy, listed, some, floor, *counted),
            *(of_tiles, x, weights, boxes, heavies, halves, masses, leaves, u, chosen, ends, middle),
        )
        call(add_leaves, variant, *add)
        call(choose_leaves, (), sums[0], heavies, halves, masses, count, d, *counted, of_groups, chosen, ends)
        call(add_leaves, variant, *add)
        parts.append([np.empty((len(some), 0)) if k is None else k[: len(some)].sum(axis=2) for k in sums])
    totals, moments, shifts = (np.concatenate(k) for k in zip(*parts))
    total = totals[:, 0]
    log_sum = np.log(total) + LN2 * near.peak
    square, fourth = 2.0 * np.maximum(near.columns.log_weight - log_sum, 0.0), np.zeros(m)
    if moments.shape[1]:
        square, fourth = (2.0 * LN2) * moments[:, 0] / total, (2.0 * LN2) ** 2 * moments[:, 1] / total
    across = np.array([np.linalg.norm(np.ptp(rows[i : i + TILE], axis=0)) for i in range(0, m, TILE)]) / 2.0
    across = np.repeat(across, TILE)[:m]
    shift = shifts / (UNIT * total[:, None]) if mean else None
    errors = leaf_errors(problem, log_sum, total, square, fourth, shift, across, near.tie, near.span)
    inexact = np.flatnonzero(~((log_sum >= LN2 * (near.peak - 60.0)) & (errors <= 1.0)))  # below terms may be lost
    if problem.reduction is Reduction.LAPLACE:
        return exponents.laplace(d, total, -LN2 * moments[:, 0], LN2 * near.peak), inexact
    return Partial(log_sum, shift=shift), inexact


def prepare_groups(groups: Sequence[Columns]) -> tuple[Array, ...]:
    """Pack groups for :func:`.cpu_kernels.reduce_groups`, each filled up to whole tiles of leaves."""
    parts, begins = list[tuple[Array, ...]](), [0]
    for group in groups:
        places = order(group.points, LEAF)
        filled = np.pad(places, (0, -len(places) % LEAF**2), "edge")
        x, w = UNIT * group.points[filled], np.maximum(group.log_weights[filled] / LN2, ABSENT[1])
        w[len(places) :] = ABSENT[1]
        leaves = x.reshape(-1, LEAF, x.shape[1])
        middles = (leaves.min(axis=1) + leaves.max(axis=1)) / 2.0
        radii = np.linalg.norm(leaves - middles[:, None], axis=2).max(axis=1)
        heavy = np.logaddexp2.reduce(w.reshape(-1, LEAF), axis=1)
        parts.append((_packed(x, w), _packed(middles, 0.0), radii.reshape(-1, LEAF), heavy.reshape(-1, LEAF)))
        begins.append(begins[-1] + len(middles) // LEAF)
    shapes = ((sum(map(len, each)), *each[0].shape[1:]) for each in zip(*parts))
    packed = (np.concatenate(each, out=aligned(shape, np.float64)) for each, shape in zip(zip(*parts), shapes))
    return *packed, np.array(begins)


def sum_groups(problem: Problem, rows: Array, state: Any, constants: Array, known: Array, threads: int) -> Partial:
    """Log sums (k, m) of rows (k, m, d)."""
    k, m, d = rows.shape
    # What is left out is less than a quarter of the tolerance; a task takes longer than to start a thread.
    cut = math.log2(0.25 * TOLERANCES[problem.precision][Reduction.LOG_SUM].absolute / state[2].size)
    size = min(256, max(16, (1 << 18) // (k * d)), max(1, (1 << 25) // state[0].size, -(-m // (2 * threads))))

    @np.errstate(divide="ignore")  # where a group adds nothing
    def task(first: int) -> Partial:
        here = slice(first, min(first + size, m))
        b = here.stop - first
        whole = -(-b // ROWS) * ROWS
        own, raised, tops = aligned((k, whole + 1, d + 2), np.float64), np.zeros((k, whole)), np.full(whole, 1e300)
        own[:, b:] = 0.0  # rows that need no leaf
        np.multiply(rows[:, here], UNIT, out=own[:, :b, :d])
        own[:, :b, d], own[:, :b, d + 1] = 1.0, -np.vecdot(own[:, :b, :d], own[:, :b, :d])
        raised[:, :b], tops[:b] = (np.maximum(x / LN2, -1e290) for x in (constants[:, here], known[here]))
        peaks, sums = np.full((k, whole), ABSENT[1]), np.zeros((k, whole))
        needed, places, counts = (np.empty(n, np.intp) for n in (LEAF, (LEAF, whole + ROWS), whole))
        room = aligned((ROWS, LEAF), np.float64), needed, places, counts, aligned((whole + 1, LEAF**2), np.float64)
        call(reduce_groups, (), *state, raised, own, cut, tops, peaks, sums, *room)
        return Partial((LN2 * (peaks + np.log2(sums)))[:, :b].T)

    return Partial(concatenate(map_threads(task, range(0, m, size), threads)).log_sum.T)


def _packed(x: Array, log_weights: Any) -> Array:
    """Points (n, d) as leaves (n / LEAF, d + 2, LEAF) whose products with (u, 1, −‖u‖²) are log weights − ‖x − u‖²."""
    both = np.column_stack([2.0 * x, log_weights - np.vecdot(x, x), np.ones(len(x))])
    return both.reshape(-1, LEAF, both.shape[1]).swapaxes(1, 2)
