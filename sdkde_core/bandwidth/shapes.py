"""The shape of a bandwidth, chosen from the data: the columns' spreads, a scale for each, or a full matrix.

Shapes are judged by the likelihood of a KDE's left-out samples, Σ_i a_i log p̂₋ᵢ(u_i), and sought where that is largest,
by the EM algorithm; a_i is w_i, and less for far samples. With the share r_ij ∝ w_j N(u_i − u_j; 0, H) of sample j ≠ i
in p̂₋ᵢ(u_i), its step is

    H ← Σ_i a_i Σ_j r_ij (u_i − u_j)(u_i − u_j)ᵀ

or the diagonal of that, or a multiple of the H before (Leiva-Murillo and Artés-Rodríguez, "Algorithms for
maximum-likelihood bandwidth selection in kernel density estimators", Pattern Recognition Letters 33, 2012). It raises
the likelihood, but by little where samples say little. So steps are longer than EM's, by the factors of Chebyshev's
iteration, rounded: what a long one spoils in some directions the short ones make good. Only the shape is taken from
this, the same for all methods; the scale is each method's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..engine.products import product
from .normal import normal_reference

#: How much longer than EM's the steps to the first scale are. There are few, as the likelihood alone would have kernels
#: too narrow: where samples say little they stay near the normal reference, as wide as it is.
SCALE_LENGTHS = (1.6,) * 5

#: The same from there: Chebyshev's six for an EM that takes away between 0.18 and 1 of what is left in a direction,
#: 2 / (1.18 + 0.82 cos((k + ½) π / 6)), rounded to whole numbers, long and short in turn.
#: They come as far as ten of 1.6.
LENGTHS = (1, 6, 1, 3, 1, 2)

#: One over the largest trace of a shape's inverse, as a correlation matrix: beyond it columns are nearly dependent.
LEAST = 1e-6


class _Fit(NamedTuple):
    """Kernels N(0, L Lᵀ), and the left-out densities by them."""

    factor: NDArray[Any]  # L, (d, d), not triangular
    inverse: NDArray[Any]  # L⁻¹
    moment: Array  # (d, d) Σ_i a_i Σ_j r_ij v vᵀ, v = L⁻¹(u_i − u_j): the identity at the best H
    found: Any  # (2, n) each row's sum relative to its largest kernel, and that kernel's log
    logs: Any = None  # (n,) log p̂₋ᵢ(u_i), without (2π)^(−d/2); of the last fit of a climb

    @property
    def matrix(self) -> NDArray[Any]:
        return self.factor @ self.factor.T


def most_of(n: int, d: int) -> int:
    """How many of n samples in d dimensions a shape is fitted to; 0 where they are too few for one."""
    most = min(n, 500, math.isqrt(500**2 * 16 // max(d, 16)))
    return most if 1 < d <= min(32, most / 10) else 0


def enough(n: int, d: int) -> bool:
    """Whether there are three samples for each parameter of a matrix."""
    return n >= 3 * d * (d + 1) / 2


def find_shape(kernels: Fits, share: float, *, mixed: bool = True) -> tuple[Array | None, str]:
    """Find a shape (d, d), in the columns' spreads, that is clearly better than these spreads; and its description.

    A scale per column is tried first, then the samples' correlation, then any matrix, if ``mixed``. "Clearly": by the
    score of the differences of log p̂₋ᵢ, paired sample by sample, less what as many parameters gain by chance (Akaike).
    The samples' correlation, where it is more than chance, is not fitted to that likelihood: a strong one is taken
    unless it is clearly worse. ``share`` is the sum of all samples' squared weights.
    """
    columns, d, sides = kernels.columns(), kernels.d, np.sqrt(np.maximum(np.diagonal(kernels.covariance), 1e-300))
    correlation = (kernels.covariance + kernels.covariance.T) / 2 / sides[:, None] / sides
    found: tuple[Array | None, str] = None, ""
    simple, freed = columns, "scale"  # the best fit so far, and the parameters that were free in it
    scales = kernels.climb(columns, "scales") if kernels.may_gain(columns, "scales", d - 1) else columns
    if kernels.better(scales, columns, "scale", d - 1):
        simple, freed, matrix = scales, "scales", np.diag(np.diagonal(scales.matrix))
        found = matrix / _size(matrix), said(1, np.median(scales.logs - columns.logs))
    if not mixed or not _far_from_singular(correlation):
        return found
    size, more, likeliest = _size(correlation), d * (d - 1) / 2, scales
    # What the correlation adds to the log likelihood of normal samples, against what Akaike takes for chance.
    if -0.5 * d * math.log(size) > 2.0 * more * share:
        oriented = kernels.oriented(correlation, columns)
        likeliest = max(scales, oriented, key=lambda fit: float(fit.logs @ kernels.rows))
        if kernels.better(oriented, simple, freed, 0, errors=max(-1.5, 1.0 + 2.5 * math.log(size))):
            simple, freed = oriented, "scale"
            found = correlation, said(2, np.median(oriented.logs - columns.logs))
    if not enough(len(kernels.w), d) or not kernels.may_gain(likeliest, "matrix", d * (d + 1) / 2 - 1):
        return found
    full = kernels.climb(likeliest, "matrix")
    more += (d - 1) * (freed == "scale")
    if kernels.better(full, simple, freed, more) and _far_from_singular(full.matrix):
        matrix = full.matrix * (size / _size(full.matrix))
        found = (matrix + matrix.T) / 2, said(3, np.median(full.logs - columns.logs))
    return found


class Fits:
    """Fits of kernels to samples u (n, d) with these weights (n,), that sum to 1, made when they are asked for.

    These may be a part of the samples; ``covariance`` (d, d) is that of all. Sums are products of matrices where they
    can be.
    """

    def __init__(self, u: Array, weights: Array, covariance: Array) -> None:
        self.u, self.w, self.d, self.covariance = u, weights, u.shape[1], covariance
        # Buffers for all pairs, used again and again: allocating takes as long as computing.
        self._pairs, *self._single = (np.empty((len(u),) * 2, kind) for kind in (float, *[np.float32] * 3))
        self._columns = np.concatenate([np.ones((len(u), 1)), 2.0 * u], axis=1)
        self._weights = weights.astype(np.float32)
        self.rows = weights  # the samples' shares in the likelihood

    def columns(self) -> _Fit:
        """Kernels of one scale; from here on far samples count for less."""
        factor = scale_of(self.w, self.d) * np.eye(self.d)
        self._without_the_far(factor)
        return self._scaled(factor, SCALE_LENGTHS)

    def oriented(self, correlation: Array, columns: _Fit) -> _Fit:
        """Kernels of that correlation, from the size of others on."""
        factor = np.linalg.cholesky(correlation) * math.sqrt(_size(columns.matrix) / _size(correlation))
        return self._scaled(factor, SCALE_LENGTHS)

    def fit(self, factor: NDArray[Any], inverse: NDArray[Any]) -> _Fit:
        """Evaluate kernels with that factor."""
        v, shares = product(self.u, inverse.T), self.rows[:, None]
        norms = 0.5 * (v * v).sum(axis=1)
        logs = product(v, v.T, out=self._pairs)
        logs += np.log(self.w) - norms  # less, in each row, its sample's norm
        np.fill_diagonal(logs, -math.inf)
        most, single, near = logs.max(axis=1), self._single[0], logs
        near[...] = np.exp(np.subtract(logs, most[:, None], out=single), out=single)  # in half the time
        sums = product(near, self._columns)
        share = shares / sums[:, :1]
        both = shares + product(share.T, near).T
        moment = inverse @ product(self.u.T, both * self.u - share * sums[:, 1:]) @ inverse.T
        return _Fit(factor, inverse, (moment + moment.T) / 2, np.stack([sums[:, 0], most - norms]))

    def judged(self, fit: _Fit) -> _Fit:
        """The last fit, with every sample's left-out log density."""
        sums, most = fit.found
        return fit._replace(logs=np.log(sums) + most - np.log1p(-self.w) - np.linalg.slogdet(fit.factor)[1])

    def climb(self, fit: _Fit, free: str) -> _Fit:
        """Raise the likelihood by a matrix's ``"scale"``, the ``"scales"`` of columns or all of it, ``"matrix"``."""
        if free == "scale":
            return self._scaled(fit.factor, LENGTHS)
        for length in LENGTHS:
            values, vectors = np.diagonal(fit.moment), np.eye(self.d)
            if free == "matrix":
                values, vectors = np.linalg.eigh(fit.moment)
                values = np.maximum(values + LEAST, LEAST)
                furthest = 1.0 + max(float(np.linalg.norm(x - 1.0)) for x in (values, 1.0 / values))
                power = length if length * math.log(furthest) <= 5.0 else 1  # some may be beyond exp(±5)
                stretch = values ** (0.5 * power)
            else:
                logs = length * np.log(np.maximum(values, LEAST))
                stretch = np.exp(0.5 * np.clip(logs, -5.0, 5.0))
            fit = self.fit(fit.factor @ (vectors * stretch), (vectors / stretch).T @ fit.inverse)
        return self.judged(fit)

    def may_gain(self, fit: _Fit, free: str, more: float) -> bool:
        """Whether a climb with ``more`` parameters may pay: not if the moment is all but a multiple of the identity."""
        values = np.linalg.eigvalsh(fit.moment) if free == "matrix" else np.diagonal(fit.moment)
        logs = np.log(np.maximum(values, LEAST))
        return bool(((logs - logs.mean()) ** 2).sum() > 0.2 * more * float(self.rows @ self.rows))

    def _distances(self, factor: NDArray[Any]) -> tuple[Array, Any]:
        """Half the squared distances in kernels of that factor: to the nearest (n,), and all less that (n, n)."""
        v = product(self.u, np.linalg.inv(factor).T)
        norms = 0.5 * (v * v).sum(axis=1)
        squares = product(v, v.T, out=self._pairs)
        np.subtract(norms, squares, out=squares)  # less, in each row, its sample's norm
        np.fill_diagonal(squares, 1e15)
        least = squares.min(axis=1)
        return least + norms, np.subtract(squares, least[:, None], out=self._single[0])

    def _without_the_far(self, factor: NDArray[Any]) -> None:
        """Weight the 3 % of the samples with the lowest density by that density, as they would widen the kernels."""
        logs = self.judged(self.fit(factor, np.linalg.inv(factor))).logs
        rows = self.w * np.exp(np.minimum(logs - np.quantile(logs, 0.03), 0.0))
        self.rows = rows / rows.sum()

    def _scaled(self, factor: NDArray[Any], lengths: Sequence[float]) -> _Fit:
        """Raise the likelihood by the scale of kernels of that factor; one product is less than a :meth:`fit`."""
        c, (least, beyond) = 1.0, self._distances(factor)  # c is scale⁻²
        for length in lengths:
            sums, products = self._sums(beyond, c)
            mean = 2.0 * c * float(self.rows @ (least + products / sums)) / self.d
            c *= math.exp(-min(max(length * math.log(max(mean, LEAST)), -5.0), 5.0))
        factor = factor / math.sqrt(c)
        return self.judged(self.fit(factor, np.linalg.inv(factor)))

    def _sums(self, beyond: Any, c: float) -> Array:
        """Each row's sums of w_j exp(−c q), and of that times q, q ≥ 0 beyond its least: (2, n)."""
        near, moment = self._single[1:]
        np.exp(np.multiply(beyond, np.float32(-c), out=near), out=near)
        both = near, np.multiply(near, beyond, out=moment)
        # :func:`.product` cuts one of a matrix and a vector into pieces, which takes ten times as long here.
        return np.stack([np.vecdot(terms, self._weights) for terms in both]).astype(np.float64)

    def better(self, fit: _Fit, other: _Fit, free: str, more: float, errors: float = 2.0) -> bool:
        """Whether a fit beats one of as many steps, with ``more`` fewer parameters, by ``errors`` standard errors."""
        return self._score(fit, other, more) > errors and self._score(fit, self.climb(other, free), more) > errors

    def _score(self, fit: _Fit, other: _Fit, more: float) -> float:
        """By how many standard errors a fit is better than another, which has ``more`` fewer parameters."""
        differences, rows = fit.logs - other.logs, self.rows
        middle = np.median(differences)
        differences = np.clip(differences, middle - 2.0, middle + 2.0)  # one far sample can have more than all others
        mean = float(differences @ rows)
        error = math.sqrt(float(rows**2 @ (differences - mean) ** 2))
        return (mean - more * float(rows @ rows)) / error if error > 0 else 0.0


def scale_of(weights: Array, d: int) -> float:
    """The scale of the first kernels, in spreads: the normal reference of samples with these weights."""
    return normal_reference("kde", d, 1.0 / float(weights @ weights))


def said(which: int, log_times: Any) -> str:
    """The description of a shape in a reason: 1 a scale per column, 2 the correlation, 3 a matrix."""
    what = "", "a scale of its own per column", "that of the samples' correlation", "a full matrix"
    return f"; its shape is {what[which]}, which makes a left-out sample {math.exp(log_times):.3g} times as likely"


def _size(matrix: Array) -> float:
    """The geometric mean of the eigenvalues."""
    return math.exp(float(np.linalg.slogdet(matrix)[1]) / len(matrix))


def _far_from_singular(matrix: Array) -> bool:
    """Whether no column is nearly a sum of others: by the trace of the correlation's inverse."""
    scale = np.sqrt(np.diagonal(matrix))
    values = np.linalg.eigvalsh(matrix / scale[:, None] / scale)
    return bool(values[0] > LEAST and (1.0 / values).sum() < 1.0 / LEAST)
