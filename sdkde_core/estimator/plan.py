"""Running an estimator: whiten, choose, then pass by pass reduce and move.

The points stay where they are, and their extent is the one number that is read back from a device before the result:
whether all of them are finite shows in it, and it bounds every pass.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from ..arrays import Data, convert, detached, to_host
from ..choice import select
from ..engine.outliers import far_share, radii, reduce_pass
from ..protocol import TOLERANCES, Columns, Partial, Problem, Reduction
from .bandwidth import Bandwidth
from .spec import EstimatorSpec

__all__ = [
    "Measured",
    "Outcome",
    "PassReport",
    "Plan",
    "columns_of_last_pass",
    "measure",
    "plan",
    "read_extent",
    "report",
    "rounded",
    "run",
]

_logger = logging.getLogger("sdkde")

#: Rows that the centre is taken from, up to twice as many: enough for a median that outliers do not move, few enough
#: to cost nothing.
CENTRE_ROWS = 256


@dataclass(frozen=True)
class Plan:
    """An estimate ready to run: whitened points, the passes as problems, and the backend chosen for all of them."""

    spec: EstimatorSpec
    train: Any  # (n, d) whitened
    query: Any  # (m, d) whitened, or None: the training points
    log_weights: Any  # (n,)
    centre: Any  # (d,) of the data, in their units; where they are
    problems: tuple[Problem, ...]
    choice: select.Choice
    extent: float  # of the data as they came, in bandwidths, rounded up
    timed: bool = False  # report each pass, waiting for the device after it
    weights: Any = None  # (n,), where problems require grad and weights


@dataclass(frozen=True)
class PassReport:
    """What a pass was, and the time it took on the clock."""

    problem: Problem
    seconds: float
    far_points: int  # taken off by the core and summed apart, by a slower formula


@dataclass(frozen=True)
class Outcome:
    """The last pass's result, and reports of the passes where they were timed."""

    result: Partial
    reports: tuple[PassReport, ...]


@dataclass(frozen=True)
class Measured:
    """Whitened points and what decides how to sum them; nothing of it has been read back from a device."""

    points: Any  # (n + m, d): the training points, then the query's, if any
    distances: Any  # (n + m,) from the centre
    largest: Any  # of the distances, ()
    log_weights: Any  # (n,)
    centre: Any  # (d,)


def measure(data: Data, bandwidth: Bandwidth) -> Measured:
    """Whiten the data and measure their extent."""
    xp, n = array_namespace(data.train), data.n
    with np.errstate(all="ignore"):
        centre = _centre(data.train)
        points = data.train if data.query is None else xp.concat([data.train, data.query])
        points = bandwidth.whiten(points, centre)  # together: half the kernels on a device
        distances = radii(points)
        largest, log_weights = xp.max(distances), data.log_weights
        if log_weights is None:
            log_weights = xp.full((n,), -math.log(n), dtype=xp.float64, device=device_of(data.train))
    return Measured(points, distances, largest, log_weights, centre)


def read_extent(largest: Any, distances: Any, check: Callable[[], None], bandwidth: Bandwidth) -> float:
    """Return the extent, rounded up, having waited for the device.

    Parameters
    ----------
    largest : () array
        Of the distances.
    distances : (k,) array
        From the centre, in bandwidths.
    check : callable
        Called where it is not finite; raises if that is to be refused.
    bandwidth : Bandwidth
        For the message.

    Raises
    ------
    ValueError
        The bandwidth is so small that distances overflow.
    """
    extent = float(largest)
    if not math.isfinite(extent):
        check()
    if math.isnan(extent):  # and the caller does not mind: the extent is that of the others
        xp = array_namespace(distances)
        extent = float(xp.max(xp.where(xp.isnan(distances), xp.zeros_like(distances), distances)))
    if extent > 1e149:  # squares must stay finite
        raise ValueError(f"bandwidth ({bandwidth}) is too small for the data: distances of {extent:.0e} bandwidths")
    return rounded(extent)


def rounded(extent: float) -> float:
    """Return the extent rounded up by at most a twelfth: what is decided from it then changes rarely with the data."""
    return 0.0 if extent == 0.0 else 2.0 ** (math.ceil(8.0 * math.log2(extent)) / 8.0)


def plan(
    spec: EstimatorSpec,
    data: Data,
    bandwidth: Bandwidth,
    *,
    backend: str = "auto",
    device: str | None = None,
    options: Mapping[str, Any] | None = None,
    explained: bool = False,
    grad: bool = False,
) -> Plan:
    """Whiten the data and choose the backend.

    ``explained``: with every candidate's reason and price. ``grad``: one whose results can be attached to autograd; the
    points of the plan are not, until :func:`sdkde_core.estimator.autograd.attach` has replaced them.

    Raises
    ------
    BackendUnavailable
        See :func:`sdkde_core.choice.select.choose`.
    ValueError
        The data are not finite, or the bandwidth is so small that distances overflow.
    """
    xp, n, data_device = array_namespace(data.train), data.n, data.device
    measured = measure(data, bandwidth)
    distances, log_weights = measured.distances, measured.log_weights
    train, query = measured.points[:n, :], None if data.query is None else measured.points[n:, :]
    train_radii, query_radii = distances[:n], distances if query is None else distances[n:]
    measured_extent = extent = read_extent(measured.largest, distances, data.check_finite, bandwidth)
    if any(step.moves for step in spec.passes):
        extent = _moved_extent(extent)
    m = None if query is None else data.m
    problems = spec.problems(m, n, data.d, data.dtype, data_device, extent, data.log_weights is not None, grad)

    def share(step: int, limit: float) -> float:
        rows = train_radii if spec.passes[step].rows == "train" else query_radii
        return far_share(rows, train_radii, limit)

    choice = select.choose(
        problems,
        backend=backend,
        device=device,
        data_device=data_device,
        options=options,
        share=share,
        explained=explained,
    )
    library, place = choice.info.arrays, choice.device
    if xp.__name__ != f"array_api_compat.{library}" or data_device != place:
        train, log_weights = convert(train, library, place), convert(log_weights, library, place)
        query = None if query is None else convert(query, library, place)
    problems = select.at(problems, place)
    return Plan(spec, train, query, log_weights, measured.centre, problems, choice, measured_extent)


def run(plan: Plan) -> Outcome:
    """Run the passes of ``plan`` in order."""
    columns, query = Columns(plan.train, plan.log_weights, weights=plan.weights), plan.query
    backend, info = plan.choice.backend, plan.choice.info
    reports: list[PassReport] = []
    result: Partial | None = None
    for problem in plan.problems:
        start = time.perf_counter()
        if result is not None:  # the pass before moved the points
            query = columns.points if query is None else query
            columns = _moved(columns, result)
        result, far_points = reduce_pass(backend, info, problem, columns, None if problem.same else query)
        if _logger.isEnabledFor(logging.DEBUG) or plan.timed:
            reports.append(report(problem, result, start, far_points))
    assert result is not None  # a spec has at least one pass
    return Outcome(result, tuple(reports))


def columns_of_last_pass(plan: Plan) -> Columns:
    """Run the passes of ``plan`` but the last, and return the columns that are left to it."""
    columns = Columns(plan.train, plan.log_weights)
    if len(plan.problems) == 1:
        return columns
    return _moved(columns, run(replace(plan, problems=plan.problems[:-1])).result)


def _moved(columns: Columns, first: Partial) -> Columns:
    """The columns after the pass that moves them: by half a mean-shift step, in float64."""
    return replace(columns, points=columns.points + 0.5 * first.shift)


def report(problem: Problem, result: Partial, start: float, far_points: int) -> PassReport:
    """Wait for the result of a pass that began at ``start``, and log the time."""
    to_host(detached(result.log_sum[:1]))  # waits for the device
    seconds, size = time.perf_counter() - start, (problem.m, problem.n, problem.d)
    _logger.debug("%s %d × %d, d = %d: %.4f s", problem.reduction, *size, seconds)
    return PassReport(problem, seconds, far_points)


def _centre(points: Any) -> Any:
    """A centre (d,), float64, that a few outliers do not move: the lower median of evenly spaced rows, per column."""
    xp = array_namespace(points)
    rows = points[:: max(1, points.shape[0] // CENTRE_ROWS), :]
    if is_torch_array(rows) and not xp.are_deterministic_algorithms_enabled():
        centre = xp.nanmedian(rows, dim=0).values  # one kernel for five; only its indices, unused, may vary
    else:
        centre = xp.sort(rows, axis=0)[(rows.shape[0] - 1) // 2, :]
    return xp.astype(centre, xp.float64, copy=False)


def _moved_extent(extent: float) -> float:
    """A bound on the extent once samples have moved halfway to means of samples, which lie among the samples.

    They do up to rounding and the tolerance of the shift; so nothing needs to be measured again.
    """
    return (1.0 + 1e-6) * extent + TOLERANCES["fast"][Reduction.MEAN].absolute
