"""What is ours alone: prepared samples, points far away, derivatives, memory, start-up, KeOps by hand, tolerances."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.protocol import Reduction
from sdkde_core.testing.problems import CASES, answer, errors, make, truth

from .. import compare
from ..problems import pool
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import COMPARED, Table
from ..subjects import find, here
from ..timing import seconds_of

# --- samples that are prepared once ---------------------------------------------------------------------------------


def prepared_cases(setting: Setting) -> Iterator[Case]:
    n, m = setting.at((500, 50), (30_000, 1000), (2**20, 4096))
    for method in ("kde", "sdkde"):
        yield {"subject": "auto, fast", "method": method, "n": n, "m": m, "d": 16, "batches": setting.at(3, 10, 100)}


def prepared(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds to prepare, of a batch of queries then, and of a batch by ``estimate``."""
    ((x, y, h),) = pool("eight", case["n"], case["m"], case["d"], "float32", setting.device, 1)
    batches = [y + 0.01 * k for k in range(case["batches"])]
    options: dict[str, Any] = {"method": case["method"], "bandwidth": h, "precision": "fast", "device": setting.device}
    some = batches[: 3 if case["method"] == "sdkde" else None]
    sdkde_core.prepare(x[: len(x) // 8], **options).estimate(y)  # compiles
    first, ready = seconds_of(lambda: sdkde_core.prepare(x, **options), setting.device)
    ready.estimate(y)
    then, _ = seconds_of(lambda: [ready.estimate(q) for q in batches], setting.device)
    each, _ = seconds_of(lambda: [sdkde_core.estimate(x, q, **options) for q in some], setting.device)
    return {"prepare": 1e3 * first, "batch": 1e3 * then / len(batches), "by_estimate": 1e3 * each / len(some)}


REGISTRY.add(
    Benchmark(
        "prepared",
        "ours",
        "Samples prepared once, for many batches of queries, beside one estimate a batch.",
        prepared_cases,
        prepared,
        (
            Table(
                "Milliseconds",
                ("method", "n", "m"),
                {"prepare": "prepare", "a batch then": "batch", "a batch by estimate": "by_estimate"},
            ),
        ),
        gpu=True,
    )
)

# --- points far away ------------------------------------------------------------------------------------------------


def far_cases(setting: Setting) -> Iterator[Case]:
    names = here(setting.device, ("fast", "high"))
    names = names if setting.kind == "cpu" else [n for n in names if n.startswith(("triton", "hopper"))]
    for kind in ("eight", "far"):
        sizes = [setting.at((256, 32, 16), (4096, 512, 16), (32768, 4096, 16))]
        yield from compare.cases([n for n in names if "keops" not in n], ["sdkde"], sizes, kind)


REGISTRY.add(
    Benchmark(
        "far-points",
        "ours",
        "SD-KDE with ten samples at 10⁴ bandwidths, and without.",
        far_cases,
        compare.measure,
        (Table("Milliseconds, worst row", ("subject",), {"ms": "ms", "worst row": "worst"}, "kind"),),
        gpu=True,
    )
)

# --- KeOps by hand --------------------------------------------------------------------------------------------------


def keops_cases(setting: Setting) -> Iterator[Case]:
    shapes = [(*setting.at((256, 32), (4096, 512), (32768, 4096)), d) for d in setting.at((1,), (1, 16), (1, 2, 3, 16))]
    for size in shapes:
        yield from compare.cases(["KeOps", "keops, fast", "keops, high"], ["kde", "sdkde", "laplace"], [size])


REGISTRY.add(
    Benchmark(
        "keops",
        "ours",
        "The KeOps backend beside the same sums as a user of KeOps writes them.",
        keops_cases,
        compare.measure,
        (Table("Milliseconds, worst row", ("d", "method", "subject"), COMPARED),),
    )
)

# --- derivatives ----------------------------------------------------------------------------------------------------


def gradient_cases(setting: Setting) -> Iterator[Case]:
    n = setting.at(300, 4000, 20_000)
    for method, precision in product(("kde", "sdkde", "laplace"), ("fast", "high")):
        yield {"subject": f"torch, {precision}", "method": method, "n": n, "m": n // 8, "d": 16}


def gradient(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds of an estimate without derivatives, with them, and backward by samples and queries; on a GPU MiB."""
    subject = find(case["subject"])
    subject.check(case["method"], case["n"] ** 2, case["d"], setting.device)
    import torch

    ((x, y, h),) = pool("eight", case["n"], case["m"], case["d"], subject.dtype, setting.device, 1)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    how = {"method": case["method"], "bandwidth": h, "backend": "torch", "precision": case["subject"].split(", ")[1]}
    attached = [a.clone().requires_grad_() for a in (x, y)]
    taken: dict[str, list[float]] = {"without": [], "forward": [], "backward": []}
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    for _ in range(3):
        taken["without"].append(seconds_of(lambda: sdkde_core.estimate(x, y, **how), setting.device)[0])
        seconds, density = seconds_of(lambda: sdkde_core.estimate(*attached, **how), setting.device)
        taken["forward"].append(seconds)
        total = density.sum()
        taken["backward"].append(seconds_of(lambda t=total: torch.autograd.grad(t, attached), setting.device)[0])
    found = {name: 1e3 * statistics.median(times) for name, times in taken.items()}
    return found | ({"MiB": (torch.cuda.max_memory_allocated() - base) / 2**20} if x.is_cuda else {})


REGISTRY.add(
    Benchmark(
        "gradients",
        "ours",
        "Derivatives by samples and queries: what they cost beside the estimate.",
        gradient_cases,
        gradient,
        (
            Table(
                "Milliseconds, and MiB beyond the inputs",
                ("method", "subject", "n", "m"),
                {"without derivatives": "without", "forward": "forward", "backward": "backward", "MiB": "MiB"},
            ),
        ),
        gpu=True,
    )
)

# --- memory and start-up --------------------------------------------------------------------------------------------

MEMORY = """
import json, resource, sys
import numpy as np, sdkde_core
n, m, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(0)
x, y = rng.normal(size=(n, 16)), rng.normal(size=(131072, 16))[:m]
sdkde_core.estimate(x[:50], y[:5], bandwidth="silverman")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
call = sdkde_core.grad_log_density if method == "gradient" else sdkde_core.estimate
call(x, y, method="kde", bandwidth="silverman")
print(json.dumps((peak() - before) / 2**20))
"""
IMPORT = "import time, numpy; t = time.perf_counter(); import sdkde_core; sdkde_core.backends(); "
IMPORT += "print(1e3 * (time.perf_counter() - t))"


def footprint_cases(setting: Setting) -> Iterator[Case]:
    yield {"what": "import"}
    n = setting.at(5000, 100_000, 2**20)
    yield from ({"what": what, "n": n, "m": m} for m, what in ((512, "density"), (4096, "density"), (4096, "gradient")))


def footprint(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds to import the core and list backends, beyond NumPy; MiB beyond the inputs, 16 dimensions."""

    def told(*arguments: str) -> float:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout))

    if case["what"] == "import":
        return {"ms": statistics.median(told("-c", IMPORT) for _ in range(setting.at(1, 7, 7)))}
    return {"MiB": told("-c", MEMORY, str(case["n"]), str(case["m"]), case["what"])}


REGISTRY.add(
    Benchmark(
        "footprint",
        "ours",
        "Memory beyond the inputs, and what importing takes.",
        footprint_cases,
        footprint,
        (Table("", ("what", "n", "m"), {"ms": "ms", "MiB": "MiB"}),),
    )
)

# --- worst row over its tolerance -----------------------------------------------------------------------------------

DIMENSIONS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784)
ROWS = {"other rows": (False, False), "same": (True, False), "leave-one-out": (True, True)}


def tolerance_cases(setting: Setting) -> Iterator[Case]:
    dimensions = setting.at((3,), (1, 3, 17, 784), DIMENSIONS)
    extents = setting.at((10.0,), (10.0, 1e4), (10.0, 30.0, 100.0, 1e3, 1e4))
    for kind, d, extent in product(tuple(CASES)[: setting.at(2, None, None)], dimensions, extents):
        yield {"backend": setting.option("backend", "numpy"), "kind": kind, "d": d, "extent": extent}


def tolerance(setting: Setting, case: Case) -> dict[str, Any]:
    """For every precision and reduction the worst row over its tolerance; at most 1 is within the contract."""
    record = registry.find(case["backend"])
    if record is None or record.info is None or not record.ok:
        raise Skipped(record.reason if record else f"no backend {case['backend']!r}")
    info, backend = record.info, record.info.load()
    small = (401, 101) if case["d"] < 200 else (203, 53)
    drawn = make(case["kind"], *small, case["d"], case["extent"])
    found: dict[str, float] = {}
    for same, exclude in ROWS.values():
        if exclude and "exclude_self" not in info.features:
            continue
        want = truth(drawn, same=same, exclude_self=exclude)
        for precision, reduction in product(info.precisions, Reduction):
            problem = drawn.problem(reduction, precision, same=same, exclude_self=exclude)
            error, name = (
                float(errors(problem, answer(info, backend, problem, drawn), want).max()),
                f"{precision} {reduction}",
            )
            found[name] = float(np.fmax(error, found.get(name, 0.0)))
    return found


def tolerance_views(rows: list[dict[str, Any]]) -> list[Any]:
    """The worst of all, by precision and reduction, and where it is."""
    names = [name for name in rows[0] if " " in name and isinstance(rows[0][name], float)] if rows else []
    worst = {name: max(rows, key=lambda row: row.get(name, 0.0)) for name in names}
    cells = {name: functools.partial(lambda name, row: row.get(name), name) for name in names}
    return [
        Table(
            "Worst row over its tolerance; rows of the table are where one of the columns is worst",
            ("backend", "kind", "d", "extent"),
            cells,
            keep=lambda row: any(row is where for where in worst.values()),
        )
    ]


REGISTRY.add(
    Benchmark(
        "tolerances",
        "ours",
        "Worst error over tolerance of a backend's reductions: dimensions, extents, tails, clusters, weights.",
        tolerance_cases,
        tolerance,
        tolerance_views,
    )
)
