"""KeOps by hand, and our backend on it."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Table


def cases(setting: Setting) -> Iterator[Case]:
    shapes = [(*setting.at((256, 32), (4096, 512), (32768, 4096)), d) for d in setting.at((1,), (1, 16), (1, 2, 3, 16))]
    for size in shapes:
        yield from compare.cases(["KeOps", "keops, fast", "keops, high"], ["kde", "sdkde", "laplace"], [size])


REGISTRY.add(
    Benchmark(
        "keops",
        "ours",
        "The KeOps backend beside the same sums written directly in KeOps.",
        cases,
        compare.measure,
        (Table("Milliseconds, worst row", ("d", "method", "subject"), COMPARED),),
    )
)
