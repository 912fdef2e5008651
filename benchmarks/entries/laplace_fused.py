"""The paper's figure of Laplace in one pass and in two."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Plot, Table


def cases(setting: Setting) -> Iterator[Case]:
    peers = [*compare.FLASH, "flash-sd-kde TF32, unfused", "kde and a second pass", *compare.TORCH]
    for d in (16, 1):
        ours = compare.ours(setting, d)
        shapes = [(n, n // 8, d) for n in setting.at((256,), (4096,), (32768, 8192, 2048))]
        for size in shapes:
            yield from compare.cases([*ours, *peers], ["laplace"], [size])
            yield from compare.cases(ours, ["kde", "sdkde"], [size])


REGISTRY.add(
    Benchmark(
        "laplace-fused",
        "paper",
        "Laplace in one pass and in two, beside KDE and SD-KDE, in 16 and in one dimension.",
        cases,
        compare.measure,
        (
            Plot("Laplace", "times", panels=lambda row: f"d = {row['d']}", keep=lambda row: row["method"] == "laplace"),
            Table("Milliseconds, worst row", ("d", "n", "method", "subject"), COMPARED),
        ),
        gpu=True,
        weight=1.5,
    )
)
