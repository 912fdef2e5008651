"""Several devices: each packs all columns, and takes its share of the tasks (:mod:`.tasks`).

A backend that reads nothing back while it sums (the feature ``"pairs"``) is called from one thread, which goes round
the devices; any other from a thread for every device. Copies hardly matter: n points travel for n² pairs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..arrays import convert
from ..engine.columns import PackedColumns
from ..engine.devices import memory_errors
from ..engine.groups import GroupedColumns
from ..engine.merge import concatenate, each
from ..engine.repeats import Merged, pack
from ..engine.threads import map_threads
from ..protocol import Backend, BackendInfo, Columns, Partial, Problem, with_fields
from .ranks import OnRanks, Ranks
from .tasks import Range, dealt, joined, run, shares, tasks_of


class OnDevices:
    """The columns of one reduction on several devices; rows, columns and results are on the first.

    Without ``"grad"``; other arguments as of :class:`PackedColumns`.
    """

    def __init__(
        self, devices: Sequence[str], backend: Backend, info: BackendInfo, problem: Problem, columns: Columns,
        shared: bool = False,
    ) -> None:  # fmt: skip
        self._devices, self._info = tuple(devices), info

        def packed(k: int, there: Columns) -> PackedColumns:
            return PackedColumns(backend, info, with_fields(problem, device=self._devices[k]), there, shared)

        arrays, ordered = (columns.points, columns.log_weights), columns.ordered
        there = [(k, Columns(*(self._sent(x, k) for x in arrays), ordered=ordered)) for k in range(len(devices))]
        self._packed: list[PackedColumns] = self._at_once(packed, there)

    def reduce(self, queries: Any = None, *, some: Range | None = None, **known: Any) -> tuple[Partial, int]:
        """As :meth:`PackedColumns.reduce`."""
        if queries is not None:
            return self._queries(queries, **known)
        tasks = tasks_of(self._packed[0], len(self._devices), some)
        place = {i: k for k, mine in enumerate(dealt(tasks, len(self._devices))) for i in mine}
        done = self._at_once(lambda k, task: run(self._packed[k], task), [(place[i], t) for i, t in enumerate(tasks)])
        results = [[self._home(partial) for partial in results] for results, _ in done]
        return joined(self._packed[0], tasks, results), max(apart for _, apart in done)

    def _queries(self, queries: Any, distances: Any = None, extent: float | None = None) -> tuple[Partial, int]:
        given = []
        for k, (start, stop) in enumerate(shares(queries.shape[0], len(self._devices))):
            radii = None if distances is None else self._sent(distances[start:stop], k)
            given.append((k, self._sent(queries[start:stop, :], k), radii))
        done = self._at_once(lambda k, x, radii: self._packed[k].reduce(x, distances=radii, extent=extent), given)
        apart = [number for _, number in done if number]  # each counts the columns' outliers
        twice = max(0, len(apart) - 1) * self._packed[0].far.n
        return concatenate([self._home(partial) for partial, _ in done]), sum(apart) - twice

    def _home(self, partial: Partial) -> Partial:
        return each(partial, lambda x: self._sent(x, 0))

    def _sent(self, x: Any, k: int) -> Any:
        """Bring an array to a device; the calling thread's streams on both devices wait for each other."""
        with memory_errors():
            return convert(x, self._info.arrays, self._devices[k])

    def _at_once(self, task: Any, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return ``task(*arguments)`` for each, on the calling thread's stream of the device that it begins with."""
        found: list[Any] = [None] * len(given)
        mine = [[i for i, arguments in enumerate(given) if arguments[0] == k] for k in range(len(self._devices))]
        tensors = self._info.arrays == "torch"
        cuda: Any = sys.modules["torch"].cuda if tensors else None
        streams = [cuda.current_stream(x) if tensors and x.startswith("cuda") else None for x in self._devices]

        def work(some: Sequence[int]) -> None:
            stream = streams[given[some[0]][0]]
            with np.errstate(all="ignore"), nullcontext() if stream is None else cuda.stream(stream):
                for i in some:
                    found[i] = task(*given[i])

        turns = [[i] for turn in itertools.zip_longest(*mine) for i in turn if i is not None]
        alone = "pairs" in self._info.features  # two threads that launch take twice as long as one
        map_threads(work, turns if alone else list(filter(None, mine)), 1 if alone else len(mine))
        return found


Reducer = PackedColumns | Merged | GroupedColumns | OnDevices | OnRanks


def pack_on(where: Ranks | tuple[str, ...], *columns: Any, **how: Any) -> Reducer:
    """Return columns ready for rows, on several devices or ranks, else on one; arguments as of PackedColumns."""
    if not isinstance(where, tuple):
        return where.pack(*columns, **how)
    return OnDevices(where, *columns, **how) if where else pack(*columns, **how)
