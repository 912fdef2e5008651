"""What the two ways of summing cost, by Fourier modes and directly over neighbours.

On a CPU by finufft 2.5 and NumPy, on a device as matrix products and tiles in PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdkde_core.plugin import Processor, cpu_threads, processor, speedup, work_seconds
from sdkde_core.protocol import TOLERANCES, NotWorthIt, Problem, Reduction, Sample, Work

from . import bounds
from .bounds import cutoff
from .duplicates import SHARE, distinct
from .memory import blocks_to_modes, fields_of, peak
from .modes import choose_box, density_bound

__all__ = [
    "CLASS",
    "CPU",
    "DEVICE",
    "MOST_MODES",
    "Limit",
    "around",
    "box_seconds",
    "by_modes",
    "by_neighbours",
    "by_pairs",
    "by_products",
    "by_tile_pairs",
    "by_tiles",
    "direct_seconds",
    "estimate",
    "estimate_on_device",
    "least_memory",
    "nats",
    "plus",
    "seconds",
]

Array = NDArray[Any]

#: Most modes of a box: with finufft's grid, twice as fine per dimension, 1 GiB in three dimensions.
MOST_MODES = 1 << 23

#: Rows that the neighbourhoods are estimated from, the fewest and the most columns, and how many pairs of the problem
#: allow for one of these.
ROWS, COLUMNS, ONE_IN = 128, (1 << 10, 1 << 13), 512

#: Pairs of these at a time, which stay in cache.
CACHED = 1 << 15

#: Extents, over the usual one, and pairs, on a CPU and on a device, from which a price is made from a sample of the
#: data. On a device smaller calls may be replayed, which those that take a sample are not.
ODD, WORTH_A_SAMPLE, ON_A_DEVICE = 1.5, 1 << 20, 1 << 32

#: Largest difference of two log weights in a class of columns, nats.
CLASS = 12.0

#: Memory that any machine has, bytes.
LITTLE = 128 << 20

#: Assumed before the data are known: the transforms' tolerance, and the most neighbours of an isolated row.
USUAL, NEIGHBOURS = 1e-11, 1000.0


def by_modes(problem: Problem, modes: float, epsilon: float) -> Work:
    """Return the Work of the transforms: spreading and interpolation over width^d grid points, and the FFTs.

    Of few points the way to modes takes one thread. Sorting and double precision are in the figures.
    """
    d, width = problem.d, math.ceil(math.log10(1.0 / epsilon)) + 2
    backs = fields_of(problem) * max(1, len(problem.scales))
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


def by_neighbours(problem: Problem, rows: float, neighbours: float, columns: float | None = None) -> Work:
    """Return the Work of summing ``rows`` directly, each over ``neighbours`` of the columns on average.

    Rows are shared out over threads, of which more than three wait for the interpreter's lock; one builds the tree.
    """
    columns, threads = problem.n if columns is None else columns, cpu_threads()
    scales = max(1, len(problem.scales))
    sort = columns * (60.0 if problem.d == 1 else 300.0) * math.log2(columns + 1.0)
    if columns < (1.0 - SHARE) * problem.n:  # equal points are found before
        sort += 25.0 * problem.d * (problem.n + problem.m) * math.log2(problem.n + 1.0)
    sort *= speedup(threads) / speedup(min(threads, 2))  # as timed beside one other thread
    pairs = by_pairs(problem, rows * scales, rows * min(neighbours, columns) * scales)
    return plus(pairs, Work(scalar_flops=sort * (rows > 0), launches=100))


def by_pairs(problem: Problem, rows: float, pairs: float) -> Work:
    """Return the Work of finding the neighbours of rows, and of summing over so many in all, once the tree is there."""
    threads = cpu_threads()
    idle = speedup(threads) / speedup(min(threads, 3))
    search = 3e4 if problem.d == 1 else 5e4
    return Work(
        scalar_flops=idle * ((600.0 + 150.0 * problem.d) * pairs + search * rows),
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
    backs *= max(1, len(problem.scales))
    sizes = [2.0 * math.sqrt(2.0 * shape[0])] * 2 if d == 1 else list(shape)
    functions, modes = sum(sizes), math.prod(sizes)
    rows = n + m * (1 if not problem.scales else len(problem.scales))
    between = modes / sizes[-1]  # numbers a point and field between two products
    return Work(
        matrix_flops={"float64": 5.0 * modes * (n + backs * m) + 40.0 * functions * rows},
        scalar_flops=20.0 * functions * rows,
        bytes=48.0 * functions * rows + 16.0 * between * (backs * m + (n if d == 3 else 0)),
        launches=int(1000 + 20.0 * rows * (functions + (between if d == 3 else 0)) / (1 << 25)),
    )


def by_tiles(problem: Problem, rows: float, neighbours: float, columns: float | None = None) -> Work:
    """Return the Work of summing ``rows`` over tiles that matter, each over ``neighbours`` columns on average.

    Every operation of a pair reads and writes float64 in memory; judging and sorting tiles comes before, and rows are
    padded to whole tiles and lists.
    """
    columns, scales = problem.n if columns is None else columns, max(1, len(problem.scales))
    pairs = by_tile_pairs(problem, rows * min(8.0 * neighbours + 512.0, columns + 512.0) * scales)  # tiles of 32 × 256
    judged = rows / 32.0 * columns / 256.0 * scales
    others = Work(
        bytes=400.0 * judged + 300.0 * (columns if rows else 0.0),
        launches=1400 * (rows > 0),
    )
    return plus(pairs, others)


def by_tile_pairs(problem: Problem, pairs: float) -> Work:
    """Return the Work of summing over so many pairs in tiles, those that do not matter among them."""
    passes = 3.0 * problem.d + (6.0 if problem.reduction is Reduction.LOG_SUM else 10.0)
    return Work(
        scalar_flops=4.0 * passes * pairs,
        exps=16.0 * pairs,
        bytes=16.0 * passes * pairs,
        launches=int(20.0 * pairs / (1 << 22)),
    )


def nats(problem: Problem, n: int) -> float:
    """Return how many nats below a row's largest term those of n columns can be left out; those near the row."""
    tolerance = 0.1 * TOLERANCES[problem.precision][problem.reduction].absolute
    return math.log(n / tolerance) + 5.0


class Around(NamedTuple):
    """What is known of the rows' neighbourhoods from some rows and columns."""

    rows: float  # that are summed: distinct ones, where equal ones are summed once
    columns: float
    some: Array  # (k, d): some of those rows, alike
    neighbours: Array  # (k,): how many each has
    sums: Array  # (k,): S, roughly


def around(problem: Problem, rows: Array, columns: Array, log_weights: Array, merges: bool) -> Around:
    """Estimate the neighbourhoods of a problem's rows from some of them and some columns.

    ``merges``: equal rows, and equal columns, are summed once. A point that comes several times among a few comes often
    and stands for itself; one that comes once stands for those that were not taken.
    """
    merges = merges and "exclude_self" not in problem.requires
    some, each, _ = _standing_for(rows, problem.m, merges)
    ends, k = np.cumsum(each), min(ROWS, len(some))
    some = some[np.searchsorted(ends, (np.arange(k) + 0.5) * (ends[-1] / k)).clip(max=len(some) - 1)]

    found, each, group = _standing_for(columns, problem.n, merges)
    share, own = problem.n / len(columns), float(np.exp(log_weights.mean()))
    weights = share * np.bincount(group, np.exp(log_weights))
    spread = float(weights.max()) / max(float(weights.min()), 1e-300)
    thin = -(-len(found) // int(min(COLUMNS[1], max(COLUMNS[0], problem.pairs / ONE_IN / ROWS))))
    single = np.flatnonzero(each > 1.0)  # only of these some are left out
    taken = np.concatenate([np.flatnonzero(each <= 1.0), single[thin // 2 :: thin]])
    standing = np.where(each[taken] > 1.0, len(single) / max(1, len(single[thin // 2 :: thin])), 1.0)
    found, each, weights, share = found[taken], standing * each[taken], standing * weights[taken], share * thin

    sharpness = 0.5 / max(problem.scales, default=1.0) ** 2
    reach = (nats(problem, problem.n) + math.log(2.0) + min(CLASS, math.log(spread))) / sharpness
    neighbours, sums = np.empty(k), np.empty(k)
    coordinates, step = np.ascontiguousarray(found.T), max(1, CACHED // len(found))
    for start in range(0, k, step):
        here = slice(start, start + step)
        r2 = np.zeros((len(some[here]), len(found)))
        for a in range(problem.d):
            r2 += np.square(coordinates[a] - some[here, a, None])
        # The nearest of all columns is nearer than that of a few.
        nearest = (
            np.zeros((len(r2), 1)) if problem.same else r2.min(axis=1, keepdims=True) * share ** (-2.0 / problem.d)
        )
        near = r2 <= reach + nearest
        neighbours[here] = np.maximum(near @ each, 1.0)
        sums[here] = np.exp(-sharpness * r2, where=near, out=np.zeros_like(r2)) @ weights
        sums[here] = np.maximum(sums[here], own * np.exp(-sharpness * nearest[:, 0]))
    return Around(float(ends[-1]), float(each.sum()), some, neighbours, sums)


def _standing_for(points: Array, total: int, merges: bool) -> tuple[Array, Array, Array]:
    """Return some points, how many of ``total`` each stands for, and of which of them each point is one."""
    share = total / len(points)
    if not merges:
        return points, np.full(len(points), share), np.arange(len(points))
    first, group = distinct(points)
    return points[first], np.where(np.bincount(group) > 1, 1.0, share), group


class Limit:
    """What a call may still take before another backend would be faster."""

    def __init__(self, problem: Problem) -> None:
        self._worth, self._spent = math.inf if problem.worth is None else problem.worth, 0.0

    def spend(self, predicted: float, on: str) -> None:
        """Count predicted seconds; NotWorthIt where they are too many in all."""
        self._spent += predicted
        if self._spent > self._worth:
            raise NotWorthIt(f"{on} would take {self._spent:.2g} s or more, and is worth {self._worth:.2g}")


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
    return plus(ways.by_box(problem, shape, epsilon), ways.directly(problem, share * problem.m, neighbours, columns))


def box_seconds(ways: Ways, problem: Problem, epsilon: float, shape: tuple[int, ...], *outside: float) -> float:
    """Return the predicted time of a box, as :func:`box_work`; inf: there are too many modes."""
    if math.prod(shape) > MOST_MODES:
        return math.inf
    return seconds(box_work(ways, problem, epsilon, shape, *outside), problem.device)


def direct_seconds(ways: Ways, problem: Problem, points: Array, log_weights: Array) -> float:
    """Return the predicted time of summing all rows directly; they are expected where the columns are."""
    found = around(problem, points, points, log_weights, ways.merges)
    return seconds(ways.directly(problem, found.rows, float(found.neighbours.mean()), found.columns), problem.device)


def estimate(problem: Problem) -> tuple[str, Work]:
    """Say which way is likely to be taken on the CPU, and its Work, from what is known before the points are."""
    sample = _sample_of(problem)
    return _likely(problem, _ways) if sample is None else _from_sample(problem, sample, CPU)


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
    sample = _sample_of(problem)
    return _likely(problem, _ways_on_device) if sample is None else _from_sample(problem, sample, DEVICE)


def _sample_of(problem: Problem) -> Sample | None:
    """Return a sample of the data where they are odd: the price then depends on where the points are.

    They are where the extent is not the usual one. In float64, rows are summed directly at any extent.
    """
    if problem.sample is None or problem.pairs < (WORTH_A_SAMPLE if problem.device == "cpu" else ON_A_DEVICE):
        return None
    odd = problem.extent > ODD * _usual_extent(problem) or problem.precision == "float64"
    sample = problem.sample() if odd else None
    known = sample is not None and len(sample.columns) > 0 and bool(np.isfinite(sample.low + sample.high).all())
    return sample if known else None


@functools.lru_cache(8)  # supports and work ask the same; of a sample, which is itself and equal to no other
def _from_sample(problem: Problem, sample: Sample, ways: Ways) -> tuple[str, Work]:
    """The way that the backend would take, were the sample all: as it decides itself, when it has the points."""
    columns, log_weights, here = (
        sample.columns,
        sample.log_weights,
        around(problem, sample.rows, sample.columns, sample.log_weights, ways.merges),
    )
    direct = ways.directly(problem, here.rows, float(here.neighbours.mean()), here.columns)
    usual = bounds.tolerance(problem, float(np.exp(log_weights.mean())), 1.0)
    found = choose_box(
        problem, (sample.low, sample.high), columns, usual, functools.partial(box_seconds, ways, problem, usual)
    )
    if found is None:
        return "direct sums", direct
    box, _, arguments = found
    inside = box.holds(columns, np.zeros(problem.d))
    weights = np.exp(log_weights[inside]) * (problem.n / len(columns))
    share = np.zeros(len(here.some))
    for scale in problem.scales or (1.0,):
        largest = density_bound(box, columns[inside], weights, scale)
        epsilon = max(usual, bounds.tolerance(problem, float(np.exp(log_weights.mean())), largest))
        error = bounds.error(epsilon, largest, float(box.period.max()))
        held = box.holds(here.some, -np.minimum(box.margin, cutoff(epsilon) * scale))
        share += ~held | ~(error <= bounds.relative_budget(problem, 2.0) * here.sums)
    share /= max(1, len(problem.scales))
    redone = float(share.mean())
    neighbours = float(share @ here.neighbours) / max(float(share.sum()), 1e-300)
    by_box = box_work(ways, problem, usual, *arguments)
    modes = plus(by_box, ways.directly(problem, redone * here.rows, neighbours, here.columns))
    if seconds(by_box, problem.device) > seconds(direct, problem.device):  # the backend does not know what it redoes
        return "direct sums", direct
    return f"{math.prod(box.shape)} modes, and {redone:.2g} of the rows directly", modes


def _likely(problem: Problem, ways_at: Callable[[Problem, float], list[tuple[str, Work]]]) -> tuple[str, Work]:
    """The cheapest way.

    With Silverman's bandwidth the extent is about 5 n^(1/(d+4)), the usual extent. Where it is much larger, there are
    two possibilities. The bandwidth is small: then all neighbourhoods are. Or a few points are far out: then the others
    cost what they do at the usual extent. The price lies a sixth of the way from the first to the second (in logs), or
    is that of the modes of the whole extent, if that is less.
    """

    def price(way: tuple[str, Work]) -> float:
        return seconds(way[1], problem.device)

    usual = _usual_extent(problem)
    ways = ways_at(problem, problem.extent)
    if problem.extent > 3.0 * usual:
        bulk, direct = min(ways_at(problem, usual), key=price), ways[-1]
        dearer = max(1.0, price(bulk) / price(direct)) ** (1.0 / 6.0)
        ways[-1] = "small neighbourhoods, or modes of the most", times(direct[1], dearer)
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


CPU = Ways(lambda problem, shape, epsilon: by_modes(problem, math.prod(shape), epsilon), by_neighbours, True)
DEVICE = Ways(lambda problem, shape, epsilon: by_products(problem, shape), by_tiles, False)


def _usual_extent(problem: Problem) -> float:
    """The extent that goes with Silverman's bandwidth."""
    return 5.0 * problem.n ** (1.0 / (problem.d + 4.0))


def _usual_neighbours(problem: Problem, extent: float) -> float:
    """The columns that matter to a row, were they normal with that extent: four to five standard deviations."""
    reach = math.sqrt(2.0 * math.log(1e6 * problem.n)) * max(problem.scales, default=1.0)
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
    cut, finest, widest = cutoff(USUAL), min(problem.scales, default=1.0), max(problem.scales, default=1.0)
    width = 2.0 * extent * problem.d**-0.25  # between a cube's around the ball and one's inside
    period = width + 1.5 * cut * widest
    return min(period * cut / finest / math.pi, 1e10) ** problem.d


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
