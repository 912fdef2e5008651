"""Error bounds of the Fourier sums, and what follows from them: transform tolerance, modes, margins, rows to redo.

S(y) = Σ_j w_j φ(y − u_j) is evaluated with another kernel than φ: a Gaussian without its modes beyond k_max, with its
periodic images, through transforms of relative tolerance ε. Each of the three changes the kernel by at most a multiple
of ε, near its own column: so the error of a row is at most a multiple of ε times the largest S anywhere. It is
absolute: rows with a small S have few digits left, and are summed over their neighbours.
"""

from __future__ import annotations

import math

from sdkde_core.protocol import TOLERANCES, Problem, Reduction

#: Error of S, of its derivative in bandwidths, and of L over 1 + d/2, over ε times the largest S. Measured: at most 2,
#: and 6 where ε is 1e-14, rounding included.
TRANSFORMS = 8.0


def allowed(problem: Problem, reduction: Reduction) -> float:
    """Return what the transforms may use of a reduction's tolerance."""
    return 0.5 * TOLERANCES[problem.precision][reduction].absolute


def cutoff(epsilon: float) -> float:
    """Return x with exp(−x²/2) = ε/10: the last mode, and the distance beyond which a periodic image adds nothing."""
    return math.sqrt(2.0 * math.log(10.0 / epsilon))


def around_a_cell(side: float, d: int) -> float:
    """Bound Σ_j w_j φ(y − u_j) at every y, over the largest weight in a cell of a grid with that side, in bandwidths.

    In one dimension, with y at t in a cell of side a, the k-th cells on either side are t + (k − 1) a and
    a − t + (k − 1) a away. The nearest two add at most 2 φ(a/2), or φ(0) + φ(a); later ones at most 2 φ((k − 1) a).
    In d dimensions φ is a product, and the bound a power.
    """
    near = max(2.0 * math.exp(-0.125 * side**2), 1.0 + math.exp(-0.5 * side**2))
    others = sum(2.0 * math.exp(-0.5 * (k * side) ** 2) for k in range(1, 2 + int(9.0 / side)))
    return (1.0 + near + others) ** d


def tolerance(problem: Problem, floor: float, largest: float) -> float:
    """Return the ε with which rows whose sum is ``floor`` keep the tolerance.

    MEAN's error is that of two sums, (δS′ + r δS) / S, with the length r of the shift, here 6 bandwidths. LAPLACE's L
    and M = (2 + d) S − L are relative to M, which is at least (1 + d/2) S; the modes of L, those of S times 1 + κ²/2,
    sum to 1 + d/2. So 3 δS / S bounds both.
    """
    budget = allowed(problem, Reduction.LOG_SUM)
    if problem.reduction is Reduction.LAPLACE:
        budget /= 3.0
    if problem.reduction is Reduction.MEAN:
        budget = min(budget, allowed(problem, Reduction.MEAN) / (math.sqrt(problem.d) + 6.0))
    # What finufft can be asked for at least in float64, and the largest that saves time.
    return min(max(budget * floor / (TRANSFORMS * largest), 1e-14), 1e-7)


def requested(epsilon: float, d: int) -> tuple[float, float]:
    """Return what finufft is asked for: how much finer its grid is than the modes, and its tolerance."""
    # In three dimensions the size of finufft's grid decides the time: it is 1.5 times as fine as the modes per
    # dimension, rather than twice. At the same tolerance that is more accurate at the low modes, which make up most of
    # a Gaussian: so ten times the tolerance is asked for, where that is not below 1e-12, what the widest kernel gives.
    if d == 3 and 10.0 * epsilon >= 1e-12:
        return 1.5, 10.0 * epsilon
    return 2.0, epsilon


def error(epsilon: float, largest: float, period: float) -> float:
    """Return the bound on the absolute error of S.

    Besides the transforms': coordinates up to the period, in bandwidths, are rounded; and so are the transforms' sums.
    """
    return largest * (TRANSFORMS * epsilon + 4.0 * 2.0**-53 * (period + 16.0))
