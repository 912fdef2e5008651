"""One reduction over fixed columns, for any rows.

Columns of weight zero are dropped, but for ``"grad"``, as the derivative by such a weight is not zero. Outliers are
summed apart, but for ``"grad"`` and ``"kernel"``: by the backend's slower formula where it has one, else by direct
differences. Where the device's memory does not suffice, the rows are cut.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays import array_namespace, look, to_host
from ..protocol import Backend, BackendInfo, Columns, DeviceOutOfMemory, Partial, Problem, Reduction, with_fields
from .exact import Exact
from .failures import OutOfReach, call, checked, read_only
from .forks import cached_property, new_lock
from .merge import concatenate, marked_last, merge, take_columns, take_rows, undo
from .outliers import Outliers, count, find_outliers, limit_of, pair_share, radii, within_limit

Range = tuple[int, int]


class _Packed(NamedTuple):
    """Some of the columns as packed by a backend."""

    backend: Any  # a Backend, or Exact
    problem: Problem  # n: their number; extent: the largest that the state serves
    columns: Columns
    state: Any


class PackedColumns:
    """The columns of one reduction, packed when rows first need them.

    If rows lie farther out than the columns, these are packed again for the next power of two of the rows' extent;
    earlier batches do not matter. The problem's m is the expected number of rows, its extent bounds the columns.
    ``shared``: calls may come from several threads and CUDA streams. Raises OutOfReach.
    """

    def __init__(
        self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
    ) -> None:
        self._points = columns.points  # also those of weight zero: they are rows
        self.n = int(columns.points.shape[0])
        self._backend, self._info, self._columns, self._shared = backend, info, columns, shared
        if "weights" in problem.requires and "grad" not in problem.requires:
            logs, xp = columns.log_weights, array_namespace(columns.log_weights)
            span = look(lambda least, most: most - least, xp.min(logs), xp.max(logs))
            if not span < math.inf:  # a weight is zero, or NaN
                nothing = logs == -math.inf
                if without := look(int, count(nothing)):
                    self._columns = take_columns(columns, marked_last(nothing)[: nothing.shape[0] - without])
            problem = with_fields(problem, weight_span=float(math.ceil(span)) if span < math.inf else math.inf)
        n, self._all_carry = int(self._columns.points.shape[0]), self._columns is columns
        # A backend may reach farther where the rows are the columns themselves: then that larger limit holds.
        self._limit_of_own = problem.same and self._all_carry and not shared
        self._limit = limit_of(info, with_fields(problem, n=n, same=self._limit_of_own))
        self._problem = with_fields(problem, n=n, same=False)
        self._states: dict[tuple[str, float], _Packed] = {}  # the last one used comes last
        self._lock = new_lock()
        if shared:  # pack now for batches without outliers
            self._packed("all", backend, problem.extent) if self._in_one(0.0, 0, 1) else self._for_near()

    def reduce(
        self, queries: Any = None, *, some: Range | None = None, distances: Any = None, extent: float | None = None
    ) -> tuple[Partial, int]:
        """Reduce over all columns; return the sums, and how many outliers (rows and columns) were summed apart.

        Rows are ``queries`` (m, d) float64, or the points, or those from ``some[0]`` to ``some[1]``. ``distances`` (m,)
        are the rows' from the origin, where known, and ``extent`` bounds them (None: the problem's).
        """
        same, rows = queries is None, queries
        if same:
            start, stop = some or (0, self.n)
            rows = self._points[start:stop, :] if stop - start < self.n else self._points
        extent, m = self._problem.extent if extent is None else extent, rows.shape[0]
        # The first row's number as a column, where the rows are columns: some backends are then faster.
        own = start if same and self._all_carry and (m == self.n or "range" in self._info.features) else None
        if self._limit_of_own and own is None:
            return self._as_query.reduce(queries, some=some, distances=distances, extent=extent)
        far, m_far, before = self._far_rows(rows, distances, extent, own)
        if self._in_one(extent, m_far, m):
            return self._sum([self._packed("all", self._backend, self._stepped(extent))], rows, own), 0
        apart = max(m_far, self.far.n) if same else m_far + self.far.n
        if own is not None:
            own -= before
        if not m_far:
            return self._sum(self._for_near(), rows, own), apart
        order, m_near, blocks = marked_last(far), m - m_far, []
        rows = take_rows(rows, order)
        if m_near:
            blocks.append(self._sum(self._for_near(), rows[:m_near, :], own))
        blocks.append(self._sum([self._packed("all", *self._reaching(extent))], rows[m_near:, :]))
        return undo(concatenate(blocks), order), apart

    def _far_rows(self, rows: Any, distances: Any, extent: float, start: int | None) -> tuple[Any, int, int]:
        """Which rows are far (None: none), how many, and how many far columns come before the first row, ``start``."""
        if start is not None and self.far.n:
            far, ahead = self.far.mask[start : start + rows.shape[0]], self.far.mask[:start]
            return far, *look(lambda *numbers: (int(numbers[0]), int(numbers[1])), count(far), count(ahead))
        if start is not None or extent <= self._limit:
            return None, 0, 0
        far = (radii(rows) if distances is None else distances) > self._limit  # not a row with a NaN
        return far, look(int, count(far)), 0

    @property
    def whole(self) -> _Packed | None:
        """The columns as packed for rows within their extent; None where some of them are summed apart."""
        problem, limit = self._problem, self._limit  # the extent is a bound: moved samples may lie well within
        near = self._all_carry and "grad" not in problem.requires and (problem.extent <= limit or not self.far.n)
        return self._packed("all", self._backend, min(problem.extent, limit)) if near else None

    @cached_property
    def takes_pairs(self) -> bool:
        """Whether all points are to be summed by blocks of pairs: the backend computes each pair once."""
        requires, mean = self._problem.requires, self._problem.reduction is Reduction.MEAN
        if not self._limit_of_own or not mean or requires - {"weights"} or self.far.n == self.n:
            return False
        extent = min(self._problem.extent, self._limit)
        asked = with_fields(self._problem, m=self.n, same=True, requires=requires | {"pairs"}, extent=extent)
        able = "pairs" in self._info.features and self._info.supports(asked).ok
        return able and not (self.far.n and self._in_one(self._problem.extent, self.far.n, self.n))

    def reduce_pairs(self, rows: Range, columns: Range) -> tuple[Partial, Partial]:
        """Reduce two ranges of the near points, each over the other; see :class:`~sdkde_core.protocol.PairsBackend`."""
        backend: Any = self._backend  # which is a PairsBackend
        packed = self._packed("near", self._backend, min(self._problem.extent, self._limit))
        problem, points = with_fields(packed.problem, m=packed.problem.n, same=True), packed.columns.points
        sides = call(self._info, problem, backend.reduce_pairs, packed.state, rows, columns, inputs=[points])
        both = zip((rows, columns), sides, strict=True)
        first, second = (checked(self._info, problem, packed.columns, points[slice(*x), :], side) for x, side in both)
        return first, second

    def reduce_apart(self, rows: Range, columns: Range) -> Partial:
        """Reduce a range of the points, near ones first: over all columns, or over outliers if ``columns[0]`` > 0."""
        picked = take_rows(self._points, marked_last(self.far.mask)[slice(*rows)])
        which, extent = ("far", 0.0) if columns[0] else ("all", self._problem.extent)
        return self._sum([self._packed(which, *self._reaching(extent))], picked)

    def in_order(self, near_first: Partial) -> Partial:
        """Return the sums of all points in the points' order, from those with near points first."""
        return undo(near_first, marked_last(self.far.mask)) if self.far.n else near_first

    @cached_property
    def _as_query(self) -> PackedColumns:
        """The same columns with the limit that holds for queries."""
        return PackedColumns(self._backend, self._info, self._problem, self._columns)

    @cached_property
    def far(self) -> Outliers:
        return find_outliers(self._problem, self._columns, self._limit)

    def _in_one(self, extent: float, m_far: int, m: int) -> bool:
        """Whether the backend is to sum all rows over all columns at once, none of them apart."""
        reach = max(extent, self._problem.extent)
        if reach <= self._limit:
            return True
        problem = with_fields(self._problem, extent=reach)
        return within_limit(self._info, problem, pair_share(m_far, m, self.far.n, problem.n)) is problem

    def _for_near(self) -> list[_Packed]:
        """The columns for near rows: near columns, and outliers where these may add something."""
        near = [self._packed("near", self._backend, self._limit)] if self.far.n < self._problem.n else []
        return near if near and self.far.negligible else [*near, self._packed("far", *self._reaching(0.0))]

    def _reaching(self, extent: float) -> tuple[Any, float]:
        """The backend, or Exact where it does not reach rows within ``extent``; and the extent to pack for."""
        extent = self._stepped(extent)
        reached = self._info.supports(with_fields(self._problem, extent=extent)).ok
        return (self._backend, extent) if reached else (Exact(), math.inf)

    def _stepped(self, extent: float) -> float:
        """The extent for which to pack columns, so that they serve rows within ``extent``."""
        if extent <= self._problem.extent:
            return self._problem.extent
        wider = 2.0 ** max(0, math.ceil(math.log2(extent)))
        if extent <= self._limit:
            wider = min(wider, self._limit)
        known = ("all", wider) in self._states
        return wider if known or self._info.supports(with_fields(self._problem, extent=wider)).ok else extent

    def _packed(self, which: str, backend: Any, extent: float) -> _Packed:
        """Return ``"all"`` columns, the ``"near"`` or the ``"far"`` ones, packed for an extent now or before."""
        far = self.far.n if which != "all" else 0
        which = which if far else "all"
        with self._lock:
            packed = self._states.pop((which, extent), None)
            if packed is None:
                columns = self._columns
                if far:
                    order = marked_last(self.far.mask)
                    columns = take_columns(columns, order[:-far] if which == "near" else order[-far:])
                problem = with_fields(self._problem, n=columns.points.shape[0], extent=extent)
                if backend is self._backend and (self._shared or extent > self._problem.extent):
                    support = self._info.supports(problem)
                    if not support.ok:
                        raise OutOfReach(self._info, problem.device, support.reason)
                inputs = points, log_weights = read_only(columns.points), read_only(columns.log_weights)
                columns = with_fields(columns, points=points, log_weights=log_weights)
                state = call(self._info, problem, backend.prepare, columns, inputs=inputs)
                packed = _Packed(backend, problem, columns, state)
                if self._shared:
                    to_host(columns.points[:1, :])  # waits for the device: other streams find everything there
            self._states[which, extent] = packed
            if len(self._states) > 4:  # each may be as large as the columns; a batch with outliers takes up to three
                del self._states[next(iter(self._states))]
            return packed

    def _sum(self, states: list[_Packed], rows: Any, own: int | None = None) -> Partial:
        """Reduce over the columns of all states; ``own``: rows are the first state's columns, from this number on."""
        parts, m = [], rows.shape[0]
        for i, packed in enumerate(states):
            same, problem = own is not None and i == 0, packed.problem
            if (m, same) != (problem.m, problem.same):
                packed = packed._replace(problem=with_fields(problem, m=m, same=same))
            parts.append(self._reduce_rows(packed, rows, own or 0))
        return parts[0] if len(parts) == 1 else merge(parts)

    def _reduce_rows(self, packed: _Packed, rows: Any, own_offset: int) -> Partial:
        """Reduce, with half the rows at a time where the device's memory does not suffice."""
        backend, problem, columns, state = packed
        queries = None if problem.same else rows
        try:
            arguments, inputs = (read_only(queries), state, own_offset), [columns.points, queries]
            got = call(self._info, problem, backend.reduce, *arguments, inputs=inputs)
            return checked(self._info, problem, columns, rows, got)
        except DeviceOutOfMemory:
            if rows.shape[0] < 2:
                raise
        half, same = rows.shape[0] // 2, problem.same and "range" in self._info.features
        parts = []
        for start, stop in ((0, half), (half, rows.shape[0])):
            sub = packed._replace(problem=with_fields(problem, m=stop - start, same=same))
            parts.append(self._reduce_rows(sub, rows[start:stop, :], own_offset + start))
        return concatenate(parts)


def reduce_pass(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any = None
) -> Partial:
    """Run one reduction through a backend as the core does it, over columns whose log weights may be −inf.

    Rows are ``queries``, (m, d) float64, or the points; the problem's extent bounds rows and columns.
    """
    with np.errstate(all="ignore"):  # the public functions see to it themselves
        return PackedColumns(backend, info, problem, columns).reduce(queries)[0]
