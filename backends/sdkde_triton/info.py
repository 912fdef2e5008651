"""The Triton backend's entry point."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import direct_dtype, extent_limit, form, formula, grid_step, merges, packed_dimensions, shifts_rows

__all__ = ["INFO"]

#: Dimensions that fit one program's accumulators.
MOST_DIMENSIONS = 128

#: What Triton's interpreter costs on a CPU, in operations for one.
INTERPRETER = 1e4


def _interpreted() -> bool:
    """As Triton reads it when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _supports(problem: Problem) -> Support:
    if problem.d > MOST_DIMENSIONS:
        return Support(False, f"has kernels for up to {MOST_DIMENSIONS} dimensions, not {problem.d}")
    if problem.device.startswith("cpu") and not _interpreted():
        return Support(False, "Triton compiles for GPUs; TRITON_INTERPRET=1 interprets its kernels on a CPU")
    if formula(problem, problem.extent) == "packed":
        return Support(True, "half-precision pieces on Tensor Cores")
    return Support(True, f"direct differences in {direct_dtype(problem, problem.extent)}")


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """What the kernels do per pair; the launch parameters change none of it."""
    pairs, d, mean = problem.pairs, problem.d, problem.reduction is Reduction.MEAN
    two_passes = shifts_rows(problem)
    if formula(problem, problem.extent) == "packed":
        width = packed_dimensions(d)
        corrections = form(problem, problem.extent, grid_step(d, problem.extent, shifted=two_passes))
        # Columns of the first product: hi·hi, lo·hi and hi·lo, then the constants, lo·lo, and the constants' rest.
        exponent = (3 + (corrections >= 1)) * width + 16 * ((not merges(d)) + (corrections == 2))
        products = (2 if two_passes else 1) * exponent + (3 * width if mean else 0)
        scalar = 6.0 if mean else 4.0
        read = (problem.m + problem.n) * (8 * d + 8 * width + 128)
        work = Work(
            matrix_flops={"float16": 2.0 * products * pairs},
            scalar_flops=2.0 * (scalar + (4.0 if two_passes else 0.0)) * pairs,  # an instruction counts as an FMA
            exps=(2.0 if two_passes else 1.0) * pairs,
            bytes=read + 8.0 * problem.m * (d + 1),
            launches=7 if two_passes else 4,
        )
    else:
        double = direct_dtype(problem, problem.extent) == "float64"
        distance = 2.0 * d + 3.0
        operations = (distance + (3.0 * d if mean else 1.0)) * 2.0 * pairs
        work = Work(
            matrix_flops={"float64": 4.0 * operations} if double else {},  # exponentials included
            scalar_flops=operations,
            exps=float(pairs),
            bytes=32.0 * (problem.m + problem.n) * d + 8.0 * problem.m * (d + 1),
            launches=4,
        )
    if problem.device.startswith("cpu"):
        total = work.scalar_flops + sum(work.matrix_flops.values())
        return Work(scalar_flops=INTERPRETER * total, exps=work.exps, bytes=work.bytes, parallel=False)
    return work


INFO = BackendInfo(
    name="triton",
    protocol=(1, 1),
    implementation="sdkde_triton.backend:TritonBackend",
    devices=("cuda", "cpu"),
    levels=("fast",),
    features=frozenset({"weights"}),
    deterministic=True,
    requires_modules=("torch", "triton"),
    install="pip install 'sdkde[triton]'",
    arrays="torch",
    startup_seconds=3.0,
    supports=_supports,
    extent_limit=extent_limit,
    work=_work,
    capturable=True,
)
