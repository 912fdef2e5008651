"""Which formula keeps "fast" for a problem: Tensor Cores on packed operands, or direct differences.

Distances below are in log2 units, v = √(log2 e) u, as in :mod:`sdkde_triton.kernels`; extents are in bandwidths.
"""

from __future__ import annotations

import math

from sdkde_core.protocol import Problem, Reduction

__all__ = [
    "depth_limit",
    "direct_dtype",
    "extent_limit",
    "formula",
    "grid_step",
    "merges",
    "needs_long",
    "packed_dimensions",
    "prefers_direct",
    "shifts_rows",
]

_SQRT_LOG2E = math.sqrt(math.log2(math.e))

#: Extents (bandwidths) up to which packed operands keep "fast": twice below where an H200 began to miss it. MEAN ends
#: earlier: its sums Σ φ v carry rounding errors in proportion to ‖v‖, where the shift is small.
PACKED_LIMIT = {Reduction.LOG_SUM: 150.0, Reduction.LAPLACE: 150.0, Reduction.MEAN: 72.0}

#: Extents up to which direct differences of fp32 coordinates keep it. A coordinate is off by 2⁻²⁵ R, so an exponent by
#: 2⁻²⁴ R r at distance r; the allowance 5e-4 + 5e-7 r² is least ahead of that at r ≈ 30.
SINGLE_LIMIT = {Reduction.LOG_SUM: 200.0, Reduction.LAPLACE: 100.0, Reduction.MEAN: 200.0}


def shifts_rows(problem: Problem) -> bool:
    """Whether MEAN first needs the rows' log sums: no term of a row is known to be near 1."""
    return problem.reduction is Reduction.MEAN and (not problem.same or "weights" in problem.requires)


def prefers_direct(problem: Problem) -> bool:
    """Whether direct differences beat Tensor Cores, which multiply sixteen dimensions whether they are there or not.

    On an H200, a first pass of 32768² takes 0.35 against 0.47 ms in one dimension and 0.47 against 0.55 in two; a
    second pass in two dimensions 0.09 against 0.07.
    """
    return problem.d == 1 or (problem.d == 2 and problem.reduction is Reduction.MEAN and not shifts_rows(problem))


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the fast formula holds; beyond, differences in float64 answer."""
    if not prefers_direct(problem):
        return PACKED_LIMIT[problem.reduction]
    return math.inf if shifts_rows(problem) else SINGLE_LIMIT[problem.reduction]


def formula(problem: Problem, extent: float) -> str:
    """Return ``"packed"`` or ``"direct"``."""
    packed = not prefers_direct(problem) and extent <= PACKED_LIMIT[problem.reduction]
    return "packed" if packed else "direct"


def direct_dtype(problem: Problem, extent: float) -> str:
    """Return the dtype in which direct differences, exponents and their maximum are taken.

    A shift between two columns at distance D that matter equally to a row far from both is off by D/4 times an error of
    the exponent, and fp32 rounds an exponent of 300 by 2e-5: such rows need float64.
    """
    single = prefers_direct(problem) and not shifts_rows(problem) and extent <= SINGLE_LIMIT[problem.reduction]
    return "float32" if single else "float64"


def merges(d: int) -> bool:
    """Whether the constants fit into the free columns of hi: four of sixteen."""
    return d <= 12


def packed_dimensions(d: int) -> int:
    """Return D, the columns of a packed operand: the power of two that holds d, at least what a Tensor Core takes."""
    return max(16, 1 << (d - 1).bit_length())


def grid_step(d: int, extent: float, *, shifted: bool, log_weight_span: float = 0.0) -> float:
    """Return g, the grid of the leading pieces: a power of two.

    Sums of products of multiples of g are exact in 24 bits while below 2²⁴ g². The largest is ‖v‖², with the span of
    the log weights, and where rows are shifted by their log sums, those (up to :func:`depth_limit`). Up to 2⁻⁸ one bit
    more is taken: the last bit of the largest sums weighs less than the pieces below a coarser grid.

    Parameters
    ----------
    d : int
    extent : float
        In bandwidths.
    shifted : bool
        See :func:`shifts_rows`.
    log_weight_span : float
        Largest magnitude of a log weight, in nats.
    """
    radius = max(extent * _SQRT_LOG2E, 1.0)
    largest = radius**2 + 2.0 * log_weight_span * _SQRT_LOG2E**2
    if shifted:
        largest += 2.0 * depth_limit(d, 2.0**-7) * _SQRT_LOG2E**2
    step = 2.0 ** (math.ceil(0.5 * math.log2(largest / 2.0)) - 12)
    return step if step <= 2.0**-8 else 2.0 ** (math.ceil(0.5 * math.log2(largest)) - 12)


def depth_limit(d: int, step: float) -> float:
    """Return how far below the largest log weight a row's log sum may be for MEAN on packed operands, in nats.

    Pieces on a grid g hold a coordinate to about 2⁻¹⁴ g. Of a row at distance r from the columns that matter to it,
    that moves an exponent by 1.4 · 2⁻¹⁴ g r, and the shift by up to D/4 times that, D ≤ 2 r being the distance between
    those columns: 0.5e-4 g r², so the tolerance of 6e-5 is kept with r²/2 ≤ 0.5 / g. (Measured: to a margin of 1.4 in
    up to 32 dimensions; in more it takes less.)
    """
    return min(0.5, 24.0 / packed_dimensions(d)) / step


def needs_long(problem: Problem, step: float) -> bool:
    """Whether the products lo·lo and the constants' third piece are needed to keep "fast"; measured, like the limits.

    Left out, they cost √d g²/12 at random and up to g² in an exponent, log2 units.
    """
    if problem.reduction is Reduction.MEAN:
        return shifts_rows(problem) or step > 2.0**-8
    return step > 2.0**-7
