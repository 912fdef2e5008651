"""The NumPy backend's entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import extent_limit, single_precision

__all__ = ["INFO"]


def _supports(problem: Problem) -> Support:
    if problem.extent > extent_limit(problem):
        return Support(True, f"NumPy, direct differences in float64 (extent {problem.extent:.3g})")
    dtype = "float32" if single_precision(problem, 0.0) else "float64"
    return Support(True, f"NumPy, matrix products in {dtype} (extent {problem.extent:.3g})")


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """Every array operation is a pass over a tile in cache: its elements count as scalar operations."""
    pairs, d, scales = problem.pairs, problem.d, max(1, len(problem.scales))
    mean = problem.reduction is Reduction.MEAN
    single = single_precision(problem, 0.0)
    passes = 4.0 * scales  # maximum, subtraction, clamp, sum
    if problem.reduction is Reduction.LAPLACE:
        passes += scales
    columns = d + 2 + scales * ((d if mean else 0) + problem.n_values)
    flops = {"float32" if single else "float64": 2.0 * columns * pairs}
    if problem.extent > extent_limit(problem):
        flops, passes = {"float64": 2.0 * scales * problem.n_values * pairs}, passes + (5.0 if mean else 3.0) * d
    return Work(
        matrix_flops=flops,
        scalar_flops=passes * pairs * (1.0 if single else 2.0),
        exps=float(scales * pairs),
        bytes=8.0 * (problem.m + problem.n) * (d + 2),
    )


INFO = BackendInfo(
    name="numpy",
    protocol=(1, 0),
    implementation="sdkde_numpy.backend:NumpyBackend",
    devices=("cpu",),
    levels=("fast", "high", "float64"),
    features=frozenset({"weights", "exclude_self", "values", "multi_scale"}),
    deterministic=True,
    requires_modules=("numpy", "threadpoolctl"),
    install="pip install sdkde",
    startup_seconds=0.02,
    supports=_supports,
    extent_limit=extent_limit,
    work=_work,
)
