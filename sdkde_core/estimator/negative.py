"""How much of a signed density is below zero: ∫ max(−p̂, 0) of the Laplace estimate.

Its integral is 1, so that of its positive part is 1 + that mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from ..arrays import detached, to_host
from ..engine.outliers import radii
from ..protocol import Columns, Partial

__all__ = ["NegativeMass", "negative_mass"]

Array = NDArray[np.float64]

#: Points that are drawn, at most; and nodes of a quadrature.
DRAWS, NODES = 1 << 13, 1 << 14

#: Nodes in a bandwidth, and bandwidths from the nearest sample beyond which nothing is left.
PER_BANDWIDTH, REACH = 16, 8


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
    samples lie so scattered that these would be too many, from draws y of the kernel density p of the same columns,
    with a seed that is fixed: the mass is the mean of max(−p̂(y)/p(y), 0).

    Parameters
    ----------
    columns : Columns
    reduce : callable
        Of rows (k, d), with their ``distances`` and ``extent``, to the sums of LAPLACE.
    """
    points, log_weights = (to_host(detached(x)) for x in (columns.points, columns.log_weights))
    nodes = _nodes(points[log_weights > -math.inf, 0]) if points.shape[1] == 1 else None
    rows = _drawn(points, log_weights) if nodes is None else nodes[:, None]
    xp = array_namespace(columns.points)
    there = xp.asarray(rows, device=device(columns.points))
    distances = radii(there)
    sums = reduce(there, distances=distances, extent=float(xp.max(distances)))
    sign, log_l, log_m = (to_host(detached(x)) for x in (sums.sign, sums.log_magnitude, sums.log_sum))
    below = sign < 0
    if nodes is not None:
        return NegativeMass(float(np.exp(log_l[below]).sum() / (PER_BANDWIDTH * math.sqrt(2.0 * math.pi))), 0.0)
    share = np.where(
        below, np.exp(log_l - log_m), 0.0
    )  # −L/M where L is negative; M + L is (2 + d) times the KDE's sum
    share *= (2.0 + points.shape[1]) / (1.0 - share)
    return NegativeMass(float(share.mean()), float(share.std() / math.sqrt(len(share))))


def _nodes(u: Array) -> Array | None:
    """The middles of the cells that are near samples (n,), in order; None where they are too many."""
    occupied = np.unique(np.floor(u))
    if len(occupied) > NODES // PER_BANDWIDTH:
        return None
    near = np.unique(occupied[:, None] + np.arange(-REACH, REACH + 1))
    if len(near) > NODES // PER_BANDWIDTH:
        return None
    return (near[:, None] + (np.arange(PER_BANDWIDTH) + 0.5) / PER_BANDWIDTH).ravel()


def _drawn(points: Array, log_weights: Array) -> Array:
    """Draws (k, d) of the kernel density."""
    rng = np.random.default_rng(0)
    reached = np.cumsum(np.exp(log_weights))
    which = np.searchsorted(reached, reached[-1] * rng.random(DRAWS), side="right")
    return points[which] + rng.normal(size=(DRAWS, points.shape[1]))
