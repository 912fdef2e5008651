"""Points that come several times, as in counts and rounded data: on a CPU each is summed once, with all the weight."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..arrays import Array, array_namespace, to_host
from ..protocol import Backend, BackendInfo, Columns, Problem, with_fields
from .columns import PackedColumns
from .merge import each, take_rows

SAMPLE = 4096  # points, at least, among which one looks for repeats, and of how many


class Merged:
    """Distinct columns in place of all that are equal to each; it reduces as :class:`.PackedColumns` does.

    Equal rows are summed once, too. ``group`` (n,): which of the ``packed`` columns each column is equal to.
    """

    def __init__(self, packed: PackedColumns, group: Array) -> None:
        self._packed, self._group = packed, group
        self._own = functools.cache(lambda: packed.reduce(None))  # by batches of rows, too

    def reduce(self, queries: Any = None, *, some: Any = None, distances: Any = None, **known: Any) -> Any:
        if queries is None:
            (sums, apart), group = self._own(), self._group[slice(*(some or (None,)))]
        elif distinct_share(queries) == 1.0:
            return self._packed.reduce(queries, distances=distances, **known)
        else:
            first, group = distinct(to_host(queries))
            distances = None if distances is None else _rows(distances, first)
            sums, apart = self._packed.reduce(_rows(queries, first), distances=distances, **known)
        return each(sums, lambda x: _rows(x, group)), apart


def pack(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
) -> PackedColumns | Merged:
    """Return columns ready for rows; arguments as of :class:`.PackedColumns`."""
    able = problem.device == "cpu" and "grad" not in problem.requires
    few = merged(with_fields(problem, distinct=distinct_share(columns.points) if able else 1.0))
    if few.n == problem.n or not info.supports(few).ok:
        return PackedColumns(backend, info, problem, columns, shared)
    first, group = distinct(to_host(columns.points))
    logs = merged_weights(to_host(columns.log_weights), first, group)
    there = Columns(_rows(columns.points, first), array_namespace(columns.log_weights).asarray(logs))
    return Merged(PackedColumns(backend, info, few, there, shared), group)


def merged(problem: Problem) -> Problem:
    """The problem of the distinct points, if it is one on a CPU; as many rows as columns are taken for these."""
    share, m = problem.distinct, problem.m
    if share == 1.0 or problem.device != "cpu" or "grad" in problem.requires:
        return problem
    n, requires = math.ceil(share * problem.n), problem.requires | {"weights"}
    m = math.ceil(share * m) if m == problem.n else m
    return with_fields(problem, n=n, m=m, requires=requires, distinct=1.0)


def distinct_share(points: Any) -> float:
    """What share of many points differs from all others, by some of them; 1: nine tenths or more.

    The others are as many as Chao (1984, Nonparametric estimation of the number of classes in a population) estimates
    by those that come once and twice, or as if one that comes once stood for what was not looked at."""
    if (n := points.shape[0]) < SAMPLE:
        return 1.0
    counts = _counted(_keys(to_host(points[:: -(-n // SAMPLE), :])))[1]
    once, twice = (int((counts == k).sum()) for k in (1, 2))
    unseen = min(once * (once - 1) / (2.0 * twice + 2.0), once * (n / counts.sum() - 1.0))
    return min(1.0, (len(counts) + unseen) / n) if _many(counts) else 1.0


def distinct(points: Array) -> tuple[Array, Array]:
    """Return the index of one of each group of equal points (n, d), (g,), and the group of every point, (n,).

    Some equal points may be left in groups of their own, which changes no sum.
    """
    keys = _keys(points)
    values, counts = _counted(keys)
    often = values[counts > 1]
    # Those that come often are found among the few that do, which is faster than to sort all.
    group = np.minimum(np.searchsorted(often, keys), max(len(often) - 1, 0))
    met = often[group] == keys if len(often) else np.zeros(len(keys), bool)
    first, (rest,) = np.empty(len(often), np.intp), np.nonzero(~met)
    first[group[met]] = np.nonzero(met)[0]
    one = among = np.arange(len(rest))
    if len(rest) <= SAMPLE or _many(_counted(keys[rest])[1]):
        _, one, among = np.unique(keys[rest], return_index=True, return_inverse=True)
    group[rest] = len(often) + among
    first = np.concatenate([first, rest[one]])
    (others,) = np.nonzero((points != points[first][group]).any(axis=1))  # have the key of another point
    group[others] = len(first) + np.arange(len(others))
    return np.concatenate([first, others]), group


def _keys(points: Array) -> Array:
    """One number for each point, equal points having the same."""
    keys = points[:, 0]
    for x, factor in zip(points.T[1:], np.random.default_rng(0).uniform(0.5, 1.0, points.shape[1] - 1)):
        keys = keys + factor * x  # not a product of matrices, which may round equal rows differently
    return keys


def _counted(keys: Array) -> tuple[Array, Array]:
    """Some of the keys, and how often each comes."""
    return np.unique(keys[:: max(1, -(-len(keys) // SAMPLE))], return_counts=True)


def _many(counts: Array) -> bool:
    """Whether a tenth of the points, which are counted by their keys, repeats others."""
    return len(counts) < 0.9 * counts.sum()


def merged_weights(log_weights: Array, first: Array, group: Array) -> Array:
    """Return the log of every group's weight, (g,)."""
    most = np.full(len(first), -np.inf)
    np.maximum.at(most, group, log_weights)
    most[most == -np.inf] = 0.0  # none of the group carries weight
    with np.errstate(divide="ignore"):
        return most + np.log(np.bincount(group, np.exp(log_weights - most[group])))


def _rows(x: Any, which: Array) -> Any:
    return take_rows(x, array_namespace(x).asarray(which))
