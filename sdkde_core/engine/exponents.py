"""Three ways to the exponents t_ij = −½‖u_i − x_j‖² + log w_j of a tile: expanded squares, split squares, differences.

Points come as float64 arrays of any library. A formula packs them once, as rows and as columns, and makes tiles of
some of both by the few operations that a backend has on its arrays (:class:`Library`). Which formula keeps a precision
is the backend's to say: expanded squares lose R²·ε of the extent R, split squares 2⁻²⁵ of that, differences nothing.

Of error bounds, extents are in bandwidths, ε is the unit roundoff, and sums of d terms with independent roundings are
taken to err by four standard deviations: Higham and Mary, "A new approach to probabilistic rounding error analysis",
2019, justify the square root; the factor makes it hold for every pair. An error δ of the exponents moves a log sum by
δ at most, LAPLACE's sums by δ times :func:`paid`, and a shift by δ times half the distance between the points that
matter to the row: by δ R at most, midway between two clusters, and by δ where they are close together.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..protocol import TOLERANCES, Partial, Problem, Reduction

Array = Any

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}


class Library(Protocol):
    """A backend's operations on tiles; ``out`` is a buffer, or None."""

    # Columns side by side, (n, k) or (n,), or a number: in a tile's dtype, where tiles are computed.
    def place(self, first: Array, *others: Array | float) -> Array: ...
    def product(self, a: Array, b: Array, out: Array | None) -> Array: ...  # a b
    def add_product(self, tile: Array, a: Array, b: Array) -> Array: ...  # the tile, with a bᵀ added
    def empty(self, rows: Array, columns: Array) -> Array: ...  # a tile
    def subtract(self, x: Array, u: Array, out: Array | None) -> Array: ...  # x_j − u_i of (n,) and (m,), as (m, n)
    def add_square(self, tile: Array, away: Array) -> None: ...  # add its squares; ``away`` may be overwritten
    def dot(self, phi: Array, away: Array) -> Array: ...  # Σ_j φ_ij away_ij, (m,); ``away`` may be overwritten


class Packed(NamedTuple):
    """Points packed for tiles: ``left`` for a formula's first product, ``right`` for its second product or addend."""

    left: Array
    right: Array | None = None

    def at(self, which: Any) -> Packed:
        return Packed(self.left[which], None if self.right is None else self.right[which])


class Formula:
    def __init__(self, library: Library) -> None:
        self.library = library

    def rows(self, points: Array) -> Packed:
        """Pack rows, (m, d) float64; here as :class:`Direct` does."""
        return Packed(self.library.place(points))

    def columns(self, points: Array, log_weights: Array | None) -> Packed:
        """Pack columns, (n, d) float64, and what is added to their exponents, (n,) float64."""
        return Packed(self.rows(points).left, None if log_weights is None else self.library.place(log_weights))

    def first(self, rows: Packed, columns: Packed, out: Array | None = None) -> Array:
        """Return a tile of exponents, or their exact part; differences within it keep all of their digits."""
        return self.library.product(rows.left, columns.left.T, out)

    def second(self, tile: Array, rows: Packed, columns: Packed) -> Array:
        """Add what :meth:`first` left out, to a tile that may be relative to a row's base by now."""
        return tile


class Expanded(Formula):
    """One matrix product: rows [u, 1, −½‖u‖²] by columns [x, −½‖x‖² + log w, 1].

    ``based``: without −½‖u‖² and the 1, where that is added at the end, in float64.
    """

    def __init__(self, library: Library, based: bool = False) -> None:
        super().__init__(library)
        self.based = based

    def rows(self, points: Array) -> Packed:
        return Packed(self.library.place(points, 1.0, *([] if self.based else [norms(points)])))

    def columns(self, points: Array, log_weights: Array | None) -> Packed:
        constant = norms(points) if log_weights is None else norms(points) + log_weights
        return Packed(self.library.place(points, constant, *([] if self.based else [1.0])))


class Split(Formula):
    """Every coordinate as u = a + b, a on a grid so coarse that the products of the a's are summed without error.

    A first product, rows [a, 1, −½‖a‖²] by columns [a, c, 1], is exact in whatever order it is summed, and so is its
    difference from its row's largest. c is −½‖a‖² and the log weight's multiple of the grid. The second product adds
    what is left, a_i·b_j + b_i·x_j and the rest of norms and log weights, smaller by 2⁻²⁵, in float32 by 2⁻¹⁰, and so
    is its error. So exponents, and their differences far from every point, are right to about
    ε (|exponent − base| + R² 2⁻²⁵).
    """

    def __init__(self, library: Library, step: float) -> None:
        super().__init__(library)
        self.step = step

    def rows(self, points: Array) -> Packed:
        a, b = self._parts(points)
        return Packed(self.library.place(a, 1.0, norms(a)), self.library.place(a, b, 1.0, _norm_rest(a, b)))

    def columns(self, points: Array, log_weights: Array | None) -> Packed:
        a, b = self._parts(points)
        coarse, rest = norms(a), _norm_rest(a, b)
        if log_weights is not None:
            unit = 0.5 * self.step**2
            leading = (log_weights / unit).round() * unit
            coarse, rest = coarse + leading, rest + (log_weights - leading)
        return Packed(self.library.place(a, coarse, 1.0), self.library.place(b, points, rest, 1.0))

    def second(self, tile: Array, rows: Packed, columns: Packed) -> Array:
        return self.library.add_product(tile, rows.right, columns.right)

    def _parts(self, points: Array) -> tuple[Array, Array]:
        coarse = (points / self.step).round() * self.step
        return coarse, points - coarse


class Direct(Formula):
    """Differences first, one dimension at a time: right to rounding of r² at any extent."""

    def first(self, rows: Packed, columns: Packed, out: Array | None = None) -> Array:
        tile = self.library.empty(rows.left, columns.left) if out is None else out
        squares(self.library, rows, columns, tile)
        tile *= -0.5
        if columns.right is not None:
            tile += columns.right[:, 0]
        return tile


def grid(extent: float, bits: int = 53, span: float = 0.0) -> float:
    """Return the grid g of split squares' leading parts, a power of two, for significands of ``bits`` bits.

    Their products, and norms, are multiples of g²/2. Partial sums, in any order, are at most 2 R² and the span of the
    log weights; below 2^bits g²/2 they are exact.
    """
    largest = 2.2 * max(extent, 2.0**-20) ** 2 + span  # a tenth for the grid's rounding of R
    return 2.0 ** math.ceil(0.5 * (math.log2(2.0 * largest) - bits))


def paid(problem: Problem) -> float:
    """How often an error of the exponent counts: LAPLACE has it in φ and in its factor, which is at least 1 + d/2."""
    return 1.0 + 1.0 / (1.0 + 0.5 * problem.d) if problem.reduction is Reduction.LAPLACE else 1.0


def strictest(problem: Problem) -> float:
    """Return the absolute tolerance of exponents: the log sums', or for MEAN the shifts' if that is less."""
    tolerance = TOLERANCES[problem.precision]
    return min(tolerance[Reduction.LOG_SUM].absolute, tolerance[problem.reduction].absolute)


def half_tolerance(problem: Problem, dtype: str = "", log_weight_span: float = 0.0) -> float:
    """Return half of the tolerance, for exponents, the rest being for exponentials and sums.

    LAPLACE has an error twice at most, see :func:`paid`. Less what rounding log weights costs, if they are added to the
    exponents in that dtype; ``log_weight_span``: their largest magnitude, nats.
    """
    half = strictest(problem) / (4.0 if problem.reduction is Reduction.LAPLACE else 2.0)
    return half - (4.0 * UNIT_ROUNDOFF[dtype] * log_weight_span if dtype else 0.0)


def expanded_limit(problem: Problem, dtype: str, budget: float, norms: float = 1.0) -> float:
    """Return the extent R up to which expanded squares err by no more than ``budget``; −inf where not even at 0.

    float32 is taken for sums at "fast" alone: the bound on MEAN's shift would leave a few bandwidths.

    u_i·u_j − ½‖u_i‖² − ½‖u_j‖² is a small difference of numbers up to R². Its error is a sum of roundings, of at most
    half a unit, of partial sums that grow to R² along d terms: the standard deviation is at most
    ε R² (√(d/3) / √3 + c), c being 1 for what the norms add or ``norms`` where they are summed otherwise.
    """
    ratio = budget / (4.0 * UNIT_ROUNDOFF[dtype] * (math.sqrt(problem.d) / 3.0 + norms))
    mean = problem.reduction is Reduction.MEAN
    if ratio <= 0 or (dtype == "float32" and (mean or problem.precision != "fast")):
        return -math.inf
    return min(math.sqrt(ratio), ratio ** (1 / 3)) if mean else math.sqrt(ratio)


def shift_limit(problem: Problem, additions: float) -> float:
    """Return the extent R up to which Σφx / Σφ − u in float64 keeps the shift, though it rounds numbers of size R.

    Beside a heap of duplicates all ``additions`` round alike, each by up to ε of the sum so far: 0.35 ε of the whole
    sum on average, and sums of φ and of φx in opposite directions. They may use half of the tolerance.
    """
    return 0.5 * TOLERANCES[problem.precision][Reduction.MEAN].absolute / (0.7 * additions * UNIT_ROUNDOFF["float64"])


def squares_limit(absolute: float, relative: float, summing: float) -> float:
    """Return the extent R up to which squares of differences in float32 keep a tolerance.

    At distance r the coordinates' rounding costs 2 ε R r at most, and the sum a r²/2, a being ``summing``. The
    tolerance grows there as well, by b r²/2, b being ``relative``, since columns that far matter only where log sums
    are that low. The worst distance is the greatest in the data, 2 R, or where (b − a) r = 2 ε R if b > a.
    """
    epsilon, growth = UNIT_ROUNDOFF["float32"], relative - summing
    at_vertex = math.sqrt(2.0 * absolute * growth) / (2.0 * epsilon) if growth > epsilon else math.inf
    per_square = 4.0 * epsilon - 2.0 * growth  # the error at 2 R, over R²
    return min(at_vertex, math.sqrt(absolute / per_square) if per_square > 0 else math.inf)


def squares(library: Library, rows: Packed, columns: Packed, out: Array) -> None:
    """Write ‖u_i − x_j‖² to ``out``, by differences."""
    d, away, block = rows.left.shape[1], None, 32  # dimensions by themselves: sums of many terms lose digits
    out[...] = 0.0
    part = out if d <= block else library.empty(rows.left, columns.left)
    for start in range(0, d, block):
        if part is not out:
            part[...] = 0.0
        for k in range(start, min(start + block, d)):
            away = _difference(library, rows, columns, k, away)
            library.add_square(part, away)
        if part is not out:
            out += part


def displacement(library: Library, phi: Array, rows: Packed, columns: Packed, pieces: int = 1) -> Array:
    """Return Σ_j φ_ij (x_j − u_i), (m, d), by differences."""
    away, sums = None, []
    for k in range(rows.left.shape[1] // pieces):
        away = _difference(library, rows, columns, k, away, pieces)
        sums.append(library.dot(phi, away))
    return library.place(*sums)


def _difference(library: Library, rows: Packed, columns: Packed, k: int, out: Array | None, pieces: int = 1) -> Array:
    out = library.subtract(columns.left[:, k], rows.left[:, k], out)
    if pieces == 2:  # near points' first parts cancel exactly, and the second ones, each by itself, count
        low = k + rows.left.shape[1] // 2
        out += columns.left[:, low]
        out -= rows.left[:, low, None]
    return out


def laplace(d: int, total: Array, exponent: Array, scale: Array | float) -> Partial:
    """Return LAPLACE's results by Σ w φ and Σ w φ (−½ r²), both relative to e^scale."""
    # NumPy or PyTorch itself: for some operations the namespaces of the array API read results back from a GPU.
    half, library = (1.0 + 0.5 * d) * total, sys.modules[type(total).__module__.partition(".")[0]]
    signed = half + exponent
    magnitude = library.log(abs(signed)) + scale
    return Partial(library.log(half - exponent) + scale, sign=library.sign(signed), log_magnitude=magnitude)


def norms(points: Array) -> Array:
    """−½‖u‖², (n,); on the host without temporaries of the points' size."""
    if isinstance(points, np.ndarray):
        return -0.5 * np.vecdot(points, points)
    if points.device.type == "cpu":
        return -0.5 * sys.modules["torch"].einsum("ij,ij->i", points, points)
    return -0.5 * (points * points).sum(1)


def _norm_rest(a: Array, b: Array) -> Array:
    """−½(‖a + b‖² − ‖a‖²), (n,)."""
    return -((a + 0.5 * b) * b).sum(1)
