"""The toy backend's entry point; imports nothing but the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Support, Work

__all__ = ["INFO"]


def _supports(problem: Problem) -> Support:
    return Support(True, "direct differences in float64, row by row")


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """Eight operations a pair and dimension, six more a pair, in double precision, on arrays too large for a cache.

    A row's dozen calls take some 15 µs however little they do.
    """
    scalars = (8.0 * problem.d + 6.0) * problem.pairs
    return Work(
        scalar_flops=2.0 * scalars,
        exps=float(problem.pairs),
        bytes=10.0 * scalars,
        launches=2 * problem.m,
        parallel=False,  # one thread, whatever the machine has
    )


INFO = BackendInfo(
    name="toy",
    protocol=(1, 0),
    implementation="toy_backend.backend:ToyBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "exclude_self"}),
    deterministic=True,
    requires_modules=("numpy",),
    install="pip install sdkde-toy",
    startup_seconds=0.001,
    supports=_supports,
    work=_work,
)
