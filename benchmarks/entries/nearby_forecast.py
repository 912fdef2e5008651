"""How well the share of the pairs is forecast that backends sum over, from which they are priced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sdkde_core
from sdkde_core.nearby import index, lists, order, share
from sdkde_core.protocol import Problem, Reduction, Sample

from ..problems import data
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Row, Table

KINDS = ("eight", "normal", "three", "heavy", "unlike", "coarse", "often")

#: Columns and rows of a tile, points of a leaf, rows of a group, as on CPUs; groups counted; points of a sample, as the
#: plan takes them.
SIZE, HEIGHT, LEAF, GROUP = 128, 32, 8, 512
GROUPS, SAMPLE = 32, 1 << 13


def cases(setting: Setting) -> Iterator[Case]:
    for n in setting.at((10_000,), (20_000, 100_000), (20_000, 100_000, 1_000_000)):
        for d in setting.at((3,), (3, 4, 5, 6, 8, 10), (3, 4, 5, 6, 8, 10)):
            for kind in setting.at(("eight",), KINDS, KINDS):
                for rule in ("silverman", "auto"):
                    yield {"kind": kind, "n": n, "d": d, "bandwidth": rule, "seed": int(setting.option("seed", "3"))}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Shares of the pairs that lists leave for some groups of rows, and that are forecast, for both passes."""
    n, d = case["n"], case["d"]
    x, y, _ = data(case["kind"], n, n // 8, d, case["seed"], "float64")
    bandwidth = sdkde_core.select_bandwidth(x, method="sdkde", rule=case["bandwidth"])
    factor, centre = np.linalg.cholesky(bandwidth.matrix), x.mean(axis=0)
    u, v = (np.linalg.solve(factor, (z - centre).T).T.copy() for z in (x, y))
    log_weights, found = np.full(n, -np.log(n)), {}
    columns = index(u, log_weights, SIZE, LEAF)
    for what, reduction, rows, places in (
        ("first", Reduction.MEAN, u, columns.order),
        ("second", Reduction.LOG_SUM, v, order(v, LEAF)),
    ):
        some, ours = (np.linspace(0, len(z) - 1, min(len(z), SAMPLE)).astype(int) for z in (u, rows))
        sample = Sample(rows[ours], u[some], log_weights[some], u.min(axis=0), u.max(axis=0))
        for precision in ("fast", "high"):
            problem = Problem(reduction, len(rows), n, d, precision=precision, same=rows is u)
            found[f"{what}_{precision}"] = counted(problem, columns, rows, places)
            found[f"{what}_{precision}_forecast"] = share(problem, sample, SIZE, HEIGHT)
    return found


def counted(problem: Problem, columns: Any, rows: Any, places: Any) -> float:
    """The share of the pairs of tiles that lists leave, of groups over all rows."""
    starts = np.unique(np.linspace(0, max(0, len(rows) // GROUP - 1), GROUPS).astype(int)) * GROUP
    found = [lists(problem, columns, rows[places[start : start + GROUP]], HEIGHT) for start in starts]
    return float(np.mean([len(f.tiles) / (len(f.ends) - 1) for f in found])) / columns.fine.log_weight.shape[0]


PASSES = [f"{what}_{precision}" for what in ("first", "second") for precision in ("fast", "high")]


def factors(row: Row) -> list[float]:
    return [row[f"{name}_forecast"] / row[name] for name in PASSES]


def views(rows: list[Row]) -> list[Any]:
    every = np.log([factor for row in rows for factor in factors(row)])
    low, high, root = np.exp([every.min(), every.max(), np.sqrt((every**2).mean())])
    note = f"{every.size} forecasts are {low:.2f} to {high:.2f} times what is left, {root:.2f} in root mean square."
    shown = {name.replace("_", ", "): name for name in PASSES}
    cells = shown | {
        "least factor": lambda row: min(factors(row)),
        "greatest": lambda row: max(factors(row)),
    }
    return [Table("Shares of the pairs that are left", ("n", "d", "kind", "bandwidth"), cells, note=note)]


REGISTRY.add(
    Benchmark(
        "nearby-forecast",
        "ours",
        "The share of pairs that can matter: counted, and as predicted from a subsample.",
        cases,
        measure,
        views,
    )
)
