"""The nonuniform transforms, by finufft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import finufft
import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import Unforkable, map_threads

__all__ = ["to_modes", "to_points"]

Array = NDArray[Any]

#: In three dimensions the size of finufft's grid decides the time: it is COARSE times as fine as the modes per
#: dimension, rather than twice. At the same tolerance that is more accurate at the low modes, which make up most of a
#: Gaussian: so COARSE_SLACK times the tolerance is asked for, where that is not below COARSE_FINEST, what the widest
#: kernel gives.
COARSE, COARSE_SLACK, COARSE_FINEST = 1.5, 10.0, 1e-12

#: Fewest points of a block that a thread transforms on its own, and most modes, if more than the points.
BLOCK, MODES = 1 << 15, 1 << 22

#: Fewest points of a block that goes to modes on its own, and most modes for each.
SPREAD, MODES_EACH = 1 << 17, 16

#: Transforms of millions of points take seconds, so that none runs in the calling thread: see :func:`map_threads`. Nor
#: does a forked child's calling thread have what finufft's OpenMP left there.
_finufft = Unforkable("finufft")


def to_modes(
    angles: Sequence[Array], coefficients: Array, shape: tuple[int, ...], epsilon: float, threads: int
) -> Array:
    """Return Σ_j c_j exp(−i k·θ_j) for the modes k of ``shape``, the middle one 0.

    Every thread transforms some of the points, and the modes are added in order: several threads of one transform would
    spread onto the same grid in an order of their own, with other bits each time.
    """
    count, modes = len(coefficients), math.prod(shape)
    blocks = max(1, min(threads, count // SPREAD, MODES_EACH * count // modes))
    ends = [count * k // blocks for k in range(blocks + 1)]

    def task(k: int) -> Array:
        here = slice(ends[k], ends[k + 1])
        part = coefficients[here].astype(np.complex128)
        return _transform(1, [a[here] for a in angles], shape, [part], epsilon, 1)[0]

    first, *others = map_threads(task, range(blocks), blocks, apart=True)
    for other in others:
        first += other
    return first


def to_points(angles: Sequence[Array], fields: Sequence[Array], epsilon: float, threads: int) -> list[Array]:
    """Return Σ_k f_k exp(i k·θ) at every point, for each array of modes.

    Every thread transforms some of the points, on a grid of its own; where that would be large, all work on one.
    """
    shape, count = fields[0].shape, len(angles[0])
    blocks = min(threads, count // BLOCK) if math.prod(shape) <= max(count, MODES) else 1
    if blocks < 2:
        each = threads if blocks else 1
        return map_threads(lambda x: _transform(2, x, shape, fields, epsilon, each), [angles], 1, apart=True)[0]
    ends = [count * k // blocks for k in range(blocks + 1)]
    found = [np.empty(count, np.complex128) for _ in fields]

    def task(k: int) -> None:
        here = slice(ends[k], ends[k + 1])
        for whole, part in zip(found, _transform(2, [a[here] for a in angles], shape, fields, epsilon, 1)):
            whole[here] = part

    map_threads(task, range(blocks), blocks, apart=True)
    return found


def _transform(
    kind: int, angles: Sequence[Array], shape: tuple[int, ...], given: Sequence[Array], epsilon: float, threads: int
) -> list[Array]:
    """Transform every one of ``given``; kind 1 to modes, 2 to points."""
    refinement = 2.0
    if len(shape) == 3 and COARSE_SLACK * epsilon >= COARSE_FINEST:
        refinement, epsilon = COARSE, COARSE_SLACK * epsilon
    sign = -1 if kind == 1 else 1
    with _finufft:
        plan: Any = finufft.Plan(kind, shape, eps=epsilon, isign=sign, nthreads=threads, upsampfac=refinement)
        plan.setpts(*angles)
        found = [plan.execute(one) for one in given]
        del plan
    return found
