"""SD-KDE in 1 to 784 dimensions."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare, published
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Plot, Table


def cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((200, 25), (4096, 512), (32768, 4096))
    for d in setting.at((1, 17), (1, 2, 8, 16, 64, 256), (16, 64, 1, 2, 3, 8, 32, 128, 256, 384, 784)):
        names = compare.ours(setting, d, ("fast", "high"))
        if setting.kind == "cuda":
            names = [name for name in names if name.startswith(("triton", "hopper"))]
        ours = [name for name in names if not name.startswith("keops")]
        yield from compare.cases([*ours, "flash-sd-kde TF32"], ["sdkde"], [(n, m, d)])


REGISTRY.add(
    Benchmark(
        "dimensions",
        "readers",
        "SD-KDE in 1 to 784 dimensions at both precisions.",
        cases,
        compare.measure,
        (
            Plot(
                "Dimensions",
                "times",
                x="d",
                labels=("dimensions", "milliseconds"),
                published={"flash-sd-kde": list(published.DIMENSIONS.items())},
            ),
            Table("Milliseconds, worst row", ("d", "subject"), COMPARED),
        ),
        gpu=True,
        weight=2.0,
    )
)
