"""Long work in batches of rows, for progress, and for queries and results that memory does not hold whole.

A row's sums depend on the other rows only within the precision's bounds: for a batch with rows far from the samples a
backend may take another formula. The size of a batch follows from the problem, the backend and the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Argument, array_namespace, to_host
from ..choice.cost import predict
from ..choice.hardware import cpu
from ..engine.threads import telling
from ..messages import optional
from ..protocol import BackendInfo, Problem, with_fields
from . import straight
from .density import undefined, warn_of_negative

if TYPE_CHECKING:
    from .fitted import Fitted

Advance = Callable[[int], None]  # called with every number of rows that are done
ROWS = 1 << 16  # the most rows of a batch


def batch_rows(m: int, problem: Problem, info: BackendInfo) -> int:
    """The rows of a batch, of m over the samples: up to 32 MiB, on a CPU about a fifth of a second's work or a 256th.

    How long the work takes is predicted: some backends do nearly the same for few rows as for many.
    """
    rows = min(ROWS, (1 << 22) // problem.d)
    if problem.device == "cpu" and m:
        seconds = predict(info, with_fields(problem, m=m), cpu())
        rows = min(rows, max(math.ceil(m * 0.2 / seconds), m // 256)) if seconds else rows
    return max(rows, 256)  # fewer would occupy no backend


@contextmanager
def watched(progress: Any, *given: Argument | int | None) -> Iterator[Advance | None]:
    """Yield the function to call with every number of rows done; None where nobody watches, or there are no rows.

    ``progress`` is the user's: a bool, or a function of the rows done and of all rows, which are those ``given``.
    """
    sizes = [x.shape[:1] if isinstance(x, Argument) else (x,) for x in given if x is not None]
    rows = sum(size[0] for size in sizes if size)
    if isinstance(progress, bool | np.bool_):
        if not progress:
            yield None
            return
        instead = "; or pass a function of the rows done and of all rows"
        tqdm = optional("tqdm.auto", "progress=True needs tqdm", "progress", instead).tqdm
        with tqdm(total=rows, desc="sdkde", unit=" rows", unit_scale=True, disable=not rows) as bar:
            yield (lambda k: bar.update(min(k, rows - bar.n))) if rows else None
    elif callable(progress):
        done = 0

        def advance(k: int) -> None:
            nonlocal done
            done = min(done + k, rows)  # rows redone by another backend count once
            progress(done, rows)

        yield advance if rows else None
    else:
        raise TypeError(f"progress is {progress!r}; pass True for a bar, or a function of the rows done and all rows")


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


def densities(fitted: Fitted, query: Argument, log: bool, out: Any = None, advance: Advance | None = None) -> Any:
    """Return the density, or its log, at a query (m,), as the user wants it; NaN has one RuntimeWarning."""
    result, m = answered(fitted, query, "log" if log else "density", out, advance), query.shape[0]
    if log:
        size = m if out is None else ROWS  # ``out`` may exceed memory: read by batches
        gaps = sum(undefined(fitted.request, result[k : k + size], log) for k in range(0, m, max(size, 1)))
        warn_of_negative(gaps, m, fitted.request.check_finite)
    return result


def answered(fitted: Fitted, query: Argument, what: str, out: Any = None, advance: Advance | None = None) -> Any:
    """Return what is wanted at a query, see :meth:`.Fitted.answer`: by batches for ``out`` or ``advance``."""
    if out is None and advance is None:
        result = straight.answer(fitted.current, query, what)
        return fitted.serve(lambda here: here.answer(here.read(query), what)) if result is None else result
    m, info = query.shape[0], fitted.current.choice.info
    if advance is not None and out is None and "told" in info.features and 0 < len(fitted.current.groups) < 3:
        with telling(m, advance):  # with more groups the first one's rows would be counted as all
            return fitted.serve(lambda here: here.answer(here.read(query), what))
    size, parts = batch_rows(m, fitted.problem, info), []
    for start in range(0, max(m, 1), size):  # one of no rows where m = 0
        rows = query.rows(start, start + size)
        part = fitted.serve(lambda here, rows=rows: here.answer(here.read(rows), what))  # type: ignore[misc]
        if out is None:
            parts.append(part)
        else:
            out[start : start + size] = to_host(part)
        if advance is not None:
            advance(rows.shape[0])
    if out is not None:
        return out
    return parts[0] if len(parts) == 1 else array_namespace(parts[0]).concat(parts)
