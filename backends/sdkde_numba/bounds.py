"""Which arithmetic and which form of the exponents keep a precision, from error bounds.

An exponent −½ r²_ij comes as u_i·u_j − ½‖u_j‖² (**products**), which loses ε R² (R the extent in bandwidths, ε the unit
roundoff), or as a sum of squares of differences (**squares**), which loses ε r² and what rounding the coordinates to
float32 costs. Sums of d terms with independent roundings are taken to err by four standard deviations,
4 ε (√d/3 + 1) times the largest partial sum (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019).

At bandwidth factor s exponents and their errors are divided by s², and a shift's tolerance is s times that of scale 1.
So every limit is s times that of scale 1; the smallest factor decides.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.protocol import TOLERANCES, Problem, Reduction

__all__ = [
    "MOST_EXTENT",
    "MOST_KERNEL_EXTENT",
    "SCALES",
    "Form",
    "beside_terms",
    "choose",
    "double_limit",
    "extent_limit",
    "single_limit",
    "single_products",
    "single_terms",
]

Array = NDArray[Any]

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}

#: Shares of the tolerance that exponents may use in float32 and in float64; the rest is for exponentials and sums.
SINGLE_BUDGET, DOUBLE_BUDGET = 0.75, 0.5

#: Share of a shift's tolerance that terms in float32 may use, and their error over their reach. A tenth is for pairs
#: left out; exponents need a thirtieth up to FARTHEST of their limit.
TERMS_BUDGET, TERMS_ERROR, FARTHEST = 0.85, 9.2e-7, 0.25

#: Bandwidth factors and log weights (nats) that float32 takes: columns left out must stay below all others.
SINGLE_SCALES, SINGLE_SPAN = (1e-4, 1e4), 1e5

#: What float64 takes for the same reason: bandwidth factors, and extents over the smallest of them.
SCALES, MOST_EXTENT = (1e-7, 1e7), 1e140

#: Extents over the smallest factor that other kernels than the Gaussian take: squares of distances are finite.
MOST_KERNEL_EXTENT = 2e149


class Form(NamedTuple):
    """How exponents are computed."""

    dtype: str
    direct: bool  # squares of differences, or products

    def __str__(self) -> str:
        return f"{'direct differences' if self.direct else 'expanded squares'} in {self.dtype}"


def choose(problem: Problem, log_weight_span: float = 0.0) -> Form:
    """Return the fastest form that keeps the precision; ``log_weight_span``: the largest magnitude of a log weight.

    Another kernel than the Gaussian has one form, right at any extent.
    """
    if "kernel" in problem.requires:
        return Form("float64", True)
    if problem.extent <= single_limit(problem) and log_weight_span <= SINGLE_SPAN:
        return Form("float32", problem.extent > single_products(problem))
    return Form("float64", problem.extent > double_limit(problem))


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the fastest form for the precision holds: beyond, a slower one takes over."""
    return single_limit(problem) if _takes_single(problem) else double_limit(problem)


def single_limit(problem: Problem) -> float:
    """Return the extent up to which float32 keeps the precision, in either form; −inf where not even at 0."""
    return max(single_products(problem), _single_squares(problem)) if _takes_single(problem) else -math.inf


def single_products(problem: Problem) -> float:
    """Return the extent up to which products in float32 keep "fast"."""
    return _smallest_scale(problem) * math.sqrt(_single_budget(problem) / _of_sums("float32", problem.d))


def _single_squares(problem: Problem) -> float:
    """Return the extent up to which squares in float32 keep "fast".

    At distance r the coordinates' rounding costs 2 ε R r at most, and the sum a r²/2. The tolerance grows there as
    well, by b r²/2, since columns that far matter only where log sums are that low. The worst distance is the greatest
    in the data, 2 R, or where (b − a) r = 2 ε R if b > a.
    """
    a, b = _of_sums("float32", problem.d), _single_budget(problem, relative=True)
    epsilon, budget = UNIT_ROUNDOFF["float32"], _single_budget(problem)
    at_vertex = math.sqrt(2.0 * budget * (b - a)) / (2.0 * epsilon) if b > a + epsilon else math.inf
    per_square = 4.0 * epsilon + 2.0 * (a - b)  # the error at 2 R, over R²
    at_end = math.sqrt(budget / per_square) if per_square > 0 else math.inf
    return _smallest_scale(problem) * min(at_vertex, at_end)


def double_limit(problem: Problem) -> float:
    """Return the extent up to which products in float64 keep the problem's precision; squares have no limit.

    An error δ in the exponents moves a log sum by at most δ. It moves a shift by at most δ times half the distance
    between the points that matter to the row, so by δ R (a row midway between two clusters).
    """
    tolerance, mean = TOLERANCES[problem.precision], problem.reduction is Reduction.MEAN
    absolute = tolerance[Reduction.LOG_SUM].absolute / _paid(problem)
    absolute = min(absolute, tolerance[Reduction.MEAN].absolute) if mean else absolute
    squares = DOUBLE_BUDGET * absolute / _of_sums("float64", problem.d)
    return _smallest_scale(problem) * (min(math.sqrt(squares), squares ** (1 / 3)) if mean else math.sqrt(squares))


def beside_terms(problem: Problem, form: Form) -> Form:
    """Return the form of exponents beside terms in float32: products in float64 leave room for the errors of these."""
    if form.dtype == "float32" or problem.precision == "float64":
        return form
    far = problem.extent > FARTHEST * double_limit(problem)
    return form._replace(direct=form.direct or far or problem.reduction is Reduction.LAPLACE)


def single_terms(problem: Problem, form: Form, reach: Array, across: float) -> bool:
    """Whether exponentials, and sums within a tile, may be in float32 where exponents are in float64.

    A log sum then errs by 3e-7, of exponentials, and by roundings of log2 φ less the largest: at most 2⁻²⁴ log n, by
    the entropy of the terms. A shift errs by the terms' errors times their distances from the mean, whose root mean
    square is at most the ``reach`` √(2 (log Σ w − ℓ)) (see :mod:`sdkde_core.nearby`): by 3e-7 of it for exponentials,
    1e-7 for the roundings before, 4e-7 for sums over a tile, 2 · 2⁻²⁴ for coordinates and differences; and by 2⁻²⁴ of
    the rows' distances, since the coordinates are taken from their middle. LAPLACE adds terms times squares of
    distances, which products have as differences of two such sums: so of squares only, see :func:`beside_terms`.

    Parameters
    ----------
    problem : Problem
    form : Form
        Of the exponents.
    reach : (scales,) array
        In bandwidths of each scale.
    across : float
        Largest distance of two rows that are summed together, in bandwidths of scale 1.
    """
    if problem.precision == "float64":
        return False
    if problem.reduction is not Reduction.MEAN:
        return problem.reduction is Reduction.LOG_SUM or form.direct
    budget = TERMS_BUDGET * TOLERANCES[problem.precision][Reduction.MEAN].absolute
    off = TERMS_ERROR * float(np.max(reach)) + UNIT_ROUNDOFF["float32"] * across / _smallest_scale(problem)
    return off <= budget


def _takes_single(problem: Problem) -> bool:
    """MEAN in float32 would end at a few bandwidths."""
    fits = all(SINGLE_SCALES[0] <= s <= SINGLE_SCALES[1] for s in problem.scales)
    return problem.precision == "fast" and problem.reduction is not Reduction.MEAN and fits


def _of_sums(dtype: str, d: int) -> float:
    """Error of a sum of d terms over the largest partial sum; of products these are at most R²."""
    return 4.0 * UNIT_ROUNDOFF[dtype] * (math.sqrt(d) / 3.0 + 1.0)


def _single_budget(problem: Problem, relative: bool = False) -> float:
    tolerance = TOLERANCES["fast"][problem.reduction]
    return SINGLE_BUDGET / _paid(problem) * (tolerance.relative if relative else tolerance.absolute)


def _paid(problem: Problem) -> float:
    """How often an error of the exponent counts: LAPLACE has it in φ and in its factor, which is at least 1 + d/2."""
    return 1.0 + 1.0 / (1.0 + 0.5 * problem.d) if problem.reduction is Reduction.LAPLACE else 1.0


def _smallest_scale(problem: Problem) -> float:
    return min(problem.scales, default=1.0)
