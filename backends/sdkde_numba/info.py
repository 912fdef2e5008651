"""The Numba backend's entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import MOST_EXTENT, SCALES, choose, extent_limit

__all__ = ["INFO"]


def _supports(problem: Problem) -> Support:
    if problem.extent / min(problem.scales, default=1.0) > MOST_EXTENT:
        return Support(False, f"has sums up to {MOST_EXTENT:g} bandwidths from the centre, not {problem.extent:g}")
    if not all(SCALES[0] <= scale <= SCALES[1] for scale in problem.scales):
        return Support(False, f"takes bandwidth factors from {SCALES[0]:g} to {SCALES[1]:g}")
    return Support(True, f"compiled, {choose(problem)}")


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    pairs, d, scales = problem.pairs, problem.d, max(1, len(problem.scales))
    form = choose(problem)
    means = scales * (problem.n_values + (d if problem.reduction is Reduction.MEAN else 0))
    double = 1.0 if form.dtype == "float32" else 2.0
    passes = scales * (2.0 if problem.reduction is Reduction.LAPLACE else 1.5)
    return Work(
        matrix_flops={form.dtype: 2.0 * (d + 1 + 2 * means) * pairs},
        scalar_flops=double * passes * pairs,
        exps=0.25 * double * scales * pairs,
        bytes=32.0 * (problem.m + problem.n) * (d + 2),
        launches=40,
    )


INFO = BackendInfo(
    name="numba",
    protocol=(1, 2),
    implementation="sdkde_numba.backend:NumbaBackend",
    devices=("cpu",),
    levels=("fast", "high", "float64"),
    features=frozenset({"weights", "exclude_self", "values", "multi_scale"}),
    deterministic=True,
    requires_modules=("numba",),
    install="pip install 'sdkde[numba]'",
    startup_seconds=1.0,
    supports=_supports,
    extent_limit=extent_limit,
    work=_work,
)
