"""The paper's figures of times, and of utilisation, in one dimension."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Plot, Table, percent


def cases(setting: Setting) -> Iterator[Case]:
    small = [(2**k, 2**k // 8, 1) for k in range(16, 9, -1)]
    for size in setting.at([(256, 32, 1)], [(2**13, 2**10, 1), (2**11, 2**8, 1)], small):
        yield from compare.cases(compare.everybody(setting, 1), ["sdkde"], [size], "two")
        yield from compare.cases(["scikit-learn"], ["kde"], [size], "two")


REGISTRY.add(
    Benchmark(
        "runtime-1d",
        "paper",
        "SD-KDE in one dimension, 1k to 64k samples, beside the same peers.",
        cases,
        compare.measure,
        (
            Plot("One dimension, n/8 queries", "times", lines=compare.named),
            Table("Milliseconds by n", ("method", "subject"), {"": "ms"}, "n"),
            Table(
                "Share of the time that the exponentials alone would take",
                ("method", "subject"),
                {"": percent("of_exp_limit")},
                "n",
                keep=lambda row: row.get("of_exp_limit") is not None,
            ),
            Table("Worst row of |Δ log p̂| by n", ("method", "subject"), {"": "worst"}, "n"),
        ),
        gpu=True,
        weight=1.5,
    )
)
