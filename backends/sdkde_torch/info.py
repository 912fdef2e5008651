"""The PyTorch backend's entry point."""

from __future__ import annotations

from sdkde_core.plugin import cpu_threads
from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support, Work

from .bounds import CHUNK, extent_limit, formula, has_double, terms_at_once


def _supports(problem: Problem) -> Support:
    kind = problem.device.partition(":")[0]
    if not has_double(problem):
        lacking = "mps devices have no float64" if kind == "mps" else f"not every {kind} device has float64"
        if problem.precision == "float64":
            return Support(False, f"{lacking}: precisions fast and high there; pass device='cpu' for float64")
        if "grad" in problem.requires:
            return Support(False, f"{lacking}, and derivatives are taken in it; pass device='cpu'")
    name, where = formula(problem), "" if has_double(problem) else "; points stay on the host in float64"
    if not name:  # which the device has not
        name, where = formula(problem, double=True), ", on the host"
    how, _, dtype = name.partition(" ")
    words = "direct differences" if how == "direct" else f"{how} squares"
    return Support(True, f"PyTorch, {words} in {dtype}{where}")


def _work(problem: Problem) -> Work:
    """Every operation is a kernel of its own, which reads and writes tiles: in memory on a GPU, in cache on a CPU.

    A product writes a tile, the exponential reads and writes it, a sum or the second product reads it: four numbers a
    pair. Split squares add a product to the tile, LAPLACE multiplies a copy, direct differences pass over two tiles for
    every dimension. Operations take turns with PyTorch's own work: 10 µs on a CPU, 0.8 ms a call on an H200's host.
    """
    pairs, d, on_cpu = problem.pairs, problem.d, problem.device == "cpu"
    mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
    kind, _, dtype = (formula(problem) or "direct float64").partition(" ")
    passes, columns, operations = 4.0 + 4.0 * laplace, d * mean + 1.0, 6.0  # of a tile
    if kind == "direct":
        passes, columns, operations = passes + (7.0 if mean else 5.0) * d, 1.0, 6.0 + (2.75 if on_cpu else 6.5) * d
    else:
        passes, columns = passes + 2.0 * (kind == "split"), columns + (3.0 * d + 5.0 if kind == "split" else d + 2.0)
    # Sums below n e⁻⁷¹, in float64 n e⁻⁶⁶⁷, are formed again after a pass for the largest exponents: three products and
    # two exponentials. ½ r² of two points in many dimensions is about R², R the extent; to the nearest of n columns it
    # is n^(−2/d) of that. In few dimensions R says too little; a row that is a column has its own term.
    width, far = (1.0, 8.4) if dtype == "float32" else (2.0, 25.8)  # √71, √667
    again = d >= 8 and not problem.same and problem.extent > far * problem.n ** (1.0 / d)
    passes, columns, operations = (3.0 * x if again else x for x in (passes, columns, operations))
    if mean and kind != "direct" and (part := terms_at_once(problem, dtype)) < CHUNK:
        # A product of so few terms writes what the one before wrote: in the time of two such passes.
        passes, operations = passes + 4.0 * (d + 1) / part, operations + CHUNK / part
    tiles = -(-problem.n // CHUNK) * max(1.0, problem.m / (256.0 if on_cpu else 16384.0))
    read = 16.0 * (problem.m + problem.n) * (d + 2)
    return Work(
        # PyTorch's products of such tiles take longer on a CPU than NumPy's.
        matrix_flops={dtype: (3.0 if on_cpu else 2.0) * columns * pairs},
        scalar_flops=width * (2.0 * passes + 2.0) * pairs,
        # In double precision an exponential is some thirty operations, and a GPU's unit for them is not used.
        exps=(1.0 + again) * (width * (1.0 if on_cpu else 4.0 * width) if dtype == "float64" else 1.0) * pairs,
        bytes=read if on_cpu else read + 5.0 * width * passes * pairs,
        launches=int((1.0 + again) * (150 if on_cpu else 200) + operations * tiles / (cpu_threads() if on_cpu else 1)),
    )


INFO = BackendInfo(
    name="torch",
    protocol=(1, 0),
    implementation="sdkde_torch.backend:TorchBackend",
    devices=("cpu", "cuda", "mps", "xpu"),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "grad"}),
    requires_modules=("torch",),
    install="pip install 'sdkde-core[torch]'",
    arrays="torch",
    startup_seconds=3.5,  # on a GPU; 1.6 on a CPU, where others are faster
    supports=_supports,
    extent_limit=extent_limit,
    work=lambda problem, config: _work(problem),
)
