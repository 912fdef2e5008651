"""From sums to the density: kernels' constants and draws, logs, and the warning of a signed density.

A density of d dimensions is Σ_j w_j K(r_j) / (det L · ∫K(‖u‖) du). With S the surface of the unit sphere,
2 π^(d/2) / Γ(d/2), that integral is S ∫ r^(d−1) K(r) dr; of the Gaussian it is (2π)^(d/2). The kernels are those of
scikit-learn's ``KernelDensity``. Its constant of the cosine is wrong in an even number of dimensions, where its sum
lacks a term: in the plane its density integrates to 0.36, in four dimensions it is NaN.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Array, array_namespace
from ..bandwidth.matrix import Bandwidth
from ..engine.devices import captures
from ..messages import caller_level, optional
from ..protocol import Partial
from .request import Request


def density(sums: Partial, constant: float, log: bool, clip: bool = False) -> Any:
    """Return the density, or its log: NaN where it is negative, or −inf where that is clipped to zero."""
    xp = array_namespace(sums.log_sum)
    if sums.sign is None:
        log_density = sums.log_sum + constant
        return log_density if log else xp.exp(log_density)
    log_density = sums.log_magnitude + constant
    if clip or log:
        values, least = (log_density, -math.inf if clip else math.nan) if log else (xp.exp(log_density), 0.0)
        return xp.where(sums.sign < 0, xp.full_like(values, least), values)
    return sums.sign * xp.exp(log_density)


def undefined(request: Request, result: Any, log: bool) -> int:
    """The number of rows whose log is NaN, as the estimate is negative; 0 while a CUDA graph is captured."""
    if not log or request.method != "laplace" or request.negative != "keep" or captures(result):
        return 0
    xp = array_namespace(result)
    return int(xp.sum(xp.astype(xp.isnan(result), xp.int32)))  # the user's array: any library and device


def warn_of_negative(undefined: int, rows: int, finite: bool = True) -> None:
    """Warn of rows without a log, if there are any; ``finite``: the data are known to be finite."""
    if undefined:
        where = f"{'negative' if finite else 'negative or NaN'} at {undefined} of {rows} points, where its log is NaN"
        instead = "use log=False for the signed values, negative='clip', or method='sdkde', which is never negative"
        warnings.warn(f"the Laplace estimate is {where}; {instead}", RuntimeWarning, stacklevel=caller_level())


def log_constant(kernel: str, bandwidth: Bandwidth) -> Any:
    """Return log of 1 / (det L · ∫K), a float; a () tensor where the factor is one."""
    return -log_norm(kernel, bandwidth.d) - bandwidth.log_determinant


@functools.lru_cache
def log_norm(kernel: str, d: int) -> float:
    """Return log ∫K(‖u‖) du over d dimensions, of one of ``protocol.KERNELS``, K(0) = 1."""
    if kernel == "gaussian":
        return 0.5 * d * math.log(2.0 * math.pi)
    return math.log(2.0) + 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d) + float(_radial[kernel][0](d))


def radial_variance(kernel: str, d: int) -> float:
    """The variance of a kernel K along each of d dimensions, in bandwidths squared."""
    if kernel == "gaussian":
        return 1.0
    log_integral = _radial[kernel][0]  # of r^(d−1) K
    return math.exp(float(log_integral(d + 2)) - float(log_integral(d))) / d


def _cosine(d: int) -> float:
    """log ∫₀¹ r^(d−1) cos(π r / 2) dr.

    As cos(π r / 2) = sin(π (1 − r) / 2), a power series in 1 − r, it is Σ_k (−1)^k (π/2)^(2k+1) (d−1)! / (d+2k+1)!.
    Each term is at most a fifth of the one before. Integration by parts loses all digits in 20 dimensions.
    """
    total, term, k = 0.0, 1.0, 0
    while abs(term) > 1e-17:
        total += term
        k += 2
        term *= -((0.5 * math.pi) ** 2) / (d + k) / (d + k + 1)
    return math.log(total) + math.log(0.5 * math.pi / d / (d + 1))


def widths(bandwidth: Bandwidth) -> tuple[Array, Array]:
    """The kernels' standard deviations (d,) and correlations (d, d), without squares, which may underflow."""
    rows = bandwidth.stretch(np.eye(bandwidth.d)).T
    width = np.hypot.reduce(rows, axis=1)
    return width, (rows / width[:, None]) @ (rows / width[:, None]).T


def kernel_draws(kernel: str, n: int, d: int, rng: Any) -> Array:
    """Draws (n, d) of K: in a uniform direction, at a radius whose density is r^(d−1) K(r)."""
    normal = rng.standard_normal((n, d))
    if kernel == "gaussian":
        return normal
    return normal * (_radial[kernel][1](n, d, rng) / np.linalg.vector_norm(normal, axis=1))[:, None]


def _cosine_radii(n: int, d: int, rng: Any) -> Array:
    """Radii by rejection from the linear kernel's: with z = π (1 − r) / 2, cos(π r / 2) / (1 − r) ∝ sin z / z ≥ 2/π."""
    radii = rng.beta(d, 2, n)
    new = np.arange(n)
    while new.size:
        z = 0.5 * math.pi * (1.0 - radii[new])
        new = new[rng.uniform(size=new.size) * z >= np.sin(z)]
        radii[new] = rng.beta(d, 2, new.size)
    return radii


# Of each kernel log ∫ r^(d−1) K(r) dr, of d; and radii (n,) drawn by r^(d−1) K(r), of n, d and rng.
_radial: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tophat": (lambda d: -math.log(d), lambda n, d, rng: rng.beta(d, 1, n)),
    "epanechnikov": (lambda d: math.log(2.0 / d / (d + 2)), lambda n, d, rng: np.sqrt(rng.beta(0.5 * d, 2, n))),
    "exponential": (math.lgamma, lambda n, d, rng: rng.gamma(d, size=n)),
    "linear": (lambda d: -math.log(d) - math.log(d + 1), lambda n, d, rng: rng.beta(d, 2, n)),
    "cosine": (_cosine, _cosine_radii),
}


def normal_distribution() -> Any:
    return optional("scipy.special", "probabilities, quantiles and columns that end need SciPy", "scipy").ndtr


def between(a: Array, b: Array) -> Array:
    """Φ(b) − Φ(a), with the digits of the upper tail."""
    ndtr, flipped = normal_distribution(), a > 0
    return ndtr(np.where(flipped, -a, b)) - ndtr(np.where(flipped, -b, a))


def times_density(t: Array) -> Array:
    """t φ(t), which is 0 at infinity."""
    t = np.clip(t, -40.0, 40.0)
    return t * np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
