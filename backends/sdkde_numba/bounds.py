"""Which arithmetic and which form of the exponents keep a precision, from error bounds.

An exponent −½ r²_ij comes as u_i·u_j − ½‖u_j‖² (**products**), which loses ε R², or as a sum of squares of differences
(**squares**), which loses ε r² and what rounding the coordinates to float32 costs; see
:mod:`sdkde_core.engine.exponents`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import exponents
from sdkde_core.protocol import TOLERANCES, Problem, Reduction, Tolerance

Array = NDArray[Any]

LN2 = math.log(2.0)

#: Columns that a lane of leaves adds in float32 before they go on to float64.
BLOCK = 32

#: Where tiles are left out: columns and rows of a tile, and columns of a leaf, which stand together in their order.
TILE, LEAF = 128, 16

#: The largest extent that float64 takes: a column that is left out must stay below all others.
MOST_EXTENT = 1e140


class Form(NamedTuple):
    """How exponents are computed."""

    dtype: str
    direct: bool  # squares of differences, or products

    def __str__(self) -> str:
        return f"{'direct differences' if self.direct else 'expanded squares'} in {self.dtype}"


def choose(problem: Problem, log_weight_span: float = 0.0) -> Form:
    """Return the fastest form that keeps the precision; ``log_weight_span``: the largest magnitude of a log weight."""
    if "kernel" in problem.requires:  # one form, right at any extent
        return Form("float64", True)
    # Columns left out must stay below log weights in float32 too.
    if problem.extent <= single_limit(problem) and log_weight_span <= 1e5:
        return Form("float32", problem.extent > single_products(problem))
    return Form("float64", problem.extent > double_limit(problem))


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the fastest form for the precision holds: beyond, a slower one takes over."""
    limit = single_limit(problem)
    return limit if limit > 0 else double_limit(problem)


def single_limit(problem: Problem) -> float:
    """Return the extent up to which float32 keeps the precision, in either form; −inf where not even at 0."""
    if problem.precision != "fast" or problem.reduction is Reduction.MEAN:  # MEAN would end at a few bandwidths
        return -math.inf
    summing = 4.0 * exponents.UNIT_ROUNDOFF["float32"] * (math.sqrt(problem.d) / 3.0 + 1.0)
    return max(single_products(problem), exponents.squares_limit(*float32_budget(problem, 0.75), summing))


def single_products(problem: Problem) -> float:
    """Return the extent up to which products in float32 keep "fast"."""
    return exponents.expanded_limit(problem, "float32", float32_budget(problem, 0.75).absolute)


def double_limit(problem: Problem) -> float:
    """Return the extent up to which products in float64 keep the problem's precision; squares have no limit."""
    return exponents.expanded_limit(problem, "float64", 0.5 * (exponents.strictest(problem) / exponents.paid(problem)))


def takes_leaves(problem: Problem) -> bool:
    """Whether rows are first summed in float32, leaf by leaf."""
    # Beyond 16 dimensions the sums of all coordinates are too many for registers.
    return problem.precision != "float64" and problem.d <= 16


def leaf_errors(
    problem: Problem,
    log_sum: Array,  # (m,)
    total: Array,  # (m,), sums over the heaviest column's weight
    square: Array,  # (m,), E[r²] as summed, or a bound
    fourth: Array,  # (m,), E[r⁴]; not used for LOG_SUM
    shift: Array | None,  # (m, d)
    across: Array,  # (m,), largest distance of a row of the tile from its middle
    tie: float,  # largest share of one value of a coordinate among columns that stand together
    span: float,  # log2 of the heaviest column's weight over the lightest's
) -> Array:
    """Return what rows summed in float32, leaf by leaf, may err by, over the tolerance.

    With the unit roundoff ε, coordinates from the middle of a tile of rows err by ε of themselves; rows are no
    farther from there than ρ, ``across``. Differences err by ε more, the sum of d squares by d ε, the exponent by ε. So
    a term φ errs by η φ,

        η ≤ ε (½ (5 + d) r² + 2 ρ r) + 2e-7, the last for the exponential,

    besides its polynomial's 1e-7, and what rounding log weights costs, 2 log 2 · span · ε. Expectations E are under the
    shares p of the terms in a row's sum; the kernel sums E[r²] and E[r⁴], and Cauchy and Schwarz bound the others.

    * LOG_SUM errs by E[η].
    * LAPLACE, relative to M, by E[η] + (E[η ½ r²] + E[η]) / (1 + d/2).
    * MEAN by Σ p η (x − mean), at most E[η ‖x − mean‖] = A. But roundings of one column do not depend on another's. So
      by four standard deviations of roundings, each of which is even on ±1 unit, it errs by no more than
      (4 / √3) √(Σ p² η² ‖x − mean‖²) ≤ (4 / √3) √(q A B), with B the largest e^{−½ r²} η (r + ‖shift‖), and q over the
      largest share of one column, 1 / ``total``. Columns with a coordinate in common round alike: then q is their
      share, ``tie``. Of η half the part with ρ is the row's own rounding, not counted here: it is as if the row stood
      elsewhere, and moves the result by no more than ε ρ max(E‖x − mean‖², 1).

    Sums in float32 add to that: each lane by (4 / 3) ε √BLOCK of itself, :data:`BLOCK` columns at a time, so that four
    standard deviations of all together are √(largest share of a lane) of it; equal terms by ε BLOCK / 3, as they round
    alike. All that may use .78 of the tolerance; what is left out has about the rest. NaN where a sum is none.
    """
    epsilon, d, whole = exponents.UNIT_ROUNDOFF["float32"], problem.d, 1.0 + 0.5 * problem.d
    budget, polynomial, rounded, block_sum = 0.78, 1e-7, 2e-7, 4.0 * epsilon * math.sqrt(BLOCK) / 3.0
    slip = 4.0 * epsilon * across  # distances as summed err by that, and by little of themselves
    root = 1.001 * np.sqrt(square) + slip
    known = polynomial + 2.0 * LN2 * span * epsilon
    by_square, by_root = 0.5 * (5.0 + d) * epsilon, 2.0 * across * epsilon
    summing = np.maximum(block_sum * np.sqrt(np.minimum(BLOCK / total, 1.0)), tie * BLOCK / 3.0 * epsilon)
    tolerances, log_plus = TOLERANCES[problem.precision], log_sum + np.log(whole + 0.5 * square)
    square, fourth = root**2, (1.001 * np.sqrt(np.sqrt(fourth)) + slip) ** 4
    first = known + rounded + by_square * square + by_root * root  # E[η]
    off = (first + summing) / (budget * tolerances[Reduction.LOG_SUM].at(log_sum))
    if problem.reduction is Reduction.LAPLACE:
        second = (known + rounded) * square + by_square * fourth + by_root * np.sqrt(square * fourth)  # E[η r²]
        off = first + (0.5 * second + first) / whole + summing * (1.0 + 0.5 * square / whole)
        off = off / (budget * tolerances[Reduction.LAPLACE].at(log_plus))
    if shift is not None:
        length = np.linalg.norm(shift, axis=1)
        around = np.maximum(square - length**2, 1e-3 * square)  # E‖x − mean‖²
        by_root = 0.5 * by_root
        worst = (rounded + by_square * np.sqrt(fourth) + by_root * root) * np.sqrt(around)  # A
        one = rounded * (0.61 + length) + by_square * (1.17 + 0.74 * length) + by_root * (0.74 + 0.61 * length)  # B
        share = np.minimum(np.maximum(1.0 / total, tie), 1.0)
        moved = np.minimum(worst, 4.0 / math.sqrt(3.0) * np.sqrt(share * worst * one))
        moved = moved + known * np.sqrt(around) + epsilon * across * np.maximum(around, 1.0)
        moved = moved + epsilon * (2.0 * root + across) * np.sqrt(share)  # the differences
        moved = moved + summing * (root + length)
        off = np.maximum(off, moved / (budget * tolerances[Reduction.MEAN].at(log_sum)))
    return off


def float32_budget(problem: Problem, part: float) -> Tolerance:
    """Return what exponents may use in float32, that part of the tolerance; the rest is for exponentials and sums."""
    tolerance, share = TOLERANCES[problem.precision][problem.reduction], part / exponents.paid(problem)
    return Tolerance(share * tolerance.absolute, share * tolerance.relative)
