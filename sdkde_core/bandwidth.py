"""Bandwidths: the type, and the rules that choose one from data.

A bandwidth is a matrix H = L Lᵀ in squared data units, given as a number h (H = h² I), one h_j per dimension
(H = diag h_j²), or H itself. ``whiten`` maps x to L⁻¹(x − centre), in which every bandwidth is the unit one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from .arrays import Argument, c_order, to_host

__all__ = ["RULES", "Bandwidth", "resolve"]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bandwidth:
    """A bandwidth for d dimensions; make one with :meth:`of` or :func:`resolve`.

    Parameters
    ----------
    d : int
    factor : (d,) or (d, d) float64 array
        The diagonal of L, or the lower Cholesky factor L of H; data units.
    rule : str
        Where it came from: a rule's name, or ``"given"``.
    """

    d: int
    factor: Array
    rule: str = "given"

    @classmethod
    def of(cls, value: Any, d: int, rule: str = "given") -> Bandwidth:
        """Make a bandwidth from a number, d numbers or a (d, d) matrix H.

        Raises
        ------
        TypeError
            ``value`` is not real numbers.
        ValueError
            Wrong shape, a value that is not finite and positive, or a matrix that is not symmetric positive
            definite (the message names the directions).
        """
        if isinstance(value, Bandwidth):
            if value.d != d:
                raise ValueError(f"bandwidth is for {value.d} dimensions, but train has {d}")
            return value
        h = _as_numbers(value)
        if h.ndim == 2:
            if h.shape != (d, d):
                raise ValueError(f"bandwidth has shape {h.shape}, but train has {d} dimensions: pass shape ({d}, {d})")
            return cls(d, _cholesky(h), rule)
        if h.shape not in ((), (1,), (d,)):
            raise ValueError(
                f"bandwidth has shape {h.shape}, but train has {d} dimensions: pass one number, {d} numbers, "
                f"or a ({d}, {d}) matrix H in squared units"
            )
        good = (h > 0) & (h < math.inf)
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            where = "" if h.ndim == 0 else f" at index {bad}"
            raise ValueError(f"bandwidth is {h.flat[bad]}{where}; pass positive finite numbers in the data's units")
        return cls(d, np.full(d, h, dtype=np.float64), rule)

    @property
    def matrix(self) -> Array:
        """H, (d, d), in squared data units."""
        return np.diag(self.factor**2) if self.factor.ndim == 1 else self.factor @ self.factor.T

    @property
    def log_determinant(self) -> float:
        """log det L = ½ log det H."""
        diagonal = self.factor if self.factor.ndim == 1 else np.diagonal(self.factor)
        return float(np.log(diagonal).sum())

    @property
    def log_constant(self) -> float:
        """Log of the Gaussian kernel's normalising constant, −½ d log 2π − log det L."""
        return -0.5 * self.d * math.log(2 * math.pi) - self.log_determinant

    def scaled(self, scale: float) -> Bandwidth:
        """Return this bandwidth with L multiplied by ``scale``."""
        return Bandwidth(self.d, self.factor * scale, self.rule)

    def whiten(self, x: Any, centre: Any) -> Any:
        """Return L⁻¹(x − centre): (n, d) in bandwidths, float64, C order, in x's array library.

        ``centre`` is float64; x may be float32.
        """
        return self.whitening(centre)(x)

    def whitening(self, centre: Any) -> Callable[[Any], Any]:
        """Return :meth:`whiten` with that centre, for points that are where the centre is: nothing is sent there."""
        scale = _like(self._scale, centre)
        inverse = None if self.factor.ndim == 1 else _like(self._inverse.T, centre)

        def whiten(x: Any) -> Any:
            scaled = c_order(x - centre)  # which has the order of x
            scaled /= scale
            return scaled if inverse is None else scaled @ inverse

        return whiten

    def stretch(self, u: Any) -> Any:
        """Return L u for every row: a whitened displacement in data units."""
        return u * _like(self.factor, u) if self.factor.ndim == 1 else u @ _like(self.factor.T, u)

    def pull_back(self, u: Any) -> Any:
        """Return L⁻ᵀ u for every row: a gradient with respect to whitened points, per data unit."""
        return (u if self.factor.ndim == 1 else u @ _like(self._inverse, u)) / _like(self._scale, u)

    @functools.cached_property
    def _scale(self) -> Array:
        """sqrt(diag H): columns in units far apart are brought together before anything is subtracted."""
        return self.factor if self.factor.ndim == 1 else np.linalg.norm(self.factor, axis=1)

    @functools.cached_property
    def _inverse(self) -> Array:
        """Inverse of the Cholesky factor of the correlation matrix, L = diag(scale) · factor."""
        return np.linalg.inv(self.factor / self._scale[:, None])

    def __str__(self) -> str:
        if self.factor.ndim == 2:
            return f"{self.rule}: full matrix, sqrt(diag H) {_span(np.sqrt(np.diagonal(self.matrix)))}"
        return f"{self.rule}: h {_span(self.factor)}"


def _span(h: Array) -> str:
    low, high = float(h.min()), float(h.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} … {high:.4g}"


def _like(factor: Array, x: Any) -> Any:
    """``factor`` where x is; one number where all are equal, which no device has to be sent."""
    if factor.ndim == 1 and (factor == factor[0]).all():
        return float(factor[0])
    if isinstance(x, np.ndarray):
        return factor
    return array_namespace(x).asarray(np.ascontiguousarray(factor), device=device(x))


def _as_numbers(value: Any) -> Array:
    if isinstance(value, float):
        return np.asarray(value, dtype=np.float64)
    argument = Argument.of("bandwidth", value)
    with np.errstate(all="ignore"):  # extended precision may overflow; the checks that follow say so
        h = np.asarray(to_host(argument.array), dtype=np.float64)
    if argument.array.dtype in (bool, np.bool_):
        raise TypeError(f"bandwidth is {value!r}; pass a rule ({', '.join(RULES)}), numbers or a (d, d) matrix H")
    return h


def _cholesky(h: Array) -> Array:
    if not np.isfinite(h).all():
        raise ValueError("bandwidth has values that are not finite")
    diagonal = np.diagonal(h)
    if not (diagonal > 0).all():
        k = int(np.flatnonzero(~(diagonal > 0))[0])
        raise ValueError(f"bandwidth is not positive definite: H[{k}, {k}] = {diagonal[k]}; pass a covariance matrix")
    # Judged as a correlation matrix, so that columns in different units look neither singular nor lopsided.
    scale = np.sqrt(diagonal)
    correlation = h / scale[:, None] / scale
    asymmetry = abs(correlation - correlation.T)
    if asymmetry.max() > 1e-8:
        i, j = divmod(int(np.argmax(asymmetry)), len(h))
        raise ValueError(f"bandwidth is not symmetric: H[{i}, {j}] = {h[i, j]}, H[{j}, {i}] = {h[j, i]}; symmetrise it")
    correlation = (correlation + correlation.T) / 2
    values, vectors = np.linalg.eigh(correlation)
    flat = values <= len(h) * np.finfo(float).eps * values[-1]
    if flat.any():
        raise ValueError(
            f"bandwidth is not positive definite: {int(flat.sum())} of {len(h)} directions have no spread, "
            f"the flattest {_direction(vectors[:, 0])} (columns in units of sqrt(H[j, j])); "
            "drop dependent columns, or pass one number or one per dimension"
        )
    return np.linalg.cholesky(correlation) * scale[:, None]


def _direction(vector: Array) -> str:
    """The largest components of a direction, as a sum over columns."""
    order = np.argsort(-abs(vector))[:4]
    kept = [int(j) for j in order if abs(vector[j]) > 1e-3]
    return " ".join(f"{vector[j]:+.3f}·x{j}" for j in kept)


# --- rules ------------------------------------------------------------------------------------------------------


class _Sample:
    """What the rules look at: samples in units of their own spread.

    So no square overflows, and no offset costs digits.

    Parameters
    ----------
    x : (n, d) float64 array
        Data units.
    weights : (n,) float64 array or None
        Positive, summing to 1. None: all equal.
    n_eff : float
        How many samples that is worth.
    """

    def __init__(self, x: Any, weights: Any, n_eff: float) -> None:
        xp = array_namespace(x)
        self.weights, self.n_eff, self.d = weights, n_eff, int(x.shape[1])
        centred = x - x[:1, :]
        self.unit = to_host(xp.max(xp.abs(centred), axis=0))  # (d,) data units
        scaled = centred / _like(self.unit, x)
        self.x = scaled - (xp.mean(scaled, axis=0) if weights is None else weights @ scaled)

    def std(self) -> Array:
        """Standard deviation per column, (d,), ddof 0."""
        xp = array_namespace(self.x)
        squared = self.x**2
        return self.unit * np.sqrt(
            to_host(xp.mean(squared, axis=0) if self.weights is None else self.weights @ squared)
        )

    def covariance(self) -> Array:
        """Covariance, (d, d), normalised as SciPy does: 1 − Σw², which is (n − 1)/n without weights."""
        xp = array_namespace(self.x)
        if self.weights is None:
            product = to_host(self.x.T @ self.x) / (self.x.shape[0] - 1)
        else:
            product = to_host((self.x * self.weights[:, None]).T @ self.x) / (1.0 - float(xp.sum(self.weights**2)))
        return (product + product.T) / 2 * self.unit[:, None] * self.unit

    def spread(self) -> Array:
        """σ₁ = min(std, IQR/1.34) per column, (d,); std where the IQR is 0."""
        low, high = self._quartiles()
        std, iqr = self.std(), self.unit * to_host(high - low) / 1.34
        return np.where(iqr > 0, np.minimum(std, iqr), std)

    def _quartiles(self) -> tuple[Any, Any]:
        """Quartiles per column of ``self.x``: linear interpolation (type 7), and its weighted form.

        The weighted form is that of Akinshin, "Weighted quantile estimators" (2023): a mean of the order statistics
        under the uniform distribution on an interval of width 1/n_eff, which is type 7 when the weights are equal.
        """
        xp = array_namespace(self.x)
        if self.weights is None:
            if isinstance(self.x, np.ndarray):
                return tuple(np.quantile(self.x, (0.25, 0.75), axis=0))
            return tuple(_type7(xp.sort(self.x, axis=0), p) for p in (0.25, 0.75))
        order = xp.argsort(self.x, axis=0)  # (n, d)
        weights = xp.reshape(xp.take(self.weights, xp.reshape(order, (-1,))), order.shape)
        reached, ordered = xp.cumulative_sum(weights, axis=0), xp.take_along_axis(self.x, order, axis=0)
        result = []
        for p in (0.25, 0.75):
            share = xp.clip(reached * self.n_eff - p * (self.n_eff - 1), 0.0, 1.0)
            share = xp.concat([share[:1, :], share[1:, :] - share[:-1, :]], axis=0)
            result.append(xp.sum(share * ordered, axis=0))
        return result[0], result[1]


def _type7(ordered: Any, p: float) -> Any:
    position = (ordered.shape[0] - 1) * p
    low = int(position)
    high = min(low + 1, ordered.shape[0] - 1)
    return ordered[low, :] + (position - low) * (ordered[high, :] - ordered[low, :])


def _silverman(s: _Sample) -> Array:
    """h_j = 0.9 σ₁_j n_eff^(−1/(d+4)): Silverman (1986), eq. 3.31, with the rate for d dimensions."""
    return 0.9 * s.spread() * s.n_eff ** (-1 / (s.d + 4))


def _silverman_iso(s: _Sample) -> Array:
    """h = 0.9 · mean_j σ₁_j · n_eff^(−1/(d+4)): the isotropic rule behind the paper's tables."""
    return np.asarray(0.9 * s.spread().mean() * s.n_eff ** (-1 / (s.d + 4)))


def _sdkde(s: _Sample) -> Array:
    """h_j = 0.4 σ₁_j n_eff^(−1/(d+8)): the constant is the SD-KDE paper's for d = 1; none is published beyond."""
    return 0.4 * s.spread() * s.n_eff ** (-1 / (s.d + 8))


def _scott(s: _Sample) -> Array:
    """H = n_eff^(−2/(d+4)) · covariance, as ``scipy.stats.gaussian_kde(bw_method="scott")``."""
    return s.covariance() * s.n_eff ** (-2 / (s.d + 4))


def _silverman_full(s: _Sample) -> Array:
    """H = (n_eff (d+2)/4)^(−2/(d+4)) · covariance, as ``scipy.stats.gaussian_kde(bw_method="silverman")``."""
    return s.covariance() * (s.n_eff * (s.d + 2) / 4) ** (-2 / (s.d + 4))


RULES: dict[str, Callable[[_Sample], Array]] = {
    "silverman": _silverman,
    "silverman-iso": _silverman_iso,
    "sdkde": _sdkde,
    "scott": _scott,
    "silverman-full": _silverman_full,
}

#: Those that are a multiple of the covariance.
FULL_RULES = ("scott", "silverman-full")


def resolve(bandwidth: Any, train: Any, log_weights: Any = None) -> Bandwidth:
    """Return the bandwidth that ``bandwidth`` means for ``train``.

    Parameters
    ----------
    bandwidth : str, float, (d,) or (d, d) array_like, or Bandwidth
        A rule's name (see :data:`RULES`), or values in the data's units (a matrix in squared units).
    train : (n, d) array
        float64 or float32, of any array library.
    log_weights : (n,) float64 array, optional
        Normalised, −inf for weight zero.

    Raises
    ------
    TypeError, ValueError
        As :meth:`Bandwidth.of`; a rule also for an unknown name, a single sample, or a constant column.
    """
    d = int(train.shape[1])
    if not isinstance(bandwidth, str):
        return Bandwidth.of(bandwidth, d)
    if bandwidth not in RULES:
        raise ValueError(f"bandwidth is {bandwidth!r}; pass one of {', '.join(map(repr, RULES))}, or values")
    xp = array_namespace(train)
    train = xp.astype(train, xp.float64, copy=False)
    weights, n_eff = None, float(train.shape[0])
    if log_weights is not None:
        weights = xp.exp(log_weights)
        n_eff = 1.0 / float(xp.sum(weights**2))
        if bool(xp.any(weights == 0)):  # a point without weight must not widen the range of a column
            carrying = xp.nonzero(weights)[0]
            train, weights = xp.take(train, carrying, axis=0), xp.take(weights, carrying)
    n = int(train.shape[0])
    if n == 1 or n_eff <= 1.0 + 1e-12:
        raise ValueError(f"bandwidth={bandwidth!r} needs two samples with weight; pass bandwidth as a number")
    constant = np.flatnonzero(to_host(xp.min(train, axis=0)) == to_host(xp.max(train, axis=0)))
    if constant.size:
        raise ValueError(
            f"bandwidth={bandwidth!r} needs columns that vary, but column {constant[0]} of train is constant"
            f"{_others(constant)}; drop it, or pass bandwidth as a number"
        )
    if bandwidth in FULL_RULES and n <= d:
        raise ValueError(
            f"bandwidth={bandwidth!r} needs more samples with weight than dimensions for a covariance of full rank, "
            f"but there are {n} in {d}; pass 'silverman' or numbers"
        )
    with np.errstate(all="ignore"):
        value = RULES[bandwidth](_Sample(train, weights, n_eff))
    return Bandwidth.of(value, d, rule=bandwidth)


def _others(indices: NDArray[Any]) -> str:
    return f" (and {indices.size - 1} more: {indices[1:6].tolist()})" if indices.size > 1 else ""
