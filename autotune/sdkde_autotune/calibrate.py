"""Measuring backends on this machine against the cost model, so that ``auto`` prices them as they are here."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from sdkde_core.arrays import convert, to_host
from sdkde_core.choice.calibration import ignored
from sdkde_core.estimator.fitted import run
from sdkde_core.estimator.plan import Plan, plan
from sdkde_core.estimator.request import Request
from sdkde_core.estimator.spec import Goal
from sdkde_core.protocol import PRECISIONS, BackendInfo, BackendUnavailable, Reduction

__all__ = ["DIMENSIONS", "Calibrated", "calibrate"]

#: Dimensions that are measured; between them the core interpolates.
DIMENSIONS = (1, 2, 4, 16, 64, 256)

#: A pass is made larger until it takes so many seconds, or has so many points: enough for the rates to show.
TARGET, LARGEST = {"cpu": 0.05, "cuda": 0.003}, {"cpu": 1 << 15, "cuda": 1 << 17}

#: Timings of a pass, after one that is not counted; points of the smallest, which shows what a pass costs besides.
TIMES, SMALLEST = 5, 64

#: Seconds after which a fresh process is given up.
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
        As :meth:`sdkde_core.choice.calibration.Calibration.of` reads them; empty: nothing could be measured.
    declined : str
        Then why.
    """

    backend: str
    device: str
    values: dict[str, float]
    declined: str = ""


def calibrate(info: BackendInfo, device: str, progress: Callable[[str], None] = lambda what: None) -> Calibrated:
    """Measure a backend's passes on normal data under Silverman's bandwidth.

    A factor for every reduction, precision and dimension: the time of a large pass over what the model predicts for it.
    What a tiny pass takes is the overhead. The start-up is that of a fresh process, the second one, for which compilers
    have kept what they made.

    Parameters
    ----------
    info : BackendInfo
    device : str
        ``"cpu"`` or ``"cuda:0"``.
    progress : callable
        Told what comes next.
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
            except BackendUnavailable:  # not this dimension
                continue
            if predicted:
                values[f"{reduction} {precision} {d}"] = max(took - overhead, 0.1 * took) / predicted
    progress(f"{info.name} on {device}: start-up")
    values["startup"] = _startup(info.name, device)
    return Calibrated(info.name, device, values)


def _large(info: BackendInfo, device: str, reduction: Reduction, precision: str, d: int) -> tuple[float, float]:
    """Measured and predicted seconds of a pass that is large enough."""
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
    """A pass over n points for n others, priced by the model alone; the data are where the backend wants them."""
    x, y = np.random.default_rng(n + d).normal(size=(2, n, d))
    if device != "cpu":
        x, y = (convert(z, info.arrays, device) for z in (x, y))
    request = Request.of(
        *_METHODS[reduction], precision, info.deterministic, bandwidth="silverman", backend=info.name, device=device
    )
    with ignored():
        return plan(request, x, y, explained=True)


def _seconds(ready: Plan, times: int = TIMES) -> float:
    """Median time of a plan's pass, to the result on the host."""
    took = []
    for _ in range(1 + times):
        start = time.perf_counter()
        to_host(run(ready).log_sum[:1])
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def _startup(backend: str, device: str) -> float:
    """Seconds of the first estimate in a fresh process."""
    code = (
        "import json, sys, time, numpy, sdkde_core\n"
        "x = numpy.random.default_rng(0).normal(size=(64, 2))\n"
        "start = time.perf_counter()\n"
        "sdkde_core.estimate(x, method='kde', backend=sys.argv[1], device=sys.argv[2], deterministic=False)\n"
        "print(json.dumps(time.perf_counter() - start))\n"
    )
    took = 0.0
    for _ in range(2):
        command = [sys.executable, "-c", code, backend, device]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        took = float(json.loads(done.stdout.splitlines()[-1]))
    return took
