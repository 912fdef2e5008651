"""The Numba backend's entry point: what sums over all pairs cost, over the pairs that matter, and which it takes."""

from __future__ import annotations

import math
from dataclasses import replace

from sdkde_core.nearby import left_out, rough_share, typical_share
from sdkde_core.plugin import cpu_threads, prices
from sdkde_core.protocol import BackendInfo, Columns, Problem, Reduction, Support, Work

from .bounds import LEAF, MOST_EXTENT, TILE, choose, double_limit, extent_limit, takes_leaves


def _supports(problem: Problem) -> Support:
    # Other kernels than the Gaussian need finite squares of distances.
    most = 2e149 if "kernel" in problem.requires else MOST_EXTENT
    if problem.extent > most:
        return Support(False, f"has sums up to {most:g} bandwidths from the origin, not {problem.extent:g}")
    if "groups" in problem.requires:
        able = problem.reduction is Reduction.LOG_SUM and problem.extent <= double_limit(problem)
        return Support(able, f"has log sums of groups up to {double_limit(problem):.2g} bandwidths from the origin")
    found = _work(problem)[1]
    if found is None:
        return Support(True, f"compiled, {choose(problem)}")
    how = "direct differences in float32" if takes_leaves(problem) else str(choose(problem))
    return Support(True, f"compiled, {how}; about {min(100.0, 100.0 * found):.2g} % of the pairs matter")


def _work(problem: Problem) -> tuple[Work, float | None]:
    """Return what the backend does, and the share of the pairs that it is likely to sum; None for all."""
    left = None
    if _looks(problem):
        left = _if_it_pays(problem, typical_share(problem, TILE, TILE, left_out(problem)))
    some = _over_all(problem) if left is None else _over_some(problem, left)
    threads = cpu_threads()
    tasks = min(max(1.0, problem.pairs * (problem.d + 16.0) / 2**25), 4.0 * threads)  # as the backend deals them out
    idle = prices.idle(threads, tasks, threads)  # cores that are left alone
    sorting = 0.0 if left is None else prices.speedup(threads) * _sorting(problem)
    work = replace(
        some,
        matrix_flops={dtype: idle * flops for dtype, flops in some.matrix_flops.items()},
        scalar_flops=idle * some.scalar_flops + sorting,
        exps=idle * some.exps,
        # Packing transposes the columns: a number takes as long as 50 bytes read.
        bytes=32.0 * (problem.m + problem.n) * (problem.d + 2) + 50.0 * problem.n * problem.d,
        launches=45,
    )
    return work, left


def pays(problem: Problem, columns: Columns) -> bool:
    """Whether to leave pairs out of sums over these finite columns, by a sample of them."""
    if not _looks(problem):
        return False
    points, looked = columns.points, (48, 1 << 12)  # rows and columns
    found = rough_share(problem, points, points, columns.log_weights, TILE, TILE, left_out(problem), looked)
    return _if_it_pays(problem, found) is not None


def _if_it_pays(problem: Problem, share: float) -> float | None:
    """The share of the pairs that lists leave, where sums over these are faster by one thread."""
    some = _seconds(_over_some(problem, share)) + _seconds(Work(scalar_flops=2.0 * _sorting(problem)))
    return share if share <= 0.95 and some < 0.8 * _seconds(_over_all(problem)) else None


def _looks(problem: Problem) -> bool:
    """Whether to look: of few rows the columns are shared out over threads, but not where tiles are left out."""
    least = 0.5 * max(1.0, problem.d / 16)  # seconds of one thread; a look takes 20 ms in up to sixteen dimensions
    return problem.kernel == "gaussian" and problem.m >= 8 * TILE and _seconds(_over_all(problem)) > least


def _over_all(problem: Problem) -> Work:
    """Over the rate of matrix products, exponents take 1.15, means 0.8, and other kernels, by differences, 0.75.

    Double precision costs two singles; the polynomial exp2 is two to four times as fast as NumPy's exp.
    """
    pairs, d = problem.pairs, problem.d
    dtype = choose(problem).dtype
    means = d if problem.reduction is Reduction.MEAN else 0
    double = 1.0 if dtype == "float32" else 2.0
    rate, passes = (1.15, 1.5) if problem.kernel == "gaussian" else (0.75, 3.0)
    if problem.reduction is Reduction.LAPLACE:
        passes = 2.0
    return Work(
        matrix_flops={dtype: 2.0 * ((d + 1) / rate + means / 0.8) * pairs},
        scalar_flops=double * passes * pairs,
        exps=0.25 * double * pairs,
    )


def _over_some(problem: Problem, share: float) -> Work:
    """The listed pairs, as measured from three to ten dimensions, and making the lists.

    Leaf by leaf some 0.3 of the listed pairs are summed if few are listed, and all if all are. By tiles a listed pair
    takes as long as a pair in a sum over all.
    """
    whole, leaves, mean = _over_all(problem), takes_leaves(problem), problem.reduction is Reduction.MEAN
    again = share * (0.05 if leaves else 1.0)  # of rows for which float32 does not do, of most data
    pairs = share * problem.pairs if leaves else 0.0
    summed = 0.3 + 0.7 * share**2
    flops = {dtype: again * count for dtype, count in whole.matrix_flops.items()}
    flops["float32"] = flops.get("float32", 0.0) + (6.6 if mean else 3.0) * problem.d * summed * pairs
    scalar = again * whole.scalar_flops + (0.5 + 0.6 * summed) * pairs
    return Work(matrix_flops=flops, scalar_flops=scalar, exps=again * whole.exps)


def _sorting(problem: Problem) -> float:
    """Operations of putting columns, and rows, in order: level by level of a tree."""
    points = [problem.n] if problem.same else [problem.n, problem.m]
    return sum(85.0 * (problem.d + 4) * k * max(1.0, math.log2(k / LEAF)) for k in points if k)


def _seconds(some: Work) -> float:
    """Of one thread, nominal: bits depend on the choice, so it may not depend on measurements or on the threads."""
    products = some.matrix_flops.get("float64", 0.0) / 2.3e10 + some.matrix_flops.get("float32", 0.0) / 4.6e10
    return products + some.scalar_flops / 4.4e9 + some.exps / 1.2e9


INFO = BackendInfo(
    name="numba",
    protocol=(1, 0),
    implementation="sdkde_numba.backend:NumbaBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "kernel", "told", "groups"}),
    requires_modules=("numba",),
    install="pip install 'sdkde-core[numba]'",
    startup_seconds=0.7,
    supports=_supports,
    extent_limit=lambda problem: (double_limit if "groups" in problem.requires else extent_limit)(problem),
    work=lambda problem, config: _work(problem)[0],
    tuning="sdkde_numba.tunables:SPACE",
    # No compile_seconds: kernels are compiled once on a machine (0.4 to 2 s) and kept.
)
