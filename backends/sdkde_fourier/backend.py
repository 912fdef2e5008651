"""The Fourier backend's implementation of the protocol: transforms, and exact sums for the rows that those leave."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import check_threads, concatenate, cpu_threads, each, empty
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, price
from .duplicates import Distinct, spread
from .finish import add, finish, least, put, take_off
from .memory import ROWS
from .modes import Box, choose_box, density_bound, fields
from .transforms import to_modes, to_points

Array = NDArray[Any]


@dataclass(frozen=True)
class _Series:
    """The columns in a box, as modes."""

    box: Box
    modes: Array
    epsilon: float
    error: float  # bound on a sum's
    inside: Array | None = None  # (n,) which columns; None: all
    outside: Neighbours | None = None  # the others
    beyond: Any = None  # (d,) whether any of the others is outside in that dimension
    weight: float = 0.0  # of the others, in all


@dataclass(frozen=True)
class _State:
    columns: Columns
    series: _Series | None
    neighbourhoods: Distinct


class FourierBackend:
    """Fourier series in up to three dimensions, and exact sums over neighbourhoods where those do not reach.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use.
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    def __init__(self, threads: int | None = None, always: bool = False) -> None:
        if not isinstance(always, bool):
            raise TypeError(f"always is {always!r}; pass True or False")
        self.threads, self.always = check_threads(threads), always

    def probe(self, device: str) -> Support:
        """finufft runs on any CPU."""
        import finufft

        return Support(device == "cpu", f"finufft {finufft.__version__} runs on the CPU")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Transform the columns to modes, if that is faster than direct sums."""
        with np.errstate(all="ignore"):
            series = self._transform(problem, columns) if np.isfinite(columns.points).all() else None
            return _State(columns, series, Distinct(columns, self._threads()))

    def _threads(self) -> int:
        return self.threads or cpu_threads()

    def _transform(self, problem: Problem, columns: Columns) -> _Series | None:
        points, log_weights = columns.points, columns.log_weights
        weights = np.exp(log_weights)
        # A point's own row has at least its own term; the largest sum is not known before the box is.
        floor, total = float(np.exp(log_weights.mean())), float(weights.sum())
        if not total > bounds.SMALLEST:
            return None
        usual = bounds.tolerance(problem, floor, total)
        low, high = (np.array([end(points[:, a]) for a in range(problem.d)]) for end in (np.min, np.max))
        some = points[:: max(1, len(points) // price.SAMPLE)]
        found = choose_box(
            problem, (low, high), some, usual, functools.partial(price.box_seconds, price.CPU, problem, usual)
        )
        if not self._pays(problem, columns, math.inf if found is None else found[1]) or found is None:
            return None
        box = found[0]
        inside = box.holds(points, np.zeros(problem.d))
        whole = bool(inside.all())
        mine, w = (points, weights) if whole else (points[inside], weights[inside])
        largest = density_bound(box, mine, w)
        if not largest > bounds.SMALLEST:
            return None
        epsilon = bounds.tolerance(problem, floor, largest)
        epsilon = max(epsilon, usual)  # the box was made for that
        modes = to_modes(box.angles(mine), w, box.shape, epsilon, self._threads())
        error = bounds.error(epsilon, largest, float(box.period.max()))
        if whole:
            return _Series(box, modes, epsilon, error)
        members = np.flatnonzero(~inside)
        others = points[members]
        beyond = ((others < box.low) | (others > box.high)).any(axis=0)
        outside = Neighbours(Columns(others, log_weights[members]), members)
        return _Series(box, modes, epsilon, error, inside, outside, beyond, float(weights[members].sum()))

    def _pays(self, problem: Problem, columns: Columns, seconds: float) -> bool:
        """Whether modes at that price are faster than direct sums over neighbours."""
        if self.always or not price.looks(problem, seconds):
            return True
        step = max(1, len(columns.points) // (1 << 13))
        direct = price.direct_seconds(price.CPU, problem, columns.points[::step], columns.log_weights[::step])
        return direct >= seconds

    def reduce(self, problem: Problem, queries: Array | None, state: _State, own_offset: int = 0) -> Partial:
        """Sum by modes, then redo the rows whose sum is too small against the bound on its error."""
        rows = state.columns.points if queries is None else queries
        if not len(rows):
            return empty(problem, rows)
        blocks = []
        with np.errstate(all="ignore"):
            for start in range(0, len(rows), ROWS):
                block = rows[start : start + ROWS]
                own = None
                if "exclude_self" in problem.requires:
                    own = np.arange(len(block)) + own_offset + start
                blocks.append(self._block(problem, block, own, state))
        return concatenate(blocks)

    def _block(self, problem: Problem, rows: Array, own: Array | None, state: _State) -> Partial:
        series, redo, found = state.series, np.ones(len(rows), bool), None
        if series is not None:
            held = series.box.holds(rows, -np.minimum(series.box.margin, bounds.cutoff(series.epsilon)))
            if held.all():
                found, good = self._by_modes(problem, rows, own, state, series)
                redo = ~good
            elif held.any():
                mine = None if own is None else own[held]
                some, good = self._by_modes(problem, rows[held], mine, state, series)
                found = put(each(some, lambda x: np.empty((len(rows), *x.shape[1:]))), held, some)
                redo[held] = ~good
        if found is None:
            return state.neighbourhoods.reduce(problem, rows, own)
        if redo.any():
            mine = None if own is None else own[redo]
            put(found, redo, state.neighbourhoods.reduce(problem, rows[redo], mine))
        return found

    def _by_modes(
        self, problem: Problem, rows: Array, own: Array | None, state: _State, series: _Series
    ) -> tuple[Partial, Array]:
        """The answers for rows in the box, and a mask of the good ones."""
        box, error = series.box, series.error
        waves = fields(problem, box, series.modes, bounds.cutoff(series.epsilon))
        packed = to_points(box.angles(rows), waves, series.epsilon, self._threads())
        real = [part for field in packed for part in (field.real, field.imag)]
        total = real[0]
        wanted = {Reduction.LOG_SUM: 0, Reduction.LAPLACE: 1, Reduction.MEAN: problem.d}[problem.reduction]
        others = real[1 : 1 + wanted]
        if own is not None or series.outside is not None:
            total, others = total.copy(), [x.copy() for x in others]
        if own is not None:
            take_off(problem, rows, own, state.columns, series.inside, total, others)
        if series.outside is not None and series.weight:  # farther away they are below the error
            nats = max(0.0, math.log(10.0 * series.weight) - math.log(error))
            reach = math.sqrt(2.0 * (nats + math.log(2.0 + nats)))  # times 1 + r²/2, too
            near = np.flatnonzero(~box.holds(rows, np.where(series.beyond, reach, -np.inf)))
            mine = None if own is None else own[near]
            if len(near):
                more = spread(series.outside, problem, rows[near], mine, self._threads(), least(problem, error))
                add(problem, more, near, total, others)
        return finish(problem, total, others, error)
