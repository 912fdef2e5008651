"""One reduction over fixed columns, for any rows: the only place that hands a problem to a backend.

Columns of weight zero are dropped (and stay rows). Outliers are summed apart: by the backend's slower formula where it
has one, else by direct differences. Where the device's memory does not suffice, the rows are cut.

Of problems that require ``"grad"`` or ``"kernel"`` nothing is taken off: a backend with that feature holds at any
extent. With ``"grad"`` nothing is dropped either, as the derivative by a weight of zero is not zero.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ..arrays import look, to_host
from ..protocol import (
    Backend,
    BackendInfo,
    Columns,
    DeviceOutOfMemory,
    PairsBackend,
    Partial,
    Problem,
    Reduction,
    with_fields,
)
from .exact import Exact, reduce_exact
from .failures import OutOfReach, call, checked, read_only
from .forks import new_lock
from .merge import concatenate, each, marked_last, merge, take_columns, take_rows, undo
from .outliers import Outliers, count, find_outliers, limit_of, pair_share, radii, within_limit


class _Packed(NamedTuple):
    """Some of the columns as a backend holds them."""

    backend: Backend
    problem: Problem  # its n is theirs, its extent the largest that the state serves
    columns: Columns
    state: Any


class PackedColumns:
    """The columns of one reduction, packed when rows first need them.

    Rows that reach beyond the columns have these packed for the next power of two of the extent; the last states used
    are kept. Which states serve a batch follows from the batch and the columns alone, so its bits do not depend on the
    batches before. The problem's m is how many rows to expect, its extent bounds the columns. ``shared``: calls may
    come from several threads and CUDA streams. Raises OutOfReach where columns or rows are beyond the backend's reach.
    """

    def __init__(
        self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
    ) -> None:
        self._all, self._points = columns, columns.points  # those of weight zero too, which are rows all the same
        self._backend, self._info, self._columns, self._shared = backend, info, columns, shared
        self._kept: Any = None  # indices of the columns with weight; None: all
        if "weights" in problem.requires and "grad" not in problem.requires:
            nothing = columns.log_weights == -math.inf
            without = look(int, count(nothing))
            if without:
                kept = marked_last(nothing)[: nothing.shape[0] - without]
                self._kept, self._columns = kept, take_columns(columns, kept)
        n = self._columns.points.shape[0]
        self._problem = with_fields(problem, n=n, same=False) if problem.same or problem.n != n else problem
        limit, self._for_own = limit_of(info, self._problem), False
        if problem.same and not shared and self._kept is None and "exclude_self" not in problem.requires:
            # Where the rows are to be the points, the limit is theirs, which may be farther out than that of others.
            self._for_own = limit < problem.extent and limit < self._own_limit
        self._limit = self._own_limit if self._for_own else limit
        self._states: OrderedDict[tuple[str, float], _Packed] = OrderedDict()
        self._lock = new_lock() if shared else threading.Lock()  # one thread's, which has it in a forked child too
        self._far: Outliers | None = None
        self._searched = problem.extent <= self._limit
        if shared:  # what a batch without outliers needs is packed now
            self._count(None)
            self._packed("all", backend, problem.extent) if self._takes_whole(0.0, 0, 1) else self._for_near()

    def reduce(
        self,
        queries: Any = None,
        *,
        own_offset: int = 0,
        some: tuple[int, int] | None = None,
        distances: Any = None,
        extent: float | None = None,
    ) -> tuple[Partial, int]:
        """Reduce over all columns; return the sums, and how many outliers (rows and columns) were summed apart.

        Rows are ``queries`` (m, d) float64, or the points, or those from ``some[0]`` to ``some[1]``. ``distances`` (m,)
        are the rows' from the origin, where known, and ``extent`` bounds them (None: the problem's).
        """
        same, rows, n = queries is None, queries, self._points.shape[0]
        cut = same and some is not None and some != (0, n)
        if same:
            own_offset, stop = some or (0, n)
            rows = self._points[own_offset:stop, :] if cut else self._points
        extent, m = self._problem.extent if extent is None else extent, rows.shape[0]
        # Whether the rows are the columns from own_offset on: some backends gain by that.
        own = same and self._kept is None and (not cut or "range" in self._info.features)
        if self._for_own and not own:
            return self._as_queries.reduce(
                queries, own_offset=own_offset, some=some, distances=distances, extent=extent
            )
        reach = max(extent, self._problem.extent)
        excludes = "exclude_self" in self._problem.requires
        if (reach <= self._limit and not (excludes and self._kept is not None)) or (own and reach <= self._own_limit):
            reach = reach if reach == self._problem.extent else self._stepped(extent)
            return self._sum([self._packed("all", self._backend, reach)], rows, own_offset, own), 0
        far, m_far, before = None, 0, 0
        if extent > self._limit:
            if own and cut:
                self._count(None)
                if self._far is not None:
                    far, ahead = self._far.mask[own_offset:stop], self._far.mask[:own_offset]
                    m_far, before = look(lambda *numbers: tuple(map(int, numbers)), count(far), count(ahead))
            else:
                far = (radii(rows) if distances is None else distances) > self._limit  # not a row with a NaN
                m_far = self._count(far)
        together = self._takes_whole(extent, m_far, m)
        apart = 0 if together else max(m_far, self.n_far) if same else m_far + self.n_far
        if excludes and (self._kept is not None or apart):
            # A row and its own column no longer stand at one offset. Nothing public asks for this, so it may be slow.
            return reduce_exact(self._problem, rows, self._all, own_offset), apart
        if together or not apart:
            packed = self._packed("all", self._backend, self._stepped(extent) if together else self._limit)
            return self._sum([packed], rows, own_offset, own), apart
        if not m_far:
            return self._sum(self._for_near(), rows, own_offset - before, own), apart
        order, blocks = marked_last(far), []
        rows = take_rows(rows, order)
        if m > m_far:
            blocks.append(self._sum(self._for_near(), rows[: m - m_far, :], own_offset - before, own))
        blocks.append(self._sum([self._packed("all", *self._reaching(extent))], rows[m - m_far :, :]))
        return undo(concatenate(blocks), order), apart

    @property
    def whole(self) -> _Packed | None:
        """The columns as the backend has them, for rows within their extent; None where some are summed apart."""
        problem = self._problem
        near = self._kept is None and problem.extent <= self._limit and "grad" not in problem.requires
        return self._packed("all", self._backend, problem.extent) if near else None

    @property
    def n(self) -> int:
        """How many points there are, those of weight zero among them."""
        return int(self._points.shape[0])

    @functools.cached_property
    def takes_pairs(self) -> bool:
        """Whether :meth:`reduce_pairs` is to be called: of all points, it has less to do than :meth:`reduce`."""
        problem, info = with_fields(self._problem, same=True, m=self._problem.n), self._info
        plain = problem.reduction is Reduction.MEAN and not problem.requires - {"weights"} and self._kept is None
        if "pairs" not in info.features or not plain or info.work is None:
            return False
        near, cut = self.n_near, problem.extent > self._own_limit
        if cut and (self._limit > self._own_limit or self._takes_whole(problem.extent, self.n_far, problem.n)):
            return False
        problem = with_fields(problem, m=near, n=near, extent=min(problem.extent, self._own_limit))
        return near > 0 and info.work(problem, None).exps < 0.75 * problem.pairs

    @functools.cached_property
    def n_near(self) -> int:
        """How many points blocks of pairs are of: all, or those within the limit."""
        if self._problem.extent <= self._own_limit:
            return self._problem.n
        self._count(None)
        return self._problem.n - self.n_far

    def reduce_pairs(self, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[Partial, Partial]:
        """Reduce two ranges of the near points, each over the other; see :class:`~sdkde_core.protocol.PairsBackend`."""
        backend = cast(PairsBackend, self._backend)
        if self.n_near < self._problem.n:
            packed = self._packed("near", self._backend, self._limit)
        else:
            packed = self._packed("all", self._backend, min(self._problem.extent, self._own_limit))
        problem, points = with_fields(packed.problem, m=packed.problem.n, same=True), packed.columns.points
        sides = call(self._info, problem, backend.reduce_pairs, packed.state, rows, columns, inputs=[points])
        found = [
            checked(self._info, problem, packed.columns, points[start:stop, :], side)
            for (start, stop), side in zip((rows, columns), sides, strict=True)
        ]
        return found[0], found[1]

    @property
    def left_out(self) -> tuple[int, int]:
        """The points that :meth:`reduce_outliers` is for, (first, last): outliers, and near ones where they matter."""
        n = self._problem.n
        return (n if self.n_near == n or self._far is None else self.n_near if self._far.negligible else 0), n

    def reduce_outliers(self, start: int, stop: int) -> Partial:
        """Reduce a range of the points, near ones first: near ones over the outliers, outliers over all columns."""
        near = self.n_near  # finds the outliers
        assert self._far is not None  # else nothing is left out
        order = marked_last(self._far.mask)
        rows, cut = take_rows(self._points, order[start:stop]), min(max(near - start, 0), stop - start)
        parts = []
        for some, which, extent in ((rows[:cut, :], "far", 0.0), (rows[cut:, :], "all", self._problem.extent)):
            if some.shape[0]:
                parts.append(self._sum([self._packed(which, *self._reaching(extent))], some))
        return concatenate(parts)

    def join_pairs(self, pairs: Sequence[Partial], outliers: Partial | None) -> Partial:
        """Return the sums of all points, in order: of near ones by block, and what :meth:`reduce_outliers` found."""
        near = concatenate(pairs)
        if outliers is None or self._far is None:
            return near
        if not self._far.negligible:
            near = merge([near, each(outliers, lambda x: x[: self.n_near])])
            outliers = each(outliers, lambda x: x[self.n_near :])
        return undo(concatenate([near, outliers]), marked_last(self._far.mask))

    @functools.cached_property
    def _as_queries(self) -> PackedColumns:
        """The same columns with the limit that holds for queries."""
        return PackedColumns(self._backend, self._info, with_fields(self._problem, same=False), self._columns)

    @functools.cached_property
    def _own_limit(self) -> float:
        """The limit where the rows are the columns."""
        return limit_of(self._info, with_fields(self._problem, same=True))

    def _count(self, far: Any) -> int:
        """How many rows a mask has; the first time the columns' outliers are found, and all numbers read at once."""
        if not self._searched:
            self._far, m_far = find_outliers(self._problem, self._columns, self._limit, far)
            self._searched = True
            return m_far
        return 0 if far is None else look(int, count(far))

    @property
    def n_far(self) -> int:
        """How many columns are outliers, as far as that was looked for."""
        return self._far.n if self._far else 0

    def _takes_whole(self, extent: float, m_far: int, m: int) -> bool:
        """Whether the backend is to sum all rows over all columns in one way."""
        reach = max(extent, self._problem.extent)
        if reach <= self._limit:
            return True
        problem = with_fields(self._problem, extent=reach)
        return within_limit(self._info, problem, pair_share(m_far, m, self.n_far, problem.n)) is problem

    def _for_near(self) -> list[_Packed]:
        """What near rows are summed over: near columns, and outliers where these may add something."""
        if self._far is None:
            return [self._packed("all", self._backend, self._limit)]
        any_near = self._far.n < self._problem.n
        near = [self._packed("near", self._backend, self._limit)] if any_near else []
        return near if any_near and self._far.negligible else [*near, self._packed("far", *self._reaching(0.0))]

    def _reaching(self, extent: float) -> tuple[Backend, float]:
        """Who sums rows within ``extent``, and up to where: the backend if it reaches that far, else the exact path."""
        extent = self._stepped(extent)
        reached = self._info.supports(with_fields(self._problem, extent=extent)).ok
        return (self._backend, extent) if reached else (Exact(), math.inf)

    def _stepped(self, extent: float) -> float:
        """The extent to pack columns for that is to serve rows within ``extent``."""
        if extent <= self._problem.extent:
            return self._problem.extent
        wider = 2.0 ** max(0, math.ceil(math.log2(extent)))
        if extent <= self._limit:
            wider = min(wider, self._limit)
        return wider if self._info.supports(with_fields(self._problem, extent=wider)).ok else extent

    def _packed(self, which: str, backend: Backend, extent: float) -> _Packed:
        with self._lock:
            packed = self._states.pop((which, extent), None)
            if packed is None:
                columns = self._columns
                if self._far is not None and which != "all":
                    order, n_near = marked_last(self._far.mask), self._problem.n - self._far.n
                    columns = take_columns(columns, order[:n_near] if which == "near" else order[n_near:])
                packed = self._pack(columns, backend, extent)
                if self._shared:
                    to_host(columns.points[:1, :])  # waits for the device: other streams find everything there
            self._states[which, extent] = packed  # the last one used comes last
            if len(self._states) > 4:  # each may be as large as the columns; a batch with outliers takes up to three
                self._states.popitem(last=False)
            return packed

    def _pack(self, columns: Columns, backend: Backend, extent: float) -> _Packed:
        problem, n = self._problem, columns.points.shape[0]
        if (n, extent) != (problem.n, problem.extent):
            problem = with_fields(problem, n=n, extent=extent)
        if backend is self._backend and (self._shared or extent > self._problem.extent):
            support = self._info.supports(problem)
            if not support.ok:
                raise OutOfReach(self._info, problem.device, support.reason)
        columns = Columns(read_only(columns.points), read_only(columns.log_weights), columns.weights)
        state = call(self._info, problem, backend.prepare, columns, inputs=[columns.points, columns.log_weights])
        return _Packed(backend, problem, columns, state)

    def _sum(self, states: list[_Packed], rows: Any, own_offset: int = 0, own: bool = False) -> Partial:
        """Reduce over the columns of all states; ``own``: the rows are the first's columns from ``own_offset`` on."""
        parts, m = [], rows.shape[0]
        for i, packed in enumerate(states):
            same, problem = own and i == 0, packed.problem
            if (m, same) != (problem.m, problem.same):
                packed = packed._replace(problem=with_fields(problem, m=m, same=same))
            parts.append(self._reduce_rows(packed, rows, own_offset))
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
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any = None, own_offset: int = 0
) -> Partial:
    """Run one reduction through a backend as the core does it.

    Parameters
    ----------
    backend, info : Backend, BackendInfo
    problem : Problem
        Its extent bounds rows and columns.
    columns : Columns
        As the protocol has them, but log weights may be −inf.
    queries : (m, d) float64 array, optional
        None: the points, or ``problem.m`` of them from ``own_offset`` on.
    own_offset : int
        With ``"exclude_self"``: row i leaves out column i + own_offset.
    """
    some = (own_offset, own_offset + problem.m) if queries is None else None
    with np.errstate(all="ignore"):  # the public functions see to it themselves
        packed = PackedColumns(backend, info, problem, columns)
        return packed.reduce(queries, own_offset=own_offset, some=some)[0]
