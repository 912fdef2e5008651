"""The NumPy backend's implementation of the protocol: blocks of rows over a pool of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdkde_core.plugin import check_threads, concatenate, cpu_threads, empty, map_threads, merge
from sdkde_core.protocol import Columns, Partial, Problem, Support

from .bounds import COLUMNS, ROWS, columns_of_a_task
from .info import MOST_THREADS
from .kernels import Compact, Prepared


class NumpyBackend:
    """Matrix products and array operations on tiles in cache.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use, at most
        :data:`sdkde_numpy.info.MOST_THREADS` of them. BLAS itself runs on one thread meanwhile.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = check_threads(threads)

    def probe(self, device: str) -> Support:
        return Support(device == "cpu", "NumPy runs on the CPU")

    def prepare(self, problem: Problem, columns: Columns) -> Prepared | Compact:
        """Choose the formula from the error bounds and pack the columns."""
        compact = problem.kernel not in ("gaussian", "exponential")
        return Compact(problem, columns) if compact else Prepared(problem, columns)

    def reduce(self, problem: Problem, queries: Any, state: Prepared | Compact, own_offset: int = 0) -> Partial:
        rows = state.points[own_offset : own_offset + problem.m] if queries is None else queries
        m, n = len(rows), len(state.points)
        if m == 0:
            return empty(problem, rows)
        # Chunks of columns are joined in order, and do not depend on the number of threads.
        chunk = columns_of_a_task(m, n)
        # A tile is 2 MiB of float64. Rows of a full tile are not a power of two apart: they would share places in the
        # cache, and products would take twice as long.
        width = min(chunk, max(1, ROWS * COLUMNS // min(m, ROWS)))

        def task(where: tuple[int, int]) -> Partial:
            r, c = where
            return state.reduce(problem, rows[r : r + ROWS], c, min(c + chunk, n), width)

        tasks = [(r, c) for r in range(0, m, ROWS) for c in range(0, n, chunk)]
        # A millisecond's work is done before another thread has begun.
        threads = 1 if m * n < 1 << 18 else self.threads or min(cpu_threads(), MOST_THREADS)
        with np.errstate(all="ignore"):  # sums of exponentials underflow by design
            parts, chunks = map_threads(task, tasks, threads), -(-n // chunk)
            return concatenate([merge(parts[i : i + chunks]) for i in range(0, len(parts), chunks)])
