"""Running an estimator: whiten, choose, then pass by pass reduce, split, merge and move."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from . import select
from .arrays import Data, convert, to_host
from .bandwidth import Bandwidth
from .exact import reduce_exact
from .merge import merge
from .protocol import Backend, BackendInfo, Partial, Problem
from .spec import EstimatorSpec

__all__ = ["Outcome", "PassReport", "Plan", "plan", "reduce_pass", "run"]

_log = logging.getLogger("sdkde")

#: Rows that the centre is taken from: enough for a median that outliers do not move, few enough to cost nothing.
CENTRE_ROWS = 2048


@dataclass(frozen=True)
class Plan:
    """An estimate ready to run: whitened points, the passes as problems, and the backend chosen for all of them."""

    spec: EstimatorSpec
    train: Any  # (n, d) whitened
    query: Any  # (m, d) whitened, or None: the training points
    log_weights: Any  # (n,)
    problems: tuple[Problem, ...]
    choice: select.Choice


@dataclass(frozen=True)
class PassReport:
    """What a pass was, and the time it took on the clock."""

    problem: Problem
    seconds: float
    exact_points: int  # taken off by the core and summed exactly


@dataclass(frozen=True)
class Outcome:
    """The last pass's result, the shift that moved the samples (None without), and a report of every pass."""

    result: Partial
    shift: Any
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
    centre = _centre(data.train)
    with np.errstate(over="ignore", invalid="ignore"):
        train = bandwidth.whiten(data.train, centre)
        query = None if data.query is None else bandwidth.whiten(data.query, centre)
        radii = [_radii(x) for x in (train, query) if x is not None]
    extent = _extent(*radii)
    if extent > 1e150:
        raise ValueError(f"bandwidth ({bandwidth}) is too small for the data: distances of {extent:.0e} bandwidths")
    log_weights, weighted = _log_weights(data)
    problems = spec.problems(
        None if query is None else data.m, data.n, data.d, data.dtype, data.device, extent, weighted
    )

    def share(limit: float) -> float:
        near = [float(array_namespace(r).mean(array_namespace(r).astype(r <= limit, r.dtype))) for r in radii]
        return 1.0 - near[0] * near[-1]

    choice = select.choose(
        problems, backend=backend, device=device, data_device=data.device, options=options, share=share
    )

    def place(x: Any) -> Any:
        return None if x is None else convert(x, choice.info.arrays, choice.device)

    problems = tuple(replace(p, device=choice.device) for p in problems)
    return Plan(spec, place(train), place(query), place(log_weights), problems, choice)


def run(plan: Plan) -> Outcome:
    """Run the passes of ``plan`` in order."""
    train, query = plan.train, plan.query
    shift, reports = None, []
    backend, info = plan.choice.backend, plan.choice.info
    result: Partial | None = None
    for step, problem in zip(plan.spec.passes, plan.problems):
        start = time.perf_counter()
        rows = None if problem.same else query
        if shift is not None:  # about the new centre
            problem = replace(problem, extent=_extent(_radii(train), _radii(query)))
        result, taken_off = reduce_pass(backend, info, problem, train, plan.log_weights, rows)
        if step.moves:
            shift = result.shift
            query = train if query is None else query
            train = train + 0.5 * shift  # half a mean-shift step, float64
            centre = _centre(train)
            train, query = train - centre, query - centre
        reports.append(PassReport(problem, time.perf_counter() - start, taken_off))
        _log.debug(
            "%s %d × %d, d = %d: %.4f s", problem.reduction, problem.m, problem.n, problem.d, reports[-1].seconds
        )
    assert result is not None  # a spec has at least one pass
    return Outcome(result, shift, tuple(reports))


def reduce_pass(
    backend: Backend,
    info: BackendInfo,
    problem: Problem,
    points: Any,
    log_weights: Any,
    queries: Any = None,
    values: Any = None,
) -> tuple[Partial, int]:
    """Run one reduction through a backend, within the bounds of its protocol.

    Points of weight zero are dropped as columns and kept as rows. Where only few points lie beyond the extent at
    which the backend's formula holds, they are summed by :func:`sdkde_core.exact.reduce_exact` and merged.

    Parameters
    ----------
    backend, info : Backend, BackendInfo
    problem : Problem
    points : (n, d) float64 array
        Whitened, of the kind and on the device that the backend takes.
    log_weights : (n,) float64 array
    queries : (m, d) float64 array, optional
        None: the points.
    values : (n, c) float64 array, optional

    Returns
    -------
    Partial
    int
        How many points (as columns or as rows) were summed exactly.
    """
    xp = array_namespace(points)
    rows = points if queries is None else queries
    carries = log_weights > -math.inf
    near_columns, near_rows = xp.ones_like(carries), xp.ones_like(rows[:, 0], dtype=xp.bool)
    limit = info.extent_limit(problem)
    if problem.extent > limit:
        near_columns, near_rows = _radii(points) <= limit, _radii(rows) <= limit
        within = float(xp.sum(xp.astype(near_columns, points.dtype))) * float(
            xp.sum(xp.astype(near_rows, points.dtype))
        )
        if 1.0 - within / max(problem.pairs, 1) > select.SPLIT_SHARE:
            near_columns, near_rows = xp.ones_like(carries), xp.ones_like(near_rows)
        else:
            problem = replace(problem, extent=limit)
    if bool(xp.all(carries & near_columns)) and bool(xp.all(near_rows)):
        state = backend.prepare(problem, points, log_weights, values)
        return backend.reduce(problem, queries, state), 0
    return _reduce_split(
        backend,
        problem,
        points,
        log_weights,
        queries,
        values,
        to_host(carries),
        to_host(near_columns),
        to_host(near_rows),
    )


def _reduce_split(
    backend: Backend,
    problem: Problem,
    points: Any,
    log_weights: Any,
    queries: Any,
    values: Any,
    carries: np.ndarray,
    near_columns: np.ndarray,
    near_rows: np.ndarray,
) -> tuple[Partial, int]:
    """Reduce with columns left out and points summed exactly.

    Row i belongs to column i with ``same`` and with ``exclude_self``. The rows whose own column is among the near ones
    come first, in the columns' order, so that the backend's rows and columns still correspond.
    """
    same, excluding = queries is None, "exclude_self" in problem.requires
    rows = points if same else queries
    n, m = len(carries), len(near_rows)
    columns = np.flatnonzero(carries & near_columns)
    far_columns = np.flatnonzero(carries & ~near_columns)
    aligned = np.empty(0, dtype=np.int64)
    if same or excluding:
        k = min(n, m)
        aligned = np.flatnonzero((carries & near_columns)[:k] & near_rows[:k])
        columns = np.concatenate([aligned, np.setdiff1d(columns, aligned)])
    others = np.setdiff1d(np.flatnonzero(near_rows), aligned)
    far_rows = np.flatnonzero(~near_rows)

    pick = _picker(points)
    parts: list[tuple[np.ndarray, Partial]] = []
    if columns.size:
        state = backend.prepare(
            replace(problem, n=columns.size), pick(points, columns), pick(log_weights, columns), pick(values, columns)
        )
        if aligned.size:
            whole = same and aligned.size == columns.size
            sub = replace(problem, m=aligned.size, n=columns.size, same=whole)
            parts.append((aligned, backend.reduce(sub, None if whole else pick(rows, aligned), state)))
        if others.size:  # none of these has its own column here, so there is none to exclude
            sub = replace(
                problem, m=others.size, n=columns.size, same=False, requires=problem.requires - {"exclude_self"}
            )
            parts.append((others, backend.reduce(sub, pick(rows, others), state)))

    def exactly(which: np.ndarray, over: np.ndarray) -> Partial:
        own = None
        if excluding:
            position = np.full(max(n, m), -1)
            position[over] = np.arange(over.size)
            own = pick.index(position[which])
        arrays = (pick(points, over), pick(log_weights, over), pick(values, over))
        return reduce_exact(problem, pick(rows, which), *arrays, own_column=own)

    if far_rows.size and columns.size:
        parts.append((far_rows, exactly(far_rows, columns)))
    order = np.concatenate([which for which, _ in parts]) if parts else np.empty(0, dtype=np.int64)
    result = _concatenate([part for _, part in parts], pick.index(np.argsort(order))) if parts else None
    if far_columns.size:
        beyond = exactly(np.arange(m), far_columns)
        result = beyond if result is None else merge([result, beyond])
    assert result is not None  # some point has positive weight, so there is a column
    return result, int(far_columns.size + (0 if same else far_rows.size))


class _picker:
    """Rows of an array by index, in its own library."""

    def __init__(self, like: Any) -> None:
        self.xp, self.device = array_namespace(like), device_of(like)

    def index(self, which: np.ndarray) -> Any:
        return self.xp.asarray(which, device=self.device)

    def __call__(self, x: Any, which: np.ndarray) -> Any:
        return None if x is None else self.xp.take(x, self.index(which), axis=0)


def _concatenate(parts: list[Partial], order: Any) -> Partial:
    xp = array_namespace(parts[0].log_sum)

    def join(field: str) -> Any:
        arrays = [getattr(p, field) for p in parts]
        return None if arrays[0] is None else xp.take(xp.concat(arrays, axis=0), order, axis=0)

    return Partial(*(join(f.name) for f in fields(Partial)))


def _centre(points: Any) -> Any:
    """A centre (d,) that a few outliers do not move: the lower median of evenly spaced rows, per column."""
    xp = array_namespace(points)
    rows = points[:: max(1, points.shape[0] // CENTRE_ROWS), :]
    return xp.sort(rows, axis=0)[(rows.shape[0] - 1) // 2, :]


def _radii(points: Any) -> Any:
    """Distance of every point from the origin, (n,)."""
    xp = array_namespace(points)
    return xp.sqrt(xp.vecdot(points, points))


def _extent(*radii: Any) -> float:
    return max(float(array_namespace(r).max(r)) for r in radii)


def _log_weights(data: Data) -> tuple[Any, bool]:
    """The log weights (n,), and whether they differ."""
    xp = array_namespace(data.train)
    given = data.log_weights
    if given is not None and bool(xp.any(given != given[0])):
        return given, True
    return xp.full((data.n,), -math.log(data.n), dtype=xp.float64, device=device_of(data.train)), False
