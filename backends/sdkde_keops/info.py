"""The KeOps backend's entry point."""

from __future__ import annotations

from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import MOST_EXTENT, dtype, extent_limit


def _supports(problem: Problem) -> Support:
    # Beyond some 140 dimensions KeOps sums in chunks of them on a GPU, for which it cannot generate shifts, and which
    # are slow: 3 ns a pair in 784.
    on_gpu = ("a GPU", 128 if problem.reduction is Reduction.MEAN else 256)
    where, most = ("a CPU", 1024) if problem.device == "cpu" else on_gpu
    if problem.d > most:
        return Support(False, f"has {problem.reduction} in up to {most} dimensions on {where}, not {problem.d}")
    if problem.extent > MOST_EXTENT:
        return Support(False, f"has sums up to {MOST_EXTENT:g} bandwidths from the origin, not {problem.extent:g}")
    return Support(True, f"KeOps, direct differences in {dtype(problem)}")


def _work(problem: Problem) -> Work:
    """One loop over the pairs: differences, squares and sums for every dimension, an exponential of the C library.

    On a CPU, where nothing is vectorised, a pair takes 10.5 ns, and 0.9 a dimension (MEAN 2.4); a nanosecond is 5.3
    operations of a nominal core. On an H200 the figures fit measured times, by its rate of scalar operations, to a
    third. Beyond 32 dimensions what a GPU's thread keeps no longer fits in registers.
    """
    d, mean = problem.d, problem.reduction is Reduction.MEAN
    if problem.device == "cpu":
        each = 5.3 * (10.5 + (2.4 if mean else 0.9) * d)
    elif dtype(problem) == "float32":
        each = 160.0 + 9.0 * d * max(1.0, d / 80.0)
    elif mean:
        each = 225.0 + 30.0 * d * max(1.0, d / 32.0) ** 2
    else:
        each = 350.0 + 11.0 * d * max(1.0, d / 32.0)
    # What PyTorch and KeOps do on the host around a kernel takes 0.57 ms on an H200's.
    return Work(scalar_flops=each * problem.pairs, bytes=8.0 * (problem.m + problem.n) * (d + 2), launches=145)


INFO = BackendInfo(
    name="keops",
    protocol=(1, 0),
    implementation="sdkde_keops.backend:KeopsBackend",
    devices=("cpu", "cuda"),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights"}),
    requires_modules=("pykeops", "threadpoolctl", "torch"),
    install="pip install 'sdkde-core[keops]'  # on Linux and macOS",
    arrays="torch",
    startup_seconds=4.0,  # PyTorch, KeOps, and a formula that is in its cache
    supports=_supports,
    extent_limit=extent_limit,
    work=lambda problem, config: _work(problem),
    # One formula, with KeOps's cache empty. On a CPU 5 to 10 s, 25 in 1024 dimensions. On an H200's host the first
    # formula takes 20 to 25 s, others under one; the price may not depend on what was compiled.
    compile_seconds=lambda problem: 10.0 + 0.015 * problem.d if problem.device == "cpu" else 22.0,
)
