"""Three ways to the exponents −½ r² of a tile: expanded squares, split squares, and direct differences.

:func:`choose` takes the fastest whose error bound (``bounds.py``) keeps the problem's precision. The exponents of the
exponential kernel, −r, are the square roots of direct differences'.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import checkpoint, dots, product
from sdkde_core.protocol import Problem

from .bounds import COLUMNS, double_limit, product_shift_limit, single_limit, takes_split, terms_at_once

__all__ = ["Direct", "Expanded", "Exponential", "Formula", "Split", "choose", "squares"]

Array = NDArray[Any]
Own = tuple[Array, Array] | None


class Formula(Protocol):
    """Columns packed for one way of computing a tile."""

    dtype: np.dtype[Any]
    points: Array  # (n, d) float64

    def rows(self, queries: Array) -> Any:
        """Pack a block of query rows, (b, d) float64."""

    def exponents(self, rows: Any, start: int, stop: int, out: Array, own: Own) -> Array:
        """Write −½‖u_i − u_j‖² − base_i for the columns start … stop − 1 to ``out``, (b, w); return the base, (b,).

        ``own`` are indices of entries to leave out, as −inf.
        """

    def displacement(self, rows: Any, phi: Array, total: Array, start: int, stop: int) -> Array:
        """Return Σ_j φ_ij (u_j − u_i), (b, d); total is Σ_j φ_ij."""


def choose(problem: Problem, points: Array, log_weight_span: float) -> Formula:
    """Pack the points for the fastest formula that keeps the precision; it serves any number of rows."""
    if problem.kernel == "exponential":
        return Exponential(points)
    if problem.extent <= single_limit(problem, log_weight_span):
        return Expanded(points, np.float32)
    if problem.extent <= double_limit(problem):
        return Expanded(points, np.float64, terms_at_once(problem))
    if takes_split(problem):
        by_product = problem.extent <= product_shift_limit(problem)
        return Split(points, problem.extent, terms_at_once(problem) if by_product else None)
    return Direct(points)


class Expanded:
    """u_i·u_j − ½‖u_j‖² as one matrix product, rows [u, 1] by columns [u, −½‖u‖²]; the base is −½‖u_i‖².

    Of a shift ``terms`` are added one after another at most.
    """

    def __init__(self, points: Array, dtype: Any, terms: int = COLUMNS) -> None:
        self.dtype = np.dtype(dtype)
        self.points = points
        self.terms = terms
        n, d = points.shape
        self.columns = np.empty((n, d + 1), self.dtype)
        self.columns[:, :d] = points
        self.columns[:, d] = -0.5 * np.vecdot(points, points)

    def rows(self, queries: Array) -> Any:
        packed = np.ones((len(queries), queries.shape[1] + 1), self.dtype)
        packed[:, :-1] = queries
        return queries, packed, -0.5 * np.vecdot(queries, queries)

    def exponents(self, rows: Any, start: int, stop: int, out: Array, own: Own) -> Array:
        _, packed, base = rows
        product(packed, self.columns[start:stop].T, out)
        if own is not None:
            out[own] = -np.inf
        return base

    def displacement(self, rows: Any, phi: Array, total: Array, start: int, stop: int) -> Array:
        return _product_displacement(rows[0], self.points[start:stop], phi, total, self.terms)


class Split:
    """Every coordinate as u = a + b, a on a grid so coarse that the products of the a's are summed without error.

    With a grid of 2⁻²⁵ of the extent R or more, −½‖a_i − a_j‖² is a multiple of half the grid squared below 2⁵³ of
    them, and so is every partial sum: matrix products in float64 give it exactly, in any order. Its row maximum becomes
    the base, exactly. What the b's add, a_i·b_j + b_i·u_j and their share of the norms, is smaller by 2⁻²⁵, and so is
    its error. So exponents, and their differences far from every point, are right to about
    ε (|exponent − base| + R² 2⁻²⁵).
    """

    dtype: np.dtype[Any] = np.dtype(np.float64)

    def __init__(self, points: Array, extent: float, terms: int | None) -> None:
        self.points = points
        self.terms = terms
        self.grid = 2.0 ** (math.ceil(math.log2(extent)) - 25)
        n, d = points.shape
        coarse, fine = self._split(points)
        self.coarse = np.ones((n, d + 2))  # against rows [a, −½‖a‖², 1]
        self.coarse[:, :d], self.coarse[:, d + 1] = coarse, -0.5 * np.vecdot(coarse, coarse)
        self.fine = np.ones((n, 2 * d + 2))  # against rows [a, b, norm, 1]
        self.fine[:, :d], self.fine[:, d : 2 * d] = fine, points
        self.fine[:, 2 * d + 1] = self._fine_norm(coarse, fine)

    def rows(self, queries: Array) -> Any:
        m, d = queries.shape
        a, b = self._split(queries)
        coarse, fine = np.ones((m, d + 2)), np.ones((m, 2 * d + 2))
        coarse[:, :d], coarse[:, d] = a, -0.5 * np.vecdot(a, a)
        fine[:, :d], fine[:, d : 2 * d], fine[:, 2 * d] = a, b, self._fine_norm(a, b)
        return queries, coarse, fine

    def exponents(self, rows: Any, start: int, stop: int, out: Array, own: Own) -> Array:
        _, coarse, fine = rows
        product(coarse, self.coarse[start:stop].T, out)
        if own is not None:
            out[own] = -np.inf
        base = np.maximum(out.max(axis=1), -1e300)  # finite where every entry is left out
        np.subtract(out, base[:, None], out=out)
        np.add(out, product(fine, self.fine[start:stop].T), out=out)
        return base

    def displacement(self, rows: Any, phi: Array, total: Array, start: int, stop: int) -> Array:
        if self.terms is None:
            return _direct_displacement(rows[0], self.points[start:stop], phi)
        return _product_displacement(rows[0], self.points[start:stop], phi, total, self.terms)

    def _split(self, u: Array) -> tuple[Array, Array]:
        coarse = np.rint(u / self.grid) * self.grid
        return coarse, u - coarse

    @staticmethod
    def _fine_norm(a: Array, b: Array) -> Array:
        """−½(‖a + b‖² − ‖a‖²)."""
        return -np.vecdot(a, b) - 0.5 * np.vecdot(b, b)


class Direct:
    """Differences first, one dimension at a time, in float64: right to rounding of r² at any extent."""

    dtype: np.dtype[Any] = np.dtype(np.float64)

    def __init__(self, points: Array) -> None:
        self.points = points

    def rows(self, queries: Array) -> Any:
        return queries

    def exponents(self, rows: Any, start: int, stop: int, out: Array, own: Own) -> Array:
        squares(rows, self.points[start:stop], out)
        np.multiply(out, -0.5, out=out)
        if own is not None:
            out[own] = -np.inf
        return np.zeros(len(out))

    def displacement(self, rows: Any, phi: Array, total: Array, start: int, stop: int) -> Array:
        return _direct_displacement(rows, self.points[start:stop], phi)


class Exponential(Direct):
    """Exponents −r."""

    def exponents(self, rows: Any, start: int, stop: int, out: Array, own: Own) -> Array:
        squares(rows, self.points[start:stop], out)
        np.sqrt(out, out=out)
        np.negative(out, out=out)
        if own is not None:
            out[own] = -np.inf
        return np.zeros(len(out))


def squares(queries: Array, points: Array, out: Array) -> None:
    """Write ‖u_i − u_j‖² to ``out``, (b, w), by direct differences."""
    difference = np.empty_like(out)
    out[...] = 0.0
    for k, column in enumerate(points.T):
        checkpoint()
        np.subtract(column, queries[:, k, None], out=difference)
        np.multiply(difference, difference, out=difference)
        np.add(out, difference, out=out)


def _product_displacement(queries: Array, points: Array, phi: Array, total: Array, terms: int) -> Array:
    return product(phi, points, terms=terms) - total[:, None] * queries


def _direct_displacement(queries: Array, points: Array, phi: Array) -> Array:
    difference = np.empty_like(phi)
    total = np.empty(queries.shape)
    for k, column in enumerate(points.T):
        checkpoint()
        np.subtract(column, queries[:, k, None], out=difference)
        total[:, k] = dots(phi, difference)
    return total
