"""Every reduction's worst row over its tolerance."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from sdkde_core.choice import registry
from sdkde_core.protocol import Reduction
from sdkde_core.testing.problems import CASES, answer, errors, make, truth

from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Table

DIMENSIONS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784)


def cases(setting: Setting) -> Iterator[Case]:
    dimensions = setting.at((3,), (1, 3, 17, 784), DIMENSIONS)
    extents = setting.at((10.0,), (10.0, 1e4), (10.0, 30.0, 100.0, 1e3, 1e4))
    for kind, d, extent in product(tuple(CASES)[: setting.at(2, None, None)], dimensions, extents):
        yield {"backend": setting.option("backend", "numpy"), "kind": kind, "d": d, "extent": extent}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """For every precision and reduction the worst row over its tolerance; at most 1 is within the contract."""
    record = registry.find(case["backend"])
    if record is None or record.info is None or not record.ok:
        raise Skipped(record.reason if record else f"no backend {case['backend']!r}")
    info, backend = record.info, record.info.load()
    small = (401, 101) if case["d"] < 200 else (203, 53)
    drawn = make(case["kind"], *small, case["d"], case["extent"])
    found: dict[str, float] = {}
    declined = ""
    for same in (False, True):
        want = truth(drawn, same=same)
        for precision, reduction in product(info.precisions, Reduction):
            problem = drawn.problem(reduction, precision, same=same)
            if not (support := info.supports(problem)).ok:
                declined = support.reason
                continue
            error, name = (
                float(errors(problem, answer(info, backend, problem, drawn), want).max()),
                f"{precision} {reduction}",
            )
            found[name] = float(np.fmax(error, found.get(name, 0.0)))
    if not found:
        raise Skipped(f"{case['backend']}: {declined}")
    return found


def views(rows: list[dict[str, Any]]) -> list[Any]:
    """The worst of all, by backend, precision and reduction, and where it is."""
    names = dict.fromkeys(name for row in rows for name in row if " " in name)
    cells = {name: functools.partial(lambda name, row: row.get(name), name) for name in names}
    worst = [
        max((row for row in rows if row["backend"] == backend), key=lambda row: row.get(name, 0.0))
        for backend in dict.fromkeys(row["backend"] for row in rows)
        for name in names
    ]
    return [
        Table(
            "Worst row over its tolerance; rows of the table are where one of a backend's columns is worst",
            ("backend", "kind", "d", "extent"),
            cells,
            keep=lambda row: any(row is where for where in worst),
        )
    ]


REGISTRY.add(
    Benchmark(
        "tolerances",
        "ours",
        "Worst error over tolerance of a backend's reductions: dimensions, extents, tails, clusters, weights.",
        cases,
        measure,
        views,
    )
)
