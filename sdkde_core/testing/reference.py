"""The oracle: the reductions by their definition, slowly, in extended precision.

Direct differences and log-sum-exp: nothing here is shared with the core or with a backend. Points are whitened.

Source of the formulas: Epstein, Dwaraknath and Winnicki, "Flash-SD-KDE: Accelerating SD-KDE with Tensor Cores".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Sums(NamedTuple):
    """The three reductions for every query row."""

    log_sum: Array  # (m,)    ℓ_i = log Σ_j w_j φ_ij
    shift: Array  # (m, d)  Σ_j w_j φ_ij (x_j − y_i) / Σ_j w_j φ_ij
    signed: Array  # (m,)    L_i / exp(log_plus_i), in [−1, 1]
    log_plus: Array  # (m,)    log M_i


def sums(query: Array, train: Array, log_weights: Array, *, plain: bool = False) -> Sums:
    """Return the three reductions for (m, d) over (n, d), some rows at a time.

    ``plain`` computes in float64 and not in extended precision, which takes less time: up to some ten bandwidths it is
    right far within every tolerance.
    """
    y, x = (points.astype(np.float64 if plain else np.longdouble) for points in (query, train))
    blocks = zip(*(_block(rows, x, log_weights) for rows in _blocks(y, x)))
    return Sums(*(np.concatenate(parts).astype(float) for parts in blocks))


def _blocks(y: Any, x: Any) -> Iterator[Any]:
    height = max(1, (1 << 17) // x.size)
    for start in range(0, max(1, len(y)), height):  # one block where there are no rows
        yield y[start : start + height]


def _block(y: Any, x: Any, log_w: Array) -> Any:
    """Return the fields of :class:`Sums` for the rows of one block."""
    rows, half, away = np.arange(len(y)), 1.0 + 0.5 * x.shape[1], x - y[:, None]  # (b, n, d)
    exponent = -0.5 * np.vecdot(away, away)  # (b, n)
    terms = exponent + log_w
    nearest = terms.argmax(axis=1)
    # Far from every sample exponents are huge and only their differences count. With δ_j = x_j − x_k, k the largest
    # term: r²_j − r²_k = ‖δ_j‖² + 2 δ_j·(x_k − y), without the cancellation.
    delta, towards = x - x[nearest][:, None], away[rows, nearest]
    relative = log_w - log_w[nearest][:, None] - 0.5 * np.vecdot(delta, delta + 2 * towards[:, None])
    most = relative.max(axis=1)  # 0, but for the rounding of huge exponents
    top, phi = terms[rows, nearest] + most, np.exp((relative - most[:, None]).astype(float))
    total, signed, plus = (phi.sum(axis=1), *((phi * (half + k * exponent)).sum(axis=1) for k in (1, -1)))
    shift = towards + np.matmul((phi / total[:, None])[:, None, :], delta)[:, 0, :]
    return top + np.log(total), shift, signed / plus, top + np.log(plus)


def kernel_log_sum(query: Array, train: Array, kernel: str, width: float, log_weights: Array) -> Array:
    """Return log Σ_j w_j K(r_ij / width) for every row, (m,), K one of ``protocol.KERNELS``."""
    x, found = train.astype(np.longdouble), []
    for rows in _blocks(query, x):
        away = x - rows[:, None]  # (b, n, d)
        terms = log_kernel(kernel, np.sqrt(np.vecdot(away, away)) / width) + log_weights
        found.append(np.logaddexp.reduce(terms, axis=1).astype(float))  # −inf where a row reaches no column
    return np.concatenate(found)


def log_kernel(kernel: str, r: Any) -> Any:
    """log K(r), in the precision of r; −inf beyond the support."""
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


def normalised(log_weights: Array) -> Array:
    """Return logs of weights that sum to 1."""
    top = log_weights.max()
    return log_weights - top - math.log(math.fsum(np.exp(log_weights - top)))
