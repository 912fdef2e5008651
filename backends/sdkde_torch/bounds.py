"""Which formula keeps a problem's tolerance; see :mod:`sdkde_core.engine.exponents` for the bounds.

Split squares lose less than expanded ones: ε of the products that have a factor below the grid, and ε of the exponents
once the row's largest is subtracted.
"""

from __future__ import annotations

import functools
import math

from sdkde_core.plugin import exponents
from sdkde_core.protocol import TOLERANCES, Problem, Reduction

#: Columns of a tile: sums in float32 are no longer, then added up in float64.
CHUNK = 1024

#: Terms of a shift that a product adds up, one after another, where a tile's are too many; then its parts are added.
PART = 32


def has_double(problem: Problem) -> bool:
    """Whether the device is known to have float64, as CPUs and CUDA GPUs do; of Intel's GPUs some have it."""
    return problem.device.partition(":")[0] in ("cpu", "cuda")


def expanded_limit(problem: Problem, dtype: str, span: float = 0.0) -> float:
    """Return the extent up to which expanded squares keep the tolerance; −inf where they never do."""
    limit = exponents.expanded_limit(problem, dtype, exponents.half_tolerance(problem, dtype, span), norms=1.5)
    return min(limit, _shift_limit(problem, dtype)) if problem.reduction is Reduction.MEAN else limit


@functools.lru_cache(maxsize=4096)
def split_limit(problem: Problem, dtype: str) -> float:
    """Return the extent up to which split squares keep the tolerance; MEAN with a second pass where :func:`refines`.

    The grid g is at most 2^(2 − bits/2) √(R² + s/2) for log weights that span s nats, at most 1000: weights of 1e±200
    span 921. What it leaves of a coordinate is uniform below g/2, so the products that are rounded, 2 d terms of both
    signs, sum to some 0.3 R g.
    """
    if problem.precision == "float64" and dtype == "float32":
        return -math.inf
    half = 500.0 if "weights" in problem.requires else 0.0
    grid = 2.0 ** (2 - (24 if dtype == "float32" else 53) // 2)
    share = 4.0 * exponents.UNIT_ROUNDOFF[dtype] * math.sqrt(2.0 * problem.d) * 0.3 * grid
    most = exponents.half_tolerance(problem) / share  # R √(R² + half), and for MEAN that times R, at most
    limit = math.sqrt(0.5 * (math.sqrt(half**2 + 4.0 * most**2) - half))
    if problem.reduction is Reduction.MEAN:
        square = most ** (2 / 3)  # at least R²; what follows is Newton's method
        for _ in range(24):
            square -= (square * square * (square + half) - most * most) / (square * (3.0 * square + 2.0 * half))
        limit = math.sqrt(square)
        limit = min(limit, _shift_limit(problem, dtype)) if dtype == "float64" else limit
    return limit


def _shift_limit(problem: Problem, dtype: str, part: int = PART) -> float:
    """Return the extent R up to which Σφx / Σφ − u keeps the shift, though it rounds numbers of size R.

    Additions are those of ``part`` terms one after another, of the parts of a tile, and in float64 of tiles. float32
    rounds the coordinates besides, by half a unit each.
    """
    additions = part + CHUNK / part
    if dtype == "float64":
        return exponents.shift_limit(problem, additions + problem.n / CHUNK)
    tolerance = TOLERANCES[problem.precision][Reduction.MEAN].absolute
    return 0.7 * tolerance / (exponents.UNIT_ROUNDOFF[dtype] * (0.7 * additions + 0.6 * math.sqrt(problem.d)))


def terms_at_once(problem: Problem, dtype: str) -> int:
    """Return how many terms of a shift are added one after another: a whole tile's, where that suffices."""
    return CHUNK if dtype == "float64" and problem.extent <= _shift_limit(problem, dtype, CHUNK) else PART


def refines(problem: Problem) -> bool:
    """Whether a shift from float32 tiles needs a second pass, of differences from the mean that the first one gave."""
    return problem.reduction is Reduction.MEAN and problem.extent > _shift_limit(problem, "float32")


@functools.lru_cache(maxsize=4096)
def formula(problem: Problem, span: float = 0.0, *, single: bool = True, double: bool | None = None) -> str:
    """Return the fastest formula that keeps the tolerance; "" where none does: then the host has to.

    ``span`` is the largest magnitude of a log weight, nats; ``single``, whether products of float32 are rounded to
    float32 and no further; ``double``, whether the device has float64, by default where it is known to.
    """
    double = has_double(problem) if double is None else double
    extent = problem.extent
    if single and extent <= expanded_limit(problem, "float32", span):
        return "expanded float32"
    # On a CPU split squares in float32 cost more than float64, which costs twice float32; and everywhere a second pass
    # costs more than float64.
    wide, slow = span > 1000.0, double and (problem.device == "cpu" or refines(problem))
    if single and not wide and not slow and extent <= split_limit(problem, "float32"):
        return "split float32"
    if double:
        if extent <= expanded_limit(problem, "float64", span):
            return "expanded float64"
        return "split float64" if extent <= split_limit(problem, "float64") and not wide else "direct float64"
    return ""


@functools.lru_cache(maxsize=4096)
def extent_limit(problem: Problem) -> float:
    """Return the extent up to which the precision's fastest formula holds; beyond, a slower one takes over."""
    if "grad" in problem.requires:
        return math.inf  # the core splits nothing off
    limit = expanded_limit(problem, "float32")
    if problem.device != "cpu" and not (problem.reduction is Reduction.MEAN and has_double(problem)):
        limit = max(limit, split_limit(problem, "float32"))
    elif problem.device != "cpu" and problem.precision == "fast":
        limit = min(split_limit(problem, "float32"), _shift_limit(problem, "float32"))
    return limit if limit > 0 else expanded_limit(problem, "float64")
