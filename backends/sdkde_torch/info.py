"""The PyTorch backend's entry point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sdkde_core.plugin import cpu_threads
from sdkde_core.protocol import AdvancedInfo, Problem, Reduction, Support, Work

from .bounds import CHUNK, PART, extent_limit, formula, has_double


def _supports(problem: Problem) -> Support:
    kind = problem.device.partition(":")[0]
    if not has_double(problem):
        lacking = "mps devices have no float64" if kind == "mps" else f"not every {kind} device has float64"
        if problem.precision == "float64":
            return Support(False, f"{lacking}: precisions fast and high there; pass device='cpu' for float64")
        if "grad" in problem.requires:
            return Support(False, f"{lacking}, and derivatives are taken in it; pass device='cpu'")
    name = formula(problem)
    if not name:
        return Support(
            False, f"without float64 sums up to {extent_limit(problem):.3g} bandwidths, not {problem.extent:.3g}"
        )
    how, _, dtype = name.partition(" ")
    words = "direct differences" if how == "direct" else f"{how} squares"
    where = "" if has_double(problem) else "; points stay on the host in float64"
    return Support(True, f"PyTorch, {words} in {'pairs of float32' if dtype == 'pairs' else dtype}{where}")


def _nearest(problem: Problem) -> float:
    """About how large the exponent of a row's nearest column is, of normal data: ½ r² in bandwidths.

    Distances of two points concentrate around √(2d) standard deviations, less so in few dimensions.
    """
    n, d = problem.n, problem.d
    deviation = problem.extent / (math.sqrt(d) + math.sqrt(2.0 * math.log(max(n, 2))))
    return deviation**2 * d * max(0.03, 1.0 - 2.5 / math.sqrt(d))


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    """Every operation is a kernel of its own, which reads and writes tiles: in memory on a GPU, in cache on a CPU.

    A product writes a tile, the exponential reads and writes it, a sum or the second product reads it: four numbers a
    pair. Split squares add a product to the tile, LAPLACE multiplies a copy, direct differences pass over two tiles for
    every dimension. Operations take turns with what PyTorch does around them: some 10 µs on a CPU, 0.8 ms a call on an
    H200's host.
    """
    pairs, d = problem.pairs, problem.d
    mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
    kind, _, dtype = (formula(problem) or "direct float64").partition(" ")
    dtype = "float32" if dtype == "pairs" else dtype
    passes, columns = 4.0 + 4.0 * laplace, d * mean + 1.0
    if kind == "direct":
        passes, columns = passes + (7.0 if mean else 5.0) * d, columns - d * mean
    else:
        passes, columns = passes + 2.0 * (kind == "split"), columns + (3.0 * d + 5.0 if kind == "split" else d + 2.0)
    width = 1.0 if dtype == "float32" else 2.0
    tiles = -(-problem.n // CHUNK) * max(1.0, problem.m / 256.0 if problem.device == "cpu" else problem.m / 16384.0)
    operations = 6.0 + (2.75 if problem.device == "cpu" else 6.5) * d * (kind == "direct")  # of a tile
    if mean and kind == "split" and dtype == "float32":  # its product is in parts
        operations += 3.0 if d < PART else CHUNK / PART
    read = 16.0 * (problem.m + problem.n) * (d + 2)
    on_cpu = problem.device == "cpu"
    # Where even the nearest points' exponents leave the dtype's range, rows are summed again, relative to the largest.
    # In few dimensions what is far apart is in clusters, more often than not, and neighbours are near.
    own = mean and problem.same and not problem.requires & {"weights", "exclude_self"}
    tiles_only = kind == "direct" or (kind == "expanded" and d < 16)
    reaches = 71.0 if dtype == "float32" else 667.0  # nats below zero at which a row's sum is too small, see `tiles`
    again = 1.0 if own or tiles_only or _nearest(problem) < reaches else 6.0
    return Work(
        # PyTorch's products of such tiles take longer on a CPU than NumPy's.
        matrix_flops={dtype: (3.0 if on_cpu else 2.0) * columns * pairs},
        scalar_flops=width * (2.0 * passes + 2.0) * pairs,
        # In double precision an exponential is some thirty operations, and a GPU's unit for them is not used.
        exps=width * (1.0 if on_cpu else 4.0 * width) * pairs if dtype == "float64" else pairs,
        bytes=read if on_cpu else read + again * 5.0 * width * passes * pairs,
        launches=int((150 if on_cpu else 200) + operations * tiles / (cpu_threads() if on_cpu else 1)),
    )


INFO = AdvancedInfo(
    name="torch",
    protocol=(1, 0),
    implementation="sdkde_torch.backend:TorchBackend",
    devices=("cpu", "cuda", "mps", "xpu"),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "exclude_self", "grad"}),
    requires_modules=("torch",),
    install="pip install 'sdkde-core[torch]'",
    arrays="torch",
    startup_seconds=3.5,  # on a GPU; 1.6 on a CPU, where others are faster
    supports=_supports,
    extent_limit=extent_limit,
    work=_work,
)
