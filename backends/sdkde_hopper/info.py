"""The backend's entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Work

from .bounds import extent_limit, supports

__all__ = ["INFO"]


#: The host's time around a pass's kernels, in launches.
LAUNCHES = 84


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """What the kernels do a pair: less than they would if every φ was for one row, as an H200 took them."""
    pairs, d, mean = float(problem.pairs), problem.d, problem.reduction is Reduction.MEAN
    products = 5 * 16 + 40 + 24 + 40 + 40 if mean else 2 * 4 * 16  # columns of half precision; of bytes, half
    return Work(
        matrix_flops={"float16": products * 2.0 * pairs * (0.5 if mean else 1.0)},
        scalar_flops=(8.0 if mean else 4.0) * pairs,
        exps=(0.68 if mean else 0.85) * pairs,
        bytes=(problem.m + problem.n) * (8.0 * d + 300.0) + 8.0 * problem.m * (d + 1) + mean * 0.1 * pairs,
        launches=LAUNCHES,
    )


def _compile_seconds(problem: Problem) -> float:
    """NVRTC's time for the kernels of a reduction, on an H200's host."""
    return 0.9


INFO = BackendInfo(
    name="hopper",
    protocol=(1, 0),
    implementation="sdkde_hopper.backend:HopperBackend",
    devices=("cuda",),
    precisions=("fast",),
    deterministic=True,
    requires_modules=("torch", "cuda"),
    install="pip install 'sdkde-core[hopper]'",
    arrays="torch",
    startup_seconds=3.5,
    supports=supports,
    extent_limit=extent_limit,
    work=_work,
    compile_seconds=_compile_seconds,
    capturable=True,
)
