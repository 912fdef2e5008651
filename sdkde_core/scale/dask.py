"""Dask arrays in, a lazy Dask array out: what the planner does, as a graph of tasks.

Nothing is read when the graph is made: its tasks follow from the shapes and the options. They are, in order:

    survey      the planner's questions, one after another, put to all blocks; the last answer gives the frozen estimate
    columns     by shard: the samples whitened, with their log weights
    rows        by block: the points that a pass takes as rows, whitened
    partial     by block of rows and shard: the sums
    folded      by block of rows: the sums of the shards from the first to the last
    moved       by block of samples: the samples moved
    result      by block of rows: in the user's units

Blocks and shards are the same whatever chunks the arrays came in, so the bits are too. Between tasks there are host
arrays. A task takes one thread, as Dask means it, unless ``SDKDE_NUM_THREADS`` says otherwise.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray

from ..arrays import Argument, Origin, check_shapes, is_dask, quiet, to_host
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import FULL_RULES
from ..choice.hardware import one_thread
from ..choice.select import named_backend
from ..estimator.request import Goal, Request
from ..protocol import QUANTUM, Columns, Partial
from .planner import Frozen, Shape, cut, freeze, width_of_a_shard
from .survey import COUNTINGS, Question, Reach

__all__ = ["lazy"]

Array = NDArray[Any]
Key = tuple[Any, ...]

#: What a task's pairs are worth at most, each d + 16; how many blocks of rows there are at least; and what they are
#: worth all the same, as a block takes Dask some eight tasks of one or two milliseconds each. Of a CPU's core that is
#: some seconds, and a fifth of one; on a GPU, where the user says that it is one, a second.
CPU, GPU = (1 << 36, 64, 1 << 31), (1 << 46, 8, 0)

#: Tasks of a pass at most, as a scheduler takes about a millisecond for each; and numbers in a block of rows at most.
TASKS, NUMBERS = 1 << 15, 1 << 24

#: Sums that are folded by one task: so many may wait in memory.
FOLDED = 16


def lazy(request: Request, train: Any, query: Any = None, log: bool = False) -> da.Array:
    """Return what the request asks for, as a lazy array of NumPy arrays: (m,) densities, or (n, d) moved samples.

    Parameters
    ----------
    request : Request
        A density, or debiased samples; its weights may be a Dask array too.
    train, query : (n, d) or (n,) array_like
        One of them, or the weights, is a Dask array.
    log : bool

    Raises
    ------
    TypeError, ValueError
        What can be said without reading; the rest is raised where the result is computed.
    """
    x = _argument("train", train)
    q = None if query is None else _argument("query", query)
    w = None if request.weights is None else _argument("weights", request.weights)
    check_shapes(x, q, w)
    d = 1 if len(x.shape) == 1 else x.shape[1]
    dtype = max(x.dtype, (q or x).dtype)  # "float64" > "float32"
    request = replace(request, weights=None, backend=named_backend(request.backend))
    if not isinstance(request.bandwidth, str):
        request = replace(request, bandwidth=Bandwidth.of(request.bandwidth, d))
    shape = Shape(x.shape[0], d, None if q is None else q.shape[0], dtype, w is not None)
    begun = Survey(request, shape).asked()  # raises what the planner can say without data
    if q is not None and not q.shape[0]:
        return da.zeros((0,), dtype=dtype)
    result, chunked = _Graph(begun, log, x, q, w).result(), (q or x).array
    return result.rechunk({0: chunked.chunks[0]}) if is_dask(chunked) else result


def _argument(name: str, value: Any) -> Argument:
    """Recognise an argument; of a Dask array only shape and dtype are looked at."""
    if not is_dask(value):
        given = Argument.of(name, value)
        return given._replace(array=to_host(given.array), origin=Origin())
    if value.dtype.kind not in "iufb":
        raise TypeError(f"{name} has dtype {value.dtype}; pass real numbers (integer, boolean or floating)")
    if any(math.isnan(k) for k in value.shape):
        raise ValueError(
            f"{name} has chunks of unknown size; call {name}.compute_chunk_sizes() first, or of a Dask data frame "
            ".to_dask_array(lengths=True)"
        )
    narrow = value.dtype.kind == "f" and value.dtype.itemsize <= 4
    return Argument(name, value, "float32" if narrow else "float64", Origin())


def _blocks(a: Argument, ends: list[tuple[int, int]]) -> da.Array:
    """The argument in blocks of these rows, each with all columns, on the host."""
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
    if isinstance(block, np.ma.MaskedArray):
        raise TypeError(f"{argument} is a masked array; pass a plain array of the rows that count")
    here = block_info[0]
    shape = tuple(stop - start for start, stop in here["array-location"])
    found = to_host(block) if hasattr(block, "shape") else block
    if isinstance(found, np.ndarray) and found.shape == shape and found.dtype == declared:
        return found
    what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
    raise ValueError(
        f"block {here['chunk-location']} of {argument} is declared as {declared} of shape {shape}, and is {what}; "
        f"declare what it is, as by dtype= and chunks= of map_blocks, or make it what is declared"
    )


def rows_of_a_task(m: int, n: int, d: int, device: Any) -> int:
    """Return how many of m rows a task sums over a shard of n columns: a multiple of 1024, by these alone."""
    first, width = device if isinstance(device, str) or not device else device[0], width_of_a_shard(n, d)
    most, fewest, least = GPU if first and first != "cpu" else CPU
    row = width * (d + 16)
    rows = max(min(most // row, max(-(-m // fewest), least // row)), -(-m * -(-n // width) // TASKS))
    return -(-max(1, min(rows, NUMBERS // d)) // QUANTUM) * QUANTUM


@dataclass(frozen=True)
class Survey:
    """How far the planner's questions have come. A generator does not travel: it is asked anew with the answers."""

    request: Request
    shape: Shape
    answers: tuple[Any, ...] = ()
    question: Question | None = None
    frozen: Frozen | None = None

    def asked(self) -> Survey:
        """Return this with the next question, or with what is frozen."""
        questions = freeze(self.request, self.shape)
        try:
            question = next(questions)
            for answer in self.answers:
                question = questions.send(answer)
        except StopIteration as end:
            return replace(self, question=None, frozen=end.value)
        if isinstance(question, Reach) and isinstance(self.request.bandwidth, str):  # not to be chosen again
            chosen = replace(self.request, bandwidth=question.bandwidth)
            return replace(self, request=chosen, answers=self.answers[:1], question=question)
        return replace(self, question=question)


def _task(function: Any) -> Any:
    """Mark what runs on a worker: in one thread, whatever NumPy's error state is there."""

    @functools.wraps(function)
    def work(*args: Any, **values: Any) -> Any:
        with one_thread():
            return function(*args, **values)

    return quiet(work)


@_task
def _answer(survey: Survey, points: Array, weights: Array | None = None, *, about: str, start: int) -> Any:
    """The answer of a block; None where the question is about others, or none is left."""
    asks = survey.question is not None and survey.question.about == about
    return survey.question.of(points, weights, start) if asks else None  # type: ignore[union-attr]


@_task
def _after(survey: Survey, answers: list[Any], *, last: bool) -> Survey | Frozen:
    """The survey after the answers of all blocks; at last what is frozen."""
    if answers[0] is not None and survey.question is not None:
        merged = functools.reduce(survey.question.merge, answers)
        survey = replace(survey, answers=(*survey.answers, merged)).asked()
    if last and survey.frozen is None:
        raise RuntimeError(f"the planner asks more than was foreseen: {survey.question}")
    return survey.frozen if last and survey.frozen else survey


@_task
def _of(frozen: Frozen, *args: Any, method: str, **values: Any) -> Any:
    """What a method of the frozen estimate returns."""
    return getattr(frozen, method)(*args, **values)


@_task
def _partial(frozen: Frozen, shard: Columns, rows: Array, *, step: int, at: Any) -> Partial:
    """The sums of some rows over a shard; it stays packed for the next rows that this thread takes.

    As long as ``frozen`` is on the worker; what it keeps does not travel.
    """
    kept = frozen.__dict__.setdefault("_kept", threading.local())
    if getattr(kept, "of", None) != (step, id(shard)):
        kept.of, kept.shard, kept.packed = (step, id(shard)), shard, frozen.packed(step, shard)
    return frozen.partial(step, kept.packed, rows, at)


@_task
def _folded(frozen: Frozen, parts: list[Partial]) -> Partial:
    return functools.reduce(frozen.fold, parts)


def _rows(shard: Columns, *, start: int, stop: int) -> Array:
    return shard.points[start:stop]


def _moved_columns(shard: Columns, blocks: list[Array]) -> Columns:
    return replace(shard, points=np.concatenate(blocks))


class _Graph:
    """The tasks of one estimate."""

    def __init__(self, begun: Survey, log: bool, x: Argument, q: Argument | None, w: Argument | None) -> None:
        self.begun, self.request, self.shape, self.log = begun, begun.request, begun.shape, log
        n, d, m = self.shape.n, self.shape.d, self.shape.m or 0
        own, rows = (rows_of_a_task(k, n, d, self.request.device) for k in (n, m))
        self.shards, self.queries = cut(n, width_of_a_shard(n, d)), cut(m, rows)
        self.parts = [cut(stop - start, own) for start, stop in self.shards]  # of the samples as rows
        self.x, self.q = _blocks(x, self.shards), None if q is None else _blocks(q, self.queries)
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
        """Add a call of the frozen estimate's."""
        return self.add(what, place, _of, self.frozen, *keys, method=method, **values)

    def result(self) -> da.Array:
        """Return the lazy array, in blocks of its own."""
        self.frozen, moves = self._survey(), self.request.method == "sdkde"
        columns = [self.of("columns", (j,), "columns", *self._samples(j)) for j in range(len(self.shards))]
        rows: list[list[Key]] = []
        if moves or self.q is None:
            rows = [
                [self.add("rows", (j, k), _rows, columns[j], start=a, stop=b) for k, (a, b) in enumerate(parts)]
                for j, parts in enumerate(self.parts)
            ]
        if moves:
            moved = [
                [self.of("moved", key[1:], "moved", key, self._sums(0, key, columns, self._first(key))) for key in keys]
                for keys in rows
            ]
            if self.request.goal is Goal.DEBIASED:
                return self._array(itertools.chain(*moved), "unwhitened")
            columns = [self.add("shard", (j,), _moved_columns, columns[j], keys) for j, keys in enumerate(moved)]
        if self.q is not None:
            flat = [self.of("queries", (i,), "whitened", (self.q.name, i, 0)) for i in range(len(self.queries))]
            sums = [self._sums(int(moves), key, columns) for key in flat]
        else:
            flat = list(itertools.chain(*rows))
            sums = [self._sums(int(moves), key, columns, None if moves else self._first(key)) for key in flat]
        return self._array(sums, "density", log=self.log)

    def _first(self, rows: Key) -> int:
        """The number of the first sample among some rows."""
        j, k = rows[1:]
        return self.shards[j][0] + self.parts[j][k][0]

    def _samples(self, j: int) -> list[Key]:
        return [(self.x.name, j, 0)] + ([] if self.w is None else [(self.w.name, j)])

    def _survey(self) -> Key:
        """Add the survey, and return the key of what is frozen.

        There is room for all that the planner may ask: moments, quartiles, how far samples and queries reach, and by
        pass how many rows are far.
        """
        rule, queries = self.request.bandwidth, ["query"] * bool(self.queries)
        counted = COUNTINGS if isinstance(rule, str) and rule not in FULL_RULES else 0
        abouts = ["train"] * (2 + counted) + queries
        abouts += [about for p in self.request.passes for about in (queries if p.rows == "query" else ()) or ["train"]]
        key: Key = (f"sdkde-asked-{self.token}",)
        self.tasks[key] = (functools.partial(Survey.asked, self.begun),)
        for k, about in enumerate(abouts):
            answers = []
            for i, (start, _) in enumerate(self.queries if about == "query" else self.shards):
                block = self._samples(i) if about == "train" else [(self.q.name, i, 0)]  # type: ignore[union-attr]
                answers.append(self.add("survey", (k, i), _answer, key, *block, about=about, start=start))
            key = self.add("surveyed", (k,), _after, key, answers, last=k == len(abouts) - 1)
        return key

    def _sums(self, step: int, rows: Key, columns: list[Key], first: int | None = None) -> Key:
        """Add the sums of rows over all shards, and return their key: a left fold, :data:`FOLDED` at a time.

        ``first``: the number of the first row, where rows and columns are samples alike.
        """
        place, parts = (step, *rows[1:]), list[Key]()
        for j, shard in enumerate(columns):
            at = None if first is None else (first, self.shards[j])
            parts.append(self.add("partial", (*place, j), _partial, self.frozen, shard, rows, step=step, at=at))
            if len(parts) == FOLDED or (j == len(columns) - 1 and j):
                parts = [self.add("folded", (*place, j), _folded, self.frozen, parts)]
        return parts[0]

    def _array(self, keys: Iterable[Key], method: str, **values: Any) -> da.Array:
        """The array of what a method of the frozen estimate makes of each block."""
        wide = (self.shape.d,) if self.request.goal is Goal.DEBIASED else ()
        ends = self.queries if self.q is not None else itertools.chain(*self.parts)
        made = [self.of("result", (i, *(0 for _ in wide)), method, key, **values) for i, key in enumerate(keys)]
        chunks = (tuple(stop - start for start, stop in ends), *((k,) for k in wide))
        graph = HighLevelGraph.from_collections(made[0][0], self.tasks, dependencies=self.inputs)
        return da.Array(graph, made[0][0], chunks, meta=np.empty((0,) * (1 + len(wide)), self.shape.dtype))
