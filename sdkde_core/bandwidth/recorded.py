"""Small functions of arrays on a GPU, recorded as CUDA graphs.

A function of twenty operations on small arrays takes the host some hundred microseconds to launch, and the GPU less to
compute. One that is called a dozen times in a call, and in one call after the other for arrays of the same shapes, is
recorded by PyTorch once and then replayed by a single launch. A replay gives the bits that the function gives.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

#: For which time with arrays of the same shapes a function is recorded: recording takes as long as a few calls.
TIMES = 2

#: Recordings kept by a thread; each holds some tens of megabytes.
KEPT = 4

_logger = logging.getLogger("sdkde")
_here = threading.local()  # a thread has recordings of its own: nobody else writes into their buffers


def recorded(function: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
    """Return the function, or its recording for arrays of these shapes and dtypes, all on one device.

    The function, of a module, takes arrays only, launches, reads nothing back, and returns arrays. What a recording
    returns is overwritten by the thread's next call.
    """
    torch, first = sys.modules.get("torch"), arrays[0]
    if torch is None or type(first) is not torch.Tensor or not first.is_cuda:
        return function
    recordings, times = _known()
    # What is made in inference mode cannot be written into outside of it.
    key = (function, first.device, torch.is_inference_mode_enabled(), *((tuple(x.shape), x.dtype) for x in arrays))
    times[key] += 1
    if key not in recordings:
        if times[key] < TIMES:
            return function
        try:
            recordings[key] = _Recording(torch.cuda, function, arrays)
        except RuntimeError as error:  # out of memory, or something else records: it can do without
            _logger.debug("not recorded: %s", error)
            times[key] = 0
            return function
        while len(recordings) > KEPT:
            recordings.popitem(last=False)
    recordings.move_to_end(key)
    return recordings[key]


def _known() -> tuple[OrderedDict[Any, _Recording], Counter[Any]]:
    """This thread's recordings, and how often each was asked for."""
    if not hasattr(_here, "known"):
        _here.known = OrderedDict(), Counter()
    return _here.known


class _Recording:
    """A recorded function."""

    def __init__(self, cuda: Any, function: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
        self._cuda, self._device = cuda, arrays[0].device
        self._inputs = [x.clone() for x in arrays]
        self._given: tuple[Any, ...] = (None,) * len(arrays)
        with cuda.device(self._device):
            side, graph = cuda.Stream(), cuda.CUDAGraph()
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):  # once outside: libraries' handles cannot be recorded
                function(*self._inputs)
            with cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._results = function(*self._inputs)
            cuda.current_stream().wait_stream(side)
        self._graph = graph

    def __call__(self, *arrays: Any) -> Any:
        with self._cuda.device(self._device):
            for held, before, given in zip(self._inputs, self._given, arrays, strict=True):
                if given is not before:
                    held.copy_(given)
            self._given = arrays
            self._graph.replay()
        return self._results
