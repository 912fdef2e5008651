"""Up to which extent a formula keeps a precision's tolerances: error bounds for expanded and for split squares.

The exponent −½‖u_i‖² − ½‖u_j‖² + u_i·u_j is a small difference of numbers up to R², R the extent in bandwidths. Its
error is a sum of roundings of partial sums that grow to R² along the d terms of the product: with unit roundoff ε and
independent roundings of at most half a unit, its standard deviation is at most
ε R² (√(d/3) / √3 + 1) = ε R² (√d/3 + 1). The bound taken is four times that (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019, justify the square root; the factor makes it hold for every pair).
"""

from __future__ import annotations

import functools
import math

from sdkde_core.plugin import exponents
from sdkde_core.protocol import TOLERANCES, Problem, Reduction

#: Share of the tolerance that the exponent may use; the rest is for exponentials and sums.
BUDGET = 0.5

#: Rows of a task, and columns of a tile that has all of them; and terms of a shift that are added one after another
#: where the bound does not allow a tile's.
ROWS, COLUMNS, PART = 256, 960, 80


def columns_of_a_task(m: int, n: int) -> int:
    """Columns of a task: where rows are few, columns are shared out too, over some 64 tasks."""
    return min(n, max(1 << 14, -(-n * -(-m // ROWS) // 64)))


def exponent_error(dtype: str, d: int, extent: float) -> float:
    """Bound on the absolute error of an exponent from expanded squares, in nats."""
    return 4.0 * exponents.UNIT_ROUNDOFF[dtype] * (math.sqrt(d) / 3.0 + 1.0) * extent**2


@functools.lru_cache(maxsize=4096)
def formula(problem: Problem, log_weight_span: float = 0.0) -> str:
    """Return the fastest formula that keeps the precision, in words that end with its dtype.

    ``log_weight_span`` is the largest magnitude of a log weight: extreme weights need float64 at any extent.
    """
    if "kernel" not in problem.requires:
        if problem.extent <= single_limit(problem, log_weight_span):
            return "expanded squares in float32"
        if problem.extent <= double_limit(problem):
            return "expanded squares in float64"
        # For up to four rows direct differences are done before split squares have packed the columns.
        if problem.extent <= split_limit(problem) and problem.m > 4:
            return "split squares in float64"
    return "direct differences in float64"


@functools.lru_cache(maxsize=4096)
def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the fastest formula for the precision holds: beyond, a slower one takes over.

    Expanded squares in float32 for "fast" sums, otherwise in float64.
    """
    limit = single_limit(problem)
    return limit if limit > 0 else double_limit(problem)


def single_limit(problem: Problem, log_weight_span: float = 0.0) -> float:
    """Return the extent up to which expanded squares in float32 keep "fast"; −inf where not even at 0.

    LAPLACE pays an error twice, in φ and in its factor. ``log_weight_span`` is the largest magnitude of a log weight,
    which is added to the exponent, also where all points coincide. MEAN is never computed so: the bound on its shift
    would leave a few bandwidths.
    """
    if problem.precision != "fast" or problem.reduction is Reduction.MEAN:
        return -math.inf
    budget = BUDGET * TOLERANCES["fast"][Reduction.LOG_SUM].absolute
    if problem.reduction is Reduction.LAPLACE:
        budget /= 2.0
    budget -= 4.0 * exponents.UNIT_ROUNDOFF["float32"] * log_weight_span
    per_square = exponent_error("float32", problem.d, 1.0)
    return math.sqrt(budget / per_square) if budget > 0 else -math.inf


def double_limit(problem: Problem) -> float:
    """Return the extent up to which expanded squares in float64 keep the problem's precision.

    An error δ in the exponents moves a log sum by at most δ. It moves a shift by at most δ times half the distance
    between the points that matter to the row, so by δ R (a row midway between two clusters).
    """
    ratio = BUDGET * _strictest(problem) / exponent_error("float64", problem.d, 1.0)
    if problem.reduction is not Reduction.MEAN:
        return math.sqrt(ratio)
    return min(math.sqrt(ratio), ratio ** (1 / 3), product_shift_limit(problem))  # δ R ≤ budget


def split_limit(problem: Problem) -> float:
    """Return the extent up to which split squares keep the problem's precision.

    Their error is that of a_i·b_j + b_i·u_j: ε times sums of 2d products of independent signs, since the b's are what
    rounding left, with one factor below 2⁻²⁶ R each. The bound taken is 4 ε √d R² 2⁻²⁵.
    """
    per_square = 4.0 * exponents.UNIT_ROUNDOFF["float64"] * math.sqrt(problem.d) * 2.0**-25
    return math.sqrt(BUDGET * _strictest(problem) / per_square)


def product_shift_limit(problem: Problem, terms: int = PART) -> float:
    """Return the extent R up to which Σφu_j − u_iΣφ keeps the shift, though it rounds numbers of size R.

    Beside a heap of duplicates all additions round alike, each by up to ε of the sum so far: 0.35 ε of the whole sum on
    average, and sums of φ and of φu in opposite directions. Added up are ``terms`` terms to a part, parts
    to a tile's sum, and tiles.
    """
    widest = columns_of_a_task(1, problem.n)  # a tile of few rows
    additions = terms + widest / terms + problem.n / COLUMNS
    error = 0.7 * additions * exponents.UNIT_ROUNDOFF["float64"]
    return (1.0 - BUDGET) * TOLERANCES[problem.precision][Reduction.MEAN].absolute / error


@functools.lru_cache(maxsize=4096)
def terms_at_once(problem: Problem) -> int:
    """Return how many terms of a shift are added one after another: a tile's, where that suffices; parts cost time."""
    return COLUMNS if problem.extent <= product_shift_limit(problem, COLUMNS) else PART


def _strictest(problem: Problem) -> float:
    tolerance = TOLERANCES[problem.precision]
    absolute = tolerance[Reduction.LOG_SUM].absolute
    return min(absolute, tolerance[Reduction.MEAN].absolute) if problem.reduction is Reduction.MEAN else absolute
