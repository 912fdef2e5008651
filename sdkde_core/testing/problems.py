"""Cases for reductions, whitened, and the error of an answer in units of its tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkde_core.engine.columns import reduce_pass
from sdkde_core.protocol import TOLERANCES, Backend, BackendInfo, Columns, Partial, Problem, Reduction
from sdkde_core.testing import reference

__all__ = ["CASES", "Case", "Truth", "answer", "errors", "make", "truth", "worst_error"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Whitened data of one kind.

    Parameters
    ----------
    name : str
    points : (n, d) array
    queries : (m, d) array
    log_weights : (n,) array
        Their exponentials sum to 1.
    """

    name: str
    points: Array
    queries: Array
    log_weights: Array

    def problem(
        self, reduction: Reduction, precision: str, *, same: bool = False, exclude_self: bool = False, **more: Any
    ) -> Problem:
        """Describe a reduction of this case."""
        requires = set(more.pop("requires", ()))
        if np.any(self.log_weights != self.log_weights[0]):
            requires.add("weights")
        if exclude_self:
            requires.add("exclude_self")
        rows = self.points if same else self.queries
        extent = max((float(np.sqrt((x**2).sum(1)).max()) for x in (self.points, rows) if len(x)), default=0.0)
        n, d = self.points.shape
        return Problem(
            reduction,
            len(rows),
            n,
            d,
            precision=precision,
            same=same,
            requires=frozenset(requires),
            extent=extent,
            **more,
        )


def _uniform(n: int) -> Array:
    return np.full(n, -math.log(n))


def _normalised(log_weights: Array) -> Array:
    top = log_weights.max()
    return log_weights - top - math.log(math.fsum(np.exp(log_weights - top)))


def _mixture(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Points and queries from one Gaussian mixture, its farthest point at ``extent``."""
    means = 2.0 * rng.normal(size=(8, d))
    x = means[rng.integers(0, 8, n)] + rng.normal(size=(n, d))
    y = means[rng.integers(0, 8, m)] + rng.normal(size=(m, d))
    scale = extent / np.sqrt((x**2).sum(1)).max()
    return Case("mixture", x * scale, y * scale, _uniform(n))


def _tails(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Points near the origin, queries on shells out to ``extent``, where exp underflows."""
    y = rng.normal(size=(m, d))
    y *= np.linspace(0.0, extent, m)[:, None] / np.sqrt((y**2).sum(1))[:, None]
    return Case("tails", rng.normal(size=(n, d)), y, _uniform(n))


def _clusters(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Two clusters ``2 · extent`` apart; queries in both, between them, and beyond."""
    offset = np.zeros(d)
    offset[0] = extent
    x = rng.normal(size=(n, d)) + np.where(rng.random(n) < 0.5, -1.0, 1.0)[:, None] * offset
    y = rng.normal(size=(m, d)) + rng.choice([-1.0, 0.0, 1.0, 1.001], m)[:, None] * offset
    return Case("clusters", x, y, _uniform(n))


def _outlier(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """One point and one query at 1e7 bandwidths, the rest within ``extent``."""
    case = _mixture(rng, n, m, d, extent)
    case.points[n // 2, 0] = 1e7
    if m:
        case.queries[m // 2, 0] = -1e7
    return replace(case, name="outlier")


def _weights(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Weights over hundreds of orders of magnitude, and a run of zeros."""
    case = _mixture(rng, n, m, d, extent)
    log_w = rng.choice([-460.0, -3.0, 0.0, 460.0], n, p=[0.4, 0.2, 0.2, 0.2]) + rng.normal(size=n)
    log_w[n // 4 : n // 2] = -np.inf
    return replace(case, name="weights", log_weights=_normalised(log_w))


def _duplicates(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Every point several times over, and queries on points."""
    case = _mixture(rng, max(1, n // 5), m, d, extent)
    x = case.points[rng.integers(0, len(case.points), n)]
    return Case("duplicates", x, x[rng.integers(0, n, m)].copy(), _uniform(n))


def _zero_tile(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Weight zero on all but the last columns: whole tiles of zeros."""
    case = _mixture(rng, n, m, d, extent)
    log_w = np.full(n, -np.inf)
    log_w[-max(1, n // 50) :] = 0.0
    return replace(case, name="zero_tile", log_weights=_normalised(log_w))


def _muted_outlier(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """A point at 1e7 bandwidths whose weight is zero: no column, but still a row."""
    case = _outlier(rng, n, m, d, extent)
    log_w = rng.normal(size=n)
    log_w[n // 2] = -np.inf if n > 1 else 0.0
    return replace(case, name="muted_outlier", log_weights=_normalised(log_w))


#: Kinds of case: ``kind(rng, n, m, d, extent) -> Case``.
CASES: dict[str, Callable[[np.random.Generator, int, int, int, float], Case]] = {
    "mixture": _mixture,
    "tails": _tails,
    "clusters": _clusters,
    "outlier": _outlier,
    "weights": _weights,
    "duplicates": _duplicates,
    "zero_tile": _zero_tile,
    "muted_outlier": _muted_outlier,
}


def make(kind: str, n: int, m: int, d: int, extent: float = 10.0, seed: int = 0) -> Case:
    """Make a case; the same arguments give the same data."""
    return CASES[kind](np.random.default_rng([seed, n, m, d]), n, m, d, extent)


Truth = reference.Sums


def truth(
    case: Case, *, same: bool = False, exclude_self: bool = False, values: Any = None, scale: float = 1.0
) -> Truth:
    """The reference's answer to all three reductions."""
    rows = case.points if same else case.queries
    return reference.sums(
        rows, case.points, log_weights=case.log_weights, exclude_self=exclude_self, values=values, scale=scale
    )


def answer(info: BackendInfo, backend: Backend, problem: Problem, case: Case, values: Any = None) -> Partial:
    """A backend's answer, by way of the core: columns without weight dropped, far points split off."""
    columns = Columns(case.points, case.log_weights, values)
    return reduce_pass(backend, info, problem, columns, None if problem.same else case.queries)


def errors(problem: Problem, got: Partial, want: Truth) -> Array:
    """Error of every row over its tolerance, (m,): at most 1 is within the contract; inf for a row that is NaN."""
    tolerance = TOLERANCES[problem.precision]
    if problem.reduction is Reduction.LAPLACE:
        worst = _log_errors(tolerance[Reduction.LAPLACE], got.log_sum, want.log_plus)
        full = np.isfinite(want.log_plus)
        with np.errstate(over="ignore", invalid="ignore"):
            off = abs(got.sign * np.exp(got.log_magnitude - np.where(full, want.log_plus, 0.0)) - want.signed)
        return np.maximum(worst, _over(off, tolerance[Reduction.LAPLACE].at(np.where(full, want.log_plus, 0.0))))
    worst = _log_errors(tolerance[Reduction.LOG_SUM], got.log_sum, want.log_sum)
    if problem.reduction is Reduction.MEAN:
        off = np.sqrt(((got.shift - want.shift) ** 2).sum(axis=-1))
        allowed = tolerance[Reduction.MEAN].at(np.where(np.isfinite(want.log_sum), want.log_sum, 0.0))
        worst = np.maximum(worst, _over(off, allowed))
    return worst


def worst_error(
    info: BackendInfo, backend: Backend, case: Case, precision: str, *, same: bool, exclude_self: bool = False
) -> dict[Reduction, float]:
    """The worst row of every reduction, over its tolerance."""
    want = truth(case, same=same, exclude_self=exclude_self)
    result = {}
    for reduction in Reduction:
        problem = case.problem(reduction, precision, same=same, exclude_self=exclude_self)
        got = answer(info, backend, problem, case)
        result[reduction] = float(errors(problem, got, want).max(initial=0.0))
    return result


def _log_errors(tolerance: Any, got: Array, want: Array) -> Array:
    with np.errstate(invalid="ignore"):
        off = np.where(want == got, 0.0, abs(got - want))  # −inf, an empty sum, equals itself and nothing else
    return _over(off, tolerance.at(np.where(np.isfinite(want), want, 0.0)))


def _over(off: Array, allowed: Array) -> Array:
    """Error over tolerance; inf for NaN."""
    return np.where(np.isnan(off), np.inf, off / allowed)
