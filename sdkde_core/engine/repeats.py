"""Points that occur several times, as in rounded data: on a CPU each is summed once, with their summed weight."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..arrays import Array, array_namespace, to_host
from ..protocol import Backend, BackendInfo, Columns, Problem, with_fields
from .columns import PackedColumns
from .merge import each, take_rows

SAMPLE = 4096  # points that are looked at for repeats; fewer points are not merged
MOST = 0.75  # the largest share of distinct points at which equal ones are merged


class Merged:
    """Used as :class:`.PackedColumns`, of distinct points; ``group`` (n,): which packed column each column equals."""

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
    if _pays(problem) and distinct_share(columns.points) < 1.0:
        first, group = distinct(to_host(columns.points))
        few = merged(with_fields(problem, distinct=len(first) / len(group)))
        if len(first) <= MOST * len(group) and info.supports(few).ok:
            logs = merged_weights(to_host(columns.log_weights), first, group)
            there = Columns(_rows(columns.points, first), array_namespace(columns.log_weights).asarray(logs))
            return Merged(PackedColumns(backend, info, few, there, shared), group)
    return PackedColumns(backend, info, problem, columns, shared)


def _pays(problem: Problem) -> bool:
    """Whether equal points may be merged; for few rows finding them takes longer than summing them."""
    return problem.device == "cpu" and problem.m >= 256 and "grad" not in problem.requires


def merged(problem: Problem) -> Problem:
    """The problem of the distinct points, where equal ones are merged; m = n is taken to mean that rows are columns."""
    if problem.distinct == 1.0 or not _pays(problem):
        return problem
    n, m, requires = math.ceil(problem.distinct * problem.n), problem.m, problem.requires | {"weights"}
    return with_fields(problem, n=n, m=n if m == problem.n else m, requires=requires, distinct=1.0)


def distinct_share(points: Any) -> float:
    """The share of distinct points among many, estimated from a sample; 1 stands for more than three quarters.

    Distinct points that the sample lacks are estimated by those that it has once and twice (Chao 1984, Nonparametric
    estimation of the number of classes in a population), but at most n / size − 1 for each that it has once.
    """
    if (n := points.shape[0]) < SAMPLE:
        return 1.0
    some = to_host(points[places(n, SAMPLE), :])
    _, first, group, counts = np.unique(_keys(some), True, True, True, equal_nan=False)
    apart = 0 if len(first) > MOST * len(some) else int((some != some[first][group]).any(axis=1).sum())
    once, twice = int((counts == 1).sum()) + apart, int((counts == 2).sum())  # apart: of equal keys alone
    if len(counts) + apart > MOST * len(some):
        return 1.0
    unseen = min(once * (once - 1) / (2.0 * twice + 2.0), once * (n / len(some) - 1.0))
    return min(1.0, (len(counts) + apart + unseen) / n)


def distinct(points: Array) -> tuple[Array, Array]:
    """Return the index of one of each group of equal points (n, d), (g,), and the group of every point, (n,)."""
    keys = _keys(points)
    values, counts = _counted(keys)
    often = values[counts > 1]
    # Frequent points are looked up among their few keys, which is faster than sorting all points.
    group = np.minimum(np.searchsorted(often, keys), max(len(often) - 1, 0))
    met = often[group] == keys if len(often) else np.zeros(len(keys), bool)
    first, (rest,) = np.empty(len(often), np.intp), np.nonzero(~met)
    first[group[met]] = np.nonzero(met)[0]
    one = among = np.arange(len(rest))  # hardly one of them equals another
    if len(rest) <= SAMPLE or len(some := _counted(keys[rest])[1]) <= MOST * some.sum():
        _, one, among = np.unique(keys[rest], return_index=True, return_inverse=True, equal_nan=False)
    group[rest] = len(often) + among
    first = np.concatenate([first, rest[one]])
    (others,) = np.nonzero((points != points[first][group]).any(axis=1))  # have the key of another point
    group[others] = len(first) + np.arange(len(others))
    return np.concatenate([first, others]), group


def places(n: int, most: int) -> Array:
    """Indices of up to ``most`` of n points, one in each stretch of equal length, at places that no period matches."""
    step = -(-n // most)
    k = np.arange(n // step)
    return k * step + (step * (k * 0.5 * (math.sqrt(5.0) - 1.0) % 1.0)).astype(np.int64)


def _keys(points: Array) -> Array:
    """One number for each point, equal points having the same."""
    keys = points[:, 0]
    for x, factor in zip(points.T[1:], np.random.default_rng(0).uniform(0.5, 1.0, points.shape[1] - 1)):
        keys = keys + factor * x  # not a product of matrices, which may round equal rows differently
    return keys


def _counted(keys: Array) -> tuple[Array, Array]:
    """The distinct keys of a sample, and how often each occurs in it."""
    return np.unique(keys[places(len(keys), SAMPLE)], return_counts=True, equal_nan=False)


def merged_weights(log_weights: Array, first: Array, group: Array) -> Array:
    """Return the log of every group's weight, (g,)."""
    most = np.full(len(first), -1e300)  # as where none of the group carries weight
    np.maximum.at(most, group, log_weights)
    with np.errstate(divide="ignore"):
        return most + np.log(np.bincount(group, np.exp(log_weights - most[group])))


def _rows(x: Any, which: Array) -> Any:
    return take_rows(x, array_namespace(x).asarray(which))
