"""The mean and the covariance of a fitted density.

A mixture's covariance is that of its kernels' places, and the kernels' own: v c² H of one that is c bandwidths wide. v
is 1 for the Gaussian, ∫ r^(d+1) K / (d ∫ r^(d−1) K) for another kernel, and 0 for Laplace's. In other coordinates a
column's mean is by quadrature of its marginal density.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from .density import radial_variance
from .mapped import leaves
from .mixture import marginal
from .regions import on_cells


def mean(fitted: Any) -> Array:
    return _sums(fitted, False)[0]


def covariance(fitted: Any) -> Array:
    return _sums(fitted, True)[1]


def _sums(fitted: Any, both: bool) -> tuple[Array, Array]:
    """The mean (d,), and if wanted the covariance (d, d)."""
    if fitted.request.negative != "keep":
        raise ValueError(f"negative={fitted.request.negative!r} has no moments in closed form; pass 'keep'")
    if parts := leaves(fitted):
        shares = np.exp([part.log_share for part in parts])
        means, covariances = map(np.stack, zip(*(_sums(part.fitted, both) for part in parts)))
        middle = shares @ means / shares.sum()
        covariances = covariances + (means - middle)[:, :, None] * (means - middle)[:, None, :]
        return middle, np.einsum("e,eij->ij", shares / shares.sum(), covariances)
    d = fitted.problem.d
    if fitted.coordinates is not None:
        if both and d > 1:
            raise ValueError(
                f"in coordinates {fitted.coordinates} a covariance has no closed form; take numpy.cov(density.sample("
                "100_000, random_state=0).T), or the variance of each marginal(j), which is by quadrature"
            )
        found = [_column(fitted if d == 1 else marginal(fitted, [j])) for j in range(d)]
        middle, variances = np.array(found).T
        return middle, np.diag(variances)
    points, log_weights, scales, centre = fitted.on_host
    weights, stretch = np.exp(log_weights), fitted.bandwidth.stretch
    weights /= weights.sum()
    middle = weights @ points
    own = 0.0 if fitted.request.method == "laplace" else radial_variance(fitted.request.kernel, d)
    spread = (points - middle).T @ ((points - middle) * weights[:, None]) + own * (weights @ scales**2) * np.eye(d)
    return centre + stretch(middle[None, :])[0], stretch(stretch(spread).T)


def _column(fitted: Any) -> tuple[float, float]:
    """The mean and the variance in one dimension, by quadrature."""
    found = None if fitted.coordinates.circular[0] else on_cells(fitted)
    if found is None:
        raise ValueError(
            f"{fitted.coordinates} has no mean by quadrature: its samples are scattered, or go round a circle, where "
            "it depends on the cut; take the mean of sample(n), of angles that of their sines and cosines"
        )
    x, _, masses = found
    middle = x @ masses / masses.sum()
    return float(middle), float((x - middle) ** 2 @ masses / masses.sum())
