"""The tasks of a reduction: blocks of rows over blocks of columns, and how their results are joined.

Which tasks there are follows from the numbers of rows and columns, and results are joined in the order of the columns
and of the rows: so the bits do not depend on who did what. An executor only decides where tasks run.

φ_ij = φ_ji, and a backend with the feature ``"pairs"`` may compute it once for both points. Then the points are cut
into blocks, and each pair of blocks I ≤ J is one task with two results: the rows of I over J, and those of J over I.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from ..engine.columns import PackedColumns, Range
from ..engine.merge import concatenate, merge
from ..protocol import Partial


class Task(NamedTuple):
    rows: Range
    columns: Range
    # "pairs": rows and columns are near points, and the columns' sums over the rows are a second result. "apart": sums
    # with outliers, see PackedColumns.reduce_apart. In both kinds near points are numbered first.
    kind: str = "rows"

    @property
    def work(self) -> float:
        pairs = (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])
        return 0.5 * pairs if self.kind == "pairs" and self.rows == self.columns else float(pairs)

    @property
    def results(self) -> tuple[Range, ...]:
        return (self.rows, self.columns) if self.kind == "pairs" else (self.rows,)


def cut(length: int, width: int) -> list[Range]:
    """Return consecutive ranges of ``width``; the last one may be shorter."""
    return [(start, min(start + width, length)) for start in range(0, length, width)]


def shares(m: int, parts: int) -> list[Range]:
    """Return up to ``parts`` ranges of m rows, as even as multiples of 1024 can be."""
    quanta = -(-m // 1024)
    ends = [min(m, 1024 * (quanta * k // parts)) for k in range(parts + 1)]
    return [(start, stop) for start, stop in pairwise(ends) if stop > start]


def tasks_of(packed: PackedColumns, parts: int, some: Range | None = None) -> list[Task]:
    """Return the tasks whose rows are the points, or a range of them, for several devices or processes.

    Four blocks of points make six tasks and four of half the size: equal work for each of two or four devices. For
    other numbers of devices, and where a task takes long, there are eight blocks; for many points sixteen, as the
    memory for partial sums is in proportion to a block.
    """
    n = packed.n
    if some is not None or not packed.takes_pairs:
        first, last = some or (0, n)
        return [Task((first + a, first + b), (0, n)) for a, b in shares(last - first, parts)]
    near = n - packed.far.n
    few = parts in (2, 4) and near < 1 << 19  # to launch a task takes the host half a millisecond
    blocks = shares(near, 4 if few else 8 if near < 1 << 21 else 16)
    tasks = [Task(rows, columns, "pairs") for j, columns in enumerate(blocks) for rows in blocks[: j + 1]]
    tasks += [Task(rows, (near, n), "apart") for rows in blocks if not packed.far.negligible]
    return tasks + [Task((near + a, near + b), (0, n), "apart") for a, b in shares(n - near, 8)]


def run(packed: PackedColumns, task: Task) -> tuple[Sequence[Partial], int]:
    """Return the one or two results of a task, and the number of outliers that were summed apart."""
    if task.kind == "pairs":
        return packed.reduce_pairs(task.rows, task.columns), packed.far.n
    if task.kind == "apart":
        return [packed.reduce_apart(task.rows, task.columns)], packed.far.n
    partial, apart = packed.reduce(some=task.rows)
    return [partial], apart


def joined(packed: PackedColumns, tasks: Sequence[Task], results: Sequence[Sequence[Partial]]) -> Partial:
    """Return the sums of all rows, from the results of every task."""
    found: dict[Range, dict[Range, Partial]] = {}
    for task, sides in zip(tasks, results, strict=True):
        for here, there, side in zip(task.results, (task.columns, task.rows), sides):
            found.setdefault(here, {}).setdefault(there, side)
    parts = [[found[here][there] for there in sorted(found[here])] for here in sorted(found)]
    # Small blocks are merged four at a time, as merging one takes the host longer than the device.
    few = tasks[0].kind != "rows" and packed.n * parts[0][0].shift.shape[1] <= 1 << 22
    together = groupby(enumerate(parts), key=lambda x: (x[0] // (4 if few else 1), len(x[1])))
    whole = concatenate([merge(list(map(concatenate, zip(*(x for _, x in some))))) for _, some in together])
    return whole if tasks[0].kind == "rows" else packed.in_order(whole)


def dealt(tasks: Sequence[Task], parts: int) -> list[list[int]]:
    """Deal tasks' numbers out evenly: the largest task first, to the part with the least work."""
    mine: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for i in sorted(range(len(tasks)), key=lambda i: -tasks[i].work):
        least = loads.index(min(loads))
        mine[least].append(i)
        loads[least] += tasks[i].work
    return mine
