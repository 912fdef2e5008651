"""Which arithmetic keeps a precision on a GPU, from error bounds; extents are in bandwidths.

ε is the unit roundoff of float32, R the extent, r the distance of a pair. An exponent is off

- by 2 ε R r at most where coordinates are float32 (**single**): each point is at most ε R from where it was;
- by a r²/2 where squares of differences are summed, a = 4 ε (√L/3 + 3/2) for L of them in a thread: roundings of the
  sum, of a difference, and of the exchange between threads;
- by 4 ε (√d/3 + 3/2) R² where squares are **expanded**, see :mod:`sdkde_core.engine.exponents`.

Where coordinates are pairs of float32 numbers (**doubled**), 2⁻²⁴ of the first part is left. What remains of a
tolerance after nine tenths is for exponentials (two units in the last place) and sums (some 10⁻⁶ of themselves).

An exponent off by δ moves a log sum by δ at most, and a shift by δ times half the distance between the points that
matter. In a row that is a column too, with all weights equal, the row's own φ is 1 and exact, so columns r away matter
only if e^(r²/2) of them are there. Without one (queries, weights) the nearest column may be any
distance away, and those shifts are summed in float64.
"""

from __future__ import annotations

import math

from sdkde_core.plugin import exponents
from sdkde_core.protocol import Problem, Reduction

from .bounds import MOST_EXTENT, float32_budget

#: The most coordinates that a thread sums, in up to 512 dimensions, which 32 threads of a row hold so.
DEPTH = 16


def most_depth(d: int) -> int:
    """Return the most coordinates that a thread sums in d dimensions."""
    return DEPTH if d <= 32 * DEPTH else 2 * DEPTH


def anchored(problem: Problem) -> bool:
    """Whether every row is a column too, of equal weight: its largest φ is its own, 1."""
    return problem.same and "weights" not in problem.requires


def arithmetic(problem: Problem, log_weight_span: float = 0.0) -> str:
    """Return the fastest arithmetic that keeps the precision: "expanded", "single", "doubled" or "float64".

    ``log_weight_span``: the largest magnitude of a log weight, nats.
    """
    if log_weight_span <= 1e5:
        if problem.extent <= expanded_limit(problem):
            return "expanded"
        if problem.extent <= single_limit(problem):
            return "single"
        if problem.extent <= extent_limit(problem) < MOST_EXTENT:
            return "doubled"
    return "float64"


def extent_limit(problem: Problem) -> float:
    """Return the extent up to which float32 holds, in coordinates or pairs of them, or what float64 takes.

    Pairs take half as long again as coordinates; float64, for points that are taken off, thirty times as long on many
    cards.
    """
    if single_limit(problem) < 0:
        return MOST_EXTENT
    # Where 2⁻²⁴ · 2 ε R r reaches what single may. LAPLACE's L follows from log |L| only while an exponent, off by some
    # 5e-7 of itself, is known to a part of one.
    return 400.0 if problem.reduction is Reduction.LAPLACE else 1e7


def expanded_limit(problem: Problem) -> float:
    """Return the extent up to which expanded squares keep "fast"; −inf where they are not taken.

    LAPLACE's factor needs r² without the log weights, which are part of expanded exponents.
    """
    if problem.reduction is Reduction.LAPLACE and "weights" in problem.requires:
        return -math.inf
    return exponents.expanded_limit(problem, "float32", float32_budget(problem, 0.9).absolute, norms=1.5)


def single_limit(problem: Problem) -> float:
    """Return the extent up to which differences of float32 coordinates keep the precision; −inf where not at 0."""
    if problem.precision == "float64" or (problem.reduction is Reduction.MEAN and not anchored(problem)):
        return -math.inf
    if problem.reduction is Reduction.MEAN:
        # Both ends of a difference are rounded: by 0.6 ε R together, at most 2 ε R in few dimensions; that moves the
        # row's mean of the points around it, whose covariance is about 1, by as much again. 30 · 2 ε · 2 is 7e-6.
        return {"fast": 200.0, "high": 30.0}[problem.precision]
    depth = min(problem.d, most_depth(problem.d))
    summing = 4.0 * 2.0**-24 * (math.sqrt(depth) / 3.0 + (1.5 if problem.d > 8 else 1.0))
    return exponents.squares_limit(*float32_budget(problem, 0.9), summing)
