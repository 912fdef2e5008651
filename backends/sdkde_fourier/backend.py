"""The Fourier backend's implementation of the protocol: transforms, and exact sums for the rows that those leave."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import finufft
import numpy as np

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import check_threads, cpu_threads, in_child, map_threads
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, info
from .modes import Array, Box, fields
from .series import Fourier, Series, State

#: Transforms of millions of points take seconds, so that none runs in the calling thread: see :func:`map_threads`. Nor
#: does a forked child's calling thread have what finufft's OpenMP left there.
_inside, _lost = list[None](), list[None]()  # threads within finufft, now and at a fork: its locks stay locked there
in_child(lambda: _lost.extend(_inside))


class FourierBackend(Fourier):
    """Fourier series in up to three dimensions, and exact sums over neighbourhoods where those do not reach.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use.
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    ways = info.CPU

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
        return map_threads(task, parts, self.threads or cpu_threads())


def to_modes(angles: Sequence[Array], weights: Array, shape: tuple[int, ...], epsilon: float, threads: int) -> Array:
    """Return Σ_j w_j exp(−i k·θ_j) for the modes k of ``shape``, the middle one 0.

    Every thread transforms some of the points, and the modes are added in order: several threads of one transform would
    spread onto the same grid in an order of their own, with other bits each time.
    """
    count = len(weights)
    blocks = info.blocks_to_modes(count, shape, threads)
    parts = [slice(count * k // blocks, count * (k + 1) // blocks) for k in range(blocks)]

    def task(here: slice) -> Array:
        with _finufft():
            plan = _plan(1, shape, epsilon, 1)
            plan.setpts(*[a[here] for a in angles])
            found: Array = plan.execute(weights[here].astype(np.complex128))
            del plan
        return found

    return functools.reduce(operator.iadd, map_threads(task, parts, blocks, apart=True))


def to_points(angles: Sequence[Array], waves: Sequence[Array], epsilon: float, threads: int) -> list[Array]:
    """Return Σ_k f_k exp(i k·θ) at every point, for each array of modes; threads by ``info.blocks_to_points``."""
    shape, count = waves[0].shape, len(angles[0])
    blocks, inside = info.blocks_to_points(count, shape, threads)
    parts = [slice(count * k // blocks, count * (k + 1) // blocks) for k in range(blocks)]
    found = [np.empty(count, np.complex128) for _ in waves]

    def task(here: slice) -> None:
        with _finufft():
            plan = _plan(2, shape, epsilon, inside)
            plan.setpts(*[a[here] for a in angles])
            for whole, wave in zip(found, waves):
                plan.execute(wave, out=whole[here])
            del plan

    map_threads(task, parts, blocks, apart=True)
    return found


@contextmanager
def _finufft() -> Iterator[None]:
    """Raise where calls would never return, and make MemoryErrors of finufft's that are a lack of memory."""
    if _lost:
        raise RuntimeError(
            "finufft cannot be used in this process: it was forked while another thread was inside, whose locks stay "
            'locked here; start processes by the method "spawn" or "forkserver" of multiprocessing'
        )
    _inside.append(None)
    try:
        yield
    except RuntimeError as error:
        if "malloc" in str(error):
            raise MemoryError(f"a Fourier transform: {error}; pass another backend, or fewer threads") from error
        raise
    finally:
        _inside.pop()


def _plan(kind: int, shape: tuple[int, ...], epsilon: float, threads: int) -> Any:
    known = tuple(map(int, finufft.__version__.split(".")[:2])) >= (2, 5)  # older ones have no grid 1.5 times as fine
    finer, epsilon = bounds.requested(epsilon, len(shape) if known else 2)
    sign = -1 if kind == 1 else 1
    # It would warn on standard error, in every call, of more threads than OMP_NUM_THREADS says.
    return finufft.Plan(kind, shape, eps=epsilon, isign=sign, nthreads=threads, upsampfac=finer, showwarn=0)
