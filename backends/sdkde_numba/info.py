"""The Numba backend's entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.plugin import busy, cpu_threads, speedup
from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import MOST_EXTENT, MOST_KERNEL_EXTENT, SCALES, choose, extent_limit

__all__ = ["INFO", "TASK"]

#: Least work of a task, in multiplications.
TASK = 1 << 25


def _supports(problem: Problem) -> Support:
    most = MOST_KERNEL_EXTENT if "kernel" in problem.requires else MOST_EXTENT
    if problem.extent / min(problem.scales, default=1.0) > most:
        return Support(False, f"has sums up to {most:g} bandwidths from the origin, not {problem.extent:g}")
    if not all(SCALES[0] <= scale <= SCALES[1] for scale in problem.scales):
        return Support(False, f"takes bandwidth factors from {SCALES[0]:g} to {SCALES[1]:g}")
    return Support(True, f"compiled, {choose(problem)}")


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
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
    threads = cpu_threads()
    tasks = min(max(1.0, pairs * (d + 16.0) / TASK), 4.0 * threads)
    idle = speedup(threads) / speedup(busy(tasks, threads))  # cores that are left alone
    return Work(
        matrix_flops={dtype: idle * 2.0 * ((d + 1) / rate + means / 0.8) * pairs},
        scalar_flops=idle * double * passes * pairs,
        exps=idle * 0.25 * double * scales * pairs,
        bytes=32.0 * (problem.m + problem.n) * (d + 2) + 50.0 * problem.n * d,
        launches=40,
    )


INFO = BackendInfo(
    name="numba",
    protocol=(1, 0),
    implementation="sdkde_numba.backend:NumbaBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "exclude_self", "multi_scale", "kernel"}),
    deterministic=True,
    requires_modules=("numba",),
    install="pip install 'sdkde-core[numba]'",
    startup_seconds=0.7,
    supports=_supports,
    extent_limit=extent_limit,
    work=_work,
    # No compile_seconds: two kernels, one for each dtype, and that of other kernels than the Gaussian are compiled once
    # on a machine (2 s) and kept.
)
