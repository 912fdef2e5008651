"""The oracle of the estimators: each by its definition, slowly, on the reductions of the suite's oracle.

Mahalanobis distances are taken from the user's bandwidth matrix H itself, factored in decimal arithmetic: nothing here
is shared with the core's whitening or with a backend.

Source of the formulas: Epstein, Dwaraknath and Winnicki, "Flash-SD-KDE: Accelerating SD-KDE with Tensor Cores".
"""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sdkde_core.testing import reference
from sdkde_core.testing.reference import Array, Sums, log_kernel, normalised


def sums(
    query: ArrayLike,
    train: ArrayLike,
    bandwidth: ArrayLike = 1.0,
    *,
    weights: ArrayLike | None = None,
    log_weights: ArrayLike | None = None,
    plain: bool = False,
) -> Sums:
    """Return the three reductions, the shift in the units of the data.

    ``bandwidth`` is h, one h_j per dimension, or the matrix H, in the units of the data. ``weights`` (n,) are not
    negative, and normalised here; ``log_weights``, in their place, are used as they are. ``plain``: in float64.
    """
    found = reference.sums(*_given(query, train, bandwidth, weights, log_weights), plain=plain)
    return found._replace(shift=_stretched(bandwidth, found.shift))


def kernel_log_sum(query: ArrayLike, train: ArrayLike, kernel: str, bandwidth: Any = 1.0, **weights: Any) -> Array:
    """Return log Σ_j w_j K(r_ij) for every row, (m,), K one of ``protocol.KERNELS``; other arguments as of `sums`."""
    y, x, log_w = _given(query, train, bandwidth, **weights)
    return reference.kernel_log_sum(y, x, kernel, 1.0, log_w)


def kernel_log_norm(kernel: str, d: int) -> float:
    """Return log ∫K(‖u‖) du over d dimensions: of bounded support by Gauss's quadrature along the radius."""
    if kernel == "gaussian":
        return 0.5 * d * math.log(2 * math.pi)
    surface = math.log(2) + 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d)
    if kernel == "exponential":
        return surface + math.lgamma(d)
    if not np.isneginf(log_kernel(kernel, np.array([1.0, 5.0]))).all():
        raise NotImplementedError(f"kernel {kernel!r} is not 0 from r = 1 on; add its integral here")
    nodes, weights = np.polynomial.legendre.leggauss(d // 2 + 20)
    r = (1 + nodes) / 2
    terms = (d - 1) * np.log(r) + np.log(weights / 2) + log_kernel(kernel, r)
    return surface + float(np.logaddexp.reduce(terms))


def estimate(
    train: ArrayLike,
    query: ArrayLike | None = None,
    *,
    method: str = "sdkde",
    bandwidth: ArrayLike = 1.0,
    kernel: str = "gaussian",
    weights: ArrayLike | None = None,
    log: bool = False,
    step: float | str | None = None,
    score_bandwidth: float | None = None,
    tails: float | None = None,
) -> Array:
    """Return the density at ``query`` (default: at ``train``), or its log; Laplace's log is NaN where p̂ < 0."""
    if method not in ("kde", "sdkde", "laplace"):
        raise ValueError(f"method is {method!r}; pass 'kde', 'sdkde' or 'laplace'")
    x = _points(train)
    y, d, sign = x if query is None else _points(query), x.shape[1], np.ones(())
    constant = -kernel_log_norm(kernel, d) - 0.5 * _log_determinant(bandwidth, d)
    if kernel != "gaussian":
        log_sum = kernel_log_sum(y, x, kernel, bandwidth, weights=weights)
    else:
        if np.ndim(bandwidth) == 2:  # moved samples would lose digits in the units of the data
            (y, x), bandwidth = _whitened(bandwidth, y, x), 1.0
        moves = step, score_bandwidth or 1.0
        centres = _moved(x, bandwidth, weights, *moves) if method == "sdkde" else x
        result = sums(y, centres, bandwidth, weights=weights)
        log_sum, sign = (result.log_plus, result.signed) if method == "laplace" else (result.log_sum, sign)
        if tails:  # a guard, of up to 4096 samples
            h = np.asarray(bandwidth, dtype=float)
            wide = sums(y, centres, h * (4.0 if h.ndim < 2 else 16.0), weights=weights).log_sum
            log_sum = np.logaddexp(math.log1p(-tails) + log_sum, math.log(tails) - d * math.log(4.0) + wide)
    if not log:
        return sign * np.exp(log_sum + constant)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(sign) + log_sum + constant


def debias(train: ArrayLike, bandwidth: ArrayLike = 1.0, *, weights: ArrayLike | None = None) -> Array:
    """Return the samples moved by ½ H ŝ(x_j), ŝ = ∇log p̂: half a mean-shift step, since H ŝ is the shift."""
    return _moved(_points(train), bandwidth, weights).astype(float)


def _moved(
    x: Array, bandwidth: ArrayLike, weights: ArrayLike | None, step: float | str | None = None, c: float = 1.0
) -> Any:
    """Moved samples in extended precision: far from 0, float64 has too few digits in bandwidths.

    ``step``: see :func:`sdkde_core.estimate`; ``c``: the score's bandwidth, in those of the estimate.
    """
    h = np.asarray(bandwidth, dtype=float)
    shift = sums(x, x, h * (c if h.ndim < 2 else c**2), weights=weights).shift / c**2
    if step == "moments":  # the smallest root of a τ² − 2 b τ + d, of covariances in bandwidths
        inverse = np.linalg.inv(np.linalg.cholesky(h)) if h.ndim == 2 else np.eye(x.shape[1]) / h
        u, s, w = x @ inverse.T, shift @ inverse.T, np.ones(len(x)) if weights is None else np.asarray(weights)
        u, s = (z - np.average(z, axis=0, weights=w) for z in (u, s))
        a, b = (float(np.average((z * s).sum(1), weights=w)) for z in (s, -u))
        root = (b - np.sqrt(max(b * b - a * x.shape[1], 0.0))) / max(a, 1e-300)
        step = min(max(root, 0.5 if c == 1.0 else 0.0), 1.2 * c * c)
    return x.astype(np.longdouble) + (0.5 if step is None else float(step)) * shift


def grad_log_density(
    train: ArrayLike, query: ArrayLike, bandwidth: ArrayLike = 1.0, *, weights: ArrayLike | None = None
) -> Array:
    """Return ∇log p̂ of the plain KDE at ``query``: H⁻¹ · shift."""
    shift = sums(query, train, bandwidth, weights=weights).shift
    h = np.asarray(bandwidth, float)
    return shift / h**2 if h.ndim < 2 else np.linalg.solve(h, shift.T).T


def _points(x: ArrayLike) -> Array:
    a = np.asarray(x)
    a = a if a.dtype == np.longdouble else a.astype(float)  # moved samples have more digits
    return a[:, None] if a.ndim == 1 else a


def _given(query: ArrayLike, train: ArrayLike, bandwidth: Any, weights: Any = None, log_weights: Any = None) -> Any:
    """Return rows and columns in bandwidths, and logs of weights."""
    y, x = _points(query), _points(train)
    if np.ndim(bandwidth) == 2:
        y, x = _whitened(bandwidth, y, x)
    elif np.any(np.asarray(bandwidth) != 1.0):
        y, x = (points.astype(np.longdouble) / np.asarray(bandwidth, float) for points in (y, x))
    if log_weights is None:
        with np.errstate(divide="ignore"):
            log_weights = normalised(np.zeros(len(x)) if weights is None else np.log(np.asarray(weights, float)))
    return y, x, np.asarray(log_weights, float)


def _whitened(bandwidth: ArrayLike, y: Array, x: Array) -> Any:
    """L⁻¹(y − x₀) and L⁻¹(x − x₀), H = L Lᵀ, by forward substitution in decimal arithmetic; in extended precision.

    60 digits are enough for any H that is positive definite in float64; x₀, the median, is near all points but a few.
    """
    with decimal.localcontext(prec=60):
        factor, u = _decimal_factor(bandwidth), _decimal(np.concatenate([y, x])) - _decimal(np.median(x, axis=0)[None])
        for k, row in enumerate(factor):
            u[:, k] = (u[:, k] - sum(row[j] * u[:, j] for j in range(k))) / row[k]
        high = u.astype(float)
        wide = high.astype(np.longdouble) + (u - _decimal(high)).astype(float)
    return wide[: len(y)], wide[len(y) :]


def _stretched(bandwidth: ArrayLike, u: Array) -> Array:
    if np.ndim(bandwidth) < 2:
        return u * np.asarray(bandwidth, float)
    with decimal.localcontext(prec=60):
        return (_decimal(u) @ _decimal_factor(bandwidth).T).astype(float)


def _decimal_factor(bandwidth: ArrayLike) -> Any:
    """The Cholesky factor of the symmetric part of H, in the digits of the context."""
    factor = _decimal(np.asarray(bandwidth, float))
    factor = (factor + factor.T) / 2
    for k in range(len(factor)):
        factor[k, k + 1 :] = decimal.Decimal(0)
        factor[k, k] = (factor[k, k] - sum(factor[k, :k] ** 2)).sqrt()
        for i in range(k + 1, len(factor)):
            factor[i, k] = (factor[i, k] - sum(factor[i, :k] * factor[k, :k])) / factor[k, k]
    return factor


def _decimal(x: Array) -> Any:
    return np.vectorize(decimal.Decimal, otypes=[object])(x)


def _log_determinant(bandwidth: ArrayLike, d: int) -> float:
    """log det H."""
    h = np.asarray(bandwidth, float)
    if h.ndim < 2:
        return float(2 * np.log(np.broadcast_to(h, (d,))).sum())
    with decimal.localcontext(prec=60):
        return float(2 * sum(pivot.ln() for pivot in np.diagonal(_decimal_factor(h))))
