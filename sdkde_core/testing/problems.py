"""Cases for reductions, whitened, and the error of an answer in units of its tolerance."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.arrays import convert, to_host
from sdkde_core.plugin import each, reduce_pass
from sdkde_core.protocol import TOLERANCES, Backend, BackendInfo, Columns, Partial, Problem, Reduction

from . import reference
from .reference import Array

__all__ = ["CASES", "Case", "Compared", "Truth", "answer", "compare", "errors", "far", "make", "truth"]


@dataclass(frozen=True, eq=False)
class Case:
    """Whitened data of one kind. What is made is not changed: answers about it are kept."""

    name: str
    points: Array  # (n, d)
    queries: Array  # (m, d)
    log_weights: Array  # (n,); their exponentials sum to 1

    def problem(self, reduction: str, precision: str, *, same: bool = False, **more: Any) -> Problem:
        """Describe a reduction of this case; ``more``: other fields of the problem."""
        requires = set(more.pop("requires", ()))
        if np.any(self.log_weights != self.log_weights[0]):
            requires.add("weights")
        rows = self.points if same else self.queries
        more |= {"precision": precision, "same": same, "requires": frozenset(requires)}
        n, d = self.points.shape
        return Problem(Reduction(reduction), len(rows), n, d, extent=max(_extent(self.points), _extent(rows)), **more)


def _extent(x: Array) -> float:
    return float(np.sqrt(np.vecdot(x, x).max(initial=0.0)))


#: Kinds of case, see `make`.
CASES = ("mixture", "tails", "clusters", "outlier", "weights", "duplicates", "zero_tile", "muted_outlier", "light")


def make(kind: str, n: int, m: int, d: int, extent: float = 10.0, seed: int = 0) -> Case:
    """Make a case of one of the kinds in :data:`CASES`; the same arguments give the same data."""
    rng, log_w = np.random.default_rng([seed, n, m, d]), np.zeros(n)
    if kind not in ("tails", "clusters"):
        few, means = max(1, n // 5) if kind == "duplicates" else n, 2.0 * rng.normal(size=(8, d))
        x, y = (means[rng.integers(0, 8, count)] + rng.normal(size=(count, d)) for count in (few, m))
        scale = (min(extent, 6.0) if kind == "light" else extent) / np.sqrt((x**2).sum(1)).max()
        x, y = x * scale, y * scale
    match kind:
        case "mixture":  # points and queries from one Gaussian mixture, its farthest point at ``extent``
            pass
        case "tails":  # points near the origin, queries on shells out to ``extent``, where exp underflows
            y, x = rng.normal(size=(m, d)), rng.normal(size=(n, d))
            y *= np.linspace(0.0, extent, m)[:, None] / np.sqrt((y**2).sum(1))[:, None]
        case "clusters":  # two, ``2 · extent`` apart; queries in both, between them, and beyond
            x = rng.normal(size=(n, d))
            x[:, 0] += extent * np.where(rng.random(n) < 0.5, -1.0, 1.0)
            y = rng.normal(size=(m, d))
            y[:, 0] += extent * rng.choice([-1.0, 0.0, 1.0, 1.001], m)
        case "outlier" | "muted_outlier":  # one point, whose weight may be zero, and one query at 1e7 bandwidths
            x[n // 2, 0] = 1e7
            y[m // 2 : m // 2 + 1, 0] = -1e7
            if kind == "muted_outlier":
                log_w = rng.normal(size=n)
                log_w[n // 2] = -np.inf if n > 1 else 0.0
        case "weights":  # over hundreds of orders of magnitude, and a run of zeros
            log_w = rng.choice([-460.0, -3.0, 0.0, 460.0], n, p=[0.4, 0.2, 0.2, 0.2]) + rng.normal(size=n)
            log_w[n // 4 : n // 2] = -np.inf
        case "duplicates":  # every point several times over, and queries on points
            x = x[rng.integers(0, len(x), n)]
            y = x[rng.integers(0, n, m)]
        case "zero_tile":  # weight zero on all but the last columns: whole tiles of zeros
            log_w[: n - max(1, n // 50)] = -np.inf
        case "light":  # two spots apart, with weights 1e-42 and 1e-390 of the others': all that matters to rows there
            log_w, towards = rng.normal(size=n), rng.normal(size=d)
            towards /= np.linalg.norm(towards)
            for k, (distance, log_weight) in enumerate(((22.0, -97.0), (-48.0, -900.0))):
                for rows in (x, y):
                    rows[k::4] = 0.3 * rows[k::4] + distance * towards
                log_w[k::4] += log_weight
        case _:
            raise ValueError(f"kind is {kind!r}; pass one of {', '.join(CASES)}")
    return Case(kind, x, y, reference.normalised(log_w))


def frozen(case: Case) -> Case:
    """Return a case whose arrays are read-only, for checks that share it."""
    for array in (case.points, case.queries, case.log_weights):
        array.flags.writeable = False
    return case


@functools.lru_cache(maxsize=64)
def far(n: int, m: int, d: int, distance: float, *, stray: bool) -> Case:
    """Points near the origin, and rows among which some are ``distance`` bandwidths from every point; m ≥ 8.

    With ``stray`` one point is as far away too; rows lie beside it, on the way to it, and on the opposite side.
    """
    rng = np.random.default_rng([0, n, m, d, stray])
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
    return frozen(Case("a stray point" if stray else "far rows", x, y, np.full(n, -math.log(n))))


Truth = reference.Sums


def truth(case: Case, *, same: bool = False, rows: Any = None) -> Truth:
    """Return the oracle's answer to all three reductions, for all rows or for those whose indices ``rows`` has."""
    return _truth(case, same, None if rows is None else tuple(np.asarray(rows).tolist()))


@functools.lru_cache(maxsize=512)
def _truth(case: Case, same: bool, rows: tuple[int, ...] | None) -> Truth:
    given = case.points if same else case.queries
    which = np.arange(len(given)) if rows is None else np.array(rows, int)
    reach = max(_extent(case.points), _extent(given[which]))
    found = reference.sums(given[which], case.points, case.log_weights, plain=reach <= 12.0)
    for array in found:
        array.flags.writeable = False  # whoever asks next gets the same arrays
    return found


def answer(info: BackendInfo, backend: Backend, problem: Problem, case: Case) -> Partial:
    """Return a backend's answer to a problem about a case, by way of the core: NumPy's arrays, whatever it takes."""
    points, log_weights = (convert(x, info.arrays, problem.device) for x in (case.points, case.log_weights))
    queries = None if problem.same else convert(case.queries, info.arrays, problem.device)
    return each(reduce_pass(backend, info, problem, Columns(points, log_weights), queries), to_host)


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
        off = np.hypot.reduce(got.shift - want.shift, axis=-1)
        # Beyond 1e7 bandwidths the tolerance exceeds the distance, and 0 would pass: 1e-6 of the shift is allowed.
        most = tolerance[Reduction.MEAN].absolute + 1e-6 * np.hypot.reduce(want.shift, axis=-1)
        most = np.minimum(tolerance[Reduction.MEAN].at(size), np.where(size < -1e13, most, math.inf))
        found["shift"] = Compared(got.shift, want.shift, off, most)
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
    return np.max([field.over for field in compare(problem, got, want).values()], axis=0)
