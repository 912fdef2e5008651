"""Dask arrays in, lazy Dask arrays out: what the planner does, as a graph of tasks.

Nothing is read when the graph is made: its tasks follow from the shapes alone, and its keys from the arrays' names and
the options. In the order in which data flow:

    survey      the planner's questions, one after another, put to all blocks of samples and of queries; the last answer
                gives the frozen estimate
    columns     by shard: the samples whitened, with their log weights
    rows        by block: the points that a pass takes as rows, whitened
    partial     by block of rows and shard: the sums
    folded      by block of rows: the sums of the shards from the first to the last
    moved       by block of samples: the samples moved
    result      by block of rows: in the user's units

Blocks and shards are the same whatever chunks the arrays came in, so the bits are too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from ..arrays import Argument, Origin, check_shapes, is_dask
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import FULL_RULES
from ..choice.select import named_backend
from ..estimator.request import Goal, Request
from ..protocol import QUANTUM
from . import tasks
from .planner import Shape, cut, width_of_a_shard
from .survey import COUNTINGS

__all__ = ["lazy"]

Key = tuple[Any, ...]

#: What the pairs of a task are worth at most, each d + 16: on a core of a CPU a few seconds; on a GPU, where the user
#: says that it is one, a second. At least a sixteenth of it, where there would be fewer blocks of rows than these.
CPU_WORK, GPU_WORK, FEWEST = 1 << 36, 1 << 46, 64

#: Tasks of a pass at most, as a scheduler takes about a millisecond for each; and numbers in a block of rows at most.
TASKS, NUMBERS = 1 << 15, 1 << 24

#: Sums that are folded by one task: so many may wait in memory.
FOLDED = 16


def lazy(request: Request, train: Any, query: Any = None, log: bool = False) -> da.Array:
    """Return what the request asks for, as a lazy array.

    Parameters
    ----------
    request : Request
        Its weights may be a Dask array too.
    train, query : (n, d) or (n,) array_like
        One of them, or the weights, is a Dask array.
    log : bool
        Of a density, return the log.

    Returns
    -------
    (m,) or (m, d) dask.array
        Of NumPy arrays, in the query's chunks (else train's).

    Raises
    ------
    TypeError, ValueError
        What can be said without reading; what cannot is raised where the result is computed.
    """
    if request.method == "laplace" and request.goal is Goal.GRADIENT:
        raise ValueError("the gradient of method='laplace' is not for Dask arrays; pass 'sdkde' or 'kde', or .compute()")
    if is_dask(request.bandwidth):
        raise TypeError("bandwidth is a Dask array; pass numbers: bandwidth.compute()")
    if getattr(da, "array_expr_enabled", bool)():
        raise TypeError("Dask's experimental array.query-planning is on, which has other arrays; turn it off")
    x = _argument("train", train)
    q = None if query is None else _argument("query", query)
    w = None if request.weights is None else _argument("weights", request.weights)
    check_shapes(x, q, w)
    d = 1 if len(x.shape) == 1 else x.shape[1]
    dtype = max(x.dtype, (q or x).dtype)  # "float64" > "float32"
    if q is not None and not q.shape[0]:
        return da.zeros((0,) if request.goal is Goal.DENSITY else (0, d), dtype=dtype)
    shape = Shape(x.shape[0], d, None if q is None else q.shape[0], dtype, w is not None)
    request = replace(request, weights=None, backend=named_backend(request.backend))
    if not isinstance(request.bandwidth, str):
        request = replace(request, bandwidth=Bandwidth.of(request.bandwidth, d))
    result = _Graph(request, shape, log, x, q, w).result()
    return result.rechunk({0: _chunks(q or x)})


def _argument(name: str, value: Any) -> Argument:
    """Recognise an argument; of a Dask array only shape and dtype are looked at."""
    if not is_dask(value):
        return replace(Argument.of(name, value), origin=Origin())
    if value.dtype.kind not in "iufb":
        raise TypeError(f"{name} has dtype {value.dtype}; pass real numbers (integer, boolean or floating)")
    if any(math.isnan(k) for k in value.shape):
        raise ValueError(
            f"{name} has chunks of unknown size; call {name}.compute_chunk_sizes(), or of a Dask data frame "
            ".to_dask_array(lengths=True)"
        )
    narrow = value.dtype.kind == "f" and value.dtype.itemsize <= 4
    return Argument(name, value, "float32" if narrow else "float64", Origin())


def _chunks(a: Argument) -> tuple[int, ...]:
    """The chunks of the rows."""
    return a.array.chunks[0] if is_dask(a.array) else (a.shape[0],)


def _blocks(a: Argument, ends: list[tuple[int, int]]) -> da.Array:
    """The argument in blocks of these rows, each with all columns."""
    x, sizes = a.array, tuple(stop - start for start, stop in ends)
    if a.name != "weights" and x.ndim == 1:
        x = x[:, None]
    chunks = (sizes, *((k,) for k in x.shape[1:]))
    return x.rechunk(chunks) if is_dask(x) else da.from_array(x, chunks=chunks)


def rows_of_a_task(m: int, n: int, d: int, device: Any) -> int:
    """Return how many of m rows a task sums over a shard of n columns: a multiple of 1024, by these alone."""
    first = device if isinstance(device, str) or not device else device[0]
    width = width_of_a_shard(n, d)
    most = (GPU_WORK if first and first != "cpu" else CPU_WORK) // (width * (d + 16))
    rows = min(most, max(most // 16, -(-m // FEWEST)))
    rows = max(rows, -(-m * -(-n // width) // TASKS))
    rows = min(rows, NUMBERS // d, m)
    return max(1, -(-rows // QUANTUM)) * QUANTUM


class _Graph:
    """The tasks of one estimate."""

    def __init__(
        self, request: Request, shape: Shape, log: bool, x: Argument, q: Argument | None, w: Argument | None
    ) -> None:
        self.request, self.shape, self.log = request, shape, log
        own, rows = (rows_of_a_task(m, shape.n, shape.d, request.device) for m in (shape.n, shape.m or 0))
        self.shards = cut(shape.n, width_of_a_shard(shape.n, shape.d))
        #: Of the samples as rows: by shard, which parts of it.
        self.parts = [cut(stop - start, own) for start, stop in self.shards]
        self.queries = cut(shape.m or 0, rows)
        self.x = _blocks(x, self.shards)
        self.q = None if q is None else _blocks(q, self.queries)
        self.w = None if w is None else _blocks(w, self.shards)
        self.inputs = [a for a in (self.x, self.q, self.w) if a is not None]
        self.token = tokenize(request, shape, log, *(a.name for a in self.inputs))
        self.tasks: dict[Key, Any] = {}

    def add(self, what: str, place: tuple[int, ...], task: Any, *keys: Any, **values: Any) -> Key:
        """Add a task of what other tasks return and of values, and return its key; keys of one kind form a list."""
        key = f"sdkde-{what}-{self.token}", *place
        self.tasks[key] = functools.partial(task, **values) if values else task, *keys
        return key

    def result(self) -> da.Array:
        """Return the lazy array, in blocks of its own."""
        frozen, shape, goal = self._frozen(), self.shape, self.request.goal
        columns = [self._columns(frozen, j) for j in range(len(self.shards))]
        moves, samples = self.request.passes[0].rows == "train", []
        if moves or self.q is None:
            samples = [
                [self.add("rows", (j, k), tasks.rows_of, columns[j], start=a, stop=b) for k, (a, b) in enumerate(parts)]
                for j, parts in enumerate(self.parts)
            ]
        if moves:
            moved = [[self._moved(frozen, key, columns) for key in keys] for keys in samples]
            columns = [
                self.add("moved-columns", (j,), tasks.moved_columns, columns[j], keys) for j, keys in enumerate(moved)
            ]
            if goal is Goal.DEBIASED:
                return self._array(frozen, itertools.chain(*moved), tasks.unwhitened)
        rows = list(itertools.chain(*samples))
        if self.q is not None:
            places = range(len(self.queries))
            rows = [self.add("queries", (i,), tasks.whitened, frozen, (self.q.name, i, 0)) for i in places]
        sums = [self._sums(frozen, key, columns, int(moves)) for key in rows]
        if goal is Goal.GRADIENT:
            return self._array(frozen, sums, tasks.score)
        return self._array(frozen, sums, tasks.density, log=self.log)

    def _frozen(self) -> Key:
        """Add the survey, and return the key of the frozen estimate."""
        abouts = self._asked()
        key: Key = (f"sdkde-asked-{self.token}",)
        self.tasks[key] = tasks.Survey.begun(self.request, self.shape)
        for k, about in enumerate(abouts):
            blocks, starts = (self.q, self.queries) if about == "query" else (self.x, self.shards)
            answers = []
            for i, (start, _) in enumerate(starts):
                block = [(blocks.name, i, 0)]
                if about == "train" and self.w is not None:
                    block.append((self.w.name, i))
                answers.append(self.add("survey", (k, i), tasks.answer, key, *block, about=about, start=start))
            what = "frozen" if k == len(abouts) - 1 else "surveyed"
            key = self.add(what, (k,), tasks.after, key, answers, last=what == "frozen")
        return key

    def _asked(self) -> list[str]:
        """What the planner's questions are about, one after another; of some there may be no need.

        First of all the samples, for quartiles again and again, and how far they reach; how far the queries do; and by
        pass how many of its rows are far.
        """
        rule = self.request.bandwidth
        counted = COUNTINGS if isinstance(rule, str) and rule not in FULL_RULES else 0
        abouts = ["train"] * (2 + counted) + ["query"] * bool(self.queries)
        return abouts + ["query" if p.rows == "query" and self.queries else "train" for p in self.request.passes]

    def _columns(self, frozen: Key, j: int) -> Key:
        weights = () if self.w is None else ((self.w.name, j),)
        return self.add("columns", (j,), tasks.columns, frozen, (self.x.name, j, 0), *weights)

    def _moved(self, frozen: Key, rows: Key, columns: list[Key]) -> Key:
        sums = self._sums(frozen, rows, columns, 0)
        return self.add("moved", rows[1:], tasks.moved, frozen, rows, sums)

    def _sums(self, frozen: Key, rows: Key, columns: list[Key], step: int) -> Key:
        """Add the sums of rows over all shards, and return their key: a left fold, :data:`FOLDED` at a time."""
        place, folded = (step, *rows[1:]), []
        for j, shard in enumerate(columns):
            folded.append(self.add("partial", (*place, j), tasks.partial, frozen, shard, rows, step=step))
            if len(folded) == FOLDED or (j == len(columns) - 1 and j):
                folded = [self.add("folded", (*place, j), tasks.folded, frozen, folded)]
        return folded[0]

    def _array(self, frozen: Key, keys: Iterable[Key], task: Any, **values: Any) -> da.Array:
        """The array of what a task makes of each block of rows."""
        goal, shape = self.request.goal, self.shape
        wide = (shape.d,) * (goal is not Goal.DENSITY)
        ends = self.queries if self.q is not None else itertools.chain(*self.parts)
        made = [self.add(goal, (i, *(0 for _ in wide)), task, frozen, key, **values) for i, key in enumerate(keys)]
        chunks = (tuple(stop - start for start, stop in ends), *((k,) for k in wide))
        graph = HighLevelGraph.from_collections(made[0][0], self.tasks, dependencies=self.inputs)
        return da.Array(graph, made[0][0], chunks, meta=np.empty((0,) * (1 + len(wide)), shape.dtype))
