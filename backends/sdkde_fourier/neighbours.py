"""Direct sums over a row's neighbours, for the rows that the Fourier series leaves.

Those are the isolated rows: where the density is low, S is too small against the series' absolute error. Rows outside
the box are summed here too.

The neighbours are the columns within a ball. A row's largest term, or one near it, is that of its nearest column. Terms
smaller than that by a factor of tolerance / n can be left out: their columns have
r² > r_nearest² + 2 log(n / tolerance). Columns are sorted into classes of similar weights, each with a ball of its
own, as one ball for all would be as wide as the span of the weights asks for.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import checkpoint, claim_memory, concatenate, each, map_threads, new_lock, reduce_exact
from sdkde_core.protocol import Columns, Partial, Problem, Reduction

from .around import CLASS, nats
from .duplicates import distinct, many, merged_weights
from .finish import put

__all__ = ["Neighbourhoods", "Outside"]

Array = NDArray[Any]

#: Pairs that are summed at a time, and rows whose neighbours are counted at a time.
PAIRS, ROWS = 1 << 19, 1 << 15

#: Fewest rows whose neighbours a thread looks for.
QUERIES = 256

#: What a pair takes while it is found, as a number of a list, or summed: bytes.
PAIR = 64

#: Rows up to which all columns are scanned: to build a tree, or to sort, takes longer.
FEW = 12

#: Columns of a scan's block, which stays in cache.
BLOCK = 1 << 15

#: Coordinates from which squares overflow.
FARTHEST = 1e150

#: Relative slack of a squared radius, since squares are rounded.
SLACK = 1e-12


class _Search(Protocol):
    """A neighbour search among the columns of a class."""

    def nearest(self, queries: Array, k: int) -> tuple[Array, Array]:
        """Squared distances and indices of the k nearest, (b, k); inf where there are fewer."""

    def count(self, queries: Array, radius: Array) -> Array:
        """How many columns are within the radius of each query, (b,)."""

    def within(self, queries: Array, radius: Array, count: Array) -> Array:
        """Return the indices of these columns, query by query, in a fixed order; (sum of count,)."""


class _Line:
    """In one dimension: the columns in order, where neighbours are side by side."""

    def __init__(self, points: Array, threads: int) -> None:
        self.order = np.argsort(points[:, 0])
        self.sorted = points[self.order, 0]

    def nearest(self, queries: Array, k: int) -> tuple[Array, Array]:
        y, n = queries[:, 0], len(self.sorted)
        around = np.searchsorted(self.sorted, y)[:, None] + np.arange(-k, k)  # (b, 2k)
        r2 = np.where((around >= 0) & (around < n), (self.sorted[around.clip(0, n - 1)] - y[:, None]) ** 2, np.inf)
        which = np.argsort(r2, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(around, which, 1).clip(0, n - 1)
        return np.take_along_axis(r2, which, 1), self.order[found]

    def count(self, queries: Array, radius: Array) -> Array:
        y = queries[:, 0]
        return np.searchsorted(self.sorted, y + radius, "right") - np.searchsorted(self.sorted, y - radius)

    def within(self, queries: Array, radius: Array, count: Array) -> Array:
        start = np.searchsorted(self.sorted, queries[:, 0] - radius)
        ends = np.cumsum(count)
        return self.order[np.arange(ends[-1]) + np.repeat(start - (ends - count), count)]


class _Tree:
    """In more dimensions: a k-d tree. What takes long is done by another thread, so that it can be interrupted."""

    def __init__(self, points: Array, threads: int) -> None:
        with _room_to_import("scipy.spatial"):
            from scipy.spatial import cKDTree

        def make(x: Array) -> Any:
            return cKDTree(x, leafsize=32, balanced_tree=False, compact_nodes=False)

        self.threads = threads
        (self.tree,) = map_threads(make, [points], 1, apart=True)

    def nearest(self, queries: Array, k: int) -> tuple[Array, Array]:
        parts = self._shared_out(lambda here: self.tree.query(queries[here], k=range(1, k + 1)), len(queries))
        distance, index = (np.concatenate(arrays) for arrays in zip(*parts))
        return distance**2, np.minimum(index, self.tree.n - 1)

    def count(self, queries: Array, radius: Array) -> Array:
        def task(here: slice) -> Array:
            return self.tree.query_ball_point(queries[here], radius[here], return_length=True)

        return np.concatenate(self._shared_out(task, len(queries)))

    def _shared_out(self, task: Callable[[slice], Any], rows: int) -> list[Any]:
        """Share rows out over threads. SciPy's own (``workers``) lose errors: the numbers would be what memory held."""
        blocks = max(1, rows // QUERIES)  # each so short that an interrupt need not wait
        ends = [rows * k // blocks for k in range(blocks + 1)]
        with claim_memory("a neighbour search", tasks=min(blocks, self.threads)) as together:
            return map_threads(task, [slice(*pair) for pair in itertools.pairwise(ends)], together, apart=True)

    def within(self, queries: Array, radius: Array, count: Array) -> Array:
        total = int(count.sum())
        if total == len(queries) * self.tree.n:
            return np.tile(np.arange(self.tree.n), len(queries))
        lists = self.tree.query_ball_point(queries, radius, return_sorted=False)
        return np.fromiter(itertools.chain.from_iterable(lists), np.intp, total)


class _Scan:
    """For few rows: a scan of all columns. The columns that ``count`` finds are kept for ``within``."""

    def __init__(self, points: Array) -> None:
        self.coordinates = np.ascontiguousarray(points.T)  # (d, n)
        self.counted: dict[tuple[bytes, float], Array] = {}

    def nearest(self, queries: Array, k: int) -> tuple[Array, Array]:
        r2 = np.full((len(queries), k), np.inf)
        index = np.zeros((len(queries), k), np.intp)
        for i, row in enumerate(self._squares(queries)):
            if k == 1:
                first = np.array([row.argmin()])
            else:
                first = np.argpartition(row, k - 1)[:k] if k < len(row) else np.arange(len(row))
                first = first[np.argsort(row[first], kind="stable")]
            r2[i, : len(first)], index[i, : len(first)] = row[first], first
        return r2, index

    def count(self, queries: Array, radius: Array) -> Array:
        for query, r, row in zip(queries, radius, self._squares(queries)):
            self.counted[query.tobytes(), float(r)] = np.flatnonzero(row <= r * r)
        return np.array([len(self.counted[query.tobytes(), float(r)]) for query, r in zip(queries, radius)])

    def within(self, queries: Array, radius: Array, count: Array) -> Array:
        return np.concatenate([self.counted[query.tobytes(), float(r)] for query, r in zip(queries, radius)])

    def _squares(self, queries: Array) -> Iterator[Array]:
        """Squared distances from each row to all columns, in one array that the next row overwrites."""
        d, n = self.coordinates.shape
        squares, step = np.empty(n), np.empty(min(n, BLOCK))
        for query in queries:
            for start in range(0, n, BLOCK):  # which stays in cache
                block = squares[start : start + BLOCK]
                rest = step[: len(block)]
                for a in range(d):
                    into = rest if a else block
                    np.subtract(self.coordinates[a, start : start + BLOCK], query[a], out=into)
                    np.multiply(into, into, out=into)
                    if a:
                        np.add(block, rest, out=block)
            yield squares


class _WeightClass:
    """Columns with similar weights."""

    def __init__(
        self, points: Array, log_weights: Array, members: Array | None, threads: int, few: bool = False
    ) -> None:
        self.members = members  # the columns' indices; None: all columns
        mine = points if members is None else points[members]
        weights = log_weights if members is None else log_weights[members]
        self.least, self.most = float(weights.min()), float(weights.max())
        kind = _Line if points.shape[1] == 1 else _Tree
        self.search: _Search = _Scan(mine) if few else kind(mine, threads)

    def nearest(self, queries: Array, own: Array | None) -> tuple[Array, Array]:
        """Return each row's nearest column but its own, and the squared distance: inf where there is no column."""
        r2, index = self.search.nearest(queries, 1 if own is None else 2)
        index = index if self.members is None else self.members[index]
        if own is None:
            return r2[:, 0], index[:, 0]
        second = index[:, 0] == own
        other = np.where(second & (index[:, 1] == own), np.inf, r2[:, 1])  # the class has but one
        return np.where(second, other, r2[:, 0]), np.where(second, index[:, 1], index[:, 0])

    def count(self, queries: Array, radius: Array) -> Array:
        """How many of the class are within the radius of each row, (b,); none where it is negative."""
        return np.where(radius >= 0, self.search.count(queries, np.maximum(radius, 0.0)), 0)

    def within(self, queries: Array, radius: Array, count: Array) -> tuple[Array, Array]:
        """Return the pairs (row, column), row by row."""
        some = np.flatnonzero(count)
        index = self.search.within(queries[some], radius[some], count[some])
        return np.repeat(some, count[some]), index if self.members is None else self.members[index]


class Neighbourhoods:
    """All columns, searched for neighbours. The search is built when the first rows come.

    Where many columns are equal, as zeros are, they are summed as one with their weights' sum; and so are equal rows.

    Parameters
    ----------
    columns : Columns
    threads : int
    """

    def __init__(self, columns: Columns, threads: int) -> None:
        self.points, self.log_weights, self.threads = columns.points, columns.log_weights, threads
        self._lock = new_lock()
        self._made: list[_WeightClass] = []
        self._merged: Neighbourhoods | None = None

    def reduce(self, problem: Problem, queries: Array, own: Array | None) -> Partial:
        """Answer for some rows.

        Parameters
        ----------
        problem : Problem
        queries : (b, d) array
        own : (b,) array, optional
            The column that a row leaves out; any number that is no column's leaves out none.
        """
        far = (np.abs(queries) < FARTHEST).min(axis=1) == 0
        if far.any():  # or not a number: no search takes either
            found = self.reduce(problem, np.where(far[:, None], self.points[0], queries), own)
            return put(found, far, self._far(problem, queries[far]))
        if len(queries) <= FEW:  # also once a tree is there, so that the same call gives the same bits
            return concatenate(self._block(problem, self._classes(few=True), queries, own))
        if own is not None:  # each row leaves out another column
            return self._in_blocks(problem, queries, own)
        with self._lock:
            self._merged = self._merged or self._merge()
        if not many(queries):
            return self._merged._in_blocks(problem, queries, None)
        first, group = distinct(queries)
        return each(self._merged._in_blocks(problem, queries[first], None), lambda x: x[group])

    def _merge(self) -> Neighbourhoods:
        """The columns with equal ones as one, where there are many."""
        if not many(self.points):
            return self
        first, group = distinct(self.points)
        weights = merged_weights(self.log_weights, first, group)
        return Neighbourhoods(Columns(self.points[first], weights), self.threads)

    def _in_blocks(self, problem: Problem, queries: Array, own: Array | None) -> Partial:
        with self._lock:
            if not self._made:
                self._made = self._classes()
        blocks = []
        for start in range(0, len(queries), ROWS):
            here = slice(start, start + ROWS)
            mine = None if own is None else own[here]
            blocks += self._block(problem, self._made, queries[here], mine)
        return concatenate(blocks)

    def _far(self, problem: Problem, queries: Array) -> Partial:
        """Sum rows whose squared distances overflow; no column is as far out, so none leaves its own out."""
        plain = replace(problem, requires=problem.requires - {"exclude_self"})
        return reduce_exact(plain, queries, Columns(self.points, self.log_weights))

    def _classes(self, few: bool = False) -> list[_WeightClass]:
        top = self.log_weights.max()
        number = ((top - self.log_weights) / CLASS).astype(np.int64)
        which = np.unique(number) if number.any() else number[:1]
        members = [None] if len(which) == 1 else [np.flatnonzero(number == k) for k in which]
        return [_WeightClass(self.points, self.log_weights, some, self.threads, few) for some in members]

    def _block(
        self,
        problem: Problem,
        classes: list[_WeightClass],
        queries: Array,
        own: Array | None,
    ) -> list[Partial]:
        """Find the neighbours of a block of rows, then sum over :data:`PAIRS` of them at a time."""
        leader, radii = self._search(problem, classes, queries, own)
        counts = [one.count(queries, radius) for one, radius in zip(classes, radii)]
        ends = np.cumsum(sum(counts))
        cuts = [0]
        while cuts[-1] < len(queries):
            before = ends[cuts[-1] - 1] if cuts[-1] else 0
            cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + PAIRS, "right"))))

        def task(bounds: tuple[int, int]) -> Partial:
            here = slice(*bounds)
            with np.errstate(all="ignore"):  # as in the calling thread: sums of exponentials underflow by design
                pairs = [
                    one.within(queries[here], radius[here], count[here])
                    for one, radius, count in zip(classes, radii, counts)
                    if count[here].any()
                ]
                checkpoint()
                return self._sum(problem, queries[here], None if own is None else own[here], leader[here], pairs)

        tasks = list(itertools.pairwise(cuts))
        with claim_memory("a sum over neighbours", each=PAIR * PAIRS, tasks=min(self.threads, len(tasks))) as together:
            return map_threads(task, tasks, together)

    def _search(
        self, problem: Problem, classes: list[_WeightClass], queries: Array, own: Array | None
    ) -> tuple[Array, list[Array]]:
        """Return each row's leading column, of the largest term (−1: none), and its radius in every class."""
        found = [one.nearest(queries, own) for one in classes]
        terms = np.array([one.least - 0.5 * r2 for one, (r2, _) in zip(classes, found)])  # (classes, b)
        first, rows = terms.argmax(axis=0), np.arange(len(queries))
        best = terms[first, rows]
        leader = np.where(np.isfinite(best), np.array([index for _, index in found])[first, rows], -1)
        nearest = np.sqrt(np.array([r2 for r2, _ in found])[first, rows])
        below = nats(problem, len(self.points)) + np.log(2.0 + nearest)  # terms times r, or 1 + r²
        radii = []
        for one, (r2, _) in zip(classes, found):
            if len(classes) == 1:
                square = r2 + 2.0 * (below + one.most - one.least)
            else:
                square = 2.0 * (one.most - best + below)
            square = square + SLACK * nearest**2
            radii.append(np.where((leader >= 0) & (square >= 0), np.sqrt(np.abs(square)), -1.0))
        return leader, radii

    def _sum(
        self,
        problem: Problem,
        queries: Array,
        own: Array | None,
        leader: Array,
        pairs: list[tuple[Array, Array]],
    ) -> Partial:
        """Sum over pairs (row, column), class after class.

        Far from every point exponents are huge and only their differences count. With k the leading column,
        r²_j − r²_k = (u_j − u_k)·((u_j − y) + (u_k − y)), without the cancellation.
        """
        b, d = queries.shape
        reference = self.points[leader]
        away = reference - queries  # (b, d)
        most = np.full(b, -np.inf)
        parts = []
        for row, column in pairs:
            relative = self.log_weights[column] - self.log_weights[leader][row]
            delta = []
            for a in range(d):
                step = self.points[column, a] - reference[row, a]
                relative -= 0.5 * step * ((self.points[column, a] - queries[row, a]) + away[row, a])
                delta.append(step)
            if own is not None:
                relative[column == own[row]] = -np.inf
            some, start = _starts(row)
            most[some] = np.maximum(most[some], np.maximum.reduceat(relative, start))
            parts.append((row, some, start, relative, delta))
        total, shift = np.zeros(b), np.zeros((b, d))
        signed, plus, half = np.zeros(b), np.zeros(b), 1.0 + 0.5 * d
        for row, some, start, relative, delta in parts:
            phi = np.exp(relative - most[row])
            total[some] += np.add.reduceat(phi, start)
            if problem.reduction is Reduction.MEAN:
                for a in range(d):
                    shift[some, a] += np.add.reduceat(phi * delta[a], start)
            if problem.reduction is Reduction.LAPLACE:
                exponent = -0.5 * sum((delta[a] + away[row, a]) ** 2 for a in range(d))
                signed[some] += np.add.reduceat(phi * (half + exponent), start)
                plus[some] += np.add.reduceat(phi * (half - exponent), start)
        empty = ~(total > 0)
        top = self.log_weights[leader] - 0.5 * np.vecdot(away, away) + most
        top[empty] = -np.inf
        if problem.reduction is Reduction.LAPLACE:
            signed[empty] = 0.0
            log_plus, log_magnitude = (np.log(np.where(empty, 1.0, x)) + top for x in (plus, np.abs(signed)))
            return Partial(log_plus, sign=np.sign(signed), log_magnitude=log_magnitude)
        log_sum = np.log(np.where(empty, 1.0, total)) + top
        if problem.reduction is Reduction.LOG_SUM:
            return Partial(log_sum)
        mean = away + shift / np.where(empty, 1.0, total)[:, None]
        return Partial(log_sum, shift=np.where(empty[:, None], 0.0, mean))


class Outside:
    """Columns outside the box: rows near them add these columns' terms to the series.

    Parameters
    ----------
    columns : Columns
        All columns.
    members : (k,) array
        The columns outside.
    threads : int
    """

    def __init__(self, columns: Columns, members: Array, threads: int) -> None:
        self.points, self.log_weights = columns.points, columns.log_weights
        self.members = _WeightClass(columns.points, columns.log_weights, members, threads)

    def sums(self, problem: Problem, queries: Array, own: Array | None, radius: float) -> list[Array]:
        """Return S, then MEAN's d sums Σ w φ (u_j − y) or LAPLACE's L, (b,) each, over the columns within ``radius``.

        ``own`` is as in :meth:`Neighbourhoods.reduce`.
        """
        b, d = queries.shape
        extra = {Reduction.LOG_SUM: 0, Reduction.MEAN: d, Reduction.LAPLACE: 1}[problem.reduction]
        found = [np.zeros(b) for _ in range(1 + extra)]
        radii = np.full(b, radius)
        count = self.members.count(queries, radii)
        ends = np.cumsum(count)
        start = 0
        while start < b:
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + PAIRS, "right")))
            here = slice(start, stop)
            if count[here].any():
                row, column = self.members.within(queries[here], radii[here], count[here])
                delta = [self.points[column, a] - queries[here][row, a] for a in range(d)]
                exponent = sum(x * x for x in delta) * -0.5
                term = np.exp(self.log_weights[column] + exponent)
                if own is not None:
                    term[column == own[here][row]] = 0.0
                factors = delta if problem.reduction is Reduction.MEAN else [1.0 + 0.5 * d + exponent]
                some, begin = _starts(row)
                for whole, factor in zip(found, [1.0, *factors]):
                    whole[start + some] = np.add.reduceat(term * factor, begin)
            start = stop
        return found


@contextmanager
def _room_to_import(module: str) -> Iterator[None]:
    """SciPy's OpenBLAS hangs, or interrupts the process, where its threads do not start."""
    if module in sys.modules:
        yield
        return
    cores = os.cpu_count() or 1
    with claim_memory(f"importing {module}", tasks=cores, fewest=cores):
        yield


def _starts(row: Array) -> tuple[Array, Array]:
    """Return the rows that occur in a sorted array, and where each begins."""
    start = np.flatnonzero(np.diff(row, prepend=-1))
    return row[start], start
