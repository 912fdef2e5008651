"""Calls on CUDA tensors that come again, replayed as CUDA graphs: which are recorded, and when.

To launch an estimate's small kernels takes the host longer than they run. A call that comes again with the same shapes
and options, and of whose data the same is decided, is recorded as a graph; later calls copy their numbers into its
buffers and replay it. A replay gives the bits that the call would have given: what :func:`sdkde_core.arrays.look`
decided is looked at again with every replay, and where it differs another graph or an ordinary call answers. So there
is a graph for every sequence of decisions that comes often. A call whose backend was chosen by more of the data, such
as a sample, is not recorded. Recordings are kept by stream.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..engine.devices import current_stream
from ..engine.forks import new_lock
from ..switches import switched_off
from .recording import Recording, keep
from .request import Request

#: A call is recorded when it comes for this time with the same decisions: recording takes as long as ten calls.
CALLS = 8

#: Replays that a recording was worth: it is made again as if it were the first.
WORTH = 64

#: Recordings kept, as each holds the buffers of its call; of the largest calls that are recorded, so many instead.
RECORDINGS, LARGEST = 8, 4

#: Pairs of points beyond which kernels take so long that launching them does not matter.
PAIRS = 1 << 32

#: Pairs times their dimensions, and sixteen for the exponential, from which on a call takes the device long. So many
#: take an H100 0.2 ms, and what a replay saves the host is 0.5 ms: three in vain of four are as bad as none.
LONG = 1 << 33

#: Coordinates of a call up to which it is recorded. Beyond, where a recording holds hundreds of megabytes, only up to
#: one for so many bytes of the device's memory, of which it then takes about a hundredth.
NUMBERS, BYTES = 1 << 22, 4096

#: What of the environment the choice of kernels depends on, besides the precision, which the spec has.
ENVIRONMENT = ("SDKDE_BACKEND", "SDKDE_TUNING", "SDKDE_DB")

_logger = logging.getLogger("sdkde")
_capturing = new_lock()  # PyTorch waits for the device before it records: one thread at a time
_all: weakref.WeakSet[Replays] = weakref.WeakSet()

Array = Any  # a tensor on a CUDA device


def key_of(request: Request, train: Any, query: Any, log: bool) -> Any:
    """Return what a replay must have in common with the call, or None where the call cannot be replayed.

    That takes plain tensors on the current CUDA device, weights too, no other device asked for, a number for the
    bandwidth, and ``SDKDE_REPLAY`` that is not off.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(train) is not torch.Tensor or not train.is_cuda:
        return None
    number = isinstance(request.bandwidth, (float, int)) and not isinstance(request.bandwidth, bool)
    if not number or request.backend_options:
        return None
    if request.negative == "renormalise":  # the negative mass is summed up on the host
        return None
    place = place_of(train, *(x for x in (query, request.weights) if x is not None))
    if place is None or request.device not in (None, f"cuda:{place[1]}", *(["cuda"] if place[1] == 0 else [])):
        return None
    if train.ndim != 2 or (query is not None and query.ndim != 2):
        return None
    if request.weights is not None and request.weights.shape != train.shape[:1]:
        return None
    (n, d), m = train.shape, (train if query is None else query).shape[0]
    if not (n and d and m) or n * max(n, m) > PAIRS or not small_enough((n + m) * d, place[1]):
        return None
    names = "method", "kernel", "negative", "precision", "backend", "check_finite"
    kind = tuple(getattr(request, name) for name in names)
    return float(request.bandwidth), bool(log), kind, request.device, query is None, place


def small_enough(numbers: int, device: int) -> bool:
    """Whether a call with so many coordinates on a CUDA device can be recorded."""
    return numbers <= NUMBERS or numbers <= _most(device)


def _most(device: int) -> int:
    return int(sys.modules["torch"].cuda.get_device_properties(device).total_memory) // BYTES


def takes_long(pairs: int, d: int) -> bool:
    """Whether a call takes the device long, by the pairs of all its passes."""
    return pairs * (d + 16) > LONG


def place_of(*given: Any) -> Any:
    """Return shapes and dtypes of tensors, and what else replays of them have in common; None where there are none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for x in given:
        if type(x) is not torch.Tensor or not x.is_cuda or x.requires_grad:
            return None
        if x.dtype not in (torch.float32, torch.float64):
            return None
    here = torch.cuda.current_device()
    for x in given:
        if x.get_device() != here:
            return None
    if switched_off("SDKDE_REPLAY") or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    kinds = tuple([(x.shape, x.dtype) for x in given])
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled()
    return kinds, here, current_stream(here), *map(os.environ.get, ENVIRONMENT), *modes


def release() -> None:
    """Forget all recordings, and what was counted; one that a thread is about to replay goes when it has done so."""
    for replays in list(_all):
        replays.release()


class Replays:
    """Recorded calls of one kind, by their keys, and how often others have come."""

    def __init__(self) -> None:
        self._lock = new_lock()  # of the dictionaries; held for look-ups only
        self._calls: OrderedDict[Any, int] = OrderedDict()
        self._recorded: OrderedDict[Any, int] = OrderedDict()  # how often
        self.recordings: OrderedDict[Any, Recording] = OrderedDict()
        _all.add(self)

    def play(self, key: Any, *given: Array | None) -> Any:
        """Return the result from a recording, or None where there is none or its decisions do not suit the data.

        ``given``: the tensors of the call, in the order of :meth:`record`.
        """
        with self._lock:
            recording = self.recordings.get(key)
            if recording is None:
                return None
            self.recordings.move_to_end(key)
        return recording.play(given)

    def record(
        self,
        key: Any,
        given: Sequence[Array | None],
        begun: Sequence[Any],
        then: Sequence[Any],
        first: Callable[..., Any],
        second: Callable[[Any], Any],
        alike: Hashable = None,
        long: bool = False,
        chosen: int = 0,
    ) -> None:
        """Count a call, and record it when it has come often enough.

        ``second(first(*given))`` is the call's result, a tensor, by the same decisions in the same order: ``begun`` in
        ``first``, whose last decision must be the last thing that it does, and ``then`` after it. Between them are
        tensors. Calls with ``alike`` and ``then`` in common can be answered by each other's ``second``, by default
        those with ``begun`` in common. The first ``chosen`` decisions of ``then`` make no difference but by ``alike``.
        """
        begun, led, then = tuple(begun), tuple(then[:chosen]), tuple(then[chosen:])
        alike = begun if alike is None else alike
        counted = key, alike, then
        with self._lock:
            recording = self.recordings.get(key)
        if recording is not None and recording.learn(begun, led, alike, then):
            return
        with self._lock:
            count = self._calls.pop(counted, 0) + 1
            keep(self._calls, counted, count)
            before = self._recorded.get(counted, 0)
            if before:
                self._recorded.move_to_end(counted)
        if count != CALLS << before:  # where more are called in turn than are kept, ever fewer are recorded
            return
        with _capturing:
            with self._lock:
                recording = self.recordings.get(key)
            try:
                call = given, first, second, begun, led, alike
                if recording is None or not recording.add(*call):
                    recording = Recording(given, long)
                    recording.add(*call)
            except Exception as error:  # whatever a backend does that cannot be recorded: calls go on as before
                _logger.debug("a call could not be recorded: %s", error)
                return
            with self._lock:
                self._calls.pop(counted, None)
                keep(self._recorded, counted, before + 1)
                self.recordings[key] = recording
                gone = self._too_many(recording.device)
            del gone  # to give back memory may take the driver a while

    def _too_many(self, device: int) -> list[Any]:
        """Forget those that were not replayed for longest, until the others are few and small enough; return them."""
        gone, size = [], sum(recording.size for recording in self.recordings.values())
        while len(self.recordings) > RECORDINGS or (size > RECORDINGS * NUMBERS and size > LARGEST * _most(device)):
            key, recording = self.recordings.popitem(last=False)
            gone.append(recording)
            size -= recording.size
            if recording.replayed >= WORTH:
                for counted in [counted for counted in self._recorded if counted[0] == key]:
                    del self._recorded[counted]
        return gone

    def release(self) -> None:
        """See :func:`release`."""
        with self._lock:
            gone = list(self.recordings.values())
            self.recordings.clear()
            self._calls.clear()
            self._recorded.clear()
        del gone  # not while others look something up
