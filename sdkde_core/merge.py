"""Joining the results of reductions over different columns, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from .protocol import Partial

__all__ = ["merge"]


def merge(partials: Sequence[Partial]) -> Partial:
    """Join partial results for the same query rows over disjoint sets of columns.

    Log sums join by log-sum-exp, shifts and values as means weighted by softmax(ℓ), LAPLACE's sums with
    their signs. The order of ``partials`` is the order of the additions: the same list gives the same bits.

    Parameters
    ----------
    partials : sequence of Partial
        At least one; all with the same fields and shapes.

    Returns
    -------
    Partial
    """
    if not partials:
        raise ValueError("merge() needs at least one partial result")
    first = partials[0]
    if len(partials) == 1:
        return first
    xp = array_namespace(first.log_sum)
    top = _maximum(xp, [p.log_sum for p in partials])
    shares = [xp.exp(p.log_sum - top) for p in partials]
    total = _add(shares)
    safe = xp.where(total > 0, total, xp.ones_like(total))

    def mean(field: str) -> Any:
        if getattr(first, field) is None:
            return None
        terms = [getattr(p, field) * (share / safe)[..., None] for p, share in zip(partials, shares)]
        return _add(terms)

    sign, log_magnitude = None, None
    if first.sign is not None:
        peak = _maximum(xp, [p.log_magnitude for p in partials])
        signed = _add([p.sign * xp.exp(p.log_magnitude - peak) for p in partials])
        sign, log_magnitude = xp.sign(signed), _log(xp, xp.abs(signed)) + peak
    return Partial(_log(xp, total) + top, mean("shift"), sign, log_magnitude, mean("values"))


def _maximum(xp: Any, logs: list[Any]) -> Any:
    """Row-wise maximum, with 0 for rows that are −inf throughout (−inf − −inf would be NaN)."""
    top = logs[0]
    for other in logs[1:]:
        top = xp.where(other > top, other, top)
    return xp.where(xp.isfinite(top), top, xp.zeros_like(top))


def _log(xp: Any, x: Any) -> Any:
    """log(x) with −inf at 0, without a warning."""
    positive = x > 0
    return xp.where(positive, xp.log(xp.where(positive, x, xp.ones_like(x))), xp.full_like(x, -float("inf")))


def _add(terms: list[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
