"""What the two ways of summing cost, by Fourier modes and directly over neighbours, and which is likely to be taken.

On a CPU by finufft 2.5 and NumPy, on a device as matrix products and tiles in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sdkde_core.plugin import cpu_threads, prices
from sdkde_core.protocol import Problem, Reduction, Work

from . import bounds
from .around import Around, around
from .duplicates import SHARE
from .memory import blocks_to_modes, fields_of, peak

__all__ = [
    "CPU",
    "DEVICE",
    "box_seconds",
    "direct_seconds",
    "estimate",
    "estimate_on_device",
    "least_memory",
    "looks",
    "seconds",
]

Array = NDArray[Any]

#: Most modes of a box: with finufft's grid, twice as fine per dimension, 1 GiB in three dimensions.
MOST_MODES = 1 << 23


def by_modes(problem: Problem, modes: float, epsilon: float) -> Work:
    """Return the Work of the transforms: spreading and interpolation over width^d grid points, and the FFTs.

    Of few points the way to modes takes one thread. Sorting and double precision are in the figures.
    """
    d, width = problem.d, math.ceil(math.log10(1.0 / epsilon)) + 2
    backs = fields_of(problem)
    stencil = float(width**d)
    grid = modes * bounds.requested(epsilon, d)[0] ** d
    threads = cpu_threads()
    idle = prices.speedup(threads) / prices.speedup(blocks_to_modes(problem.n, (max(1, int(modes)),), threads))
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
    return Work(scalar_flops=prices.speedup(cpu_threads()) * (box + around * looks(problem, seconds(way))), launches=60)


def looks(problem: Problem, modes: float) -> bool:
    """Whether the backend looks, on a CPU, if direct sums are faster than modes that take so many seconds."""
    return modes > seconds(by_neighbours(problem, problem.m, 1.0))


def by_neighbours(problem: Problem, rows: float, neighbours: float, columns: float | None = None) -> Work:
    """Return the Work of summing ``rows`` directly, each over ``neighbours`` of the columns on average.

    Rows are shared out over threads, of which more than three wait for the interpreter's lock; one builds the tree, as
    timed beside one other thread. In one dimension neighbours stand in order, and are not searched for.
    """
    columns, threads = problem.n if columns is None else columns, cpu_threads()
    sort = columns * (60.0 if problem.d == 1 else 300.0) * math.log2(columns + 1.0) * (rows > 0)
    pairs, idle = rows * min(neighbours, columns), prices.speedup(threads) / prices.speedup(min(threads, 3))
    pair, row = (350.0, 6e3) if problem.d == 1 else (600.0 + 150.0 * problem.d, 5e4)
    alone = prices.speedup(threads) / prices.speedup(min(threads, 2))
    return Work(scalar_flops=alone * sort + idle * (pair * pairs + row * rows), exps=idle * 6.0 * pairs, launches=100)


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


def by_tiles(problem: Problem, rows: float, neighbours: float, columns: float | None = None) -> Work:
    """Return the Work of summing ``rows`` over tiles that matter, each over ``neighbours`` columns on average.

    A tile of 32 rows takes the tiles of 256 columns that come within reach of its box: on average the columns in a box
    as wide as both tiles and the reach, and wider by a factor that was fitted to counts. The unit is the radius of a
    ball that holds one column. Then a row reaches as far as neighbours^(1/d), a tile of k columns is k^(1/d) wide, and
    one of rows as wide as the columns among them make it. Every operation of a pair reads and writes float64 in memory,
    and 12 launches are those around the passes over four million pairs. Before, points are sorted, and tiles judged.
    """
    d, columns = problem.d, problem.n if columns is None else columns
    among = max(0.0, min(rows, 32.0) - 1.0) * columns / max(rows, 1.0)  # columns among a tile's rows
    width = {1: 2.6, 2: 2.5, 3: 1.9}[d] * (256.0 ** (1.0 / d) + among ** (1.0 / d))
    pairs = rows * (min(columns, (width + neighbours ** (1.0 / d)) ** d) + 512.0)  # and two leading tiles
    judged = rows / 32.0 * columns / 256.0
    passes = 3.0 * d + (6.0 if problem.reduction is Reduction.LOG_SUM else 10.0)
    sorting = (650.0 + 150.0 * d) * judged + (450.0 if d == 1 else 2900.0) * (columns + rows) * (rows > 0)
    blocks = max(rows / 16384.0, judged / 4e6)
    return Work(
        scalar_flops=4.0 * passes * pairs,
        exps=16.0 * pairs,
        bytes=16.0 * passes * pairs + sorting,
        launches=int((passes + 12.0) * pairs / 4e6 + (1400 + 350.0 * blocks) * (rows > 0)),
    )


def seconds(work: Work, device: str = "cpu") -> float:
    """Return the predicted time on a device; where its rates are not known, a number that only ranks work on it."""
    on = prices.processor(device)
    if on is None or not work.matrix_flops.keys() <= on.matrix_flops.keys():
        return 1e-12 * (sum(work.matrix_flops.values()) + work.scalar_flops + work.exps + 10.0 * work.bytes)
    return prices.work_seconds(work, on)


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
    equal = 20.0 * prices.speedup(cpu_threads()) * problem.d * (problem.n + problem.m) * math.log2(problem.n + 1.0)
    return plus(work, Work(scalar_flops=equal, launches=0))


def direct_seconds(ways: Ways, problem: Problem, points: Array, log_weights: Array) -> float:
    """Return the predicted time of summing all rows directly; they are expected where the columns are."""
    found = around(problem, points, points, log_weights, ways.merges)
    return seconds(direct_work(ways, problem, found, found.rows, float(found.neighbours.mean())), problem.device)


CPU = Ways(lambda problem, shape, epsilon: by_modes(problem, math.prod(shape), epsilon), by_neighbours, True)
DEVICE = Ways(lambda problem, shape, epsilon: by_products(problem, shape), by_tiles, False)


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


# --- which way is likely to be taken, from the extent ---

#: Memory that any machine has, bytes.
LITTLE = 128 << 20

#: Assumed before the data are known: the transforms' tolerance, and the most neighbours of an isolated row.
USUAL, NEIGHBOURS = 1e-11, 1000.0


def estimate(problem: Problem) -> tuple[str, Work]:
    """Say which way is likely to be taken on the CPU, and its Work, from what is known before the points are."""
    way, work = _likely(problem, _ways)
    return way, plus(work, by_looking(problem, work))


def least_memory(problem: Problem) -> int:
    """Return the bytes that the CPU takes at least, one transform at a time; 0 where they are few, or none.

    At the usual extent, or the problem's if that is less: far points are left out of the box, and do not add to it.
    """
    modes = _usual_modes(problem, min(problem.extent, _usual_extent(problem)))
    if modes > MOST_MODES or 200.0 * (modes + problem.n + problem.m) < LITTLE:  # a mode and a point take no more
        return 0
    shape = (int(modes ** (1.0 / problem.d)),) * problem.d
    return 8 * (problem.n + problem.m) * (problem.d + 1) + peak(problem, shape, shape, USUAL, 1, [0.0] * problem.d)


def estimate_on_device(problem: Problem) -> tuple[str, Work]:
    """As :func:`estimate`, of products and tiles."""
    return _likely(problem, _ways_on_device)


def _likely(problem: Problem, ways_at: Callable[[Problem, float], list[tuple[str, Work]]]) -> tuple[str, Work]:
    """The cheapest way.

    With Silverman's bandwidth the extent is about 5 n^(1/(d+4)), the usual extent. Where it is much larger, there are
    two possibilities. The bandwidth is small: then all neighbourhoods are. Or a few points are far out: then the others
    cost what they do at the usual extent. The price lies a sixth of the way from the first to the second (in logs), at
    "float64" half of it, or is that of the modes of the whole extent, if that is less.
    """

    def price(way: tuple[str, Work]) -> float:
        return seconds(way[1], problem.device)

    usual = _usual_extent(problem)
    ways = ways_at(problem, problem.extent)
    if problem.extent > 3.0 * usual:
        bulk, direct = min(ways_at(problem, usual), key=price), ways[-1]
        dearer = max(1.0, price(bulk) / price(direct)) ** (1.0 / 2.0 if problem.precision == "float64" else 1.0 / 6.0)
        w = direct[1]
        w = replace(w, scalar_flops=dearer * w.scalar_flops, exps=dearer * w.exps, bytes=dearer * w.bytes)
        ways[-1] = "small neighbourhoods, or modes of the most", w
    return min(ways, key=price)


def _ways(problem: Problem, extent: float) -> list[tuple[str, Work]]:
    """Modes, unless there are too many, and neighbourhoods, if the points were normal with that extent."""
    modes, neighbours = _usual_modes(problem, extent), _usual_neighbours(problem, extent)
    if problem.precision != "float64" or problem.reduction is not Reduction.MEAN:  # they are far out
        isolated = by_neighbours(problem, _isolated(problem) * problem.m, min(NEIGHBOURS, neighbours))
    else:
        isolated = by_neighbours(problem, _isolated(problem) * problem.m, neighbours)
    ways = [("direct sums, few enough", by_neighbours(problem, problem.m, neighbours))]
    if modes <= MOST_MODES:
        ways.insert(0, (f"about {modes:.0f} modes at most", plus(by_modes(problem, modes, USUAL), isolated)))
    return ways


def _ways_on_device(problem: Problem, extent: float) -> list[tuple[str, Work]]:
    """As :func:`_ways`, of products and tiles.

    Boxes may leave out what is far out: the modes are those of an extent a third of the way down to the usual one.
    """
    box = min(extent, (extent**2 * _usual_extent(problem)) ** (1.0 / 3.0))
    modes, neighbours = _usual_modes(problem, box), _usual_neighbours(problem, extent)
    ways = [("direct sums, few enough", by_tiles(problem, problem.m, neighbours))]
    if modes <= MOST_MODES:
        products = by_products(problem, (modes ** (1.0 / problem.d),) * problem.d)
        isolated = by_tiles(problem, _isolated(problem) * problem.m, min(NEIGHBOURS, neighbours))
        ways.insert(0, (f"products of about {modes:.0f} modes at most", plus(products, isolated)))
    return ways


def _usual_extent(problem: Problem) -> float:
    """The extent that goes with Silverman's bandwidth."""
    return 5.0 * problem.n ** (1.0 / (problem.d + 4.0))


def _usual_neighbours(problem: Problem, extent: float) -> float:
    """The columns that matter to a row, were they normal with that extent: four to five standard deviations."""
    reach = math.sqrt(2.0 * math.log(1e6 * problem.n))
    ball = {1: 2.0, 2: math.pi, 3: 4.2}[problem.d]
    return min(problem.n, 1.0 + problem.n * ball * (reach / max(0.75 * extent, 1e-3)) ** problem.d)


def _isolated(problem: Problem) -> float:
    """Share of the rows that are isolated (see :mod:`sdkde_fourier.neighbours`) and summed directly.

    Measured with Silverman's bandwidth and a tenth of it.
    """
    if problem.precision != "float64":
        return 0.002
    mean = problem.reduction is Reduction.MEAN
    return {1: 0.01, 2: 0.4, 3: 0.7}[problem.d] if mean else {1: 0.003, 2: 0.03, 3: 0.06}[problem.d]


def _usual_modes(problem: Problem, extent: float) -> float:
    """Modes of a box with that extent."""
    cut = bounds.cutoff(USUAL)
    width = 2.0 * extent * problem.d**-0.25  # between a cube's around the ball and one's inside
    period = width + 1.5 * cut
    return min(period * cut / math.pi, 1e10) ** problem.d
