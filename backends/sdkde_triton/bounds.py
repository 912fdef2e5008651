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
    "form",
    "formula",
    "grid_step",
    "merges",
    "packed_dimensions",
    "prefers_direct",
    "shifts_rows",
]

#: Largest magnitude of a log weight, in nats, that packed operands and fp32 take: 1e-200 has 461.
MOST_SPAN = 2000.0

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


def formula(problem: Problem, extent: float, log_weight_span: float = 0.0) -> str:
    """Return ``"packed"`` or ``"direct"``; half precision holds log weights (nats) to some 4·10⁴."""
    near = extent <= PACKED_LIMIT[problem.reduction] and log_weight_span <= MOST_SPAN
    return "packed" if near and not prefers_direct(problem) else "direct"


def direct_dtype(problem: Problem, extent: float, log_weight_span: float = 0.0) -> str:
    """Return the dtype in which direct differences, exponents and their maximum are taken.

    A shift between two columns at distance D that matter equally to a row far from both is off by D/4 times an error of
    the exponent, and fp32 rounds an exponent of 300 by 2e-5: such rows need float64.
    """
    near = log_weight_span <= MOST_SPAN
    single = near and prefers_direct(problem) and not shifts_rows(problem) and extent <= SINGLE_LIMIT[problem.reduction]
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
    the log weights, and where rows are shifted by their log sums, those (up to :func:`depth_limit`). In up to 16
    dimensions, where one step of a Tensor Core makes the largest sum, one bit more is taken up to 2⁻⁸: that step
    truncates by at most 2 g², which weighs less than what a coarser grid leaves to the smaller pieces.

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
    step = 2.0 ** (math.ceil(0.5 * math.log2(largest)) - 12)
    tight = 2.0 ** (math.ceil(0.5 * math.log2(largest / 2.0)) - 12)
    return tight if d <= 16 and tight <= 2.0**-8 else step


def depth_limit(d: int, step: float) -> float:
    """Return how far below the largest log weight a row's log sum may be for MEAN on packed operands, in nats.

    Pieces on a grid g hold a coordinate to about 2⁻¹⁴ g. Of a row at distance r from the columns that matter to it,
    that moves an exponent by 1.4 · 2⁻¹⁴ g r, and the shift by up to D/4 times that, D ≤ 2 r being the distance between
    those columns: 0.5e-4 g r², so the tolerance of 6e-5 is kept with r²/2 ≤ 0.5 / g. (Measured: to a margin of 1.4 in
    up to 32 dimensions; in more it takes less.)
    """
    return min(0.5, 24.0 / packed_dimensions(d)) / step


def form(problem: Problem, extent: float, step: float) -> int:
    """Return the form of the exponents that keeps "fast": 0, 1, 2 for SHORT, PAIRED, LONG.

    SHORT leaves out lo_i·lo_j: at random between unrelated points, but ‖lo‖² > 0 between a row and its own column,
    duplicates of it, or columns that it was placed on. No coordinate's lo is above g/2, nor above 2⁻¹¹ of the
    coordinate, so ‖lo‖² ≤ d g²/4 + 2⁻²² R², R in log2 units. An exponent off by δ for some of the columns moves a log
    sum by δ at most, and a shift by δ p (1 − p) D, p the weight of those columns and D their distance from the others:
    δ at most, as columns five bandwidths away would have to number 10⁵ to weigh as much.

    PAIRED leaves out c₃, up to g² in an exponent, log2 units, and is taken up to g = 2⁻⁸, as measured.
    """
    lost = math.log(2.0) * (0.25 * problem.d * step**2 + 2.0**-22 * (extent * _SQRT_LOG2E) ** 2)
    if problem.reduction is Reduction.MEAN:
        if shifts_rows(problem) or step > 2.0**-8:
            return 2
        return 0 if lost <= 2e-5 else 1
    return 0 if lost <= (1.2e-4 if problem.reduction is Reduction.LAPLACE else 2.5e-4) and step <= 2.0**-7 else 2
