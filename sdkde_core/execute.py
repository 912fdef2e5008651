"""Running an estimator: whiten, choose, then pass by pass reduce and move."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from . import select
from .arrays import Data, convert, to_host
from .bandwidth import Bandwidth
from .protocol import Columns, Partial, Problem
from .spec import EstimatorSpec
from .split import far_share, radii, reduce_pass

__all__ = ["Outcome", "PassReport", "Plan", "plan", "run"]

_logger = logging.getLogger("sdkde")

#: Rows that the centre is taken from: enough for a median that outliers do not move, few enough to cost nothing.
CENTRE_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """An estimate ready to run: whitened points, the passes as problems, and the backend chosen for all of them."""

    spec: EstimatorSpec
    train: Any  # (n, d) whitened
    query: Any  # (m, d) whitened, or None: the training points
    log_weights: Any  # (n,)
    problems: tuple[Problem, ...]
    choice: select.Choice
    timed: bool = False  # report each pass, waiting for the device after it


@dataclass(frozen=True)
class PassReport:
    """What a pass was, and the time it took on the clock."""

    problem: Problem
    seconds: float
    exact_points: int  # taken off by the core and summed exactly


@dataclass(frozen=True)
class Outcome:
    """The last pass's result, and reports of the passes where they were timed."""

    result: Partial
    reports: tuple[PassReport, ...]


def plan(
    spec: EstimatorSpec,
    data: Data,
    bandwidth: Bandwidth,
    *,
    backend: str = "auto",
    device: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Whiten the data and choose the backend.

    Raises
    ------
    BackendUnavailable
        See :func:`sdkde_core.select.choose`.
    ValueError
        The bandwidth is so small that distances overflow.
    """
    with np.errstate(all="ignore"):
        centre = _centre(data.train)
        train = bandwidth.whiten(data.train, centre)
        query = None if data.query is None else bandwidth.whiten(data.query, centre)
        train_radii = radii(train)
        query_radii = train_radii if query is None else radii(query)
        extent = _extent(train_radii, query_radii)
    if extent > 1e149:  # squares must stay finite
        raise ValueError(f"bandwidth ({bandwidth}) is too small for the data: distances of {extent:.0e} bandwidths")
    log_weights, weighted = _log_weights(data)
    m = None if query is None else data.m
    problems = spec.problems(m, data.n, data.d, data.dtype, data.device, extent, weighted)

    def share(step: int, limit: float) -> float:
        rows = train_radii if spec.passes[step].rows == "train" else query_radii
        return far_share(rows, train_radii, limit)

    choice = select.choose(
        problems, backend=backend, device=device, data_device=data.device, options=options, share=share
    )

    def place(x: Any) -> Any:
        return None if x is None else convert(x, choice.info.arrays, choice.device)

    problems = tuple(replace(p, device=choice.device) for p in problems)
    return Plan(spec, place(train), place(query), place(log_weights), problems, choice)


def run(plan: Plan) -> Outcome:
    """Run the passes of ``plan`` in order."""
    columns, query = Columns(plan.train, plan.log_weights), plan.query
    backend, info = plan.choice.backend, plan.choice.info
    reports: list[PassReport] = []
    result: Partial | None = None
    for problem in plan.problems:
        start = time.perf_counter()
        if result is not None:  # the pass before moved the points
            query = columns.points if query is None else query
            moved = columns.points + 0.5 * result.shift  # half a mean-shift step, float64
            centre = _centre(moved)
            columns, query = replace(columns, points=moved - centre), query - centre
            problem = replace(problem, extent=_extent(radii(columns.points), radii(query)))
        result, exact_points = reduce_pass(backend, info, problem, columns, None if problem.same else query)
        if _logger.isEnabledFor(logging.DEBUG) or plan.timed:
            to_host(result.log_sum[:1])  # waits for the device
            reports.append(PassReport(problem, time.perf_counter() - start, exact_points))
            size = (problem.m, problem.n, problem.d)
            _logger.debug("%s %d × %d, d = %d: %.4f s", problem.reduction, *size, reports[-1].seconds)
    assert result is not None  # a spec has at least one pass
    return Outcome(result, tuple(reports))


def _centre(points: Any) -> Any:
    """A centre (d,) that a few outliers do not move: the lower median of evenly spaced rows, per column."""
    xp = array_namespace(points)
    rows = points[:: max(1, points.shape[0] // CENTRE_ROWS), :]
    return xp.sort(rows, axis=0)[(rows.shape[0] - 1) // 2, :]


def _extent(*radii: Any) -> float:
    return max(float(array_namespace(r).max(r)) for r in radii)


def _log_weights(data: Data) -> tuple[Any, bool]:
    """The log weights (n,), and whether they differ."""
    xp = array_namespace(data.train)
    given = data.log_weights
    if given is not None and bool(xp.any(given != given[0])):
        return given, True
    return xp.full((data.n,), -math.log(data.n), dtype=xp.float64, device=device_of(data.train)), False
