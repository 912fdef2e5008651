"""Questions about all points, for plans of data that nobody has all of (:mod:`.blockwise`).

``of(points, weights, start)`` is a question's answer of the block (k, d) from ``start`` on, with weights (k,) or None;
``merge(left, right)`` that of two runs of blocks, the left one first. Answers are merged from the first block to the
last, so the same blocks give the same bits whoever asked. ``about`` says which points a question is about, "train" or
"query". Questions and answers pickle.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..arrays import Array, check_weights, quiet, refuse_not_finite
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.sample import SEED, Sample, drawn, most_of
from ..engine.forks import cached_property
from ..engine.outliers import radii

#: Values of all columns that are sorted to find quartiles, at most.
SORTED = 1 << 20


def numbers(points: Any) -> Array:
    """A block of points, (k, d) float64."""
    x = np.asarray(points, dtype=np.float64)
    return x[:, None] if x.ndim == 1 else x


def log_of(weights: Any) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(weights, dtype=np.float64).reshape(-1))


def digest(*arrays: Any, start: int) -> int:
    """The fingerprint of a block; those of all blocks are added."""
    found = hashlib.blake2b(str(start).encode(), digest_size=16)
    for x in arrays:
        if x is not None:
            x = np.ascontiguousarray(x)
            found.update(f"{x.dtype.str}{x.shape}".encode())
            found.update(x.reshape(-1).view(np.uint8).data)
    return int.from_bytes(found.digest(), "big")


@dataclass(frozen=True, eq=False)
class MomentsOf:
    """What :class:`Moments` found, of the points with weight."""

    carrying: int  # how many have weight
    low: Array
    high: Array
    mean: Array
    spread: Array  # variance per column (d,), or covariance (d, d), divided by Σw
    log_total: float  # log Σw
    totals: Array  # the same of each block
    log_squares: float  # log Σw²
    equal: bool  # all weights so far
    first_log: float
    index: Array  # of the samples that are kept
    rows: Array  # those samples
    drawn: tuple[Array, Array, Array]  # priorities, log weights and rows of samples drawn by weight, the best first
    digest: int


@dataclass(frozen=True)
class Moments:
    """Ask for weights, ends, means and spreads of the samples, and keep some of them."""

    n: int  # all samples
    d: int
    covariance: bool = False  # not only the variances
    checked: bool = True  # refuse what is not finite
    weighted: bool = False
    about: str = "train"

    def centre(self) -> Array:
        """Which samples the centre is taken from, as of data in memory."""
        return np.arange(0, self.n, max(1, self.n // 256))

    def drawn(self) -> Array:
        """Which samples a bandwidth is chosen from, without weights, as of data in memory."""
        most = most_of(self.d)
        return np.arange(self.n) if self.n <= most else drawn(self.n, most, np.random.default_rng(SEED))

    @quiet
    def of(self, points: Any, weights: Any, start: int) -> MomentsOf:
        x, count = numbers(points), len(points)
        if self.checked:
            refuse_not_finite("train", x, start)
        kept = _kept(self)
        index = kept[(kept >= start) & (kept < start + count)]
        equal, log_weights = True, np.zeros(count)
        drawn_here: tuple[Array, Array, Array] = np.empty(0), np.empty(0), np.empty((0, self.d))
        if self.weighted:
            equal = check_weights(np.asarray(weights, dtype=np.float64).reshape(-1), start)[0] in ("equal", "zero")
            log_weights = log_of(weights)
            # By the priority w / u, u uniform by the sample's number: Duffield, Lund and Thorup (2007).
            uniform = np.random.Generator(np.random.PCG64(SEED).advance(start)).random(count)
            drawn_here = _best([log_weights - np.log1p(-uniform), log_weights, x], most_of(self.d) + 1)
        rows, mark = x[index - start], digest(points, weights, start=start)
        carrying, first_log = log_weights > -math.inf, float(log_weights[0])
        if not carrying.all():
            x, log_weights = x[carrying], log_weights[carrying]
        ends = x.min(axis=0, initial=math.inf), x.max(axis=0, initial=-math.inf)
        log_total = log_squares = -math.inf
        mean, spread = np.zeros(self.d), np.zeros((self.d,) * (1 + self.covariance))
        if len(x):
            top = log_weights.max()
            w = np.exp(log_weights - top)
            total = w.sum()
            log_total, log_squares = float(top + np.log(total)), float(2 * top + np.log(w @ w))
            mean = x[0] + (w @ (x - x[0])) / total
            away = x - mean
            spread = ((away * w[:, None]).T @ away if self.covariance else w @ away**2) / total
        found = len(x), *ends, mean, spread, log_total, np.array([log_total]), log_squares, equal, first_log
        return MomentsOf(*found, index, rows, drawn_here, mark)

    @quiet
    def merge(self, left: MomentsOf, right: MomentsOf) -> MomentsOf:
        total = float(np.logaddexp(left.log_total, right.log_total))
        a, b = (math.exp(x.log_total - total) if x.log_total > -math.inf else 0.0 for x in (left, right))
        between = right.mean - left.mean
        outer = np.outer(between, between) if self.covariance else between**2
        ends = np.minimum(left.low, right.low), np.maximum(left.high, right.high)
        mean = left.mean + b * between if a else right.mean
        spread = a * left.spread + b * right.spread + (a * b) * outer
        squares = float(np.logaddexp(left.log_squares, right.log_squares))
        equal = left.equal and right.equal and left.first_log == right.first_log
        best = _best([np.concatenate(pair) for pair in zip(left.drawn, right.drawn)], most_of(self.d) + 1)
        totals = np.concatenate([left.totals, right.totals])
        index, rows = np.concatenate([left.index, right.index]), np.concatenate([left.rows, right.rows])
        found = left.carrying + right.carrying, *ends, mean, spread, total, totals, squares, equal, left.first_log
        return MomentsOf(*found, index, rows, best, (left.digest + right.digest) % (1 << 128))

    def sample(self, found: MomentsOf) -> tuple[Array, Array | None]:
        """The samples that a bandwidth is chosen from, and their weights."""
        if found.equal:
            return found.rows[np.isin(found.index, self.drawn())], None
        priority, logs, rows = found.drawn
        if len(rows) > most_of(self.d):  # each counts as its weight, and the lighter ones stand for others too
            logs, rows = np.maximum(logs, priority[-1])[:-1], rows[:-1]
        return rows, np.exp(logs - logs.max())


@functools.lru_cache(maxsize=4)
def _kept(asked: Moments) -> Array:
    """Which samples are kept without weights, ascending: every block asks."""
    return np.union1d(asked.centre(), asked.drawn())


def _best(drawn: list[Array], most: int) -> tuple[Array, Array, Array]:
    """Those with the highest priorities, highest first; never one without weight."""
    priority, logs, rows = drawn
    order = np.argsort(-priority, kind="stable")[:most]
    order = order[priority[order] > -math.inf]
    return priority[order], logs[order], rows[order]


@dataclass(frozen=True, eq=False)
class Counting:
    """Ask how the samples lie around the quartiles, until these are known exactly.

    In each column the samples that decide on a quartile lie in an interval (low, high]. It is cut into smaller ones by
    ``edges``, in which samples are counted, until so few are left that they are asked for themselves. An answer has, by
    column and quartile, the upper ends of the intervals or the values, and how many samples are there, and their
    measure; those up to the first edge count there.
    """

    n_eff: float  # how many samples these are worth; n without weights
    log_total: float | None  # of all weights; None: all are equal
    edges: tuple[Array, ...]  # by column and quartile, 2 d of them, ascending
    listed: bool = False  # ask for the values in the intervals
    asked: int = 1  # the question's number, from 1 to ``most``
    about: str = "train"
    most: ClassVar[int] = 5  # such questions, the values included; after the first 0.1 % of the samples are left

    @classmethod
    def first(cls, sample: Array, low: Array, high: Array, n_eff: float, log_total: float | None) -> Counting:
        """Begin with the quartiles of a sample (k, d)."""
        edges, error = [], 6.0 * math.sqrt(0.1875 / len(sample))
        for j in range(sample.shape[1]):
            for p in (0.25, 0.75):
                shares = np.linspace(max(0.0, p - error), min(1.0, p + error), 128)
                edges.append(_edges(low[j], np.quantile(sample[:, j], shares, method="inverted_cdf"), high[j]))
        return cls(n_eff, log_total, tuple(edges))

    @quiet
    def of(self, points: Any, weights: Any, start: int) -> list[tuple[Array, ...]]:
        x, measure = numbers(points), None
        if self.log_total is not None:
            measure = np.exp(log_of(weights) - self.log_total) * self.n_eff
            x, measure = x[measure > 0], measure[measure > 0]
        return [self._counted(x[:, k // 2], measure, edges) for k, edges in enumerate(self.edges)]

    def _counted(self, x: Array, measure: Array | None, edges: Array) -> tuple[Array, ...]:
        inside = x <= edges[-1]
        x, measure = x[inside], None if measure is None else measure[inside]
        if self.listed:
            values, place = np.unique(np.maximum(x, edges[0]), return_inverse=True)
        else:
            values, place = edges, np.searchsorted(edges, x, side="left")  # edges[i − 1] < x ≤ edges[i]
        counts = np.bincount(place, minlength=len(values))
        return values, counts, counts if measure is None else np.bincount(place, measure, minlength=len(values))

    @quiet
    def merge(self, left: list[tuple[Array, ...]], right: list[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        merged: list[tuple[Array, ...]] = []
        for pair in zip(left, right):
            values, counts, measures = map(np.concatenate, zip(*pair))
            values, place = np.unique(values, return_inverse=True)
            merged.append((values, np.bincount(place, counts), np.bincount(place, measures)))
        return merged

    def next(self, found: list[tuple[Array, ...]]) -> Counting:
        edges, most = [], 0
        for k, (_, counts, measures) in enumerate(found):
            low, high = self._wanted(k)
            reached, old = np.cumsum(measures), self.edges[k]
            first = min(int(np.searchsorted(reached, low, side="right")), len(old) - 1)
            last = min(max(first, int(np.searchsorted(reached, high, side="left"))), len(old) - 1)
            ends = old[first - 1] if first else np.nextafter(old[0], -math.inf), old[last]
            several = np.nextafter(ends[0], math.inf) < ends[1]
            most = max(most, int(counts[first : last + 1].sum()) if several else 1)
            half = ends[0] / 2 + ends[1] / 2  # the difference may overflow
            inner = np.concatenate([np.linspace(ends[0], half, 64), np.linspace(half, ends[1], 64)])
            edges.append(_edges(ends[0], inner, ends[1]))
        listed = most * len(edges) <= SORTED or self.asked == self.most - 1
        return replace(self, edges=tuple(edges), listed=listed, asked=self.asked + 1)

    def quartiles(self, found: list[tuple[Array, ...]]) -> tuple[Array, Array]:
        """Return the first and the third quartile per column (d,), as :meth:`Sample.spread` has them."""
        result = []
        for k, (values, _, measures) in enumerate(found):
            low, high = self._wanted(k)
            share = np.diff(np.clip(np.cumsum(measures), low, high), prepend=low)
            result.append(share @ values / share.sum() if share.any() else values[-1])
        return np.array(result[::2]), np.array(result[1::2])

    def _wanted(self, k: int) -> tuple[float, float]:
        """Between which measures, counted from the least value, the mean is a quartile."""
        low = (0.25, 0.75)[k % 2] * (self.n_eff - 1.0)
        return low, low + 1.0


def _edges(low: float, inner: Array, high: float) -> Array:
    inner = inner[(inner > low) & (inner < high)]
    return np.unique(np.concatenate([[low], inner, [high]]))


@dataclass(frozen=True)
class Reach:
    """Ask how far points lie from the centre."""

    about: str
    bandwidth: Bandwidth
    centre: Any
    checked: bool = True

    @quiet
    def of(self, points: Any, weights: Any, start: int) -> tuple[float, int]:
        x = numbers(points)
        if self.checked:
            refuse_not_finite(self.about, x, start)
        distances = radii(self.bandwidth.whiten(x, self.centre))
        return float(np.nanmax(distances, initial=0.0)), digest(points, start=start) if self.about == "query" else 0

    def merge(self, left: Any, right: Any) -> tuple[float, int]:
        return max(left[0], right[0]), (left[1] + right[1]) % (1 << 128)


class Summary(Sample):
    """What bandwidth rules look at, of samples that nobody has all of; quartiles (d,) for the rules that need them."""

    def __init__(
        self, asked: Moments, found: MomentsOf, n_eff: float, method: str, quartiles: tuple[Array, Array] | None
    ) -> None:
        rows, weights = asked.sample(found)
        self._spread, self._ends = found.spread, quartiles
        self.weights, self.n_eff, self.d, self.method = weights, n_eff, asked.d, method
        self.n, self.given = found.carrying, rows
        self.unit = np.maximum(found.high - rows[0], rows[0] - found.low)
        self.x = (rows - rows[0]) / self.unit

    def thinned(self, most: int, rng: np.random.Generator) -> tuple[Array, Array | None]:
        if self.weights is None and self.n > most:
            drawn(self.n, most, rng)  # what is drawn hereafter follows
        return self.x, self.weights

    def covariance(self) -> Array:
        return self._spread / (1.0 - 1.0 / self.n_eff)

    @cached_property
    def measured(self) -> Array:
        assert self._ends is not None  # asked for by the rules that need them
        squared = np.diagonal(self._spread) if self._spread.ndim == 2 else self._spread
        return np.stack([np.sqrt(squared), *self._ends]) / self.unit
