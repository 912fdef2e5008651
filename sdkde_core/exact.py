"""The exact path: direct differences in float64 for the few points beyond a backend's extent.

It serves any array library on any device and every feature, at the price of O(d) memory traffic per pair; the
passes over many points belong to a backend.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from array_api_compat import array_namespace, device

from .merge import _log, merge
from .protocol import Partial, Problem, Reduction

#: Numbers in the (rows, columns, d) block of differences: 32 MiB of float64.
BLOCK = 1 << 22


def reduce_exact(
    problem: Problem,
    queries: Any,
    points: Any,
    log_weights: Any,
    values: Any = None,
    own_column: Any = None,
) -> Partial:
    """Answer ``problem`` by direct differences.

    Parameters
    ----------
    problem : Problem
        Its reduction, features, scales and d are used; the sizes come from the arrays.
    queries : (m, d) float64 array
    points : (n, d) float64 array
    log_weights : (n,) float64 array
    values : (n, c) float64 array, optional
    own_column : (m,) integer array, optional
        With ``"exclude_self"``: the column that each row leaves out, −1 for none.
    """
    xp = array_namespace(queries)
    m, n, d = queries.shape[0], points.shape[0], problem.d
    cols = max(1, min(n, BLOCK // max(1, d)))
    rows = max(1, BLOCK // (cols * max(1, d)))
    strips = []
    for r in range(0, max(m, 1), rows):
        here = slice(r, min(r + rows, m))
        own = None if own_column is None else own_column[here]
        partials = []
        for c in range(0, n, cols):
            over = slice(c, min(c + cols, n))
            block_values = None if values is None else values[over, :]
            block_own = None if own is None else own - c
            args = (queries[here, :], points[over, :], log_weights[over], block_values, block_own)
            partials.append(_block(problem, *args))
        strips.append(merge(partials))
    if len(strips) == 1:
        return strips[0]

    def stack(field: str) -> Any:
        parts = [getattr(s, field) for s in strips]
        return None if parts[0] is None else xp.concat(parts, axis=0)

    return Partial(*(stack(f.name) for f in fields(Partial)))


def _block(problem: Problem, query: Any, points: Any, log_weights: Any, values: Any, own: Any) -> Partial:
    xp = array_namespace(query)
    difference = points[None, :, :] - query[:, None, :]  # (rows, columns, d)
    exponent = -0.5 * xp.sum(difference * difference, axis=-1)
    columns = xp.arange(points.shape[0], device=device(points))
    keep = None if own is None else own[:, None] != columns[None, :]
    answers = [
        _at_scale(problem, exponent / scale**2, difference, log_weights, values, keep)
        for scale in problem.scales or (1.0,)
    ]
    if not problem.scales:
        return answers[0]

    def stack(field: str) -> Any:
        parts = [getattr(a, field) for a in answers]
        return None if parts[0] is None else xp.stack(parts, axis=1)

    return Partial(*(stack(f.name) for f in fields(Partial)))


def _at_scale(problem: Problem, exponent: Any, difference: Any, log_weights: Any, values: Any, keep: Any) -> Partial:
    xp = array_namespace(exponent)
    weighted = exponent + log_weights[None, :]
    if keep is not None:
        weighted = xp.where(keep, weighted, xp.full_like(weighted, -math.inf))
    top = xp.max(weighted, axis=1)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    phi = xp.exp(weighted - top[:, None])
    total = xp.sum(phi, axis=1)
    share = phi / xp.where(total > 0, total, xp.ones_like(total))[:, None]
    log_sum = _log(xp, total) + top
    mean = None if values is None else share @ values
    if problem.reduction is Reduction.MEAN:
        return Partial(log_sum, shift=xp.sum(share[:, :, None] * difference, axis=1), values=mean)
    if problem.reduction is Reduction.LAPLACE:
        half = 1.0 + 0.5 * problem.d
        signed = xp.sum(phi * (half + exponent), axis=1)  # exponent = −½ r²
        plus = xp.sum(phi * (half - exponent), axis=1)
        log_magnitude = _log(xp, xp.abs(signed)) + top
        return Partial(_log(xp, plus) + top, sign=xp.sign(signed), log_magnitude=log_magnitude)
    return Partial(log_sum, values=mean)
