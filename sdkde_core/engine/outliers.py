"""One reduction through a backend, within the bounds of its protocol: what it must not see, and what it cannot hold.

Columns of weight zero are dropped (and kept as rows). Points beyond the extent at which the backend's fast formula
holds are taken off, as a few outliers must not slow the rest: the backend sums them apart by its slower formula, or the
core by direct differences where it has none. Where the device's memory does not suffice, the query rows are cut.

Of problems that require ``"grad"`` nothing is dropped or taken off: a backend with that feature holds at any extent.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from ..arrays import to_host
from ..protocol import Backend, BackendInfo, Columns, DeviceOutOfMemory, Partial, Problem, Reduction
from .exact import Exact
from .merge import concatenate, each, merge

__all__ = [
    "SPLIT_SHARE",
    "Far",
    "count",
    "far_share",
    "look",
    "marked_last",
    "pair_share",
    "radii",
    "read_back",
    "reduce_pass",
    "reduce_rows",
    "take_columns",
    "take_rows",
    "undo",
    "vanish",
    "within_limit",
]

#: Largest share of the pairs that is taken off a backend that also takes the whole. Those pairs cost the same either
#: way; what the others save must pay for packing the columns twice and for sorting rows and columns.
SPLIT_SHARE = 0.5

#: Nats below a row's largest term at which others add nothing: exp(−746) is 0 in float64, however many terms there are
#: and whatever distance they are multiplied by.
NOTHING = 2000.0


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
    if problem.extent <= limit or "grad" in problem.requires:
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
    far_rows, far_columns = read_back(count(row_radii > limit), count(column_radii > limit))
    return pair_share(far_rows, row_radii.shape[0], far_columns, column_radii.shape[0])


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
        How many points were taken off: columns and rows, what is both counted once.
    """
    with np.errstate(all="ignore"):  # sums of exponentials underflow by design, whatever the caller's error state
        partial, far_columns, far_rows = _reduce_pass(backend, info, problem, columns, queries)
    return partial, max(far_columns, far_rows) if queries is None else far_columns + far_rows


def _reduce_pass(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any
) -> tuple[Partial, int, int]:
    """Drop the columns of weight zero; return the result, and how many columns and rows were taken off."""
    if "grad" in problem.requires:  # the derivative by a weight that is zero is not, and no point is split off
        return _sum(backend, problem, columns, queries), 0, 0
    if "weights" not in problem.requires:
        return _split(backend, info, problem, columns, queries)
    xp = array_namespace(columns.points)
    carries = columns.log_weights > -math.inf
    kept = xp.nonzero(carries)[0]
    if kept.shape[0] == carries.shape[0]:
        return _split(backend, info, problem, columns, queries)
    rows = columns.points if queries is None else queries
    if "exclude_self" not in problem.requires:
        return _split(backend, info, problem, take_columns(columns, kept), rows)
    # Row i and column i still belong together: pairs come last among the columns and first among the rows.
    m, n = rows.shape[0], carries.shape[0]
    alone = kept >= m
    kept = xp.concat([kept[alone], kept[~alone]])
    ownless = xp.concat([~carries[:m], xp.ones(max(0, m - n), dtype=xp.bool, device=device_of(rows))])
    order = marked_last(ownless)
    own_offset = int(read_back(count(alone))[0])
    partial, n_far, m_far = _split(
        backend, info, problem, take_columns(columns, kept), take_rows(rows, order), own_offset
    )
    return undo(partial, order), n_far, m_far


def _split(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any, own_offset: int = 0
) -> tuple[Partial, int, int]:
    """Take the far points off: near rows are summed by the fast formula, and over far columns only where these matter.

    What is taken off the backend sums too, apart, if it takes the full extent: problems with few rows or few columns.
    """
    limit = info.extent_limit(problem)
    if problem.extent <= limit:
        return _sum(backend, problem, columns, queries, own_offset), 0, 0
    same = queries is None
    rows = columns.points if same else queries
    far = look(problem, columns, rows, limit, own_offset)
    m_near, n_near = rows.shape[0] - far.m, columns.points.shape[0] - far.n
    cut = within_limit(info, problem, pair_share(far.m, rows.shape[0], far.n, columns.points.shape[0]))
    if cut is problem or not (far.m or far.n):
        return _sum(backend, cut, columns, queries, own_offset), 0, 0

    # Near ones first: with exclude_self the own columns of near and of far rows are again side by side.
    own_far = int(read_back(count(far.columns[:own_offset]))[0]) if own_offset else 0
    order = marked_last(far.rows) if far.m else None
    if far.n:
        columns = take_columns(columns, order if same else marked_last(far.columns))
    if far.m:
        rows = columns.points if same else take_rows(rows, order)
    near_rows, near, beyond = rows[:m_near, :], _slice(columns, 0, n_near), _slice(columns, n_near, n_near + far.n)
    slow = backend if info.supports(problem).ok else Exact()
    blocks = []
    if m_near or not far.m:  # at least one, for the fields of an empty result
        parts = []
        if n_near:
            parts.append(_sum(backend, cut, near, None if same else near_rows, own_offset - own_far))
        if far.n and not (n_near and vanish(problem, limit, far)):
            parts.append(_sum(slow, problem, beyond, near_rows, far.n))  # an offset at which no row has a column
        blocks.append(merge(parts))
    if far.m:
        blocks.append(_sum(slow, problem, columns, rows[m_near:, :], n_near + own_far))
    result = concatenate(blocks)
    return (result if order is None else undo(result, order)), far.n, far.m


class Far(NamedTuple):
    """Which points are far: masks where the points are, and what of them the host has read."""

    rows: Any  # (m,) mask
    columns: Any  # (n,) mask
    m: int
    n: int
    closest: float  # least distance of a far column from the centre
    span: float  # largest difference of two log weights, nats


def look(problem: Problem, columns: Columns, rows: Any, limit: float, own_offset: int) -> Far:
    """Find the far points; all that the host needs to know of them is read back at once."""
    xp = array_namespace(rows)
    distances = radii(columns.points)
    far_columns = distances > limit  # where a coordinate is NaN, the point is near, and its result NaN
    far_rows = far_columns if rows is columns.points else radii(rows) > limit
    if "exclude_self" in problem.requires:  # a row and its own column go together
        stop = min(own_offset + rows.shape[0], distances.shape[0])
        either = far_columns[own_offset:stop] | far_rows[: stop - own_offset]
        far_columns = xp.concat([far_columns[:own_offset], either, far_columns[stop:]])
        far_rows = xp.concat([either, far_rows[stop - own_offset :]])
    closest = xp.min(xp.where(far_columns, distances, xp.full_like(distances, math.inf)))
    numbers = [count(far_rows), count(far_columns), closest]
    if "weights" in problem.requires:
        numbers += [xp.max(columns.log_weights), xp.min(columns.log_weights)]
    m, n, least, *ends = read_back(*numbers)
    return Far(far_rows, far_columns, int(m), int(n), least, ends[0] - ends[1] if ends else 0.0)


def vanish(problem: Problem, limit: float, far: Far) -> bool:
    """Whether far columns add nothing that float64 shows to near rows.

    A near row has every near column within 2 ``limit`` and no far one within ``far.closest`` − ``limit``. But values
    have any size, and ``exclude_self`` may leave out the only near column.
    """
    if problem.requires & {"exclude_self", "values"}:
        return False
    gap = 0.5 * ((far.closest - limit) ** 2 - (2.0 * limit) ** 2)
    return gap / max(problem.scales, default=1.0) ** 2 - far.span > NOTHING


def _sum(backend: Backend, problem: Problem, columns: Columns, queries: Any, own_offset: int = 0) -> Partial:
    """Ask a backend for some rows over some columns."""
    rows = columns.points if queries is None else queries
    problem = replace(problem, m=rows.shape[0], n=columns.points.shape[0], same=queries is None)
    return reduce_rows(backend, problem, columns, queries, backend.prepare(problem, columns), own_offset)


def reduce_rows(
    backend: Backend, problem: Problem, columns: Columns, queries: Any, state: Any, own_offset: int = 0
) -> Partial:
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
        parts.append(reduce_rows(backend, sub, columns, rows[start:stop, :], state, own_offset + start))
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


def read_back(*numbers: Any) -> list[float]:
    """Numbers where the points are, (), read back at once."""
    return [float(x) for x in to_host(array_namespace(*numbers).stack(numbers))]


def count(mask: Any) -> Any:
    """How many entries of a mask are true, (), where the mask is."""
    xp = array_namespace(mask)
    return xp.sum(xp.astype(mask, xp.float64))


def pair_share(far_rows: float, m: int, far_columns: float, n: int) -> float:
    """Share of the pairs in which either point is far."""
    return 1.0 - (1.0 - far_rows / max(m, 1)) * (1.0 - far_columns / max(n, 1))


def marked_last(mask: Any) -> Any:
    """Indices of all entries, those of the mask last, otherwise in order; so their number need not be known."""
    xp = array_namespace(mask)
    return xp.argsort(xp.astype(mask, xp.int8), stable=True)


def undo(partial: Partial, order: Any) -> Partial:
    """Bring results back from an order of the rows."""
    back = array_namespace(order).argsort(order)
    return each(partial, lambda x: take_rows(x, back))


def take_rows(x: Any, which: Any) -> Any:
    """Rows by their indices, which are where x is."""
    if is_torch_array(x):
        return x.index_select(0, which)  # take() would look for negative indices first, with three kernels more
    return array_namespace(x).take(x, which, axis=0)


def take_columns(columns: Columns, which: Any) -> Columns:
    """Columns by their indices, which are where they are."""
    arrays = (columns.points, columns.log_weights, columns.values)
    return Columns(*(None if x is None else take_rows(x, which) for x in arrays))


def _slice(columns: Columns, start: int, stop: int) -> Columns:
    values = None if columns.values is None else columns.values[start:stop, :]
    return Columns(columns.points[start:stop, :], columns.log_weights[start:stop], values)
