"""Estimates of more samples than one memory holds: :func:`estimate` and :func:`debias` from files, shard by shard.

Dask arrays go to :func:`sdkde_core.estimate` and :func:`sdkde_core.debias`.
"""

from __future__ import annotations

import functools
import math
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from .arrays import Argument, Origin, check_names, check_shapes, is_dask, public, refuse_masked, to_host
from .bandwidth.matrix import Bandwidth
from .choice.select import named_backend
from .estimator.batches import watched
from .estimator.blockwise import BlockPlan, Shape, Survey
from .estimator.density import warn_of_negative
from .estimator.prepared import fit
from .estimator.request import Goal, Options, Request, takes_options
from .files import Source, Write, check_apart, filling, source, writing
from .messages import parse_size
from .spreading.checkpoint import Checkpoint, Chunks, Scratch
from .spreading.disk import Job, resident_bytes, resident_shards

__all__ = ["debias", "estimate"]


def _source(name: str, given: Any, kept: ExitStack) -> Source:
    """A source that reads rows in any order; what does not is converted once, to a temporary file."""
    if isinstance(given, Source):
        found = given
    elif isinstance(given, str | os.PathLike):
        found = source(os.fspath(given))
    else:
        if is_dask(given):
            raise TypeError(f"{name} is a Dask array; pass it to sdkde_core.estimate or debias, or pass its file here")
        refuse_masked(name, given)
        if getattr(given, "shape", None) is None or getattr(given, "dtype", None) is None:
            given = np.asarray(given)
        reads = hasattr(given, "read") and not hasattr(given, "__getitem__")
        at = given.read if reads else lambda start, stop: given[start:stop]
        try:
            found = Source.reading(name, given.shape, given.dtype, at)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    if found.dtype.kind not in "iufb":
        raise TypeError(f"{name} has dtype {found.dtype}; pass real numbers (integer, boolean or floating)")
    if found.at is not None:
        return found
    scratch, done = kept.enter_context(Scratch((found.rows, found.columns), found.dtype)), 0
    for batch in found.batches():
        scratch.write(done, batch)
        done += len(batch)
    found.check()
    return replace(found, at=scratch.read, check=lambda: None)


def _planned(request: Request, shape: Shape, x: Source, y: Source | None, w: Source | None) -> BlockPlan:
    """Put the survey's questions to all blocks of the points, one after another."""
    survey: Survey | BlockPlan = Survey.of(request, shape)
    while isinstance(survey, Survey):
        question: Any = survey.question
        about, weights = (y, None) if question.about == "query" else (x, w)
        assert about is not None
        shards = Shape(about.rows, about.columns).shards
        answers = (question.of(about.at(*ends), weights and weights.at(*ends), ends[0]) for ends in shards)
        survey = survey.next(functools.reduce(question.merge, answers))
    return survey


def job(
    kept: ExitStack, request: Request, train: Any, query: Any, *, log: bool = False,
    memory: int | float | str | None = None, checkpoint: Any = None, resume: bool = False,
) -> Job:  # fmt: skip
    """Read the data as often as it takes to decide everything; see :func:`estimate`. ``kept`` closes files."""
    if not isinstance(resume, bool):
        raise TypeError(f"resume is {resume!r}; pass True or False")
    if resume and checkpoint is None:
        raise ValueError("resume=True (--resume) goes with a checkpoint; pass its folder")
    allowed = 10**9 + resident_bytes() if memory is None else parse_size(memory)
    x = _source("train", train, kept)
    y = None if query is None else _source("query", query, kept)
    w = None if request.weights is None else _source("weights", request.weights, kept)
    if y is not None and sorted(x.names) == sorted(y.names):  # other names may just be another file's
        check_names(x.names, y.names)
    points, queries = x.shaped("train"), None if y is None else y.shaped("query")
    check_shapes(points, queries, None)
    if w is not None and (w.rows, w.columns) != (x.rows, 1):
        raise ValueError(f"weights has shape {(w.rows, w.columns)}, but train has {x.rows} points; pass as many")
    held = None if checkpoint is None else kept.enter_context(Checkpoint(checkpoint, resume))
    m, dtype = None if y is None else y.rows, max(points.dtype, (queries or points).dtype)  # "float64" > "float32"
    plan = _planned(request, Shape(x.rows, x.columns, m, dtype, w is not None), x, y, w)
    resident = resident_shards(plan, allowed)
    if held is not None:
        held.belongs_to({**plan.identity(), "goal": request.goal.value, "log": bool(log)})

    def parts(name: str, shape: tuple[int, ...], dtype: str) -> Chunks | Scratch:
        return kept.enter_context(Scratch(shape, dtype)) if held is None else held.parts(name, shape, dtype, plan.rows)

    shifts = parts("shifts", points.shape, "float64") if request.method == "sdkde" else None
    results = shifts if shifts is not None and plan.debiased else parts("results", (plan.last.m,), plan.shape.dtype)
    return Job(plan, x, y, w, log, shifts, results, resident)


def _sink(kept: ExitStack, task: Job, out: Any) -> tuple[Any, Write]:
    """What takes the results, and the function that brings it the next block of them."""
    width = (task.plan.shape.d,) if task.plan.debiased else ()
    shape, dtype = (task.plan.last.m, *width), task.plan.shape.dtype
    if isinstance(out, str | os.PathLike):
        name = "debiased" if width else "log_density" if task.log else "density"
        return out, kept.enter_context(writing(os.fspath(out), shape, dtype, name))
    array = np.empty(shape, dtype) if out is None else out
    if not hasattr(array, "__setitem__") or getattr(np.dtype(getattr(array, "dtype", "V")), "kind", "") != "f":
        kind = f"of dtype {out.dtype}" if hasattr(out, "dtype") else f"a {type(out).__name__}"
        raise TypeError(f"out is {kind}; pass a path, or an array of floats that can be written to")
    if tuple(array.shape) != shape:
        raise ValueError(f"out has shape {tuple(array.shape)}; pass one of shape {shape}")
    if (isinstance(array, np.ndarray) and not array.flags.writeable) or getattr(array, "read_only", False):
        raise ValueError("out is read-only; pass an array that can be written to")
    return array, filling(array)


def _run(request: Request, train: Any, query: Any, out: Any, progress: Any, checkpoint: Any, **how: Any) -> Any:
    """Estimate to ``out``, or to a new array, and return it; ``how``: as for :func:`job`."""
    check_apart(out, checkpoint, train=train, query=query, weights=request.weights)
    with ExitStack() as kept:
        task = job(kept, request, train, query, checkpoint=checkpoint, **how)
        result, write = _sink(kept, task, out)
        with watched(progress, task.rows) as advance:
            task.run(advance)
        warn_of_negative(task.deliver(write), task.plan.last.m)
    return result


def lazy(request: Request, train: Any, query: Any, log: bool, out: Any, progress: Any) -> Any:
    """Return densities (m,) or moved samples (n, d) as a lazy Dask array; raise what can be said without reading."""
    if out is not None or progress is not False:
        instead = "as by .to_zarr(path), or watch with dask.diagnostics.ProgressBar() or the dashboard"
        raise TypeError(f"out and progress are not for Dask arrays; store the result, {instead}")
    from .spreading.dask import Graph, lazy_whole  # Dask takes a second to import

    x = _argument("train", train)
    q = None if query is None else _argument("query", query)
    w = None if request.weights is None else _argument("weights", request.weights)
    check_shapes(x, q, w)
    d = 1 if len(x.shape) == 1 else x.shape[1]
    request = replace(request, weights=None, backend=named_backend(request.backend))
    if not isinstance(request.bandwidth, str):
        request = replace(request, bandwidth=Bandwidth.of(request.bandwidth, d))
    dtype = max(x.dtype, (q or x).dtype)  # "float64" > "float32"
    if request.apart:
        return lazy_whole(functools.partial(_whole, request), x, q, w, log, dtype)
    survey = Survey.of(request, Shape(x.shape[0], d, None if q is None else q.shape[0], dtype, w is not None))
    result, chunked = Graph(survey, log, x, q, w).result(), (q or x).array
    return result.rechunk({0: chunked.chunks[0]}) if is_dask(chunked) else result


def _whole(request: Request, train: Any, weights: Any) -> Any:
    return fit(replace(request, weights=weights), train)


def _argument(name: str, value: Any) -> Argument:
    """Recognise an argument; of a Dask array only shape and dtype are looked at."""
    given = Argument.of(name, np.empty((0,) * value.ndim, value.dtype) if is_dask(value) else value)
    if not is_dask(value):
        return given._replace(array=to_host(given.array), origin=Origin())
    if any(math.isnan(k) for k in value.shape):
        instead = f"call {name}.compute_chunk_sizes() first, or of a Dask data frame .to_dask_array(lengths=True)"
        raise ValueError(f"{name} has chunks of unknown size; {instead}")
    return given._replace(array=value)


@public
@takes_options
def estimate(
    train: Any, query: Any = None, *, log: bool = False, out: Any = None, memory: int | float | str | None = None,
    checkpoint: Any = None, resume: bool = False, progress: Any = False, **options: Unpack[Options],
) -> Any:  # fmt: skip
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
        A folder that keeps what is done, for one process at a time. What is damaged there is computed
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
        ``bandwidth="isj"``, ``adaptive`` and ``negative="renormalise"``, which need all samples together.
    OSError
        ``out`` is a folder that sdkde did not write.
    ImportError
        zarr or pyarrow is needed, and not installed.
    """
    request = Request.of(Goal.DENSITY, options, "query", "log", "out", "memory", "checkpoint", "resume", "progress")
    return _run(request, train, query, out, progress, checkpoint, log=log, memory=memory, resume=resume)


@public
@takes_options
def debias(
    train: Any, *, out: Any = None, memory: int | float | str | None = None, checkpoint: Any = None,
    resume: bool = False, progress: Any = False, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Return the samples, moved: :func:`sdkde_core.debias`, shard by shard.

    Parameters as for :func:`estimate`; ``out`` is a path, or takes (n, d).
    """
    request = Request.of(Goal.DEBIASED, options, "out", "memory", "checkpoint", "resume", "progress")
    return _run(request, train, None, out, progress, checkpoint, memory=memory, resume=resume)
