"""The oracle: every estimator by its definition, slowly, in float64.

Direct differences and log-sum-exp, with Mahalanobis distances taken from the user's bandwidth matrix H itself: nothing
here is shared with the core's whitening or with a backend. The paper's expanded formulas (`paper_*`) stand beside it:
equal on benign data, less accurate elsewhere.

Source of the formulas: Epstein, Dwaraknath and Winnicki, "Flash-SD-KDE: Accelerating SD-KDE with Tensor Cores".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Sums", "debias", "estimate", "grad_log_density", "paper_kde", "paper_laplace", "paper_score", "sums"]

Array = NDArray[np.float64]


class Sums(NamedTuple):
    """The three reductions for every query row; with several scales each has an axis for them after the first."""

    log_sum: Array  # (m,)    ℓ_i = log Σ_j w_j φ_ij
    shift: Array  # (m, d)  Σ_j w_j φ_ij (x_j − y_i) / Σ_j w_j φ_ij, in the units of the data
    signed: Array  # (m,)    L_i / exp(log_plus_i), in [−1, 1]
    log_plus: Array  # (m,)    log M_i
    values: Array | None  # (m, c)  Σ_j w_j φ_ij v_j / Σ_j w_j φ_ij


def sums(
    query: ArrayLike,
    train: ArrayLike,
    bandwidth: ArrayLike = 1.0,
    *,
    weights: ArrayLike | None = None,
    log_weights: ArrayLike | None = None,
    exclude_self: bool = False,
    values: ArrayLike | None = None,
    scale: float = 1.0,
) -> Sums:
    """Return the three reductions, row by row.

    Parameters
    ----------
    query : (m, d) array_like
    train : (n, d) array_like
    bandwidth : float, (d,) or (d, d) array_like
        h, per-dimension h_j, or the matrix H; in the units of the data.
    weights : (n,) array_like, optional
        Not negative; normalised here. 1/n each by default.
    log_weights : (n,) array_like, optional
        Used as they are, in place of ``weights``.
    exclude_self : bool
        Row i leaves out column i.
    values : (n, c) array_like, optional
    scale : float
        Factor on the bandwidth.
    """
    y, x = _points(query), _points(train)
    n, d = x.shape
    log_w = _log_weights(n, weights) if log_weights is None else np.asarray(log_weights, float)
    v = None if values is None else np.asarray(values, float)
    out = [_row(y_i, x, bandwidth, log_w, i if exclude_self else None, v, scale) for i, y_i in enumerate(y)]
    empty = (np.empty(0), np.empty((0, d)), np.empty(0), np.empty(0), None if v is None else np.empty((0, v.shape[1])))
    columns = [None if column[0] is None else np.array(column) for column in zip(*out)] if out else empty
    return Sums(*columns)


def _row(y: Array, x: Array, bandwidth: ArrayLike, log_w: Array, own: int | None, v: Array | None, scale: float) -> Any:
    wide = x.astype(np.longdouble)  # extended precision where the platform has it
    difference = wide - y
    exponent = -0.5 * _mahalanobis(difference, difference, bandwidth) / scale**2
    terms = exponent + log_w
    if own is not None and 0 <= own < len(x):
        terms[own] = -np.inf
    nearest = int(terms.argmax())
    if terms[nearest] == -np.inf:
        return -np.inf, np.zeros(x.shape[1]), 0.0, -np.inf, None if v is None else np.zeros(v.shape[1])
    # Far from every sample exponents are huge and only their differences count. With δ_j = x_j − x_k, k the largest
    # term: r²_j − r²_k = δ_jᵀ H⁻¹ δ_j + 2 δ_jᵀ H⁻¹ (x_k − y), without the cancellation.
    delta = wide - wide[nearest]
    relative = _mahalanobis(delta, delta, bandwidth) + 2 * _mahalanobis(delta, difference[nearest], bandwidth)
    relative = np.where(np.isfinite(terms), -0.5 * relative / scale**2 + (log_w - log_w[nearest]), -np.inf)
    most = relative.max()  # 0, but for the rounding of huge exponents
    top = float(terms[nearest] + most)
    phi, exponent = np.exp((relative - most).astype(float)), exponent.astype(float)
    total = math.fsum(phi)
    half = 1.0 + 0.5 * x.shape[1]
    plus = math.fsum(phi * (half - exponent))
    signed = math.fsum(phi * (half + exponent))
    share = phi / total
    mean = None if v is None else share @ v
    shift = (difference[nearest] + share @ delta).astype(float)
    return top + math.log(total), shift, signed / plus, top + math.log(plus), mean


def estimate(
    train: ArrayLike,
    query: ArrayLike | None = None,
    *,
    method: str = "sdkde",
    bandwidth: ArrayLike = 1.0,
    weights: ArrayLike | None = None,
    log: bool = False,
    exclude_self: bool = False,
) -> Array:
    """Return the density at ``query`` (default: at ``train``), or its log; Laplace's log is NaN where p̂ < 0."""
    x = _points(train)
    y = x if query is None else _points(query)
    centres = debias(x, bandwidth, weights=weights, exclude_self=exclude_self) if method == "sdkde" else x
    result = sums(y, centres, bandwidth, weights=weights, exclude_self=exclude_self)
    constant = -0.5 * x.shape[1] * math.log(2 * math.pi) - 0.5 * _log_determinant(bandwidth, x.shape[1])
    if method in ("kde", "sdkde"):
        log_density = result.log_sum + constant
        return log_density if log else np.exp(log_density)
    if method == "laplace":
        if not log:
            return result.signed * np.exp(result.log_plus + constant)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.log(result.signed) + result.log_plus + constant
    raise ValueError(f"method is {method!r}; pass 'kde', 'sdkde' or 'laplace'")


def debias(
    train: ArrayLike, bandwidth: ArrayLike = 1.0, *, weights: ArrayLike | None = None, exclude_self: bool = False
) -> Array:
    """Return the samples moved by ½ H ŝ(x_j), ŝ = ∇log p̂: half a mean-shift step, since H ŝ is the shift."""
    x = _points(train)
    return x + 0.5 * sums(x, x, bandwidth, weights=weights, exclude_self=exclude_self).shift


def grad_log_density(
    train: ArrayLike, query: ArrayLike, bandwidth: ArrayLike = 1.0, *, weights: ArrayLike | None = None
) -> Array:
    """Return ∇log p̂ of the plain KDE at ``query``: H⁻¹ · shift."""
    shift = sums(query, train, bandwidth, weights=weights).shift
    h = np.asarray(bandwidth, float)
    return shift / h**2 if h.ndim < 2 else np.linalg.solve(h, shift.T).T


def paper_score(train: ArrayLike, h: float) -> Array:
    """The paper's score ŝ(x_i) = (Σ_j φ_ij x_j − x_i Σ_j φ_ij) / (h² Σ_j φ_ij), (n, d), from matrix products."""
    x = _points(train)
    phi = _paper_phi(x, x, h)
    return (phi @ x - x * phi.sum(1, keepdims=True)) / (h**2 * phi.sum(1, keepdims=True))


def paper_kde(train: ArrayLike, query: ArrayLike, h: float) -> Array:
    """The paper's density from ‖x‖² + ‖y‖² − 2 xᵀy, (m,)."""
    x, y = _points(train), _points(query)
    return _paper_phi(y, x, h).sum(1) / (len(x) * (h * math.sqrt(2 * math.pi)) ** x.shape[1])


def paper_laplace(train: ArrayLike, query: ArrayLike, h: float) -> Array:
    """The paper's Laplace-corrected density, (m,)."""
    x, y = _points(train), _points(query)
    phi = _paper_phi(y, x, h)
    factor = 1 + x.shape[1] / 2 + np.log(np.maximum(phi, 1e-300))  # log φ = −½ r²
    return (phi * factor).sum(1) / (len(x) * (h * math.sqrt(2 * math.pi)) ** x.shape[1])


def _paper_phi(y: Array, x: Array, h: float) -> Array:
    squared = (y**2).sum(1)[:, None] + (x**2).sum(1)[None, :] - 2 * y @ x.T
    return np.exp(-np.maximum(squared, 0.0) / (2 * h**2))


def _points(x: ArrayLike) -> Array:
    a = np.asarray(x, float)
    return a[:, None] if a.ndim == 1 else a


def _log_weights(n: int, weights: ArrayLike | None) -> Array:
    if weights is None:
        return np.full(n, -math.log(n))
    w = np.asarray(weights, float)
    with np.errstate(divide="ignore"):
        log_w = np.log(w)
    top = log_w.max()
    return log_w - top - math.log(math.fsum(np.exp(log_w - top)))


def _mahalanobis(a: Any, b: Any, bandwidth: ArrayLike) -> Any:
    """aᵀ H⁻¹ b for every row, in the precision of a and b (a full H: LAPACK's float64)."""
    h = np.asarray(bandwidth, float)
    if h.ndim < 2:
        return (a * b / np.square(h, dtype=np.longdouble)).sum(axis=-1)
    return (a * np.linalg.solve(h, np.atleast_2d(b).astype(float).T).T).sum(axis=-1)


def _log_determinant(bandwidth: ArrayLike, d: int) -> float:
    """log det H."""
    h = np.asarray(bandwidth, float)
    if h.ndim < 2:
        return float(2 * np.log(np.broadcast_to(h, (d,))).sum())
    return float(np.linalg.slogdet(h)[1])
