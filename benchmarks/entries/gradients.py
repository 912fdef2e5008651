"""What derivatives cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import sdkde_core

from ..problems import pool
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Table
from ..subjects import find
from ..timing import seconds_of


def cases(setting: Setting) -> Iterator[Case]:
    n = setting.at(300, 4000, 20_000)
    for method, precision in product(("kde", "sdkde", "laplace"), ("fast", "high")):
        yield {"subject": f"torch, {precision}", "method": method, "n": n, "m": n // 8, "d": 16}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds of an estimate without derivatives, with them, and backward by samples and queries; on a GPU MiB.

    Errors are the norm of a point's derivative less the true one, over the largest of those: of samples and queries.
    """
    subject = find(case["subject"])
    subject.check(case["method"], case["n"] ** 2, case["d"], setting.device)
    import torch

    ((x, y, h),) = pool("eight", case["n"], case["m"], case["d"], subject.dtype, setting.device, 1)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    how = {"method": case["method"], "bandwidth": h, "backend": "torch", "precision": case["subject"].split(", ")[1]}
    attached = [a.clone().requires_grad_() for a in (x, y)]
    taken: dict[str, list[float]] = {"without": [], "forward": [], "backward": []}
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    for _ in range(3):
        taken["without"].append(seconds_of(lambda: sdkde_core.estimate(x, y, **how), setting.device)[0])
        seconds, density = seconds_of(lambda: sdkde_core.estimate(*attached, **how), setting.device)
        taken["forward"].append(seconds)
        total = density.sum()
        seconds, got = seconds_of(lambda t=total: torch.autograd.grad(t, attached), setting.device)
        taken["backward"].append(seconds)
    found = {name: 1e3 * statistics.median(times) for name, times in taken.items()}
    if x.is_cuda:
        found["MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
    for name, derivative, true in zip(("of_samples", "of_queries"), got, exact(case["method"], x, y, h)):
        found[name] = float((derivative - true).norm(dim=1).max() / true.norm(dim=1).max())
    return found


def exact(method: str, x: Any, y: Any, h: float) -> Any:
    """Derivatives of the densities' sum by samples and by queries: PyTorch's, through float64 sums of all pairs."""
    import torch

    x, y = (z.double().requires_grad_() for z in (x, y))

    def exponents(rows: Any, points: Any) -> Any:
        expanded = rows @ points.T - 0.5 * (rows * rows).sum(1)[:, None] - 0.5 * (points * points).sum(1)
        return expanded / h**2

    points, (n, d) = x, x.shape
    if method == "sdkde":
        points = x + 0.5 * (torch.softmax(exponents(x, x), dim=1) @ x - x)
    e = exponents(y, points)
    total = (e.exp() * (1 + d / 2 + e) if method == "laplace" else e.exp()).sum()
    return torch.autograd.grad(total * (2 * math.pi * h * h) ** (-d / 2) / n, (x, y))


REGISTRY.add(
    Benchmark(
        "gradients",
        "ours",
        "Derivatives with respect to samples and queries: their time beside that of the estimate.",
        cases,
        measure,
        (
            Table(
                "Milliseconds, and MiB beyond the inputs",
                ("method", "subject", "n", "m"),
                {
                    "without derivatives": "without",
                    "forward": "forward",
                    "backward": "backward",
                    "MiB": "MiB",
                    "error by samples": "of_samples",
                    "by queries": "of_queries",
                },
            ),
        ),
        gpu=True,
        weight=0.5,
    )
)
