"""The Laplace estimate's gradient, and its negative mass.

With K = 1 + d/2 − ½ r² the estimate is L = Σ_j w_j φ_j K_j. Its derivative by the row u is Σ_j w_j φ_j (u_j − u)
(K_j + 1), as that of φ_j is φ_j (u_j − u), and that of K_j is u_j − u. No backend has this sum, which is seldom asked
for. The integral of L is 1, so that of its positive part is 1 + ∫ max(−L, 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import device

from ..arrays import array_namespace, detached, to_host
from ..choice.hardware import cpu_threads
from ..engine.exact import BLOCK, terms_of
from ..engine.merge import take_columns
from ..engine.outliers import radii
from ..engine.threads import checkpoint, map_threads
from ..protocol import Columns, Partial


def laplace_slope(queries: Any, columns: Columns, signed: bool = False) -> Any:
    """Return ∇ log |p̂| of the Laplace estimate at whitened queries, (m, d); NaN where p̂ < 0, unless ``signed``."""
    xp = array_namespace(queries)
    columns = take_columns(columns, xp.nonzero(columns.log_weights > -math.inf)[0])
    (m, d), n = queries.shape, columns.points.shape[0]
    width = max(1, min(n, BLOCK // d))
    height = max(1, BLOCK // (width * d))

    def strip(start: int) -> Any:
        rows = queries[start : start + height, :]
        total, slope, top = xp.zeros_like(rows[:, 0]), xp.zeros_like(rows), xp.full_like(rows[:, 0], -math.inf)
        with np.errstate(all="ignore"):
            for first in range(0, n, width):
                checkpoint()
                over = slice(first, first + width)
                terms = terms_of(rows, Columns(columns.points[over, :], columns.log_weights[over]))
                share = terms.phi * (1.0 + 0.5 * d + terms.exponent)
                both = share + terms.phi
                there = xp.sum(both[:, :, None] * terms.delta, axis=1) + xp.sum(both, axis=1)[:, None] * terms.away
                higher = xp.maximum(top, terms.top)
                before, now = xp.exp(top - higher), xp.exp(terms.top - higher)
                total = before * total + now * xp.sum(share, axis=1)
                slope, top = before[:, None] * slope + now[:, None] * there, higher
            slope = slope / total[:, None]
            return slope if signed else xp.where((total < 0)[:, None], xp.full_like(slope, math.nan), slope)

    strips = map_threads(strip, range(0, max(m, 1), height), cpu_threads() if isinstance(queries, np.ndarray) else 1)
    return xp.concat(strips, axis=0) if len(strips) > 1 else strips[0]


@dataclass(frozen=True)
class NegativeMass:
    """∫ max(−p̂, 0), and its standard error: 0 where it was found by quadrature, to some 4e-4 of itself."""

    mass: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.mass:.3g}" + (f" ± {self.standard_error:.1g}" if self.standard_error else "")


def negative_mass(columns: Columns, reduce: Callable[..., Partial]) -> NegativeMass:
    """Return the negative mass of the Laplace estimate of whitened columns, which ``reduce`` sums.

    In one dimension by the midpoint rule on cells of a sixteenth of a bandwidth, near samples. In more, or where these
    would be too many, it is the mean of max(−p̂(y)/p(y), 0) over 8192 draws y of the kernel density p, by a fixed seed.
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
    sums = reduce(there, extent=float(xp.max(radii(there))))
    sign, log_l, log_m = (to_host(detached(x)) for x in (sums.sign, sums.log_magnitude, sums.log_sum))
    below = sign < 0
    if by_quadrature:
        return NegativeMass(float(np.exp(log_l[below]).sum() / (16 * math.sqrt(2.0 * math.pi))), 0.0)
    share = np.where(below, np.exp(log_l - log_m), 0.0)  # −L/M where L is negative
    share *= (2.0 + d) / (1.0 - share)  # M + L is (2 + d) times the KDE's sum
    return NegativeMass(float(share.mean()), float(share.std() / math.sqrt(len(share))))
