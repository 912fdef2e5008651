"""The oracle: every estimator by its definition, slowly, in float64.

Direct differences and log-sum-exp, with Mahalanobis distances taken from the user's bandwidth matrix H itself, factored
in decimal arithmetic: nothing here is shared with the core's whitening or with a backend.

Source of the formulas: Epstein, Dwaraknath and Winnicki, "Flash-SD-KDE: Accelerating SD-KDE with Tensor Cores".
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Sums", "debias", "estimate", "grad_log_density", "kernel_log_norm", "kernel_log_sum", "sums"]

Array = NDArray[np.float64]


class Sums(NamedTuple):
    """The three reductions for every query row."""

    log_sum: Array  # (m,)    ℓ_i = log Σ_j w_j φ_ij
    shift: Array  # (m, d)  Σ_j w_j φ_ij (x_j − y_i) / Σ_j w_j φ_ij, in the units of the data
    signed: Array  # (m,)    L_i / exp(log_plus_i), in [−1, 1]
    log_plus: Array  # (m,)    log M_i


def sums(
    query: ArrayLike,
    train: ArrayLike,
    bandwidth: ArrayLike = 1.0,
    *,
    weights: ArrayLike | None = None,
    log_weights: ArrayLike | None = None,
    plain: bool = False,
) -> Sums:
    """Return the three reductions, some rows at a time.

    ``bandwidth`` is h, one h_j per dimension, or the matrix H, in the units of the data. ``weights`` (n,) are not
    negative, and normalised here; ``log_weights``, in their place, are used as they are. ``plain`` computes in float64
    and not in extended precision, which takes less time: up to some ten bandwidths it is right far within every
    tolerance.
    """
    y, x, h, log_w = _given(query, train, bandwidth, weights, log_weights)
    y, x = (points.astype(np.float64 if plain else np.longdouble) for points in (y, x))
    blocks = zip(*(_block(rows, x, h, log_w) for rows in _blocks(y, x)))
    log_sum, shift, signed, log_plus = (np.concatenate(parts).astype(float) for parts in blocks)
    return Sums(log_sum, _stretched(bandwidth, shift) if np.ndim(bandwidth) == 2 else shift, signed, log_plus)


def _blocks(y: Any, x: Any) -> Iterator[Any]:
    height = max(1, (1 << 17) // x.size)
    for start in range(0, max(1, len(y)), height):  # one block where there are no rows
        yield y[start : start + height]


def _block(y: Any, x: Any, bandwidth: ArrayLike, log_w: Array) -> Any:
    """Return the fields of :class:`Sums` for the rows of one block."""
    rows, half, away = np.arange(len(y)), 1.0 + 0.5 * x.shape[1], x - y[:, None]  # (b, n, d)
    exponent = -0.5 * _mahalanobis(away, away, bandwidth)  # (b, n)
    terms = exponent + log_w
    nearest = terms.argmax(axis=1)
    # Far from every sample exponents are huge and only their differences count. With δ_j = x_j − x_k, k the largest
    # term: r²_j − r²_k = δ_jᵀ H⁻¹ δ_j + 2 δ_jᵀ H⁻¹ (x_k − y), without the cancellation.
    delta, towards = x - x[nearest][:, None], away[rows, nearest]
    farther = _mahalanobis(delta, delta + 2 * towards[:, None], bandwidth)
    relative = log_w - log_w[nearest][:, None] - 0.5 * farther
    most = relative.max(axis=1)  # 0, but for the rounding of huge exponents
    top, phi = terms[rows, nearest] + most, np.exp((relative - most[:, None]).astype(float))
    total, signed, plus = (phi.sum(axis=1), *((phi * (half + k * exponent)).sum(axis=1) for k in (1, -1)))
    shift = towards + np.matmul((phi / total[:, None])[:, None, :], delta)[:, 0, :]
    return top + np.log(total), shift, signed / plus, top + np.log(plus)


def kernel_log_sum(query: ArrayLike, train: ArrayLike, kernel: str, bandwidth: Any = 1.0, **weights: Any) -> Array:
    """Return log Σ_j w_j K(r_ij) for every row, (m,), K one of ``protocol.KERNELS``; other arguments as of `sums`."""
    y, x, bandwidth, log_w = _given(query, train, bandwidth, **weights)
    x, found = x.astype(np.longdouble), []
    for rows in _blocks(y, x):
        away = x - rows[:, None]  # (b, n, d)
        terms = _log_kernel(kernel, np.sqrt(_mahalanobis(away, away, bandwidth))) + log_w
        top = terms.max(axis=1)
        with np.errstate(invalid="ignore"):  # −inf − −inf of a row that reaches no column
            total = np.log(np.exp(terms - top[:, None]).sum(axis=1)) + top
        found.append(np.where(top == -np.inf, top, total).astype(float))
    return np.concatenate(found)


def _log_kernel(kernel: str, r: Any) -> Any:
    if kernel == "gaussian":
        return -0.5 * r**2
    if kernel == "exponential":
        return -r
    inside = np.minimum(r, 1.0)
    values = {  # those of bounded support, 0 from r = 1 on
        "tophat": np.ones_like(r),
        "epanechnikov": (1 - inside) * (1 + inside),
        "linear": 1 - inside,
        "cosine": np.sin(np.longdouble(np.pi) / 2 * (1 - inside)),
    }[kernel]
    with np.errstate(divide="ignore"):
        return np.log(np.where(r < 1, values, 0.0).astype(float))


def kernel_log_norm(kernel: str, d: int) -> float:
    """Return log ∫K(‖u‖) du over d dimensions: of bounded support by Gauss's quadrature along the radius."""
    if kernel == "gaussian":
        return 0.5 * d * math.log(2 * math.pi)
    surface = math.log(2) + 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d)
    if kernel == "exponential":
        return surface + math.lgamma(d)
    if not np.isneginf(_log_kernel(kernel, np.array([1.0, 5.0]))).all():
        raise NotImplementedError(f"kernel {kernel!r} is not 0 from r = 1 on; add its integral here")
    nodes, weights = np.polynomial.legendre.leggauss(d // 2 + 20)
    r = (1 + nodes) / 2
    terms = (d - 1) * np.log(r) + np.log(weights / 2) + _log_kernel(kernel, r)
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
    """Return rows and columns, whitened where the bandwidth is a matrix, the bandwidth, and logs of weights."""
    y, x = _points(query), _points(train)
    if np.ndim(bandwidth) == 2:
        (y, x), bandwidth = _whitened(bandwidth, y, x), 1.0
    if log_weights is None:
        with np.errstate(divide="ignore"):
            log_weights = normalised(np.zeros(len(x)) if weights is None else np.log(np.asarray(weights, float)))
    return y, x, bandwidth, np.asarray(log_weights, float)


def normalised(log_weights: Array) -> Array:
    """Return logs of weights that sum to 1."""
    top = log_weights.max()
    return log_weights - top - math.log(math.fsum(np.exp(log_weights - top)))


def _mahalanobis(a: Any, b: Any, bandwidth: ArrayLike) -> Any:
    """aᵀ H⁻¹ b for every row, in the precision of a and b; H is diagonal."""
    square = np.square(np.asarray(bandwidth, float), dtype=a.dtype)
    return np.vecdot(a, b) / square if square.ndim == 0 else (a * b / square).sum(axis=-1)


def _whitened(bandwidth: ArrayLike, y: Array, x: Array) -> Any:
    """L⁻¹(y − x₀) and L⁻¹(x − x₀), H = L Lᵀ, by forward substitution in decimal arithmetic; in extended precision.

    60 digits are enough for any H that is positive definite in float64.
    """
    with decimal.localcontext(prec=60):
        factor, u = _decimal_factor(bandwidth), _decimal(np.concatenate([y, x])) - _decimal(x[:1])
        for k, row in enumerate(factor):
            u[:, k] = (u[:, k] - sum(row[j] * u[:, j] for j in range(k))) / row[k]
        high = u.astype(float)
        wide = high.astype(np.longdouble) + (u - _decimal(high)).astype(float)
    return wide[: len(y)], wide[len(y) :]


def _stretched(bandwidth: ArrayLike, u: Array) -> Array:
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
