"""What the grid asks of a process of its own, one for every backend and device: times, and errors."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import sdkde_core
from sdkde_core.arrays import to_host
from sdkde_core.fresh import run_python
from sdkde_core.protocol import Partial, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import errors

from ..subjects import leaves_out
from .cases import CALLS, SLOW, Array, Case, data

#: Rows that errors are taken over, the first among them, which may be thrown out.
ROWS = 12

#: Nats below a row's largest term at which terms are left out of the truth.
NOTHING = 60.0

#: Rows and columns of the call that compiles; at most, of one that compiles for a case ahead.
SMALL, AHEAD = 256, 20_000


@dataclass(frozen=True)
class Job:
    """A backend to measure."""

    case: Case
    backend: str
    device: str
    truth: reference.Sums | None  # of `some(m)` queries over the samples, or for sdkde of `some(n)` samples
    patient: bool = False  # take the errors of sdkde, which cost another first pass, however long that takes
    again: bool = False  # take the times alone, of a case that was the last one's


def some(count: int) -> Array:
    """The rows that errors are taken over."""
    return np.unique(np.linspace(0, count - 1, ROWS).astype(int))


def sums(rows: Array, points: Array, h: float) -> reference.Sums:
    """The reference's sums of a few rows, over the columns that add something."""
    rows, points = (x.astype(np.longdouble) / h for x in (rows, points))
    found = []
    for row in rows:
        exponents = -0.5 * ((points - row) ** 2).sum(axis=1)
        kept = points[exponents > exponents.max() - NOTHING]
        found.append(reference.sums(row[None], kept, np.full(len(kept), -math.log(len(points)))))
    whole = reference.Sums(*(np.concatenate([getattr(f, name) for f in found]) for name in reference.Sums._fields))
    return whole._replace(shift=h * whole.shift)  # in the units of the data


def truth(case: Case, x: Array, y: Array, h: float) -> reference.Sums:
    """What a :class:`Job` takes along."""
    return sums(x[some(case.n)], x, h) if case.method == "sdkde" else sums(y[some(case.m)], x, h)


def density_error(case: Case, log_p: Array, want: reference.Sums, h: float) -> float:
    """Worst error of log densities over the precision's tolerance; NaN is Laplace's negative density."""
    constant = -case.d * (math.log(h) + 0.5 * math.log(2 * math.pi))
    if case.method != "laplace":
        problem = Problem(Reduction.LOG_SUM, len(log_p), case.n, case.d, precision=case.precision)
        return float(errors(problem, Partial(log_p - constant), want).max())
    with np.errstate(over="ignore", divide="ignore"):
        sizes = np.exp(log_p - constant - want.log_plus)
        signed = np.where(np.isnan(log_p), np.minimum(want.signed, 0.0), sizes)
        got = Partial(want.log_plus, sign=np.sign(signed), log_magnitude=np.log(abs(signed)) + want.log_plus)
    problem = Problem(Reduction.LAPLACE, len(log_p), case.n, case.d, precision=case.precision)
    return float(errors(problem, got, want).max())


def shift_error(case: Case, shift: Array, want: reference.Sums, h: float) -> float:
    """Worst error of shifts, in bandwidths, over the precision's tolerance."""
    problem = Problem(Reduction.MEAN, len(shift), case.n, case.d, precision=case.precision)
    return float(errors(problem, Partial(want.log_sum, shift=shift), want._replace(shift=want.shift / h)).max())


def placed(z: Array, place: str) -> Any:
    """The data on the host, or as a tensor on the GPU."""
    if place == "host":
        return z
    import torch

    return torch.from_numpy(z).cuda()


def clocked(call: Any, *arguments: Any, **options: Any) -> tuple[float, Any]:
    """Seconds on the clock, the device's work included, and the result."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call(*arguments, **options)
    if torch is None:
        torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


#: The last case's data, for who is asked again; one that has failed is not.
_kept: dict[Case, Any] = {}


def measure_again(job: Job) -> Iterator[tuple[str, Any]]:
    """As :func:`measure`, of times alone, by which two backends are compared in turn."""
    train, query, density = _kept[job.case]
    yield "ready", None
    clocked(sdkde_core.estimate, train, query, **density)  # what other processes did to caches and clocks
    times: list[float] = []
    yield "first", 0.0
    while not times or (len(times) < CALLS and sum(times) < SLOW):
        times.append(clocked(sdkde_core.estimate, train, query, **density)[0])
    yield "done", {"times": times}


def measure(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield ("ready", None) once compiled, ("first", seconds) of a call, and ("done", record).

    Of data on a device a second call comes before those that count.
    """
    case = job.case
    _kept.clear()
    x, y, h = data(case)
    options: dict[str, Any] = {"precision": case.precision, "backend": job.backend, "bandwidth": h}
    if case.place == "host":
        options["device"] = job.device
    density = options | {"method": case.method, "log": True}
    train, query = placed(x, case.place), placed(y, case.place)
    sdkde_core.estimate(train[:SMALL], query[:SMALL], **density)
    if job.device == "cpu" and leaves_out(job.backend):  # what leaves pairs out is compiled by itself
        sdkde_core.estimate(train[:SMALL], query[:SMALL], backend_options={"skip": True}, **density)
    yield "ready", None
    first, log_p = clocked(sdkde_core.estimate, train, query, **density)
    yield "first", first
    times, passes = [first], None
    if first < (SLOW if job.device == "cpu" else 10 * SLOW):  # on a GPU that may have compiled
        times = []
        if case.place == "device":  # a first call may have compiled
            sdkde_core.estimate(train, query, **density)
        while not times or (len(times) < CALLS and sum(times) < SLOW):
            seconds, log_p = clocked(sdkde_core.estimate, train, query, **density)
            times.append(seconds)
        if times[-1] < SLOW:
            del density["log"]
            explained = sdkde_core.explain(train, query, measure=True, **density)
            passes = [line.measured_seconds for line in explained.passes]
    _kept[case] = train, query, dict(density, log=True)
    seconds = statistics.median(times)
    log_p = to_host(log_p).astype(float)[some(case.m)]
    error = None
    if case.method != "sdkde":
        error = density_error(case, log_p, job.truth, h)
        passes = passes or [seconds]
    elif job.patient or seconds < 2 * SLOW:
        wide = placed(x.astype(float), case.place)  # what debias returns is not rounded then
        took, moved = clocked(sdkde_core.debias, wide, **options)
        moved = to_host(moved)
        passes = passes or [took, max(seconds - took, 0.0)]
        those = some(case.n)
        error = shift_error(case, 2 * (moved[those] - x[those].astype(float)) / h, job.truth, h)
        error = max(error, density_error(case, log_p, sums(y[some(case.m)], moved, h), h))
    yield "done", {"seconds": seconds, "times": times, "pass_seconds": passes, "error": error}


def compile_ahead(case: Case, backend: str, device: str) -> None:
    """Make a call whose kernels are then in the compiler's cache; what fails, fails again when it is measured.

    Of few points: kernels hardly depend on how many there are, and some backends take minutes for odd data.
    """
    case = replace(case, n=min(case.n, AHEAD), m=min(case.m, AHEAD))
    with contextlib.suppress(Exception):
        x, y, h = data(case)
        options = {"device": device} if case.place == "host" else {}
        train, query = placed(x, case.place), placed(y, case.place)
        options |= {"method": case.method, "precision": case.precision, "backend": backend}
        sdkde_core.estimate(train, query, bandwidth=h, **options)


def serve(connection: Any) -> None:
    """Answer jobs until there are no more; what fails is told."""
    warnings.filterwarnings("ignore", "the Laplace estimate is negative", RuntimeWarning)
    while (job := connection.recv()) is not None:
        try:
            for message in (measure_again if job.again else measure)(job):
                connection.send(message)
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))


STARTUP = """
import json, sys, time
import numpy, sdkde_core
x = numpy.random.default_rng(0).normal(size=(64, 2))
def call():
    start = time.perf_counter()
    sdkde_core.estimate(
        x, method="kde", bandwidth="silverman", precision="fast", backend=sys.argv[1], device=sys.argv[2]
    )
    return time.perf_counter() - start
print(json.dumps([call() for _ in range(6)]))
"""


def startup(backend: str, device: str, runs: int = 5, most: float = 8.0) -> float:
    """Seconds that a first tiny estimate takes more than later ones, in a fresh process with NumPy and the core.

    The least of some processes after the first, for which compilers have kept what they made: ``runs``, or fewer once
    they have taken ``most`` seconds.
    """
    found: list[float] = []
    while len(found) < 2 or (len(found) <= runs and sum(found) < most):
        done = run_python(STARTUP, backend, device, capture_output=True, timeout=300, check=True)
        first, *later = json.loads(done.stdout.splitlines()[-1])
        found.append(first - statistics.median(later))
    return min(found[1:])
