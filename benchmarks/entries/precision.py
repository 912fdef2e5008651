"""Precision against time."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Plot, Table, error_against_time


def cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((256, 32), (8192, 1024), (32768, 4096))
    names = compare.ours(setting, 16, ("fast", "high", "float64"))
    for method in ("sdkde", "kde", "laplace"):
        extra = ["scikit-learn"] if method == "kde" else []
        yield from compare.cases(
            [*names, *compare.FLASH, *compare.TORCH, "PyTorch TF32", *extra], [method], [(n, m, 16)]
        )


REGISTRY.add(
    Benchmark(
        "precision",
        "readers",
        "Error against time: every precision and method of sdkde, and reduced precision in other libraries.",
        cases,
        compare.measure,
        (
            Plot("Error against time", "error", panels="method", draw=error_against_time),
            Table("Milliseconds and errors, d = 16", ("method", "subject"), COMPARED),
        ),
        gpu=True,
        weight=2.0,
    )
)
