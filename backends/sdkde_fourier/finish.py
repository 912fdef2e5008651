"""From sums to the log domain, in any array library; and which rows keep the tolerance."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from array_api_compat import array_namespace

from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from .bounds import BUDGET


def finish(problem: Problem, total: Any, others: list[Any], error: Any) -> tuple[Partial, Any]:
    """Return the answer, and which rows keep the tolerance.

    ``total`` is S (b,), right to ``error``; ``others`` are MEAN's Σ w φ (u_j − y), by dimension, or LAPLACE's L.
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


def least(problem: Problem, error: float) -> float:
    """Return the log of the least S whose row keeps the tolerance, see :func:`finish`: others are summed again."""
    return math.log(error / (BUDGET * TOLERANCES[problem.precision][Reduction.LOG_SUM].absolute))


def add(problem: Problem, more: Partial, where: Any, total: Any, others: list[Any]) -> None:
    """Add sums over other columns for the rows ``where``, in place."""
    xp = array_namespace(total)
    added = xp.exp(more.log_sum)
    if problem.reduction is Reduction.LAPLACE:
        signed = more.sign * xp.exp(more.log_magnitude)
        added = (added + signed) / (2.0 + problem.d)  # M = (2 + d) S − L
        others[0][where] += signed
    total[where] += added
    if problem.reduction is Reduction.MEAN:
        for a, whole in enumerate(others):
            whole[where] += added * more.shift[:, a]


def take_off(
    problem: Problem, rows: Any, own: Any, columns: Columns, inside: Any, total: Any, others: list[Any]
) -> None:
    """Subtract each row's own term, of the columns ``inside``, in place; the error of what is left is the same."""
    xp, points, n = array_namespace(rows), columns.points, columns.points.shape[0]
    has = (own >= 0) & (own < n)
    which = xp.where(has, own, xp.zeros_like(own))
    if inside is not None:
        has &= inside[which]
    step = points[which, :] - rows
    r2 = xp.sum(step * step, axis=1)
    term = xp.exp(columns.log_weights[which] - 0.5 * r2)
    term = xp.where(has, term, xp.zeros_like(term))
    total -= term
    if problem.reduction is Reduction.MEAN:
        for a, whole in enumerate(others):
            whole -= term * step[:, a]
    if problem.reduction is Reduction.LAPLACE:
        others[0] -= term * (1.0 + 0.5 * problem.d - 0.5 * r2)
