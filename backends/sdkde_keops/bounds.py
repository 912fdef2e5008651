"""Which dtype keeps a precision, from error bounds; extents are in bandwidths.

Exponents are sums of squares of differences. ε is the unit roundoff, R the extent, r a distance. Rounding the
coordinates to float32 moves an exponent by 2 ε R r at most. A difference and its square err by 3 ε of the square. An
addition errs by some 0.4 ε of its result (standard deviation over uniform mantissas), and the partial sums of d squares
grow evenly: a sum errs by 0.4 ε √(d/3) of itself. The bound taken is four times that.

Tolerances grow with |ℓ|, and columns at a distance r matter to a row only where |ℓ| is some ½ r². Their log weights are
part of that: to round them, and to add them, costs 2 ε |ℓ| at most.
"""

from __future__ import annotations

import math

from sdkde_core.plugin import exponents
from sdkde_core.protocol import TOLERANCES, Problem, Reduction

#: What float64 takes: squares of distances must not overflow.
MOST_EXTENT = 1e140


def dtype(problem: Problem) -> str:
    """Return the dtype in which KeOps computes: the fastest that keeps the precision."""
    return "float32" if problem.extent <= single_limit(problem) * (1.0 + 1e-9) else "float64"


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the fastest dtype keeps the precision, or what float64 takes."""
    # Where data reach up to four times the limit of float32, many points do: float64 for all then takes less time.
    limit = single_limit(problem)
    return limit if limit > 0 and not limit < problem.extent <= 4.0 * limit else MOST_EXTENT


def single_limit(problem: Problem) -> float:
    """Return the extent up to which float32 keeps the precision; −inf where it is not used.

    On a CPU it is no faster: KeOps calls the library's exponential, number by number. A shift, off by R times the
    exponents' error at worst (a row midway between two clusters), ends at three bandwidths in float32.
    """
    if problem.device == "cpu" or problem.precision == "float64" or problem.reduction is Reduction.MEAN:
        return -math.inf
    epsilon, paid, d = 2.0**-24, exponents.paid(problem), problem.d
    width = max(1, min(192, 49152 // (4 * (d + 2))))  # columns that KeOps takes at a time on a GPU, or what 48 KiB hold
    # Of sums: in blocks, over the blocks, where every addition may round alike beside a heap of equal columns, and of
    # exponentials, whose arguments are below the row's largest by some log n where columns matter.
    of_sums = epsilon * (1.6 * math.sqrt(width / 3.0) + 0.5 * problem.n / width + 16.0)
    tolerance, budget = TOLERANCES[problem.precision][problem.reduction], 0.75  # of what sums leave of it
    absolute = budget * (tolerance.absolute / paid - of_sums)
    if absolute <= 0:
        return -math.inf
    relative = budget * tolerance.relative / paid - 2.0 * epsilon * ("weights" in problem.requires)
    return exponents.squares_limit(absolute, relative, epsilon * (1.6 * math.sqrt(d / 3.0) + 3.0))
