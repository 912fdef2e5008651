"""The exact path: direct differences in float64 for the few points beyond a backend's extent.

It serves any array library on any device and every feature, at the price of O(d) memory traffic per pair; the
passes over many points belong to a backend.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from .merge import concatenate, merge, safe_log, stack
from .protocol import Columns, Partial, Problem, Reduction

__all__ = ["reduce_exact"]

#: Numbers in the (rows, columns, d) block of differences: 16 MiB of float64.
BLOCK = 1 << 21


def reduce_exact(problem: Problem, queries: Any, columns: Columns, own_column: Any = None) -> Partial:
    """Answer ``problem`` by direct differences.

    Parameters
    ----------
    problem : Problem
        Its reduction, features, scales and d are used; the sizes come from the arrays.
    queries : (m, d) float64 array
    columns : Columns
    own_column : (m,) integer array, optional
        With ``"exclude_self"``: the column that each row leaves out, −1 for none.
    """
    m, n, d = queries.shape[0], columns.points.shape[0], problem.d
    width = max(1, min(n, BLOCK // max(1, d)))
    height = max(1, BLOCK // (width * max(1, d)))
    strips = []
    for r in range(0, max(m, 1), height):
        here = slice(r, min(r + height, m))
        partials = []
        for c in range(0, n, width):
            over = slice(c, min(c + width, n))
            values = None if columns.values is None else columns.values[over, :]
            block = Columns(columns.points[over, :], columns.log_weights[over], values)
            own = None if own_column is None else own_column[here] - c
            partials.append(_block(problem, queries[here, :], block, own))
        strips.append(merge(partials))
    return strips[0] if len(strips) == 1 else concatenate(strips)


def _block(problem: Problem, query: Any, columns: Columns, own: Any) -> Partial:
    answers = [_at_scale(problem, query, columns, own, scale) for scale in problem.scales or (1.0,)]
    return stack(answers) if problem.scales else answers[0]


def _at_scale(problem: Problem, query: Any, columns: Columns, own: Any, scale: float) -> Partial:
    xp = array_namespace(query)
    points, log_weights = columns.points, columns.log_weights
    difference = points[None, :, :] - query[:, None, :]  # (rows, columns, d)
    exponent = -0.5 / scale**2 * xp.sum(difference * difference, axis=-1)
    terms = exponent + log_weights[None, :]
    left_out = None
    if own is not None:
        left_out = own[:, None] == xp.arange(points.shape[0], device=device(points))[None, :]
        terms = xp.where(left_out, xp.full_like(terms, -math.inf), terms)
    # Far from every point exponents are huge, and only their differences count: with k the largest term,
    # r²_j − r²_k = ‖u_j − u_k‖² + 2 (u_j − u_k)·(u_k − u_i), without the cancellation.
    largest = xp.argmax(terms, axis=1)
    nearest = xp.take(points, largest, axis=0)  # (rows, d)
    away = nearest - query
    delta = points[None, :, :] - nearest[:, None, :]
    relative = -0.5 / scale**2 * xp.sum(delta * (delta + 2.0 * away[:, None, :]), axis=-1)
    relative = relative + (log_weights[None, :] - xp.take(log_weights, largest, axis=0)[:, None])
    if left_out is not None:
        relative = xp.where(left_out, xp.full_like(relative, -math.inf), relative)
    # Rounding of huge exponents may have picked a term that is not quite the largest.
    most = xp.max(relative, axis=1)
    most = xp.where(xp.isfinite(most), most, xp.zeros_like(most))
    phi = xp.exp(relative - most[:, None])
    top = xp.max(terms, axis=1)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top)) + most
    total = xp.sum(phi, axis=1)
    if problem.reduction is Reduction.LAPLACE:
        half = 1.0 + 0.5 * problem.d
        signed = xp.sum(phi * (half + exponent), axis=1)  # exponent = −½ r²
        plus = xp.sum(phi * (half - exponent), axis=1)
        return Partial(safe_log(plus) + top, sign=xp.sign(signed), log_magnitude=safe_log(xp.abs(signed)) + top)
    share = phi / xp.where(total > 0, total, xp.ones_like(total))[:, None]
    values = None if columns.values is None else share @ columns.values
    shift = None
    if problem.reduction is Reduction.MEAN:
        shift = away + xp.sum(share[:, :, None] * delta, axis=1)
        shift = xp.where((total > 0)[:, None], shift, xp.zeros_like(shift))
    return Partial(safe_log(total) + top, shift=shift, values=values)
