"""The NumPy backend's entry point."""

from __future__ import annotations

from sdkde_core.plugin import cpu_threads, prices
from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from . import bounds

#: Threads beyond which they wait for the interpreter's lock: a KDE of 10,000² points in eight dimensions takes 472,
#: 125, 76, 118 and 137 ms on 1, 4, 8, 12 and 16 virtual cores of a Xeon.
MOST_THREADS = 8


def _work(problem: Problem) -> Work:
    """Every array operation is a pass over a tile in cache, at the rates of NumPy's loops.

    One that reads a row's constant or reduces along it costs about two plain ones; double precision costs two singles.
    Each block of rows costs some 250 µs for its buffers.
    """
    pairs, d = problem.pairs, problem.d
    mean = problem.reduction is Reduction.MEAN
    formula = bounds.formula(problem)
    # Maximum, subtraction, clamp, sum. LAPLACE keeps exponents beside terms and multiplies them: tiles leave the cache.
    passes = 15.0 if problem.reduction is Reduction.LAPLACE else 10.0
    if problem.same and not problem.requires and formula == "expanded squares in float64":
        passes -= 4.0  # no maximum, no subtraction
    columns, packing = float(d if mean else 0), 32.0  # of all matrix products; read, and written packed, with gaps
    if formula.startswith("expanded"):
        columns += d + 2
    elif formula.startswith("split"):
        passes, columns, packing = passes + 8.0, columns + 3 * d + 4, 128.0  # written thrice, to memory not used before
        if mean and problem.extent > bounds.product_shift_limit(problem):
            passes, columns = passes + 3.0 * d * prices.beyond_cache(d), columns - d
    else:
        passes, columns = passes + (7.0 if mean else 4.0) * d * prices.beyond_cache(d), columns - (d if mean else 0)
    exps = 1.0
    if problem.kernel not in ("gaussian", "exponential"):  # a sine costs more; the others have no such thing
        passes, exps = passes - 5.0, 1.5 if problem.kernel == "cosine" else 0.0
    dtype = formula.rpartition(" ")[2]
    double = 1.0 if dtype == "float32" else 2.0
    threads, chunk = cpu_threads(), bounds.columns_of_a_task(problem.m, problem.n)
    tasks = max(1.0, problem.m / bounds.ROWS) * max(1.0, problem.n / chunk)
    idle = prices.idle(threads, tasks, min(threads, MOST_THREADS))  # cores that NumPy leaves alone
    return Work(
        matrix_flops={dtype: idle * 2.0 * columns * pairs},
        scalar_flops=idle * double * passes * pairs,
        # NumPy's exp of a double costs two single ones with AVX-512, and five without.
        exps=idle * exps * (1.0 if dtype == "float32" else 3.0) * pairs,
        bytes=packing * (problem.m + problem.n) * (d + 2),
        launches=5 + 25 * (-(-problem.m // 256)),
    )


INFO = BackendInfo(
    name="numpy",
    protocol=(1, 0),
    implementation="sdkde_numpy.backend:NumpyBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "kernel", "range"}),
    requires_modules=("numpy",),
    install="pip install sdkde-core",
    startup_seconds=0.12,  # the core's own imports, which the others' have too
    supports=lambda problem: Support(True, f"NumPy, {bounds.formula(problem)}"),
    extent_limit=bounds.extent_limit,
    work=lambda problem, config: _work(problem),
)
