"""The nonuniform transforms, by finufft."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import finufft
import numpy as np

from sdkde_core.plugin import in_child, map_threads

from .bounds import requested
from .modes import Array
from .price import blocks_to_modes, blocks_to_points

#: Transforms of millions of points take seconds, so that none runs in the calling thread: see :func:`map_threads`. Nor
#: does a forked child's calling thread have what finufft's OpenMP left there.
_inside, _lost = list[None](), list[None]()  # threads within finufft, now and at a fork: its locks stay locked there
in_child(lambda: _lost.extend(_inside))


def to_modes(angles: Sequence[Array], weights: Array, shape: tuple[int, ...], epsilon: float, threads: int) -> Array:
    """Return Σ_j w_j exp(−i k·θ_j) for the modes k of ``shape``, the middle one 0.

    Every thread transforms some of the points, and the modes are added in order: several threads of one transform would
    spread onto the same grid in an order of their own, with other bits each time.
    """
    count = len(weights)
    blocks = blocks_to_modes(count, shape, threads)
    parts = [slice(count * k // blocks, count * (k + 1) // blocks) for k in range(blocks)]

    def task(here: slice) -> Array:
        with _finufft():
            plan = _plan(1, shape, epsilon, 1)
            plan.setpts(*[a[here] for a in angles])
            found: Array = plan.execute(weights[here].astype(np.complex128))
            del plan
        return found

    return functools.reduce(operator.iadd, map_threads(task, parts, blocks, apart=True))


def to_points(angles: Sequence[Array], fields: Sequence[Array], epsilon: float, threads: int) -> list[Array]:
    """Return Σ_k f_k exp(i k·θ) at every point, for each array of modes; threads as :func:`blocks_to_points` says."""
    shape, count = fields[0].shape, len(angles[0])
    blocks, inside = blocks_to_points(count, shape, threads)
    parts = [slice(count * k // blocks, count * (k + 1) // blocks) for k in range(blocks)]
    found = [np.empty(count, np.complex128) for _ in fields]

    def task(here: slice) -> None:
        with _finufft():
            plan = _plan(2, shape, epsilon, inside)
            plan.setpts(*[a[here] for a in angles])
            for whole, field in zip(found, fields):
                plan.execute(field, out=whole[here])
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
    finer, epsilon = requested(epsilon, len(shape) if known else 2)
    sign = -1 if kind == 1 else 1
    # It would warn on standard error, in every call, of more threads than OMP_NUM_THREADS says.
    return finufft.Plan(kind, shape, eps=epsilon, isign=sign, nthreads=threads, upsampfac=finer, showwarn=0)
