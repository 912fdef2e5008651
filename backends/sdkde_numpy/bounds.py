"""Up to which extent a formula keeps a precision's tolerances, by :mod:`sdkde_core.engine.exponents`."""

from __future__ import annotations

import functools
import math

from sdkde_core.plugin import exponents
from sdkde_core.protocol import Problem, Reduction

#: Share of the tolerance that the exponent may use; the rest is for exponentials and sums.
BUDGET = 0.5

#: Rows of a task, and columns of a tile with that many rows; and terms of a shift that are added one after another
#: where the bound does not allow a tile's.
ROWS, COLUMNS, PART = 256, 960, 80


def columns_of_a_task(m: int, n: int) -> int:
    """Columns of a task: where rows are few, the columns are divided too, for some 64 tasks."""
    return min(n, max(1 << 14, -(-n * -(-m // ROWS) // 64)))


@functools.lru_cache(maxsize=4096)
def formula(problem: Problem, log_weight_span: float = 0.0) -> str:
    """Return the fastest formula that keeps the precision; ``log_weight_span``: a log weight's largest magnitude."""
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
    """Return the extent up to which the fastest formula for the precision holds: beyond, a slower one takes over."""
    limit = single_limit(problem)
    return limit if limit > 0 else double_limit(problem)


def single_limit(problem: Problem, log_weight_span: float = 0.0) -> float:
    """Return the extent up to which expanded squares in float32 keep "fast"; −inf where not even at 0."""
    return exponents.expanded_limit(problem, "float32", exponents.half_tolerance(problem, "float32", log_weight_span))


def double_limit(problem: Problem) -> float:
    """Return the extent up to which expanded squares in float64 keep the problem's precision."""
    limit = exponents.expanded_limit(problem, "float64", BUDGET * exponents.strictest(problem))
    return min(limit, product_shift_limit(problem)) if problem.reduction is Reduction.MEAN else limit


def split_limit(problem: Problem) -> float:
    """Return the extent up to which split squares keep the problem's precision.

    Their error is that of a_i·b_j + b_i·u_j: ε times sums of 2d products of independent signs, since the b's are what
    rounding left, with one factor below 2⁻²⁶ R each. The bound taken is 4 ε √d R² 2⁻²⁵.
    """
    per_square = 4.0 * exponents.UNIT_ROUNDOFF["float64"] * math.sqrt(problem.d) * 2.0**-25
    return math.sqrt(BUDGET * exponents.strictest(problem) / per_square)


def product_shift_limit(problem: Problem, terms: int = PART) -> float:
    """Return the extent up to which shifts by products keep the tolerance."""
    # Additions: ``terms`` in a part, then parts to the sum of a tile (of few rows), then tiles.
    return exponents.shift_limit(problem, terms + columns_of_a_task(1, problem.n) / terms + problem.n / COLUMNS)


@functools.lru_cache(maxsize=4096)
def terms_at_once(problem: Problem) -> int:
    """Return how many terms of a shift are added one after another: a tile's, where that suffices; parts cost time."""
    return COLUMNS if problem.extent <= product_shift_limit(problem, COLUMNS) else PART
