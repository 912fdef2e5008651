"""The roofline, with what our passes reach as points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import sdkde_core
from sdkde_core.choice import cards, cost, hardware
from sdkde_core.protocol import Problem, Reduction, Work

from ..problems import pool
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Plot, Table
from ..subjects import find
from . import passes

PASSES = {
    "log_sum": ("kde; last pass of sdkde", "o"),
    "mean": ("first pass of sdkde", "s"),
    "laplace": ("laplace", "^"),
}
COLOURS = {4: "#8d99ae", 16: "#d1495b", 64: "#00798c", 256: "#edae49"}
TILE = 64, 1024  # the paper's


def cases(setting: Setting) -> Iterator[Case]:
    """On this machine those of ``passes``; other cards without points."""
    own = "here"
    for case in passes.cases(setting):
        if case["d"] in COLOURS or setting.scale == "small":
            yield case | {"on": own}
    for card in ("a6000", "h200"):
        yield from ({"on": card, "d": d, "method": method} for d in (4, 16, 64) for method in ("sdkde", "laplace"))


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Operations per byte of a tile that keeps nothing between tiles; operations a second, measured and at most."""
    if case["on"] == "here":
        on = hardware.processor(setting.device)
        if on is None:
            raise Skipped(f"the rates of {setting.device} are not known")
        found = passes.measure(setting, case)
        if setting.kind == "cuda":  # a pass of a tenth of a millisecond takes the host longer to launch
            found |= on_card(setting, case)
    else:
        on, found = card(case["on"]).processor, {}
    n, m = case.get("n", 32768), case.get("m", 4096)
    for name in ("mean", "log_sum") if case["method"] == "sdkde" else ("laplace",):
        rows = n if name == "mean" else m
        problem = Problem(Reduction(name), rows, n, case["d"], precision="fast")
        work = tiled(problem, *TILE)
        operations = sum(work.matrix_flops.values()) + work.scalar_flops
        found[f"{name}_intensity"] = operations / work.bytes
        found[f"{name}_ceiling"] = operations / cost.roofs(work, on)["exp"]
        if name in found:
            found[f"{name}_rate"] = operations / (1e-3 * found[name])
    units = {f"products, {dtype}": rate for dtype, rate in on.matrix_flops.items()} | {"scalar": on.scalar_flops}
    return found | {"processor": on.name, "bandwidth": on.bandwidth, "units": units}


def tiled(problem: Problem, block_m: int, block_n: int, itemsize: int = 4) -> Work:
    """Return the plain Work with the memory traffic of a tiled kernel that keeps nothing between tiles.

    Every tile loads its ``block_m`` rows and ``block_n`` columns, and writes its rows' partial sums: the upper bound on
    traffic, as caches keep some of it. Its operations a byte are those of a tile.

    Parameters
    ----------
    problem : Problem
    block_m, block_n : int
        Rows and columns of a tile.
    itemsize : int
        Bytes of a number.
    """
    written = {Reduction.LOG_SUM: 1, Reduction.MEAN: 1 + problem.d, Reduction.LAPLACE: 2}[problem.reduction]
    tile = itemsize * (block_m * problem.d + block_n * problem.d + block_m * written)
    return replace(cost.plain_work(problem), bytes=float(tile) * problem.pairs / (block_m * block_n))


def on_card(setting: Setting, case: Case) -> dict[str, float]:
    """Milliseconds of every pass that its kernels take, those that pack and whiten included."""
    backend, precision = case["subject"].split(", ")
    ((x, y, h),) = pool("eight", case["n"], case["m"], case["d"], find(case["subject"]).dtype, setting.device, 1)
    how: dict[str, Any] = {"bandwidth": h, "backend": backend, "precision": precision, "device": setting.device}
    if case["method"] == "laplace":
        return {"laplace": passes.kernels(lambda: sdkde_core.estimate(x.clone(), y, method="laplace", **how))}
    return {
        "mean": passes.kernels(lambda: sdkde_core.debias(x.clone(), **how)),
        "log_sum": passes.kernels(lambda: sdkde_core.estimate(x.clone(), y, method="kde", **how)),
    }


def card(name: str) -> cards.GPU:
    found = cards.gpu(name)
    assert found is not None
    return found


def draw(ax: Any, rows: list[dict[str, Any]]) -> None:
    """The roofs, where the exponentials run out (hollow), and what was measured (full)."""
    x, first = np.geomspace(1, 3000, 200), rows[0]
    labels = {peak: label for label, peak in first["units"].items()}  # units of one rate have one line
    for peak, label in labels.items():
        if label.endswith(("float64", "float32")) and len(labels) > 3:
            continue
        ax.plot(x, np.minimum(x * first["bandwidth"], peak) / 1e12, color="#2b2d42", lw=1.2)
        ax.text(2900, peak / 1e12 * 1.06, label, ha="right", fontsize=8)
    told: set[str] = set()
    for row in rows:
        for name, (label, marker) in PASSES.items():
            if f"{name}_intensity" not in row:
                continue
            at, colour = row[f"{name}_intensity"], COLOURS.get(row["d"], "#555555")
            what = f"{label}, d = {row['d']}"
            ax.plot(at, row[f"{name}_ceiling"] / 1e12, marker, color=colour, ms=8, mfc="none",
                    label=None if what in told else what)  # fmt: skip
            told.add(what)
            if f"{name}_rate" in row:
                ax.plot(at, row[f"{name}_rate"] / 1e12, marker, color=colour, ms=5)
                ax.annotate(row["subject"].partition(",")[0], (at, row[f"{name}_rate"] / 1e12), fontsize=6)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte of a tile", ylabel="TFLOP/s")
    ax.legend(frameon=False, fontsize=6, loc="lower right")


def share(name: str) -> Any:
    return lambda row: f"{100 * row[f'{name}_rate'] / row[f'{name}_ceiling']:.3g} %" if f"{name}_rate" in row else ""


REGISTRY.add(
    Benchmark(
        "roofline",
        "readers",
        "Roofline of the processor, the limit set by the exponentials, and the measured passes.",
        cases,
        measure,
        (
            Plot("Roofline", "roofs", panels="processor", draw=draw),
            Table(
                "Share of the rate at which exponentials run out",
                ("processor", "d", "method", "subject"),
                {"first pass": share("mean"), "last pass": share("log_sum"), "Laplace's": share("laplace")},
                keep=lambda row: "subject" in row,
            ),
        ),
        gpu=True,
        weight=0.5,
    )
)
