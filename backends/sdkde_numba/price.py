"""What sums over all pairs cost, and over those that matter; which of them the backend takes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from sdkde_core.nearby import share
from sdkde_core.plugin import busy, cpu_threads, speedup
from sdkde_core.protocol import Columns, Problem, Reduction, Sample, Work

from .bounds import choose, takes_leaves

__all__ = ["HEIGHT", "LEAF", "SIZE", "TASK", "forecast", "sample_of", "work"]

#: Least work of a task, in multiplications.
TASK = 1 << 25

#: Where tiles are left out: columns and rows of a tile, and columns of a leaf, which stand together in their order.
SIZE, HEIGHT, LEAF = 128, 128, 16

#: Seconds of one thread, for sums over all pairs, from which it is looked how many pairs matter: that takes 20 ms. The
#: share of these seconds below which the others are left out.
LOOK, PAYS = 2.0, 0.8

#: Columns, and rows, by which the backend looks.
SAMPLE = 1 << 12

#: One thread's operations a second: in products by dtype, others, exponentials. Nominal: a choice on which bits depend
#: may not depend on what is measured, nor on the number of threads.
RATES = {"float64": 2.3e10, "float32": 4.6e10, "scalar": 4.4e9, "exp": 1.2e9}


def work(problem: Problem) -> tuple[Work, float | None]:
    """Return what the backend does, and the share of the pairs that matter, where it leaves the others out."""
    left = None
    if problem.sample is not None and _looks(problem):
        left = forecast(problem, problem.sample())
    some = _over_all(problem) if left is None else _over_some(problem, left)
    threads = cpu_threads()
    tasks = min(max(1.0, problem.pairs * (problem.d + 16.0) / TASK), 4.0 * threads)
    idle = speedup(threads) / speedup(busy(tasks, threads))  # cores that are left alone
    sorting = 0.0 if left is None else speedup(threads) * _sorting(problem)
    return (
        replace(
            some,
            matrix_flops={dtype: idle * flops for dtype, flops in some.matrix_flops.items()},
            scalar_flops=idle * some.scalar_flops + sorting,
            exps=idle * some.exps,
            bytes=32.0 * (problem.m + problem.n) * (problem.d + 2) + 50.0 * problem.n * problem.d,
            launches=40,
        ),
        left,
    )


def sample_of(columns: Columns) -> Sample:
    """Return some of the columns, as rows too."""
    step = -(-len(columns.points) // SAMPLE)
    points, log_weights = (x[step // 2 :: step].copy() for x in (columns.points, columns.log_weights))
    return Sample(points, points, log_weights, points.min(axis=0), points.max(axis=0))


@functools.lru_cache(2)  # supports and work ask the same
def forecast(problem: Problem, sample: Sample) -> float | None:
    """Return about what share of the pairs matters; None where sums over all pairs take little or not much longer."""
    if not _looks(problem) or not np.isfinite(sample.columns).all() or not np.isfinite(sample.rows).all():
        return None
    with np.errstate(all="ignore"):
        left = share(problem, sample, SIZE, HEIGHT)
    some = _seconds(_over_some(problem, left)) + 2.0 * _sorting(problem) / RATES["scalar"]  # by one thread
    return left if some < PAYS * _seconds(_over_all(problem)) else None


def _looks(problem: Problem) -> bool:
    """Whether to look: of few rows the columns are shared out over threads, but not where tiles are left out."""
    return problem.kernel == "gaussian" and problem.m >= 8 * HEIGHT and _seconds(_over_all(problem)) > LOOK


def _over_all(problem: Problem) -> Work:
    """Everything stays in registers or the first cache: what NumPy does in passes over a tile costs little here.

    The kernel multiplies for exponents at 1.15 times the rate of matrix products, for means at 0.8 times, and for other
    kernels, by differences, at 0.75 times; double precision costs two singles, and the polynomial exp2 is two to four
    times as fast as NumPy's exp. Packing transposes the columns: a number takes as long as 50 bytes read.
    """
    pairs, d, scales = problem.pairs, problem.d, max(1, len(problem.scales))
    dtype = choose(problem).dtype
    means = scales * d if problem.reduction is Reduction.MEAN else 0
    double = 1.0 if dtype == "float32" else 2.0
    rate, passes = (1.15, 1.5 * scales) if problem.kernel == "gaussian" else (0.75, 3.0 * scales)
    if problem.reduction is Reduction.LAPLACE:
        passes = 2.0 * scales
    return Work(
        matrix_flops={dtype: 2.0 * ((d + 1) / rate + means / 0.8) * pairs},
        scalar_flops=double * passes * pairs,
        exps=0.25 * double * scales * pairs,
    )


def _over_some(problem: Problem, left: float) -> Work:
    """Of the pairs listed, measured from three to ten dimensions; making the lists is in these figures.

    Leaf by leaf about 0.45 of the listed pairs are summed, of which d coordinates are the larger part with shifts; the
    rest of the time does not depend on d. Some rows are summed again by tiles: for shifts at "high" more in more
    dimensions, as there neighbours are fewer. Otherwise tiles are shorter than those of all pairs.
    """
    whole = _over_all(problem)
    again = left if not takes_leaves(problem) else 0.0
    mean = problem.reduction is Reduction.MEAN
    if takes_leaves(problem) and mean and problem.precision == "high":
        again = left * min(max(0.0, 0.05 * (problem.d - 4)), 0.2)
    pairs = left * problem.pairs if takes_leaves(problem) else 0.0
    flops = {dtype: again * count for dtype, count in whole.matrix_flops.items()}
    flops["float32"] = flops.get("float32", 0.0) + (3.4 if mean else 1.4) * problem.d * pairs
    return Work(matrix_flops=flops, scalar_flops=again * whole.scalar_flops + 1.95 * pairs, exps=again * whole.exps)


def _sorting(problem: Problem) -> float:
    """Operations of putting columns, and rows, in order: level by level of a tree."""
    points = [problem.n] if problem.same else [problem.n, problem.m]
    return sum(85.0 * (problem.d + 4) * k * max(1.0, math.log2(k / LEAF)) for k in points if k)


def _seconds(some: Work) -> float:
    """Of one thread, nominal."""
    products = sum(flops / RATES[dtype] for dtype, flops in some.matrix_flops.items())
    return products + some.scalar_flops / RATES["scalar"] + some.exps / RATES["exp"]
