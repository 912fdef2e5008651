"""Which dtype keeps a precision, from error bounds; extents are in bandwidths.

Exponents are sums of squares of differences. ε is the unit roundoff, R the extent, r a distance. Rounding the
coordinates to float32 moves an exponent by 2 ε R r at most. A difference and its square err by 3 ε of the square. An
addition errs by some 0.4 ε of its result (standard deviation over uniform mantissas), and the partial sums of d squares
grow evenly: a sum errs by 0.4 ε √(d/3) of itself, of which four times is taken.

Tolerances grow with |ℓ|, and columns at a distance r matter to a row only where |ℓ| is some ½ r². Their log weights are
part of that: to round them, and to add them, costs 2 ε |ℓ| at most.
"""

from __future__ import annotations

import math

from sdkde_core.protocol import TOLERANCES, Problem, Reduction

__all__ = ["LARGEST_INDEX", "MOST_EXTENT", "block", "dtype", "extent_limit", "single_limit"]

EPSILON = 2.0**-24

#: Share of what sums leave of the tolerance that exponents may use in float32.
BUDGET = 0.75

#: Columns that KeOps sums on a GPU before it adds them to the rest, and bytes of the fast memory that must hold them.
BLOCK, SHARED = 192, 49152

#: Points beyond this many times the limit of float32 are outliers, which the core takes off; nearer they are data.
NEAR = 4.0

#: What float64 takes: squares of distances must not overflow.
MOST_EXTENT = 1e140

#: Indices that float32 tells apart, for rows that leave out their own column.
LARGEST_INDEX = 1 << 24


def dtype(problem: Problem) -> str:
    """Return the dtype in which KeOps computes: the fastest that keeps the precision."""
    return "float32" if problem.extent <= single_limit(problem) * (1.0 + 1e-9) else "float64"


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the fastest dtype keeps the precision, or what float64 takes.

    Where data reach a little beyond the limit of float32, many points do: float64 for all then takes less time.
    """
    limit = single_limit(problem)
    return limit if limit > 0 and not limit < problem.extent <= NEAR * limit else MOST_EXTENT


def single_limit(problem: Problem) -> float:
    """Return the extent up to which float32 keeps the precision; −inf where it is not used.

    On a CPU it is no faster: KeOps calls the library's exponential, number by number. A shift, off by R times the
    exponents' error at worst (a row midway between two clusters), ends at three bandwidths in float32.
    """
    if problem.device == "cpu" or problem.precision == "float64" or problem.reduction is Reduction.MEAN:
        return -math.inf
    if "exclude_self" in problem.requires and problem.n >= LARGEST_INDEX:
        return -math.inf
    tolerance = TOLERANCES[problem.precision][problem.reduction]
    absolute = BUDGET * (tolerance.absolute / _paid(problem) - _of_sums(problem))
    relative = BUDGET * tolerance.relative / _paid(problem)
    if absolute <= 0:
        return -math.inf
    if "weights" in problem.requires:
        relative -= 2.0 * EPSILON
    # Error − allowance = 2 ε R r + (a − b) r²/2 − A: largest at the greatest distance, 2 R, or where b > a at the
    # vertex r = 2 ε R / (b − a).
    a, b = EPSILON * (1.6 * math.sqrt(problem.d / 3.0) + 3.0), relative
    at_vertex = math.sqrt(2.0 * absolute * (b - a)) / (2.0 * EPSILON) if b > a + EPSILON else math.inf
    per_square = 4.0 * EPSILON + 2.0 * (a - b)
    return min(at_vertex, math.sqrt(absolute / per_square) if per_square > 0 else math.inf)


def block(d: int, itemsize: int) -> int:
    """Return how many columns of d + 2 numbers KeOps takes at a time on a GPU."""
    return max(1, min(BLOCK, SHARED // ((d + 2) * itemsize)))


def _of_sums(problem: Problem) -> float:
    """Relative error of the sums: in blocks, over the blocks, and of exponentials, whose argument is rounded.

    Over the blocks every addition may round alike, as beside a heap of equal columns: by up to ε of a partial sum,
    which is half the sum on average. Arguments are below the row's largest by some log n where columns matter.
    """
    width = block(problem.d, 4)
    return EPSILON * (1.6 * math.sqrt(width / 3.0) + 0.5 * problem.n / width + 16.0)


def _paid(problem: Problem) -> float:
    """How often an error of the exponent counts: LAPLACE has it in φ and in its factor, which is at least 1 + d/2."""
    return 1.0 + 1.0 / (1.0 + 0.5 * problem.d) if problem.reduction is Reduction.LAPLACE else 1.0
