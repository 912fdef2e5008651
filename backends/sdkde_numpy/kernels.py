"""The loop over tiles: exponents by the fastest formula that keeps a precision (``bounds.py``), and streaming sums.

A tile is a block of query rows by a block of columns, small enough to stay in cache while a handful of array operations
pass over it, most of them into buffers made once per block of rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import checkpoint, exponents, products
from sdkde_core.protocol import Columns, Partial, Problem, Reduction

from .bounds import formula, product_shift_limit, terms_at_once

Array = NDArray[Any]


class Tiles:
    """Operations on tiles of one dtype; see :class:`sdkde_core.engine.exponents.Library`."""

    product, dot = staticmethod(products.product), staticmethod(products.dots)

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def place(self, first: Array, *others: Array | float) -> Array:
        parts = [first, *(np.full(len(first), p) if isinstance(p, float) else p for p in others)]
        parts = [p if p.ndim == 2 else p[:, None] for p in parts]
        return np.concatenate(parts, 1, dtype=self.dtype, casting="unsafe")

    def add_product(self, tile: Array, a: Array, b: Array) -> Array:
        return np.add(tile, products.product(a, b.T), out=tile)

    def empty(self, rows: Array, columns: Array) -> Array:
        return np.empty((len(rows), len(columns)), self.dtype)

    def subtract(self, x: Array, u: Array, out: Array | None) -> Array:
        checkpoint()
        return np.subtract(x, u[:, None], out=out)

    def add_square(self, tile: Array, away: Array) -> None:
        np.multiply(away, away, out=away)
        np.add(tile, away, out=tile)


#: Made once: small calls would take longer to make them than to use them.
TILES = {dtype: Tiles(dtype) for dtype in ("float32", "float64")}
EXPANDED = {dtype: exponents.Expanded(tiles, based=dtype == "float32") for dtype, tiles in TILES.items()}


class Prepared:
    """Columns packed for the fastest formula that keeps the precision; they serve any number of rows."""

    def __init__(self, problem: Problem, columns: Columns) -> None:
        self.points, log_weights, weighted = columns.points, columns.log_weights, "weights" in problem.requires
        self.uniform = 0.0 if weighted else float(log_weights[0])
        self.exponential = problem.kernel == "exponential"  # by differences, as −r has no other way
        name = formula(problem, float(np.max(-log_weights)) if weighted else 0.0)
        dtype = name.rpartition(" ")[2]
        self.formula: exponents.Formula = EXPANDED[dtype]
        self.tiles = TILES[dtype]
        # (n,), or None: all are ``uniform``
        self.log_weights = log_weights.astype(self.tiles.dtype, copy=False) if weighted else None
        #: Terms of a shift that are added one after another; None: the shift is summed by differences.
        self.terms = terms_at_once(problem) if problem.reduction is Reduction.MEAN else None
        if name.startswith("split"):
            self.formula = exponents.Split(self.tiles, exponents.grid(problem.extent))
            self.terms = self.terms if problem.extent <= product_shift_limit(problem) else None
        elif name.startswith("direct"):
            self.formula, self.terms = exponents.Direct(self.tiles), None
        self.packed = self.formula.columns(self.points, None)

    def reduce(self, problem: Problem, queries: Array, start: int, stop: int, width: int) -> Partial:
        """Reduce a block of query rows (b, d) over a range of columns, in tiles of ``width`` columns."""
        b, n, dtype, packed = len(queries), len(self.points), self.tiles.dtype, exponents.Packed
        expanded, wide = isinstance(self.formula, exponents.Expanded), dtype == np.float64
        plain = expanded and wide and problem.same and not problem.requires
        rows, sums = self.formula.rows(queries), Sums(problem, dtype, plain)
        base = exponents.norms(queries) if expanded and not wide else np.zeros(b)
        buffer = np.empty((b, width), dtype)
        values = np.empty_like(buffer) if problem.reduction is Reduction.LAPLACE else None
        for left in range(start, stop, width):
            checkpoint()
            right = min(left + width, stop)
            some, out = slice(left, right), buffer if right - left == width else np.empty((b, right - left), dtype)
            columns = self.packed if right - left == n else self.packed.at(some)
            terms = self.formula.first(rows, columns, out)  # less the base, or −½‖u‖² as the rows have it
            if self.exponential:
                np.negative(np.sqrt(np.multiply(terms, -2.0, out=terms), out=terms), out=terms)
            if isinstance(self.formula, exponents.Split):
                base = terms.max(axis=1)
                terms = self.formula.second(np.subtract(terms, base[:, None], out=terms), rows, columns)
            weights = None if self.log_weights is None else self.log_weights[some]
            phi, total = sums.add(terms, base, terms if values is None else values[:, : right - left], weights)
            if sums.shift is None:
                continue
            points = self.points[some]  # Σ_j φ_ij (u_j − u_i), (b, d)
            if self.terms is None:
                sums.shift += exponents.displacement(self.tiles, phi, packed(queries), packed(points))
            else:
                sums.shift += products.product(phi, points, terms=self.terms) - total[:, None] * queries
        return sums.result(self.uniform)


class Sums:
    """Streaming sums of a block of rows.

    All are relative to exp(base + top), a running maximum in two parts: far from every point exponents are huge, and
    formulas give them relative to a base, so that their differences keep their digits. ``plain``: rows are columns, of
    equal weights, and their bases are 0; to look for maxima and to subtract them would take a quarter of the time.
    """

    def __init__(self, problem: Problem, dtype: np.dtype[Any], plain: bool) -> None:
        self.problem, self.started, self.plain = problem, False, plain
        # Finite in the formula's dtype, too, since −inf − −inf would be NaN. The first tile turns these numbers into
        # arrays, (b,), and the shift into (b, d).
        self.base: Any = 0.0
        self.top: Any = -1e30 if dtype == np.float32 else -1e300
        self.total: Any = 0.0  # Σ w φ
        self.exponent: Any = 0.0 if problem.reduction is Reduction.LAPLACE else None  # Σ w φ · (−½ r²)
        self.shift: Any = 0.0 if problem.reduction is Reduction.MEAN else None  # Σ w φ (u_j − u_i)

    def add(self, terms: Array, base: Array, phi: Array, log_weights: Array | None) -> tuple[Array, Array]:
        """Add a tile, except to the shift; return φ and Σ φ, in the unit that ``shift`` has from now on.

        ``terms`` (b, w), −½ r²_ij − base_i or −r_ij, is overwritten. ``phi`` is a buffer, which may be ``terms`` itself
        but for LAPLACE.
        """
        if log_weights is not None:
            np.add(terms, log_weights, out=terms)
        if self.plain:  # relative to nothing: a row's largest term is its own, exp(0)
            self.started, self.base, self.top = True, base, base
        else:
            log_scale = self._raise(base, np.maximum.reduce(terms, axis=1))
            np.subtract(terms, log_scale.astype(terms.dtype, copy=False)[:, None], out=terms)
        # Exponentials below the normal numbers cost several times as much, and add nothing to the largest term, exp(0).
        # No term is above 0; two bounds take NumPy's vector path.
        terms.clip(-87.0 if terms.dtype == np.float32 else -700.0, 1.0, terms)
        np.exp(terms, out=phi)
        total = np.add.reduce(phi, axis=1)
        self.total += total
        if self.exponent is not None:
            self.exponent += products.dots(phi, terms) + (self.base + self.top) * total
            if log_weights is not None:
                self.exponent -= products.dots(phi, log_weights)
        return phi, total

    def _raise(self, base: Array, top: Array) -> Array:
        """Raise the running maximum to base + top where larger, scale sums down to it, and return it less the base."""
        if not self.started:  # any sum is zero still
            self.started, self.base, self.top = True, base, np.maximum(top, self.top, dtype=np.float64)
            return self.top
        larger = (base - self.base) + (top - self.top) > 0
        new_base, new_top = np.where(larger, base, self.base), np.where(larger, top, self.top)
        rescale = np.exp((self.base - new_base) + (self.top - new_top))
        self.base, self.top = new_base, new_top
        self.total *= rescale
        if self.exponent is not None:
            self.exponent *= rescale
        if self.shift is not None:
            self.shift *= rescale[:, None]
        return new_top + (new_base - base)

    def result(self, log_weight: float) -> Partial:
        """Return the log-domain results, every column's log weight raised by ``log_weight``."""
        scale = self.base + self.top + log_weight
        if self.exponent is not None:
            return exponents.laplace(self.problem.d, self.total, self.exponent, scale)
        log_sum = np.log(self.total) + scale
        if self.shift is None:
            return Partial(log_sum)
        # Relative to nothing, far columns alone may add up to 0.
        return Partial(log_sum, shift=self.shift / np.maximum(self.total, 1e-300)[:, None])


class Compact:
    """Columns packed for a kernel of bounded support: K(r) is summed as it is, as it cannot overflow.

    Only weights may span more than float64 does. So columns are divided into levels, mostly one, by the size of their
    weights. A tile of K times a matrix of weights, with a column for each level, has the levels' sums.
    """

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
            self.weights = np.exp(np.where(level[:, None] == used, log_weights[:, None] - self.tops, -np.inf))

    def reduce(self, problem: Problem, queries: Array, start: int, stop: int, width: int) -> Partial:
        """As :meth:`Prepared.reduce`; log sums are −inf where no column is in reach."""
        b, rows, tiles = len(queries), exponents.Packed(queries), TILES["float64"]
        total, buffer = np.zeros((b, len(self.tops))), np.empty(b * width)
        for left in range(start, stop, width):
            checkpoint()
            right = min(left + width, stop)
            values = buffer[: b * (right - left)].reshape(b, right - left)
            exponents.squares(tiles, rows, exponents.Packed(self.points[left:right]), values)
            if problem.kernel in ("linear", "cosine"):
                np.sqrt(values, out=values)
            np.subtract(1.0, values, out=values)  # NaN stays NaN
            np.clip(values, 0.0, 1.0, out=values)
            if problem.kernel == "tophat":
                np.ceil(values, out=values)
            elif problem.kernel == "cosine":  # cos(π r / 2), which is exactly 0 at the edge like this
                np.multiply(values, 0.5 * math.pi, out=values)
                np.sin(values, out=values)
            total += products.product(values, self.weights[left:right])
        return Partial(np.logaddexp.reduce(np.log(total) + self.tops, axis=1) + self.uniform)
