"""The backend's entry point."""

from __future__ import annotations

import math

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Work

from . import plan
from .bounds import extent_limit, supports, symmetric


def _work(problem: Problem) -> Work:
    """What the kernels do; the symmetric one has half of it for every pair, as φ is for its row and its column."""
    pairs, d, mean = float(problem.pairs), problem.d, problem.reduction is Reduction.MEAN
    width, both, high = -(-d // 16) * 16, mean and symmetric(problem), problem.precision == "high"
    # Columns of the half-precision products: the exponents', and those of φ's other factor. Bytes count half.
    if both:
        narrow = plan.width(d, plan.MEAN_WIDTHS)
        exponents = 5 * 16 if narrow == 16 else 3 * 16  # in eight dimensions two pieces fit into one product
        products = 0.5 * (exponents + (2 * narrow + 8) * 2.5 + narrow + 8)
        if high:
            products = 0.5 * (8 * narrow + 3 * (narrow + 8) + 2 * (2 * narrow + 8))
    else:
        # "high" adds one of the constants, two of third pieces, lo·lo for log sums; beyond 32 dimensions one by φ.
        exponents = 4 + 2 * high if mean else 3 + 3 * high
        products = 16.0 * (1 + high) + exponents * width + (3 + (high and width > 32)) * (width + 8.0) * mean
    resummed = (700.0 + 80.0 * d) * _resummed_share(problem)  # in float64
    # Kernels' time over that of their products at the peak rate, and over that of their exponentials; for the symmetric
    # kernel, for dense tiles' shifts, for other sums. Measured on an H100 with 32,768 points in 3 to 64 dimensions.
    if both:
        slower, waits = (1.75 if high else 2.0), 2.7
    elif high:
        slower, waits = (1.4, 2.2) if mean else (1.6, 1.8)
    else:
        slower, waits = (1.2, 1.4) if mean else (1.4, 1.45)
    return Work(
        matrix_flops={"float16": slower * 2.0 * products * pairs},
        scalar_flops=(waits * (8.0 if mean else 4.0) + resummed) * pairs,
        exps=waits * (0.5 if both else 1.0) * pairs,
        bytes=(problem.m + problem.n) * (8.0 * (d + width) + 64.0) + 8.0 * problem.m * (d + 1) + 0.08 * pairs * both,
        launches=12,  # the host's time around a pass's kernels
    )


def _resummed_share(problem: Problem) -> float:
    """The share of MEAN's rows summed again: log-normal weights below 2⁻²² n of their mean, at "high" 2⁻²⁰ n."""
    plain = problem.reduction is not Reduction.MEAN or "weights" not in problem.requires
    if plain or problem.n <= 1 << 12:  # few samples: the call replays a list of launches
        return 0.0
    sigma = max(0.01, problem.weight_span / math.sqrt(8.0 * math.log(problem.n)))  # the span of n is that many
    least = math.log(problem.n) - (20.0 if problem.precision == "high" else 22.0) * math.log(2.0)
    share = 0.5 * math.erfc(-(least / sigma + 0.5 * sigma) / math.sqrt(2.0))
    return share - 1400.0 / problem.n * math.expm1(-share * problem.n)  # few rows take as long as 1400


INFO = BackendInfo(
    name="hopper",
    protocol=(1, 0),
    implementation="sdkde_hopper.backend:HopperBackend",
    devices=("cuda",),
    precisions=("fast", "high"),
    features=frozenset({"weights", "range", "pairs", "line"}),
    requires_modules=("torch", "cuda.core"),
    install="pip install 'sdkde-core[hopper]'",
    arrays="torch",
    startup_seconds=4.2,
    supports=supports,
    extent_limit=extent_limit,
    work=lambda problem, config: _work(problem),
    compile_seconds=lambda problem: 0.9,  # NVRTC's time on an H200's host; 1.4 with weights for MEAN
)
