"""The nonuniform transforms, by finufft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import finufft
import numpy as np
from numpy.typing import NDArray

__all__ = ["to_modes", "to_points"]

Array = NDArray[Any]


def to_modes(angles: Sequence[Array], coefficients: Array, shape: tuple[int, ...], epsilon: float) -> Array:
    """Return Σ_j c_j exp(−i k·θ_j) for the modes k of ``shape``, the middle one 0.

    On one thread: several would spread onto the same grid in an order of their own, with other bits each time.
    """
    plan = finufft.Plan(1, shape, eps=epsilon, isign=-1, nthreads=1)
    plan.setpts(*angles)
    return plan.execute(coefficients.astype(np.complex128))


def to_points(angles: Sequence[Array], fields: Sequence[Array], epsilon: float, threads: int) -> list[Array]:
    """Return Σ_k f_k exp(i k·θ) at every point, for each array of modes; every point is one thread's, in one order."""
    plan = finufft.Plan(2, fields[0].shape, eps=epsilon, isign=1, nthreads=threads)
    plan.setpts(*angles)
    return [plan.execute(field) for field in fields]
