"""The fastest formula of exponents that keeps a precision (``bounds.py``), and its operations in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import checkpoint, dots, exponents, product
from sdkde_core.protocol import Problem

from .bounds import formula, product_shift_limit, terms_at_once

Array = NDArray[Any]
Own = tuple[Array, Array] | None


class Tiles:
    """Operations on tiles of one dtype; see :class:`sdkde_core.engine.exponents.Library`."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def place(self, first: Array, *others: Array | float) -> Array:
        n = len(first)
        parts = [first, *(np.full(n, p) if isinstance(p, float) else p for p in others)]
        return np.concatenate([p.reshape(n, -1) for p in parts], 1, dtype=self.dtype, casting="unsafe")

    def product(self, a: Array, b: Array, out: Array | None) -> Array:
        return product(a, b.T, out)

    def add_product(self, tile: Array, a: Array, b: Array) -> Array:
        return np.add(tile, product(a, b.T), out=tile)

    def empty(self, rows: Array, columns: Array) -> Array:
        return np.empty((len(rows), len(columns)), self.dtype)

    def subtract(self, x: Array, u: Array, out: Array | None) -> Array:
        checkpoint()
        return np.subtract(x, u[:, None], out=out)

    def add_square(self, tile: Array, away: Array) -> None:
        np.multiply(away, away, out=away)
        np.add(tile, away, out=tile)

    def dot(self, phi: Array, away: Array) -> Array:
        return dots(phi, away)


class Prepared:
    """Columns packed for the fastest formula that keeps the precision; they serve any number of rows."""

    def __init__(self, problem: Problem, points: Array, log_weight_span: float) -> None:
        self.points = points  # (n, d) float64
        self.exponential = problem.kernel == "exponential"  # by differences, as −r has no other way
        name = formula(problem, log_weight_span)
        self.tiles = Tiles(name.rpartition(" ")[2])
        self.formula: exponents.Formula = exponents.Expanded(self.tiles, based=True)
        #: Terms of a shift that are added one after another; None: the shift is summed by differences.
        self.terms: int | None = terms_at_once(problem)
        if name.startswith("split"):
            self.formula = exponents.Split(self.tiles, exponents.grid(problem.extent))
            self.terms = self.terms if problem.extent <= product_shift_limit(problem) else None
        elif name.startswith("direct"):
            self.formula, self.terms = exponents.Direct(self.tiles), None
        self.packed = self.formula.columns(points, None)

    def tile(self, rows: exponents.Packed, some: slice, out: Array, own: Own) -> tuple[Array, Array | None]:
        """Return exponents of some columns less a base of each row, and the base; None: 0, or −½‖u‖² as the rows have.

        ``own`` are indices of entries to leave out, as −inf.
        """
        base, n = None, len(self.points)
        columns = self.packed if some.stop - some.start == n else self.packed.at(some)
        tile = self.formula.first(rows, columns, out)
        if self.exponential:
            np.negative(np.sqrt(np.multiply(tile, -2.0, out=tile), out=tile), out=tile)
        if own is not None:
            tile[own] = -np.inf
        if isinstance(self.formula, exponents.Split):
            base = np.maximum(tile.max(axis=1), -1e300)  # finite where every entry is left out
            tile = self.formula.second(np.subtract(tile, base[:, None], out=tile), rows, columns)
        return tile, base

    def displacement(self, queries: Array, phi: Array, total: Array, some: slice) -> Array:
        """Return Σ_j φ_ij (u_j − u_i), (b, d); total is Σ_j φ_ij."""
        points = self.points[some]
        if self.terms is None:
            return exponents.displacement(self.tiles, phi, exponents.Packed(queries), exponents.Packed(points))
        return product(phi, points, terms=self.terms) - total[:, None] * queries
