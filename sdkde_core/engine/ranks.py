"""The processes of a torch.distributed group: what they tell one another, and one reduction among them.

Every process has all columns. The points as rows are shared out as among several devices (:mod:`.spread`), in ranges or
in blocks of pairs, and each process learns the results of all; other rows are each process's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..protocol import Backend, BackendInfo, Columns, Partial, Problem
from .columns import PackedColumns, Whole
from .dealing import blocks, dealt, merged, shares
from .merge import concatenate, each
from .outliers import radii

__all__ = ["AmongRanks", "PeerFailed", "Ranks"]


class PeerFailed(RuntimeError):
    """Another process of the group has failed; the message says which, and why."""


#: What a process has come to instead, when it has failed.
_FAILED = "a failure"


class Ranks:
    """The processes of a group.

    All must ask for the same, in the same order. One that fails says so with :meth:`fail`; the others then raise
    :class:`PeerFailed` the next time that they tell one another something.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        None: all processes.

    Raises
    ------
    ValueError
        This process is not one of them.
    """

    def __init__(self, group: Any = None) -> None:
        dist = sys.modules["torch"].distributed
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"group has no rank {dist.get_rank()}, which is this process; call from its ranks only")
        self._on_cards = "nccl" in str(dist.get_backend(group))

    def told(self, what: str, value: Any) -> list[Any]:
        """Return what each process says at this point, by rank; a value of any kind that pickles.

        Raises
        ------
        PeerFailed
        ValueError
            Others have come to another point.
        """
        values: list[Any] = [None] * self.size
        sys.modules["torch"].distributed.all_gather_object(values, (what, value), group=self.group)
        for rank, (at, other) in enumerate(values):
            if at == _FAILED and rank != self.rank:
                raise PeerFailed(f"rank {rank} failed: {other}")
        for rank, (at, _) in enumerate(values):
            if at != values[0][0]:
                raise ValueError(f"rank {rank} has come to {at}, rank 0 to {values[0][0]}; all ranks must call alike")
        return [value for _, value in values]

    def agreed(self, what: str, value: Any) -> None:
        """Check that all processes say the same.

        Raises
        ------
        ValueError
            They do not.
        """
        values = self.told(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(f"rank {rank} has {what} {other}, rank 0 has {values[0]}; pass the same on all")

    def pack(
        self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
    ) -> AmongRanks:
        """Return the columns ready for rows."""
        return AmongRanks(self, backend, info, problem, columns, shared)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process has failed, if they still listen: others may have failed too."""
        with suppress(Exception):
            self.told(_FAILED, f"{type(error).__name__}: {error}")

    def joined(self, part: Any) -> Any:
        """Return the parts of all processes (n_rank, …), joined along the first axis by rank: an array like theirs."""
        torch = sys.modules["torch"]
        counts = self.told("an array", part.shape[0])
        host = isinstance(part, np.ndarray)
        mine = torch.from_numpy(np.ascontiguousarray(part)) if host else part.contiguous()
        home, whole = mine.device, torch.empty((sum(counts), *mine.shape[1:]), dtype=mine.dtype)
        place = torch.device("cuda", torch.cuda.current_device()) if self._on_cards else torch.device("cpu")
        whole = whole.to(home if home.type == place.type else place)
        self.told("memory for it", None)  # one that has none says so before the others send
        ends = np.cumsum([0, *counts])
        whole[ends[self.rank] : ends[self.rank + 1]] = mine
        waiting = []
        for rank in range(self.size):
            if counts[rank]:
                source = rank if self.group is None else torch.distributed.get_global_rank(self.group, rank)
                own = whole[ends[rank] : ends[rank + 1]]
                waiting.append(torch.distributed.broadcast(own, source, group=self.group, async_op=True))
        for one in waiting:
            one.wait()
        whole = whole.to(home)
        return whole.numpy() if host else whole


class AmongRanks:
    """The columns of one reduction, all of them in every process.

    Parameters
    ----------
    ranks : Ranks
    backend, info, problem, columns, shared
        See :class:`~sdkde_core.engine.columns.PackedColumns`.
    """

    def __init__(
        self,
        ranks: Ranks,
        backend: Backend,
        info: BackendInfo,
        problem: Problem,
        columns: Columns,
        shared: bool = False,
    ) -> None:
        ranks.agreed("the backend", info.name)
        ranks.agreed("the problem", str((problem.reduction, problem.n, problem.d, problem.precision, problem.extent)))
        self._ranks, self._problem, self._n = ranks, problem, columns.points.shape[0]
        self._packed = PackedColumns(backend, info, problem, columns, shared)

    def reduce(self, queries: Any = None, *, distances: Any = None, extent: float | None = None) -> tuple[Partial, int]:
        """As :meth:`PackedColumns.reduce`; the queries are this process's own, all have some."""
        extent = self._problem.extent if extent is None else extent
        if queries is None and self._packed.takes_pairs:
            return self._by_pairs(), self._packed.n_far
        return self._own(extent) if queries is None else self._queries(queries, distances, extent)

    def _own(self, extent: float) -> tuple[Partial, int]:
        """All points as rows: a share in each process."""
        # Two parts at least, as among devices, so that one process has the same bits as several.
        parts = shares(self._n, max(2, self._ranks.size))
        apart = [0]

        def task(part: tuple[int, int]) -> Partial:
            partial, far = self._packed.reduce(some=part, extent=extent)
            apart.append(far)
            return partial

        return self._dealt(parts, task), max(apart)

    def _dealt(self, parts: Sequence[tuple[int, int]], task: Callable[[tuple[int, int]], Partial]) -> Partial:
        """The sums of consecutive parts of rows, each part a task for one of the processes."""
        size, places, start = self._ranks.size, {}, 0
        mine = [part for i, part in enumerate(parts) if i % size == self._ranks.rank]
        first = parts[0][0]
        done = [task(part) for part in mine or [(first, first + 1)]]
        rows = slice(0, None if mine else 0)  # a process without a task adds nothing
        whole = each(concatenate(done), lambda x: self._ranks.joined(x[rows]))  # by process
        for rank in range(size):
            for i in range(rank, len(parts), size):
                places[i] = start, start + parts[i][1] - parts[i][0]
                start = places[i][1]
        return concatenate([each(whole, functools.partial(_between, *places[i])) for i in range(len(parts))])

    def _by_pairs(self) -> Partial:
        """All points as rows, each pair of near ones once, by one of the processes; the rest by ranges of rows."""
        ranges = blocks(self._packed.n_near)
        tasks = dealt(ranges, self._ranks.size)
        sides = [
            side
            for i, j in tasks[self._ranks.rank] or [(0, 0)]
            for side in self._packed.reduce_pairs(ranges[i], ranges[j])
        ]
        rows = slice(0, None if tasks[self._ranks.rank] else 0)  # a process without a task adds nothing
        whole = each(concatenate(sides), lambda x: self._ranks.joined(x[rows]))
        found, start = {}, 0
        for i, j in (block for mine in tasks for block in mine):
            for place in ((i, j), (j, i)):
                stop = start + ranges[place[0]][1] - ranges[place[0]][0]
                found[place] = each(whole, functools.partial(_between, start, stop))
                start = stop
        return self._packed.join_pairs(merged(found, len(ranges)), self._beside(*self._packed.beside_pairs))

    def _beside(self, first: int, last: int) -> Partial | None:
        """What blocks of pairs leave out; None where that is nothing."""
        if first == last:
            return None
        parts = [(first + a, first + b) for a, b in blocks(last - first)]  # as among devices
        return self._dealt(parts, lambda part: self._packed.reduce_beside(*part))

    def _queries(self, queries: Any, distances: Any, extent: float) -> tuple[Partial, int]:
        distances = radii(queries) if distances is None else distances
        extent = max(self._ranks.told("an extent", extent))
        packed = self._packed.for_others
        each = self._ranks.told("outliers", tuple(packed.whole(distances, extent)))
        whole = Whole(*(sum(numbers) for numbers in zip(*each)))
        return packed.reduce(queries, distances=distances, extent=extent, whole=whole)


def _between(start: int, stop: int, x: Any) -> Any:
    return x[start:stop]
