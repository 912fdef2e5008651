"""What the two ways of summing cost, Fourier modes and neighbourhoods, with finufft 2.5 and NumPy on a CPU."""

from __future__ import annotations

import math

from sdkde_core import cost
from sdkde_core.hardware import Processor, processor
from sdkde_core.protocol import Problem, Reduction, Work

from .bounds import cutoff

__all__ = ["MOST_MODES", "by_modes", "by_neighbours", "estimate", "seconds"]

#: Most modes of a box: with finufft's grid, twice as fine per dimension, 1 GiB in three dimensions.
MOST_MODES = 1 << 23

#: The tolerance that is usual, where the data are not known yet, and the columns that matter to a lonely row.
USUAL, NEIGHBOURS = 1e-11, 1000.0


def fields_of(problem: Problem) -> int:
    """How many transforms to points a pass takes, at each scale: each gives two real fields."""
    return {1: 1, 2: 2, 3: 2}[problem.d] if problem.reduction is Reduction.MEAN else 1


def by_modes(problem: Problem, modes: float, epsilon: float) -> Work:
    """Return the Work of the transforms: spreading and interpolation over width^d grid points, and the FFTs.

    To modes on one thread, which counts as two; sorting points, and operations in double precision, are counted in.
    """
    d, width = problem.d, math.ceil(math.log10(1.0 / epsilon)) + 2
    backs = fields_of(problem) * max(1, len(problem.scales))
    stencil = float(width**d)
    grid = modes * 2.0**d
    spread = problem.n * (500.0 + 150.0 * d + 20.0 * stencil)
    interpolation = problem.m * backs * (300.0 + 150.0 * d + 8.0 * stencil)
    transforms = grid * (1 + backs) * (20.0 + 6.0 * math.log2(max(grid, 2.0)))
    return Work(
        scalar_flops=spread + interpolation + transforms,
        bytes=16.0 * grid * 6.0 * (1 + backs) + 64.0 * (problem.m + problem.n),
        launches=50 * (1 + backs),
    )


def by_neighbours(problem: Problem, rows: float, neighbours: float) -> Work:
    """Return the Work of summing ``rows`` directly, each over ``neighbours`` columns on average."""
    scales = max(1, len(problem.scales))
    pairs = rows * min(neighbours, problem.n) * scales
    search = 3e4 if problem.d == 1 else 2.5e5
    sort = problem.n * (60.0 if problem.d == 1 else 300.0) * math.log2(problem.n + 1.0)
    return Work(
        scalar_flops=(600.0 + 150.0 * problem.d) * pairs + search * rows * scales + sort * (rows > 0),
        exps=6.0 * pairs,
        launches=100,
    )


def seconds(work: Work) -> float:
    """Return the predicted time on this CPU."""
    on: Processor | None = processor("cpu")
    assert on is not None  # there always is a CPU
    return cost.seconds(work, on)


def estimate(problem: Problem) -> tuple[str, Work]:
    """Say which way is likely to be taken, and its Work, from what is known of a problem before its points are.

    Where the extent asks for more modes than there may be, either few points are far out, and the others take as many
    modes as there may be, or the bandwidth is small, and so are all neighbourhoods: taken to cost the same.
    """
    cut, finest, widest = cutoff(USUAL), min(problem.scales, default=1.0), max(problem.scales, default=1.0)
    width = 2.0 * problem.extent * problem.d**-0.25  # between a cube's around the ball and one's inside
    period = width + 1.5 * cut * widest
    modes = min(period * cut / finest / math.pi, 1e30) ** problem.d
    direct = by_neighbours(problem, problem.m, problem.n)
    if problem.level == "float64":  # few rows have all the digits
        return "most rows summed directly", direct
    if modes > MOST_MODES:
        lonely = by_neighbours(problem, 0.02 * problem.m, NEIGHBOURS)
        fourier = _both(by_modes(problem, MOST_MODES, USUAL), lonely)
        kind = f"at most {MOST_MODES} modes, or neighbourhoods"
    else:
        fourier, kind = by_modes(problem, modes, USUAL), f"about {modes:.0f} modes at most"
    return (kind, fourier) if seconds(fourier) < seconds(direct) else ("direct sums, few enough", direct)


def _both(a: Work, b: Work) -> Work:
    return Work(
        scalar_flops=a.scalar_flops + b.scalar_flops,
        exps=a.exps + b.exps,
        bytes=a.bytes + b.bytes,
        launches=a.launches + b.launches,
    )
