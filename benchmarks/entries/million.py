"""The paper's million samples; and Fourier sums of as many, also with queries on a grid and with heavy tails."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Table


def cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((2000, 250), (50_000, 6250), (2**20, 2**17))
    names = compare.ours(setting, 16)
    if setting.kind == "cuda":  # the others take more than ten seconds a call
        names = [name for name in names if name.startswith(("hopper", "triton", "numba-cuda"))]
    yield from compare.cases([*names, "flash-sd-kde TF32"], ["sdkde"], [(n, m, 16)])
    fourier = [name for name in compare.ours(setting, 1, ("high",)) if name.startswith("fourier")]
    for kind in ("eight", "grid", "t3"):  # queries on a grid; one sample in a hundred thrown far
        sizes = [(n, m, d) for d in setting.at((1,), (1, 2), (1, 2, 3))]
        yield from compare.cases([*fourier, *(names[:2] if kind == "eight" else ())], ["sdkde"], sizes, kind)


REGISTRY.add(
    Benchmark(
        "million",
        "paper",
        "SD-KDE of a million samples at 131k queries in 16 dimensions, and by Fourier sums in one to three.",
        cases,
        compare.measure,
        (
            Table(
                "Milliseconds and errors; published, 16 dimensions on an A6000: 2300 ms",
                ("d", "kind", "subject"),
                COMPARED | {"worst shift": "shift"},
                note="Errors are of some rows, given each subject's own moved points, and of as many shifts.",
            ),
        ),
        gpu=True,
    )
)
