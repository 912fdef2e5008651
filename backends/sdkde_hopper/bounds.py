"""What the kernels take, by error bounds. Distances are in log2 units, v = √(log2 e) u; extents in bandwidths."""

from __future__ import annotations

import math

from sdkde_core.protocol import Problem, Reduction, Support

__all__ = ["MOST_DIMENSIONS", "MOST_EXTENT", "RAISED_BITS", "SCALE_BITS", "extent_limit", "grid_step", "supports"]

#: One step of a Tensor Core takes sixteen dimensions.
MOST_DIMENSIONS = 16

#: MEAN scales φ by two to this: φ ≤ 1 then uses the whole range of half precision.
SCALE_BITS = 14

#: LOG_SUM does by two to this: with φ from 2⁻²²² on, most rows need no running maximum.
RAISED_BITS = 96

_SQRT_LOG2E = math.sqrt(math.log2(math.e))

#: The finest grid on which two pieces of a constant are exact to its square, see :func:`grid_step`.
_COARSEST_STEP = 2.0**-8

#: ‖v‖² ≤ 2 · 2²⁴ g² for that grid.
MOST_EXTENT = math.sqrt(2.0 * 2.0**24) * _COARSEST_STEP / _SQRT_LOG2E


def grid_step(extent: float) -> float:
    """Return g, the grid of the leading pieces of the points: a power of two.

    Sums of products of multiples of g are exact in 24 bits while below 2²⁴ g²; one step of a Tensor Core, which makes
    the largest sum, takes one bit more.
    """
    radius = max(extent * _SQRT_LOG2E, 1.0)
    return 2.0 ** (math.ceil(0.5 * math.log2(radius**2 / 2.0)) - 12)


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the tolerances are kept, 18.8 bandwidths.

    An exponent is off by what two pieces leave of two constants, g² for each at most in log2 units: 2e-5 at the
    coarsest grid. φ is off by 2⁻¹⁵ of itself for the columns, down to φ = 2⁻¹⁶, and by 2⁻²¹ for the rows. A shift is a
    mean of φ, so a part p of it at distance r that is off by δ moves it by δ p (1 − p) r: of what matters, r is 5 at
    most, as columns further away would have to number 10⁵ to weigh as much; with δ = 2⁻¹⁵ + 2e-5 that is 6e-5.
    """
    return MOST_EXTENT


def supports(problem: Problem) -> Support:
    """Say whether the kernels take a problem."""
    if problem.d > MOST_DIMENSIONS:
        return Support(False, f"has kernels for up to {MOST_DIMENSIONS} dimensions, not {problem.d}")
    if problem.reduction is Reduction.LAPLACE:
        return Support(False, "has no kernel for LAPLACE")
    if problem.reduction is Reduction.MEAN and not problem.same:
        return Support(False, "its MEAN is of the points themselves, not of other rows")
    if problem.extent > MOST_EXTENT:
        return Support(False, f"its formula holds up to {MOST_EXTENT:.1f} bandwidths, not {problem.extent:g}")
    both = problem.reduction is Reduction.MEAN
    return Support(True, "every φ once, for its row and its column" if both else "every φ once, for its row")
