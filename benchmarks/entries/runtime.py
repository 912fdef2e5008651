"""The paper's times: 16 and one dimension, a million points, batches of queries; Laplace in one pass and in two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sdkde_core.choice import hardware
from sdkde_core.choice.cost import paper_model

from .. import compare, published, subjects
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Plot, Table, number, problem

TORCH = ("PyTorch", "torch.compile", "torch.compile TF32")
FLASH = ("flash-sd-kde TF32", "flash-sd-kde fp32")


def everybody(setting: Setting) -> list[str]:
    """Ours on the device, then the paper's."""
    return [*subjects.here(setting.device), *FLASH, "KeOps", *TORCH]


# --- 16 dimensions: the figure of times, that of utilisation, the table of KeOps ------------------------------------


def sizes(setting: Setting, d: int, largest: int) -> list[tuple[int, int, int]]:
    """The largest of the paper's sizes first, then the others from the smallest on; n/8 queries."""
    powers = {"small": (7, 8), "medium": (11, 12, 13)}.get(setting.scale, (15, *range(11, largest + 1)))
    return [(2**k, 2**k // 8, d) for k in dict.fromkeys(powers)]


def cases_16d(setting: Setting) -> Iterator[Case]:
    for size in sizes(setting, 16, 15):
        yield from compare.cases(everybody(setting), ["sdkde"], [size], "two")
        yield from compare.cases(["scikit-learn", "KeOps"], ["kde"], [size], "two")


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """With the share of the fp16 and TF32 peaks by the paper's count of operations."""
    found = compare.measure(setting, case)
    on = hardware.processor(found["on"]) if found["on"] != "cpu" else None
    if on is None or case["method"] != "sdkde" or case["d"] < 2:
        return found
    flops = paper_model(case["n"], case["d"]).total.flops
    return found | {
        f"share_{dtype}": flops / on.matrix_flops[dtype] / (1e-3 * found["ms"])
        for dtype in ("float16", "tf32")
        if dtype in on.matrix_flops
    }


def named(row: dict[str, Any]) -> str:
    return row["subject"] if row["method"] == "sdkde" else f"{row['subject']}, {row['method']}"


def share(row: dict[str, Any]) -> float | None:
    return None if row.get("share_tf32") is None else 100 * row["share_tf32"]


def against_keops(row: dict[str, Any]) -> str:
    """The published time of the same subject."""
    return number(published.RUNTIME.get(named(row).replace("flash-sd-kde TF32", "flash-sd-kde")))


POINTS_16D = {name: [(32768, ms)] for name, ms in published.RUNTIME.items()}
VIEWS_16D = (
    Plot("16 dimensions, n/8 queries", "times", lines=named, published=POINTS_16D),
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
        COMPARED | {"TF32 peak": share, "published, ms": against_keops},
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
        cases_16d,
        measure,
        VIEWS_16D,
        gpu=True,
        weight=4.0,
    )
)

# --- one dimension --------------------------------------------------------------------------------------------------


def cases_1d(setting: Setting) -> Iterator[Case]:
    small = [(2**k, 2**k // 8, 1) for k in range(16, 9, -1)]
    for size in setting.at([(256, 32, 1)], [(2**13, 2**10, 1), (2**11, 2**8, 1)], small):
        yield from compare.cases(everybody(setting), ["sdkde"], [size], "two")
        yield from compare.cases(["scikit-learn"], ["kde"], [size], "two")


REGISTRY.add(
    Benchmark(
        "runtime-1d",
        "paper",
        "SD-KDE in one dimension, 1k to 64k samples, beside the same peers.",
        cases_1d,
        measure,
        (
            Plot("One dimension, n/8 queries", "times", lines=named),
            Table("Milliseconds by n", ("method", "subject"), {"": "ms"}, "n"),
            Table("Worst row of |Δ log p̂| by n", ("method", "subject"), {"": "worst"}, "n"),
        ),
        gpu=True,
    )
)

# --- Laplace in one pass and in two ---------------------------------------------------------------------------------


def cases_laplace(setting: Setting) -> Iterator[Case]:
    fused = [*subjects.here(setting.device), *FLASH, "flash-sd-kde TF32, unfused", "kde and a second pass", *TORCH]
    for d in (16, 1):
        shapes = [(n, n // 8, d) for n in setting.at((256,), (4096,), (32768, 8192, 2048))]
        for size in shapes:
            yield from compare.cases(fused, ["laplace"], [size])
            yield from compare.cases(subjects.here(setting.device), ["kde", "sdkde"], [size])


REGISTRY.add(
    Benchmark(
        "laplace-fused",
        "paper",
        "Laplace in one pass and in two, beside KDE and SD-KDE, in 16 and in one dimension.",
        cases_laplace,
        compare.measure,
        (
            Plot("Laplace", "times", panels=lambda row: f"d = {row['d']}", keep=lambda row: row["method"] == "laplace"),
            Table("Milliseconds, worst row", ("d", "n", "method", "subject"), COMPARED),
        ),
        gpu=True,
    )
)

# --- a million points -----------------------------------------------------------------------------------------------


def cases_million(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((2000, 250), (100_000, 12_500), (2**20, 2**17))
    names = [name for name in subjects.here(setting.device) if setting.kind == "cpu" or name != "torch, fast"]
    names = [*names, "flash-sd-kde TF32", "KeOps"]
    yield from compare.cases(names, ["sdkde"], [(n, m, 16)])
    fourier = [name for name in subjects.here(setting.device, ("high",)) if name.startswith("fourier")]
    for kind in ("eight", "grid", "t3"):  # queries on a grid; one sample in a hundred thrown far
        sizes = [(n, m, d) for d in setting.at((1,), (1, 2), (1, 2, 3))]
        yield from compare.cases([*fourier, *(names[:2] if kind == "eight" else ())], ["sdkde"], sizes, kind)


REGISTRY.add(
    Benchmark(
        "million",
        "paper",
        "SD-KDE of a million samples at 131k queries in 16 dimensions, and by Fourier sums in one to three.",
        cases_million,
        compare.measure,
        (
            Table(
                "Milliseconds and errors; published, 16 dimensions on an A6000: 2300 ms",
                ("d", "kind", "subject"),
                COMPARED | {"worst shift": "shift"},
                note="Errors are of some rows, given each subject's own moved points, and of as many shifts.",
            ),
        ),
        gpu=True,
    )
)

# --- batches of queries ---------------------------------------------------------------------------------------------


def cases_batches(setting: Setting) -> Iterator[Case]:
    n, batches = setting.at((512, (4, 32)), (4096, (4, 256, 2048)), (32768, (4096, *(4**k for k in range(1, 8)))))
    sizes = [(n, m, 16) for m in dict.fromkeys(batches)]
    yield from compare.cases([*subjects.here(setting.device), "flash-sd-kde TF32"], ["sdkde"], sizes, "two")


REGISTRY.add(
    Benchmark(
        "query-batches",
        "paper",
        "SD-KDE of 32k samples in 16 dimensions at 4 to 16384 queries.",
        cases_batches,
        compare.measure,
        (
            Plot(
                "Queries, 32768 samples in 16 dimensions",
                "times",
                x="m",
                labels=("queries", "milliseconds"),
                published={"flash-sd-kde": list(published.BATCHES.items())},
            ),
            Table("Milliseconds by m", ("subject",), {"": "ms"}, "m"),
        ),
        gpu=True,
    )
)

# --- what readers asked for: other dimensions, precisions, what makes it fast -----------------------------------------


def cases_dimensions(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((200, 25), (4096, 512), (32768, 4096))
    names = subjects.here(setting.device, ("fast", "high"))
    names = [name for name in names if setting.kind == "cpu" or name.split(",")[0] in ("triton", "hopper", "keops")]
    ours = [name for name in names if not name.startswith("keops")]
    for d in setting.at((1, 17), (1, 2, 8, 16, 64, 256), (16, 64, 1, 2, 3, 8, 32, 128, 256, 384, 784)):
        yield from compare.cases([*ours, "flash-sd-kde TF32"], ["sdkde"], [(n, m, d)])


REGISTRY.add(
    Benchmark(
        "dimensions",
        "readers",
        "SD-KDE in 1 to 784 dimensions at both precisions.",
        cases_dimensions,
        measure,
        (
            Plot(
                "Dimensions",
                "times",
                x="d",
                labels=("dimensions", "milliseconds"),
                published={"flash-sd-kde": list(published.DIMENSIONS.items())},
            ),
            Table("Milliseconds, worst row", ("d", "subject"), COMPARED),
        ),
        gpu=True,
    )
)


def cases_precision(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((256, 32), (8192, 1024), (32768, 4096))
    names = subjects.here(setting.device, ("fast", "high", "float64"))
    for method in ("sdkde", "kde", "laplace"):
        extra = ["scikit-learn"] if method == "kde" else []
        yield from compare.cases([*names, *FLASH, *TORCH, "PyTorch TF32", *extra], [method], [(n, m, 16)])


def draw_precision(ax: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row.get("worst"):
            ax.plot(row["ms"], row["worst"], "o", color="#00798c" if row["subject"].count(", ") else "#8d99ae")
            ax.annotate(
                row["subject"], (row["ms"], row["worst"]), xytext=(3, 3), textcoords="offset points", fontsize=7
            )
    ax.set(xscale="log", yscale="log", xlabel="milliseconds", ylabel="worst row's error")


REGISTRY.add(
    Benchmark(
        "precision",
        "readers",
        "Error against time: every precision of ours, every method, and what reduced precision costs the peers.",
        cases_precision,
        compare.measure,
        (
            Plot("Error against time", "error", panels="method", draw=draw_precision),
            Table("Milliseconds and errors, d = 16", ("method", "subject"), COMPARED),
        ),
        gpu=True,
    )
)

#: One change a step, where a card has them.
STEPS = {
    "PyTorch": "all pairs in memory, float32",
    "torch.compile": "compiled, float32",
    "torch.compile TF32": "compiled, TF32 products",
    "cuDNN attention, torch.compile": "cuDNN's attention as the first pass",
    "numba-cuda, fast": "streamed, float32 on ordinary cores",
    "triton, fast, untuned": "streamed, Tensor Cores",
    "triton, fast": "the same, tuned",
    "hopper, fast": "each pair once (symmetric), Hopper's own instructions",
    "flash-sd-kde TF32": "the authors' kernels",
}


def cases_attribution(setting: Setting) -> Iterator[Case]:
    names = STEPS if setting.kind == "cuda" else ["PyTorch", "numpy, fast", "numba, fast"]
    yield from compare.cases(names, ["sdkde"], [setting.at((256, 32, 16), (4096, 512, 16), (32768, 4096, 16))])


REGISTRY.add(
    Benchmark(
        "attribution",
        "readers",
        "Where the speed comes from: eager, compiled, streamed, Tensor Cores, tuned, symmetric.",
        cases_attribution,
        measure,
        (Table("SD-KDE, d = 16", ("subject",), {"what": lambda row: STEPS.get(row["subject"], "")} | COMPARED),),
        gpu=True,
    )
)

# --- approximate methods --------------------------------------------------------------------------------------------


def cases_approximate(setting: Setting) -> Iterator[Case]:
    names = [name for name in subjects.here("cpu", ("fast", "high")) if not name.startswith("keops")]
    if setting.kind == "cuda":
        names += [name for name in subjects.here(setting.device, ("fast", "high")) if name not in names]
    trees = [f"scikit-learn, rtol {rtol}" for rtol in ("0.0001", "0.01", "0.1")]
    names += ["KDEpy FFTKDE", "statsmodels FFT", "SciPy", "scikit-learn", *trees]
    for d in setting.at((1,), (1, 2, 3), (1, 2, 3)):
        yield from compare.cases(names, ["kde"], [(n, n, d) for n in setting.at((300,), (10_000,), (10_000, 100_000))])


REGISTRY.add(
    Benchmark(
        "approximate",
        "readers",
        "KDE in one to three dimensions: error against time, beside binned FFTs and trees.",
        cases_approximate,
        compare.measure,
        (
            Plot("Error against time", "error", panels=problem, draw=draw_precision),
            Table("Milliseconds and errors", ("d", "n", "subject"), COMPARED),
        ),
    )
)
