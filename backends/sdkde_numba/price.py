"""What sums over all pairs cost, and over those that matter; which of them the backend takes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sdkde_core.nearby import LEFT_OUT, boxes, places, rough_share, share
from sdkde_core.plugin import busy, cpu_threads, speedup
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction, Sample, Work

from .bounds import LeafSums, choose, leaf_errors, takes_leaves

__all__ = ["HEIGHT", "LEAF", "SIZE", "TASK", "Forecast", "forecast", "sample_of", "work"]

#: Least work of a task, in multiplications.
TASK = 1 << 25

#: Where tiles are left out: columns and rows of a tile, and columns of a leaf, which stand together in their order.
SIZE, HEIGHT, LEAF = 128, 128, 16

#: Seconds of one thread, for sums over all pairs, from which it is looked how many pairs matter: a glance takes 5 ms,
#: and where it leaves less than NEARLY_ALL a forecast 20 ms and more, in many dimensions LOOK / LOOKED for each. The
#: share of these seconds below which the others are left out.
LOOK, LOOKED, NEARLY_ALL, PAYS = 0.5, 16, 0.95, 0.8

#: Columns, and rows, by which the backend looks; and rows whose sums it looks at; rows and columns of a glance.
SAMPLE, ROWS, FEW = 1 << 12, 48, (32, 1 << 10)

#: One thread's operations a second: in products by dtype, others, exponentials. Nominal: a choice on which bits depend
#: may not depend on what is measured, nor on the number of threads.
RATES = {"float64": 2.3e10, "float32": 4.6e10, "scalar": 4.4e9, "exp": 1.2e9}


def work(problem: Problem) -> tuple[Work, Forecast | None]:
    """Return what the backend does, and what is forecast of the pairs that matter, where it leaves others out."""
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
            launches=45,
        ),
        left,
    )


def sample_of(columns: Columns) -> Sample:
    """Return some of the columns, as rows too."""
    some = places(len(columns.points), SAMPLE)
    points, log_weights = columns.points[some], columns.log_weights[some]
    return Sample(points, points, log_weights, points.min(axis=0), points.max(axis=0))


class Forecast(NamedTuple):
    """What a sample says of the pairs that matter."""

    pairs: float  # share of the pairs that are listed
    again: float  # share of the rows that are summed again by tiles


@functools.lru_cache(2)  # supports and work ask the same
def forecast(problem: Problem, sample: Sample) -> Forecast | None:
    """Return what matters; None where sums over all pairs take little or not much longer."""
    if not _looks(problem) or not np.isfinite(sample.columns).all() or not np.isfinite(sample.rows).all():
        return None
    if _glance(problem, sample) > NEARLY_ALL:
        return None
    with np.errstate(all="ignore"):
        again = _again(problem, sample) if takes_leaves(problem) else 1.0
        found = Forecast(share(problem, sample, SIZE, HEIGHT), again)
    some = _seconds(_over_some(problem, found)) + 2.0 * _sorting(problem) / RATES["scalar"]  # by one thread
    return found if some < PAYS * _seconds(_over_all(problem)) else None


def _glance(problem: Problem, sample: Sample) -> float:
    """About what share of the pairs is left."""
    out = LEFT_OUT * TOLERANCES[problem.precision][problem.reduction].absolute
    return rough_share(problem, sample.rows, sample.columns, sample.log_weights, SIZE, HEIGHT, out, FEW)


def _again(problem: Problem, sample: Sample) -> float:
    """The share of the rows for which float32 would not do, as :func:`~sdkde_numba.bounds.leaf_errors` has it.

    A row's own column is in the sample, but stands for no others.
    """
    thin, every = (-(-len(x) // few) for x, few in ((sample.columns, SAMPLE), (sample.rows, ROWS)))
    columns, weights, rows = sample.columns[::thin], sample.log_weights[::thin], sample.rows[::every]
    many = problem.n / len(columns)
    _, widths = boxes(sample.rows, HEIGHT * len(sample.rows) / problem.m, HEIGHT)
    apart = rows[:, None, :] - columns  # (rows, columns, d)
    square = np.vecdot(apart, apart)
    terms = np.exp(weights - weights.max() - 0.5 * square)
    terms = np.where(square > 0.0, many * terms, terms)
    total = terms.sum(axis=1)
    mean, shift = (terms * square).sum(axis=1) / total, -(terms[:, :, None] * apart).sum(axis=1) / total[:, None]
    fourth, across = (terms * square**2).sum(axis=1) / total, 0.5 * np.linalg.norm(widths[::every], axis=1)
    log_sum = np.log(total) + weights.max()
    sums = LeafSums(log_sum, total, mean, fourth, shift, across, 1.0 / SIZE, float(np.ptp(weights)) / math.log(2.0))
    return float((~(leaf_errors(problem, sums) <= 1.0)).mean())


def _looks(problem: Problem) -> bool:
    """Whether to look: of few rows the columns are shared out over threads, but not where tiles are left out."""
    least = LOOK * max(1.0, problem.d / LOOKED)
    return problem.kernel == "gaussian" and problem.m >= 8 * HEIGHT and _seconds(_over_all(problem)) > least


def _over_all(problem: Problem) -> Work:
    """Everything stays in registers or the first cache: what NumPy does in passes over a tile costs little here.

    The kernel multiplies for exponents at 1.15 times the rate of matrix products, for means at 0.8 times, and for other
    kernels, by differences, at 0.75 times; double precision costs two singles, and the polynomial exp2 is two to four
    times as fast as NumPy's exp. Packing transposes the columns: a number takes as long as 50 bytes read.
    """
    pairs, d = problem.pairs, problem.d
    dtype = choose(problem).dtype
    means = d if problem.reduction is Reduction.MEAN else 0
    double = 1.0 if dtype == "float32" else 2.0
    rate, passes = (1.15, 1.5) if problem.kernel == "gaussian" else (0.75, 3.0)
    if problem.reduction is Reduction.LAPLACE:
        passes = 2.0
    return Work(
        matrix_flops={dtype: 2.0 * ((d + 1) / rate + means / 0.8) * pairs},
        scalar_flops=double * passes * pairs,
        exps=0.25 * double * pairs,
    )


def _over_some(problem: Problem, found: Forecast) -> Work:
    """Of the pairs listed, measured from three to ten dimensions; making the lists is in these figures.

    Leaf by leaf about 0.4 of the listed pairs are summed where few are listed, and all where all are, in a time that
    grows with d. By tiles they take as long as all pairs, of which tiles are longer.
    """
    whole, again, mean = _over_all(problem), found.pairs * found.again, problem.reduction is Reduction.MEAN
    pairs = found.pairs * problem.pairs if takes_leaves(problem) else 0.0
    summed = 0.3 + 0.7 * found.pairs**2
    flops = {dtype: again * count for dtype, count in whole.matrix_flops.items()}
    flops["float32"] = flops.get("float32", 0.0) + (6.6 if mean else 3.0) * problem.d * summed * pairs
    scalar = again * whole.scalar_flops + (0.5 + 0.6 * summed) * pairs
    return Work(matrix_flops=flops, scalar_flops=scalar, exps=again * whole.exps)


def _sorting(problem: Problem) -> float:
    """Operations of putting columns, and rows, in order: level by level of a tree."""
    points = [problem.n] if problem.same else [problem.n, problem.m]
    return sum(85.0 * (problem.d + 4) * k * max(1.0, math.log2(k / LEAF)) for k in points if k)


def _seconds(some: Work) -> float:
    """Of one thread, nominal."""
    products = sum(flops / RATES[dtype] for dtype, flops in some.matrix_flops.items())
    return products + some.scalar_flops / RATES["scalar"] + some.exps / RATES["exp"]
