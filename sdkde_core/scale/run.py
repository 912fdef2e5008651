"""Estimates of samples that memory does not hold: blocks of rows, for each of which all shards are read in order."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from ..arrays.arguments import is_dask
from ..estimator.batches import NUMBERS, ROWS, watched
from ..estimator.density import has_gaps, undefined, warn_of_negative
from ..estimator.public import public
from ..estimator.request import Goal, Options, Request, takes_options
from ..messages import brief
from ..protocol import Columns, Partial
from .blocks import answered, asked_of
from .checkpoint import Checkpoint, Parts, Scratch
from .files import Source, Write, source, writing
from .places import check_apart
from .planner import Frozen, Shape, freeze
from .survey import Question

__all__ = ["Job", "debias", "estimate", "parse_size"]

Array = NDArray[Any]
T = TypeVar("T")

#: Bytes that libraries take when they first compute: compiled code, threads.
RESERVE = 100 * 10**6

#: Bytes beyond what the process has already, where nothing is said.
BEYOND = 10**9

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: int | float | str) -> int:
    """Return the bytes that a number, or a string such as ``"1.5 GB"`` or ``"512MiB"``, says."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", str(text).lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise ValueError(f"memory is {brief(text)}; pass bytes, or a string such as '1.5 GB' or '512 MiB'")
    return int(float(found[1]) * _UNITS[found[2]])


def _source(name: str, given: Any, kept: ExitStack) -> Source:
    """A source that reads rows in any order; what does not is converted once, to a temporary file."""
    if isinstance(given, Source):
        found = given
    elif isinstance(given, str | os.PathLike):
        found = source(os.fspath(given))
    else:
        if is_dask(given):
            raise TypeError(
                f"{name} is a Dask array; pass it to sdkde_core.estimate or debias, or pass the path of its file here"
            )
        if isinstance(given, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; pass a plain array of the rows that count")
        shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
        if shape is None or dtype is None:
            given = np.asarray(given)
            shape, dtype = given.shape, given.dtype
        try:
            if hasattr(given, "read") and not hasattr(given, "__getitem__"):
                found = Source.reading(name, shape, dtype, given.read)
            else:
                found = Source.reading(name, shape, dtype, lambda start, stop: given[start:stop])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    if found.dtype.kind not in "iufb":
        raise TypeError(f"{name} has dtype {found.dtype}; pass real numbers (integer, boolean or floating)")
    if found.at is not None:
        return found
    scratch, done = kept.enter_context(Scratch((found.rows, found.columns), found.dtype)), 0
    for batch in found.batches(max(1, min(ROWS, NUMBERS // max(1, found.columns)))):
        scratch.write(done, batch)
        done += len(batch)
    found.check()
    return replace(found, at=scratch.read, check=lambda: None)


def _ahead(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what the tasks return, while a thread is doing the next one."""
    with ThreadPoolExecutor(1, "sdkde-reader") as reader:
        waiting = iter(tasks)
        coming = [reader.submit(task) for task in itertools.islice(waiting, 1)]
        while coming:
            result = coming.pop().result()
            coming = [reader.submit(task) for task in itertools.islice(waiting, 1)]
            yield result


@dataclass
class Job:
    """An estimate whose samples, queries and results are read and written by blocks; made by :meth:`of`.

    Parameters
    ----------
    frozen : Frozen
    train, query, weights : Source
        ``query`` and ``weights`` may be None.
    log : bool
    moved, results : Parts
        By pass; ``moved`` is None where nothing moves.
    resident : int
        How many shards stay in memory.
    """

    frozen: Frozen
    train: Source
    query: Source | None
    weights: Source | None
    log: bool
    moved: Parts | None
    results: Parts
    resident: int

    @classmethod
    def of(
        cls,
        kept: ExitStack,
        request: Request,
        train: Any,
        query: Any = None,
        *,
        log: bool = False,
        memory: int | float | str | None = None,
        checkpoint: Any = None,
        resume: bool = False,
    ) -> Job:
        """Read the data as often as it takes to decide everything; see :func:`estimate`. ``kept`` closes files."""
        if not isinstance(resume, bool):
            raise TypeError(f"resume is {resume!r}; pass True or False")
        if resume and checkpoint is None:
            raise ValueError("resume=True (--resume) goes with a checkpoint; pass its folder")
        bytes_allowed = BEYOND + _resident_bytes() if memory is None else parse_size(memory)
        x = _source("train", train, kept)
        y = None if query is None else _source("query", query, kept)
        w = None if request.weights is None else _source("weights", request.weights, kept)
        if not x.rows or not x.columns:
            raise ValueError(f"train is empty (shape {(x.rows, x.columns)}); pass at least one point")
        if y is not None and y.columns != x.columns:
            raise ValueError(
                f"query has {y.columns} dimensions, but train has {x.columns}; pass shape (m, {x.columns})"
            )
        if w is not None and (w.rows, w.columns) != (x.rows, 1):
            raise ValueError(f"weights has shape {(w.rows, w.columns)}, but train has {x.rows} points; pass as many")
        narrow = all(s.dtype.kind == "f" and s.dtype.itemsize <= 4 for s in (x, y) if s is not None)
        held = None if checkpoint is None else kept.enter_context(Checkpoint(checkpoint, resume))
        shape = Shape(
            x.rows, x.columns, None if y is None else y.rows, "float32" if narrow else "float64", w is not None
        )

        def ask(question: Question) -> Any:
            about, weights = (y, None) if question.about == "query" else (x, w)
            assert about is not None and about.at is not None
            return asked_of(question, about.at, None if weights is None else weights.at, about.rows, about.columns)

        ready = answered(freeze(replace(request, weights=None), shape), ask)
        resident = _resident(ready, bytes_allowed)
        last, n, d = len(ready.problems) - 1, shape.n, shape.d
        of_points = request.goal is Goal.DEBIASED
        size: tuple[tuple[int, ...], str] = (
            ((n, d), "float64") if of_points else ((ready.problems[last].m,), shape.dtype)
        )
        moved: Parts | None = None
        results: Parts
        if held is None:
            moved = kept.enter_context(Scratch((n, d), "float64")) if last else None
            results = kept.enter_context(Scratch(*size))
        else:
            held.belongs_to({**ready.identity(), "goal": request.goal.value, "log": bool(log)})
            moved = held.parts("moved", (n, d), "float64", ready.rows) if last else None
            results = held.parts("results", *size, ready.rows)
        return cls(ready, x, y, w, log, moved, results, resident)

    @property
    def rows(self) -> int:
        """Rows to compute in all passes."""
        return sum(problem.m for problem in self.frozen.problems)

    def run(self, advance: Callable[[int], None] | None = None) -> None:
        """Compute every block that is not there; ``advance`` is told of every k rows that are done."""
        for step in range(len(self.frozen.problems)):
            last = step == len(self.frozen.problems) - 1
            self._pass(step, self.results if last else self.moved, last, advance)  # type: ignore[arg-type]

    def _pass(self, step: int, parts: Parts, last: bool, advance: Callable[[int], None] | None) -> None:
        rows_of = self.query if last and self.query is not None else self.train
        alike = rows_of is self.train and not step  # rows are columns, which have not moved
        kept: dict[int, Columns] = {}
        for start, stop in self.frozen.blocks(step):
            if not parts.has(start):
                assert rows_of.at is not None
                rows = self.frozen.whitened(rows_of.at(start, stop))
                sums: Partial | None = None
                shards = zip(_ahead(self._shards(step, kept)), self.frozen.shards, strict=True)
                for columns, shard in shards:
                    at = (start, shard) if alike else None
                    sums = self.frozen.fold(sums, self.frozen.partial(step, columns, rows, at))
                assert sums is not None
                for read in filter(None, (self.train, self.query, self.weights)):
                    read.check()
                parts.write(start, self._finished(rows, sums, last))
            if advance is not None:
                advance(stop - start)

    def _finished(self, rows: Array, sums: Partial, last: bool) -> Array:
        if not last or self.frozen.request.goal is Goal.DEBIASED:
            return self.frozen.moved(rows, sums)
        return self.frozen.density(sums, self.log)

    def _shards(self, step: int, kept: dict[int, Columns]) -> Iterator[Callable[[], Columns]]:
        for k, (start, stop) in enumerate(self.frozen.shards):
            yield lambda k=k, start=start, stop=stop: self._shard(step, kept, k, start, stop)  # type: ignore[misc]

    def _shard(self, step: int, kept: dict[int, Columns], k: int, start: int, stop: int) -> Columns:
        if k in kept:
            return kept[k]
        assert self.train.at is not None
        weights = None if self.weights is None or self.weights.at is None else self.weights.at(start, stop)
        if step and self.moved is not None:
            columns = self.frozen.moved_columns(self.moved.read(start, stop), weights)
        else:
            columns = self.frozen.columns(self.train.at(start, stop), weights)
        if k < self.resident:
            kept[k] = columns
        return columns

    def deliver(self, write: Write) -> int:
        """Write the results, block by block: densities, or moved samples in data units.

        Returns how many rows have no log, as the Laplace estimate is negative there.
        """
        negative, gaps = 0, has_gaps(self.frozen.request, self.log)
        for start, stop in self.frozen.blocks(len(self.frozen.problems) - 1):
            block = self.results.read(start, stop)
            write(self.frozen.unwhitened(block) if self.frozen.request.goal is Goal.DEBIASED else block)
            negative += undefined(block) if gaps else 0
        return negative


def _resident(frozen: Frozen, allowed: int) -> int:
    """How many shards may stay in memory; ValueError where not even the work fits."""
    d, shard = frozen.shape.d, 8 * frozen.width * (frozen.shape.d + 1)
    here = _resident_bytes()
    # Two shards read, as they come and whitened, packed, and temporaries; sums and the next ones; compiled code.
    needed = RESERVE + 10 * shard + 8 * frozen.rows * (6 * d + 8)
    if here + needed > allowed:
        raise ValueError(
            f"memory is {allowed / 1e6:.0f} MB, of which this process has {here / 1e6:.0f} MB already, and the work on "
            f"one shard takes {needed / 1e6:.0f} MB; pass memory='{(here + needed) / 1e6 + 1:.0f} MB' or more"
        )
    return (allowed - here - needed) // shard


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def _sink(kept: ExitStack, job: Job, out: Any, name: str) -> tuple[Any, Write]:
    """What takes the results, and the function that brings it the next block of them."""
    width = (job.frozen.shape.d,) if job.frozen.request.goal is Goal.DEBIASED else ()
    shape, dtype, done = (job.frozen.problems[-1].m, *width), job.frozen.shape.dtype, 0
    if isinstance(out, str | os.PathLike):
        return out, kept.enter_context(writing(os.fspath(out), shape, dtype, name))
    array = np.empty(shape, dtype) if out is None else out
    if not hasattr(array, "__setitem__") or getattr(np.dtype(getattr(array, "dtype", "V")), "kind", "") != "f":
        kind = f"of dtype {out.dtype}" if hasattr(out, "dtype") else f"a {type(out).__name__}"
        raise TypeError(f"out is {kind}; pass a path, or an array of floats that can be written to")
    if tuple(array.shape) != shape:
        raise ValueError(f"out has shape {tuple(array.shape)}; pass one of shape {shape}")
    if (isinstance(array, np.ndarray) and not array.flags.writeable) or getattr(array, "read_only", False):
        raise ValueError("out is read-only; pass an array that can be written to")

    def write(block: Array) -> None:
        nonlocal done
        array[done : done + len(block)] = block
        done += len(block)

    return array, write


def _run(
    request: Request, train: Any, query: Any, out: Any, name: str, progress: Any, checkpoint: Any, **how: Any
) -> Any:
    """Estimate to ``out``, or to a new array, and return it; ``how``: as for :meth:`Job.of`."""
    check_apart(out, checkpoint, train=train, query=query, weights=request.weights)
    with ExitStack() as kept:
        job = Job.of(kept, request, train, query, checkpoint=checkpoint, **how)
        result, write = _sink(kept, job, out, name)
        with watched(progress, job.rows) as advance:
            job.run(advance)
        warn_of_negative(job.deliver(write), job.frozen.problems[-1].m)
    return result


@public
@takes_options
def estimate(
    train: Any,
    query: Any = None,
    *,
    log: bool = False,
    out: Any = None,
    memory: int | float | str | None = None,
    checkpoint: Any = None,
    resume: bool = False,
    progress: Any = False,
    **options: Unpack[Options],
) -> Any:
    """Estimate a density of more samples than memory holds: :func:`sdkde_core.estimate`, shard by shard.

    Parameters
    ----------
    train : path, array, or object with ``shape``, ``dtype`` and ``read(start, stop)``
        (n, d). A path ends in ``.npy``, ``.zarr``, ``.parquet``, ``.npz`` or ``.csv``; the last three are converted
        once, to a temporary file. An array is anything with ``shape``, ``dtype`` and slices of rows, such as NumPy's,
        memory-mapped, or zarr's.
    query : as ``train``, optional
        (m, d). Default: the samples.
    log : bool
        Return log p̂.
    out : path or array, optional
        Takes the result, block by block. Default: an array of NumPy's. A file is replaced; a folder only if it is a
        zarr array that sdkde wrote.
    memory : int or str, optional
        Bytes, or such as ``"1.5 GB"``, that this process may take, what it has already included. Default: 1 GB beyond
        that. Shards for which there is room stay in memory.
    checkpoint : path, optional
        A folder that keeps what is done, for one process at a time; needs zarr. What is damaged there is computed
        again, with an :class:`sdkde_core.SdkdeWarning` that names the file.
    resume : bool
        Go on with what is there. It has the same bits as in one go.
    progress : bool or callable
        As for :func:`sdkde_core.estimate`.

    Other parameters as for :func:`sdkde_core.estimate`; ``weights`` may be of the same kinds as ``train``.

    Returns
    -------
    (m,) array, or ``out``

    Raises
    ------
    TypeError, ValueError
        As :func:`sdkde_core.estimate`; too little memory; ``out`` is an input, contains one or lies in one; a
        checkpoint that is there already, is of another estimate, or is in use; ``resume`` without a checkpoint;
        ``bandwidth="isj"`` and ``negative="renormalise"``, which need all samples together.
    OSError
        ``out`` is a folder that sdkde did not write.
    ImportError
        zarr or pyarrow is needed, and not installed.
    """
    request = Request.of(Goal.DENSITY, options, "query", "log", "out", "memory", "checkpoint", "resume", "progress")
    name, how = "log_density" if log else "density", {"log": log, "memory": memory, "resume": resume}
    return _run(request, train, query, out, name, progress, checkpoint, **how)


@public
@takes_options
def debias(
    train: Any,
    *,
    out: Any = None,
    memory: int | float | str | None = None,
    checkpoint: Any = None,
    resume: bool = False,
    progress: Any = False,
    **options: Unpack[Options],
) -> Any:
    """Return the samples, moved by half a mean-shift step: :func:`sdkde_core.debias`, shard by shard.

    Parameters as for :func:`estimate`; ``out`` is a path, or takes (n, d).
    """
    request = Request.of(Goal.DEBIASED, options, "out", "memory", "checkpoint", "resume", "progress")
    return _run(request, train, None, out, "debiased", progress, checkpoint, memory=memory, resume=resume)
