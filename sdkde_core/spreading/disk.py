"""An estimate from disk: for each block of rows all shards are read in order, and what is done is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.forks import cached_property
from ..files import Source, Write
from ..protocol import Columns
from .checkpoint import Chunks, Scratch
from .tasks import Task


def resident_bytes() -> int:
    """Return the bytes of memory that this process has; 0 where that is not known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def resident_shards(plan: Any, allowed: int) -> int:
    """Return how many shards may stay in ``allowed`` bytes of memory; ValueError where not even the work fits."""
    d, here = plan.shape.d, resident_bytes()
    shard = 8 * plan.shape.shards[0][1] * (d + 1)  # the first, which begins at 0
    # Compiled code and threads; two shards read, as they come and whitened, packed, and temporaries; sums, twice.
    needed = 100 * 10**6 + 10 * shard + 8 * plan.rows * (6 * d + 8)
    if here + needed > allowed:
        had = f"{allowed / 1e6:.0f} MB, of which this process has {here / 1e6:.0f} MB already"
        work = f"the work on one shard takes {needed / 1e6:.0f} MB"
        raise ValueError(f"memory is {had}, and {work}; pass memory='{(here + needed) / 1e6 + 1:.0f} MB' or more")
    return (allowed - here - needed) // shard


@dataclass
class Job:
    """An estimate whose samples, queries and results are read and written by blocks."""

    plan: Any  # sdkde_core.estimator.blockwise.BlockPlan
    train: Source
    query: Source | None
    weights: Source | None
    log: bool
    shifts: Any  # Chunks or Scratch, of the samples; None where none moves
    results: Chunks | Scratch  # the densities; of debias the shifts
    resident: int  # how many shards stay in memory
    _kept: dict[tuple[int, int], Columns] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows to compute in all passes."""
        return sum(problem.m for problem in self.plan.problems[: self.plan.request.answering + 1])

    def run(self, advance: Callable[[int], None] | None = None) -> None:
        """Compute every block that is not there; ``advance`` is called with the number of rows of each that is done."""
        last = self.plan.request.answering
        for step in range(last + 1):
            parts = self.results if step == last else self.shifts
            for tasks in self.plan.tasks(step):
                start, stop = tasks[0].rows
                if not parts.has(start):
                    parts.write(start, self._block(step, tasks))
                if advance is not None:
                    advance(stop - start)

    def _block(self, step: int, tasks: list[Task]) -> Any:
        plan, answers = self.plan, step == self.plan.request.answering and not self.plan.debiased
        rows_of = self.query if answers and self.query is not None else self.train
        rows = plan.whitened(rows_of.at(*tasks[0].rows))
        shards = self._ahead(step, [task.columns for task in tasks])
        sums = plan.folded(plan.partial(step, plan.packed(step, shard), rows) for shard in shards)
        result = plan.density(sums, rows, self._guard, self.log) if answers else sums.shift
        for read in filter(None, (self.train, self.query, self.weights)):
            read.check()
        return result

    @cached_property
    def _step(self) -> Any:
        """By what the shifts are multiplied, for which all of them may have to be read."""
        plan, shards = self.plan, self.plan.shape.shards
        each = enumerate(self._ahead(0, shards))
        return plan.step(plan.products(shard, self.shifts.read(*shards[j])) for j, shard in each)

    @cached_property
    def _guard(self) -> Any:
        """The columns that guard the tails; None without a guard."""
        plan = self.plan
        shards = self._ahead(plan.request.answering, plan.shape.shards) if plan.request.guard else ()
        return plan.guard([plan.guarding(shard, j) for j, shard in enumerate(shards)])

    def _ahead(self, step: int, places: list[tuple[int, int]]) -> Iterator[Columns]:
        """Yield the columns of shards, while a thread reads the next one."""
        with ThreadPoolExecutor(1, "sdkde-reader") as reader:
            coming = reader.submit(self._shard, step, places[0])
            for following in [*places[1:], None]:
                columns = coming.result()
                if following is not None:
                    coming = reader.submit(self._shard, step, following)
                yield columns

    def _shard(self, step: int, where: tuple[int, int]) -> Columns:
        """The columns of a shard, which stay in memory if it is one of the first of its pass."""
        key = step, where[0]
        if key in self._kept:
            return self._kept[key]
        weights = None if self.weights is None else self.weights.at(*where)
        columns: Columns = self.plan.columns(self.train.at(*where), weights)
        if step:
            columns = self.plan.moved(columns, self.shifts.read(*where), self._step)
        self._kept = {k: v for k, v in self._kept.items() if k[0] == step}
        if len(self._kept) < self.resident:
            self._kept[key] = columns
        return columns

    def deliver(self, write: Write) -> int:
        """Write the results by blocks; return how many rows have no log, as the Laplace estimate is negative there."""
        plan, undefined = self.plan, 0
        for tasks in plan.tasks(plan.request.answering):
            block = self.results.read(*tasks[0].rows)
            if plan.debiased:
                block = plan.unwhitened(self._shard(1, tasks[0].rows))
                self.train.check()
            write(block)
            undefined += plan.undefined(block, self.log)
        return undefined
