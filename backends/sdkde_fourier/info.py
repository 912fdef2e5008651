"""The Fourier backend's entry points: finufft on the CPU, and matrix products on PyTorch's devices.

What the two ways of summing cost, by Fourier modes and directly over nearby tiles, and which is likely taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from sdkde_core.nearby import left_out, typical_share
from sdkde_core.plugin import cpu_threads, prices
from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from . import bounds

#: Most modes of a box: with finufft's grid, twice as fine per dimension, 1 GiB in three dimensions.
MOST_MODES = 1 << 23


def blocks_to_modes(count: int, shape: tuple[int, ...], threads: int) -> int:
    """How many transforms points go to modes by: of 2¹⁷ points or more, with at most 16 modes a point."""
    return max(1, min(threads, count // (1 << 17), 16 * count // math.prod(shape)))


def blocks_to_points(count: int, shape: tuple[int, ...], threads: int) -> tuple[int, int]:
    """How many transforms modes go to points by, each of some points on a grid of its own, and the threads of each.

    One on a large grid has all threads, which OpenMP starts anew every time, in 5 to 12 ms.
    """
    large = math.prod(shape) > max(count, 1 << 18)
    return (1, threads) if large else (max(1, min(threads, count // (1 << 15))), 1)


def by_modes(problem: Problem, shape: tuple[int, ...], epsilon: float) -> Work:
    """Return the Work of finufft's transforms: spreading and interpolation over width^d grid points, and the FFTs."""
    d, width = problem.d, math.ceil(math.log10(1.0 / epsilon)) + 2
    backs = 2 if problem.reduction is Reduction.MEAN and d > 1 else 1  # each gives two real fields
    stencil, modes = float(width**d), float(math.prod(shape))
    grid = modes * bounds.requested(epsilon, d)[0] ** d
    threads = cpu_threads()
    busy = blocks_to_modes(problem.n, shape, threads), math.prod(blocks_to_points(problem.m, shape, threads))
    there, back = (prices.idle(threads, some, threads) for some in busy)
    spread = there * problem.n * (250.0 + 75.0 * d + 10.0 * stencil)
    interpolation = back * problem.m * backs * (300.0 + 150.0 * d + 8.0 * stencil)
    transforms = grid * (1 + backs) * (20.0 + 6.0 * math.log2(max(grid, 2.0)))
    return Work(
        scalar_flops=spread + interpolation + transforms,
        bytes=16.0 * grid * 6.0 * (1 + backs) + 64.0 * (problem.m + problem.n),
        launches=50 * (1 + backs),
    )


def by_lists(problem: Problem, rows: float, left: float, columns: float) -> Work:
    """Return the Work of summing ``rows`` on a CPU over lists of nearby tiles, which leave ``left`` columns to each.

    Fitted to 20,000 to 100,000 points, within a factor of 2.5, and to 200 to 10,000 columns outside a box. For few rows
    the columns near them are gathered instead of sorted. Two threads or more save a sixth: NumPy's passes over small
    arrays wait for the interpreter's lock.
    """
    mean = problem.reduction is Reduction.MEAN
    each = 75.0 * problem.d if 32 * rows < columns else (60.0 if problem.d == 1 else 300.0) * math.log2(columns + 1.0)
    sort = columns * each * (rows > 0)
    pairs, alone = rows * min(left, columns), prices.speedup(cpu_threads())
    lists = 1.2e3 * min(5.0**problem.d, 12.0 + 0.01 * columns) * rows
    summed = 7.0 * (problem.d + 1) * (1.4 if mean else 1.0) * pairs + lists
    return Work(scalar_flops=alone * sort + alone / min(alone, 1.2) * summed, launches=100)


def by_products(problem: Problem, shape: tuple[int, ...], epsilon: float) -> Work:
    """Return the Work of transforms as products of cosines and sines, in float64; see ``device.py``.

    A cosine and its angle are some forty operations, and are written and read about three times; products as narrow as
    these run at less than half of the peak.
    """
    d, n, m, rows = problem.d, problem.n, problem.m, problem.n + problem.m
    backs = {Reduction.LOG_SUM: 1, Reduction.MEAN: max(2, d), Reduction.LAPLACE: 2}[problem.reduction]
    sizes = [2.0 * math.sqrt(2.0 * shape[0])] * 2 if d == 1 else list(shape)
    functions, modes = sum(sizes), math.prod(sizes)
    between = modes / sizes[-1]  # numbers a point and field between two products
    begun = 500 if problem.device == "cpu" else 1000
    return Work(
        matrix_flops={"float64": 5.0 * modes * (n + backs * m) + 40.0 * functions * rows},
        scalar_flops=20.0 * functions * rows,
        bytes=48.0 * functions * rows + 16.0 * between * (backs * m + (n if d == 3 else 0)),
        launches=int(begun + 20.0 * rows * (functions + (between if d == 3 else 0)) / (1 << 25)),
    )


def by_tiles(problem: Problem, rows: float, left: float, columns: float) -> Work:
    """As :func:`by_lists`, on a device: every operation of a pair reads and writes float64 in memory.

    12 launches are those around the passes over four million pairs. Before, points are sorted, and tiles judged.
    """
    d, pairs, judged = problem.d, rows * min(left, columns), rows / 32 * columns / 256
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
    by_box: Callable[[Problem, tuple[int, ...], float], Work]  # of a shape in modes and the transforms' tolerance
    directly: Callable[[Problem, float, float, float], Work]  # of rows, columns left to each, columns
    tiles: tuple[int, int]  # columns and rows of one, see :class:`sdkde_core.nearby.Neighbours`
    rows: int  # at a time, which bounds the memory of angles and fields
    sample: int  # points that boxes are chosen by, about


CPU = Ways(by_modes, by_lists, tiles=(32, 8), rows=1 << 20, sample=1 << 15)
DEVICE = Ways(by_products, by_tiles, tiles=(256, 32), rows=1 << 21, sample=1 << 13)


def box_seconds(
    ways: Ways, problem: Problem, epsilon: float, shape: tuple[int, ...], share: float, left: float, columns: float
) -> float:
    """Return the predicted time of a box; inf: there are too many modes.

    ``columns`` are outside. A ``share`` of the rows are near some of them: near ``left`` columns each, on average.
    """
    if math.prod(shape) > MOST_MODES:
        return math.inf
    rows = share * problem.m
    work = ways.by_box(problem, shape, epsilon)
    return seconds(plus(work, ways.directly(problem, rows, left, columns)) if rows else work, problem.device)


def plus(transforms: Work, direct: Work) -> Work:
    """Return the Work of both; direct sums take no matrix products."""
    names = "scalar_flops", "exps", "bytes", "launches"
    return replace(transforms, **{name: getattr(transforms, name) + getattr(direct, name) for name in names})


#: The transforms' tolerance, assumed before the data are known.
USUAL = 1e-11


def likely(problem: Problem, by: Ways) -> tuple[str, Work]:
    """Say which way is likely to be taken, and its Work, from what is known before the points are.

    Where the extent is much larger than the usual one, of Silverman's bandwidth, there are two possibilities. The
    bandwidth is small: then all neighbourhoods are. Or a few points are far out: then the others cost what they do at
    the usual extent. The price lies a sixth of the way from the first to the second (in logs), at "float64" half of it,
    or is that of the modes of the whole extent, if that is less.
    """

    def price(way: tuple[str, Work]) -> float:
        return seconds(way[1], problem.device)

    ways, usual = _ways(problem, by, problem.extent), prices.typical_extent(problem.n, problem.d)
    if problem.extent > 3.0 * usual:
        bulk, w = min(map(price, _ways(problem, by, usual))), ways[-1][1]
        dearer = max(1.0, bulk / price(ways[-1])) ** (1.0 / 2.0 if problem.precision == "float64" else 1.0 / 6.0)
        w = replace(w, scalar_flops=dearer * w.scalar_flops, exps=dearer * w.exps, bytes=dearer * w.bytes)
        ways[-1] = "small neighbourhoods, or modes of the most", w
    return min(ways, key=price)


def _ways(problem: Problem, by: Ways, extent: float) -> list[tuple[str, Work]]:
    """Modes, unless there are too many, and direct sums, if the points were normal with that extent.

    On a device boxes often leave out what is far out: the modes are those a third of the way down to the usual extent.
    """
    box = extent if by is CPU else min(extent, (extent**2 * prices.typical_extent(problem.n, problem.d)) ** (1.0 / 3.0))
    cut, width = bounds.cutoff(USUAL), 2.0 * box * problem.d**-0.25  # between a cube's around the ball and one's inside
    modes = min((width + 1.5 * cut) * cut / math.pi, 1e10) ** problem.d
    left = problem.n * typical_share(replace(problem, extent=extent), *by.tiles, left_out(problem))
    ways = [("direct sums, few enough", by.directly(problem, problem.m, left, problem.n))]
    if modes <= MOST_MODES:
        # Rows to be summed again are far out, and have a thousand neighbours at most, unless they lack digits alone.
        # Their share was measured with Silverman's bandwidth and a tenth of it.
        share, near = 0.002, min(1000.0, left)
        if problem.precision == "float64" and problem.reduction is Reduction.MEAN:
            share, near = {1: 0.01, 2: 0.4, 3: 0.7}[problem.d], left
        elif problem.precision == "float64":
            share = {1: 0.003, 2: 0.03, 3: 0.06}[problem.d]
        again = by.directly(problem, share * problem.m, near, problem.n)
        transforms = by.by_box(problem, (round(modes ** (1.0 / problem.d)),) * problem.d, USUAL)
        ways.insert(0, (f"about {modes:.0f} modes at most", plus(transforms, again)))
    return ways


def _supports(problem: Problem, by: Ways = CPU) -> Support:
    if problem.d > 3:
        return Support(False, f"d = {problem.d}: modes grow with the power d, it takes at most 3")
    # A transform's error is relative to its largest sum. In three dimensions most rows have too small a sum for ten
    # digits of a log, and are then summed directly over many neighbours.
    if problem.d == 3 and problem.precision == "float64" and problem.pairs > 1 << 27:
        return Support(False, "float64 leaves most rows to direct sums in three dimensions, too many at this size")
    return Support(True, f"Fourier sums{'' if by is CPU else ' in PyTorch'}, {likely(problem, by)[0]}")


def _work(problem: Problem) -> Work:
    work = likely(problem, CPU)[1]
    return replace(work, launches=work.launches + 300)  # to find out which way of summing is faster takes 3 ms


INFO = BackendInfo(
    name="fourier",
    protocol=(1, 0),
    implementation="sdkde_fourier.backend:FourierBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights"}),
    requires_modules=("finufft",),
    install="pip install 'sdkde-core[fourier]'",
    startup_seconds=0.15,
    supports=_supports,
    work=lambda problem, config: _work(problem),
)

TORCH = BackendInfo(
    name="fourier-torch",
    protocol=(1, 0),
    implementation="sdkde_fourier.device:TorchFourierBackend",
    devices=("cuda", "xpu", "cpu"),
    precisions=("fast", "high"),  # most rows have too small a sum for float64's ten digits
    features=frozenset({"weights"}),
    requires_modules=("torch",),
    install="pip install 'sdkde-core[torch]'",
    arrays="torch",
    startup_seconds=3.5,
    supports=lambda problem: _supports(problem, DEVICE),
    work=lambda problem, config: likely(problem, DEVICE)[1],
)
