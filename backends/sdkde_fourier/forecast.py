"""Which way is likely to be taken, and its Work, from the extent of the points or a sample of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from sdkde_core.protocol import Problem, Reduction, Sample, Work

from . import bounds
from .around import around
from .bounds import cutoff
from .memory import peak
from .modes import choose_box, density_bound
from .price import (
    CPU,
    DEVICE,
    MOST_MODES,
    Ways,
    box_seconds,
    box_work,
    by_looking,
    by_modes,
    by_neighbours,
    by_products,
    by_tiles,
    direct_work,
    looks,
    plus,
    seconds,
    times,
)

__all__ = ["estimate", "estimate_on_device", "least_memory"]

#: Extents, over the usual one, and pairs, on a CPU and on a device, from which a price is made from a sample of the
#: data. On a device smaller calls may be replayed, which those that take a sample are not.
ODD, WORTH_A_SAMPLE, ON_A_DEVICE = 1.5, 1 << 23, 1 << 32

#: Of a sample, the fewest columns that boxes are chosen by, and how many pairs of the problem allow for one.
FEWEST, ONE_IN = 1 << 10, 1 << 15

#: Memory that any machine has, bytes.
LITTLE = 128 << 20

#: Assumed before the data are known: the transforms' tolerance, and the most neighbours of an isolated row.
USUAL, NEIGHBOURS = 1e-11, 1000.0


def estimate(problem: Problem) -> tuple[str, Work]:
    """Say which way is likely to be taken on the CPU, and its Work, from what is known before the points are."""
    sample = _sample_of(problem)
    way, work = _likely(problem, _ways) if sample is None else _from_sample(problem, sample, CPU)
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
    here = around(problem, sample.rows, sample.columns, sample.log_weights, ways.merges)
    thin = -(-len(sample.columns) // max(FEWEST, problem.pairs // ONE_IN))
    columns, log_weights = sample.columns[::thin], sample.log_weights[::thin]
    direct = direct_work(ways, problem, here, here.rows, float(here.neighbours.mean()))
    usual = bounds.tolerance(problem, float(np.exp(log_weights.mean())), 1.0)
    found = choose_box(
        problem, (sample.low, sample.high), columns, usual, functools.partial(box_seconds, ways, problem, usual)
    )
    if found is None:
        return "direct sums", direct
    box, _, arguments = found
    inside = box.holds(columns, np.zeros(problem.d))
    weights = np.exp(log_weights[inside]) * (problem.n / len(columns))
    largest = density_bound(box, columns[inside], weights)
    epsilon = max(usual, bounds.tolerance(problem, float(np.exp(log_weights.mean())), largest))
    error = bounds.error(epsilon, largest, float(box.period.max()))
    held = box.holds(here.some, -np.minimum(box.margin, cutoff(epsilon)))
    share = 1.0 * (~held | ~(error <= bounds.relative_budget(problem, 2.0) * here.sums))
    redone = float(share.mean())
    neighbours = float(share @ here.neighbours) / max(float(share.sum()), 1e-300)
    by_box = box_work(ways, problem, usual, *arguments)
    modes = plus(by_box, direct_work(ways, problem, here, redone * here.rows, neighbours))
    # The backend does not know what it redoes.
    alone = seconds(by_box, problem.device)
    if alone > seconds(direct, problem.device) and (ways is not CPU or looks(problem, alone)):
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
