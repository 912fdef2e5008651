"""The grid: which cases, and their data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.choice.cost import typical_extent
from sdkde_core.choice.judge import Candidate, calls_of
from sdkde_core.choice.select import Wanted, ranked
from sdkde_core.estimator.request import METHODS, Goal, Request
from sdkde_core.protocol import PRECISIONS

Array = NDArray[Any]

DIMENSIONS = (1, 2, 3, 8, 16, 64, 256, 784)
#: n and m, by pairs.
SIZES = (
    (100, 100),
    (1000, 100),
    (300, 1000),
    (1000, 1000),
    (4096, 512),
    (100, 100_000),
    (10_000, 1000),
    (2000, 20_000),
    (10_000, 10_000),
    (100_000, 1000),
    (32_768, 4096),
    (1_000_000, 1000),
    (131_072, 16_384),
    (1_000_000, 131_072),
)
#: Bandwidths over Silverman's.
SPREADS = {"silverman": 1.0, "third": 1 / 3, "tenth": 0.1}

#: Kinds of data, see :func:`data`, and the extents, over the usual one, that planning takes for theirs.
KINDS = {"benign": 1.0, "zeros": 1e5, "counts": 2.0, "clusters": 100.0, "outliers": 1e3, "heavy": 100.0, "surface": 1.0}

#: One point in THROWN is thrown OUT bandwidths away; share of zeros; clusters, and the distance between them.
THROWN, OUT, ZEROS, CLUSTERS, APART = 1000, 1e4, 0.7, 12, 200.0

#: Coordinates of the samples, and of the queries, at most: the data and the truth are made anew for every case.
NUMBERS = 8_000_000

#: Predicted times over the fastest beyond which a backend is not measured; where start-up counts, with it in both, too.
HOPELESS, HOPELESS_IN_ALL = 20.0, 2.0

#: Seconds from which one call is enough; calls otherwise, at most.
SLOW, CALLS = 1.0, 5


@dataclass(frozen=True)
class Case:
    """An estimate to make: the data follow from it."""

    method: str
    precision: str
    n: int
    m: int
    d: int
    spread: str
    place: str = "host"  # or "device": where the data are
    seed: int = 0
    kind: str = "benign"

    @property
    def dtype(self) -> str:
        return "float32" if self.precision == "fast" else "float64"

    @property
    def pairs(self) -> int:
        """Of the larger pass."""
        return self.n * (max(self.m, self.n) if self.method == "sdkde" else self.m)

    @property
    def text(self) -> str:
        what = f"{self.kind} {self.spread}, {self.place}"
        return f"{self.method} {self.precision}, {self.n} × {self.m}, d = {self.d}, {what}"


def data(case: Case) -> tuple[Array, Array, float]:
    """Samples (n, d) and queries (m, d) of a kind, and the bandwidth.

    ==========  ======================================================================================================
    benign      a mixture of eight normals
    zeros       zero-inflated: exp(3 z), z normal, ZEROS of the values 0
    counts      whole numbers: Poisson with rates from a gamma distribution
    clusters    CLUSTERS normals, APART times as far apart as they are wide; the bandwidth is that of one
    outliers    benign, and one point in THROWN thrown OUT bandwidths away
    heavy       Student's t with two degrees of freedom
    surface     a normal in three dimensions, lying in d, and 0.01 of one in all of them
    ==========  ======================================================================================================

    Points thrown out come first, so that the beginning of the data is like the whole.
    """
    rng, d, n = np.random.default_rng([case.seed, case.n, case.m, case.d]), case.d, case.n
    means = (APART if case.kind == "clusters" else 2.0) * rng.normal(
        size=(CLUSTERS if case.kind == "clusters" else 8, d)
    )
    directions = np.linalg.qr(rng.normal(size=(d, min(d, 3))))[0].T if case.kind == "surface" else means[:0]

    def points(k: int) -> Array:
        if case.kind == "zeros":
            return np.exp(3.0 * rng.normal(size=(k, d))) * (rng.random((k, d)) > ZEROS)
        if case.kind == "counts":
            return rng.poisson(rng.gamma(1.5, 3.0, (k, d))).astype(float)
        if case.kind == "heavy":
            return rng.standard_t(2, (k, d))
        if case.kind == "surface":
            return rng.normal(size=(k, len(directions))) @ directions + 0.01 * rng.normal(size=(k, d))
        return means[rng.integers(0, len(means), k)] + rng.normal(size=(k, d))

    x, y = points(n), points(case.m)
    h = SPREADS[case.spread] * 0.9 * _width(case.kind, x) * n ** (-1 / (d + 4))
    if case.kind == "outliers":
        for z in (x, y):
            thrown = max(1, len(z) // THROWN)
            way = rng.normal(size=(thrown, d))
            z[:thrown] += OUT * h * way / np.sqrt((way**2).sum(axis=1, keepdims=True))
    return x.astype(case.dtype), y.astype(case.dtype), h


def _width(kind: str, x: Array) -> float:
    """The mean over dimensions of what Silverman's rule takes for σ: min(std, IQR / 1.34), std where the IQR is 0."""
    if kind == "clusters":
        return 1.0
    std = x.std(axis=0)
    if kind in ("benign", "outliers", "surface"):
        return float(std.mean())
    iqr = np.subtract(*np.quantile(x, (0.75, 0.25), axis=0)) / 1.34
    return float(np.where(iqr > 0, np.minimum(std, iqr), std).mean())


def priced(case: Case, device: str | None = None) -> list[Candidate]:
    """What every backend would take, by the extent that such data have: for planning, without the data."""
    extent, share = typical_extent(case.n, case.d) / SPREADS[case.spread] * KINDS[case.kind], 0.0
    if case.kind == "outliers":
        share = 2.0 / THROWN
    where = "cuda:0" if case.place == "device" else "cpu"
    request = Request(Goal.DENSITY, case.method, precision=case.precision)
    problems = request.problems(case.m, case.n, case.d, extent, frozenset(), case.dtype, where)
    wanted = Wanted(device=device, data_device=where, calls=calls_of(None, where))
    found = ranked(problems, lambda step, limit: share, wanted)
    return [c for c in found if c.ok and c.seconds is not None]


class Price(NamedTuple):
    """What a candidate takes, in seconds; ``startup`` is 0 where it does not count."""

    seconds: float
    startup: float

    @property
    def total(self) -> float:
        return self.seconds + self.startup


def price(case: Case, candidate: Candidate) -> Price:
    assert candidate.seconds is not None
    return Price(candidate.seconds, candidate.startup_seconds if case.place == "host" else 0.0)


def hopeless(predicted: Price, found: Sequence[Price]) -> bool:
    """Whether a candidate cannot matter beside those found, with start-up or without."""
    if not found:
        return False
    warm, total = min(p.seconds for p in found), min(p.total for p in found)
    return predicted.seconds > HOPELESS * warm and predicted.total > HOPELESS_IN_ALL * total


def effort(prices: Sequence[Price]) -> float:
    """Seconds to measure candidates with such prices, the hopeless ones left out."""
    worth = [p.seconds for p in prices if not hopeless(p, prices)]
    return sum(t if t > SLOW else min((CALLS + 1) * t, t + SLOW) for t in worth)


def deck(values: Sequence[Any], count: int, rng: np.random.Generator) -> list[Any]:
    """``count`` values in random order, each as often as any other, but for one."""
    cards = [values[i % len(values)] for i in rng.permutation(len(values))] * math.ceil(count / len(values))
    return [cards[i] for i in rng.permutation(count)]


def draw(
    count: int,
    places: Sequence[str],
    seed: int,
    patience: float,
    largest: float,
    prices: Callable[[Case], Sequence[Price]],
) -> list[Case]:
    """Draw cases in which every value of an axis comes equally often, but for the sizes.

    A size that asks too much is replaced by the next smaller one: more than ``patience`` seconds to measure all of
    ``prices(case)``, ``largest`` pairs, or NUMBERS coordinates of either kind.
    """
    rng = np.random.default_rng(seed)
    axes = {"method": METHODS, "precision": PRECISIONS, "d": DIMENSIONS, "spread": tuple(SPREADS), "place": places}
    axes["kind"] = tuple(KINDS)
    decks = {name: deck(values, count, rng) for name, values in axes.items()}
    ranks = deck(range(len(SIZES)), count, rng)
    found = []
    for i in range(count):
        chosen = {name: cards[i] for name, cards in decks.items()}
        for n, m in SIZES[ranks[i] :: -1]:
            case = Case(n=n, m=m, seed=seed + i, **chosen)
            if max(n, m) * case.d <= NUMBERS and case.pairs <= largest and effort(prices(case)) <= patience:
                break
        found.append(case)
    return found


def headline(precisions: Sequence[str], place: str) -> list[Case]:
    """SD-KDE at the sizes that others publish."""
    sizes = [(32_768, 4096, d) for d in (1, 2, 3, 16, 64)] + [(1_000_000, 131_072, d) for d in (1, 2, 3, 16)]
    first = Case("sdkde", "high", 0, 0, 0, "silverman", place)
    return [replace(first, precision=precision, n=n, m=m, d=d) for n, m, d in sizes for precision in precisions]
