"""Time by pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import sdkde_core

from ..problems import pool
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Table
from ..subjects import find, here


def cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((256, 32), (4096, 512), (32768, 4096))
    for d in setting.at((2,), (1, 16, 64), (16, 64, 4, 1, 256)):
        for method in ("sdkde", "laplace"):
            for name in here(setting.device, d=d):
                yield {"subject": name, "method": method, "n": n, "m": m, "d": d}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds of every pass alone, medians, as ``explain(measure=True)`` has them, and as predicted."""
    subject, (n, m, d) = find(case["subject"]), (case["n"], case["m"], case["d"])
    subject.check(case["method"], n * (n + m), d, setting.device)
    ((x, y, h),) = pool("eight", n, m, d, subject.dtype, setting.device, 1)
    backend, precision = case["subject"].split(", ")
    how = {"method": case["method"], "bandwidth": h, "backend": backend, "precision": precision}
    try:
        found = [sdkde_core.explain(x, y, measure=True, device=setting.device, **how).passes for _ in range(7)]
    except sdkde_core.BackendUnavailable as error:
        raise Skipped(str(error)) from None
    result: dict[str, Any] = {"h": h}
    for lines in zip(*found[2:]):
        name = lines[0].reduction
        result[name] = 1e3 * statistics.median(line.measured_seconds for line in lines)
        result[f"{name}_predicted"] = lines[0].predicted_seconds and 1e3 * lines[0].predicted_seconds
        result[f"{name}_rows"] = lines[0].m
    if setting.kind == "cuda":
        result["kernels"] = kernels(lambda: sdkde_core.estimate(x.clone(), y, device=setting.device, **how))
    return result


def kernels(call: Callable[[], Any]) -> float:
    """Milliseconds of what a call runs on the card, by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()  # compiles
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return float(sum(event.device_time_total for event in found.key_averages()) / 1e3)


def both(name: str) -> Any:
    """Milliseconds, and in brackets as predicted."""

    def text(row: dict[str, Any]) -> str:
        known = row.get(f"{name}_predicted")
        return "" if name not in row else f"{row[name]:.3g}{f' ({known:.3g})' if known else ''}"

    return text


REGISTRY.add(
    Benchmark(
        "passes",
        "readers",
        "Time by pass, measured and predicted.",
        cases,
        measure,
        (
            Table(
                "Milliseconds of a pass, in brackets as predicted",
                ("d", "method", "subject"),
                {
                    "first pass": both("mean"),
                    "last pass": both("log_sum"),
                    "Laplace's": both("laplace"),
                    "all kernels": "kernels",
                },
            ),
        ),
        gpu=True,
        weight=0.5,
    )
)
