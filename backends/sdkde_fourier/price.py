"""What the two ways of summing cost, by Fourier modes and directly over neighbours.

On a CPU by finufft 2.5 and NumPy, on a device as matrix products and tiles in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sdkde_core.plugin import Processor, cpu_threads, processor, speedup, work_seconds
from sdkde_core.protocol import Problem, Reduction, Work

from . import bounds
from .around import Around, around, nats
from .duplicates import SHARE
from .memory import blocks_to_modes, fields_of

__all__ = [
    "BITS",
    "COLUMNS",
    "CPU",
    "DEVICE",
    "JUDGED",
    "LEADERS",
    "MOST_MODES",
    "PAIRS",
    "ROWS",
    "TOGETHER",
    "Ways",
    "box_seconds",
    "box_work",
    "by_looking",
    "by_modes",
    "by_neighbours",
    "by_pairs",
    "by_products",
    "by_tile_pairs",
    "by_tiles",
    "columns_met",
    "direct_seconds",
    "direct_work",
    "looks",
    "plus",
    "seconds",
    "times",
]

Array = NDArray[Any]

#: Most modes of a box: with finufft's grid, twice as fine per dimension, 1 GiB in three dimensions.
MOST_MODES = 1 << 23

#: Rows and columns of a tile, the bits of the curve's key and the tiles that all rows are compared with first; see
#: ``tiles.py``, which imports PyTorch.
ROWS, COLUMNS, BITS, LEADERS = 32, 256, 30, 2

#: There, at a time: pairs that are summed, pairs of tiles that are compared, and tiles of rows.
PAIRS, JUDGED, TOGETHER = 1 << 22, 1 << 22, 1 << 9

#: By dimensions, how much farther tiles reach than two cubes of their volumes would, and the width of a cell of the
#: curve over the extent, as tiles are never smaller. Both fitted to counts of tiles; see benchmarks/notes/fourier.md.
WIDER, CELL = {1: 2.6, 2: 2.5, 3: 1.9}, 0.45


def by_modes(problem: Problem, modes: float, epsilon: float) -> Work:
    """Return the Work of the transforms: spreading and interpolation over width^d grid points, and the FFTs.

    Of few points the way to modes takes one thread. Sorting and double precision are in the figures.
    """
    d, width = problem.d, math.ceil(math.log10(1.0 / epsilon)) + 2
    backs = fields_of(problem)
    stencil = float(width**d)
    grid = modes * bounds.requested(epsilon, d)[0] ** d
    threads = cpu_threads()
    idle = speedup(threads) / speedup(blocks_to_modes(problem.n, (max(1, int(modes)),), threads))
    spread = idle * problem.n * (250.0 + 75.0 * d + 10.0 * stencil)
    interpolation = problem.m * backs * (300.0 + 150.0 * d + 8.0 * stencil)
    transforms = grid * (1 + backs) * (20.0 + 6.0 * math.log2(max(grid, 2.0)))
    return Work(
        scalar_flops=spread + interpolation + transforms,
        bytes=16.0 * grid * 6.0 * (1 + backs) + 64.0 * (problem.m + problem.n),
        launches=50 * (1 + backs),
    )


def by_looking(problem: Problem, way: Work) -> Work:
    """Return the Work of finding out which way is faster, from some of the columns, on one thread.

    A box takes 40 ns a column and dimension, and neighbourhoods 1 µs a column, if it :func:`looks` at these.
    """
    box, around = 160.0 * problem.d * min(problem.n, 1 << 16), 4000.0 * min(problem.n, 1 << 13)
    return Work(scalar_flops=speedup(cpu_threads()) * (box + around * looks(problem, seconds(way))), launches=60)


def looks(problem: Problem, modes: float) -> bool:
    """Whether the backend looks, on a CPU, if direct sums are faster than modes that take so many seconds."""
    return modes > seconds(by_neighbours(problem, problem.m, 1.0))


def by_neighbours(problem: Problem, rows: float, neighbours: float, columns: float | None = None) -> Work:
    """Return the Work of summing ``rows`` directly, each over ``neighbours`` of the columns on average.

    Rows are shared out over threads, of which more than three wait for the interpreter's lock; one builds the tree.
    """
    columns, threads = problem.n if columns is None else columns, cpu_threads()
    sort = columns * (60.0 if problem.d == 1 else 300.0) * math.log2(columns + 1.0)
    sort *= speedup(threads) / speedup(min(threads, 2))  # as timed beside one other thread
    pairs = by_pairs(problem, rows, rows * min(neighbours, columns))
    return plus(pairs, Work(scalar_flops=sort * (rows > 0), launches=100))


def by_pairs(problem: Problem, rows: float, pairs: float) -> Work:
    """Return the Work of finding the neighbours of rows, and of summing over so many in all, once the tree is there.

    In one dimension neighbours stand in order, and are not searched for.
    """
    threads = cpu_threads()
    idle = speedup(threads) / speedup(min(threads, 3))
    pair, row = (350.0, 6e3) if problem.d == 1 else (600.0 + 150.0 * problem.d, 5e4)
    return Work(
        scalar_flops=idle * (pair * pairs + row * rows),
        exps=idle * 6.0 * pairs,
        launches=0,
    )


def by_products(problem: Problem, shape: tuple[float, ...]) -> Work:
    """Return the Work of transforms as products of cosines and sines, in float64; see ``separable.py``.

    A cosine and its angle are some forty operations, and are written and read about three times; products as narrow as
    these run at less than half of the peak. What PyTorch does on the host for a pass takes some milliseconds.
    """
    d, n, m = problem.d, problem.n, problem.m
    backs = {Reduction.LOG_SUM: 1, Reduction.MEAN: max(2, d), Reduction.LAPLACE: 2}[problem.reduction]
    sizes = [2.0 * math.sqrt(2.0 * shape[0])] * 2 if d == 1 else list(shape)
    functions, modes = sum(sizes), math.prod(sizes)
    rows = n + m
    between = modes / sizes[-1]  # numbers a point and field between two products
    return Work(
        matrix_flops={"float64": 5.0 * modes * (n + backs * m) + 40.0 * functions * rows},
        scalar_flops=20.0 * functions * rows,
        bytes=48.0 * functions * rows + 16.0 * between * (backs * m + (n if d == 3 else 0)),
        launches=int(1000 + 20.0 * rows * (functions + (between if d == 3 else 0)) / (1 << 25)),
    )


def columns_met(problem: Problem, rows: float, neighbours: float, columns: float) -> float:
    """Return over how many columns a row is summed in tiles, on average, if so many of them are its neighbours.

    A tile of rows takes the tiles of columns that come within reach of its box: on average the columns in a box as wide
    as both tiles' and the reach. The unit here is the radius of a ball that holds one column. Then a row reaches as far
    as neighbours^(1/d), a tile of k columns is about k^(1/d) wide, and one of rows as wide as the columns among them
    make it. Boxes are wider than that, since the curve jumps, and they reach farther, since a tile's bound is that of
    its loneliest row; see :data:`WIDER`.
    """
    d = problem.d
    reach = neighbours ** (1.0 / d)
    bandwidth = reach / math.sqrt(2.0 * nats(problem, problem.n))
    cell = min(CELL * problem.extent / 2 ** (BITS // d) * bandwidth, columns)
    among = max(0.0, min(rows, ROWS) - 1.0) * columns / max(rows, 1.0)  # columns among a tile's rows
    width = max(COLUMNS ** (1.0 / d), cell) + max(among ** (1.0 / d), cell)
    return min(columns, (WIDER[d] * width + reach) ** d)


def by_tiles(problem: Problem, rows: float, neighbours: float, columns: float | None = None) -> Work:
    """Return the Work of summing ``rows`` over tiles that matter, each over ``neighbours`` columns on average.

    Every operation of a pair reads and writes float64 in memory. Points are sorted before, tiles are judged and sorted,
    a block of rows at a time, and every row is compared with the leading tiles.
    """
    columns = problem.n if columns is None else columns
    met = columns_met(problem, rows, neighbours, columns) + LEADERS * COLUMNS
    judged = rows / ROWS * columns / COLUMNS
    blocks = max(rows / (ROWS * TOGETHER), judged / JUDGED)
    keyed = 450.0 if problem.d == 1 else 2900.0
    others = Work(
        bytes=(650.0 + 150.0 * problem.d) * judged + keyed * (columns + rows) * (rows > 0),
        launches=int((1400 + 350.0 * blocks) * (rows > 0)),
    )
    return plus(by_tile_pairs(problem, rows * met), others)


def by_tile_pairs(problem: Problem, pairs: float) -> Work:
    """Return the Work of summing over so many pairs in tiles, those that do not matter among them.

    Bytes and launches are as counted, 12 launches being those around the passes over a block of pairs.
    """
    passes = 3.0 * problem.d + (6.0 if problem.reduction is Reduction.LOG_SUM else 10.0)
    return Work(
        scalar_flops=4.0 * passes * pairs,
        exps=16.0 * pairs,
        bytes=16.0 * passes * pairs,
        launches=int((passes + 12.0) * pairs / PAIRS),
    )


def seconds(work: Work, device: str = "cpu") -> float:
    """Return the predicted time on a device; where its rates are not known, a number that only ranks work on it."""
    on: Processor | None = processor(device)
    if on is None or not work.matrix_flops.keys() <= on.matrix_flops.keys():
        return 1e-12 * (sum(work.matrix_flops.values()) + work.scalar_flops + work.exps + 10.0 * work.bytes)
    return work_seconds(work, on)


class Ways(NamedTuple):
    """The two ways of summing."""

    by_box: Callable[[Problem, tuple[int, ...], float], Work]  # of a shape in modes and the transforms' tolerance
    directly: Callable[[Problem, float, float, float | None], Work]  # of rows, neighbours, columns
    merges: bool  # equal points are summed once, directly


def box_work(
    ways: Ways,
    problem: Problem,
    epsilon: float,
    shape: tuple[int, ...],
    share: float,
    neighbours: float,
    columns: float,
) -> Work:
    """Return the Work of a box; a share of the rows have so many columns outside to add."""
    inside = ways.by_box(problem, shape, epsilon)
    return plus(inside, ways.directly(problem, share * problem.m, neighbours, columns)) if share else inside


def box_seconds(ways: Ways, problem: Problem, epsilon: float, shape: tuple[int, ...], *outside: float) -> float:
    """Return the predicted time of a box, as :func:`box_work`; inf: there are too many modes."""
    if math.prod(shape) > MOST_MODES:
        return math.inf
    return seconds(box_work(ways, problem, epsilon, shape, *outside), problem.device)


def direct_work(ways: Ways, problem: Problem, found: Around, rows: float, neighbours: float) -> Work:
    """Return the Work of summing some rows directly, each over so many of all columns."""
    work = ways.directly(problem, rows, neighbours, found.columns)
    if not rows or found.columns > (1.0 - SHARE) * problem.n:
        return work
    # Equal points are found before, by one thread.
    equal = 20.0 * speedup(cpu_threads()) * problem.d * (problem.n + problem.m) * math.log2(problem.n + 1.0)
    return plus(work, Work(scalar_flops=equal, launches=0))


def direct_seconds(ways: Ways, problem: Problem, points: Array, log_weights: Array) -> float:
    """Return the predicted time of summing all rows directly; they are expected where the columns are."""
    found = around(problem, points, points, log_weights, ways.merges)
    return seconds(direct_work(ways, problem, found, found.rows, float(found.neighbours.mean())), problem.device)


CPU = Ways(lambda problem, shape, epsilon: by_modes(problem, math.prod(shape), epsilon), by_neighbours, True)
DEVICE = Ways(lambda problem, shape, epsilon: by_products(problem, shape), by_tiles, False)


def times(a: Work, factor: float) -> Work:
    """Return a Work as many times."""
    return replace(a, scalar_flops=factor * a.scalar_flops, exps=factor * a.exps, bytes=factor * a.bytes)


def plus(a: Work, b: Work) -> Work:
    """Return the Work of both."""
    return Work(
        matrix_flops={
            k: a.matrix_flops.get(k, 0.0) + b.matrix_flops.get(k, 0.0) for k in {**a.matrix_flops, **b.matrix_flops}
        },
        scalar_flops=a.scalar_flops + b.scalar_flops,
        exps=a.exps + b.exps,
        bytes=a.bytes + b.bytes,
        launches=a.launches + b.launches,
    )
