"""Cases for reductions, whitened, and the error of an answer in units of its tolerance."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.arrays import convert, to_host
from sdkde_core.plugin import each, reduce_pass
from sdkde_core.protocol import TOLERANCES, Backend, BackendInfo, Columns, Partial, Problem, Reduction

from . import reference

__all__ = ["CASES", "Case", "Compared", "Truth", "answer", "compare", "errors", "far", "make", "truth", "worst_error"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Case:
    """Whitened data of one kind. What is made is not changed: answers about it are kept.

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
        self, reduction: str, precision: str, *, same: bool = False, exclude_self: bool = False, **more: Any
    ) -> Problem:
        """Describe a reduction of this case; ``more``: other fields of the problem."""
        requires = set(more.pop("requires", ()))
        if np.any(self.log_weights != self.log_weights[0]):
            requires.add("weights")
        if exclude_self:
            requires.add("exclude_self")
        rows = self.points if same else self.queries
        more |= {"precision": precision, "same": same, "requires": frozenset(requires)}
        n, d = self.points.shape
        extent = max(_extent(self.points), _extent(rows))
        return Problem(Reduction(reduction), len(rows), n, d, extent=extent, **more)


def _extent(x: Array) -> float:
    return float(np.sqrt(np.vecdot(x, x).max(initial=0.0)))


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


def _light(rng: np.random.Generator, n: int, m: int, d: int, extent: float) -> Case:
    """Two spots apart from the rest, with weights 1e-42 and 1e-390 of theirs: all that matters to the rows there."""
    case = _mixture(rng, n, m, d, min(extent, 6.0))
    log_w, towards = rng.normal(size=n), rng.normal(size=d)
    towards /= np.linalg.norm(towards)
    for k, (distance, log_weight) in enumerate(((22.0, -97.0), (-48.0, -900.0))):
        for x in (case.points, case.queries):
            x[k::4] = 0.3 * x[k::4] + distance * towards
        log_w[k::4] += log_weight
    return replace(case, name="light", log_weights=_normalised(log_w))


#: Kinds of case: ``kind(rng, n, m, d, extent) -> Case``.
CASES: dict[str, Callable[[np.random.Generator, int, int, int, float], Case]] = {
    kind.__name__.removeprefix("_"): kind
    for kind in (_mixture, _tails, _clusters, _outlier, _weights, _duplicates, _zero_tile, _muted_outlier, _light)
}


def make(kind: str, n: int, m: int, d: int, extent: float = 10.0, seed: int = 0) -> Case:
    """Make a case; the same arguments give the same data."""
    return CASES[kind](np.random.default_rng([seed, n, m, d]), n, m, d, extent)


def far(n: int, m: int, d: int, distance: float, *, stray: bool, seed: int = 0) -> Case:
    """Points near the origin, and rows among which some are ``distance`` bandwidths from every point; m ≥ 8.

    With ``stray`` one point is as far away too; rows lie beside it, on the way to it, and on the opposite side.
    """
    rng = np.random.default_rng([seed, n, m, d, stray])
    x, y, away = rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.normal(size=(3, d))
    away *= distance / np.sqrt((away**2).sum(1, keepdims=True))
    if stray:
        x[n // 3] = away[0]
        # Midway, where rounding decides once a bandwidth is less of the distance than a unit in the last place.
        middle = 0.5 if distance < 1e13 else 0.4
        rows = [away[0], away[0] + y[0], *(share * away[0] for share in (0.3, middle, 0.7, 1.5, -1.0)), away[1]]
    else:
        rows = [*away, np.full(d, distance / math.sqrt(d)), -0.3 * away[0], 1e-3 * away[1]]
    y[rng.permutation(m)[: len(rows)]] = rows
    return Case("a stray point" if stray else "far rows", x, y, _uniform(n))


Truth = reference.Sums


def truth(case: Case, *, same: bool = False, exclude_self: bool = False, rows: Any = None) -> Truth:
    """Return the oracle's answer to all three reductions, for all rows or for those whose indices ``rows`` has."""
    return _truth(case, same, exclude_self, None if rows is None else tuple(np.asarray(rows).tolist()))


@functools.lru_cache(maxsize=512)
def _truth(case: Case, same: bool, exclude_self: bool, rows: tuple[int, ...] | None) -> Truth:
    given = case.points if same else case.queries
    which = np.arange(len(given)) if rows is None else np.array(rows, int)
    own, reach = which if exclude_self else False, max(_extent(case.points), _extent(given[which]))
    if reach <= 12.0:  # plain float64 is right far within every tolerance; beyond, the oracle takes its time
        found = reference.near_sums(given[which], case.points, case.log_weights, own)
    else:
        found = reference.sums(given[which], case.points, log_weights=case.log_weights, exclude_self=own)
    for array in found:
        array.flags.writeable = False  # whoever asks next gets the same arrays
    return found


def answer(info: BackendInfo, backend: Backend, problem: Problem, case: Case, own_offset: int = 0) -> Partial:
    """Return a backend's answer to a problem about a case, by way of the core: NumPy's arrays, whatever it takes."""
    points, log_weights, queries = (
        convert(x, info.arrays, problem.device) for x in (case.points, case.log_weights, case.queries)
    )
    queries = None if problem.same else queries
    return each(reduce_pass(backend, info, problem, Columns(points, log_weights), queries, own_offset), to_host)


class Compared(NamedTuple):
    """A field of an answer, beside the truth."""

    got: Array  # (m,), or (m, d)
    want: Array
    off: Array  # (m,) error; NaN where the answer is
    allowed: Array  # (m,)

    @property
    def over(self) -> Array:
        """Error over tolerance, (m,); inf for NaN."""
        return np.where(np.isnan(self.off), np.inf, self.off / self.allowed)


def compare(problem: Problem, got: Partial, want: Truth) -> dict[str, Compared]:
    """Compare an answer with the truth, field by field.

    LAPLACE's ``"sign and log_magnitude"`` are compared as L / M, in units of the true M.
    """
    tolerance = TOLERANCES[problem.precision]
    laplace = problem.reduction is Reduction.LAPLACE
    log_sum = want.log_plus if laplace else want.log_sum
    size = np.where(np.isfinite(log_sum), log_sum, 0.0)
    with np.errstate(invalid="ignore"):  # −inf, an empty sum, equals itself and nothing else
        off = np.where(log_sum == got.log_sum, 0.0, abs(got.log_sum - log_sum))
    allowed = tolerance[Reduction.LAPLACE if laplace else Reduction.LOG_SUM].at(size)
    found = {"log_sum": Compared(got.log_sum, log_sum, off, allowed)}
    if problem.reduction is Reduction.MEAN:
        off = np.sqrt(((got.shift - want.shift) ** 2).sum(axis=-1))
        found["shift"] = Compared(got.shift, want.shift, off, tolerance[Reduction.MEAN].at(size))
    if laplace:
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.where(abs(got.sign) <= 1.0, got.sign * np.exp(got.log_magnitude - size), math.nan)
            off = abs(ratio - want.signed)
            logs = np.where(np.sign(want.signed) == got.sign, abs(got.log_magnitude - size), math.nan)
        # So far below that float64 does not resolve a log to one, |L| is M: only the logs compare.
        off = np.where(allowed < 1.0, off, logs)
        found["sign and log_magnitude"] = Compared(ratio, want.signed, off, allowed)
    return found


def errors(problem: Problem, got: Partial, want: Truth) -> Array:
    """Error of every row over its tolerance, (m,): at most 1 is within the contract; inf for a row that is NaN."""
    fields = [field.over for field in compare(problem, got, want).values()]
    return np.max(fields, axis=0)


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
