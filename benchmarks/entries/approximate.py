"""KDE beside approximate methods."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Plot, Table, error_against_time, problem
from ..subjects import here


def cases(setting: Setting) -> Iterator[Case]:
    names = [name for name in here("cpu", ("fast", "high")) if not name.startswith("keops")]
    if setting.kind == "cuda":
        names += [name for name in compare.ours(setting, 1, ("fast", "high")) if name not in names]
    trees = [f"scikit-learn, rtol {rtol}" for rtol in ("0.0001", "0.01", "0.1")]
    names += ["KDEpy FFTKDE", "KDEpy FFTKDE, fine grid", "statsmodels FFT", "SciPy", "scikit-learn", *trees]
    for d in setting.at((1,), (1, 2, 3), (1, 2, 3)):
        yield from compare.cases(names, ["kde"], [(n, n, d) for n in setting.at((300,), (10_000,), (10_000, 100_000))])


REGISTRY.add(
    Benchmark(
        "approximate",
        "readers",
        "KDE in one to three dimensions: error against time, beside binned FFTs and trees.",
        cases,
        compare.measure,
        (
            Plot("Error against time", "error", panels=problem, draw=error_against_time),
            Table("Milliseconds and errors", ("d", "n", "subject"), COMPARED),
        ),
    )
)
