"""Samples prepared once, for many batches of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sdkde_core

from .. import metrics
from ..problems import Data, pool
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Table
from ..timing import seconds_of

#: Rows that errors are taken over.
ROWS = 128


def cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((500, 50), (30_000, 1000), (2**20, 4096))
    for method in ("kde", "sdkde"):
        yield {"subject": "auto, fast", "method": method, "n": n, "m": m, "d": 16, "batches": setting.at(3, 10, 100)}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds to prepare, of a batch of queries then, and of a batch by ``estimate``; the worst row of the first.

    Errors of sdkde are of the density of the points as they were moved.
    """
    ((x, y, h),) = pool("eight", case["n"], case["m"], case["d"], "float32", setting.device, 1)
    batches = [y + 0.01 * k for k in range(case["batches"])]
    options: dict[str, Any] = {"method": case["method"], "bandwidth": h, "precision": "fast", "device": setting.device}
    some = batches[: 3 if case["method"] == "sdkde" else None]
    sdkde_core.prepare(x + 0.01, **options).estimate(y)  # compiles
    first, ready = seconds_of(lambda: sdkde_core.prepare(x, **options), setting.device)
    raw = ready.estimate(y, log=True)
    then, _ = seconds_of(lambda: [ready.estimate(q) for q in batches], setting.device)
    each, _ = seconds_of(lambda: [sdkde_core.estimate(x, q, **options) for q in some], setting.device)
    moved = None
    if case["method"] == "sdkde":
        moved = sdkde_core.debias(x, **{key: value for key, value in options.items() if key != "method"})
    truth = metrics.exact(Data(x, y, h), case["method"], ROWS, moved)
    return {
        "prepare": 1e3 * first,
        "batch": 1e3 * then / len(batches),
        "by_estimate": 1e3 * each / len(some),
        **metrics.against_exact(raw, "log", truth, case["method"], case["n"], case["d"], h),
    }


REGISTRY.add(
    Benchmark(
        "prepared",
        "ours",
        "Samples prepared once for many batches of queries, beside one estimate per batch.",
        cases,
        measure,
        (
            Table(
                "Milliseconds",
                ("method", "n", "m"),
                {
                    "prepare": "prepare",
                    "a batch then": "batch",
                    "a batch by estimate": "by_estimate",
                    "worst row": "worst",
                },
            ),
        ),
        gpu=True,
        weight=0.5,
    )
)
