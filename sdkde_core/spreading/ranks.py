"""The processes of a torch.distributed group: what they send one another, and one reduction among them.

Every process has all columns. The tasks whose rows are the points are shared out (:mod:`.tasks`), and each process gets
the results of all; queries are each process's own.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..engine.columns import PackedColumns
from ..engine.merge import concatenate, each
from ..protocol import Backend, BackendInfo, Columns, Partial, Problem
from .tasks import Range, dealt, joined, run, tasks_of


class PeerFailed(RuntimeError):
    """Another process of the group has failed; the message says which, and why."""


class Ranks:
    """The processes of a torch.distributed group; None: all processes. They must ask for the same, in one order."""

    def __init__(self, group: Any = None) -> None:
        dist = sys.modules["torch"].distributed
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"group has no rank {dist.get_rank()}, which is this process; call from its ranks only")
        self._on_cards = "nccl" in str(dist.get_backend(group))

    def gathered(self, what: str, value: Any) -> list[Any]:
        """Return the value that each process has at this point, by rank; ValueError if others are at another point."""
        if self.size == 1:  # nobody has to be asked: with NCCL that takes half a millisecond
            return [value]
        values: list[Any] = [None] * self.size
        sys.modules["torch"].distributed.all_gather_object(values, (what, value), group=self.group)
        for rank, (at, other) in enumerate(values):
            if at == "a failure" and rank != self.rank:
                raise PeerFailed(f"rank {rank} failed: {other}")
        for rank, (at, _) in enumerate(values):
            if at != values[0][0]:
                raise ValueError(f"rank {rank} has come to {at}, rank 0 to {values[0][0]}; all ranks must call alike")
        return [value for _, value in values]

    def agreed(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError unless all processes have the same values, by name.

        With NCCL every question takes half a millisecond: so all that is known at one point is asked at once.
        """
        found = self.gathered(", ".join(values), dict(values))
        for rank, other in enumerate(found):
            for what, value in other.items():
                if value != (first := found[0][what]):
                    raise ValueError(f"rank {rank} has {what} {value}, rank 0 has {first}; pass the same on all")

    def pack(self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool) -> OnRanks:
        asked = str((problem.reduction, problem.n, problem.d, problem.precision, problem.extent))
        self.agreed({"the backend": info.name, "the problem": asked})
        return OnRanks(self, PackedColumns(backend, info, problem, columns, shared))

    def fail(self, error: BaseException) -> None:
        """Tell the others, if they still listen, that this process has failed; they raise :class:`PeerFailed`."""
        with suppress(Exception):
            self.gathered("a failure", f"{type(error).__name__}: {error}")

    def joined(self, part: Any, counts: Sequence[int] | None = None) -> Any:
        """Return the parts of all processes (n_rank, …), joined along the first axis by rank: an array like theirs.

        ``counts``: how many rows each has, where that is known.
        """
        torch = sys.modules["torch"]
        counts = self.gathered("an array", part.shape[0]) if counts is None else counts
        host = isinstance(part, np.ndarray)
        mine = torch.from_numpy(np.ascontiguousarray(part)) if host else part.contiguous()
        home = mine.device
        place = torch.device("cuda", torch.cuda.current_device()) if self._on_cards else torch.device("cpu")
        place = home if home.type == place.type else place
        whole = torch.empty((sum(counts), *mine.shape[1:]), dtype=mine.dtype, device=place)
        self.gathered("memory for it", None)  # one that has none says so before the others send
        ends = np.cumsum([0, *counts])
        whole[ends[self.rank] : ends[self.rank + 1]] = mine
        waiting, dist = [], torch.distributed
        for rank in filter(counts.__getitem__, range(self.size)):
            source = rank if self.group is None else dist.get_global_rank(self.group, rank)
            own = whole[ends[rank] : ends[rank + 1]]
            waiting.append(dist.broadcast(own, source, group=self.group, async_op=True))
        for one in waiting:
            one.wait()
        return whole.to(home).numpy() if host else whole.to(home)


class OnRanks:
    """The columns of one reduction, all of them in every process."""

    def __init__(self, ranks: Ranks, packed: PackedColumns) -> None:
        self._ranks, self._packed = ranks, packed

    def reduce(self, queries: Any = None, *, some: Range | None = None, **known: Any) -> tuple[Partial, int]:
        """As :meth:`PackedColumns.reduce`; queries are this process's own, the points are shared out."""
        if queries is not None:
            return self._packed.reduce(queries, **known)
        size, me = self._ranks.size, self._ranks.rank
        tasks = tasks_of(self._packed, size, some)
        places = dealt(tasks, size)
        # A process without a task runs the first one and sends none of its rows: all processes must take part.
        done = [run(self._packed, tasks[i]) for i in places[me] or [0]]
        results = concatenate([partial for partials, _ in done for partial in partials])
        rows = slice(0, None if places[me] else 0)
        counts = [sum(b - a for i in place for a, b in tasks[i].results) for place in places]
        whole, start = each(results, lambda x: self._ranks.joined(x[rows], counts)), 0
        found: list[list[Partial]] = [[] for _ in tasks]
        for i in itertools.chain(*places):
            for first, last in tasks[i].results:
                found[i].append(each(whole, operator.itemgetter(slice(start, start + last - first))))
                start += last - first
        return joined(self._packed, tasks, found), max(apart for _, apart in done)
