"""Calls on CUDA tensors that come again, replayed as CUDA graphs.

An estimate is some twenty small kernels around one or two large ones, several times that where outliers are summed
apart, and to launch a small kernel takes the host longer than the kernel itself. A call that comes again with the same
shapes and options, and of whose data the same is decided, is recorded as a graph. Later calls copy their numbers into
the graph's buffers and replay it.

A replay gives the same bits as the call would have. What a call decides follows from its arguments and from what
:func:`sdkde_core.arrays.look` returns: the extent, rounded up, and how many points are beyond a limit. Recorded, it is
taken for granted; the numbers that it follows from come with every replay, and where they say something else, another
graph or an ordinary call answers. So there is a graph for every sequence of decisions that comes often: several data
sets of one shape, in turn, are all replayed. Extents differ from one data set to the next, but most of them make no
difference to the kernels: an ordinary call says how it went on (``alike``), and the first time that an extent is seen,
whether that is recorded.

Which graph it is to be follows from the extent, at the beginning of a call: a graph of its own. Where a backend was
chosen by the shares of far points, it is first taken to be the one that the last call of that extent had, and the
shares are looked at with the rest. Where the two calls before were answered by one graph that is replayed at once, and
the host waits for its extent alone, not for what follows. Otherwise the graph that was last replayed is tried, of those
with such an extent. Of a call that takes the device long it is only where the last two with such an extent went on in
one way: a replay in vain costs more than launches. A call whose backend was chosen by more of the data, such as a
sample, is not recorded. Recordings are kept by stream, so that calls on different streams share no buffers.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..arrays import Decisions, Taken, noting
from ..choice.calibration import switched_off
from ..engine.devices import current_stream
from ..engine.forks import new_lock
from .request import Request

__all__ = ["Replays", "key_of", "place_of", "release", "small_enough", "takes_long"]

#: A call is recorded when it comes for this time with the same decisions: recording takes as long as ten calls.
CALLS = 8

#: Replays that a recording was worth: it is made again as if it were the first.
WORTH = 64

#: Recordings kept, as each holds the buffers of its call; of the largest calls that are recorded, so many instead.
#: Graphs of each, which share their memory but for results.
RECORDINGS, LARGEST, GRAPHS = 8, 4, 4

#: Entries of a dictionary of what came lately.
LATELY = 256

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
    return float(request.bandwidth), bool(log), request.kind, request.device, query is None, place


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


def _keep(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry; the one that was set longest ago goes if there are too many."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > LATELY:
        entries.popitem(last=False)


class Replays:
    """Recorded calls of one kind, by their keys, and how often others have come."""

    def __init__(self) -> None:
        self._lock = new_lock()  # of the dictionaries; held for look-ups only
        self._calls: OrderedDict[Any, int] = OrderedDict()
        self._recorded: OrderedDict[Any, int] = OrderedDict()  # how often
        self.recordings: OrderedDict[Any, _Recording] = OrderedDict()
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

        Parameters
        ----------
        key
            From :func:`key_of` or :func:`place_of`.
        given : sequence of tensor or None
            As the user gave them.
        begun, then : sequence
            What the call has decided, in ``first`` and after it.
        first, second : callable
            ``second(first(*given))`` is the call's result, a tensor, by the same decisions in the same order. What is
            between them are tensors, as other calls share the first one; its last decision must be the last thing that
            it does. What else the second one needs of the call it has.
        alike : hashable, optional
            Calls that have it in common, and the decisions ``then``, can be answered by each other's ``second``; by
            default those that have ``begun`` in common.
        long : bool
            From :func:`takes_long`.
        chosen : int
            How many of ``then``, the first ones, make no difference but by ``alike``, which also says what they are
            decisions of.
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
            _keep(self._calls, counted, count)
            before = self._recorded.get(counted, 0)
            if before:
                self._recorded.move_to_end(counted)
        if count != CALLS << before:  # where more are called in turn than are kept, ever fewer are recorded
            return
        with _capturing:
            with self._lock:
                recording = self.recordings.get(key)
            try:
                call = given, first, second, begun, led, alike, then
                if recording is None or not recording.add(*call):
                    recording = _Recording(given, long)
                    recording.add(*call)
            except Exception as error:  # whatever a backend does that cannot be recorded: calls go on as before
                _logger.debug("a call could not be recorded: %s", error)
                return
            with self._lock:
                self._calls.pop(counted, None)
                _keep(self._recorded, counted, before + 1)
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


class _Numbers(NamedTuple):
    """What a graph takes for granted of the numbers that it looks at, and those numbers, on the host."""

    decisions: tuple[Any, ...]
    taken: Taken
    numbers: Any
    there: Any  # the event that they are
    within: bool  # the graph records it; PyTorch before 2.9 cannot, and the host waits for the whole graph

    def decided(self) -> tuple[Any, ...]:
        """Wait for them, and return what they say."""
        if not self.decisions:
            return ()
        self.there.synchronize()
        return self.taken.decided(self.numbers.tolist())


class _Graph(NamedTuple):
    """A call, or only how it begins."""

    graph: Any
    result: Any  # in the graph's memory
    begun: _Numbers
    then: _Numbers
    chosen: int = 0  # how many decisions of ``then`` only led to what calls have in common

    def replay(self) -> None:
        self.graph.replay()
        for part in (self.begun, self.then):
            if part.decisions and not part.within:
                part.there.record()


class _Recording:
    """One call's graphs, and the buffers that are their arguments.

    Parameters
    ----------
    given : sequence of tensor or None
    long : bool
        Whether the call takes the device long.
    """

    def __init__(self, given: Sequence[Array | None], long: bool) -> None:
        self._lock = new_lock()  # a thread has the buffers until its result is copied from them
        torch = sys.modules["torch"]
        self._buffers = [x.clone() for x in given if x is not None]
        self.size, self.device = sum(x.numel() for x in self._buffers), self._buffers[0].get_device()
        filled = iter(self._buffers)
        self._given = [None if x is None else next(filled) for x in given]
        # PyTorch's own stream for recording is on the device of the first recording ever made: on another device
        # nothing would be recorded.
        self._side, self._aside = torch.cuda.Stream(), torch.cuda.Stream()
        self._beginning: Any = None
        self.graphs: OrderedDict[Any, _Graph] = OrderedDict()  # by what calls have in common, and what they then decide
        self._alike: OrderedDict[Any, Any] = OrderedDict()  # what calls have in common, by what leads to it
        self._likely: OrderedDict[Any, Any] = OrderedDict()  # the same of the last two, by how they began alone
        self._lately: OrderedDict[Any, Any] = OrderedDict()  # if long: how the last two went on, by what is in common
        self._last: tuple[Any, Any] = (None, None)  # graphs of the last two calls
        self._long, self.replayed = long, 0

    def play(self, given: Sequence[Array | None]) -> Any:
        """Return the result for tensors, or None where no graph decides as these ask for."""
        with self._lock:
            self._fill(given)
            before, last = self._last
            ahead = self.graphs.get(last) if before == last else None  # it comes again: do not wait to see it
            played = ahead or self._beginning
            played.replay()
            begun, known = played.begun.decided(), ()
            before, alike = self._likely.get(begun, (None, None))
            if self._long and before != alike:
                alike = None
            for _ in range(GRAPHS):
                key = self._going_on(alike, known)
                self._last = last, key
                if key is None:
                    return None
                graph = self.graphs[key]
                if graph is not played:
                    graph.replay()
                played, decided = graph, graph.then.decided()
                led, then = decided[: graph.chosen], decided[graph.chosen :]
                alike = self._alike.get((begun, led))
                if alike != key[0]:
                    known = ()
                elif then == key[1]:
                    self.graphs.move_to_end(key)
                    self._note(begun, alike, then)
                    self.replayed += 1
                    return graph.result.clone()
                else:  # what was computed by a wrong decision says nothing of those that follow
                    known = then[: list(map(operator.eq, then, key[1])).index(False) + 1]
            return None

    def _going_on(self, alike: Any, known: tuple[Any, ...]) -> Any:
        """The key of the graph to try next, of those that decide so; None where there is none."""
        if self._long:
            before, last = (known, known) if known else self._lately.get(alike, ((), ()))
            key = alike, last if before == last else ()
            return key if key in self.graphs else None
        able = (key for key in reversed(self.graphs) if key[0] == alike and key[1][: len(known)] == known)
        return next(able, None)

    def _note(self, begun: tuple[Any, ...], alike: Hashable, then: tuple[Any, ...]) -> None:
        """Note how a call went on."""
        _keep(self._likely, begun, (self._likely.get(begun, (None, None))[1], alike))
        if self._long:
            _keep(self._lately, alike, (self._lately.get(alike, (None, None))[1], then))

    def learn(self, begun: tuple[Any, ...], led: tuple[Any, ...], alike: Hashable, then: tuple[Any, ...]) -> bool:
        """Return whether a call that began so and went on so can be replayed from now on: as another one was recorded.

        ``begun``, ``alike``, ``then``: as of :meth:`Replays.record`; ``led``: the decisions that led to ``alike``.
        """
        with self._lock:
            known = (alike, then) in self.graphs and self._beginning.begun.decisions[:-1] == begun[:-1]
            if known or self._long:
                self._note(begun, alike, then)
            if known:
                _keep(self._alike, (begun, led), alike)
            return known

    def add(
        self,
        given: Sequence[Array | None],
        first: Callable[..., Any],
        second: Callable[[Any], Any],
        begun: tuple[Any, ...],
        led: tuple[Any, ...],
        alike: Hashable,
        then: tuple[Any, ...],
    ) -> bool:
        """Record a call; if there are many, the graph that was not replayed for longest goes.

        Not, and False, where it begins otherwise than those recorded: in more than its first part's last decision.

        Raises
        ------
        ValueError
            It now decides otherwise, as its data have changed.
        """
        with self._lock:
            self._fill(given)
            cuda = sys.modules["torch"].cuda
            self._side.wait_stream(cuda.current_stream())
            with cuda.stream(self._side):  # once outside: compilation and the libraries' handles cannot be recorded
                noted = Decisions(), Decisions()
                with noting(noted[0]):
                    found = first(*self._given)
                with noting(noted[1]):
                    second(found)
            cuda.current_stream().wait_stream(self._side)
            if [tuple(part.made) for part in noted] != [begun, led + then]:
                raise ValueError("the data have changed")
            if self._beginning is None:
                self._beginning = self._captured(first, noted[0])
            elif self._beginning.begun.decisions[:-1] != begun[:-1]:
                return False
            graph = self._captured(first, noted[0], second, noted[1])._replace(chosen=len(led))
            while len(self.graphs) >= GRAPHS:
                self.graphs.popitem(last=False)
            self.graphs[alike, then] = graph
            self._note(begun, alike, then)
            _keep(self._alike, (begun, led), alike)
            return True

    def _fill(self, given: Sequence[Array | None]) -> None:
        sys.modules["torch"]._foreach_copy_(self._buffers, [x for x in given if x is not None])  # one launch

    def _captured(
        self,
        first: Callable[..., Any],
        begun: Decisions,
        second: Callable[[Any], Any] | None = None,
        then: Decisions | None = None,
    ) -> _Graph:
        """Record a call as a graph, or how it begins; the graphs share memory, as they run one after another."""
        torch = sys.modules["torch"]
        graph, pool = torch.cuda.CUDAGraph(), None if self._beginning is None else self._beginning.graph.pool()
        # Other threads may go on meanwhile, with whatever they do on their streams.
        with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
            result, begins = self._noted(lambda: first(*self._given), begun)
            result, ends = self._noted(lambda: result if second is None else second(result), then or Decisions())
            if begun.size or ends.decisions:
                self._side.wait_stream(self._aside)
        return _Graph(graph, result, begins, ends)

    def _noted(self, call: Callable[[], Any], decisions: Decisions) -> tuple[Any, _Numbers]:
        """Return the result of a call that is being recorded, and what it takes for granted.

        Those numbers go to the host beside what follows them.
        """
        torch, taken = sys.modules["torch"], Taken(decisions)
        with noting(taken):
            result = call()
        there, within = _event(torch)
        numbers = torch.empty(decisions.size, dtype=torch.float64, pin_memory=True)
        if decisions.size:
            found = taken.numbers()
            taken.kept.append(found)  # else what follows might get its memory, which is read beside it
            self._aside.wait_stream(self._side)
            with torch.cuda.stream(self._aside):
                numbers.copy_(found, non_blocking=True)
                if within:
                    there.record(self._aside)
        return result, _Numbers(tuple(decisions.made), taken, numbers, there, within)


def _event(torch: Any) -> tuple[Any, bool]:
    """Return an event, and whether a graph may record it for the host."""
    try:
        return torch.cuda.Event(external=True), True
    except TypeError:
        return torch.cuda.Event(), False
