"""The nonuniform transforms, by finufft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import finufft
import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import map_threads

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
        plan = _plan(1, shape, epsilon, 1)
        plan.setpts(*[a[here] for a in angles])
        return plan.execute(coefficients[here].astype(np.complex128))

    first, *others = map_threads(task, range(blocks), blocks)
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
        return _evaluate(angles, fields, epsilon, threads if blocks else 1)
    ends = [count * k // blocks for k in range(blocks + 1)]
    found = [np.empty(count, np.complex128) for _ in fields]

    def task(k: int) -> None:
        here = slice(ends[k], ends[k + 1])
        for whole, part in zip(found, _evaluate([a[here] for a in angles], fields, epsilon, 1)):
            whole[here] = part

    map_threads(task, range(blocks), blocks)
    return found


def _evaluate(angles: Sequence[Array], fields: Sequence[Array], epsilon: float, threads: int) -> list[Array]:
    plan = _plan(2, fields[0].shape, epsilon, threads)
    plan.setpts(*angles)
    return [plan.execute(field) for field in fields]


def _plan(kind: int, shape: tuple[int, ...], epsilon: float, threads: int) -> Any:
    """Make a plan; kind 1 to modes, 2 to points."""
    refinement = 2.0
    if len(shape) == 3 and COARSE_SLACK * epsilon >= COARSE_FINEST:
        refinement, epsilon = COARSE, COARSE_SLACK * epsilon
    sign = -1 if kind == 1 else 1
    return finufft.Plan(kind, shape, eps=epsilon, isign=sign, nthreads=threads, upsampfac=refinement)
