"""The Triton backend's entry point."""

from __future__ import annotations

import os

from sdkde_core.protocol import AdvancedInfo, Problem, Support

from . import price
from .bounds import MOST_EXTENT, arithmetic, formula, packed_limit, prefers_direct


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
        within = price.takes(problem) and formula(problem, problem.extent, listed=True) == "packed"
        return Support(within, "" if within else "takes groups in 2 to 16 dimensions, near the origin")
    share = price.listed_share(problem)
    if share is not None or formula(problem, problem.extent) == "packed":
        how = "half-precision pieces on Tensor Cores"
        return Support(True, how if share is None else f"{how}; about {100.0 * share:.2g} % of the pairs matter")
    kind = arithmetic(problem, problem.extent)
    return Support(True, f"direct differences in {'pairs of float32' if kind == 'doubled' else kind}")


def _extent_limit(problem: Problem) -> float:
    """That of the fast formula; of packed operands too where direct differences are faster, but not than lists."""
    packed = "groups" in problem.requires or price.looks(problem, for_price=True) or not prefers_direct(problem)
    return packed_limit(problem) if packed else MOST_EXTENT


INFO = AdvancedInfo(
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
    work=lambda problem, config: price.work(problem),
    # The problem's kernels: .2 to .7 s each, .5 more by Triton 3.6, side by side.
    compile_seconds=lambda problem: 0.0 if problem.device.startswith("cpu") else 1.0,
    tuning="sdkde_triton.tunables:SPACE",
)
