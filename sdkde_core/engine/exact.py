"""The exact path: direct differences in float64 for points beyond the extents that a backend takes, in any library."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import array_namespace
from ..protocol import Columns, Partial, Problem, Reduction
from .merge import concatenate, merge, safe_log

BLOCK = 1 << 21  # numbers in the (rows, columns, d) block of differences: 16 MiB of float64


class Exact:
    """The exact path with a backend's methods."""

    def prepare(self, problem: Problem, columns: Columns) -> Columns:
        return columns

    def reduce(self, problem: Problem, queries: Any, state: Columns, own_offset: int = 0) -> Partial:
        return reduce_exact(problem, state.points if queries is None else queries, state)


def reduce_exact(problem: Problem, queries: Any, columns: Columns) -> Partial:
    """Answer ``problem`` for queries (m, d) float64 by direct differences; its n and m do not matter."""
    if "kernel" in problem.requires:  # of such problems nothing is taken off
        raise ValueError(f"the exact path has kernel='gaussian' only, not {problem.kernel!r}")
    m, n, d = queries.shape[0], columns.points.shape[0], max(1, problem.d)
    width = max(1, min(n, BLOCK // d))
    height = max(1, BLOCK // (width * d))
    strips = []
    for r in range(0, max(m, 1), height):
        rows, partials = queries[r : min(r + height, m), :], []
        for c in range(0, n, width):
            over = slice(c, min(c + width, n))
            block = Columns(columns.points[over, :], columns.log_weights[over])
            partials.append(_block(problem, rows, block))
        strips.append(merge(partials))
    return concatenate(strips)


class Terms(NamedTuple):
    """A block of rows over a block of columns, the terms relative to each row's largest, that of the column k."""

    exponent: Any  # (rows, columns), −½ r²_j
    phi: Any  # (rows, columns), w_j φ_j / e^top
    top: Any  # (rows,)
    away: Any  # (rows, d), u_k − u
    delta: Any  # (rows, columns, d), u_j − u_k


def terms_of(query: Any, columns: Columns) -> Terms:
    """Return the terms of a block, of columns that all have weight.

    Far from every point exponents are huge, and only their differences count:
    r²_j − r²_k = ‖u_j − u_k‖² + 2 (u_j − u_k)·(u_k − u), without the cancellation.
    """
    xp = array_namespace(query)
    points, log_weights = columns.points, columns.log_weights
    difference = points[None, :, :] - query[:, None, :]  # (rows, columns, d)
    exponent = -0.5 * xp.sum(difference * difference, axis=-1)
    terms = exponent + log_weights[None, :]
    largest = xp.argmax(terms, axis=1)
    nearest = xp.take(points, largest, axis=0)  # (rows, d)
    away = nearest - query
    delta = points[None, :, :] - nearest[:, None, :]
    relative = -0.5 * xp.sum(delta * (delta + 2.0 * away[:, None, :]), axis=-1)
    relative = relative + (log_weights[None, :] - xp.take(log_weights, largest, axis=0)[:, None])
    # Rounding of huge exponents may have picked a term that is not quite the largest.
    most = xp.max(relative, axis=1)
    return Terms(exponent, xp.exp(relative - most[:, None]), xp.max(terms, axis=1) + most, away, delta)


def _block(problem: Problem, query: Any, columns: Columns) -> Partial:
    xp = array_namespace(query)
    exponent, phi, top, away, delta = terms_of(query, columns)
    total = xp.sum(phi, axis=1)
    if problem.reduction is Reduction.LAPLACE:
        half = 1.0 + 0.5 * problem.d
        signed = xp.sum(phi * (half + exponent), axis=1)  # exponent = −½ r²
        plus = xp.sum(phi * (half - exponent), axis=1)
        return Partial(safe_log(plus) + top, sign=xp.sign(signed), log_magnitude=safe_log(xp.abs(signed)) + top)
    shift = None
    if problem.reduction is Reduction.MEAN:
        shift = away + xp.sum((phi / total[:, None])[:, :, None] * delta, axis=1)
    return Partial(safe_log(total) + top, shift=shift)
