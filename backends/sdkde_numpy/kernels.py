"""Exponents of a tile, and the streaming sums over tiles.

A tile is a block of query rows by a block of columns, small enough to stay in cache while a handful of array operations
pass over it. All of them write into buffers made once per block of rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sdkde_core.protocol import Partial, Problem, Reduction

Array = NDArray[Any]

#: exp of less is slow (results below the normal numbers cost several times as much) and adds nothing beside exp(0).
CLAMP = {np.dtype(np.float32): -87.0, np.dtype(np.float64): -700.0}


class Formula(Protocol):
    """How the exponents −½ r² of a tile are computed, and the sums of differences under given φ."""

    dtype: np.dtype[Any]
    points: Array  # (n, d) float64

    def rows(self, queries: Array) -> Array:
        """Prepare a block of query rows, (b, d) float64."""

    def exponents(self, rows: Array, start: int, stop: int, out: Array) -> None:
        """Write −½‖u_i − u_j‖² for the columns start … stop − 1 to ``out``, (b, w)."""

    def displacement(self, rows: Array, phi: Array, start: int, stop: int) -> Array:
        """Return Σ_j φ_ij (u_j − u_i), (b, d)."""


class Expanded:
    """−½‖u_i‖² − ½‖u_j‖² + u_i·u_j as one matrix product: rows [u, −½‖u‖², 1], columns [u, 1, −½‖u‖²]."""

    def __init__(self, points: Array, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.points = points
        n, d = points.shape
        self.columns = np.empty((d + 2, n), self.dtype)
        self.columns[:d] = points.T
        self.columns[d] = 1.0
        self.columns[d + 1] = -0.5 * np.vecdot(points, points)

    def rows(self, queries: Array) -> Array:
        m, d = queries.shape
        packed = np.empty((m, d + 2), self.dtype)
        packed[:, :d] = queries
        packed[:, d] = -0.5 * np.vecdot(queries, queries)
        packed[:, d + 1] = 1.0
        return packed

    def exponents(self, rows: Array, start: int, stop: int, out: Array) -> None:
        np.matmul(rows, self.columns[:, start:stop], out=out)

    def displacement(self, rows: Array, phi: Array, start: int, stop: int) -> Array:
        d = self.points.shape[1]
        return phi @ self.points[start:stop] - phi.sum(axis=1)[:, None] * rows[:, :d]


class Direct:
    """Differences first, one dimension at a time, in float64: right at any distance from the origin.

    Far from every point exponents are huge, and what counts is their differences: squares are summed in groups, and the
    groups with the rounding errors of their additions (Knuth's TwoSum), so that an exponent is right to its last bit.
    """

    dtype: np.dtype[Any] = np.dtype(np.float64)
    group = 8

    def __init__(self, points: Array) -> None:
        self.points = points
        self.columns = np.ascontiguousarray(points.T)

    def rows(self, queries: Array) -> Array:
        return queries

    def exponents(self, rows: Array, start: int, stop: int, out: Array) -> None:
        d = self.points.shape[1]
        part, scratch = np.empty_like(out), np.empty_like(out)
        self._squares(rows, start, stop, 0, out, scratch)
        if d > self.group:
            error = np.zeros_like(out)
            for k in range(self.group, d, self.group):
                self._squares(rows, start, stop, k, part, scratch)
                # The sum s; its error is (out − (s − t)) + (part − t) with t = s − out.
                np.add(out, part, out=scratch)
                total = scratch.copy()
                np.subtract(scratch, out, out=scratch)
                np.subtract(part, scratch, out=part)
                np.subtract(total, scratch, out=scratch)
                np.subtract(out, scratch, out=scratch)
                error += part
                error += scratch
                np.copyto(out, total)
            out += error
        np.multiply(out, -0.5, out=out)

    def _squares(self, rows: Array, start: int, stop: int, first: int, out: Array, scratch: Array) -> None:
        """Write the squared distance over one group of dimensions to ``out``."""
        columns = self.columns[first : first + self.group, start:stop]
        for k, column in enumerate(columns):
            target = scratch if k else out
            np.subtract(column, rows[:, first + k, None], out=target)
            np.multiply(target, target, out=target)
            if k:
                np.add(out, scratch, out=out)

    def displacement(self, rows: Array, phi: Array, start: int, stop: int) -> Array:
        columns = self.columns[:, start:stop]
        difference = np.empty_like(phi)
        total = np.empty(rows.shape)
        for k in range(len(columns)):
            np.subtract(columns[k], rows[:, k, None], out=difference)
            total[:, k] = np.vecdot(phi, difference)
        return total


class Sums:
    """Streaming sums of a block of rows at one scale: all of them relative to exp of a running maximum."""

    def __init__(self, problem: Problem, rows: int) -> None:
        self.problem = problem
        self.top = np.full(rows, -1e300)  # finite: −inf − −inf would be NaN
        self.total = np.zeros(rows)  # Σ w φ
        laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
        self.exponent = np.zeros(rows) if laplace else None  # Σ w φ · (−½ r²)
        self.shift = np.zeros((rows, problem.d)) if mean else None  # Σ w φ (u_j − u_i)
        self.values = np.zeros((rows, problem.n_values)) if problem.n_values else None  # Σ w φ v_j

    def add(
        self,
        terms: Array,
        phi: Array,
        log_weights: Array | float,
        own: tuple[Array, Array] | None,
        displacement: Any,
        values: Array | None,
    ) -> None:
        """Add a tile.

        Parameters
        ----------
        terms : (b, w) array
            log w_j − ½ r²_ij; overwritten.
        phi : (b, w) array
            A buffer; may be ``terms`` itself but for LAPLACE, which needs both.
        log_weights : (w,) array or float
            What of ``terms`` is not −½ r².
        own : pair of index arrays, optional
            Entries to leave out.
        displacement : callable
            φ → Σ φ (u_j − u_i).
        values : (w, c) array, optional
        """
        if own is not None:
            terms[own] = -np.inf
        top = np.maximum(self.top, terms.max(axis=1))
        rescale = np.exp(self.top - top)
        self.top = top
        np.subtract(terms, top[:, None].astype(terms.dtype), out=terms)
        np.maximum(terms, CLAMP[terms.dtype], out=terms)
        np.exp(terms, out=phi)
        if own is not None:
            phi[own] = 0.0
        total = np.add.reduce(phi, axis=1)
        self.total = self.total * rescale + total
        if self.exponent is not None:
            weighted = np.vecdot(phi, terms) + top * total - _dot(phi, log_weights, total)
            self.exponent = self.exponent * rescale + weighted
        if self.shift is not None:
            self.shift = self.shift * rescale[:, None] + displacement(phi)
        if values is not None:
            assert self.values is not None
            self.values = self.values * rescale[:, None] + phi @ values

    def result(self) -> Partial:
        """Return the log-domain results; a row that every column was left out of has log sum −inf."""
        with np.errstate(divide="ignore"):
            log_sum = np.log(self.total) + self.top
            safe = np.where(self.total > 0, self.total, 1.0)[:, None]
            if self.exponent is not None:
                half = 1.0 + 0.5 * self.problem.d
                signed = half * self.total + self.exponent
                plus = half * self.total - self.exponent
                return Partial(
                    np.log(plus) + self.top, sign=np.sign(signed), log_magnitude=np.log(np.abs(signed)) + self.top
                )
        shift = None if self.shift is None else self.shift / safe
        return Partial(log_sum, shift=shift, values=None if self.values is None else self.values / safe)


def _dot(phi: Array, log_weights: Array | float, total: Array) -> Array:
    return phi @ log_weights if isinstance(log_weights, np.ndarray) else total * log_weights


def reduce_block(
    problem: Problem,
    formula: Formula,
    queries: Array,
    first_row: int,
    columns: tuple[int, int],
    log_weights: Array | None,
    uniform: float,
    values: Array | None,
    width: int,
) -> Partial:
    """Reduce a block of query rows over a range of columns, tile by tile.

    Parameters
    ----------
    queries : (b, d) float64 array
    first_row : int
        Index of the block's first row, for ``"exclude_self"``.
    columns : pair of int
        start, stop.
    log_weights : (n,) array or None
        In the formula's dtype; None: all are ``uniform``, which is added at the end.
    width : int
        Columns of a tile.
    """
    b, (start, stop) = len(queries), columns
    rows = formula.rows(queries)
    scales = problem.scales or (1.0,)
    sums = [Sums(problem, b) for _ in scales]
    exponent_buffer = np.empty(b * width, formula.dtype)
    term_buffer = np.empty(b * width, formula.dtype) if problem.scales else exponent_buffer
    phi_buffer = np.empty(b * width, formula.dtype) if problem.reduction is Reduction.LAPLACE else term_buffer
    for left in range(start, stop, width):
        right = min(left + width, stop)
        size, shape = b * (right - left), (b, right - left)
        exponents, terms, phi = (x[:size].reshape(shape) for x in (exponent_buffer, term_buffer, phi_buffer))
        formula.exponents(rows, left, right, exponents)
        own = _own(first_row, b, left, right) if "exclude_self" in problem.requires else None
        for scale, total in zip(scales, sums):
            if problem.scales:
                np.multiply(exponents, 1.0 / scale**2, out=terms)
            if log_weights is not None:
                np.add(terms, log_weights[left:right], out=terms)
            total.add(
                terms,
                phi,
                0.0 if log_weights is None else log_weights[left:right],
                own,
                lambda phi, left=left, right=right: formula.displacement(rows, phi, left, right),
                None if values is None else values[left:right],
            )
    results = [s.result() for s in sums]
    if problem.scales:
        results = [Partial(*(None if x[0] is None else np.stack(x, axis=1) for x in zip(*map(_fields, results))))]
    if log_weights is not None:
        return results[0]
    log_sum, shift, sign, log_magnitude, mean = _fields(results[0])
    return Partial(log_sum + uniform, shift, sign, None if log_magnitude is None else log_magnitude + uniform, mean)


def _fields(p: Partial) -> tuple[Any, ...]:
    return p.log_sum, p.shift, p.sign, p.log_magnitude, p.values


def _own(first_row: int, rows: int, left: int, right: int) -> tuple[Array, Array] | None:
    """Indices in the tile of the entries (i, i)."""
    both = np.arange(max(first_row, left), min(first_row + rows, right))
    return (both - first_row, both - left) if both.size else None
