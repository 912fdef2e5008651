"""The PyTorch backend's entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdkde_core.protocol import BackendInfo, Problem, Support, Work

from .bounds import extent_limit, formula, has_double

__all__ = ["INFO"]

_WORDS = {
    "expanded": "expanded squares in",
    "split": "split squares in",
    "direct": "direct differences in",
}


def _scaled(problem: Problem) -> Problem:
    """The problem at its smallest scale, the hardest."""
    from dataclasses import replace

    if not problem.scales:
        return problem
    extent = problem.extent / min(problem.scales)
    return replace(problem, scales=(), requires=problem.requires - {"multi_scale"}, extent=extent)


def _supports(problem: Problem) -> Support:
    kind = problem.device.partition(":")[0]
    if not has_double(problem):
        lacking = f"float64 cannot be counted on on {kind} devices"
        if problem.level == "float64":
            return Support(False, f"{lacking}: levels fast and high there; pass device='cpu' for float64")
        if "grad" in problem.requires:
            return Support(False, f"{lacking}, and derivatives are taken in it; pass device='cpu'")
    if {"grad", "values"} <= problem.requires:
        return Support(False, "does not differentiate means of values")
    name = formula(_scaled(problem))
    if not name:
        return Support(
            False, f"without float64 sums up to {extent_limit(problem):.3g} bandwidths, not {problem.extent:.3g}"
        )
    how, _, dtype = name.partition(" ")
    where = "" if has_double(problem) else "; points stay on the host in float64"
    return Support(True, f"PyTorch, {_WORDS[how]} {'pairs of float32' if dtype == 'pairs' else dtype}{where}")


def _work(problem: Problem, config: Mapping[str, Any] | None) -> Work:
    raise NotImplementedError


INFO = BackendInfo(
    name="torch",
    protocol=(1, 3),
    implementation="sdkde_torch.backend:TorchBackend",
    devices=("cpu", "cuda", "mps", "xpu"),
    levels=("fast", "high", "float64"),
    features=frozenset({"weights", "exclude_self", "values", "multi_scale", "grad"}),
    deterministic=True,
    requires_modules=("torch",),
    install="pip install 'sdkde[torch]'",
    arrays="torch",
    startup_seconds=1.5,
    supports=_supports,
    extent_limit=extent_limit,
    work=_work,
)
