"""Random problems against float64, for any backend: worst error over tolerance, by precision and method or reduction.

    python benchmarks/fuzz.py [--backend numpy] [--device cpu] [--problems 1000] [--seed 0] [--precisions fast,high]
        [--options '{"skip": true}']

Half of the problems are whole estimates (kde, sdkde, laplace), of data in any units; half are single reductions
(LOG_SUM, MEAN, LAPLACE) of whitened points. At most 1 is within the contract
(sdkde_core.protocol.TOLERANCES; twice those for sdkde). Problem i is drawn from (seed, i) alone: --replay i with the
same options draws it again. What the backend declines is counted, by reason. Exit status 1: something missed its
tolerance, or raised.

The truth is this file's own: float64 differences of the numbers as handed in, on the problem's device, neither centred
nor whitened. What is forgiven, row by row, because no result in that dtype, or no sum in float64, could have it:

* Rounding of the result: 2⁻²⁴ (float32) or 2⁻⁵³ (float64) of log p, or of p; before that in float64 one of log p, and
  four of the kernel's constant, a sum of d logs.
* Whitening, of whole estimates: ρ bandwidths from the centre a coordinate is right to three roundings, 3·2⁻⁵³ ρ; once
  moved, to four. To first order that moves ℓ by Σ_j p_j r_j e_j: p_j is a column's share of the row's sum, r_j its
  distance, e_j the two points' errors. At ρ = 10⁶ it comes to 10⁻⁹, so that only "float64" notices.
* Exponents, of MEAN: columns at a distance D from one another that weigh alike are balanced by exponents, which float64
  rounds by 2⁻⁵³ r²/2, a sum of d squares more than once, and the shift is off by that times D. 2 + √d/4 such roundings:
  in 16 dimensions, midway between clusters 10⁴ bandwidths apart, 17 times the tolerance of "float64", a third of that
  of "fast". (The truth here has none of them.)

The table's column "forgiven" has the problems that were kept thanks to the last two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from fuzz_oracle import UNIT, Array, Points, Sums, host, sums

import sdkde_core
from sdkde_core import SdkdeWarning, messages
from sdkde_core.arrays import to_host
from sdkde_core.choice import registry
from sdkde_core.engine.failures import BackendFailed
from sdkde_core.estimator.request import METHODS
from sdkde_core.protocol import PRECISIONS, BackendUnavailable, Partial, Problem, Reduction
from sdkde_core.testing.checks import NotDeclared, Target
from sdkde_core.testing.problems import Case, errors

_EDGES = (31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 384, 784, 1024)
DIMENSIONS = (1, 1, 2, 2, 3, 3, 5, 8, *range(12, 18), *_EDGES)
KINDS = ("gaussian", "mixture", "clusters", "uniform", "student", "duplicates", "lattice", "offset", "flat", "single")
QUERIES = ("same", "jittered", "between", "tail", "mixed")
WEIGHTS = ("none", "none", "uniform", "1e±3", "1e±200", "zeros")
TASKS = (*METHODS, "sdkde", *(r.name for r in Reduction))  # Laplace is both: the reduction in capitals

#: ``backend_options``.
OPTIONS: dict[str, Any] = {}

#: Why a problem is refused whatever the backend.
TOO_FAR = "points far from the median that only their last digits set apart"

#: By kind of device: the largest n and m, and n · m · d at most.
LARGEST, WORK = {"cuda": 20_000, "cpu": 1000}, {"cuda": 1e10, "cpu": 2e7}


# --- problems -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A problem: data in the user's units and dtype, and what is asked of them."""

    index: int
    task: str  # a method, or a reduction's name, which is in capitals
    precision: str
    text: str  # what it is, in a line
    train: Array  # (n, d)
    query: Array | None  # (m, d)
    weights: Array | None  # (n,) float64
    bandwidth: float | Array  # data units; (d, d): squared
    log: bool = True  # of methods: log p̂, or p̂
    repeats: int = 0  # of methods: more calls, which must give the same bits

    @property
    def queries(self) -> Array:
        return self.train if self.query is None else self.query


def draw(
    seed: int,
    index: int,
    precisions: tuple[str, ...],
    kind: str,
    largest: int,
    dimensions: tuple[int, ...] = DIMENSIONS,
) -> Drawn:
    """Draw problem ``index``; ``kind`` is the device's."""
    rng = np.random.default_rng([seed, index])
    task, precision, data, near, weighting = (str(rng.choice(c)) for c in (TASKS, precisions, KINDS, QUERIES, WEIGHTS))
    d = int(rng.choice(dimensions))
    n, m = (round(largest ** rng.random()) for _ in range(2))
    n, m = (1 if data == "single" else n), (n if near == "same" else m)
    excess = n * max(m, n if task == "sdkde" else 1) * d / WORK[kind]
    if excess > 1:
        n, m = (max(1, int(k / math.sqrt(excess))) for k in (n, m))
    dtype = "float64" if data == "offset" or rng.random() < 0.5 else "float32"
    factor = 10 ** rng.uniform(math.log10(0.05), math.log10(20))
    h = factor * 0.9 * n ** (-1 / (d + 4))  # in units in which a cluster's std is 1
    x, note = _points(rng, data, n, d, h)
    outliers = min(n - 1, int(rng.choice((0, 0, 1, 10))))
    reach = float(rng.choice((6, 6, 13 if dtype == "float32" else 60)))
    _throw(rng, x, outliers, h, reach)
    columns = 10 ** rng.uniform(-3, 3, d) if rng.random() < 0.5 else np.ones(1)  # their units
    scale = 10 ** rng.uniform(-30, 30) if rng.random() < 0.7 else 1.0
    if (
        dtype == "float32" and 1e3 * (abs(x).max() + 10**reach * h) * columns.max() * scale > 1e30
    ):  # with room for the queries
        scale = 1.0
    train, unit = (x * (columns * scale)).astype(dtype), h * columns * scale
    query = None if near == "same" else _queries(rng, near, train.astype(float), m, unit, outliers, reach).astype(dtype)
    bandwidth: Any = float(unit[0]) if unit.size == 1 else unit
    shape = "one number" if unit.size == 1 else "by column"
    if task in METHODS and 1 < d <= 64 and rng.random() < 0.25:
        spread = 10 ** rng.uniform(0, 1)  # beyond, the truth here would need more than float64
        bandwidth, shape = _matrix(rng, np.broadcast_to(unit, d), spread), f"matrix of condition {spread**2:.0e}"
    weights = _weights(rng, weighting, n)
    text = (
        f"{dtype} n={n} m={m} d={d} {data}{note}, {outliers} outliers, queries {near}, weights {weighting}, "
        f"bandwidth ×{factor:.2g} {shape}, scale {scale:.0e}"
    )
    more: dict[str, Any] = {}
    if task in METHODS:
        more["log"] = bool(rng.random() < 0.75)
        more["repeats"] = int(rng.choice((0, 0, 1, 10 if kind == "cuda" else 1)))
        text += "" if more["log"] else ", p itself"
    return Drawn(index, task, precision, text, train, query, weights, bandwidth, **more)


def _points(rng: np.random.Generator, kind: str, n: int, d: int, h: float) -> tuple[Array, str]:
    """Points whose clusters have a std near 1, (n, d), and what was drawn besides."""
    x, note = rng.normal(size=(n, d)), ""
    if kind == "mixture":
        x += 2 * rng.normal(size=(8, d))[rng.integers(0, 8, n)]
    elif kind == "clusters":
        k, gap = int(rng.integers(2, 6)), 10 ** rng.uniform(1, 4)
        x, note = x + (gap * h * _directions(rng, k, d))[rng.integers(0, k, n)], f" {gap:.0f} bandwidths out"
    elif kind == "uniform":
        x = rng.uniform(-1, 1, (n, d))
    elif kind == "student":
        freedom = int(rng.integers(1, 4))
        x, note = np.clip(rng.standard_t(freedom, (n, d)), -1e9, 1e9), f" t{freedom}"
    elif kind == "duplicates":
        k = round(n ** rng.random())
        x, note = x[rng.integers(0, k, n)], f" of {k}"
    elif kind == "lattice":
        x = np.rint(x * rng.choice((1.0, 3.0, 10.0)))
    elif kind == "offset":
        offset = 10 ** rng.uniform(3, 6)
        x, note = x + offset * rng.choice((-1.0, 1.0), d), f" {offset:.0e} std"
    elif kind == "flat":
        x[:, rng.integers(0, d)] *= rng.choice((0.0, 1e-12, 1e-6, 1e-3))
    return x, note


def _directions(rng: np.random.Generator, k: int, d: int) -> Array:
    v = rng.normal(size=(k, d))
    return v / np.linalg.norm(v, axis=1, keepdims=True)


def _throw(rng: np.random.Generator, x: Array, k: int, h: Any, reach: float) -> None:
    """Throw k of the points to 10² … 10^reach bandwidths."""
    where = rng.choice(len(x), min(k, len(x)), replace=False)
    x[where] += 10 ** rng.uniform(2, reach, (len(where), 1)) * h * _directions(rng, len(where), x.shape[1])


def _queries(rng: np.random.Generator, kind: str, x: Array, m: int, h: Array, outliers: int, reach: float) -> Array:
    """Queries for points x and bandwidths h, in data units."""
    a, b = rng.integers(0, len(x), (2, m))
    width = 10 ** rng.uniform(-4, 0.5, (m, 1)) * rng.choice((0, 1, 1, 1), (m, 1))  # 0: on the point
    found = {
        "jittered": x[a] + width * h * rng.normal(size=(m, x.shape[1])),
        "between": x[a] + 0.5 * (x[b] - x[a]),
        "tail": x[a] + 10 ** rng.uniform(0, 2, (m, 1)) * h * _directions(rng, m, x.shape[1]),
    }
    if kind in found:
        y = found[kind]
    else:
        y = np.choose(rng.integers(0, 3, (m, 1)), list(found.values()))
    _throw(rng, y, outliers, h, reach)
    return y


def _matrix(rng: np.random.Generator, h: Array, spread: float) -> Array:
    """A matrix H whose diagonal is h², whose axes are at random, and whose standard deviations differ by ``spread``."""
    axes = np.linalg.qr(rng.normal(size=(len(h), len(h))))[0]
    covariance = (axes * np.geomspace(1.0, spread, len(h)) ** 2) @ axes.T
    covariance = (covariance + covariance.T) / 2
    scale = h / np.sqrt(np.diagonal(covariance))
    return covariance * scale * scale[:, None]


def _weights(rng: np.random.Generator, kind: str, n: int) -> Array | None:
    if kind == "none":
        return None
    w = rng.random(n) + 1e-3
    if kind.startswith("1e±"):
        w = 10 ** (float(kind[3:]) * rng.uniform(-1, 1, n))
    elif kind == "zeros":
        w[rng.random(n) < rng.choice((0.1, 0.5, 0.99))] = 0.0
        w[rng.integers(0, n)] = 1.0
    return w


# --- checks ---------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    error: Array  # (m,) over the tolerance, what is forgiven taken off
    strict: Array  # (m,) nothing but the result's rounding taken off
    log_sum: Array  # (m,) the truth's
    seconds: float  # of the backend


def forgive(got: Array, want: Array, slack: Array) -> Array:
    """``got`` moved towards ``want`` by ``slack`` at most."""
    with np.errstate(invalid="ignore"):
        off = got - want
        return np.where(abs(off) <= slack, want, got - np.sign(off) * slack)


def log_weights(weights: Array | None, n: int) -> Array:
    """Normalised, (n,)."""
    if weights is None:
        return np.full(n, -math.log(n))
    with np.errstate(divide="ignore"):
        log_w = np.log(weights)
    return log_w - log_w.max() - math.log(math.fsum(np.exp(log_w - log_w.max())))


def given(x: Array, device: str, h: Array | None = None) -> Points:
    u, h = (None if a is None else torch.as_tensor(a, dtype=torch.float64, device=device) for a in (x, h))
    return Points(u, h)


def check(drawn: Drawn, target: Target) -> Found:
    """Ask the backend, then the oracle."""
    return (check_estimate if drawn.task in METHODS else check_reduction)(drawn, target)


def check_estimate(drawn: Drawn, target: Target) -> Found:
    """Check a whole estimate."""
    x, y, w = (target.give(a) for a in (drawn.train, drawn.query, drawn.weights))
    options: dict[str, Any] = {"method": drawn.task, "bandwidth": drawn.bandwidth, "weights": w, "log": drawn.log}
    options |= {"precision": drawn.precision, "backend": target.info.name, "backend_options": OPTIONS or None}
    options |= {"device": "cpu"} if target.device == "cpu" else {}
    start = time.perf_counter()
    got = to_host(sdkde_core.estimate(x, y, **options))
    seconds = time.perf_counter() - start
    for _ in range(drawn.repeats):  # on a GPU, from the ninth call on, a recording's
        again = to_host(sdkde_core.estimate(x, y, **options))
        assert np.array_equal(again, got, equal_nan=True), "the same call gave other bits"
    dtype = drawn.train.dtype.name
    assert got.dtype == dtype, f"{got.dtype} for {dtype}"

    n, d = drawn.train.shape
    log_w = torch.as_tensor(log_weights(drawn.weights, n), device=target.device)
    h, log_volume = factor(drawn.bandwidth, d)
    points, rows = given(drawn.train, target.device, h), given(drawn.queries, target.device, h)
    points, rows = (p._replace(unsure=unsure(p, points.x.median(0).values)) for p in (points, rows))
    if drawn.task == "sdkde":
        first = sums(points, points, log_w)
        points = points._replace(unsure=4 / 3 * points.unsure + 0.5 * first.shift_slack, moved=0.5 * first.shift)
    found = sums(rows, points, log_w)
    constant = -0.5 * d * math.log(2 * math.pi) - log_volume
    answer = Answer(got.astype(float), drawn.log, dtype, constant)
    reduction, meaning = Reduction.LOG_SUM, _log_sum
    if drawn.task == "laplace":
        reduction, meaning = Reduction.LAPLACE, _laplace
    problem = Problem(reduction, len(got), n, d, precision=drawn.precision)
    both = (errors(problem, meaning(answer, found, mercy), found.truth) for mercy in (1.0, 0.0))
    error, strict = (e / (2.0 if drawn.task == "sdkde" else 1.0) for e in both)
    return Found(error, strict, found.truth.log_sum, seconds)


def factor(bandwidth: float | Array, d: int) -> tuple[Array, float]:
    """One h by dimension, (d,), or L⁻ᵀ of H = L Lᵀ, (d, d); and log det L."""
    if np.ndim(bandwidth) < 2:
        h = np.broadcast_to(bandwidth, d).copy()
        return h, math.fsum(np.log(h))
    scale = np.sqrt(np.diagonal(bandwidth))
    lower = np.linalg.cholesky(bandwidth / scale / scale[:, None])
    return np.linalg.inv(lower).T / scale[:, None], math.fsum(np.log(np.diagonal(lower) * scale))


def unsure(points: Points, centre: torch.Tensor) -> torch.Tensor:
    """How far off points may be once they were whitened, bandwidths: each coordinate by three roundings."""
    away = points.x - centre
    apart = away / points.h if points.h.ndim == 1 else away.abs() @ points.h.abs()
    return 3 * UNIT["float64"] * apart.norm(dim=1)


class Answer(NamedTuple):
    """What ``estimate`` returned."""

    p: Array  # (m,) float64
    log: bool  # log p̂, or p̂
    dtype: str  # to which it is rounded
    constant: float  # log p̂ less ℓ

    def rounding(self, log_p: Array) -> Array:
        """What rounding leaves open of log p̂: once or twice to float64, to the dtype, and of the constant's d logs."""
        own = abs(log_p) if self.log else 2.0  # of p̂ itself: of exp, too
        return UNIT["float64"] * (abs(log_p) + 4 * abs(self.constant)) + UNIT[self.dtype] * own

    @property
    def normal(self) -> tuple[float, float]:
        """Logs between which numbers are normal, with room for errors."""
        return math.log(np.finfo(self.dtype).tiny) + 1, math.log(np.finfo(self.dtype).max) - 1


def _log_sum(answer: Answer, found: Sums, mercy: float) -> Partial:
    """The ℓ that a density means, less what is forgiven."""
    want, p, number, (low, high) = found.truth.log_sum, answer.p, np.finfo(answer.dtype), answer.normal
    log_p = want + answer.constant
    if not answer.log:  # where p̂ can be no normal number: is it as small, or as large, as it should be?
        right = np.where(log_p < low, (p >= 0) & (p < 4 * number.tiny), p > number.max / 30)
        right &= (log_p > math.log(number.smallest_subnormal) - 2) | (p == 0)
        right &= (log_p < high + 2) | (p == math.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.where((log_p >= low) & (log_p <= high), np.log(p), np.where(right, log_p, math.nan))
    slack = answer.rounding(log_p) + mercy * host(found.log_slack)
    return Partial(forgive(p - answer.constant, want, slack))


def _laplace(answer: Answer, found: Sums, mercy: float) -> Partial:
    """The L that a signed density means, less what is forgiven."""
    want, p, number, (low, high) = found.truth, answer.p, np.finfo(answer.dtype), answer.normal
    scale, size = want.log_plus + answer.constant, abs(want.signed)  # log M̂, |L| / M
    with np.errstate(all="ignore"):
        slack = size * answer.rounding(scale + np.log(np.where(size > 0, size, 1.0))) + mercy * host(found.signed_slack)
        if answer.log:  # NaN: negative
            ratio = np.where(np.isnan(p), np.minimum(want.signed, 0.0), np.exp(p - scale))
        else:
            ratio = np.sign(p) * np.exp(np.log(abs(p)) - scale)
            told = ((scale >= low) & (scale <= high)) | np.isnan(p)  # otherwise M̂ is no normal number, nor p̂
            ratio = np.where(told, ratio, want.signed)
            slack += np.exp(math.log(number.smallest_subnormal) - scale)
        ratio = forgive(ratio, want.signed, slack)
        return Partial(want.log_plus, sign=np.sign(ratio), log_magnitude=np.log(abs(ratio)) + want.log_plus)


def check_reduction(drawn: Drawn, target: Target) -> Found:
    """Check a single reduction; its points, whitened and rounded before, are exact."""
    if drawn.precision not in target.info.precisions:
        raise NotDeclared(f"has precisions {', '.join(target.info.precisions)}, not {drawn.precision}")
    centre = np.sort(drawn.train, axis=0)[(len(drawn.train) - 1) // 2].astype(float)
    u, v = ((a.astype(float) - centre) / drawn.bandwidth for a in (drawn.train, drawn.queries))
    case = Case(drawn.text, u, v, log_weights(drawn.weights, len(u)))
    problem = target.problem(
        case,
        Reduction[drawn.task],
        drawn.precision,
        same=drawn.query is None,
        dtype=drawn.train.dtype.name,
    )
    start = time.perf_counter()
    got = target.answer(problem, case)
    seconds = time.perf_counter() - start

    rows, points = given(v, target.device), given(u, target.device)
    log_w = torch.as_tensor(case.log_weights, device=target.device)
    found = sums(rows, points, log_w, precise=drawn.task == "MEAN")
    want = found.truth
    error = strict = errors(problem, got, want)
    if got.shift is not None:
        off = got.shift - want.shift
        size = np.sqrt((off**2).sum(1))
        kept = forgive(size, np.zeros(()), host(found.shift_slack)) / np.where(size > 0, size, 1.0)
        error = errors(problem, replace(got, shift=want.shift + kept[:, None] * off), want)
    return Found(error, strict, want.log_sum, seconds)


# --- the run --------------------------------------------------------------------------------------------------------

OUTCOMES = ("kept", "missed", "raised", "declined")


@dataclass
class Record:
    """What became of a problem."""

    index: int
    task: str
    precision: str
    text: str
    outcome: str = "kept"  # of OUTCOMES
    reason: str = ""
    error: float = 0.0  # the worst row, over its tolerance, what is forgiven taken off
    strict: float = 0.0  # nothing but the result's rounding taken off
    rows: int = 0  # beyond it
    seconds: float = 0.0  # the backend's
    oracle_seconds: float = 0.0  # the rest


def _refusal(error: Exception) -> tuple[str, str]:
    """What became of a problem without an answer, and why; declined is what a backend, or float64, is not made for."""
    if isinstance(error, (BackendUnavailable, NotDeclared)) and not isinstance(error, BackendFailed):
        return "declined", str(error).split("cannot do this: ")[-1]
    if isinstance(error, ValueError | SdkdeWarning) and "rounding to float64" in str(error):
        return "declined", TOO_FAR
    return "raised", f"{type(error).__name__}: {error}"


def run(drawn: Drawn, target: Target) -> Record:
    """Check a problem, whatever happens."""
    record, start = Record(drawn.index, drawn.task, drawn.precision, drawn.text), time.perf_counter()
    messages._told.clear()  # what warns once a process is heard every time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SdkdeWarning)
            found = check(drawn, target)
    except Exception as error:
        record.outcome, record.reason = _refusal(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        if record.outcome == "raised":
            record.reason += f" ({os.path.basename(last.filename)}:{last.lineno})"
    else:
        row = int(np.argmax(found.error))
        record.error, record.strict = float(found.error[row]), float(found.strict.max())
        record.rows = int((~(found.error <= 1)).sum())
        record.seconds, record.outcome = found.seconds, "missed" if record.rows else "kept"
        record.reason = f"{record.rows} of {found.error.size} rows, the worst {row}, log sum {found.log_sum[row]:.6g}"
    record.oracle_seconds = time.perf_counter() - start - record.seconds
    return record


def table(records: list[Record]) -> str:
    """By precision and task, with the worst problem of each."""
    lines = [f"{'precision':8}{'of':8}" + "".join(f"{c:>9}" for c in (*OUTCOMES, "forgiven", "worst")) + "  where"]
    for precision in PRECISIONS:
        for task in dict.fromkeys(TASKS):
            here = [r for r in records if (r.precision, r.task) == (precision, task)]
            if not here:
                continue
            forgiven = sum(r.outcome == "kept" and not r.strict <= 1 for r in here)
            counts = *(sum(r.outcome == o for r in here) for o in OUTCOMES), forgiven
            worst = max((r for r in here if r.outcome in ("kept", "missed")), key=lambda r: r.error, default=None)
            where = f"{worst.error:9.1e}  {worst.index}: {worst.text}" if worst else ""
            lines.append(f"{precision:8}{task:8}{''.join(f'{c:9}' for c in counts)}{where}")
    return "\n".join(lines)


def target_of(name: str, device: str) -> Target:
    found = registry.find(name)
    if found is None or not found.ok or found.info is None:
        raise SystemExit(f"no backend {name!r}" + (f": {found.reason}" if found else ""))
    backend = found.info.load(OPTIONS)
    support = backend.probe(device)
    if not support.ok:
        raise SystemExit(f"{name} on {device}: {support.reason}")
    return Target(found.info, backend, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precisions", help="default: those that the backend has")
    parser.add_argument("--dimensions", help="default: from 1 to 1024")
    parser.add_argument("--largest", type=int, help=f"n and m at most; default: {LARGEST}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no problem after that long")
    parser.add_argument("--replay", type=int, metavar="INDEX", help="that problem alone")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help='such as {"skip": true}')
    parser.add_argument("--json", metavar="PATH", help="write every record there")
    options = parser.parse_args()
    OPTIONS.update(options.options)
    target, kind = target_of(options.backend, options.device), options.device.partition(":")[0]
    precisions = tuple(options.precisions.split(",")) if options.precisions else target.info.precisions
    if not set(precisions) <= set(PRECISIONS):
        parser.error(f"--precisions is {options.precisions}; there are {','.join(PRECISIONS)}")
    largest = options.largest or LARGEST[kind]
    dimensions = tuple(map(int, options.dimensions.split(","))) if options.dimensions else DIMENSIONS
    again = f"--backend {options.backend} --device {options.device} --seed {options.seed} "
    again += f"--precisions {','.join(precisions)}"
    again += f" --dimensions {options.dimensions}" if options.dimensions else ""
    again += f" --options '{json.dumps(OPTIONS)}'" if OPTIONS else ""
    again += f" --largest {largest} --replay"
    warnings.filterwarnings("ignore", "the Laplace estimate is negative", RuntimeWarning)
    start, records = time.perf_counter(), []
    indices = range(options.problems) if options.replay is None else [options.replay]
    for index in indices:
        if time.perf_counter() - start > options.seconds:
            break
        record = run(draw(options.seed, index, precisions, kind, largest, dimensions), target)
        records.append(record)
        if record.outcome in ("missed", "raised") or options.replay is not None:
            size = f"{record.error:.3g} ({record.strict:.3g} with its rounding alone forgiven)"
            print(f"{record.outcome} {size}: {record.precision} {record.task}, {record.text}")
            print(f"    {record.reason}\n    {again} {index}", flush=True)
    seconds = time.perf_counter() - start
    ours, oracle = sum(r.seconds for r in records), sum(r.oracle_seconds for r in records)
    print(f"\n{options.backend} on {options.device}: {len(records)} of {len(indices)} problems, seed {options.seed},")
    print(f"{seconds:.0f} s, of which backend {ours:.0f} s, oracle {oracle:.0f} s; worst row over its tolerance\n")
    print(table(records))
    for outcome in ("declined", "raised"):
        for reason, count in Counter(r.reason for r in records if r.outcome == outcome).most_common():
            print(f"{outcome} {count}: {reason}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"backend": options.backend, "again": again, "records": [asdict(r) for r in records]}, file, indent=1
            )
    sys.exit(any(r.outcome in ("missed", "raised") for r in records))


if __name__ == "__main__":
    main()
