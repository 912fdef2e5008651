"""The paper's errors against densities that are known, in one and in 16 dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sdkde_core

from .. import metrics, problems, published
from ..problems import placed
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Plot, Table
from ..timing import seconds_of

METHODS = ("kde", "sdkde", "laplace")


def cases_1d(setting: Setting) -> Iterator[Case]:
    largest = setting.at(256, 4**10, 4**11)
    for n in (128, 256, 512, 1024, 2048, 4096, *(4**k for k in range(7, 12))):
        if n <= largest:
            yield from ({"method": method, "n": n} for method in METHODS)


def measure_1d(setting: Setting, case: Case) -> dict[str, Any]:
    """Means over three repeats; Silverman's bandwidth."""
    how = {"method": case["method"], "bandwidth": "silverman", "device": setting.device}
    how["precision"] = "float64" if case["n"] <= 4096 and setting.kind == "cpu" else "high"
    errors, seconds = [], 0.0
    for oracle in problems.oracle_1d(case["n"]):
        x, y = (placed(a, setting.device) for a in (oracle.x, oracle.y))
        seconds, density = seconds_of(lambda x=x, y=y: sdkde_core.estimate(x, y, **how), setting.device)
        errors.append(metrics.against_truth(density, oracle) | of_zero(oracle))
    return {key: float(np.mean([e[key] for e in errors])) for key in errors[0]} | {"ms": 1e3 * seconds}


def of_zero(oracle: problems.Oracle) -> dict[str, float]:
    """The errors of an estimate that is zero everywhere: the honest reference."""
    return {f"zero_{key}": value for key, value in metrics.against_truth(np.zeros_like(oracle.truth), oracle).items()}


def level(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The line of an estimate of zero."""
    return {"an estimate of zero": float(np.mean([row[f"zero_{name}"] for row in rows]))} if rows else {}


def digits(name: str) -> Any:
    """As many digits as are published."""
    return lambda row: f"{row[name]:.6f}"


def known_1d(row: dict[str, Any]) -> str:
    values = published.ORACLE_1D.get(row["n"])
    return f"{values[METHODS.index(row['method'])]:.6f}" if values else ""


ORACLE_1D = {method: [(n, v[i]) for n, v in published.ORACLE_1D.items()] for i, method in enumerate(METHODS)}


def views_1d(rows: list[dict[str, Any]]) -> list[Any]:
    """With the line of an estimate of zero."""
    cells = {"MISE": digits("mise"), "published": known_1d, "of zero": digits("zero_mise"), "MIAE": digits("miae")}
    return [
        Plot(
            "Mean integrated squared error, one dimension",
            "mise",
            y="mise",
            lines="method",
            labels=("samples", "MISE"),
            published=ORACLE_1D,
            levels=level(rows, "mise"),
        ),
        Table("MISE, MIAE, and the time of an estimate", ("n", "method"), cells | {"ms": "ms"}),
    ]


REGISTRY.add(
    Benchmark(
        "oracle-1d",
        "paper",
        "Mean integrated errors on the paper's mixture of three normals, also beyond its 4096 samples, and of zero.",
        cases_1d,
        measure_1d,
        views_1d,
    )
)


# --- 16 dimensions --------------------------------------------------------------------------------------------------


def cases_16d(setting: Setting) -> Iterator[Case]:
    for n in setting.at((200,), (3000, 10_000, 100_000), (3000, 10_000, 100_000, 1_000_000)):
        yield from ({"method": method, "n": n, "m": setting.at(500, 10_000, 10_000)} for method in METHODS)


def measure_16d(setting: Setting, case: Case) -> dict[str, Any]:
    """Means over three seeds; the authors' isotropic rule; Laplace clamped at 1e-30, as published, and signed."""
    errors, seconds = [], 0.0
    for seed in range(3):
        oracle = problems.oracle_16d(case["n"], seed, case["m"])
        x, y = (placed(a.astype("float32"), setting.device) for a in (oracle.x, oracle.y))
        how = {"method": case["method"], "bandwidth": "silverman-iso", "device": setting.device}
        seconds, density = seconds_of(lambda x=x, y=y, how=how: sdkde_core.estimate(x, y, **how), setting.device)
        density = metrics.host(density)
        found = metrics.against_truth(np.maximum(density, 1e-30), oracle)
        found |= {f"signed_{key}": value for key, value in metrics.against_truth(density, oracle).items()}
        errors.append(found | of_zero(oracle))
    return {key: float(np.mean([e[key] for e in errors])) for key in errors[0]} | {"ms": 1e3 * seconds}


def known_16d(which: int) -> Any:
    def value(row: dict[str, Any]) -> float | None:
        values = published.ORACLE_16D.get(row["n"])
        return values and values[which][METHODS.index(row["method"])]

    return value


def millionth(name: str) -> Any:
    return lambda row: 1e6 * row[name]


def views_16d(rows: list[dict[str, Any]]) -> list[Any]:
    """With the line of an estimate of zero."""
    views: list[Any] = []
    for which, name in enumerate(("mise", "miae")):
        known = {
            m: [(n, v[which][i] * (1e-6, 1)[which]) for n, v in published.ORACLE_16D.items()]
            for i, m in enumerate(METHODS)
        }
        views.append(
            Plot(
                f"{name.upper()}, 16 dimensions",
                name,
                y=name,
                lines="method",
                labels=("samples", name.upper()),
                published=known,
                levels=level(rows, name),
            )
        )
    cells: dict[str, Any] = {
        "MISE × 1e6": millionth("mise"),
        "published": known_16d(0),
        "of zero": millionth("zero_mise"),
    }
    cells |= {"MIAE": "miae"}
    cells |= {"MIAE, published": known_16d(1), "MIAE, signed": "signed_miae", "ms": "ms"}
    return [*views, Table("Errors, and the time of an estimate", ("n", "method"), cells)]


REGISTRY.add(
    Benchmark(
        "oracle-16d",
        "paper",
        "Mean integrated errors on the paper's mixture of eight normals, with those of an estimate of zero.",
        cases_16d,
        measure_16d,
        views_16d,
        gpu=True,
    )
)
