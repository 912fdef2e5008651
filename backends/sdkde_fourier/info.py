"""The Fourier backend's entry points: finufft on the CPU, and matrix products on PyTorch's devices."""

from __future__ import annotations

from dataclasses import replace

from sdkde_core.protocol import AdvancedInfo, Problem, Support, Work

from .price import CPU, DEVICE, Ways, likely


def _supports(problem: Problem, by: Ways = CPU) -> Support:
    if problem.d > 3:
        return Support(False, f"d = {problem.d}: modes grow with the power d, it takes at most 3")
    # A transform's error is relative to its largest sum. In three dimensions most rows have too small a sum for ten
    # digits of a log, and are then summed directly over many neighbours.
    if problem.d == 3 and problem.precision == "float64" and problem.pairs > 1 << 27:
        return Support(False, "float64 leaves most rows to direct sums in three dimensions, too many at this size")
    return Support(True, f"Fourier sums{'' if by is CPU else ' in PyTorch'}, {likely(problem, by)[0]}")


def _work(problem: Problem) -> Work:
    work = likely(problem, CPU)[1]
    return replace(work, launches=work.launches + 300)  # to find out which way of summing is faster takes 3 ms


INFO = AdvancedInfo(
    name="fourier",
    protocol=(1, 0),
    implementation="sdkde_fourier.backend:FourierBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights"}),
    requires_modules=("finufft",),
    install="pip install 'sdkde-core[fourier]'",
    startup_seconds=0.15,
    supports=_supports,
    work=lambda problem, config: _work(problem),
)

TORCH = AdvancedInfo(
    name="fourier-torch",
    protocol=(1, 0),
    implementation="sdkde_fourier.device:TorchFourierBackend",
    devices=("cuda", "xpu", "cpu"),
    precisions=("fast", "high"),  # most rows have too small a sum for float64's ten digits
    features=frozenset({"weights"}),
    requires_modules=("torch",),
    install="pip install 'sdkde-core[torch]'",
    arrays="torch",
    startup_seconds=3.5,
    supports=lambda problem: _supports(problem, DEVICE),
    work=lambda problem, config: likely(problem, DEVICE)[1],
)
