"""The Numba backend's entry point."""

from __future__ import annotations

from sdkde_core.protocol import AdvancedInfo, Problem, Support

from .bounds import MOST_EXTENT, choose, extent_limit, takes_leaves
from .price import work


def _supports(problem: Problem) -> Support:
    # Other kernels than the Gaussian need finite squares of distances.
    most = 2e149 if "kernel" in problem.requires else MOST_EXTENT
    if problem.extent > most:
        return Support(False, f"has sums up to {most:g} bandwidths from the origin, not {problem.extent:g}")
    found = work(problem)[1]
    if found is None:
        return Support(True, f"compiled, {choose(problem)}")
    how = "direct differences in float32" if takes_leaves(problem) else str(choose(problem))
    return Support(True, f"compiled, {how}; about {min(100.0, 100.0 * found):.2g} % of the pairs matter")


INFO = AdvancedInfo(
    name="numba",
    protocol=(1, 0),
    implementation="sdkde_numba.backend:NumbaBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "kernel"}),
    requires_modules=("numba",),
    install="pip install 'sdkde-core[numba]'",
    startup_seconds=0.7,
    supports=_supports,
    extent_limit=extent_limit,
    work=lambda problem, config: work(problem)[0],
    tuning="sdkde_numba.tunables:SPACE",
    # No compile_seconds: kernels are compiled once on a machine (0.4 to 2 s) and kept.
)
