"""Measure backends on this machine, so that ``backend="auto"`` corrects the cost model's times by what was measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from sdkde_core.arrays import convert, to_host
from sdkde_core.choice.calibration import ignored
from sdkde_core.estimator.fitted import run
from sdkde_core.estimator.plan import Plan, plan
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.plugin import run_python
from sdkde_core.protocol import PRECISIONS, BackendInfo, BackendUnavailable, Reduction

__all__ = ["DIMENSIONS", "Calibrated", "calibrate"]

#: Dimensions that are measured; the core interpolates between them.
DIMENSIONS = (1, 2, 4, 16, 64, 256)

#: A pass is made larger until it takes TARGET seconds or has LARGEST points, so that overheads hardly count.
TARGET, LARGEST = {"cpu": 0.05, "cuda": 0.003}, {"cpu": 1 << 15, "cuda": 1 << 17}

#: Timings of a pass, after one that is not counted; points of the smallest pass, whose time is all overhead.
TIMES, SMALLEST = 5, 64

#: Seconds after which a fresh process is stopped.
PATIENCE = 300.0

_METHODS = {
    Reduction.LOG_SUM: ("kde", Goal.DENSITY),
    Reduction.MEAN: ("kde", Goal.GRADIENT),
    Reduction.LAPLACE: ("laplace", Goal.DENSITY),
}


class Calibrated(NamedTuple):
    """What was measured of a backend on a device.

    Parameters
    ----------
    backend, device : str
    values : dict of str to float
        As :meth:`sdkde_core.choice.calibration.Calibration.of` reads them; empty if nothing could be measured.
    declined : str
        Why nothing could be measured.
    """

    backend: str
    device: str
    values: dict[str, float]
    declined: str = ""


def calibrate(info: BackendInfo, device: str, progress: Callable[[str], None] = lambda what: None) -> Calibrated:
    """Measure a backend's passes on normal data under Silverman's bandwidth.

    The factor of each reduction, precision and dimension is the time of a large pass over its predicted time. The
    overhead is the time of a tiny pass. The start-up is that of the second of two fresh processes, which finds the
    compilers' caches filled.

    Parameters
    ----------
    info : BackendInfo
    device : str
        ``"cpu"`` or ``"cuda:0"``.
    progress : callable
        ``progress(what)`` is called before each measurement.
    """
    cases = [
        (reduction, precision) for reduction in Reduction for precision in PRECISIONS if precision in info.precisions
    ]
    values: dict[str, float] = {}
    try:
        tiny = [_seconds(_planned(info, device, *case, SMALLEST, 1)) for case in cases]
    except BackendUnavailable as error:
        return Calibrated(info.name, device, {}, str(error))
    values["overhead"] = overhead = statistics.median(tiny)
    for reduction, precision in cases:
        for d in DIMENSIONS:
            progress(f"{info.name} on {device}: {reduction} {precision}, d = {d}")
            try:
                took, predicted = _large(info, device, reduction, precision, d)
            except BackendUnavailable:  # the backend does not take this dimension
                continue
            if predicted:
                values[f"{reduction} {precision} {d}"] = max(took - overhead, 0.1 * took) / predicted
    progress(f"{info.name} on {device}: start-up")
    values["startup"] = _startup(info.name, device)
    return Calibrated(info.name, device, values)


def _large(info: BackendInfo, device: str, reduction: Reduction, precision: str, d: int) -> tuple[float, float]:
    """Return the measured and the predicted seconds of a pass that is large enough."""
    kind = device.partition(":")[0]
    for n in _sizes(LARGEST[kind]):
        ready = _planned(info, device, reduction, precision, n, d)
        if _seconds(ready, 1) >= TARGET[kind]:
            break
    (candidate,) = (c for c in ready.choice.candidates if c.chosen)
    return _seconds(ready), sum(candidate.pass_seconds)


def _sizes(largest: int) -> Iterator[int]:
    n = 1024
    while n <= largest:
        yield n
        n *= 2


def _planned(info: BackendInfo, device: str, reduction: Reduction, precision: str, n: int, d: int) -> Plan:
    """Plan a pass over n points for n queries, its predicted times uncorrected, its data on the backend's device."""
    x, y = np.random.default_rng(n + d).normal(size=(2, n, d))
    if device != "cpu":
        x, y = (convert(z, info.arrays, device) for z in (x, y))
    method, goal = _METHODS[reduction]
    how = {"precision": precision, "backend": info.name, "device": device}
    request = Request(goal, method, "silverman", **how)  # type: ignore[arg-type]
    with ignored():
        return plan(request, x, y, explained=True)


def _seconds(ready: Plan, times: int = TIMES) -> float:
    """Return the median time of a plan's pass, until its result is on the host."""
    took = []
    for _ in range(1 + times):
        start = time.perf_counter()
        to_host(run(ready).log_sum[:1])
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def _startup(backend: str, device: str) -> float:
    """Return the seconds that the first estimate takes in a fresh process."""
    code = (
        "import json, sys, time, numpy, sdkde_core\n"
        "x = numpy.random.default_rng(0).normal(size=(64, 2))\n"
        "start = time.perf_counter()\n"
        "where = {'backend': sys.argv[1], 'device': sys.argv[2]}\n"
        "sdkde_core.estimate(x, method='kde', bandwidth='silverman', **where)\n"
        "print(json.dumps(time.perf_counter() - start))\n"
    )
    took = 0.0
    for _ in range(2):
        done = run_python(code, backend, device, capture_output=True, timeout=PATIENCE, check=True)
        took = float(json.loads(done.stdout.splitlines()[-1]))
    return took
