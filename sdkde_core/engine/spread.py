"""One reduction over fixed columns on several devices: each has all columns and takes some of the rows.

The work per byte is so large that copies hardly matter: n² pairs for n points that travel. So every device packs all
columns for itself, rows are shared out in multiples of :data:`QUANTUM`, and results are joined in the order of the
rows. Of the points themselves blocks of pairs are dealt out instead, where the backend takes each pair once for both
of its points (:mod:`.dealing`). For a backend with the feature ``"range"`` a row has the same bits on however many
devices of one model, one of them included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from typing import Protocol as TypingProtocol

import numpy as np

from ..arrays import convert
from ..protocol import Backend, BackendInfo, Columns, Partial, Problem, with_fields
from .columns import PackedColumns, Whole
from .dealing import Block, blocks, dealt, merged, shares
from .devices import memory_errors
from .merge import concatenate, each
from .outliers import radii
from .threads import map_threads

__all__ = ["Group", "Reducer", "Spread", "pack_on"]


class Reducer(TypingProtocol):
    """Columns ready for rows, wherever they are."""

    @property
    def reduce(self) -> Callable[..., tuple[Partial, int]]:
        """As :meth:`PackedColumns.reduce`."""


class Group(TypingProtocol):
    """Processes that share the rows; see :mod:`sdkde_core.engine.ranks`."""

    def pack(
        self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
    ) -> Reducer:
        """Return the columns ready for rows."""


def pack_on(
    where: tuple[str, ...] | Group,
    backend: Backend,
    info: BackendInfo,
    problem: Problem,
    columns: Columns,
    shared: bool = False,
) -> Reducer:
    """Return the columns ready for rows: on several devices or in several processes, else on the problem's device."""
    if not isinstance(where, tuple):
        return where.pack(backend, info, problem, columns, shared)
    if where:
        return Spread(where, backend, info, problem, columns, shared)
    return PackedColumns(backend, info, problem, columns, shared)


class Spread:
    """The columns of one reduction on several devices.

    Parameters
    ----------
    devices : sequence of str
        Results return to the first, where columns and rows are.
    backend, info, problem, columns, shared
        See :class:`~sdkde_core.engine.columns.PackedColumns`; without ``"exclude_self"`` and ``"grad"``.
    """

    def __init__(
        self,
        devices: Sequence[str],
        backend: Backend,
        info: BackendInfo,
        problem: Problem,
        columns: Columns,
        shared: bool = False,
    ) -> None:
        assert not {"exclude_self", "grad"} & problem.requires
        self._devices, self._info, self._problem = tuple(devices), info, problem
        self._n = columns.points.shape[0]

        def packed(k: int, points: Any, log_weights: Any) -> PackedColumns:
            there = with_fields(problem, device=self._devices[k])
            return PackedColumns(backend, info, there, Columns(points, log_weights), shared)

        given = [(k, self._sent(columns.points, k), self._sent(columns.log_weights, k)) for k in range(len(devices))]
        self._packed: list[PackedColumns] = self._at_once(packed, given)

    def reduce(
        self,
        queries: Any = None,
        *,
        some: tuple[int, int] | None = None,
        distances: Any = None,
        extent: float | None = None,
        whole: Whole | None = None,
    ) -> tuple[Partial, int]:
        """As :meth:`PackedColumns.reduce`."""
        if queries is None and some is None and self._packed[0].takes_pairs:
            return self._by_pairs(), self._packed[0].n_far
        extent = self._problem.extent if extent is None else extent
        first, last = (some or (0, self._n)) if queries is None else (0, queries.shape[0])
        # Two parts at least, so that on one device too the points are not taken as one whole, which has other bits.
        parts = [(first + a, first + b) for a, b in shares(last - first, max(2, len(self._devices)))]
        if queries is not None:
            distances = radii(queries) if distances is None else distances
            whole = whole or self._packed[0].for_others.whole(distances, extent)

        def part(k: int, start: int, stop: int, rows: Any, radius: Any) -> tuple[Partial, int]:
            here = self._packed[k]
            if rows is None:
                return here.reduce(some=(start, stop), extent=extent)
            return here.for_others.reduce(rows, distances=radius, extent=extent, whole=whole)

        given = []
        for i, (start, stop) in enumerate(parts):
            k, rows = i % len(self._devices), None
            if queries is not None:
                rows, radius = self._sent(queries[start:stop, :], k), self._sent(distances[start:stop], k)
            given.append((k, start, stop, rows, None if rows is None else radius))
        found = self._at_once(part, given)
        with memory_errors():
            results = [self._home(partial) for partial, _ in found]
        apart = max(each_apart for _, each_apart in found)
        if apart and whole is not None:
            apart = whole.far + self._packed[0].for_others.n_far
        return concatenate(results), apart

    def _by_pairs(self) -> Partial:
        """All points as rows, each pair of near ones once; what the far ones are to all, by ranges of rows."""
        first = self._packed[0]
        ranges = blocks(first.n_near)
        tasks = [(k, block) for k, mine in enumerate(dealt(ranges, len(self._devices))) for block in mine]

        def both(k: int, block: Block) -> tuple[Partial, Partial]:
            return self._packed[k].reduce_pairs(ranges[block[0]], ranges[block[1]])

        found = {}
        with memory_errors():
            for (_, (i, j)), sides in zip(tasks, self._at_once(both, tasks)):
                for place, side in (((i, j), sides[0]), ((j, i), sides[1])):
                    found[place] = self._home(side)
            return first.join_pairs(merged(found, len(ranges)), self._beside(*first.beside_pairs))

    def _beside(self, first: int, last: int) -> Partial | None:
        """What blocks of pairs leave out; None where that is nothing."""
        if first == last:
            return None
        # Cut by their number alone, and not by the devices: exact sums may have other bits in a part of another size.
        given = [(i % len(self._devices), first + a, first + b) for i, (a, b) in enumerate(blocks(last - first))]
        found = self._at_once(lambda k, start, stop: self._packed[k].reduce_beside(start, stop), given)
        return concatenate([self._home(part) for part in found])

    def _home(self, partial: Partial) -> Partial:
        """Bring sums to the first device."""
        return each(partial, lambda x: convert(x, self._info.arrays, self._problem.device))

    def _sent(self, x: Any, k: int) -> Any:
        """Bring an array to a device; the calling thread's streams on both devices wait for each other."""
        with memory_errors():
            return convert(x, self._info.arrays, self._devices[k])

    def _at_once(self, task: Any, given: list[tuple[Any, ...]]) -> list[Any]:
        """Return ``task(*arguments)`` for each, the first argument being the device's number; a thread a device.

        A thread takes its device's tasks in order, on the stream that the calling thread has there.
        """
        mine = [[a for a in given if a[0] == k] for k in range(len(self._devices))]
        tensors = self._info.arrays == "torch"
        streams = [_stream(device) if tensors else None for device in self._devices]

        def work(k: int) -> list[Any]:
            with np.errstate(all="ignore"), _on(streams[k]):
                return [task(*arguments) for arguments in mine[k]]

        busy = [k for k in range(len(self._devices)) if mine[k]]
        done = dict(zip(busy, map(iter, map_threads(work, busy, len(busy)))))
        return [next(done[arguments[0]]) for arguments in given]


def _stream(device: str) -> Any:
    """The calling thread's current stream on a CUDA device; None elsewhere."""
    return sys.modules["torch"].cuda.current_stream(device) if device.startswith("cuda") else None


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Work on a stream and its device; None: where the thread is."""
    if stream is None:
        yield
    else:
        with sys.modules["torch"].cuda.stream(stream):
            yield
