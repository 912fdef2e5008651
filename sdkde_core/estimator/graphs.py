"""Repeated estimates on CUDA tensors, replayed as CUDA graphs.

An estimate is some twenty small kernels around one or two large ones, and to launch a small kernel takes the host
longer than the kernel itself. A call that comes again with the same shapes, bandwidth and options is recorded as two
graphs, before and after the one number that is read back, the extent. Later calls copy their points into the graphs'
buffers and replay them, the second without waiting for that number where the two calls before had the same.

A replay gives the same bits as the call would have: what the recorded call decided, it decided from its arguments and
its rounded extent. So there is a second graph for every rounded extent that comes often: several data sets of one
shape, in turn, are all replayed. A call whose backend was chosen by more of the data, a sample of them, is not
recorded. Recordings are kept by stream, so that calls on different streams share no buffers.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays import ingest
from ..choice.calibration import switched_off
from ..choice.judge import only_enqueues
from ..engine.forks import new_lock
from ..protocol import Columns, Partial
from .fitted import run
from .plan import Measured, Plan, measure, rounded
from .request import Request
from .resolution import CLEAR

__all__ = ["key_of", "play", "record", "release"]

#: A call is recorded when it comes for this time with its extent: recording takes as long as ten calls.
CALLS = 8

#: Recordings kept; each holds the buffers of its call. Second graphs of each, which share their memory but for results.
RECORDINGS, EXTENTS = 8, 4

#: Pairs of points beyond which kernels take so long that launching them does not matter.
PAIRS = 1 << 32

#: Coordinates beyond which a recording would hold hundreds of megabytes.
NUMBERS = 1 << 22

#: What of the environment the choice of kernels depends on, besides the precision, which the spec has.
ENVIRONMENT = ("SDKDE_BACKEND", "SDKDE_TUNING", "SDKDE_DB")

_logger = logging.getLogger("sdkde")
_lock = new_lock()  # of the two dictionaries; held for look-ups only
_capturing = new_lock()  # PyTorch waits for the device before it records: one thread at a time
_calls: OrderedDict[Any, int] = OrderedDict()
_recordings: OrderedDict[Any, _Recording] = OrderedDict()


def key_of(request: Request, train: Any, query: Any, log: bool) -> Any:
    """Return what a replay must have in common with the call, or None where the call cannot be replayed.

    That takes plain tensors on the current CUDA device, one bandwidth given as a number, and no weights; and
    ``SDKDE_REPLAY`` that is not off.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(train) is not torch.Tensor or not train.is_cuda or switched_off("SDKDE_REPLAY"):
        return None
    if type(request.bandwidth) not in (float, int) or request.weights is not None or request.device is not None:
        return None
    # Laplace's log looks for negative values on the host, and their mass is summed up there.
    looks = (log and request.method == "laplace" and request.negative == "keep") or request.negative == "renormalise"
    if request.backend_options or looks:
        return None
    given = [train] if query is None else [train, query]
    here = torch.cuda.current_device()
    for x in given:
        if type(x) is not torch.Tensor or not x.is_cuda or x.device.index != here or x.requires_grad or x.ndim != 2:
            return None
        if x.dtype not in (torch.float32, torch.float64):
            return None
    (n, d), m = train.shape, given[-1].shape[0]
    if not (n and d and m) or n * max(n, m) > PAIRS or (n + m) * d > NUMBERS:
        return None
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    kinds = tuple((tuple(x.shape), x.dtype) for x in given)
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled()
    settings = (*map(os.environ.get, ENVIRONMENT), *modes)
    names = ("method", "kernel", "negative", "precision", "deterministic", "backend", "check_finite")
    asked = float(request.bandwidth), bool(log), *(getattr(request, name) for name in names)
    return asked, kinds, here, torch.cuda.current_stream().cuda_stream, settings


def play(key: Any, train: Any, query: Any) -> Any:
    """Return the result from a recording, or None where there is none or its decisions do not suit the data."""
    with _lock:
        recording = _recordings.get(key)
        if recording is None:
            return None
        _recordings.move_to_end(key)
    return recording.play(train, query)


def record(key: Any, train: Any, query: Any, plan: Plan, finish: Callable[[Partial], Any]) -> None:
    """Count a call, and record it when it has come often enough.

    Parameters
    ----------
    key
        From :func:`key_of`.
    train, query : tensor
        As the user gave them.
    plan : Plan
        What became of them.
    finish : callable
        From the last pass's result to what the call returns.
    """
    if plan.looked or plan.extent > CLEAR or not only_enqueues(plan.choice.info, plan.problems):
        return
    counted = key, plan.extent
    with _lock:
        count = _calls.pop(counted, 0) + 1
        _calls[counted] = count
        if len(_calls) > 256:
            _calls.popitem(last=False)
    if count != CALLS:
        return
    with _capturing:
        with _lock:
            recording = _recordings.get(key)
        try:
            recording = recording or _Recording(train, query, plan)
            recording.add(train, query, plan, finish)
        except Exception as error:  # whatever a backend does that cannot be recorded: calls go on as before
            _logger.debug("an estimate could not be recorded: %s", error)
            return
        with _lock:
            _calls.pop(counted, None)
            _recordings[key] = recording
            gone = [_recordings.popitem(last=False) for _ in range(len(_recordings) - RECORDINGS)]
        del gone  # to give back memory may take the driver a while


def release() -> None:
    """Forget all recordings, and what was counted; one that a thread is about to replay goes when it has done so."""
    with _lock:
        gone = list(_recordings.values())
        _recordings.clear()
        _calls.clear()
    del gone  # not while others look something up


class _Second(NamedTuple):
    """What follows where the extent is known: the passes and the density."""

    graph: Any
    result: Any  # in the graph's memory


class _Recording:
    """One call's graphs, and the buffers that are their arguments.

    Parameters
    ----------
    train, query : tensor
    plan : Plan
        Of the first call that is recorded.
    """

    def __init__(self, train: Any, query: Any, plan: Plan) -> None:
        torch = sys.modules["torch"]
        self._lock = new_lock()  # a thread has the buffers until its result is copied from them
        self._train: Any = train.clone()
        self._query: Any = None if query is None else query.clone()
        self._data = replace(ingest(self._train, self._query), dtype=plan.data.dtype, unchecked=False)
        # PyTorch's own stream for recording is on the device of the first recording ever made: on another device
        # nothing would be recorded.
        self._side = torch.cuda.Stream()
        self._largest = torch.empty((), dtype=torch.float64, pin_memory=True)  # what is read on the host
        self._arrived = torch.cuda.Event()  # the first graph is through
        self._first: Any = None
        self._measured: Measured | None = None  # in the graphs' memory
        self._seconds: OrderedDict[float | None, _Second] = OrderedDict()  # by the rounded extent
        self._extents: tuple[float | None, float | None] = (None, None)  # of the last two calls

    def play(self, train: Any, query: Any) -> Any:
        """Return the result for points, or None where their extent has no graph."""
        with self._lock:
            self._fill(train, query)
            self._first.replay()
            self._arrived.record()
            before, last = self._extents
            ahead = self._seconds.get(last) if before == last else None  # it comes again: do not wait to see it
            if ahead is not None:
                ahead.graph.replay()
            self._arrived.synchronize()
            largest = float(self._largest)
            extent = rounded(largest) if math.isfinite(largest) else None
            self._extents = last, extent
            second = self._seconds.get(extent)
            if second is None:
                return None
            self._seconds.move_to_end(extent)
            if second is not ahead:
                second.graph.replay()
            return second.result.clone()

    def add(self, train: Any, query: Any, plan: Plan, finish: Callable[[Partial], Any]) -> None:
        """Record what follows on the plan's extent; if there are many, what was not replayed for longest goes."""
        n = self._data.n

        def second(measured: Measured) -> Any:
            columns = Columns(measured.points[:n, :], measured.log_weights)
            rows = None if self._query is None else measured.points[n:, :]
            return finish(run(replace(plan, columns=columns, query=rows)))

        def first() -> Measured:
            measured = measure(self._data, plan.bandwidth)
            self._largest.copy_(measured.largest, non_blocking=True)
            return measured

        with self._lock:
            self._fill(train, query)
            cuda = sys.modules["torch"].cuda
            self._side.wait_stream(cuda.current_stream())
            with cuda.stream(self._side):  # once outside: compilation and the libraries' handles cannot be recorded
                second(measure(self._data, plan.bandwidth))
            cuda.current_stream().wait_stream(self._side)
            if self._first is None:
                self._first, self._measured = self._captured(first)
            measured = self._measured
            assert measured is not None
            graph, result = self._captured(lambda: second(measured))
            while len(self._seconds) >= EXTENTS:
                self._seconds.popitem(last=False)
            self._seconds[plan.extent] = _Second(graph, result)

    def _fill(self, train: Any, query: Any) -> None:
        self._train.copy_(train)
        if query is not None:
            self._query.copy_(query)

    def _captured(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """Record a call as a graph; the graphs share memory, as they run one after another, the first one first."""
        cuda = sys.modules["torch"].cuda
        graph, pool = cuda.CUDAGraph(), None if self._first is None else self._first.pool()
        # Other threads may go on meanwhile, with whatever they do on their streams.
        with cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
            result = call()
        return graph, result
