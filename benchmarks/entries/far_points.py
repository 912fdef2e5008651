"""Points far away from all others."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Table
from ..subjects import here


def cases(setting: Setting) -> Iterator[Case]:
    names = here(setting.device, ("fast", "high"), 16)
    names = names if setting.kind == "cpu" else [n for n in names if n.startswith(("triton", "hopper"))]
    for kind in ("eight", "far"):
        sizes = [setting.at((256, 32, 16), (4096, 512, 16), (32768, 4096, 16))]
        yield from compare.cases([n for n in names if "keops" not in n], ["sdkde"], sizes, kind)


REGISTRY.add(
    Benchmark(
        "far-points",
        "ours",
        "SD-KDE with and without ten samples at a distance of 10⁴ bandwidths.",
        cases,
        compare.measure,
        (Table("Milliseconds, worst row", ("subject",), {"ms": "ms", "worst row": "worst"}, "kind"),),
        gpu=True,
        weight=0.5,
    )
)
