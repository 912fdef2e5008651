"""Integrated errors of an estimate against the density that its samples came from.

One and two dimensions: the trapezoid rule on a graded grid (:class:`Grid`). More: the squares' integrals in closed form
(:class:`Closed`), since no fixed points resolve narrow kernels there.

With the moved samples z_j, ∫p̂² is the mean over i of their own KDE at √2 h at z_i, ∫p̂p the mean over j of
p ∗ N(0, H) at z_j. The Laplace kernel is (1 − ∂_s) N(0, sH) at s = 1. So ∫p̂p takes a difference by s, and ∫p̂² a factor
in the sum over pairs: with q = r²/2, r in bandwidths, 1 + d/2 − q/2 + (q² − 2(d+2)q + d(d+2))/16.
As the estimate and the density both integrate to one, ∫|p̂ − p| is 2∫(p − p̂)₊, a mean over samples of the density.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

import sdkde_core
from sdkde_core.bandwidth.matrix import Bandwidth

if TYPE_CHECKING:
    from .densities import Density  # bandwidths.py, a script, imports it from beside it

__all__ = ["HELD_OUT", "Closed", "Errors", "Grid", "HeldOut", "errors_of"]

Array = NDArray[Any]
AXIS = {1: 8192, 2: 160}  # points of the grid along an axis
HELD_OUT = 4096  # samples of the density for what is not integrated
PAIRS = 2**22  # of a block of the sum over pairs


@dataclass(frozen=True)
class Errors:
    """What an estimate is worth.

    ``likelihood`` is the mean of log p̂ over held-out points, None where it is negative at one of them; ``negative`` the
    mass below zero, for real data the share of held-out points where it is not positive.
    """

    ise: float | None
    l1: float | None
    negative: float
    likelihood: float | None


@functools.lru_cache(maxsize=64)
def errors_of(density: Density) -> Grid | Closed:
    """Return what integrates the errors of estimates of ``density``."""
    return Grid.of(density) if density.d <= 2 else Closed(density)


@dataclass(frozen=True, eq=False)
class Grid:
    """Points (m, d), the weight of each, and the density there."""

    density: Density
    points: Array
    weights: Array
    truth: Array

    @classmethod
    def of(cls, density: Density) -> Grid:
        many = density.sample(np.random.default_rng(0), 100_000)
        axes = [_axis(column, AXIS[density.d]) for column in many.T]
        points = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        weights = functools.reduce(np.multiply.outer, [np.gradient(axis) for axis in axes]).ravel()
        return cls(density, points, weights, density.pdf(points))

    def loss(self, x: Any, method: str, bandwidth: Bandwidth, held_out: Any = None, **options: Any) -> float:
        """∫(p̂ − p)²; ``held_out`` is not looked at."""
        return float(self.weights @ (self._values(x, method, bandwidth, options) - self.truth) ** 2)

    def all(self, x: Any, method: str, bandwidth: Bandwidth, held_out: Array, **options: Any) -> Errors:
        """All errors; ``held_out`` are samples of the density."""
        values = self._values(x, method, bandwidth, options)
        off = values - self.truth
        logs = _logs(x, held_out, method, bandwidth, options)[0]
        return Errors(
            float(self.weights @ off**2),
            float(self.weights @ np.abs(off)),
            float(self.weights @ np.maximum(-values, 0)),
            _mean(logs),
        )

    def _values(self, x: Any, method: str, bandwidth: Bandwidth, options: dict[str, Any]) -> Array:
        return _host(sdkde_core.estimate(x, _like(self.points, x), method=method, bandwidth=bandwidth, **options))


def _axis(column: Array, count: int) -> Array:
    """Points along an axis: three quarters of them where all but a thousandth of the density is."""
    centre, whole = np.quantile(column, (0.0005, 0.9995)), np.array([column.min(), column.max()])
    margin = 0.1 * np.ptp(centre) * np.array([-1, 1])
    centre, whole = centre + margin, whole + margin
    ends = np.unique(np.concatenate([whole, np.clip(centre, *whole)]))
    reached = 0.75 * np.clip((ends - centre[0]) / np.ptp(centre), 0, 1) + 0.25 * (ends - whole[0]) / np.ptp(whole)
    return np.interp(np.linspace(0, 1, count), reached, ends)


@dataclass(frozen=True, eq=False)
class Closed:
    """Errors in closed form, of a density whose convolution with a normal is known."""

    density: Density

    def loss(self, x: Any, method: str, bandwidth: Bandwidth, held_out: Any = None, **options: Any) -> float:
        """∫(p̂ − p)²; ``held_out`` is not looked at."""
        if method == "laplace":
            own = _laplace_square(x, bandwidth)
            up, down = (self._overlap(_host(x), bandwidth, 1 + step) for step in (STEP, -STEP))
            cross = self._overlap(_host(x), bandwidth, 1.0) - (up - down) / (2 * STEP)
        else:
            moved = sdkde_core.debias(x, bandwidth=bandwidth, **options) if method == "sdkde" else x
            wide = bandwidth.scaled(math.sqrt(2))
            own = float(_host(sdkde_core.estimate(moved, method="kde", bandwidth=wide, **options)).mean())
            cross = self._overlap(_host(moved), bandwidth, 1.0)
        return own - 2 * cross + self.density.square()

    def all(self, x: Any, method: str, bandwidth: Bandwidth, held_out: Array, **options: Any) -> Errors:
        """All errors; ``held_out`` are samples of the density."""
        logs, values = _logs(x, held_out, method, bandwidth, options)
        l1 = 2 * float(np.maximum(1 - values / self.density.pdf(held_out), 0).mean())
        negative = _negative(x, bandwidth, options) if method == "laplace" else 0.0
        return Errors(self.loss(x, method, bandwidth, **options), l1, negative, _mean(logs))

    def _overlap(self, z: Array, bandwidth: Bandwidth, s: float) -> float:
        """∫ p̂ p of normals of covariance sH at z; by a sample of the normals where no closed form is known."""
        known = self.density.smoothed(z, s * bandwidth.matrix)
        if known is not NotImplemented:
            return float(known.mean())
        axes = np.diag(np.diagonal(bandwidth.matrix))  # where that is known, only the difference is sampled
        known, roots = self.density.smoothed(z, s * axes), [(1, np.linalg.cholesky(bandwidth.matrix))]
        if known is not NotImplemented:
            roots.append((-1, np.sqrt(axes)))
        total = 0.0 if known is NotImplemented else float(known.mean())
        normal = np.random.default_rng(0).normal(size=(max(1, 2**16 // len(z)), *z.shape))
        for share, root in roots:
            steps = math.sqrt(s) * normal @ root.T
            total += share * float(np.mean([self.density.pdf(z + step).mean() for step in (*steps, *-steps)]))
        return total


STEP = 1e-3  # of s; its square is the error


def _laplace_square(x: Any, bandwidth: Bandwidth) -> float:
    """∫p̂² of the Laplace estimate: a sum over all pairs, in blocks of rows."""
    xp, (n, d) = array_namespace(x), x.shape
    u = bandwidth.scaled(math.sqrt(2)).whiten(x, xp.mean(x, axis=0))  # q = r²/2 is then the squared distance
    norms, total = xp.sum(u * u, axis=1), 0.0
    for start in range(0, n, height := max(1, PAIRS // n)):
        rows = slice(start, start + height)
        q = norms[rows, None] + norms[None, :] - 2 * (u[rows] @ u.T)
        factor = 1 + d / 2 + d * (d + 2) / 16 + q * (q / 16 - (d + 6) / 8)
        total += float(xp.sum(factor * xp.exp(-0.5 * q)))
    return total / n**2 * math.exp(bandwidth.scaled(math.sqrt(2)).log_constant)


def _negative(x: Any, bandwidth: Bandwidth, options: dict[str, Any], count: int = 8192) -> float:
    """The mass below zero, by samples of a KDE wide enough to reach where a kernel is negative, r² > d + 2."""
    rng, samples, d = np.random.default_rng(0), _host(x), bandwidth.d
    wide = bandwidth.scaled(math.sqrt((d + 4) / d))
    y = samples[rng.integers(0, len(samples), count)] + wide.stretch(rng.normal(size=(count, d)))
    queries = _like(y, x)
    values = _host(sdkde_core.estimate(x, queries, method="laplace", bandwidth=bandwidth, **options))
    drawn = _host(sdkde_core.estimate(x, queries, method="kde", bandwidth=wide, **options))
    return float((np.maximum(-values, 0) / drawn).mean())


@dataclass(frozen=True)
class HeldOut:
    """What is known of an estimate where the density is not: the likelihood of held-out points."""

    def loss(self, x: Any, method: str, bandwidth: Bandwidth, held_out: Array, **options: Any) -> float:
        """Less the mean of log p̂."""
        return -float(_logs(x, held_out, method, bandwidth, options)[0].mean())

    def all(self, x: Any, method: str, bandwidth: Bandwidth, held_out: Array, **options: Any) -> Errors:
        """The likelihood, and how often it is not positive."""
        logs = _logs(x, held_out, method, bandwidth, options)[0]
        return Errors(None, None, float(np.isnan(logs).mean()), _mean(logs))


def _logs(x: Any, y: Array, method: str, bandwidth: Bandwidth, options: dict[str, Any]) -> tuple[Array, Array]:
    """log p̂ at y, NaN where it is not positive, and p̂."""
    ask = {"method": method, "bandwidth": bandwidth} | options
    if method != "laplace":
        logs = _host(sdkde_core.estimate(x, _like(y, x), log=True, **ask))
        return logs, np.exp(logs)
    values = _host(sdkde_core.estimate(x, _like(y, x), **ask))
    return np.log(values, out=np.full(len(y), np.nan), where=values > 0), values


def _mean(logs: Array) -> float | None:
    return None if np.isnan(logs).any() else float(logs.mean())


def _host(array: Any) -> Array:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def _like(array: Array, x: Any) -> Any:
    """The array where x is: NumPy's, or a tensor on its device."""
    return array if isinstance(x, np.ndarray) else array_namespace(x).asarray(array, device=x.device)
