"""The paper's figure of times in 16 dimensions, that of utilisation, and its table of KeOps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import compare, published
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Plot, Table, number


def sizes(setting: Setting, d: int, largest: int) -> list[tuple[int, int, int]]:
    """The largest of the paper's sizes first, then the others from the smallest on; n/8 queries."""
    powers = {"small": (7, 8), "medium": (11, 12, 13)}.get(setting.scale, (15, *range(11, largest + 1)))
    return [(2**k, 2**k // 8, d) for k in dict.fromkeys(powers)]


def cases(setting: Setting) -> Iterator[Case]:
    for size in sizes(setting, 16, 15):
        yield from compare.cases(compare.everybody(setting, 16), ["sdkde"], [size], "two")
        yield from compare.cases(["scikit-learn", "KeOps"], ["kde"], [size], "two")


def share(row: dict[str, Any]) -> float | None:
    return None if row.get("share_tf32") is None else 100 * row["share_tf32"]


def known(row: dict[str, Any]) -> str:
    """The published time of the same subject."""
    return number(published.RUNTIME.get(compare.named(row).replace("flash-sd-kde TF32", "flash-sd-kde")))


POINTS = {name: [(32768, ms)] for name, ms in published.RUNTIME.items()}
VIEWS = (
    Plot("16 dimensions, n/8 queries", "times", lines=compare.named, published=POINTS),
    Plot(
        "Share of the TF32 peak by the paper's count of operations",
        "utilisation",
        y=share,
        labels=("samples", "per cent"),
        keep=lambda row: share(row) is not None,
    ),
    Table(
        "The largest size, with what was published on an A6000 at 32768 × 4096",
        ("method", "subject"),
        COMPARED | {"TF32 peak": share, "published, ms": known},
        keep=lambda row: row["n"] == 32768,
    ),
    Table("Milliseconds by n", ("method", "subject"), {"": "ms"}, "n"),
    Table("Worst row of |Δ log p̂| by n", ("method", "subject"), {"": "worst"}, "n"),
)
REGISTRY.add(
    Benchmark(
        "runtime-16d",
        "paper",
        "SD-KDE in 16 dimensions, 2k to 32k samples, beside scikit-learn, PyTorch, KeOps and flash-sd-kde.",
        cases,
        compare.measure,
        VIEWS,
        gpu=True,
        weight=4.0,
    )
)
