"""What both backends do with the modes of their columns: sums, the rows that these leave, results in the log domain.

Everything is for arrays of any library, on any device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import device, to_device

from sdkde_core.nearby import Neighbours, left_out, rough_share
from sdkde_core.plugin import array_namespace, concatenate, empty, put
from sdkde_core.protocol import Columns, Partial, Problem, Reduction

from . import info
from .bounds import allowed, cutoff, error, tolerance
from .modes import Box, choose_box, density_bound


@dataclass(frozen=True)
class Series:
    """The columns in a box, as modes."""

    box: Box
    modes: Any
    epsilon: float
    error: float  # bound on a sum's
    outside: Neighbours | None = None  # the other columns
    beyond: Any = None  # (d,) whether any of the others is outside in that dimension
    weight: float = 0.0  # of the others, in all


@dataclass(frozen=True)
class State:
    """Columns, their modes where these pay, and a function that sums rows over all columns directly."""

    columns: Columns
    series: Series | None
    directly: Callable[[Problem, Any], Partial]  # of rows


class Fourier:
    """Sums by modes, and direct sums for the rows that these leave; ``always``: also where those would be faster."""

    ways: info.Ways
    spread: Callable[..., Any] = map  # see Neighbours.reduce
    # The modes of columns, from a box, points, weights and the transforms' tolerance.
    to_modes: Callable[..., Any]
    # Of a problem, a series and rows in its box: S, (b,), then MEAN's d sums Σ w φ (u_j − y), or LAPLACE's L, by modes.
    evaluate: Callable[..., tuple[Any, list[Any]]]

    def __init__(self, always: bool = False) -> None:
        if not isinstance(always, bool):
            raise TypeError(f"always is {always!r}; pass True or False")
        self.always = always

    def transform(self, problem: Problem, columns: Columns) -> Series | None:
        """Transform the columns to modes, if that is faster than direct sums."""
        xp, points, log_weights, d = array_namespace(columns.points), columns.points, columns.log_weights, problem.d
        weights, step = xp.exp(log_weights), max(1, len(points) // self.ways.sample)
        ends = [end(points[:, a]) for end in (xp.min, xp.max) for a in range(d)]
        few = [xp.reshape(x[::step, ...], (-1,)) for x in (log_weights, points)]
        known = xp.concat([xp.stack([*ends, xp.mean(log_weights), xp.sum(weights)]), *few])
        known = np.asarray(to_device(known, "cpu"))  # all at once, as the host waits for a device
        low, high, (mean, total), sample = known[:d], known[d : 2 * d], known[2 * d : 2 * d + 2], known[2 * d + 2 :]
        tiny = 1e-280  # of the largest sum: of smaller ones the bounds on errors would underflow
        if not (total > tiny and np.isfinite(known[: 2 * d]).all()):
            return None
        sampled_weights, sample = sample[: len(few[0])], sample[len(few[0]) :].reshape(-1, d)
        # A point's own row has at least its own term; the largest sum is not known before the box is.
        usual = tolerance(problem, math.exp(mean), total)
        cost = functools.partial(info.box_seconds, self.ways, problem, usual)
        box, seconds = choose_box(problem, (low, high), sample, usual, cost)
        least = self.ways.directly(problem, problem.m, 1.0, problem.n)
        if not self.always and seconds > info.seconds(least, problem.device):  # direct sums may be faster
            thin = slice(None, None, max(1, len(sample) >> 13))
            some, logs = sample[thin], sampled_weights[thin]  # rows are expected where columns are
            left = problem.n * rough_share(problem, some, some, logs, *self.ways.tiles, left_out(problem))
            if info.seconds(self.ways.directly(problem, problem.m, left, problem.n), problem.device) < seconds:
                return None
        if seconds == math.inf:
            return None
        inside = box.holds(points, np.zeros(d))
        whole = bool(xp.all(inside))
        mine, w = (points, weights) if whole else (points[inside, :], weights[inside])
        largest = density_bound(box, mine, w)
        if not largest > tiny:
            return None
        epsilon = max(tolerance(problem, math.exp(mean), largest), usual)  # the box was made for that
        modes, bound = self.to_modes(box, mine, w, epsilon), error(epsilon, largest, float(box.period.max()))
        if whole:
            return Series(box, modes, epsilon, bound)
        (members,) = xp.nonzero(~inside)
        others = Columns(points[members, :], log_weights[members])
        far = np.asarray(to_device(others.points, "cpu"))
        beyond = ((far < box.low) | (far > box.high)).any(axis=0)
        return Series(box, modes, epsilon, bound, Neighbours(others), beyond, float(xp.sum(weights[members])))

    def reduce(self, problem: Problem, queries: Any, state: State, own_offset: int = 0) -> Partial:
        """Sum by modes, then directly the rows whose sum is too small against the bound on its error."""
        rows, most = state.columns.points if queries is None else queries, self.ways.rows
        if not len(rows):
            return empty(problem, rows)
        starts = range(0, len(rows), most)
        return concatenate([self._block(problem, rows[start : start + most], state) for start in starts])

    def _block(self, problem: Problem, rows: Any, state: State) -> Partial:
        xp, series = array_namespace(rows), state.series
        if series is None:
            return state.directly(problem, rows)
        held, moved = series.box.holds(rows, -np.minimum(series.box.margin, cutoff(series.epsilon))), rows
        if not bool(xp.all(held)):
            if not bool(xp.any(held)):
                return state.directly(problem, rows)
            moved = xp.where(held[:, None], rows, xp.asarray(series.box.low, device=device(rows)))
        total, others = self.evaluate(problem, series, moved)
        if series.outside is not None and series.weight:  # farther away they are below the error
            nats = max(0.0, math.log(10.0 * series.weight) - math.log(series.error))
            reach = math.sqrt(2.0 * (nats + math.log(2.0 + nats)))  # times 1 + r²/2, too
            (near,) = xp.nonzero(held & ~series.box.holds(rows, np.where(series.beyond, reach, -np.inf)))
            if len(near):
                least = math.log(series.error / allowed(problem, Reduction.LOG_SUM))  # of smaller sums none is kept
                add(problem, series.outside.reduce(problem, rows[near], least, self.spread), near, total, others)
        found, good = finish(problem, total, others, series.error)
        (redo,) = xp.nonzero(~(good & held))
        return put(found, redo, state.directly(problem, rows[redo])) if len(redo) else found


def finish(problem: Problem, total: Any, others: list[Any], bound: float) -> tuple[Partial, Any]:
    """Return the answer, and which rows keep the tolerance.

    ``total`` is S (b,), right to ``bound``; ``others`` are MEAN's Σ w φ (u_j − y), by dimension, or LAPLACE's L.
    """
    xp = array_namespace(total)
    log_sum = xp.log(total)
    good = bound <= allowed(problem, Reduction.LOG_SUM) * total  # False where NaN
    if problem.reduction is Reduction.LOG_SUM:
        return Partial(log_sum), good
    if problem.reduction is Reduction.MEAN:
        parts = [x / total for x in others]
        moved = math.sqrt(problem.d) + xp.sqrt(sum(x * x for x in parts))
        good &= bound * moved <= allowed(problem, Reduction.MEAN) * total
        return Partial(log_sum, shift=xp.stack(parts, axis=1)), good
    signed = others[0]
    plus = (2.0 + problem.d) * total - signed
    good &= 3.0 * bound <= allowed(problem, Reduction.LAPLACE) * total
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
