"""The backend's entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Work

from .bounds import extent_limit, supports

__all__ = ["INFO"]


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """What the kernels do, as an H200 took it."""
    pairs, d = float(problem.pairs), problem.d
    return Work(
        matrix_flops={"float16": 480.0 * pairs},
        scalar_flops=6.0 * pairs,
        exps=0.65 * pairs,
        bytes=8.0 * (problem.m * (d + 1) + problem.n * d) + 300.0 * (problem.m + problem.n),
        launches=40,
    )


def _compile_seconds(problem: Problem) -> float:
    """NVRTC's time for the kernels of a reduction, measured on an H200's host."""
    return 2.5


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
