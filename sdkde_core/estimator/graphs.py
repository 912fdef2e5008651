"""Repeated estimates on CUDA tensors, replayed as CUDA graphs.

An estimate is some twenty small kernels around one or two large ones, and to launch a small kernel takes the host
longer than the kernel itself. A call that comes again with the same shapes, bandwidth and options is recorded as two
graphs, before and after the one number that is read back, the extent. Later calls copy their points into the graphs'
buffers and replay them, the second without waiting for that number where the call before had the same.

A replay gives the same bits as the call would have: what the recorded call decided, it decided from its arguments and
its rounded extent, and a replay's result only counts where the extent, rounded, is the same. A call whose backend was
chosen by more of the data, a sample of them, is not recorded. Recordings are kept by
stream, so that calls on different streams do not share buffers.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..arrays import ingest
from ..protocol import Columns, Partial
from .fitted import run
from .plan import Measured, Plan, measure, rounded
from .request import Request
from .resolution import REACH

__all__ = ["key_of", "play", "record"]

#: A call is recorded when it comes for this time: recording takes as long as ten calls.
CALLS = 8

#: Recordings kept; each holds the buffers of its call.
RECORDINGS = 8

#: Pairs of points beyond which kernels take so long that launching them does not matter.
PAIRS = 1 << 32

#: Coordinates beyond which a recording would hold hundreds of megabytes.
NUMBERS = 1 << 22

#: What of the environment the choice of kernels depends on, besides the precision, which the spec has.
ENVIRONMENT = ("SDKDE_BACKEND", "SDKDE_TUNING", "SDKDE_DB")

_logger = logging.getLogger("sdkde")
_lock = threading.RLock()
_calls: OrderedDict[Any, int] = OrderedDict()
_recordings: OrderedDict[Any, _Recording] = OrderedDict()


@dataclass
class _Recording:
    train: Any  # the graphs' own buffers, as the call's arguments
    query: Any
    largest: Any  # what the first graph leaves to be read, on the host
    extent: float  # rounded, of the call that was recorded
    first: Any
    second: Any
    result: Any
    arrived: Any  # event: the first graph is through
    suited: bool = True  # the last call's extent was this one


def key_of(request: Request, train: Any, query: Any, log: bool) -> Any:
    """Return what a replay must have in common with the call, or None where the call cannot be replayed.

    That takes plain tensors on the current CUDA device, one bandwidth given as a number, and no weights.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(train) is not torch.Tensor or not train.is_cuda:
        return None
    if type(request.bandwidth) not in (float, int) or request.weights is not None or request.device is not None:
        return None
    # Laplace's log looks for negative values on the host.
    if request.backend_options or (log and request.method == "laplace"):
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
    names = ("method", "precision", "deterministic", "backend", "check_finite")
    asked = float(request.bandwidth), bool(log), *(getattr(request, name) for name in names)
    return asked, kinds, here, torch.cuda.current_stream().cuda_stream, settings


def play(key: Any, train: Any, query: Any) -> Any:
    """Return the result from a recording, or None where there is none or its decisions do not suit the data."""
    with _lock:
        recording = _recordings.get(key)
        if recording is None:
            return None
        _recordings.move_to_end(key)
        recording.train.copy_(train)
        if query is not None:
            recording.query.copy_(query)
        recording.first.replay()
        recording.arrived.record()
        ahead = recording.suited  # then it will be again: the card need not wait for the host to look
        if ahead:
            recording.second.replay()
        recording.arrived.synchronize()
        extent = float(recording.largest)
        recording.suited = math.isfinite(extent) and rounded(extent) == recording.extent
        if not recording.suited:
            return None
        if not ahead:
            recording.second.replay()
        return recording.result.clone()


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
    with _lock:
        count = _calls.pop(key, 0) + 1
        _calls[key] = count
        if len(_calls) > 256:
            _calls.popitem(last=False)
        if count != CALLS or not _enqueues_only(plan):
            return
        try:
            recording = _record(train, query, plan, finish)
        except Exception as error:  # whatever a backend does that cannot be recorded: calls go on as before
            _logger.debug("an estimate could not be recorded: %s", error)
            return
        while len(_recordings) >= RECORDINGS:
            _recordings.popitem(last=False)
        _recordings[key] = recording
        _calls[key] = 0  # should the data change for good, it is recorded anew


def _enqueues_only(plan: Plan) -> bool:
    info, device = plan.choice.info, plan.choice.device
    near = all(p.extent <= min(info.extent_limit(p), REACH[p.precision]) for p in plan.problems)
    return info.capturable and info.arrays == "torch" and device.startswith("cuda") and near and not plan.looked


def _record(train: Any, query: Any, plan: Plan, finish: Callable[[Partial], Any]) -> _Recording:
    torch = sys.modules["torch"]
    train, query = train.clone(), None if query is None else query.clone()
    again = replace(ingest(train, query), dtype=plan.data.dtype, unchecked=False)
    bandwidth, n = plan.bandwidth, again.n

    def second(measured: Measured) -> Any:
        columns = Columns(measured.points[:n, :], measured.log_weights)
        rows = None if again.query is None else measured.points[n:, :]
        return finish(run(replace(plan, columns=columns, query=rows)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # once outside: compilation and the libraries' handles cannot be recorded
        second(measure(again, bandwidth))
    torch.cuda.current_stream().wait_stream(side)
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    largest = torch.empty((), dtype=torch.float64, pin_memory=True)
    # Other threads may go on meanwhile, with whatever they do on their streams. PyTorch's own stream for recording is
    # on the device of the first recording ever made: on another, nothing would be recorded.
    how = {"stream": side, "capture_error_mode": "thread_local"}
    with torch.cuda.graph(graphs[0], **how):
        measured = measure(again, bandwidth)
        largest.copy_(measured.largest, non_blocking=True)
    with torch.cuda.graph(graphs[1], pool=graphs[0].pool(), **how):
        result = second(measured)
    return _Recording(train, query, largest, plan.extent, *graphs, result, torch.cuda.Event())
