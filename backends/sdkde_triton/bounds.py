"""Which formula keeps a problem's tolerance: Tensor Cores on packed operands, or direct differences.

Distances below are in log2 units, v = √(log2 e) u, as in :mod:`sdkde_triton.kernels`; extents are in bandwidths.
"""

from __future__ import annotations

import math

from sdkde_core.protocol import Problem, Reduction

#: Largest magnitude of a log weight, in nats, that packed operands and fp32 take: 1e-200 has 461.
MOST_SPAN = 2000.0

SQRT_LOG2E = math.sqrt(math.log2(math.e))

#: Extent up to which float64 suffices: √(log2 e) u is rounded by 2⁻⁵³ R, and so is the shift of a row beside a point
#: that far out.
MOST_EXTENT = 1e10

#: Dimensions whose differences a thread of the direct kernel holds.
MOST_DIRECT = 4

#: Nats by which log weights may differ where rows are scaled by one factor.
MOST_NATS = 24.0


class Form:
    """Forms of the exponents, see :mod:`sdkde_triton.kernels`."""

    SHORT, PAIRED, LONG, FULL = range(4)


def anchored(problem: Problem) -> bool:
    """Whether every row of MEAN has a term of 1, its own: rows are the columns, without weights."""
    return problem.reduction is Reduction.MEAN and problem.same and "weights" not in problem.requires


def shifts_rows(problem: Problem) -> bool:
    """Whether φ enters a product only after the rows' log sums: the terms that matter to a row may have any size.

    Not where the row is a column with a weight at most e^MOST_NATS below the largest. Then no column matters that is
    more than √(2 (MOST_NATS + log n)) bandwidths away, and sums as at "high" hold terms of all sizes.
    """
    own = problem.same and problem.d <= 64 and problem.weight_span <= MOST_NATS
    return problem.reduction is Reduction.MEAN and not (own or anchored(problem))


def scales(problem: Problem) -> bool:
    """Whether rows scale φ to half precision's range: those that are not shifted by their log sums."""
    return problem.reduction is Reduction.MEAN and not shifts_rows(problem)


def exact(problem: Problem) -> bool:
    """Whether MEAN sums by :func:`sdkde_triton.kernels.exactly_weighted`."""
    return problem.precision == "high" or (scales(problem) and not anchored(problem))


def prefers_direct(problem: Problem) -> bool:
    """Whether direct differences beat Tensor Cores, which multiply sixteen dimensions at least; measured on an H200."""
    return problem.d == 1 or (problem.d <= (3 if problem.precision == "high" else 2) and anchored(problem))


def packed_limit(problem: Problem) -> float:
    """Return the extent up to which packed operands keep the tolerance, with a margin to where an H200 misses it.

    MEAN's sums Σ φ v carry rounding errors in proportion to ‖v‖. Rows that are shifted by their log sums end earlier:
    midway between clusters an error of the exponent moves the shift by its product with their distance. Between
    opposite corners of a lattice the products of many dimensions add up, and fp32 rounds their sum.
    """
    fast = problem.precision == "fast"
    if shifts_rows(problem):
        return 36.0 if fast else 8.0 if in_blocks(problem.d) else 15.0
    if problem.reduction is Reduction.MEAN:
        return 44.0 if fast else 36.0
    return 100.0 if fast else 72.0


def formula(problem: Problem, extent: float, log_weight_span: float = 0.0, listed: bool = False) -> str:
    """Return ``"packed"`` or ``"direct"``; ``listed``: of sums over lists."""
    near = extent <= packed_limit(problem) and log_weight_span <= MOST_SPAN
    return "packed" if near and (listed or not prefers_direct(problem)) else "direct"


def arithmetic(problem: Problem, extent: float, log_weight_span: float = 0.0) -> str:
    """Return the arithmetic of direct differences: ``"float32"``, ``"doubled"`` (pairs of float32) or ``"float64"``.

    A shift between two columns at distance D that matter equally to a row far from both is off by D/4 times an error of
    the exponent, and fp32 rounds an exponent of 300 by 2e-5: such rows need float64.
    """
    laplace = problem.reduction is Reduction.LAPLACE
    # An exponent e of pairs of fp32 numbers is off by some 3e-7 e, less than the relative part of the tolerances. But
    # log |L|, from which L follows only while that is below one, ends first. Of a coordinate 2⁻⁵⁰ R is lost: "high"
    # ends at 2e9.
    beside = problem.reduction is Reduction.MEAN and not anchored(problem)
    if beside or log_weight_span > MOST_SPAN or extent > (400.0 if laplace else 2e9):
        return "float64"
    # One fp32 coordinate is off by 2⁻²⁵ R, so an exponent by 2⁻²⁴ R r at distance r; the allowance of "fast",
    # 5e-4 + 5e-7 r², is least ahead of that at r ≈ 30.
    single = problem.precision == "fast" and extent <= (100.0 if laplace else 200.0)
    return "float32" if single else "doubled"


def steps_at_most(problem: Problem, extent: float, packed: bool = True) -> int:
    """Return the most steps of columns that one program may sum, as fp32 rounds its sums at each.

    Steps round by 2⁻²⁵ of a sum at most, and all alike where columns are duplicates of one another: 512 move a log sum
    by 1.5e-5. Packed coordinates count from the origin, so what Σ φ v loses is R times as much, R the extent: 64 steps
    move a shift by 2e-5 at R = 13. At "high" what they round off is summed too, up to 64 dimensions.
    """
    mean = problem.reduction is Reduction.MEAN
    if not packed or not mean:
        return 128 if problem.precision == "high" else 512
    if exact(problem):
        return 1024 if problem.d <= 64 else 16
    return 64 if extent <= 13.0 else 32 if extent <= 25.0 else 16


def merges(d: int) -> bool:
    """Whether the constants fit into the free columns of hi: four of sixteen."""
    return d <= 12


def packed_dimensions(d: int) -> int:
    """Return D, the columns of a packed operand: 16 or a larger power of two; in blocks, a multiple of 64."""
    return -(-d // 64) * 64 if in_blocks(d) else max(16, 1 << (d - 1).bit_length())


def in_blocks(d: int) -> bool:
    """Whether the dimensions come in blocks of 64: where one program cannot hold all of a tile's pieces.

    Then every dimension is moved by a fraction of the grid of its own, which changes no difference. On a lattice
    (counts, pixels) equal coordinates are rounded by the same amount, and these errors add up over the dimensions, to
    2⁻¹³ g √d r in the exponent of a pair at distance r. Moved by multiples of the golden section they differ as if
    drawn at random: some 2⁻¹³ g r.
    """
    return d > 128


def stores(problem: Problem, corrections: int, capability: int = 90) -> bool:
    """Whether φ is stored before it is multiplied: MEAN of more dimensions than one program holds.

    Tensor Cores before and after Hopper's take a row's operands from registers, where three pieces of 128 do not fit.
    """
    wide = packed_dimensions(problem.d) == 128 and corrections == Form.FULL and not 90 <= capability < 100
    return problem.reduction is Reduction.MEAN and (wide or in_blocks(problem.d))


def mirrors(problem: Problem) -> bool:
    """Whether stored φ serves its rows and its columns: the same points, without weights.

    Not at "high", whose leading piece of φ has its unit from the largest of a row.
    """
    return problem.precision == "fast" and anchored(problem)


def grid_step(problem: Problem, extent: float, log_weight_span: float = 0.0) -> float:
    """Return g, the grid of the leading pieces, a power of two.

    Sums of products of multiples of g are exact in 24 bits while below 2²⁴ g². The largest is ‖v‖² with the span of
    the log weights; where rows are shifted by their log sums, ‖v_i − v_j‖²/2 ≤ 2 R² of those. In up to 16 dimensions
    one step of a Tensor Core makes the largest sum, which truncates by 2 g² at most: up to g = 2⁻⁸ that weighs less
    than what a coarser grid leaves to the smaller pieces.
    """
    d, shifted = problem.d, shifts_rows(problem)
    radius = max(extent * SQRT_LOG2E, 1.0)
    if in_blocks(d):
        radius *= 1.0 + 2.0**-12 * math.sqrt(d)  # by g/2 at most a dimension
    largest = (2.5 if shifted else 1.0) * radius**2 + 2.0 * log_weight_span * SQRT_LOG2E**2
    step = 2.0 ** (math.ceil(0.5 * math.log2(largest)) - 12)
    tight = 2.0 ** (math.ceil(0.5 * math.log2(largest / 2.0)) - 12)
    return tight if d <= 16 and tight <= 2.0**-8 and not (shifted or exact(problem)) else step


def form(problem: Problem, extent: float, step: float) -> int:
    """Return the form of the exponents that keeps the tolerance: SHORT, PAIRED, LONG, or FULL.

    "high" takes FULL, and so does MEAN but for points without weights: at distance r from the columns that matter to
    a row, two pieces move an exponent by 1.4 · 2⁻¹⁴ g r, and the shift by up to r/2 times that. Two pieces hold a
    coordinate to 2⁻¹³ g, at random, which a shift of many dimensions misses too; three hold it to 2⁻²⁵ g, or to 2⁻³².

    SHORT leaves out lo_i·lo_j: at random between unrelated points, but ‖lo‖² > 0 between a row and its own column or
    duplicates of it. No coordinate's lo is above g/2, nor above 2⁻¹¹ of the coordinate, so ‖lo‖² ≤ d g²/4 + 2⁻²² R², R
    in log2 units. An exponent off by δ for some of the columns moves a log sum by δ at most, and a shift by
    δ p (1 − p) D, p the weight of those columns and D their distance from the others: δ at most, as columns five
    bandwidths away would have to number 10⁵ to weigh as much.

    PAIRED leaves out c₃, up to g²/2 of each in an exponent. It is taken up to g = 2⁻⁸, as measured.

    On a lattice (counts, pixels) two pieces move equal coordinates by the same amount, so vectors by up to 2⁻¹³ g √d,
    and exponents at distance r by that times r: at most 5e-4 + 5e-7 r² while 2⁻¹³ g √d is below 3e-5. In blocks of
    dimensions every dimension is moved (:func:`in_blocks`), and MEAN sums columns rounded by at most 2⁻²² R in all.
    """
    if problem.precision == "high" or (problem.reduction is Reduction.MEAN and not anchored(problem)):
        return Form.FULL
    if in_blocks(problem.d):
        return Form.LONG
    mean = problem.reduction is Reduction.MEAN
    rough = 2.0**-13 * step * math.sqrt(2.0 * problem.d / 3.0 if mean else problem.d)
    if rough > (2e-5 if mean else 3e-5):
        return Form.FULL
    lost = math.log(2.0) * (0.25 * problem.d * step**2 + 2.0**-22 * (extent * SQRT_LOG2E) ** 2)
    if mean:
        if step > 2.0**-8:
            return Form.LONG
        return Form.SHORT if lost <= 2e-5 else Form.PAIRED
    most = 1.2e-4 if problem.reduction is Reduction.LAPLACE else 2.5e-4
    return Form.SHORT if lost <= most and step <= 2.0**-7 else Form.LONG
