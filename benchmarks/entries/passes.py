"""Time by pass, and the roofline with those times as points."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

import sdkde_core
from sdkde_core.choice import cards, cost, hardware, registry
from sdkde_core.protocol import Problem, Reduction

from ..problems import pool
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Plot, Table
from ..subjects import find, here

PASSES = {
    "log_sum": ("kde; last pass of sdkde", "o"),
    "mean": ("first pass of sdkde", "s"),
    "laplace": ("laplace", "^"),
}
COLOURS = {4: "#8d99ae", 16: "#d1495b", 64: "#00798c", 256: "#edae49"}
TILE = 64, 1024  # the paper's


# --- time by pass ---------------------------------------------------------------------------------------------------


def cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((256, 32), (4096, 512), (32768, 4096))
    for d in setting.at((2,), (1, 16, 64), (16, 64, 4, 1, 256)):
        for method in ("sdkde", "laplace"):
            for name in here(setting.device):
                yield {"subject": name, "method": method, "n": n, "m": m, "d": d}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds of every pass alone, medians, as ``explain(measure=True)`` has them, and as predicted."""
    subject, (n, m, d) = find(case["subject"]), (case["n"], case["m"], case["d"])
    subject.check(case["method"], n * (n + m), d, setting.device)
    ((x, y, h),) = pool("eight", n, m, d, subject.dtype, setting.device, 1)
    backend, precision = case["subject"].split(", ")
    how = {"method": case["method"], "bandwidth": h, "backend": backend, "precision": precision}
    try:
        found = [sdkde_core.explain(x, y, measure=True, device=setting.device, **how).passes for _ in range(7)]
    except sdkde_core.BackendUnavailable as error:
        raise Skipped(str(error)) from None
    result: dict[str, Any] = {"h": h}
    for lines in zip(*found[2:]):
        name = lines[0].reduction
        result[name] = 1e3 * statistics.median(line.measured_seconds for line in lines)
        result[f"{name}_predicted"] = lines[0].predicted_seconds and 1e3 * lines[0].predicted_seconds
        result[f"{name}_rows"] = lines[0].m
    return result


def both(name: str) -> Any:
    """Milliseconds, and in brackets as predicted."""

    def text(row: dict[str, Any]) -> str:
        known = row.get(f"{name}_predicted")
        return "" if name not in row else f"{row[name]:.3g}{f' ({known:.3g})' if known else ''}"

    return text


REGISTRY.add(
    Benchmark(
        "passes",
        "readers",
        "Time by pass, measured and predicted.",
        cases,
        measure,
        (
            Table(
                "Milliseconds of a pass that is not replayed, in brackets as predicted",
                ("d", "method", "subject"),
                {"first pass": both("mean"), "last pass": both("log_sum"), "Laplace's": both("laplace")},
            ),
        ),
        gpu=True,
    )
)


# --- the roofline ---------------------------------------------------------------------------------------------------


def roofline_cases(setting: Setting) -> Iterator[Case]:
    """On this machine those of ``passes``; other cards without points."""
    own = "here"
    for case in cases(setting):
        if case["d"] in COLOURS or setting.scale == "small":
            yield case | {"on": own}
    for card in ("a6000", "h200"):
        yield from ({"on": card, "d": d, "method": method} for d in (4, 16, 64) for method in ("sdkde", "laplace"))


def roofline(setting: Setting, case: Case) -> dict[str, Any]:
    """Operations per byte of a tile that keeps nothing between tiles; operations a second, measured and at most."""
    if case["on"] == "here":
        on, found = hardware.processor(setting.device), measure(setting, case)
        if on is None:
            raise Skipped(f"the rates of {setting.device} are not known")
    else:
        on, found = card(case["on"]).at(), {}
    n, m = case.get("n", 32768), case.get("m", 4096)
    for name in ("mean", "log_sum") if case["method"] == "sdkde" else ("laplace",):
        rows = n if name == "mean" else m
        problem = Problem(Reduction(name), rows, n, case["d"], precision="fast")
        work = cost.tiled(problem, *TILE)
        operations = sum(work.matrix_flops.values()) + work.scalar_flops
        found[f"{name}_intensity"] = cost.intensity(work)
        found[f"{name}_ceiling"] = operations / cost.roofs(work, on)["exp"]
        if name in found:
            found[f"{name}_rate"] = operations / (1e-3 * found[name])
    units = {f"products, {dtype}": rate for dtype, rate in on.matrix_flops.items()} | {"scalar": on.scalar_flops}
    return found | {"processor": on.name, "bandwidth": on.bandwidth, "units": units}


def card(name: str) -> cards.GPU:
    found = cards.gpu(name)
    assert found is not None
    return found


def draw(ax: Any, rows: list[dict[str, Any]]) -> None:
    """The roofs, where the exponentials run out (hollow), and what was measured (full)."""
    x, first = np.geomspace(1, 3000, 200), rows[0]
    for label, peak in first["units"].items():
        if label.endswith(("float64", "float32")) and len(first["units"]) > 3:
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
        "Roofs, where the exponentials run out, and what our passes reach.",
        roofline_cases,
        roofline,
        (
            Plot("Roofline", "roofs", panels="processor", draw=draw),
            Table(
                "Share of the rate at which exponentials run out",
                ("processor", "d", "subject"),
                {"first pass": share("mean"), "last pass": share("log_sum"), "Laplace's": share("laplace")},
                keep=lambda row: "subject" in row,
            ),
        ),
        gpu=True,
    )
)


# --- how well the cost model ranks ----------------------------------------------------------------------------------

SIZES = ((500, 500), (4000, 1000), (20000, 2000), (100_000, 100), (8000, 8000))


def prediction_cases(setting: Setting) -> Iterator[Case]:
    for n, m in setting.at(((300, 100),), SIZES, SIZES):
        for d in setting.at((1, 3), (1, 3, 16, 64), (1, 3, 16, 64)):
            for reduction in Reduction:
                for precision in ("fast", "high"):
                    yield {"backend": setting.option("backend", "numpy"), "n": n, "m": m, "d": d,
                           "reduction": str(reduction), "precision": precision}  # fmt: skip


@functools.cache
def rates() -> Any:
    """The rates of this CPU, measured (kept, as by `sdkde doctor --measure`)."""
    hardware.measure_cpu()
    return hardware.cpu()


def prediction(setting: Setting, case: Case) -> dict[str, Any]:
    """Predicted and measured milliseconds of a reduction on this CPU; with --set rates=nominal by the nominal rates."""
    from sdkde_core.arrays import convert
    from sdkde_core.plugin import reduce_pass
    from sdkde_core.protocol import Columns
    from sdkde_core.testing.problems import make

    from ..timing import seconds_of

    record = registry.find(case["backend"])
    if record is None or record.info is None or not record.ok:
        raise Skipped(record.reason if record else f"no backend {case['backend']!r}")
    info, backend = record.info, record.info.load()
    on = hardware.cpu() if setting.option("rates") == "nominal" or setting.scale == "small" else rates()
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


def prediction_views(rows: list[dict[str, Any]]) -> list[Any]:
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
        prediction_cases,
        prediction,
        prediction_views,
    )
)
