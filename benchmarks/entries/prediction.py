"""How well the cost model predicts this CPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from sdkde_core.choice import cost, hardware, registry
from sdkde_core.protocol import Reduction

from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Table

SIZES = ((500, 500), (4000, 1000), (20000, 2000), (100_000, 100), (8000, 8000))


def cases(setting: Setting) -> Iterator[Case]:
    for n, m in setting.at(((300, 100),), SIZES, SIZES):
        for d in setting.at((1, 3), (1, 3, 16, 64), (1, 3, 16, 64)):
            for reduction in Reduction:
                for precision in ("fast", "high"):
                    yield {"backend": setting.option("backend", "numpy"), "n": n, "m": m, "d": d,
                           "reduction": str(reduction), "precision": precision}  # fmt: skip


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Predicted and measured milliseconds of a reduction on this CPU."""
    from sdkde_core.arrays import convert
    from sdkde_core.plugin import reduce_pass
    from sdkde_core.protocol import Columns
    from sdkde_core.testing.problems import make

    from ..timing import seconds_of

    record = registry.find(case["backend"])
    if record is None or record.info is None or not record.ok:
        raise Skipped(record.reason if record else f"no backend {case['backend']!r}")
    info, backend = record.info, record.info.load()
    on = hardware.cpu()
    drawn = make("mixture", case["n"], case["m"], case["d"], extent=12.0)
    problem = drawn.problem(Reduction(case["reduction"]), case["precision"])
    points, log_weights, queries = (
        convert(x, info.arrays, "cpu") for x in (drawn.points, drawn.log_weights, drawn.queries)
    )
    columns = Columns(points, log_weights)
    times = [seconds_of(lambda: reduce_pass(backend, info, problem, columns, queries), "cpu")[0] for _ in range(3)]
    predicted = cost.predict(info, problem, on)
    assert predicted is not None
    return {"predicted": 1e3 * predicted, "ms": 1e3 * statistics.median(times)}


def views(rows: list[dict[str, Any]]) -> list[Any]:
    factors = np.array([row["predicted"] / row["ms"] for row in rows])
    ranks = [np.argsort(np.argsort([row[key] for row in rows])) for key in ("predicted", "ms")]
    rank = np.corrcoef(*ranks)[0, 1] if len(rows) > 2 else float("nan")
    worst = np.maximum(factors, 1 / factors)
    note = f"{len(rows)} problems: rank correlation {rank:.3f}, median factor {np.median(factors):.2f}, "
    far = np.sort(worst)[-10:].min()
    return [
        Table(
            "The ten predictions that are farthest off",
            ("backend", "reduction", "precision", "n", "m", "d"),
            {"predicted, ms": "predicted", "ms": "ms", "factor": lambda row: row["predicted"] / row["ms"]},
            keep=lambda row: max(row["predicted"] / row["ms"], row["ms"] / row["predicted"]) >= far,
            note=note + f"worst factor {worst.max():.2f}.",
        )
    ]


REGISTRY.add(
    Benchmark(
        "prediction",
        "ours",
        "How well the cost model predicts this CPU: predicted against measured time over a grid of problems.",
        cases,
        measure,
        views,
    )
)
