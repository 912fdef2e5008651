"""How one reduction is dealt out among devices or processes: ranges of rows, or blocks of pairs of the points.

φ_ij = φ_ji, and a backend with the feature ``"pairs"`` may compute it once for both points. Then the points are cut
into blocks, and each pair of blocks I ≤ J is one task, whose two sides are sums of the rows of I and of those of J. How
the points are cut follows from their number alone, and a row's sums are merged in the order of the blocks: so the bits
do not depend on who did what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..protocol import QUANTUM, Partial
from .merge import merge

__all__ = ["Block", "Range", "blocks", "dealt", "merged", "shares"]

Range = tuple[int, int]

#: Two blocks of the points, by number, the first not after the second.
Block = tuple[int, int]

#: Blocks that the points are cut into, and twice that for many points. Every row has a partial sum for each. With eight
#: there are 28 tasks and eight of half the size: as much for each of two, four or eight devices.
BLOCKS, MANY = 8, 1 << 21


def shares(m: int, parts: int) -> list[Range]:
    """Return the rows of up to so many parts, as even as multiples of :data:`QUANTUM` are."""
    quanta = -(-m // QUANTUM)
    ends = [min(m, QUANTUM * (quanta * k // parts)) for k in range(parts + 1)]
    return [(start, stop) for start, stop in pairwise(ends) if stop > start]


def blocks(n: int) -> list[Range]:
    """Return what n points are cut into."""
    return shares(n, BLOCKS if n < MANY else 2 * BLOCKS)


def dealt(ranges: Sequence[Range], parts: int) -> list[list[Block]]:
    """Return the tasks of every part, as even as may be: the largest task first, to whoever has least."""
    sizes = [stop - start for start, stop in ranges]
    work = {(i, j): sizes[i] * sizes[j] * (1.0 if i < j else 0.5) for j in range(len(sizes)) for i in range(j + 1)}
    tasks: list[list[Block]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for task in sorted(work, key=lambda t: (-work[t], t)):
        least = loads.index(min(loads))
        tasks[least].append(task)
        loads[least] += work[task]
    return tasks


def merged(found: Mapping[Block, Partial], count: int) -> list[Partial]:
    """Return every block's sums, ``found[i, j]`` being those of the rows of block i over the columns of block j."""
    return [merge([found[i, j] for j in range(count)]) for i in range(count)]
