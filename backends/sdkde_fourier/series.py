"""What both backends do with the modes of their columns: sums, the rows that these leave, results in the log domain.

Everything is for arrays of any library, on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import concatenate, empty
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from .bounds import BUDGET, cutoff
from .modes import Box


@dataclass(frozen=True)
class Series:
    """The columns in a box, as modes."""

    box: Box
    modes: Any
    epsilon: float
    error: float  # bound on a sum's
    inside: Any = None  # (n,) which columns; None: all
    outside: Neighbours | None = None  # the others
    beyond: Any = True  # (d,) whether any of the others is outside in that dimension
    weight: float = 0.0  # of the others, in all


@dataclass(frozen=True)
class State:
    """Columns, their modes where these pay, and what sums rows over all columns directly."""

    columns: Columns
    series: Series | None
    directly: Callable[[Problem, Any, Any], Partial]  # of rows and the columns that they leave out


class Fourier:
    """Sums by modes, and direct sums for the rows that these leave.

    Parameters
    ----------
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    rows_at_once: int  # which bounds the memory of the fields

    def __init__(self, always: bool = False) -> None:
        if not isinstance(always, bool):
            raise TypeError(f"always is {always!r}; pass True or False")
        self.always = always

    def evaluate(self, problem: Problem, series: Series, rows: Any) -> tuple[Any, list[Any]]:
        """Return S at rows in the box, (b,), then MEAN's d sums Σ w φ (u_j − y), or LAPLACE's L, by modes."""
        raise NotImplementedError

    def sum_near(self, near: Neighbours, problem: Problem, rows: Any, own: Any, least: float = -math.inf) -> Partial:
        """See :meth:`sdkde_core.nearby.Neighbours.reduce`."""
        return near.reduce(problem, rows, own, least)

    def reduce(self, problem: Problem, queries: Any, state: State, own_offset: int = 0) -> Partial:
        """Sum by modes, then directly the rows whose sum is too small against the bound on its error."""
        rows, blocks = state.columns.points if queries is None else queries, []
        if not len(rows):
            return empty(problem, rows)
        for start in range(0, len(rows), self.rows_at_once):
            block, own = rows[start : start + self.rows_at_once], None
            if "exclude_self" in problem.requires:
                own = array_namespace(rows).arange(len(block), device=device(rows)) + own_offset + start
            blocks.append(self._block(problem, block, own, state))
        return concatenate(blocks)

    def _block(self, problem: Problem, rows: Any, own: Any, state: State) -> Partial:
        xp, series = array_namespace(rows), state.series
        if series is None:
            return state.directly(problem, rows, own)
        held, moved = series.box.holds(rows, -np.minimum(series.box.margin, cutoff(series.epsilon))), rows
        if not bool(xp.all(held)):
            if not bool(xp.any(held)):
                return state.directly(problem, rows, own)
            moved = xp.where(held[:, None], rows, xp.asarray(series.box.low, device=device(rows)))
        total, others = self.evaluate(problem, series, moved)
        if own is not None:
            take_off(problem, rows, own, state.columns, series.inside, total, others)
        if series.outside is not None and series.weight:  # farther away they are below the error
            nats = max(0.0, math.log(10.0 * series.weight) - math.log(series.error))
            reach = math.sqrt(2.0 * (nats + math.log(2.0 + nats)))  # times 1 + r²/2, too
            (near,) = xp.nonzero(held & ~series.box.holds(rows, np.where(series.beyond, reach, -np.inf)))
            if len(near):
                mine = None if own is None else own[near]
                least = math.log(series.error / _allowed(problem, Reduction.LOG_SUM))  # of smaller sums none is kept
                add(problem, self.sum_near(series.outside, problem, rows[near], mine, least), near, total, others)
        found, good = finish(problem, total, others, series.error)
        (redo,) = xp.nonzero(~(good & held))
        if len(redo):
            again = state.directly(problem, rows[redo], None if own is None else own[redo])
            for name in (f.name for f in fields(Partial) if getattr(found, f.name) is not None):
                getattr(found, name)[redo] = getattr(again, name)
        return found


def _allowed(problem: Problem, reduction: Reduction) -> float:
    """What the transforms may use of a tolerance."""
    return BUDGET * TOLERANCES[problem.precision][reduction].absolute


def finish(problem: Problem, total: Any, others: list[Any], error: float) -> tuple[Partial, Any]:
    """Return the answer, and which rows keep the tolerance.

    ``total`` is S (b,), right to ``error``; ``others`` are MEAN's Σ w φ (u_j − y), by dimension, or LAPLACE's L.
    """
    xp = array_namespace(total)
    log_sum = xp.log(total)
    good = error <= _allowed(problem, Reduction.LOG_SUM) * total  # False where NaN
    if problem.reduction is Reduction.LOG_SUM:
        return Partial(log_sum), good
    if problem.reduction is Reduction.MEAN:
        parts = [x / total for x in others]
        moved = math.sqrt(problem.d) + xp.sqrt(sum(x * x for x in parts))
        shift = xp.stack(parts, axis=1)
        good &= error * moved <= _allowed(problem, Reduction.MEAN) * total
        return Partial(log_sum, shift=shift), good
    signed = others[0]
    plus = (2.0 + problem.d) * total - signed
    good &= 3.0 * error <= _allowed(problem, Reduction.LAPLACE) * total
    return Partial(xp.log(plus), sign=xp.sign(signed), log_magnitude=xp.log(xp.abs(signed))), good


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
