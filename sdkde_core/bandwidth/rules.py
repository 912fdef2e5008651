"""Rules that choose a bandwidth from the samples, and what the argument ``bandwidth`` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from ..arrays import columns_are_points, to_host
from ..messages import did_you_mean, warn_once
from .isj import improved_sheather_jones
<<<<<<< HEAD
from .matrix import Bandwidth
from .sample import Sample
=======
from .matrix import Bandwidth, like
>>>>>>> rules

__all__ = ["FULL_RULES", "RULES", "check_rule", "resolve"]

Array = NDArray[Any]


<<<<<<< HEAD
def _silverman(s: Sample) -> Array:
=======
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
    method : {"kde", "sdkde", "laplace"}
        The estimator that the bandwidth is for.

    Attributes
    ----------
    note : str
        What a rule has to say about its result.
    """

    note = ""

    def __init__(self, x: Any, weights: Any, n_eff: float, method: str = "sdkde") -> None:
        xp = array_namespace(x)
        self.weights, self.n_eff, self.d, self.method = weights, n_eff, int(x.shape[1]), method
        self.given, centred = x, x - x[:1, :]
        self.unit = to_host(xp.max(xp.abs(centred), axis=0))  # (d,) data units
        scaled = centred / like(self.unit, x)
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
>>>>>>> rules
    """h_j = 0.9 σ₁_j n_eff^(−1/(d+4)): Silverman (1986), eq. 3.31, with the rate for d dimensions."""
    return 0.9 * s.spread() * s.n_eff ** (-1 / (s.d + 4))


def _silverman_iso(s: Sample) -> Array:
    """h = 0.9 · mean_j σ₁_j · n_eff^(−1/(d+4)): the isotropic rule behind the paper's tables."""
    return np.asarray(0.9 * s.spread().mean() * s.n_eff ** (-1 / (s.d + 4)))


def _sdkde(s: Sample) -> Array:
    """h_j = 0.4 σ₁_j n_eff^(−1/(d+8)): the constant is the SD-KDE paper's for d = 1; none is published beyond."""
    return 0.4 * s.spread() * s.n_eff ** (-1 / (s.d + 8))


def _scott(s: Sample) -> Array:
    """H = n_eff^(−2/(d+4)) · covariance, as ``scipy.stats.gaussian_kde(bw_method="scott")``."""
    return s.covariance() * s.n_eff ** (-2 / (s.d + 4))


def _silverman_full(s: Sample) -> Array:
    """H = (n_eff (d+2)/4)^(−2/(d+4)) · covariance, as ``scipy.stats.gaussian_kde(bw_method="silverman")``."""
    return s.covariance() * (s.n_eff * (s.d + 2) / 4) ** (-2 / (s.d + 4))


<<<<<<< HEAD
def _normal_reference(s: Sample) -> Array:
=======
def _normal_reference(s: _Sample) -> Array:
>>>>>>> rules
    """h_j = σ₁_j c n_eff^(−1/(d+4)), or n_eff^(−1/(d+8)) of debiased estimates: the best h for normal samples.

    To leading order in h, of independent columns; docs/bandwidths.md derives the constants.
    """
    d = s.d
    if s.method == "kde":
        power, rate = 4 / (d + 2), d + 4
    elif s.method == "sdkde":
        power, rate = 1.28 * (1 + d / 3 * (2 / 3) ** (d / 2) + d * (d + 2) / 64 * 2 ** (-d / 2)) / (d + 2), d + 8
    else:
        power, rate = 128 * (1 + d / 2 + d * (d + 2) / 16) / ((d + 2) * (d + 4) * (d + 6)), d + 8
    return s.spread() * (power / s.n_eff) ** (1 / rate)


<<<<<<< HEAD
def _isj(s: Sample) -> Array:
=======
def _isj(s: _Sample) -> Array:
>>>>>>> rules
    """Per column improved Sheather–Jones, from the rate of one dimension, n_eff^(−1/5), brought to n_eff^(−1/(d+4)).

    Silverman's for a column where that has no solution, with a warning.
    """
    x, weights = to_host(s.given), None if s.weights is None else to_host(s.weights)
    found = [improved_sheather_jones(x[:, j], weights, s.n_eff) for j in range(s.d)]
    without = np.array([j for j, h in enumerate(found) if h is None])
    result = np.array([h or 0.0 for h in found]) * s.n_eff ** (1 / 5 - 1 / (s.d + 4))
    if without.size:
        result[without] = _silverman(s)[without]
        s.note = f" (silverman in column {without[0]}{_others(without)})"
        warn_once(
            f"bandwidth='isj' has no solution for column {without[0]} of train{_others(without)}: too few samples, one "
            "value too frequent, or scales too far apart; Silverman's rule is taken there"
        )
    return result


<<<<<<< HEAD
RULES: dict[str, Callable[[Sample], Array]] = {
=======
RULES: dict[str, Callable[[_Sample], Array]] = {
>>>>>>> rules
    "silverman": _silverman,
    "silverman-iso": _silverman_iso,
    "sdkde": _sdkde,
    "scott": _scott,
    "silverman-full": _silverman_full,
    "normal-reference": _normal_reference,
    "isj": _isj,
}

#: Those that are a multiple of the covariance.
FULL_RULES = ("scott", "silverman-full")


def check_rule(rule: str, method: str) -> None:
    """Raise ValueError where there is no such rule, or not for the method."""
    if rule not in RULES:
        known = ", ".join(map(repr, RULES))
        raise ValueError(f"bandwidth is {rule!r}; pass one of {known}, or values{did_you_mean(rule, RULES)}")
    if rule == "isj" and method != "kde":
        raise ValueError(
            f"bandwidth='isj' is made for the bias of method='kde', but method is {method!r}; pass 'normal-reference', "
            "'silverman', or method='kde'"
        )


def resolve(bandwidth: Any, train: Any, log_weights: Any = None, *, method: str = "sdkde") -> Bandwidth:
    """Return the bandwidth that ``bandwidth`` means for ``train``.

    Parameters
    ----------
    bandwidth : str, float, (d,) or (d, d) array_like, or Bandwidth
        A rule's name (see :data:`RULES`), or values in the data's units (a matrix in squared units).
    train : (n, d) array
        float64 or float32, of any array library.
    log_weights : (n,) float64 array, optional
        Normalised, −inf for weight zero.
    method : {"kde", "sdkde", "laplace"}
        The estimator that the bandwidth is for; most rules are the same for all.

    Raises
    ------
    TypeError, ValueError
        As :meth:`Bandwidth.of`; a rule also for an unknown name, a single sample, or a constant column.
    """
    n, d = (int(k) for k in train.shape)
    turned = columns_are_points(n, d, "train")
    if not isinstance(bandwidth, str):
        try:
            return Bandwidth.of(bandwidth, d)
        except ValueError as error:
            if turned and np.shape(bandwidth)[:1] == (n,) and n > 1:
                raise ValueError(f"{error}{turned}") from None
            raise
    check_rule(bandwidth, method)
    xp = array_namespace(train)
    train = xp.astype(train, xp.float64, copy=False)
    weights, carrying, n_eff = None, None, float(train.shape[0])
    if log_weights is not None:
        weights = xp.exp(log_weights)
        n_eff = 1.0 / float(xp.sum(weights**2))
        if bool(xp.any(weights == 0)):  # a point without weight must not widen the range of a column
            carrying = xp.nonzero(weights)[0]
            train, weights = xp.take(train, carrying, axis=0), xp.take(weights, carrying)
    n = int(train.shape[0])
    if n == 1 or n_eff <= 1.0 + 1e-12:
        raise ValueError(f"bandwidth={bandwidth!r} needs two samples with weight; pass bandwidth as a number{turned}")
    low, high = to_host(xp.min(train, axis=0)), to_host(xp.max(train, axis=0))
    if not (np.isfinite(low) & np.isfinite(high)).all():
        values = to_host(train)
        i, j = (int(k) for k in np.argwhere(~np.isfinite(values))[0])
        row = i if carrying is None else int(to_host(carrying)[i])
        raise ValueError(
            f"bandwidth={bandwidth!r} is chosen from train, which has {values[i, j]} at row {row}, column {j}; drop or "
            "fill it, or pass bandwidth as a number"
        )
    constant = np.flatnonzero(low == high)
    if constant.size:
        raise ValueError(
            f"bandwidth={bandwidth!r} needs columns that vary, but column {constant[0]} of train is constant"
            f"{_others(constant)}; drop it, or pass bandwidth as a number{turned}"
        )
    if bandwidth in FULL_RULES and n <= d:
        raise ValueError(
            f"bandwidth={bandwidth!r} needs more samples with weight than dimensions for a covariance of full rank, "
            f"but there are {n} in {d}; pass 'silverman' or numbers{turned}"
        )
<<<<<<< HEAD
    sample = Sample(train, weights, n_eff, method)
=======
    sample = _Sample(train, weights, n_eff, method)
>>>>>>> rules
    value = RULES[bandwidth](sample)
    per_column = np.diagonal(value) if value.ndim == 2 else np.broadcast_to(value, (d,))
    beyond = np.flatnonzero(~((per_column > 0) & (per_column < np.inf)))
    if beyond.size:
        j = int(np.argmax(high - low)) if value.ndim == 0 else beyond[0]
        raise ValueError(
            f"bandwidth={bandwidth!r} would be {per_column[j]} in column {j} of train, which goes from {low[j]:.3g} to "
            f"{high[j]:.3g}: float64 does not hold it; rescale that column, or pass bandwidth as numbers"
        )
    return Bandwidth.of(value, d, rule=bandwidth + sample.note)


def _others(indices: NDArray[Any]) -> str:
    return f" (and {indices.size - 1} more: {indices[1:6].tolist()})" if indices.size > 1 else ""
