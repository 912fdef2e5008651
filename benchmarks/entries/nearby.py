"""SD-KDE by backends that leave out pairs too far apart to matter, beside the same over all pairs."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

import sdkde_core
from sdkde_core.nearby import order
from sdkde_core.protocol import TOLERANCES, Reduction

from .. import metrics, timing
from ..problems import Data, data, placed
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Plot, Row, Table
from ..subjects import here, leaves_out

Array = Any

KINDS = ("eight", "normal", "three")

#: On a CPU the sums of some rows are timed: so many stretches of so many neighbours, and rows for sums over all pairs.
STRETCHES, NEIGHBOURS, DENSE = 16, 1024, 1024

#: Rows whose errors are taken: so many outermost, so many of least density, and so many others. Outer rows are asked
#: for with their neighbours: alone they would stand in wide tiles, of which little is left out.
LOOKED, BESIDE = 100, 64

#: Points of a first call.
FEW = 300

ALL = "all pairs"


def cases(setting: Setting) -> Iterator[Case]:
    """Options: ``d``, ``kinds`` and ``rules``, comma-separated, for some of the cases; ``precision``."""
    n = setting.at(2**11, 2**17, 2**20)
    rules = _option(setting, "rules", setting.at(("silverman",), ("silverman", "auto"), ("silverman", "auto")))
    dimensions = _option(setting, "d", setting.at((3,), (3, 4, 5, 6, 8, 10), (3, 4, 5, 6, 8, 10)))
    for rule in rules:
        for d in map(int, dimensions):
            for kind in _option(setting, "kinds", setting.at(KINDS[:1], KINDS, KINDS)):
                for subject in _subjects(setting, d):
                    yield {"subject": subject, "kind": kind, "n": n, "m": n // 8, "d": d, "bandwidth": rule}


def _option(setting: Setting, name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(setting.option(name).split(",")) if setting.option(name) else default


def _subjects(setting: Setting, d: int) -> Iterator[str]:
    """Backends that leave pairs out, with and without; on a GPU the others too, on a CPU Fourier sums."""
    precision = setting.option("precision") or ("high" if setting.kind == "cpu" else "fast")
    for name in here(setting.device, (precision,), d):
        backend = name.partition(",")[0]
        if leaves_out(backend):
            yield from (name, f"{name}, {ALL}")
        elif setting.kind == "cuda" or backend == "fourier":
            yield name


class Asked(NamedTuple):
    """What a case asks for."""

    x: Array  # (n, d)
    y: Array  # (m, d)
    u: Array  # (n, d) float64 on the host, in bandwidths from the centre
    v: Array  # (m, d)
    bandwidth: Any
    options: dict[str, Any]
    device: str
    dense: bool  # over all pairs


def asked(setting: Setting, case: Case) -> Asked:
    backend, precision, *more = case["subject"].split(", ")
    x, y, _ = data(case["kind"], case["n"], case["m"], case["d"], 7, "float32" if precision == "fast" else "float64")
    bandwidth = sdkde_core.select_bandwidth(x, method="sdkde", rule=case["bandwidth"])
    factor, centre = np.linalg.cholesky(bandwidth.matrix), x.mean(axis=0, dtype=np.float64)
    u, v = (np.linalg.solve(factor, (z - centre).T).T.copy() for z in (x, y))
    options: dict[str, Any] = {"bandwidth": bandwidth, "backend": backend, "precision": precision}
    if leaves_out(backend):
        options["backend_options"] = {"skip": not more}
    x, y = (placed(z, setting.device) for z in (x, y))
    return Asked(x, y, u, v, bandwidth, options | {"device": setting.device}, setting.device, bool(more))


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Seconds, the worst of some rows over its tolerance, and the share of the pairs that ``explain`` says.

    On a GPU, and by Fourier sums, whole calls are timed. On a CPU the first pass, ``grad_log_density`` at samples, and
    the second, ``estimate`` at queries, each of samples that have not moved: some rows, scaled to all. ``s`` is
    processor time there.
    """
    case_asked = asked(setting, case)
    try:
        found = _of_rows(case_asked) if _by_rows(setting, case) else _whole(case_asked, setting.seconds)
        said = sdkde_core.explain(case_asked.x, case_asked.y, **case_asked.options)
        reason = next(c.reason for c in said.candidates if c.chosen)
        shares = [float(share) for share in re.findall(r"about ([\d.e+-]+) % of the pairs", reason)]
        return (
            found
            | {"pairs": _pairs(case["subject"])}
            | ({"percent": max(shares)} if shares else {})
            | errors(case_asked)
        )
    except sdkde_core.BackendUnavailable as error:
        raise Skipped(str(error)) from None


def _pairs(subject: str) -> str:
    """Which pairs it sums over."""
    backend = subject.partition(",")[0]
    if backend.startswith("fourier"):
        return "a grid instead"
    return "some" if leaves_out(backend) and not subject.endswith(ALL) else "all"


def _by_rows(setting: Setting, case: Case) -> bool:
    return setting.kind == "cpu" and leaves_out(case["subject"].partition(",")[0])


def _whole(a: Asked, seconds: float) -> dict[str, Any]:
    def call(x: Array, y: Array, h: Any) -> Array:
        return sdkde_core.estimate(x, y, log=True, **a.options)

    pool = [Data(a.x, a.y, 0.0), Data(a.x + 1e-3, a.y, 0.0)]
    found, _ = timing.measured(call, pool, a.device, seconds)
    clock = 1e-3 * found["ms"]
    return {"s": 1e-3 * found.get("cpu_ms", found["ms"]), "clock": clock, "timed": f"{found['calls']} calls"}


def _of_rows(a: Asked) -> dict[str, Any]:
    """Processor time of preparing, and of both passes at some rows, scaled; what memory that took."""
    small = sdkde_core.prepare(a.x[:FEW], method="kde", **a.options)
    small.grad_log_density(a.y[:FEW])  # compiles
    small.estimate(a.y[:FEW])
    _forget_peak()
    resident = _memory()[0]
    own, rows = (spread(z, a.dense) for z in (a.u, a.v))
    ready, prepared, beside = _timed(lambda: sdkde_core.prepare(a.x, method="kde", **a.options))
    ready.grad_log_density(a.x[own[:1]])  # packs the columns for this pass
    ready.estimate(a.y[rows[:1]])
    _, first, clock_first = _timed(lambda: ready.grad_log_density(a.x[own]))
    _, second, clock_second = _timed(lambda: ready.estimate(a.y[rows], log=True))
    more = len(a.x) / len(own), len(a.y) / len(rows)
    return {
        "s": 2 * prepared + more[0] * first + more[1] * second,
        "clock": 2 * beside + more[0] * clock_first + more[1] * clock_second,
        "prepare": prepared,
        "first": more[0] * first,
        "second": more[1] * second,
        "timed": f"{len(own)} and {len(rows)} rows",
        "MiB": _memory()[1] - resident,
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returned, its seconds of processor time, and by the clock."""
    cpu, clock = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - clock


def spread(points: Array, dense: bool) -> Array:
    """Indices of some rows: stretches of neighbours over all, or, for sums over all pairs, any."""
    n = len(points)
    if dense or n <= STRETCHES * NEIGHBOURS:
        return np.unique(np.linspace(0, n - 1, min(n, DENSE if dense else n)).astype(int))
    starts = np.linspace(0, n // NEIGHBOURS - 1, STRETCHES).astype(int) * NEIGHBOURS  # whole nodes of the tree
    return order(points, 8)[starts[:, None] + np.arange(NEIGHBOURS)].reshape(-1)


# --- errors ---------------------------------------------------------------------------------------------------------


def errors(a: Asked) -> dict[str, float]:
    """The worst of some rows of either pass over its tolerance, beside direct sums in float64."""
    ready = sdkde_core.prepare(a.x, method="kde", **a.options)
    factor, d, found = np.linalg.cholesky(a.bandwidth.matrix), a.u.shape[1], {}
    constant = -np.log(np.diagonal(factor)).sum() - 0.5 * d * np.log(2 * np.pi)
    allowed = TOLERANCES[a.options["precision"]]
    samples = placed(a.u, a.device)
    for what, points, places in (("first", a.x, a.u), ("second", a.y, a.v)):
        rows = outer(places, 1 if a.dense else BESIDE)
        log = metrics.host(ready.estimate(points[rows], log=True)) - constant
        some = np.unique(np.concatenate([np.argsort(log)[:LOOKED], _far(places[rows]), _evenly(len(rows))]))
        looked = placed(places[rows[some]], a.device)
        want = metrics.host(metrics.sums(looked, samples, 1.0, "log"))
        off = np.abs(log[some] - want) / allowed[Reduction.LOG_SUM].at(want)
        if what == "first":
            shift = metrics.host(ready.grad_log_density(points[rows]))[some] @ factor
            apart = shift - metrics.host(metrics.sums(looked, samples, 1.0, "shift"))
            off = np.linalg.norm(apart, axis=1) / allowed[Reduction.MEAN].at(want)
        found[f"worst_{what}"] = float(off.max())
    return found


def outer(points: Array, beside: int) -> Array:
    """Indices of the outermost points, and of some over all, each with its neighbours, so many together."""
    where = order(points, 8)
    place = np.empty(len(where), int)
    place[where] = np.arange(len(where))
    wanted = np.concatenate([place[_far(points)], _evenly(len(points))]) // beside
    return where[np.isin(np.arange(len(where)) // beside, wanted)]


def _far(points: Array) -> Array:
    return np.argsort(-(points * points).sum(axis=1))[:LOOKED]


def _evenly(n: int) -> Array:
    return np.linspace(0, n - 1, min(n, LOOKED)).astype(int)


# --- growth ---------------------------------------------------------------------------------------------------------


def growing(setting: Setting) -> Iterator[Case]:
    for n in setting.at((2**11, 2**12), (10**5, 10**6), (10**5, 10**6, 10**7)):
        for subject in _subjects(setting, 4):
            if leaves_out(subject.partition(",")[0]):
                yield {"subject": subject, "kind": "eight", "n": n, "m": n // 8, "d": 4, "bandwidth": "silverman"}


def alone(setting: Setting, case: Case) -> dict[str, Any]:
    """The same by a process of its own, whose memory tells what this case took."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # which says so if the process dies
        return pool.submit(measure, setting, case).result()


def _forget_peak() -> None:
    """The most memory so far counts anew, where the system can do that."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory() -> tuple[float, float]:
    """MiB in memory now, and at most; not known but on Linux."""
    try:
        with open("/proc/self/status") as file:
            found = dict(line.split(":", 1) for line in file)
        return tuple(int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError):
        return math.nan, math.nan


# --- views ----------------------------------------------------------------------------------------------------------

PROBLEM = ("kind", "n", "d", "bandwidth")
CELLS = {"seconds": "s", "by the clock": "clock", "preparing": "prepare", "first pass": "first"} | {
    "second": "second", "over all pairs": "ratio", "pairs said to matter, %": "percent",
    "worst row of first": "worst_first", "of second": "worst_second", "timed": "timed",
}  # fmt: skip


def views(rows: list[Row]) -> list[Any]:
    """Beside each time its ratio to the fastest over all pairs."""
    for row in rows:
        others = [o["s"] for o in rows if all(o[k] == row[k] for k in PROBLEM) and o["pairs"] == "all"]
        if others and row["pairs"] == "some":
            row["ratio"] = row["s"] / min(others)
    note = "Seconds are processor time on a CPU. The worst row is over its tolerance. "
    return [Table("SD-KDE of n samples at n/8 queries", (*PROBLEM, "subject"), CELLS, note=note)]


def growth(rows: list[Row]) -> list[Any]:
    notes = []
    for name in dict.fromkeys(row["subject"] for row in rows):
        some = [row for row in rows if row["subject"] == name]
        if len(some) > 1:
            power = np.polyfit(*(np.log([row[k] for row in some]) for k in ("n", "s")), 1)[0]
            notes.append(f"{name}: n^{power:.2f}")
    cells = CELLS | {"MiB beyond the inputs": "MiB"}
    title = "SD-KDE of n samples at n/8 queries, each n by a process of its own"
    plot = Plot("Growth", "growth", y="s", labels=("samples", "seconds"))
    return [Table(title, ("subject", "n", "d"), cells, note="Time grows as " + "; ".join(notes) + "."), plot]


REGISTRY.add(
    Benchmark(
        "nearby",
        "ours",
        "SD-KDE in three to ten dimensions, without the pairs that cannot matter, and over all pairs.",
        cases,
        measure,
        views,
        gpu=True,
    )
)

REGISTRY.add(
    Benchmark(
        "nearby-growth",
        "ours",
        "Growth of time and memory with the number of samples in four dimensions, without pairs that cannot matter.",
        growing,
        alone,
        growth,
        gpu=True,
    )
)
