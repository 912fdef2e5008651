"""Kernels of bounded support: sums of K(r) as they are, as none of them overflows, and of none the log is needed.

Only weights may span more than float64 does. So the columns fall into levels by the size of their weights, mostly one,
and a tile of K times a matrix of weights, a column for each level, is the sum of each.
"""

from __future__ import annotations

import math

import numpy as np

from sdkde_core.plugin import checkpoint, exponents, products
from sdkde_core.protocol import Columns, Partial, Problem

from .kernels import Array, Tiles


class Compact:
    """Columns packed for a kernel of bounded support."""

    def __init__(self, problem: Problem, columns: Columns) -> None:
        self.points, log_weights = columns.points, columns.log_weights
        self.uniform = float(log_weights[0])  # the log weight of all, if it is
        self.tops, self.weights = np.zeros(1), np.ones((len(self.points), 1))  # (levels,), (n, levels): w / exp(top)
        if "weights" in problem.requires:
            self.uniform = 0.0
            # Nats of a level: its least weight, times a K at the edge of the support, is still a normal number.
            top, span = float(log_weights.max()), 600.0
            level = np.floor((top - log_weights) / span)
            used = np.unique(level)
            self.tops = top - span * used
            within = np.where(level[:, None] == used, log_weights[:, None] - self.tops, -np.inf)
            self.weights = np.exp(within)


class Totals:
    """Sums of a block of rows, level by level."""

    def __init__(self, formula: Compact, rows: int) -> None:
        self.tops = formula.tops
        self.total = np.zeros((rows, len(formula.tops)))

    def join(self, other: Totals) -> None:
        """Add the sums of the same rows over other columns."""
        self.total += other.total

    def result(self, log_weight: float) -> Partial:
        """Return the log sums, every column's log weight raised by ``log_weight``; −inf where no column is in reach."""
        return Partial(np.logaddexp.reduce(np.log(self.total) + self.tops, axis=1) + log_weight)


def reduce_compact(problem: Problem, formula: Compact, queries: Array, columns: tuple[int, int], width: int) -> Totals:
    """Reduce a block of query rows over a range of columns; as :func:`.kernels.reduce_block`."""
    b, (start, stop) = len(queries), columns
    sums, buffer, rows, tiles = Totals(formula, b), np.empty(b * width), exponents.Packed(queries), Tiles(np.float64)
    for left in range(start, stop, width):
        checkpoint()
        right = min(left + width, stop)
        values = buffer[: b * (right - left)].reshape(b, right - left)
        exponents.squares(tiles, rows, exponents.Packed(formula.points[left:right]), values)
        _evaluate(problem.kernel, values)
        sums.total += products.product(values, formula.weights[left:right])
    return sums


def _evaluate(kernel: str, x: Array) -> None:
    """Replace r² by K(r); NaN stays NaN."""
    if kernel in ("linear", "cosine"):
        np.sqrt(x, out=x)
    np.subtract(1.0, x, out=x)
    np.clip(x, 0.0, 1.0, out=x)
    if kernel == "tophat":
        np.ceil(x, out=x)
    elif kernel == "cosine":  # cos(π r / 2), which is exactly 0 at the edge like this
        np.multiply(x, 0.5 * math.pi, out=x)
        np.sin(x, out=x)
    elif kernel not in ("epanechnikov", "linear"):  # one that the protocol has got since
        raise NotImplementedError(f"kernel {kernel!r} is not summed here")
