"""A call recorded as CUDA graphs, one for every way that it may go on, and which of them is to be replayed.

Which graph it is to be follows from the extent, which a graph of its own computes first. Where the last two calls had
one graph, that is replayed at once. Otherwise the graph that was last replayed is tried, of those with such an extent;
of a call that takes the device long only where the last two with such an extent went on in one way, as a replay in vain
costs more than launches.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..arrays import Decisions, Taken, noting
from ..engine.forks import new_lock

#: Graphs of a recording, which share their memory but for results.
GRAPHS = 4

#: Entries of a dictionary of what came lately.
LATELY = 256

Array = Any  # a tensor on a CUDA device


def keep(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry; the one that was set longest ago goes if there are too many."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > LATELY:
        entries.popitem(last=False)


class Numbers(NamedTuple):
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


class Graph(NamedTuple):
    """A call, or only how it begins."""

    graph: Any
    result: Any  # in the graph's memory
    begun: Numbers
    then: Numbers
    chosen: int = 0  # how many decisions of ``then`` only led to what calls have in common

    def replay(self) -> None:
        self.graph.replay()
        for part in (self.begun, self.then):
            if part.decisions and not part.within:
                part.there.record()


class Recording:
    """One call's graphs, and the buffers that are their arguments; ``long``: it takes the device long."""

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
        self.graphs: OrderedDict[Any, Graph] = OrderedDict()  # by what calls have in common, and what they then decide
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
        keep(self._likely, begun, (self._likely.get(begun, (None, None))[1], alike))
        if self._long:
            keep(self._lately, alike, (self._lately.get(alike, (None, None))[1], then))

    def learn(self, begun: tuple[Any, ...], led: tuple[Any, ...], alike: Hashable, then: tuple[Any, ...]) -> bool:
        """Return whether a call that began so and went on so can be replayed from now on: as another one was recorded.

        ``begun``, ``alike``, ``then``: as of :meth:`Replays.record`; ``led``: the decisions that led to ``alike``.
        """
        with self._lock:
            known = (alike, then) in self.graphs and self._beginning.begun.decisions[:-1] == begun[:-1]
            if known or self._long:
                self._note(begun, alike, then)
            if known:
                keep(self._alike, (begun, led), alike)
            return known

    def add(
        self,
        given: Sequence[Array | None],
        first: Callable[..., Any],
        second: Callable[[Any], Any],
        begun: tuple[Any, ...],
        led: tuple[Any, ...],
        alike: Hashable,
    ) -> bool:
        """Record a call; if there are many, the graph that was not replayed for longest goes.

        Not, and False, where it begins otherwise than those recorded: in more than its first part's last decision.
        ValueError where its data have changed.
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
            then = tuple(noted[1].made)  # not always the call's: what it packed is there now
            if (tuple(noted[0].made), then[: len(led)]) != (begun, led):
                raise ValueError("the data have changed")
            if self._beginning is None:
                self._beginning = self._captured(first, noted[0])
            elif self._beginning.begun.decisions[:-1] != begun[:-1]:
                return False
            graph = self._captured(first, noted[0], second, noted[1])._replace(chosen=len(led))
            while len(self.graphs) >= GRAPHS:
                self.graphs.popitem(last=False)
            self.graphs[alike, then[len(led) :]] = graph
            self._note(begun, alike, then[len(led) :])
            keep(self._alike, (begun, led), alike)
            return True

    def _fill(self, given: Sequence[Array | None]) -> None:
        sys.modules["torch"]._foreach_copy_(self._buffers, [x for x in given if x is not None])  # one launch

    def _captured(
        self,
        first: Callable[..., Any],
        begun: Decisions,
        second: Callable[[Any], Any] | None = None,
        then: Decisions | None = None,
    ) -> Graph:
        """Record a call as a graph, or how it begins; the graphs share memory, as they run one after another."""
        torch = sys.modules["torch"]
        graph, pool = torch.cuda.CUDAGraph(), None if self._beginning is None else self._beginning.graph.pool()
        # Other threads may go on meanwhile, with whatever they do on their streams.
        with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
            result, begins = self._noted(lambda: first(*self._given), begun)
            result, ends = self._noted(lambda: result if second is None else second(result), then or Decisions())
            if begun.size or ends.decisions:
                self._side.wait_stream(self._aside)
        return Graph(graph, result, begins, ends)

    def _noted(self, call: Callable[[], Any], decisions: Decisions) -> tuple[Any, Numbers]:
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
        return result, Numbers(tuple(decisions.made), taken, numbers, there, within)


def _event(torch: Any) -> tuple[Any, bool]:
    """Return an event, and whether a graph may record it for the host."""
    try:
        return torch.cuda.Event(external=True), True
    except TypeError:
        return torch.cuda.Event(), False
