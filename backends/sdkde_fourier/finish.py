"""From sums to the log domain, in any array library; and which rows keep the tolerance."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from array_api_compat import array_namespace

from sdkde_core.protocol import TOLERANCES, Partial, Problem, Reduction

from .bounds import BUDGET

__all__ = ["finish", "put"]


def finish(problem: Problem, total: Any, others: list[Any], error: Any) -> tuple[Partial, Any]:
    """Return the answer, and which rows keep the tolerance.

    Parameters
    ----------
    problem : Problem
    total : (b,) array
        S.
    others : list of (b,) arrays
        MEAN: Σ w φ (u_j − y), by dimension. LAPLACE: L.
    error : float
        Bound on the error of S.
    """
    xp = array_namespace(total)
    log_sum = xp.log(total)
    tolerance = TOLERANCES[problem.precision]
    good = error <= BUDGET * tolerance[Reduction.LOG_SUM].absolute * total  # False where NaN
    if problem.reduction is Reduction.LOG_SUM:
        return Partial(log_sum), good
    if problem.reduction is Reduction.MEAN:
        parts = [x / total for x in others]
        moved = math.sqrt(problem.d) + xp.sqrt(sum(x * x for x in parts))
        shift = xp.stack(parts, axis=1)
        good &= error * moved <= BUDGET * tolerance[Reduction.MEAN].absolute * total
        return Partial(log_sum, shift=shift), good
    signed = others[0]
    plus = (2.0 + problem.d) * total - signed
    good &= 3.0 * error <= BUDGET * tolerance[Reduction.LAPLACE].absolute * total
    return Partial(xp.log(plus), sign=xp.sign(signed), log_magnitude=xp.log(xp.abs(signed))), good


def put(whole: Partial, which: Any, part: Partial) -> Partial:
    """Write the results of some rows, a mask or indices, into those of all, and return these."""
    for f in fields(Partial):
        if getattr(whole, f.name) is not None:
            getattr(whole, f.name)[which] = getattr(part, f.name)
    return whole
