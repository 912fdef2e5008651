"""The nonuniform transforms, by finufft."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import finufft
import numpy as np

from sdkde_core.plugin import Unforkable, claim_memory, map_threads

from . import memory
from .bounds import requested
from .modes import Array

#: Transforms of millions of points take seconds, so that none runs in the calling thread: see :func:`map_threads`. Nor
#: does a forked child's calling thread have what finufft's OpenMP left there.
_finufft = Unforkable("finufft")


def to_modes(
    angles: Sequence[Array], coefficients: Array, shape: tuple[int, ...], epsilon: float, threads: int
) -> Array:
    """Return Σ_j c_j exp(−i k·θ_j) for the modes k of ``shape``, the middle one 0.

    Every thread transforms some of the points, and the modes are added in order: several threads of one transform would
    spread onto the same grid in an order of their own, with other bits each time. Where memory is short fewer work side
    by side.
    """
    count = len(coefficients)
    blocks = memory.blocks_to_modes(count, shape, threads)
    ends = [count * k // blocks for k in range(blocks + 1)]

    def task(k: int) -> Array:
        here = slice(ends[k], ends[k + 1])
        with _finufft:
            plan = _plan(1, shape, epsilon, 1)
            plan.setpts(*[a[here] for a in angles])
            found: Array = plan.execute(coefficients[here].astype(np.complex128))
            del plan
        return found

    most = -(-count // blocks)
    extents = _extents(angles, memory.parts(most, shape, epsilon))
    each = memory.spreading(most, shape, epsilon, extents)
    with _room(shape, each, blocks) as together:
        groups = [range(start, min(start + together, blocks)) for start in range(0, blocks, together)]
        found = itertools.chain.from_iterable(map_threads(task, group, together, apart=True) for group in groups)
        return functools.reduce(operator.iadd, found)


def _extents(angles: Sequence[Array], parts: int) -> list[float]:
    """Shares of the period that points take, by dimension; in the first, the widest of ``parts`` equal parts."""
    first = np.sort(angles[0][:: max(1, len(angles[0]) // (1 << 12))])
    first[0], first[-1] = angles[0].min(), angles[0].max()
    ends = np.linspace(0, len(first) - 1, min(parts, len(first)) + 1).astype(int)
    return [float(x) / (2.0 * math.pi) for x in (np.diff(first[ends]).max(), *map(np.ptp, angles[1:]))]


def to_points(angles: Sequence[Array], fields: Sequence[Array], epsilon: float, threads: int) -> list[Array]:
    """Return Σ_k f_k exp(i k·θ) at every point, for each array of modes.

    Every thread transforms some of the points, on a grid of its own; where that would be large, all work on one. Where
    memory is short fewer work side by side.
    """
    shape, count = fields[0].shape, len(angles[0])
    blocks, inside = memory.blocks_to_points(count, shape, threads)
    ends = [count * k // blocks for k in range(blocks + 1)]
    found = [np.empty(count, np.complex128) for _ in fields]

    def task(k: int) -> None:
        here = slice(ends[k], ends[k + 1])
        with _finufft:
            plan = _plan(2, shape, epsilon, inside)
            plan.setpts(*[a[here] for a in angles])
            for whole, field in zip(found, fields):
                plan.execute(field, out=whole[here])
            del plan

    each = memory.interpolation(-(-count // blocks), shape, epsilon)
    with _room(shape, each, blocks, inside) as together:
        map_threads(task, range(blocks), together, apart=True)
    return found


def _room(shape: tuple[int, ...], each: int, blocks: int, inside: int = 1) -> AbstractContextManager[int]:
    """Claim the memory of transforms, each on ``inside`` threads of its own; yields how many may run side by side.

    finufft ends the process where memory does not suffice or a thread does not start, wherever it notices in a thread.
    """
    purpose = f"a Fourier transform of {' × '.join(map(str, shape))} modes"
    mend = "pass another backend, or raise that limit"
    if inside > 1:
        return claim_memory(purpose, each, tasks=inside, fewest=inside, mend=f"{mend}, or pass fewer threads")
    return claim_memory(purpose, each=each, tasks=blocks, mend=mend)


def _plan(kind: int, shape: tuple[int, ...], epsilon: float, threads: int) -> Any:
    finer, epsilon = requested(epsilon, len(shape))
    sign = -1 if kind == 1 else 1
    return finufft.Plan(kind, shape, eps=epsilon, isign=sign, nthreads=threads, upsampfac=finer)
