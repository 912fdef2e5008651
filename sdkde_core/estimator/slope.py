"""The gradient of the log of the Laplace estimate, by direct differences in float64.

With K = 1 + d/2 − ½ r² the estimate is L = Σ_j w_j φ_j K_j. Its derivative by the row u is Σ_j w_j φ_j (u_j − u)
(K_j + 1), as that of φ_j is φ_j (u_j − u), and that of K_j is u_j − u. No backend has this sum: it is asked for seldom,
and the price, O(d) memory traffic per pair, is that of the exact path.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..choice.hardware import cpu_threads
from ..engine.memory import claim_memory
from ..engine.threads import checkpoint, map_threads
from ..protocol import Columns

BLOCK = 1 << 21  # numbers in the (rows, columns, d) block of differences: 16 MiB of float64


def laplace_slope(queries: Any, columns: Columns) -> Any:
    """Return ∇ log p̂ of the Laplace estimate, (m, d), per bandwidth; NaN where p̂ < 0.

    ``queries``: whitened, float64, of any library on any device. Log weights may be −inf.
    """
    (m, d), n = queries.shape, columns.points.shape[0]
    width = max(1, min(n, BLOCK // d))
    height = max(1, BLOCK // (width * d))

    def rows(start: int) -> Any:
        with np.errstate(all="ignore"):
            return _rows(queries[start : start + height, :], columns, width)

    starts = range(0, m, height)
    if isinstance(queries, np.ndarray):
        with claim_memory("a sum of differences", 6 * 8 * BLOCK, tasks=cpu_threads()) as threads:
            strips = map_threads(rows, starts, threads)
    else:
        strips = [rows(start) for start in starts]
    return array_namespace(queries).concat(strips, axis=0) if len(strips) > 1 else strips[0]


def _rows(queries: Any, columns: Columns, width: int) -> Any:
    """A block of rows over all columns.

    Far from every column exponents are huge, and only their differences count: with k the column of the largest term,
    r²_j − r²_k = δ_j·(δ_j + 2 (u_k − u)), δ_j = u_j − u_k, without the cancellation.
    """
    xp, half, blocks = array_namespace(queries), 1.0 + 0.5 * queries.shape[1], range(0, columns.points.shape[0], width)
    best = nearest = None
    for start in blocks:
        checkpoint()
        points, log_weights = columns.points[start : start + width, :], columns.log_weights[start : start + width]
        difference = points[None, :, :] - queries[:, None, :]  # (rows, columns, d)
        terms = log_weights[None, :] - 0.5 * xp.sum(difference * difference, axis=-1)
        peak, found = xp.max(terms, axis=1), xp.argmax(terms, axis=1) + start
        better = peak >= peak if best is None else peak > best
        best = peak if best is None else xp.where(better, peak, best)
        nearest = found if nearest is None else xp.where(better, found, nearest)
    largest, its_weight = xp.take(columns.points, nearest, axis=0), xp.take(columns.log_weights, nearest, axis=0)
    away = largest - queries  # (rows, d)
    its_exponent = -0.5 * xp.sum(away * away, axis=-1)
    signed, slope = xp.zeros_like(its_exponent), xp.zeros_like(queries)
    for start in blocks:
        checkpoint()
        points, log_weights = columns.points[start : start + width, :], columns.log_weights[start : start + width]
        delta = points[None, :, :] - largest[:, None, :]
        relative = -0.5 * xp.sum(delta * (delta + 2.0 * away[:, None, :]), axis=-1)
        phi = xp.exp(relative + (log_weights[None, :] - its_weight[:, None]))
        share = phi * (half + relative + its_exponent[:, None])
        signed = signed + xp.sum(share, axis=1)
        slope = slope + xp.sum((share + phi)[:, :, None] * delta, axis=1) + xp.sum(share + phi, axis=1)[:, None] * away
    return xp.where((signed < 0)[:, None], xp.full_like(slope, math.nan), slope / signed[:, None])
