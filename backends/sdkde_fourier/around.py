"""What the rows' neighbourhoods are like, from some of the rows and columns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.protocol import TOLERANCES, Problem

from .duplicates import distinct

Array = NDArray[Any]


def nats(problem: Problem, n: int) -> float:
    """Return how many nats below a row's largest term those of n columns can be left out; those near the row."""
    tolerance = 0.1 * TOLERANCES[problem.precision][problem.reduction].absolute
    return math.log(n / tolerance) + 5.0


class Around(NamedTuple):
    """What is known of the rows' neighbourhoods from some rows and columns."""

    rows: float  # that are summed: distinct ones, where equal ones are summed once
    columns: float
    some: Array  # (k, d): some of those rows, alike
    neighbours: Array  # (k,): how many each has
    sums: Array  # (k,): S, roughly


def around(problem: Problem, rows: Array, columns: Array, log_weights: Array, merges: bool) -> Around:
    """Estimate the neighbourhoods of a problem's rows from 128 of them and some columns.

    ``merges``: equal rows, and equal columns, are summed once. A point that comes several times among a few comes often
    and stands for itself; one that comes once stands for those that were not taken.
    """
    merges = merges and "exclude_self" not in problem.requires
    some, each, _ = _standing_for(rows, problem.m, merges)
    ends, k = np.cumsum(each), min(128, len(some))
    some = some[np.searchsorted(ends, (np.arange(k) + 0.5) * (ends[-1] / k)).clip(max=len(some) - 1)]

    found, each, group = _standing_for(columns, problem.n, merges)
    share, own = problem.n / len(columns), float(np.exp(log_weights.mean()))
    weights = share * np.bincount(group, np.exp(log_weights))
    spread = max(1.0, float(weights.max()) / max(float(weights.min()), 1e-300))  # all may underflow
    thin = -(-len(found) // int(min(1 << 13, max(1 << 10, problem.pairs / 512 / 128))))
    single = np.flatnonzero(each > 1.0)  # only of these some are left out
    taken = np.concatenate([np.flatnonzero(each <= 1.0), single[thin // 2 :: thin]])
    standing = np.where(each[taken] > 1.0, len(single) / max(1, len(single[thin // 2 :: thin])), 1.0)
    found, each, weights, share = found[taken], standing * each[taken], standing * weights[taken], share * thin

    reach = 2.0 * (nats(problem, problem.n) + math.log(2.0) + min(12.0, math.log(spread)))
    neighbours, sums = np.empty(k), np.empty(k)
    coordinates, step = np.ascontiguousarray(found.T), max(1, (1 << 15) // len(found))  # pairs stay in cache
    for start in range(0, k, step):
        here = slice(start, start + step)
        r2 = np.zeros((len(some[here]), len(found)))
        for a in range(problem.d):
            r2 += np.square(coordinates[a] - some[here, a, None])
        # The nearest of all columns is nearer than that of a few.
        nearest = (
            np.zeros((len(r2), 1)) if problem.same else r2.min(axis=1, keepdims=True) * share ** (-2.0 / problem.d)
        )
        near = r2 <= reach + nearest
        terms = np.exp(-0.5 * r2, where=near, out=np.zeros_like(r2))
        # Not as products: OpenBLAS would share these out over threads of its own.
        neighbours[here] = np.maximum(np.einsum("ij,j->i", near, each), 1.0)
        sums[here] = np.maximum(np.einsum("ij,j->i", terms, weights), own * np.exp(-0.5 * nearest[:, 0]))
    return Around(float(ends[-1]), float(each.sum()), some, neighbours, sums)


def _standing_for(points: Array, total: int, merges: bool) -> tuple[Array, Array, Array]:
    """Return some points, how many of ``total`` each stands for, and of which of them each point is one."""
    share = total / len(points)
    if not merges:
        return points, np.full(len(points), share), np.arange(len(points))
    first, group = distinct(points)
    return points[first], np.where(np.bincount(group) > 1, 1.0, share), group
