"""Which way is likely to be taken, and its Work, from the extent of the points."""

from __future__ import annotations

import math
from collections.abc import Callable

from sdkde_core.protocol import Problem, Reduction, Work

from .bounds import cutoff
from .memory import peak
from .price import MOST_MODES, by_looking, by_modes, by_neighbours, by_products, by_tiles, plus, seconds, times

__all__ = ["estimate", "estimate_on_device", "least_memory"]

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
    cut = cutoff(USUAL)
    width = 2.0 * extent * problem.d**-0.25  # between a cube's around the ball and one's inside
    period = width + 1.5 * cut
    return min(period * cut / math.pi, 1e10) ** problem.d
