"""The columns of one reduction, packed once: for many batches of rows."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from ..arrays import to_host
from ..protocol import Backend, BackendInfo, BackendUnavailable, Columns, Partial, Problem
from .exact import Exact
from .merge import concatenate, merge
from .outliers import (
    Far,
    count,
    look,
    marked_last,
    pair_share,
    read_back,
    reduce_rows,
    take_columns,
    take_rows,
    undo,
    vanish,
    within_limit,
)

__all__ = ["KEPT", "PreparedColumns"]

#: States that are kept; each may be as large as the columns. A batch with far points takes up to three.
KEPT = 4

_Which = Literal["all", "near", "far"]


class _Packed(NamedTuple):
    """Some of the columns as a backend holds them."""

    backend: Backend
    problem: Problem  # its n is theirs, its extent the largest that the state serves
    columns: Columns
    state: Any


class PreparedColumns:
    """The columns of one reduction, packed once for any number of batches of rows.

    What a backend makes of them serves up to an extent. Rows that reach beyond the columns have these packed for the
    next power of two, so that there are few states; the last ones used are kept. What lies beyond the backend's fast
    formula is summed apart, as in a pass: near rows have the near columns packed for the limit, the far ones for the
    columns' own extent; far rows have all of them, packed for the batch's. Which states serve a batch, and what they
    are, follows from the batch and the columns alone: its bits do not depend on the batches before.

    Parameters
    ----------
    backend, info : Backend, BackendInfo
    problem : Problem
        Of the batches, which differ in their rows; its m is what the columns are packed for, its extent is theirs. Not
        with ``"exclude_self"``.
    columns : Columns
        As :class:`Columns`, but log weights may be −inf.

    Raises
    ------
    BackendUnavailable
        The backend cannot answer the problem; :meth:`reduce` too, where rows reach beyond what it can.
    """

    def __init__(self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns) -> None:
        if "weights" in problem.requires:
            carries = columns.log_weights > -math.inf
            kept = array_namespace(carries).nonzero(carries)[0]
            if kept.shape[0] < carries.shape[0]:
                columns = take_columns(columns, kept)
        self._backend, self._info, self._columns = backend, info, columns
        self._problem = replace(problem, n=columns.points.shape[0], same=False)
        self._limit = info.extent_limit(self._problem)
        self._states: OrderedDict[tuple[_Which, float], _Packed] = OrderedDict()
        self._lock = threading.Lock()
        self._far: Far | None = None  # of the columns; None: none is
        with np.errstate(all="ignore"):
            if problem.extent > self._limit:
                found = look(self._problem, columns, columns.points[:0, :], self._limit, 0)
                self._far = found if found.n else None
            if self._takes_whole(0.0, 0, 1):
                self._whole(0.0)
            else:
                self._for_near()

    def reduce(self, queries: Any, distances: Any, extent: float) -> tuple[Partial, int]:
        """Reduce over all columns for every row.

        Parameters
        ----------
        queries : (m, d) float64 array
            m ≥ 1.
        distances : (m,) array
            Theirs from the origin. Where ``extent`` is beyond the backend's limit, how many of them are is read back;
            otherwise nothing is.
        extent : float
            A bound on them.

        Returns
        -------
        Partial
        int
            How many points were taken off, columns and rows.
        """
        m, m_far, beyond = queries.shape[0], 0, None
        with np.errstate(all="ignore"):
            if extent > self._limit:
                beyond = distances > self._limit  # a row that is NaN is near, and its result NaN
                m_far = int(read_back(count(beyond))[0])
            if self._takes_whole(extent, m_far, m):
                return _sum([self._whole(extent)], queries), 0
            if not m_far:
                return _sum(self._for_near(), queries), self._n_far
            order = marked_last(beyond)
            rows = take_rows(queries, order)
            blocks = [_sum(self._for_near(), rows[: m - m_far, :])] if m > m_far else []
            blocks.append(_sum([self._beyond("all", extent)], rows[m - m_far :, :]))
            return undo(concatenate(blocks), order), self._n_far + m_far

    @property
    def _n_far(self) -> int:
        return self._far.n if self._far else 0

    def _takes_whole(self, extent: float, m_far: int, m: int) -> bool:
        """Whether the backend is to sum all rows over all columns in one way."""
        problem = self._reaching(max(extent, self._problem.extent))
        share = pair_share(m_far, m, self._n_far, problem.n)
        return within_limit(self._info, problem, share) is problem

    def _whole(self, extent: float) -> _Packed:
        """All columns, for rows within ``extent``."""
        return self._packed("all", self._backend, self._stepped(extent))

    def _for_near(self) -> list[_Packed]:
        """What rows within the limit are summed over: near columns, and far ones where they may add something."""
        if self._far is None:
            return [self._packed("all", self._backend, self._limit)]
        any_near, states = self._far.n < self._problem.n, []
        if any_near:
            states.append(self._packed("near", self._backend, self._limit))
        if not (any_near and vanish(self._problem, self._limit, self._far)):
            states.append(self._beyond("far", 0.0))
        return states

    def _beyond(self, which: _Which, extent: float) -> _Packed:
        """Columns for rows within ``extent``, by the backend if it reaches that far, else exactly: to any extent."""
        extent = self._stepped(extent)
        if self._info.supports(self._reaching(extent)).ok:
            return self._packed(which, self._backend, extent)
        return self._packed(which, Exact(), math.inf)

    def _stepped(self, extent: float) -> float:
        """The extent to pack columns for that is to serve rows within ``extent``."""
        if extent <= self._problem.extent:
            return self._problem.extent
        wider = 2.0 ** max(0, math.ceil(math.log2(extent)))
        if extent <= self._limit:
            wider = min(wider, self._limit)
        return wider if self._info.supports(self._reaching(wider)).ok else extent

    def _reaching(self, extent: float) -> Problem:
        return replace(self._problem, extent=extent)

    def _packed(self, which: _Which, backend: Backend, extent: float) -> _Packed:
        with self._lock:
            packed = self._states.pop((which, extent), None) or self._pack(which, backend, extent)
            self._states[which, extent] = packed  # the last one used comes last
            if len(self._states) > KEPT:
                self._states.popitem(last=False)
            return packed

    def _pack(self, which: _Which, backend: Backend, extent: float) -> _Packed:
        columns = self._columns
        if self._far is not None and which != "all":
            order, n_near = marked_last(self._far.columns), self._problem.n - self._far.n
            columns = take_columns(columns, order[:n_near] if which == "near" else order[n_near:])
        problem = replace(self._problem, n=columns.points.shape[0], extent=extent)
        if backend is self._backend:
            support = self._info.supports(problem)
            if not support.ok:
                raise BackendUnavailable(f"backend {self._info.name!r} cannot do this: {support.reason}")
        state = backend.prepare(problem, columns)
        to_host(columns.points[:1, :])  # waits for the device: calls on other streams find everything there
        return _Packed(backend, problem, columns, state)


def _sum(states: list[_Packed], queries: Any) -> Partial:
    """Reduce over the columns of all states."""
    m, parts = queries.shape[0], []
    for backend, problem, columns, state in states:
        parts.append(reduce_rows(backend, replace(problem, m=m), columns, queries, state))
    return merge(parts)
