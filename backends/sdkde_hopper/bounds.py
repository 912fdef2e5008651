"""What the kernels take, by error bounds. Distances are in log2 units, v = √(log2 e) u; extents in bandwidths."""

from __future__ import annotations

import math

from sdkde_core.protocol import Problem, Reduction, Support

#: MEAN scales φ by two to this power: φ ≤ 1 then uses the range of half precision, nearly all of it at "high".
SCALE_BITS = {"fast": 14, "high": 15}

#: LOG_SUM scales φ by two to this power: with φ from 2⁻²²² on, most rows need no running maximum. At "high" exponents
#: stay below 64: adding a product to one rounds it by 2⁻¹⁸ at most.
RAISED_BITS = {"fast": 96, "high": 63}


def grid_step(extent: float, precision: str) -> float:
    """Return g, the grid of the leading pieces of the points: a power of two.

    Sums of products of multiples of g are exact in 24 bits while below 2²⁴ g². The largest is ‖v‖², for which there is
    one bit more: a step of a Tensor Core that makes a sum above 2²⁴ g² truncates it by g². In sixteen dimensions that
    is one step. In more the constants are added half way, so that before and after sums of near points are a part of
    ‖v‖²: not both parts are above half of it, so two steps are, at most, in 64 dimensions. At "high" that bit is not
    given away, and nothing is truncated: ‖hi‖ ≤ ‖v‖ + ½ √d g, .1 % more.
    """
    radius = max(extent * math.sqrt(math.log2(math.e)) * (1.001 if precision == "high" else 1.0), 1.0)
    return 2.0 ** (math.ceil(math.log2(radius) - 0.5 * (precision == "fast")) - 12)


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the tolerances are kept, 18.8 bandwidths.

    An exponent is off by what is rounded of two constants, half of g² for each in log2 units, and by g² where hi·hi is
    truncated: 2e-5 at the coarsest grid. φ is off by 2⁻¹⁵ of itself for the columns, and by 2⁻²¹ for the rows; those of
    duplicates are set apart before, so that their sum is right to 2⁻¹⁷ (``pieces.cuh``). A shift is a mean of φ, so a
    part p of it at distance r that is off by δ moves it by δ p (1 − p) r. Of what matters few columns lie near, and to
    weigh as much 10⁶ have to be 5.3 away: with δ = 2⁻¹⁷ + 2e-5 that is 4e-5. Beyond sixteen dimensions there are only
    rows: δ = 4.2e-5, with two truncated sums.

    Weights change none of that: they are factors of what φ is multiplied by. Rows whose sum is so small, next to the
    largest weight, that what the pieces lose of φ or of a weight would matter are summed again, in float64
    (``finish_dense``); so are all where every weight is that small. LOG_SUM and LAPLACE add log weights to the
    exponents in fp32.

    LOG_SUM and LAPLACE leave lo·lo out, ‖lo‖² ≤ d g²/4 + 2⁻²² R² for a row and its own column: 2e-4 in 64 dimensions.

    At "high" nothing is left out of an exponent: points have three pieces in it, and what the grid leaves of the
    constants is a product of its own. A log sum is truncated once, by 2⁻¹⁸. Beyond 32 dimensions MEAN has so many steps
    that what is not exact is summed apart. A row's own φ is added in float64: beside it 1e-5 was truncated. φ is off by
    2⁻²², and its second piece multiplied by hi alone, 4e-6; sums are off by 2⁻²³ R in each of four steps. What φ is
    multiplied by has two pieces, which move a shift to a heap of duplicates by 4e-6 at the coarsest grid in 16
    dimensions and by 5e-6 in 32, or 9e-6 if all are off by the most; beyond it has three. Of φ below 2⁻¹⁶, 2⁻⁴⁰ is
    lost, for every column beside a heap alike. Beside near neighbours of a row, among the same 32 columns (or 64, by
    symmetry in nine dimensions or more), the products of a heap are truncated alike: 7e-6 if it lies twelve away.
    """
    # The grid step g is the coarsest at which the rounding of both constants stays within the tolerance, and
    # ‖v‖² ≤ 2 · 2²⁴ g²; at "high" it is 2⁻⁷ there.
    return math.sqrt(2.0 * 2.0**24) * 2.0**-8 / math.sqrt(math.log2(math.e))


def supports(problem: Problem) -> Support:
    if problem.d > 64:  # which the kernels hold at once
        return Support(False, f"has kernels for up to 64 dimensions, not {problem.d}")
    mean, high = problem.reduction is Reduction.MEAN, problem.precision == "high"
    if high and mean and problem.n > (1 << 17 if "weights" in problem.requires else 1 << 20):
        return Support(False, f"what it loses of small φ adds up, of {problem.n} points")
    if mean and not problem.same:
        return Support(False, "its MEAN is of the points themselves, not of other rows")
    if problem.extent > (limit := extent_limit(problem)):
        return Support(False, f"its formula holds up to {limit:.1f} bandwidths, not {problem.extent:g}")
    both = mean and symmetric(problem)
    # Dealing out blocks of pairs takes the host 5 ms: up to some 200,000 points four cards are faster by rows.
    if "pairs" in problem.requires and (not both or problem.n < 3 << 16):
        return Support(False, "takes each pair once in up to 16 dimensions, without weights, of many points")
    return Support(True, "every φ once, for its row and its column" if both else "every φ once, for its row")


def symmetric(problem: Problem) -> bool:
    """Whether MEAN takes φ once for its row and its column: all points are both, and sums fit, scaled alike."""
    return problem.same and problem.m == problem.n and problem.d <= 16 and "weights" not in problem.requires
