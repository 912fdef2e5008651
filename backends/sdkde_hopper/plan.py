"""The work of each program of the symmetric kernel, and the places of each row's partial sums.

The points are cut into blocks of :data:`ROWS` rows, and into supers of :data:`COLUMNS` columns; a program has the
columns of one super at a time. Super s meets its own blocks with every φ computed, and those of the supers after it,
half way round the circle, with every φ used twice. The programs run these units in the order of their columns, cut so
that all programs take equally long.

Partial sums take 20 to 30 KB a unit: so with many points each launch has some of the supers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import grids

#: Tiles of 64 columns to a super.
TILES = 16

#: Rows of a program, and columns of a super.
ROWS, COLUMNS = 256, 64 * TILES

#: Dimensions that ``mean_symmetric`` is compiled for, and bytes of shared memory of a program. The code says so where
#: that is another number.
MEAN_WIDTHS = (8, 16)
MEAN_SHARED = {("fast", 8): 149608, ("fast", 16): 178280, ("high", 8): 163944, ("high", 16): 184424}

#: Dimensions that the other kernels are compiled for; points of fewer are filled up with zeros.
WIDTHS = (16, 32, 48, 64)

#: The most tiles of columns that a program of ``log_sum`` sums in fp32: beside duplicates all additions round alike.
LONGEST = {"fast": 1024, "high": 32}

#: The most units of a launch; beyond a million points they grow with the points, as every launch adds up all sums so
#: far: four million points take 6.5 s instead of 7.4.
MOST_UNITS = 16384

Ints = NDArray[np.integer]

#: Which ``mean_symmetric``: the precision, and its dimensions.
Kind = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Tables:
    """Units and partial sums; blocks and supers count from the launch's first."""

    units: Ints  # (k, 4), {block, super, flags, slot}: see ``device/mean.cu``
    begins: Ints  # (programs + 1,), each program's first unit
    slots: int  # of columns' partial sums
    # Of blocks (blocks + 1,), where each one's units begin, and these units; of supers likewise, with slots.
    lists: tuple[Ints, Ints, Ints, Ints]


def launches(supers: int, programs: int, kind: Kind = ("fast", 16)) -> list[tuple[int, Tables]]:
    """Deal the units of all ``supers`` out to launches, and to programs of ``mean_symmetric``.

    Return for each launch its first super and its tables.
    """
    half = supers // 2
    most = MOST_UNITS * max(1, supers // 1024) // (COLUMNS // ROWS * (half + 1))  # supers of a launch
    found = []
    for start, stop in [(0, supers)] if supers <= most else [(0, half), (half, supers)]:
        size = -(-(stop - start) // -(-(stop - start) // max(1, most)))
        for first in range(start, stop, size):
            count = min(size, stop - first)
            # If the number of supers is even, those of the first half also meet the opposite one.
            longer = min(count, max(0, half - first)) if supers % 2 == 0 else 0
            found.append((first, _tables(supers, count, longer, programs, kind)))
    return found


@functools.lru_cache(maxsize=256)
def _tables(supers: int, count: int, longer: int, programs: int, kind: Kind) -> Tables:
    """Plan ``count`` supers; each of the first ``longer`` ones meets one super more."""
    per, met = COLUMNS // ROWS, np.full(count, 1 + (supers - 1) // 2)
    met[:longer] += 1
    own = np.repeat(np.arange(count), met * per)  # the super of every group of a block and a super
    within = np.concatenate([np.arange(k * per) for k in met])
    symmetric = (within >= per).astype(np.int64)
    block = (own * per + within) % (supers * per)
    return _deal(block, own, symmetric, supers * per, supers, programs, kind)


@functools.lru_cache(maxsize=64)
def rectangle(blocks: int, supers: int, programs: int, kind: Kind = ("fast", 16)) -> Tables:
    """Plan blocks of rows against supers of other points' columns, every φ used twice."""
    own = np.repeat(np.arange(supers), blocks)
    block = np.tile(np.arange(blocks), supers)
    return _deal(block, own, np.ones(len(own), np.int64), blocks, supers, programs, kind)


def _deal(block: Ints, own: Ints, symmetric: Ints, blocks: int, supers: int, programs: int, kind: Kind) -> Tables:
    """Deal out groups of a block and a super, in the order of the supers ``own``, to programs, by their cost."""
    quarters = TILES // 4  # the parts that a group may be cut into
    first = np.flatnonzero(np.diff(own)) + 1  # with the next super
    # Measured costs, in tiles whose φ is used twice: of a tile whose φ is used once, and of the beginning of a unit.
    # New columns cost 2.5.
    dense, unit = {("fast", 8): (0.75, 1.0), ("fast", 16): (0.63, 0.69)}.get(kind, (0.78, 0.7))
    cost = np.repeat(np.where(symmetric, 4.0, 4.0 * dense) + unit / quarters, quarters)
    cost[first * quarters] += 2.5
    total = np.concatenate([[0.0], np.cumsum(cost)])
    cuts = np.searchsorted(total, np.linspace(0.0, total[-1], programs + 1) - 1e-9)
    cuts[-1] = len(cost)
    begin = np.sort(np.concatenate([np.arange(0, len(cost), quarters), cuts[:-1]]))
    begin = begin[(begin < len(cost)) & (np.diff(begin, prepend=-1) > 0)]  # np.unique would import numpy.ma
    end = np.concatenate([begin[1:], [len(cost)]])
    group = begin // quarters
    program = np.searchsorted(cuts, begin, side="right")
    new = np.ones(len(begin), bool)
    new[1:] = (program[1:] != program[:-1]) | (own[group[1:]] != own[group[:-1]])
    place, most = np.arange(len(begin)), 128 if kind[0] == "fast" else 8
    # At most ``most`` units add to a program's fp32 sums of columns, as beside duplicates all additions round alike.
    new |= (place - np.maximum.accumulate(np.where(new, place, 0))) % most == 0
    last = np.concatenate([new[1:], [True]])
    flags = symmetric[group] | new * 2 | (begin % quarters * 4) << 8 | ((end - 1) % quarters * 4 + 4) << 16
    slot = np.cumsum(new) - 1
    units = np.stack([block[group], own[group], flags, slot], axis=1).astype(np.int32)
    rows = _lists(units[:, 0], np.arange(len(units)), blocks)
    columns = _lists(units[last, 1], units[last, 3], supers)
    return Tables(units, np.searchsorted(begin, cuts).astype(np.int32), int(slot[-1]) + 1, (*rows, *columns))


class Ring(NamedTuple):
    """Tiles of columns that a program holds at a time, and the bytes of its shared memory."""

    stages: int
    shared: int


def width(d: int, widths: Iterable[int] = WIDTHS) -> int:
    """Return the least of some widths, :data:`WIDTHS` or :data:`MEAN_WIDTHS`, that holds d dimensions."""
    return next(x for x in widths if x >= d)


#: Registers of a thread, by the program's warpgroups; one more warpgroup, which fetches, has 24.
REGISTERS = {2: 240, 3: 160, 4: 112}


def warpgroups(width: int, precision: str, mean: bool = True) -> int:
    """Return the groups of 64 rows that a program of ``mean_dense`` (else of ``log_sum``) has registers for."""
    if mean and precision == "high":
        return {16: 4, 32: 3}.get(width, 2)
    return 3 if width > 32 and (mean or precision == "high") else 4


def point_bytes(width: int, precision: str) -> int:
    """Return the bytes of a point in pieces, two or at "high" three, as a row or in a tile."""
    return (6 if precision == "high" else 4) * width + 32


def ring(width: int, precision: str, mean: bool, weighted: bool = False) -> Ring:
    """Return the ring of a program of ``mean_dense`` or ``log_sum``; with weights MEAN has two copies of a tile."""
    tile = 64 * point_bytes(width, precision) * (1 + (mean and weighted)) + 256 * (not mean)
    stages = min(8, 196_608 // tile) if mean else min(12, 131_072 // tile)
    return Ring(stages, stages * (tile + 16) + 8 * (not mean))


def parts(blocks: int, tiles: int, programs: int) -> tuple[int, int]:
    """Return the number of parts of the columns, where every φ is for its row alone, and the tiles of a part.

    A program has a multiprocessor to itself, and few programs wait for one, as every part has partial sums. A program
    begins and ends in the time of about two tiles.
    """
    most = max(1, min(tiles // 8, -(-8 * programs // blocks)))
    return grids.parts(blocks, tiles, programs, most, begins=2, together=math.inf)


def _lists(keys: Ints, values: Ints, size: int) -> tuple[Ints, Ints]:
    """Group values by key, in their order: where each key's values begin, and all values."""
    begins = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=size))])
    return begins.astype(np.int32), values[np.argsort(keys, kind="stable")].astype(np.int32)
