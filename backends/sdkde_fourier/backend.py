"""The Fourier backend's implementation of the protocol: transforms, and exact sums for the rows that those leave."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import check_threads, cpu_threads
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, price
from .duplicates import Distinct, spread
from .memory import ROWS
from .modes import choose_box, density_bound, fields
from .series import Fourier, Series, State
from .transforms import to_modes, to_points

Array = NDArray[Any]


class FourierBackend(Fourier):
    """Fourier series in up to three dimensions, and exact sums over neighbourhoods where those do not reach.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use.
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    rows_at_once = ROWS

    def __init__(self, threads: int | None = None, always: bool = False) -> None:
        super().__init__(always)
        self.threads = check_threads(threads)

    def probe(self, device: str) -> Support:
        """finufft runs on any CPU."""
        import finufft

        return Support(device == "cpu", f"finufft {finufft.__version__} runs on the CPU")

    def prepare(self, problem: Problem, columns: Columns) -> State:
        """Transform the columns to modes, if that is faster than direct sums."""
        with np.errstate(all="ignore"):
            series = self._transform(problem, columns) if np.isfinite(columns.points).all() else None
            return State(columns, series, Distinct(columns, self._threads()).reduce)

    def _threads(self) -> int:
        return self.threads or cpu_threads()

    def _transform(self, problem: Problem, columns: Columns) -> Series | None:
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
            return Series(box, modes, epsilon, error)
        members = np.flatnonzero(~inside)
        others = points[members]
        beyond = ((others < box.low) | (others > box.high)).any(axis=0)
        outside = Neighbours(Columns(others, log_weights[members]), members)
        return Series(box, modes, epsilon, error, inside, outside, beyond, float(weights[members].sum()))

    def _pays(self, problem: Problem, columns: Columns, seconds: float) -> bool:
        """Whether modes at that price are faster than direct sums over neighbours."""
        if self.always or not price.looks(problem, seconds):
            return True
        step = max(1, len(columns.points) // (1 << 13))
        direct = price.direct_seconds(price.CPU, problem, columns.points[::step], columns.log_weights[::step])
        return direct >= seconds

    def reduce(self, problem: Problem, queries: Array | None, state: State, own_offset: int = 0) -> Partial:
        """Sum by modes, then directly the rows whose sum is too small against the bound on its error."""
        with np.errstate(all="ignore"):
            return super().reduce(problem, queries, state, own_offset)

    def evaluate(self, problem: Problem, series: Series, rows: Array) -> tuple[Array, list[Array]]:
        waves = fields(problem, series.box, series.modes, bounds.cutoff(series.epsilon))
        packed = to_points(series.box.angles(rows), waves, series.epsilon, self._threads())
        total, *others = [part for field in packed for part in (field.real, field.imag)]
        return total, others[
            : {Reduction.LOG_SUM: 0, Reduction.LAPLACE: 1, Reduction.MEAN: problem.d}[problem.reduction]
        ]

    def sum_near(
        self, near: Neighbours, problem: Problem, rows: Array, own: Array | None, least: float = -math.inf
    ) -> Partial:
        return spread(near, problem, rows, own, self._threads(), least)
