"""Long work in batches of rows: somebody may watch it, and neither queries nor results need be whole in memory.

Within the precision's bounds a row's sums do not depend on the other rows. To the last bit they do not where the
backend sums every row alone, by one formula; for a batch with rows far from the samples it may take another. The size
of a batch follows from the shapes and the number of threads, so the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..arrays import Argument, to_host
from . import straight
from .density import undefined, warn_of_negative
from .fitted import Fitted
from .progress import ROWS, Advance, batch_rows


def check_out(out: Any, query: Argument) -> None:
    """Raise TypeError or ValueError unless results for a query can be written to ``out``; None can always."""
    if out is None:
        return
    if not isinstance(out, np.ndarray) or out.dtype.kind != "f":
        kind = f"of dtype {out.dtype}" if isinstance(out, np.ndarray) else f"a {type(out).__name__}"
        raise TypeError(f"out is {kind}; pass a NumPy array of floats, which may be memory-mapped")
    if out.shape != query.shape[:1]:
        raise ValueError(f"out has shape {out.shape}, but query has {query.shape}; pass one of shape {query.shape[:1]}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; pass an array that can be written to (of a memory map, mode 'r+' or 'w+')")
    if isinstance(query.array, np.ndarray) and np.may_share_memory(out, query.array):
        raise ValueError("out shares memory with query; pass another array")


def in_batches(fitted: Fitted, batches: Iterable[Argument], what: str, advance: Advance | None) -> Iterator[Any]:
    """Yield what is wanted, see :meth:`Fitted.answer`, for every batch of a query, and call ``advance`` after each."""
    for rows in batches:
        yield fitted.serve(lambda here, rows=rows: here.answer(here.read(rows), what))  # type: ignore[misc]
        if advance is not None:
            advance(rows.shape[0])


def densities(fitted: Fitted, query: Argument, log: bool, out: Any = None, advance: Advance | None = None) -> Any:
    """Return the density, or its log, at a query (m,), as the user wants it; NaN has one RuntimeWarning.

    With ``out``, which takes the result, or with ``advance``, who watches, it is done by batches, else at once.
    """
    result, m = _answered(fitted, query, "log" if log else "density", out, advance), query.shape[0]
    if log:
        size = m if out is None else ROWS  # what was too large for memory is read by batches
        gaps = sum(undefined(fitted.request, result[k : k + size], log) for k in range(0, m, max(size, 1)))
        warn_of_negative(gaps, m, fitted.request.check_finite)
    return result


def gradients(fitted: Fitted, query: Argument, advance: Advance | None = None) -> Any:
    """Return the score at a query (m, d), per data unit, as the user wants it; ``advance`` as for :func:`densities`."""
    return _answered(fitted, query, "score", None, advance)


def _answered(fitted: Fitted, query: Argument, what: str, out: Any, advance: Advance | None) -> Any:
    """Return what is wanted at a query: all rows at once, or by batches if ``out`` or ``advance`` is given."""
    if out is None and advance is None:
        result = straight.answer(fitted.current, query, what)
        return fitted.serve(lambda here: here.answer(here.read(query), what)) if result is None else result
    m = query.shape[0]
    size = batch_rows(m, fitted.problem)
    batches = (query.rows(start, start + size) for start in range(0, max(m, 1), size))  # one of no rows where m = 0
    done, parts = 0, []
    for part in in_batches(fitted, batches, what, advance):
        if out is None:
            parts.append(part)
        else:
            out[done : done + part.shape[0]] = to_host(part)
            done += part.shape[0]
    if out is not None:
        return out
    return parts[0] if len(parts) == 1 else array_namespace(parts[0]).concat(parts)
