"""One reduction through a backend, within the bounds of its protocol: what it must not see, and what it cannot hold.

Columns of weight zero are dropped (and kept as rows). The few points beyond the extent at which the backend's formula
holds are summed by direct differences and merged: one outlier must not slow the rest. Where the device's memory does
not suffice, the query rows are cut.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from .arrays import to_host
from .exact import reduce_exact
from .merge import concatenate, each, merge
from .protocol import Backend, BackendInfo, Columns, DeviceOutOfMemory, Partial, Problem, Reduction

__all__ = ["SPLIT_SHARE", "radii", "reduce_pass", "within_limit"]

#: Largest share of the pairs that the exact path may take over from a backend that also takes the whole: it costs some
#: thirty times as much per pair.
SPLIT_SHARE = 0.01


def within_limit(info: BackendInfo, problem: Problem, far_share: float) -> Problem:
    """Return the problem as the backend will see it: its extent cut to the limit where the core splits points off.

    Parameters
    ----------
    info : BackendInfo
    problem : Problem
    far_share : float
        Share of the pairs with a point beyond ``info.extent_limit(problem)``.
    """
    limit = info.extent_limit(problem)
    if problem.extent <= limit:
        return problem
    if far_share <= SPLIT_SHARE or not info.supports(problem).ok:
        return replace(problem, extent=limit)
    return problem


def radii(points: Any) -> Any:
    """Distance of every point from the origin, (n,)."""
    if isinstance(points, np.ndarray):
        return np.sqrt(np.vecdot(points, points))  # without temporaries of the points' size
    return array_namespace(points).linalg.vector_norm(points, axis=-1)  # one kernel


def far_share(row_radii: Any, column_radii: Any, limit: float) -> float:
    """Share of the pairs in which either point lies beyond ``limit``."""
    xp = array_namespace(row_radii)
    near = [float(xp.mean(xp.astype(r <= limit, r.dtype))) for r in (row_radii, column_radii)]
    return 1.0 - near[0] * near[1]


def reduce_pass(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any = None
) -> tuple[Partial, int]:
    """Run one reduction through a backend.

    Parameters
    ----------
    backend, info : Backend, BackendInfo
    problem : Problem
    columns : Columns
        As :class:`Columns`, but log weights may be −inf.
    queries : (m, d) float64 array, optional
        None: the points.

    Returns
    -------
    Partial
    int
        How many points (as columns or as rows) were summed exactly.
    """
    with np.errstate(all="ignore"):  # sums of exponentials underflow by design, whatever the caller's error state
        return _reduce_pass(backend, info, problem, columns, queries)


def _reduce_pass(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any
) -> tuple[Partial, int]:
    rows = columns.points if queries is None else queries
    carries = near_columns = near_rows = None  # None: all
    if "weights" in problem.requires:
        carries = _unless_all(columns.log_weights > -math.inf)
    limit = info.extent_limit(problem)
    if problem.extent > limit:
        row_radii, column_radii = radii(rows), radii(columns.points)
        cut = within_limit(info, problem, far_share(row_radii, column_radii, limit))
        if cut is not problem:
            problem = cut
            near_columns, near_rows = _unless_all(column_radii <= limit), _unless_all(row_radii <= limit)
    if carries is None and near_columns is None and near_rows is None:
        state = backend.prepare(problem, columns)
        return _reduce(backend, problem, columns, queries, state, 0), 0
    everything = (np.ones(x.shape[0], dtype=bool) for x in (columns.points, columns.points, rows))
    masks = [e if m is None else m for e, m in zip(everything, (carries, near_columns, near_rows))]
    return _reduce_parts(backend, problem, columns, queries, *masks)


def _unless_all(mask: Any) -> np.ndarray | None:
    """The mask on the host; None where it leaves nothing out."""
    xp = array_namespace(mask)
    return None if bool(xp.all(mask)) else to_host(mask)


def _reduce_parts(
    backend: Backend,
    problem: Problem,
    columns: Columns,
    queries: Any,
    carries: np.ndarray,
    near_columns: np.ndarray,
    near_rows: np.ndarray,
) -> tuple[Partial, int]:
    """Reduce with columns left out and points summed exactly.

    With ``same`` and with ``exclude_self``, row i belongs to column i. Rows whose own column is among the near ones
    come first, in the columns' order, so that the backend's rows and columns still correspond; the others have none.
    """
    same, excluding = queries is None, "exclude_self" in problem.requires
    rows = columns.points if same else queries
    m = rows.shape[0]
    inside, far = np.flatnonzero(carries & near_columns), np.flatnonzero(carries & ~near_columns)
    aligned = np.empty(0, dtype=np.int64)
    if same or excluding:
        k = min(len(carries), m)
        aligned = np.flatnonzero((carries & near_columns)[:k] & near_rows[:k])
        inside = np.concatenate([aligned, np.setdiff1d(inside, aligned)])
    others = np.setdiff1d(np.flatnonzero(near_rows), aligned)
    near, beyond = _take(columns, inside), _take(columns, far)
    whole = same and aligned.size == inside.size

    blocks: list[np.ndarray] = []
    parts: list[Partial] = []
    if inside.size:
        problem = replace(problem, n=inside.size)
        state = backend.prepare(problem, near)
        for block, itself, offset in ((aligned, whole, 0), (others, False, inside.size)):
            if block.size or (block is others and not parts):  # at least one, for the fields of an empty result
                sub = replace(problem, m=block.size, same=itself)
                blocks.append(block)
                parts.append(_reduce(backend, sub, near, None if itself else _rows(rows, block), state, offset))
        far_rows = np.flatnonzero(~near_rows)
        if far_rows.size:
            blocks.append(far_rows)
            parts.append(_exactly(problem, rows, far_rows, near, inside, excluding))
    result = None
    if parts:
        back = _index(rows, np.argsort(np.concatenate(blocks)))
        result = each(concatenate(parts), lambda x: array_namespace(x).take(x, back, axis=0))
    if far.size:
        exact = _exactly(problem, rows, np.arange(m), beyond, far, excluding)
        result = exact if result is None else merge([result, exact])
    assert result is not None  # some point has positive weight, so there is a column
    return result, int(far.size + (0 if same else (~near_rows).sum()))


def _exactly(
    problem: Problem, rows: Any, which: np.ndarray, columns: Columns, over: np.ndarray, excluding: bool
) -> Partial:
    """Sum the rows ``which`` over ``columns``, whose indices among all columns are ``over``."""
    own = None
    if excluding:
        position = np.full(max(int(over.max(initial=-1)), int(which.max(initial=-1))) + 1, -1)
        position[over] = np.arange(over.size)
        own = _index(rows, position[which])
    return reduce_exact(problem, _rows(rows, which), columns, own)


def _reduce(backend: Backend, problem: Problem, columns: Columns, queries: Any, state: Any, own_offset: int) -> Partial:
    """Reduce, with half the rows at a time where the device's memory does not suffice."""
    try:
        return _checked(problem, backend.reduce(problem, queries, state, own_offset))
    except DeviceOutOfMemory:
        if problem.m < 2:
            raise
    rows = columns.points if queries is None else queries
    half = problem.m // 2
    parts = []
    for start, stop in ((0, half), (half, problem.m)):
        sub = replace(problem, m=stop - start, same=False)
        parts.append(_reduce(backend, sub, columns, rows[start:stop, :], state, own_offset + start))
    return concatenate(parts)


def _checked(problem: Problem, partial: Partial) -> Partial:
    """Refuse an answer that does not have the fields and shapes of the question."""
    per_row = (problem.m, len(problem.scales)) if problem.scales else (problem.m,)
    mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
    expected = {
        "log_sum": per_row,
        "shift": (*per_row, problem.d) if mean else None,
        "sign": per_row if laplace else None,
        "log_magnitude": per_row if laplace else None,
        "values": (*per_row, problem.n_values) if problem.n_values else None,
    }
    for name, shape in expected.items():
        x = getattr(partial, name)
        found = None if x is None else tuple(x.shape)
        if found != shape:
            raise RuntimeError(f"the backend's {name} for {problem.reduction} has shape {found}, not {shape}")
    return partial


def _index(like: Any, which: np.ndarray) -> Any:
    return array_namespace(like).asarray(which, device=device_of(like))


def _rows(x: Any, which: np.ndarray) -> Any:
    return None if x is None else array_namespace(x).take(x, _index(x, which), axis=0)


def _take(columns: Columns, which: np.ndarray) -> Columns:
    return Columns(*(_rows(x, which) for x in (columns.points, columns.log_weights, columns.values)))
