"""How much of a signed density is below zero: ∫ max(−p̂, 0) of the Laplace estimate.

Its integral is 1, so that of its positive part is 1 + that mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device

from ..arrays import detached, to_host
from ..engine.outliers import radii
from ..protocol import Columns, Partial


@dataclass(frozen=True)
class NegativeMass:
    """∫ max(−p̂, 0), and its standard error: 0 where it was found by quadrature, to some 4e-4 of itself."""

    mass: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.mass:.3g}" + (f" ± {self.standard_error:.1g}" if self.standard_error else "")


def negative_mass(columns: Columns, reduce: Callable[..., Partial]) -> NegativeMass:
    """Return the negative mass of the Laplace estimate of whitened columns; the same columns give the same number.

    In one dimension by the midpoint rule on cells of a sixteenth of a bandwidth, near samples. In more, or where
    samples lie so scattered that these would be too many, from 8192 draws y of the kernel density p of the same
    columns, with a seed that is fixed: the mass is the mean of max(−p̂(y)/p(y), 0). ``reduce`` takes rows (k, d), with
    their ``distances`` and ``extent``, to the sums of LAPLACE.
    """
    points, log_weights = (to_host(detached(x)) for x in (columns.points, columns.log_weights))
    d, near = points.shape[1], np.empty(0)
    if d == 1:
        near = np.unique(np.floor(points[log_weights > -math.inf, 0]))  # cells of a bandwidth that have samples
        if len(near) <= 1024:
            near = np.unique(near[:, None] + np.arange(-8, 9))  # beyond eight bandwidths nothing is left
    by_quadrature = d == 1 and len(near) <= 1024
    if by_quadrature:
        rows = (near[:, None] + (np.arange(16) + 0.5) / 16).reshape(-1, 1)
    else:
        rng = np.random.default_rng(0)
        reached = np.cumsum(np.exp(log_weights))
        which = np.searchsorted(reached, reached[-1] * rng.random(1 << 13), side="right")
        rows = points[which] + rng.normal(size=(1 << 13, d))
    xp = array_namespace(columns.points)
    there = xp.asarray(rows, device=device(columns.points))
    distances = radii(there)
    sums = reduce(there, distances=distances, extent=float(xp.max(distances)))
    sign, log_l, log_m = (to_host(detached(x)) for x in (sums.sign, sums.log_magnitude, sums.log_sum))
    below = sign < 0
    if by_quadrature:
        return NegativeMass(float(np.exp(log_l[below]).sum() / (16 * math.sqrt(2.0 * math.pi))), 0.0)
    share = np.where(below, np.exp(log_l - log_m), 0.0)  # −L/M where L is negative
    share *= (2.0 + d) / (1.0 - share)  # M + L is (2 + d) times the KDE's sum
    return NegativeMass(float(share.mean()), float(share.std() / math.sqrt(len(share))))
