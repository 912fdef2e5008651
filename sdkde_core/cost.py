"""From what a formulation does (Work) to the time that it takes."""

from __future__ import annotations

from .hardware import Processor
from .protocol import BackendInfo, Problem, Reduction, Work

__all__ = ["plain_work", "predict", "seconds"]


def plain_work(problem: Problem) -> Work:
    """Return the Work of the plain formulation: one matrix product for the exponents, one more for MEAN's shift.

    Per pair 2(d + 2) operations for the exponent with both norms in the product, 2(d + 1) for the shift, and
    five more for the running maximum, the subtraction, the clamp and the sum; one exponential a scale.
    """
    dtype = "float32" if problem.level == "fast" else "float64"
    per_pair = 2.0 * (problem.d + 2) + 2.0 * problem.n_values
    if problem.reduction is Reduction.MEAN:
        per_pair += 2.0 * (problem.d + 1)
    scales = max(1, len(problem.scales))
    return Work(
        matrix_flops={dtype: per_pair * problem.pairs},
        scalar_flops=5.0 * scales * problem.pairs,
        exps=float(scales * problem.pairs),
        bytes=8.0 * (problem.m + problem.n) * (problem.d + 2),
    )


def seconds(work: Work, on: Processor) -> float:
    """Return the time of ``work``, in seconds: the largest of its roofs, and the launches."""
    matrix = sum(flops / on.matrix_flops[dtype] for dtype, flops in work.matrix_flops.items())
    roofs = (matrix, work.scalar_flops / on.scalar_flops, work.exps / on.exps, work.bytes / on.bandwidth)
    return max(roofs) + work.launches * on.launch_seconds


def predict(info: BackendInfo, problem: Problem, on: Processor | None) -> float | None:
    """Return the predicted time of a pass in seconds, without start-up; None where the processor is not known."""
    if on is None:
        return None
    return seconds(info.work(problem, None) if info.work else plain_work(problem), on)
