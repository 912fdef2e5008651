"""The Fourier backend's implementation of the protocol: transforms, and exact sums for the rows that those leave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import finufft
import numpy as np

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import check_threads, checkpoint, cpu_threads, map_threads
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, price
from .modes import Array, Box, fields
from .series import Fourier, Series, State
from .transforms import to_modes, to_points


class FourierBackend(Fourier):
    """Fourier series in up to three dimensions, and exact sums over neighbourhoods where those do not reach.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use.
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    ways = price.CPU

    def __init__(self, threads: int | None = None, always: bool = False) -> None:
        super().__init__(always)
        self.threads = check_threads(threads)

    def probe(self, device: str) -> Support:
        return Support(device == "cpu", f"finufft {finufft.__version__} runs on the CPU")

    @np.errstate(all="ignore")
    def prepare(self, problem: Problem, columns: Columns) -> State:
        directly = functools.partial(Neighbours(columns).reduce, spread=self.spread)
        return State(columns, self.transform(problem, columns), directly)

    def to_modes(self, box: Box, points: Array, weights: Array, epsilon: float) -> Array:
        return to_modes(box.angles(points), weights, box.shape, epsilon, self.threads or cpu_threads())

    reduce = np.errstate(all="ignore")(Fourier.reduce)

    def evaluate(self, problem: Problem, series: Series, rows: Array) -> tuple[Array, list[Array]]:
        waves = fields(problem, series.box, series.modes, bounds.cutoff(series.epsilon))
        packed = to_points(series.box.angles(rows), waves, series.epsilon, self.threads or cpu_threads())
        total, *others = [part for field in packed for part in (field.real, field.imag)]
        wanted = {Reduction.LOG_SUM: 0, Reduction.LAPLACE: 1, Reduction.MEAN: problem.d}[problem.reduction]
        return total, others[:wanted]

    def spread(self, task: Callable[[Any], Partial], parts: Sequence[Any]) -> list[Partial]:
        def one(part: Any) -> Partial:
            checkpoint()
            return task(part)

        return map_threads(one, parts, self.threads or cpu_threads())
