"""Rows by their indices, of arrays of any library on any device, and back."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device, is_torch_array

from ..protocol import Columns, Partial
from .merge import each

__all__ = ["marked_last", "take_columns", "take_rows", "undo"]


def marked_last(mask: Any) -> Any:
    """Indices of all entries, those of the mask last, otherwise in order; so their number need not be known."""
    xp = array_namespace(mask)
    return xp.argsort(xp.astype(mask, xp.int8), stable=True)


def undo(partial: Partial, order: Any) -> Partial:
    """Bring results back from an order of the rows."""
    xp, k = array_namespace(order), order.shape[0]
    if is_torch_array(order):  # two kernels, where sorting takes a dozen
        back = xp.empty_like(order).scatter_(0, order, xp.arange(k, device=device(order)))
    else:
        back = xp.argsort(order)
    return each(partial, lambda x: take_rows(x, back))


def take_rows(x: Any, which: Any) -> Any:
    """Rows by their indices, which are where x is."""
    if is_torch_array(x):
        return x.index_select(0, which)  # take() would look for negative indices first, with three kernels more
    return array_namespace(x).take(x, which, axis=0)


def take_columns(columns: Columns, which: Any) -> Columns:
    """Columns by their indices, which are where they are."""
    return Columns(take_rows(columns.points, which), take_rows(columns.log_weights, which))
