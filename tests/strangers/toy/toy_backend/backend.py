"""The toy backend: one row at a time, direct differences, log-sum-exp, all in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

__all__ = ["ToyBackend"]

Array = NDArray[np.float64]


class ToyBackend:
    """Right at any extent, and slow; it takes no options."""

    def probe(self, device: str) -> Support:
        """NumPy runs on any CPU."""
        return Support(device == "cpu", "NumPy runs on the CPU")

    def prepare(self, problem: Problem, columns: Columns) -> Columns:
        """There is nothing to pack."""
        return columns

    def reduce(self, problem: Problem, queries: Array | None, state: Columns, own_offset: int = 0) -> Partial:
        """Reduce row by row; no rows give empty arrays."""
        rows, n = state.points if queries is None else queries, len(state.points)
        m, d = rows.shape
        mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
        log_sum = np.empty(m)
        shift = np.empty((m, d)) if mean else None
        sign, log_magnitude = (np.empty(m), np.empty(m)) if laplace else (None, None)
        for i, row in enumerate(rows):
            own = i + own_offset
            excluded = own if "exclude_self" in problem.requires and 0 <= own < n else None
            exponent, phi, top, nearest = _terms(row, state, excluded)
            if shift is not None:
                shift[i] = _shift(row, state.points, phi, nearest)
            if sign is None or log_magnitude is None:
                log_sum[i] = _log(phi.sum()) + top
            else:
                half = 1.0 + 0.5 * d
                signed = phi @ (half + exponent)
                log_sum[i] = _log(phi @ (half - exponent)) + top
                sign[i], log_magnitude[i] = np.sign(signed), _log(abs(signed)) + top
        return Partial(log_sum, shift=shift, sign=sign, log_magnitude=log_magnitude)


def _terms(row: Array, columns: Columns, excluded: int | None) -> tuple[Array, Array, float, int]:
    """Return −½ r²_j; w_j φ_j / exp(top), all 0 where no column is left; top; the column of the largest term.

    Far from every point the exponents are huge and only their differences count. With k the nearest column,
    r²_j − r²_k = (u_j − u_k)·(u_j − u_k + 2 (u_k − u_i)), without the cancellation.
    """
    points, log_weights = columns.points, columns.log_weights
    away = points - row  # (n, d)
    exponent = -0.5 * np.vecdot(away, away)  # (n,)
    terms = exponent + log_weights
    if excluded is not None:
        terms[excluded] = -math.inf
    k = int(terms.argmax())
    if terms[k] == -math.inf:  # the only column is the row's own
        return exponent, np.zeros(len(points)), 0.0, k
    delta = points - points[k]
    relative = -0.5 * np.vecdot(delta, delta + 2.0 * away[k]) + (log_weights - log_weights[k])
    if excluded is not None:
        relative[excluded] = -math.inf
    largest = relative.max()  # 0, but where rounding made another column's term look the largest
    return exponent, np.exp(relative - largest), float(terms[k] + largest), k


def _shift(row: Array, points: Array, phi: Array, nearest: int) -> Any:
    """Σ_j φ_j (u_j − u_i) / Σ_j φ_j, as the way to the nearest column and on from there, so that no digits cancel."""
    total = phi.sum()
    if total == 0.0:
        return 0.0
    return (points[nearest] - row) + (phi / total) @ (points - points[nearest])


def _log(x: float) -> float:
    return math.log(x) if x > 0.0 else -math.inf
