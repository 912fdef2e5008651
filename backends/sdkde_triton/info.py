"""The Triton backend's entry point: what sums over all pairs cost, and over lists, and where lists are taken.

The figures of lists are of an H200; pairs stand for time, which a GPU with other rates takes for both ways alike.
"""

from __future__ import annotations

import math
import os

from sdkde_core.nearby import typical_share
from sdkde_core.protocol import TOLERANCES, BackendInfo, Problem, Reduction, Support, Work

from . import bounds
from .bounds import MOST_EXTENT
from .space import HEIGHT, LEAF

#: The time of a pair in a list over that of a pair among all.
SLOWER = 1.3


def takes(problem: Problem) -> bool:
    """Whether a problem that packed operands can compute can be summed over lists."""
    # In one dimension it cannot pay; a packed operand of up to sixteen is as narrow as any.
    return problem.precision in ("fast", "high") and 2 <= problem.d <= 16


def looks(problem: Problem, *, for_price: bool = False) -> bool:
    """Whether lists may pay, and finding out how many pairs matter is cheap, for the backend or for the price."""
    return takes(problem) and _pairs(problem) >= (2e11 if for_price else 4e10) and pays(problem, 0.0)


def pays(problem: Problem, share: float) -> bool:
    """Whether lists that leave a share of the pairs are faster than all pairs."""
    return _pairs(problem) * (1.0 - SLOWER * share) >= _besides(problem)


def _pairs(problem: Problem) -> float:
    """The number of pairs at "fast" that take the same time."""
    return problem.pairs * (2.0 if problem.precision == "high" else 1.0)


def _besides(problem: Problem) -> float:
    """The overhead of lists, in pairs at "fast": the host's launches; order and bounds, for every point."""
    return 2e10 + 1e4 * (problem.m + problem.n)


def left_out(problem: Problem) -> float:
    """The largest share of a row's sum that lists leave out."""
    return 0.3 * TOLERANCES[problem.precision][problem.reduction].absolute


def listed_share(problem: Problem) -> float | None:
    """The approximate share of the pairs that is summed; None: all."""
    if not looks(problem, for_price=True) or bounds.formula(problem, problem.extent, listed=True) != "packed":
        return None
    share = typical_share(problem, LEAF, HEIGHT, left_out(problem))
    return share if pays(problem, share) else None


def work(problem: Problem) -> Work:
    """The kernels' work per pair, which does not depend on launch parameters."""
    pairs, d, mean = problem.pairs, problem.d, problem.reduction is Reduction.MEAN
    two_passes, extent, share = bounds.shifts_rows(problem), problem.extent, listed_share(problem)
    around = 12  # the host's time around a pass's kernels, in launches
    if share is not None or bounds.formula(problem, extent) == "packed":
        width = bounds.packed_dimensions(d)
        corrections, exact = bounds.form(problem, extent, bounds.grid_step(problem, extent)), bounds.exact(problem)
        full = corrections == bounds.Form.FULL
        # Of its products: hi·hi, lo·hi and hi·lo, then lo·lo, the rest, and the constants.
        pieces = 3 + (corrections >= bounds.Form.PAIRED) + 2 * (corrections == bounds.Form.FULL)
        exponent = pieces * width + 16 * ((not bounds.merges(d)) + (corrections >= bounds.Form.LONG))
        first = (3 * width + 16) if two_passes else 0
        # Of the second: pieces of φ times pieces of what it is multiplied by, less what is small.
        stored = bounds.stores(problem, corrections)
        if stored and bounds.mirrors(problem):
            exponent //= 2
        products = 6 if exact else 5 if corrections == bounds.Form.FULL and not stored else 3
        second = products * width * mean
        # Time of kernels over that of their products at the peak rate, where φ goes through memory 2.6 times, and over
        # that of their exponentials: units wait for each other. Measured on an H100 and an H200 with 32,768 points in 3
        # to 384 dimensions (benchmarks/notes/choice.md).
        slower, waits = (((1.8, 2.2), (1.5, 2.1)), ((2.0, 3.0), (1.8, 4.9)))[exact][mean]
        slower = 2.6 if stored else slower
        scalar = 6.0 if mean else 4.0
        read = (problem.m + problem.n) * (8 * d + 4 * (2 + full) * width + 128)
        # At 2e12 pairs and 2.5e5 launches a second.
        besides = 0 if share is None else math.ceil(_besides(problem) / 2e12 * 2.5e5)
        summed = pairs * (1.0 if share is None else SLOWER * share)
        found = Work(
            matrix_flops={"float16": slower * 2.0 * (first + exponent + second) * summed},
            scalar_flops=waits * 2.0 * (scalar + (4.0 if two_passes else 0.0)) * summed,  # an instruction is an FMA
            exps=waits * (2.0 if two_passes else 1.0) * summed,
            bytes=read + 8.0 * pairs * stored + 8.0 * problem.m * (d + 1),
            launches=(2 if two_passes else 1) * around + besides,
        )
    else:
        kind = bounds.arithmetic(problem, extent)
        distance = (4.0 if kind == "doubled" else 2.0) * d + 3.0
        many = d > bounds.MOST_DIRECT
        operations = (distance * (1 + (mean and many)) + (d if mean else 1.0)) * 2.0
        # Times for one instruction; more of them where many coordinates are read for every row of a tile. Measured on
        # an H200 in 1 to 256 dimensions, within a fifth; in float64 those of LAPLACE.
        times = {"float32": 6.0 if many else 2.0, "float64": 3.6 * d**0.15}.get(kind, 3.0 * d**0.15)
        if kind == "doubled" and mean:
            times = 1.8 * d**0.15 if many else 1.5
        operations = (times * operations + (140.0 if kind == "float64" else 0.0)) * pairs  # and its exponential
        found = Work(
            matrix_flops={"float64": operations} if kind == "float64" else {},
            scalar_flops=operations,
            exps=1.5 * pairs if kind == "float32" else float(pairs),
            bytes=32.0 * (problem.m + problem.n) * d + 8.0 * problem.m * (d + 1),
            launches=around,
        )
    if problem.device.startswith("cpu"):
        total = 1e4 * (found.scalar_flops + sum(found.matrix_flops.values()))  # the interpreter takes so much longer
        return Work(scalar_flops=total, exps=found.exps, bytes=found.bytes, parallel=False)
    return found


def _supports(problem: Problem) -> Support:
    if problem.d > 4096:  # no test has more dimensions; every 64 more need kernels of their own
        return Support(False, f"has kernels for up to 4096 dimensions, not {problem.d}")
    # As Triton reads it when it is imported.
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if problem.device.startswith("cpu") and not interpreted:
        return Support(False, "Triton compiles for GPUs; TRITON_INTERPRET=1 interprets its kernels on a CPU")
    if problem.extent > MOST_EXTENT:
        return Support(False, f"has sums up to {MOST_EXTENT:g} bandwidths from the origin, not {problem.extent:g}")
    if "groups" in problem.requires:
        within = takes(problem) and bounds.formula(problem, problem.extent, listed=True) == "packed"
        return Support(within, "" if within else "takes groups in 2 to 16 dimensions, near the origin")
    share = listed_share(problem)
    if share is not None or bounds.formula(problem, problem.extent) == "packed":
        how = "half-precision pieces on Tensor Cores"
        return Support(True, how if share is None else f"{how}; about {100.0 * share:.2g} % of the pairs matter")
    kind = bounds.arithmetic(problem, problem.extent)
    return Support(True, f"direct differences in {'pairs of float32' if kind == 'doubled' else kind}")


def _extent_limit(problem: Problem) -> float:
    """That of the fast formula; of packed operands too where direct differences are faster, but not than lists."""
    packed = "groups" in problem.requires or looks(problem, for_price=True) or not bounds.prefers_direct(problem)
    return bounds.packed_limit(problem) if packed else MOST_EXTENT


INFO = BackendInfo(
    name="triton",
    protocol=(1, 0),
    implementation="sdkde_triton.backend:TritonBackend",
    devices=("cuda", "cpu"),
    precisions=("fast", "high"),
    features=frozenset({"weights", "range", "line", "moves", "criteria", "groups", "order"}),
    requires_modules=("torch", "triton"),
    install="pip install 'sdkde-core[triton]'  # on Linux",
    arrays="torch",
    startup_seconds=4.2,  # importing, and a context; measured with kernels that were compiled before
    supports=_supports,
    extent_limit=_extent_limit,
    work=lambda problem, config: work(problem),
    # The problem's kernels: .2 to .7 s each, .5 more by Triton 3.6, side by side.
    compile_seconds=lambda problem: 0.0 if problem.device.startswith("cpu") else 1.0,
    tuning="sdkde_triton.tunables:SPACE",
)
