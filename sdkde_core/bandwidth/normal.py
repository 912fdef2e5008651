"""The normal reference: the best bandwidth for normal samples, by estimator."""

from __future__ import annotations

import functools
import math

import numpy as np


def normal_reference(method: str, d: int, n: float) -> float:
    """The best bandwidth for n standard normal samples, to leading order; docs/mathematics.md derives it."""
    if method == "kde":
        power, rate = 4 / (d + 2), d + 4
    elif method == "sdkde":
        power, rate = 1.28 * roughness(method, d) / (d + 2), d + 8
    else:
        power, rate = 128 * roughness(method, d) / ((d + 2) * (d + 4) * (d + 6)), d + 8
    return float((power / n) ** (1 / rate))


@functools.lru_cache
def widest(method: str, d: int, n: float) -> float:
    """The best bandwidth for the same samples with the bias not only to leading order, over the normal reference.

    The mean of the estimate is normal again, of variance 1 + h² for kde and (1 − ½ h²/(1 + h²))² + h² for sdkde; for
    laplace it is N_v − ½ h² ΔN_v, v = 1 + h². The variance is that of the normal reference.
    """

    def g(v: np.ndarray) -> np.ndarray:  # N_v at 0, over N_2 there
        return (v / 2) ** (-d / 2)

    over = np.exp(np.linspace(-0.1, 0.7, 401))
    h2 = (normal_reference(method, d, n) * over) ** 2
    if method == "laplace":  # ∂N_v/∂v = ½ ΔN_v, so that each ½ h² Δ is h² ∂/∂v
        v, w = 2 + 2 * h2, 2 + h2
        square = g(v) * (1 + h2 * d / v + h2**2 * d * (d + 2) / (4 * v**2))
        product = g(w) * (1 + h2 * d / (2 * w))
    else:
        variance = 1 + h2 if method == "kde" else (1 - 0.5 * h2 / (1 + h2)) ** 2 + h2
        square, product = g(2 * variance), g(1 + variance)
    error = roughness(method, d) * g(2 * h2) / n + (1 - 1 / n) * square - 2 * product
    return float(over[np.argmin(error)])


def reference(method: str, n: float, d: int = 1) -> float:
    """The best bandwidth for n standard normal samples."""
    return normal_reference(method, d, n) * widest(method, d, n)


def roughness(method: str, d: int, step: float = 0.5, score: float = 1.0) -> float:
    """∫ of a method's squared kernel over that of the normal one; sdkde's is N_1 − step · ΔN_v, v = 1 + score²."""
    if method == "kde":
        return 1.0
    if method == "sdkde":
        v = 1.0 + score * score
        product = 2 * step * d / (1 + v) * math.exp(d / 2 * math.log(2 / (1 + v)))
        return 1 + product + step**2 * d * (d + 2) / (4 * v * v) * math.exp(-d / 2 * math.log(v))
    return 1 + d / 2 + d * (d + 2) / 16
