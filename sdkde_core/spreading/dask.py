"""Dask arrays in, a lazy Dask array out: the tasks of an estimate as a graph.

Nothing is read when the graph is made: its tasks follow from the shapes and the options. Stacked densities, coordinates
and supports need all samples in one memory: one task fits them. Those of others are, in order:

    survey      the survey's questions, one after another, put to all blocks; the last answer gives the plan
    columns     by shard: the samples whitened, with their log weights
    rows        by block: the points that a pass takes as rows, whitened
    partial     by block of rows and shard: the sums
    folded      by block of rows: the sums of the shards from the first to the last
    shifts      by shard: which way its samples move
    products    by shard: what the step follows from, if it does from all samples; ``step``: of all shards
    shard       by shard: the samples moved
    guarding    by shard: those that guard the tails; ``guard``: of all shards
    result      by block of rows: in the user's units

Blocks and shards are the same whatever chunks the arrays came in, so the bits are too. Between tasks there are host
arrays. A task takes one thread, as Dask means it, unless ``SDKDE_NUM_THREADS`` says otherwise.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import dask.array as da
import numpy as np
from dask import delayed
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from ..arrays import Argument, Array, is_dask, quiet, refuse_masked, to_host
from ..choice.hardware import one_thread
from ..protocol import Columns, Partial
from .tasks import cut

Key = tuple[Any, ...]


def rows_of_a_task(m: int, n: int, width: int, d: int, device: Any) -> int:
    """Return how many of m rows a task sums over a shard of ``width`` columns: a multiple of 1024, by these alone.

    A task takes a CPU's core a fifth of a second to some seconds, in between there are 64 blocks; a GPU that the user
    names a second. A pass has at most 32,768 tasks, for the scheduler's sake, and a block at most 2²⁴ numbers.
    """
    first = device if isinstance(device, str) or not device else device[0]
    most, fewest, least = (1 << 46, 8, 0) if first and first != "cpu" else (1 << 36, 64, 1 << 31)
    row = width * (d + 16)
    rows = max(min(most // row, max(-(-m // fewest), least // row)), -(-m * -(-n // width) // (1 << 15)))
    return -(-max(1, min(rows, (1 << 24) // d)) // 1024) * 1024


def _blocks(a: Argument, ends: list[tuple[int, int]]) -> da.Array:
    x, sizes = a.array, tuple(stop - start for start, stop in ends)
    none = np.empty((0,) * x.ndim, x.dtype)
    if is_dask(x):
        x = x.map_blocks(_as_declared, name=None, argument=a.name, declared=x.dtype, dtype=x.dtype, meta=none)
    if a.name != "weights" and x.ndim == 1:
        x = x[:, None]
    chunks = (sizes, *((k,) for k in x.shape[1:]))
    return x.rechunk(chunks) if is_dask(x) else da.from_array(x, chunks=chunks)


def _as_declared(block: Any, argument: str, declared: np.dtype[Any], block_info: Any = None) -> Array:
    """A block on the host; an error where it is another than the array declares, which would give wrong numbers."""
    refuse_masked(argument, block)
    here = block_info[0]
    shape = tuple(stop - start for start, stop in here["array-location"])
    found = to_host(block) if hasattr(block, "shape") else block
    if isinstance(found, np.ndarray) and found.shape == shape and found.dtype == declared:
        return found
    what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
    wrong = f"block {here['chunk-location']} of {argument} is declared as {declared} of shape {shape}, and is {what}"
    remedy = "declare what it is, as by dtype= and chunks= of map_blocks, or make it what is declared"
    raise ValueError(f"{wrong}; {remedy}")


def _task(function: Any) -> Any:
    """Mark what runs on a worker: in one thread, whatever NumPy's error state is there."""
    return quiet(one_thread()(function))


@_task
def _answer(survey: Any, points: Array, weights: Array | None = None, *, about: str, start: int) -> Any:
    """The answer of a block; None where the question is about other arrays, or no question is left."""
    question = getattr(survey, "question", None)
    return None if question is None or question.about != about else question.of(points, weights, start)


@_task
def _after(survey: Any, answers: list[Any]) -> Any:
    """The survey after the answers of all blocks, or the plan."""
    return survey if answers[0] is None else survey.next(functools.reduce(survey.question.merge, answers))


@_task
def _of(plan: Any, *args: Any, method: str, **values: Any) -> Any:
    return getattr(plan, method)(*args, **values)


@_task
def _partial(plan: Any, shard: Columns, rows: Array, *, step: int) -> Any:
    """The sums of some rows over a shard, which stays packed with the plan for the next rows that this thread takes."""
    kept = plan.__dict__.setdefault("_kept", threading.local())
    if getattr(kept, "of", None) != (step, id(shard)):
        kept.of, kept.shard, kept.packed = (step, id(shard)), shard, plan.packed(step, shard)
    return plan.partial(step, kept.packed, rows)


def _rows(shard: Columns, *, start: int, stop: int) -> Array:
    return shard.points[start:stop]


def _shifts(sums: list[Partial]) -> Array:
    return np.concatenate([one.shift for one in sums])


def lazy_whole(fit: Any, x: Argument, q: Argument | None, w: Argument | None, log: bool, dtype: str) -> da.Array:
    """The result of a density that one task fits to all samples, and blocks of rows are put to."""
    given = (None if a is None else _blocks(a, [(0, x.shape[0])]) for a in (x, w))
    made, rows = delayed(_of, pure=True)(fit, *given, method="__call__"), q or x
    stops = list(itertools.accumulate(rows.array.chunks[0] if is_dask(rows.array) else rows.shape[:1]))
    how: dict[str, Any] = {"dtype": dtype, "drop_axis": 1, "meta": np.empty(0, dtype)}
    return _blocks(rows, list(zip([0, *stops], stops))).map_blocks(_asked, density=made, log=log, **how)


@_task
def _asked(rows: Array, density: Any, log: bool) -> Array:
    return np.asarray(density.estimate(rows, log=log))


class Graph:
    """The tasks for samples x, queries q and weights w; ``survey`` has the first question."""

    def __init__(self, survey: Any, log: bool, x: Argument, q: Argument | None, w: Argument | None) -> None:
        self.survey, self.request, self.shape, self.log = survey, survey.request, survey.shape, log
        n, d, m, self.shards = self.shape.n, self.shape.d, self.shape.m or 0, self.shape.shards
        width = self.shards[0][1] if len(self.shards) > 1 else -(-n // 1024) * 1024
        own, rows = (rows_of_a_task(k, n, width, d, self.request.device) for k in (n, m))
        self.queries = cut(m, rows)
        self.parts = [cut(stop - start, own) for start, stop in self.shards]  # of the samples as rows
        self.x, self.q = _blocks(x, self.shards), _blocks(q, self.queries) if q is not None and m else None
        self.w = None if w is None else _blocks(w, self.shards)
        self.inputs = [a for a in (self.x, self.q, self.w) if a is not None]
        self.token = tokenize(self.request, self.shape, log, self.shards, rows, own, *(a.name for a in self.inputs))
        self.tasks: dict[Key, Any] = {}

    def add(self, what: str, place: tuple[int, ...], task: Any, *keys: Any, **values: Any) -> Key:
        """Add a task of what other tasks return and of values, and return its key; keys of one kind form a list."""
        key = f"sdkde-{what}-{self.token}", *place
        self.tasks[key] = functools.partial(task, **values) if values else task, *keys
        return key

    def of(self, what: str, place: tuple[int, ...], method: str, *keys: Any, **values: Any) -> Key:
        return self.add(what, place, _of, self.plan, *keys, method=method, **values)

    def result(self) -> da.Array:
        if self.shape.m == 0:
            return da.zeros((0,), dtype=self.shape.dtype)
        self.plan, moves = self._survey(), self.request.method == "sdkde"
        columns = [self.of("columns", (j,), "columns", *self._samples(j)) for j in range(len(self.shards))]
        rows = [
            [self.add("rows", (j, k), _rows, columns[j], start=a, stop=b) for k, (a, b) in enumerate(parts)]
            for j, parts in enumerate(self.parts if moves or self.q is None else ())
        ]
        if moves:
            sums = [[self._sums(0, key, columns) for key in keys] for keys in rows]
            there = [(key, self.add("shifts", (j,), _shifts, x)) for j, (key, x) in enumerate(zip(columns, sums))]
            products = [self.of("products", (j,), "products", *keys) for j, keys in enumerate(there)]
            step = self.of("step", (), "step", products)
            columns = [self.of("shard", (j,), "moved", *keys, step) for j, keys in enumerate(there)]
            if self.request.goal == "debiased":
                return self._array([self.of("result", (j, 0), "unwhitened", key) for j, key in enumerate(columns)])
        flat = list(itertools.chain(*rows))
        if self.q is not None:
            flat = [self.of("queries", (i,), "whitened", (self.q.name, i, 0)) for i in range(len(self.queries))]
        guarding = [self.of("guarding", (j,), "guarding", key, shard=j) for j, key in enumerate(columns)]
        guard = self.of("guard", (), "guard", guarding)
        keys = enumerate((self._sums(int(moves), key, columns), key, guard) for key in flat)
        return self._array([self.of("result", (i,), "density", *three, log=self.log) for i, three in keys])

    def _samples(self, j: int) -> list[Key]:
        return [(self.x.name, j, 0)] + ([] if self.w is None else [(self.w.name, j)])

    def _survey(self) -> Key:
        """Add the survey, with room for all questions that it may ask, and return the key of the plan."""
        key: Key = (f"sdkde-asked-{self.token}",)
        self.tasks[key] = self.survey
        for k, about in enumerate(self.survey.abouts):
            answers = []
            for i, (start, _) in enumerate(self.queries if about == "query" else self.shards):
                block = self._samples(i) if about == "train" else [(self.q.name, i, 0)]  # type: ignore[union-attr]
                answers.append(self.add("survey", (k, i), _answer, key, *block, about=about, start=start))
            key = self.add("surveyed", (k,), _after, key, answers)
        return key

    def _sums(self, step: int, rows: Key, columns: list[Key]) -> Key:
        """Add the sums of rows over all shards, and return their key: a left fold, 16 at a time for memory."""
        place, parts = (step, *rows[1:]), list[Key]()
        for j, shard in enumerate(columns):
            parts.append(self.add("partial", (*place, j), _partial, self.plan, shard, rows, step=step))
            if len(parts) == 16 or (j == len(columns) - 1 and j):
                parts = [self.of("folded", (*place, j), "folded", parts)]
        return parts[0]

    def _array(self, made: list[Key]) -> da.Array:
        wide = (self.shape.d,) if self.request.goal == "debiased" else ()
        ends = self.shards if wide else self.queries or itertools.chain(*self.parts)
        chunks = (tuple(stop - start for start, stop in ends), *((k,) for k in wide))
        graph = HighLevelGraph.from_collections(made[0][0], self.tasks, dependencies=self.inputs)
        return da.Array(graph, made[0][0], chunks, meta=np.empty((0,) * (1 + len(wide)), self.shape.dtype))
