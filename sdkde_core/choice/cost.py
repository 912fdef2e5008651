"""From what a formulation does (Work) to the time that it takes; public as ``sdkde_core.plugin.prices``."""

from __future__ import annotations

import math

from ..engine.exact import BLOCK
from ..protocol import BackendInfo, Problem, Reduction, Work
from .cards import Processor
from .hardware import processor, speedup  # noqa: F401, backends take both from here


def plain_work(problem: Problem) -> Work:
    """Return the Work of the plain formulation: one matrix product for the exponents, one more for MEAN's shift.

    Per pair 2(d + 2) operations for the exponent with both norms in the product, 2(d + 1) for the shift, and
    five more for the running maximum, the subtraction, the clamp and the sum; one exponential. Memory: every
    point is read once and every result written once, float64.
    """
    dtype = "float32" if problem.precision == "fast" else "float64"
    per_pair = 2.0 * (problem.d + 2) + 2.0 * (problem.d + 1) * (problem.reduction is Reduction.MEAN)
    written = {Reduction.LOG_SUM: 1, Reduction.MEAN: 1 + problem.d, Reduction.LAPLACE: 3}[problem.reduction]
    return Work(
        matrix_flops={dtype: per_pair * problem.pairs},
        scalar_flops=5.0 * problem.pairs,
        exps=float(problem.pairs),
        bytes=8.0 * ((problem.m + problem.n) * problem.d + problem.m * written),
    )


def idle(threads: int, tasks: float, most: int) -> float:
    """Return the factor by which work takes longer where up to ``most`` threads share ``tasks`` equal tasks.

    The last task may be shorter.
    """
    whole = int(tasks)
    busy = tasks / (math.ceil(whole / most) + (tasks - whole if whole % most == 0 else 0.0))  # threads, on average
    return speedup(threads) / speedup(busy)


def beyond_cache(d: int) -> float:
    """How many times as much an operation on differences costs in d dimensions as in few, as tiles leave the cache."""
    return min(4.0, max(1.0, d / 80.0))


def exact_work(problem: Problem) -> Work:
    """Return the Work of the core's exact path: differences in memory, one thread.

    On a GPU the operations of a block of differences are launches of their own, and go through its memory: 0.28 ms a
    block on an H200, in six dimensions.
    """
    pairs = float(problem.pairs)
    mean = problem.reduction is Reduction.MEAN
    if not problem.device.startswith("cpu"):
        numbers = problem.d * pairs
        launches = (30 if mean else 20) * math.ceil(numbers / BLOCK)
        return Work(exps=2.0 * pairs, bytes=8.0 * (46.0 if mean else 30.0) * numbers, launches=launches)
    passes = (12.0 if mean else 8.0) * beyond_cache(problem.d)
    return Work(scalar_flops=2.0 * passes * problem.d * pairs, exps=2.0 * pairs, parallel=False)


def roofs(work: Work, on: Processor) -> dict[str, float]:
    """Return the time that each unit needs for ``work`` at its peak, in seconds."""
    share = 1.0 if work.parallel else speedup(on.threads)  # one thread has that fraction of the rates
    times = {f"matrix {dtype}": share * flops / on.matrix_flops[dtype] for dtype, flops in work.matrix_flops.items()}
    times["scalar"] = share * work.scalar_flops / on.scalar_flops
    times["exp"] = share * work.exps / on.exps
    times["memory"] = work.bytes / on.bandwidth
    times["transfer"] = work.transfer_bytes / on.transfer
    times["launch"] = work.launches * on.launch_seconds
    return times


def work_seconds(work: Work, on: Processor) -> float:
    """Return the predicted time of ``work``, in seconds.

    Where the units work side by side: the largest of their roofs (products of all dtypes share one unit), after the
    transfers and the launches, which nothing hides. Otherwise their sum.
    """
    times = roofs(work, on)
    before = times.pop("transfer") + times.pop("launch")
    matrix = sum(times.pop(key) for key in list(times) if key.startswith("matrix"))
    units = [matrix, *times.values()]
    return before + (max(units) if on.overlaps else sum(units))


def predict(info: BackendInfo, problem: Problem, on: Processor | None) -> float | None:
    """Return the predicted time of a pass in seconds, without start-up.

    None where the processor is not known, or not its rate for a dtype of the backend's products.
    """
    if on is None:
        return None
    work = info.work(problem, None) if info.work else plain_work(problem)
    return work_seconds(work, on) if work.matrix_flops.keys() <= on.matrix_flops.keys() else None


def typical_extent(n: int, d: int) -> float:
    """The usual extent of n standard normal points under Silverman's rule, in bandwidths: for plans from shapes."""
    radius = math.sqrt(d) + math.sqrt(2 * math.log(max(n, 2)))
    return radius / (0.9 * n ** (-1 / (d + 4)))
