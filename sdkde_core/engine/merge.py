"""Partial results joined, over disjoint columns and over blocks of rows; and rows by their indices."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from array_api_compat import device, is_torch_array

from ..arrays import array_namespace
from ..protocol import Columns, Partial, Problem, Reduction


def merge(partials: Sequence[Partial]) -> Partial:
    """Join partial results, at least one, for the same query rows over disjoint sets of columns.

    Log sums join by log-sum-exp, shifts as means weighted by softmax(ℓ), LAPLACE's sums with their signs. The order of
    ``partials`` is the order of the additions: the same list gives the same bits.
    """
    if not partials:
        raise ValueError("merge() needs at least one partial result")
    first = partials[0]
    if len(partials) == 1:
        return first
    xp = array_namespace(first.log_sum)
    top = _maximum(xp, [p.log_sum for p in partials])
    shares = [xp.exp(p.log_sum - top) for p in partials]
    total = functools.reduce(operator.add, shares)
    safe = xp.where(total > 0, total, xp.ones_like(total))
    shift = sign = log_magnitude = None
    if first.shift is not None:
        weighted = [p.shift * (share / safe)[..., None] for p, share in zip(partials, shares)]
        shift = functools.reduce(operator.add, weighted)
    if first.sign is not None:
        peak = _maximum(xp, [p.log_magnitude for p in partials])
        signed = functools.reduce(operator.add, [p.sign * xp.exp(p.log_magnitude - peak) for p in partials])
        sign, log_magnitude = xp.sign(signed), safe_log(xp.abs(signed)) + peak
    return Partial(safe_log(total) + top, shift, sign, log_magnitude)


def empty(problem: Problem, like: Any) -> Partial:
    """Return the result of a query without rows; ``like``: an array of the library and on the device of the results."""
    xp, reduction = array_namespace(like), problem.reduction
    none, shift = (xp.empty(shape, dtype=xp.float64, device=device(like)) for shape in ((0,), (0, problem.d)))
    signs = (none, none) if reduction is Reduction.LAPLACE else ()
    return Partial(none, shift if reduction is Reduction.MEAN else None, *signs)


def concatenate(partials: Sequence[Partial]) -> Partial:
    """Join the results of consecutive blocks of rows; a single one is returned as it is."""
    if len(partials) == 1:
        return partials[0]
    xp = array_namespace(partials[0].log_sum)
    arrays = ([getattr(p, field.name) for p in partials] for field in fields(Partial))
    return Partial(*(None if x[0] is None else xp.concat(x, axis=0) for x in arrays))


def each(partial: Partial, change: Callable[[Any], Any]) -> Partial:
    """Return ``partial`` with every array changed."""
    arrays = (getattr(partial, field.name) for field in fields(Partial))
    return Partial(*(None if x is None else change(x) for x in arrays))


def put(partial: Partial, where: Any, others: Partial) -> Partial:
    """Write other results to the rows ``where``, in place."""
    for name in (field.name for field in fields(Partial) if getattr(others, field.name) is not None):
        getattr(partial, name)[where] = getattr(others, name)
    return partial


def safe_log(x: Any) -> Any:
    """log(x), −inf at 0 and below, without a warning; NaN stays NaN."""
    xp = array_namespace(x)
    nothing = x <= 0
    return xp.where(nothing, xp.full_like(x, -float("inf")), xp.log(xp.where(nothing, xp.ones_like(x), x)))


def _maximum(xp: Any, logs: list[Any]) -> Any:
    """Row-wise maximum, with 0 for rows that are −inf throughout (−inf − −inf would be NaN)."""
    top = functools.reduce(lambda top, other: xp.where(other > top, other, top), logs)
    return xp.where(xp.isfinite(top), top, xp.zeros_like(top))


def marked_last(mask: Any) -> Any:
    """Indices of all entries, those of the mask last, otherwise in order."""
    xp = array_namespace(mask)
    return xp.argsort(xp.astype(mask, xp.int8), stable=True)


def undo(partial: Partial, order: Any) -> Partial:
    """Bring results back from an order of the rows; None: they are in theirs."""
    if order is None:
        return partial
    back = array_namespace(order).argsort(order)
    return each(partial, lambda x: take_rows(x, back))


def take_rows(x: Any, which: Any) -> Any:
    if is_torch_array(x):
        return x.index_select(0, which)  # take() would look for negative indices first, with three kernels more
    return array_namespace(x).take(x, which, axis=0)


def take_columns(columns: Columns, which: Any, ordered: bool | None = None) -> Columns:
    given = columns.points, columns.log_weights, columns.weights
    points, log_weights, weights = (None if x is None else take_rows(x, which) for x in given)
    return Columns(points, log_weights, weights, ordered=columns.ordered if ordered is None else ordered)
