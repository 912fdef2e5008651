"""The Triton backend's entry point."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from . import bounds, worth
from .bounds import (
    FULL,
    LONG,
    MOST_DIRECT,
    MOST_EXTENT,
    PAIRED,
    arithmetic,
    form,
    formula,
    grid_of,
    merges,
    mirrors,
    packed_dimensions,
    packed_limit,
    shifts_rows,
    stores,
)

__all__ = ["INFO"]

#: Dimensions that are taken, as many as the tests go to: kernels are compiled anew for every 64 more.
MOST_DIMENSIONS = 4096

#: The host's time around a pass's kernels, in launches: 0.32 ms on the host of an H200.
LAUNCHES = 80

#: Time of kernels on Tensor Cores over that of their products at the peak rate, and over that of their exponentials, by
#: precision and whether they sum shifts: units wait for each other. STORED: where φ goes through memory. Measured on an
#: H100 and an H200 with 32,768 points in 3 to 384 dimensions (benchmarks/notes/choice.md).
WAITS = {
    ("fast", True): (1.5, 2.1),
    ("fast", False): (1.8, 2.2),
    ("high", True): (1.8, 4.9),
    ("high", False): (2.0, 3.0),
}
STORED = 2.6

#: Seconds that a core takes to compile a kernel with matrix products, and another one. Of the first, 152 configurations
#: took two cores 46 s (benchmarks/notes/tuning.md); the others took about half as long beside them.
PRODUCTS_SECONDS, OTHERS_SECONDS = 0.6, 0.3

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
    if problem.extent > MOST_EXTENT:
        return Support(False, f"has sums up to {MOST_EXTENT:g} bandwidths from the origin, not {problem.extent:g}")
    share = _share(problem)
    if share is not None or formula(problem, problem.extent) == "packed":
        how = "half-precision pieces on Tensor Cores"
        return Support(True, how if share is None else f"{how}; about {100.0 * share:.2g} % of the pairs matter")
    if formula(problem, problem.extent) == "products":
        return Support(True, "products of float64 matrices")
    kind = arithmetic(problem, problem.extent)
    return Support(True, f"direct differences in {'pairs of float32' if kind == 'doubled' else kind}")


def _share(problem: Problem) -> float | None:
    """About what share of the pairs is summed; None: all."""
    if not worth.looks(problem, for_price=True) or formula(problem, problem.extent, listed=True) != "packed":
        return None
    share = worth.typical(problem)
    return share if worth.pays(problem, share) else None


def _extent_limit(problem: Problem) -> float:
    """That of packed operands too where direct differences are faster than these, but not than lists."""
    return packed_limit(problem) if worth.looks(problem, for_price=True) else bounds.extent_limit(problem)


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """What the kernels do per pair; the launch parameters change none of it."""
    pairs, d, mean = problem.pairs, problem.d, problem.reduction is Reduction.MEAN
    two_passes, extent, share = shifts_rows(problem), problem.extent, _share(problem)
    if share is not None or formula(problem, extent) == "packed":
        width = packed_dimensions(d)
        full = problem.precision == "high" or two_passes
        corrections = form(problem, extent, grid_of(problem, extent))
        # Columns of the first product: hi·hi, lo·hi and hi·lo, then lo·lo, the rest, and the constants.
        pieces = 3 + (corrections >= PAIRED) + 2 * (corrections == FULL)
        exponent = pieces * width + 16 * ((not merges(d)) + (corrections >= LONG))
        first = (3 * width + 16) if two_passes else 0
        # Of the second: pieces of φ times pieces of what it is multiplied by, less what is small.
        stored = stores(problem, corrections)
        if stored and mirrors(problem):
            exponent //= 2
        products = 6 if problem.precision == "high" else 5 if corrections == FULL and not stored else 3
        second = products * width * mean
        slower, waits = WAITS[problem.precision, mean]
        scalar = 6.0 if mean else 4.0
        read = (problem.m + problem.n) * (8 * d + 4 * (2 + full) * width + 128)
        work = Work(
            matrix_flops={"float16": (STORED if stored else slower) * 2.0 * (first + exponent + second) * pairs},
            scalar_flops=waits * 2.0 * (scalar + (4.0 if two_passes else 0.0)) * pairs,  # an instruction is an FMA
            exps=waits * (2.0 if two_passes else 1.0) * pairs,
            bytes=read + 8.0 * pairs * stored + 8.0 * problem.m * (d + 1),
            launches=(2 if two_passes else 1) * LAUNCHES,
        )
        work = work if share is None else worth.over_lists(problem, work, share)
    elif formula(problem, extent) == "products":
        work = Work(
            matrix_flops={"float64": 2.0 * d * (1 + mean) * pairs},
            scalar_flops=20.0 * pairs,
            exps=float(pairs),
            bytes=120.0 * pairs,  # a tile is written and read some fifteen times
            launches=LAUNCHES + 12 * math.ceil(problem.m / 8192) * math.ceil(problem.n / 2048),
        )
    else:
        kind = arithmetic(problem, extent)
        distance = (4.0 if kind == "doubled" else 2.0) * d + 3.0
        many = d > MOST_DIRECT
        operations = (distance * (1 + (mean and many)) + (d if mean else 1.0)) * 2.0
        # Times for one instruction; more of them where many coordinates are read for every row of a tile. Measured on
        # an H200 in 1 to 256 dimensions, within a fifth; in float64 those of LAPLACE.
        times = {"float32": 6.0 if many else 2.0, "float64": 3.6 * d**0.15}.get(kind, 3.0 * d**0.15)
        if kind == "doubled" and mean:
            times = 1.8 * d**0.15 if many else 1.5
        operations = (times * operations + (140.0 if kind == "float64" else 0.0)) * pairs  # and its exponential
        work = Work(
            matrix_flops={"float64": operations} if kind == "float64" else {},
            scalar_flops=operations,
            exps=1.5 * pairs if kind == "float32" else float(pairs),
            bytes=32.0 * (problem.m + problem.n) * d + 8.0 * problem.m * (d + 1),
            launches=LAUNCHES,
        )
    if problem.device.startswith("cpu"):
        total = work.scalar_flops + sum(work.matrix_flops.values())
        return Work(scalar_flops=INTERPRETER * total, exps=work.exps, bytes=work.bytes, parallel=False)
    return work


def _compile_seconds(problem: Problem) -> float:
    """What compiling the problem's kernels takes, one after another; nothing where they are interpreted.

    Direct differences and their end are two kernels. A reduction on Tensor Cores is three: columns are packed, reduced,
    and the results merged; other rows are packed by a variant. Shifted rows are packed and reduced twice.
    """
    if problem.device.startswith("cpu"):
        return 0.0
    if formula(problem, problem.extent) == "products":
        return 0.0
    if formula(problem, problem.extent) == "direct":
        return 2 * OTHERS_SECONDS
    passes = 1 + shifts_rows(problem)
    packings = passes + (not problem.same or problem.m < problem.n)
    return passes * (PRODUCTS_SECONDS + OTHERS_SECONDS) + packings * OTHERS_SECONDS


INFO = BackendInfo(
    name="triton",
    protocol=(1, 1),
    implementation="sdkde_triton.backend:TritonBackend",
    devices=("cuda", "cpu"),
    precisions=("fast", "high"),
    features=frozenset({"weights", "exclude_self", "range"}),
    requires_modules=("torch", "triton"),
    install="pip install 'sdkde-core[triton]'  # on Linux",
    arrays="torch",
    startup_seconds=4.2,  # importing, and a context; measured with kernels that were compiled before
    supports=_supports,
    extent_limit=_extent_limit,
    work=_work,
    compile_seconds=_compile_seconds,
    capturable=True,
    variant=bounds.variant,
    tuning="sdkde_triton.tunables:SPACE",
)
