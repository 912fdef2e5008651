"""The paper's times by the number of queries."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare, published
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Plot, Table


def cases(setting: Setting) -> Iterator[Case]:
    n, batches = setting.at((512, (4, 32)), (4096, (4, 256, 2048)), (32768, (4096, *(4**k for k in range(1, 8)))))
    sizes = [(n, m, 16) for m in dict.fromkeys(batches)]
    yield from compare.cases([*compare.ours(setting, 16), "flash-sd-kde TF32"], ["sdkde"], sizes, "two")


REGISTRY.add(
    Benchmark(
        "query-batches",
        "paper",
        "SD-KDE of 32k samples in 16 dimensions at 4 to 16384 queries.",
        cases,
        compare.measure,
        (
            Plot(
                "SD-KDE in 16 dimensions by number of queries",
                "times",
                x="m",
                labels=("queries", "milliseconds"),
                published={"flash-sd-kde": list(published.BATCHES.items())},
            ),
            Table("Milliseconds by m", ("subject",), {"": "ms"}, "m"),
        ),
        gpu=True,
    )
)
