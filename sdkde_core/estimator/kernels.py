"""The kernels' normalising constants, and draws of them.

A density of d dimensions is Σ_j w_j K(r_j) / (det L · ∫K(‖u‖) du). With S the surface of the unit sphere,
2 π^(d/2) / Γ(d/2), that integral is S ∫ r^(d−1) K(r) dr; of the Gaussian it is (2π)^(d/2). The kernels are those of
scikit-learn's ``KernelDensity``. Its constant of the cosine is wrong in an even number of dimensions, where its sum
lacks a term: in the plane its density integrates to 0.36, in four dimensions it is NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bandwidth.matrix import Bandwidth


def log_constant(kernel: str, bandwidth: Bandwidth) -> Any:
    """Return what a log sum is raised by: log of 1 / (det L · ∫K), a float; a () tensor where the factor is one."""
    return -log_norm(kernel, bandwidth.d) - bandwidth.log_determinant


@functools.lru_cache
def log_norm(kernel: str, d: int) -> float:
    """Return log ∫K(‖u‖) du over d dimensions, of one of ``protocol.KERNELS``, K(0) = 1."""
    if kernel == "gaussian":
        return 0.5 * d * math.log(2.0 * math.pi)
    radial = {
        "tophat": lambda: -math.log(d),
        "epanechnikov": lambda: math.log(2.0 / d / (d + 2)),
        "exponential": lambda: math.lgamma(d),
        "linear": lambda: -math.log(d) - math.log(d + 1),
        "cosine": lambda: _cosine(d),
    }
    return math.log(2.0) + 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d) + radial[kernel]()


def _cosine(d: int) -> float:
    """log ∫₀¹ r^(d−1) cos(π r / 2) dr.

    As cos(π r / 2) = sin(π (1 − r) / 2), a power series in 1 − r, it is Σ_k (−1)^k (π/2)^(2k+1) (d−1)! / (d+2k+1)!.
    Each term is at most a fifth of the one before. Integration by parts, in steps of 2, loses all digits in 20
    dimensions.
    """
    total, term, k = 0.0, 1.0, 0
    while abs(term) > 1e-17:
        total += term
        k += 2
        term *= -((0.5 * math.pi) ** 2) / (d + k) / (d + k + 1)
    return math.log(total) + math.log(0.5 * math.pi / d / (d + 1))


def kernel_draws(kernel: str, n: int, d: int, rng: Any) -> NDArray[np.float64]:
    """Return draws (n, d) of the density that is K up to its constant; ``rng`` is a Generator or a RandomState.

    In a uniform direction, and at a radius whose density is r^(d−1) K(r).
    """
    normal = rng.standard_normal((n, d))
    if kernel == "gaussian":
        return normal
    radius = {
        "tophat": lambda: rng.beta(d, 1, n),
        "epanechnikov": lambda: np.sqrt(rng.beta(0.5 * d, 2, n)),
        "exponential": lambda: rng.gamma(d, size=n),
        "linear": lambda: rng.beta(d, 2, n),
        "cosine": lambda: _cosine_radii(n, d, rng),
    }
    return normal * (radius[kernel]() / np.linalg.vector_norm(normal, axis=1))[:, None]


def _cosine_radii(n: int, d: int, rng: Any) -> NDArray[np.float64]:
    """Radii by rejection from the linear kernel's: with z = π (1 − r) / 2, cos(π r / 2) / (1 − r) ∝ sin z / z ≥ 2/π."""
    radii = rng.beta(d, 2, n)
    new = np.arange(n)
    while new.size:
        z = 0.5 * math.pi * (1.0 - radii[new])
        new = new[rng.uniform(size=new.size) * z >= np.sin(z)]
        radii[new] = rng.beta(d, 2, new.size)
    return radii
