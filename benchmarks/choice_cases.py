"""The grid of benchmarks/choice.py: which cases, and their data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.choice.cost import typical_extent
from sdkde_core.choice.judge import Candidate
from sdkde_core.choice.select import rank
from sdkde_core.estimator.request import METHODS, Goal, Request
from sdkde_core.protocol import PRECISIONS

Array = NDArray[Any]

DIMENSIONS = (1, 2, 3, 8, 16, 64, 256, 784)
#: n and m, by pairs.
SIZES = (
    (1000, 100),
    (1000, 1000),
    (4096, 512),
    (10_000, 1000),
    (2000, 20_000),
    (10_000, 10_000),
    (100_000, 1000),
    (32_768, 4096),
    (1_000_000, 1000),
    (131_072, 16_384),
    (1_000_000, 131_072),
)
#: Bandwidths over Silverman's; "outliers": his, and one point in a thousand thrown OUT bandwidths away.
SPREADS = {"silverman": 1.0, "third": 1 / 3, "tenth": 0.1, "outliers": 1.0}
THROWN, OUT = 1000, 1e4

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

    @property
    def dtype(self) -> str:
        return "float32" if self.precision == "fast" else "float64"

    @property
    def pairs(self) -> int:
        """Of the larger pass."""
        return self.n * (max(self.m, self.n) if self.method == "sdkde" else self.m)

    @property
    def text(self) -> str:
        return f"{self.method} {self.precision}, {self.n} × {self.m}, d = {self.d}, {self.spread}, {self.place}"


def data(case: Case) -> tuple[Array, Array, float]:
    """Samples (n, d) and queries (m, d) of a mixture of eight normals, and the bandwidth.

    Points thrown out come first, so that the beginning of the data is like the whole.
    """
    rng, d = np.random.default_rng([case.seed, case.n, case.m, case.d]), case.d
    means = 2.0 * rng.normal(size=(8, d))
    x, y = (means[rng.integers(0, 8, k)] + rng.normal(size=(k, d)) for k in (case.n, case.m))
    h = SPREADS[case.spread] * 0.9 * float(x.std(axis=0).mean()) * case.n ** (-1 / (d + 4))
    if case.spread == "outliers":
        for z in (x, y):
            thrown = max(1, len(z) // THROWN)
            way = rng.normal(size=(thrown, d))
            z[:thrown] += OUT * h * way / np.sqrt((way**2).sum(axis=1, keepdims=True))
    return x.astype(case.dtype), y.astype(case.dtype), h


def priced(case: Case, device: str | None = None) -> list[Candidate]:
    """What every backend would take, by the extent that such data have: for planning, without the data."""
    extent, share = typical_extent(case.n, case.d) / SPREADS[case.spread], 0.0
    if case.spread == "outliers":
        extent, share = OUT, 2.0 / THROWN
    where = "cuda:0" if case.place == "device" else "cpu"
    request = Request(Goal.DENSITY, case.method, precision=case.precision)
    problems = request.problems(case.m, case.n, case.d, extent, frozenset(), case.dtype, where)
    ranked = rank(problems, device=device, data_device=where, share=lambda step, limit: share)
    return [c for c in ranked if c.ok and c.seconds is not None]


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
