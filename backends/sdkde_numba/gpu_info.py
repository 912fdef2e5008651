"""The entry point of Numba's CUDA target."""

from __future__ import annotations

import math
import os

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import MOST_EXTENT
from .gpu_bounds import DEPTH, arithmetic, extent_limit


def _supports(problem: Problem) -> Support:
    if problem.d > 1024:  # what a row's 32 threads hold
        return Support(False, f"has kernels for up to 1024 dimensions, not {problem.d}")
    # Numba simulates GPUs by this rule, when it is imported.
    if problem.device.startswith("cpu") and os.environ.get("NUMBA_ENABLE_CUDASIM", "") in ("", "0"):
        return Support(False, "compiles for GPUs; NUMBA_ENABLE_CUDASIM=1 simulates its kernels on a CPU")
    if problem.extent > MOST_EXTENT:
        return Support(False, f"has sums up to {MOST_EXTENT:g} bandwidths from the origin, not {problem.extent:g}")
    reasons = {
        "expanded": "expanded squares in float32",
        "single": "direct differences in float32",
        "doubled": "direct differences of pairs of float32",
        "float64": "direct differences in float64",
    }
    return Support(True, reasons[arithmetic(problem)])


def _work(problem: Problem) -> Work:
    """Instructions of a pair, as the compiler has them; each counts as an FMA, two operations.

    On an H200 the kernels reach some four fifths of the rate at which those are issued, less where several threads
    share a row; in float64, where the rate is half that of matrix products, two thirds, or half.
    """
    pairs, mean, kind = float(problem.pairs), problem.reduction is Reduction.MEAN, arithmetic(problem)
    distance = {"expanded": 2.0, "single": 2.0, "doubled": 4.0, "float64": 2.0}[kind]
    instructions = (distance + mean) * problem.d + (4.0 if mean else 6.0)
    double = kind == "float64"
    if double:
        instructions = 2.0 * (instructions + 30.0)  # the exponential
    # Twice as long in 256 dimensions as in 64, three times in 784.
    shared = 1.0 + 0.12 * max(0, math.ceil(math.log2(problem.d / DEPTH))) + max(0.0, math.log2(problem.d / 64.0)) / 2.0
    reached = (0.67 if problem.d <= DEPTH else 0.54) if double else 0.8
    if mean and problem.d > 4:
        # What is doubled takes more registers, and at "high" more goes to float64: 6, 7, 31, 35 % in 1, 3, 8, 16.
        reached /= (1.4 if kind == "doubled" else 1.0) * (1.3 if problem.precision == "high" and not double else 1.0)
    operations = 2.0 / reached * shared * instructions * pairs
    if problem.device.startswith("cpu"):
        return Work(scalar_flops=1e4 * operations, parallel=False)  # of a CPU for one of a simulated kernel
    return Work(
        matrix_flops={"float64": operations} if double else {},
        scalar_flops=0.0 if double else operations,
        exps=0.0 if double else 1.3 * pairs,  # measured in one dimension, where they are the most
        bytes=32.0 * (problem.m + problem.n) * problem.d + 8.0 * problem.m * (problem.d + 1),
        launches=170,  # the host's work around kernels, 0.7 ms on an H200's host
    )


INFO = BackendInfo(
    name="numba-cuda",
    protocol=(1, 0),
    implementation="sdkde_numba.gpu_backend:CudaBackend",
    devices=("cuda", "cpu"),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "range"}),
    requires_modules=("torch", "numba", "numba_cuda"),
    install="pip install 'sdkde-core[numba-cuda]'  # on Linux and Windows",
    arrays="torch",
    startup_seconds=4.5,
    supports=_supports,
    extent_limit=extent_limit,
    work=lambda problem, config: _work(problem),
    tuning="sdkde_numba.gpu_space:SPACE",
    # A kernel for every dimension, reduction and arithmetic. A first KDE on an H200's host takes 8.3 s, 5.0 with its
    # kernel kept. The simulator compiles nothing.
    compile_seconds=lambda problem: 0.0 if problem.device.startswith("cpu") else 3.0,
)
