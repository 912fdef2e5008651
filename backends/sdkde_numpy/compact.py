"""Kernels of bounded support: sums of K(r) as they are, as none of them overflows, and of none the log is needed.

Only weights may span more than float64 does. So the columns fall into levels by the size of their weights, mostly one,
and a tile of K times a matrix of weights, a column for each level, is the sum of each.
"""

from __future__ import annotations

import math

import numpy as np

from sdkde_core.plugin import checkpoint, exponents, products
from sdkde_core.protocol import Columns, Partial, Problem

from .kernels import TILES, Array


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

    def reduce(self, problem: Problem, queries: Array, start: int, stop: int, width: int) -> Partial:
        """As :meth:`.kernels.Prepared.reduce`; log sums are −inf where no column is in reach."""
        b, rows, tiles = len(queries), exponents.Packed(queries), TILES["float64"]
        total, buffer = np.zeros((b, len(self.tops))), np.empty(b * width)
        for left in range(start, stop, width):
            checkpoint()
            right = min(left + width, stop)
            values = buffer[: b * (right - left)].reshape(b, right - left)
            exponents.squares(tiles, rows, exponents.Packed(self.points[left:right]), values)
            _evaluate(problem.kernel, values)
            total += products.product(values, self.weights[left:right])
        return Partial(np.logaddexp.reduce(np.log(total) + self.tops, axis=1) + self.uniform)


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
