"""How good the choice of backend="auto" is: what it takes against the fastest, over a grid of estimates.

    python -m benchmarks.choice [--device cpu|cuda] [--save FILE.json] [--budget SECONDS] [--largest PAIRS]
        [--startups FILE.json] [--compiled] [--beside CHECKOUT] [--without NAMES]
    python -m benchmarks.choice compile --device cuda [--budget SECONDS]
    python -m benchmarks.choice headline [--budget SECONDS] [--precisions fast,high]
    python -m benchmarks.choice explain
    python -m benchmarks.choice --table FILE.json

The grid: method, precision, dimensions, sizes, bandwidth (Silverman's, a third and a tenth of it), kind of data
(benign, zero-inflated, counts, clustered, outlying, heavy-tailed, near a surface of three dimensions: cases.data) and,
with --device cuda, data on the host or the device. Every value of an axis comes equally often; a size that would take
too long is replaced by the next smaller one. --seed draws another grid: prices that were fitted on one are judged on
another.

Measured is estimate(..., log=True, backend=name) in a process of its own for every backend: the median of up to five
calls after one that compiles and plans; where that takes more than a second, ten on a GPU, it alone, its kernels
compiled before. Not measured, but told: what is predicted to take more than 20 times the fastest so far and, where
start-up counts, twice it with start-up in both; but such a prediction is put to the test, by a call that may take as
long as the fastest with its start-up, or half a second, until one for that backend, precision and kind of data has
proved right. Given up: a call that takes more than 10 times the fastest, twice that with start-up, and two seconds.
Start-ups may be taken from an earlier record of the same machine, and what the grid needs on a GPU may be compiled
beforehand, by a command of its own: for the same --device, --seed, --count, --largest and --without.

--beside names another checkout, whose auto is asked in every case, too: both are judged by the same times. The tables
are of this one; the summary at the end has both. python -m benchmarks.choice.again judges a later commit by a saved
record.

The fastest of many noisy times is one that came out too low. So where auto's choice is not the fastest, in some way,
both are timed once more, in turn, and by these times they are judged; so is a third that is then the fastest.

The ratio is auto's choice over the fastest, in three ways, in each of which auto is asked: start-up whole, as on the
command line (with data on the host only); as of one of a library's calls; after warm_up. Start-up is measured in fresh
processes, from NumPy and the core imported to a first tiny result, less what a later one takes; compiling is added as
declared. Errors: the worst of 12 rows over the tolerance of the precision, against sdkde_core.testing.reference; of
sdkde, that of the shifts, and of the densities given the backend's own moved points.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from sdkde_core.api import explained
from sdkde_core.choice import hardware, registry
from sdkde_core.choice import judge as judging
from sdkde_core.choice.judge import Candidate, compile_seconds
from sdkde_core.estimator.explanation import Explanation, PassLine
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.estimator.warming import common
from sdkde_core.plugin import write_atomically
from sdkde_core.protocol import BackendInfo, Problem, Reduction

from ..records import machine
from .cases import HOPELESS_IN_ALL, Case, Price, data, draw, headline, hopeless, price, priced
from .report import (
    CALLS_IN,
    WAYS_OF,
    Record,
    by_axis,
    case_of,
    fit_table,
    grid_table,
    headline_table,
    judge,
    label,
    misses,
    ratio_text,
    scores,
    summary,
)
from .worker import Job, compile_ahead, placed, serve, startup, truth

COUNT = {"cpu": 120, "cuda": 100}
BUDGET = {"cpu": 720.0, "cuda": 240.0}  # seconds
#: Seconds that a case may take to measure, as predicted. The grid follows from this, the seed and the number of cases,
#: not from the budget, so that `compile` draws the same one however long it may take.
EFFORT = 6.0

#: Seconds that a process may take to start, to make the data and to compile; times the fastest that a call may take.
PATIENCE, TOO_SLOW = 120.0, 10.0

#: Turns of two whose times are compared, how often another one may join them, and seconds of a call that tell enough.
TURNS, CONTENDERS, LONG = 3, 3, 1.0

#: Share of the budget that may go to tests of predictions that prove right; seconds that a new process then costs.
DOUBT, RESTART = 0.15, 3.0


class Worker:
    """A process that measures one backend on one device; started when needed, and again after it was given up."""

    def __init__(self) -> None:
        self.process: Any = None
        self.connection: Any = None

    def run(self, job: Job, limit: float, compiling: float = 0.0) -> dict[str, Any]:
        """Return the job's outcome; a call of more than ``limit`` seconds is given up.

        The first call of a shape may compile, which is none of the time that counts: for ``compiling`` seconds.
        """
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, there = context.Pipe()
            self.process = context.Process(target=serve, args=(there,), daemon=True)
            self.process.start()
            there.close()
        self.connection.send(job)
        waits = {"ready": PATIENCE, "first": limit + compiling, "done": PATIENCE + 20 * limit}
        for step, most in waits.items():
            if not self.connection.poll(most):
                self.stop()
                if step == "first":
                    return {"outcome": "over", "seconds": limit}
                return {"outcome": "failed", "why": f"nothing within {most:.0f} s, waiting for {step}"}
            try:
                kind, told = self.connection.recv()
            except EOFError:
                self.stop()
                return {"outcome": "failed", "why": "its process ended"}
            if kind == "failed":
                return {"outcome": "failed", "why": told}
        return {"outcome": "measured", **told}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


class Bench:
    """Measures cases, every backend that can."""

    def __init__(
        self, kind: str, budget: float = math.inf, beside: Path | None = None, without: Sequence[str] = ()
    ) -> None:
        self.without = without
        self.beside = Beside(beside, kind) if beside else None
        self.device = "cpu" if kind == "cpu" else None  # on a GPU's host, host data may go to either
        self.workers: dict[str, Worker] = {}
        self.startups: dict[str, float] = {}
        self.declared: dict[str, float] = {}
        self.believed: set[tuple[str, str, str]] = (
            set()
        )  # backends, precisions and kinds of data, of hopeless predictions
        self.doubts = DOUBT * budget  # seconds left to find out which are
        self.compiled = False  # whether all kernels that the cases need on a GPU were compiled ahead

    def explain(self, case: Case, x: Any, y: Any, h: float, way: str = "calls") -> Explanation:
        device = self.device if case.place == "host" else None
        train, query = placed(x, case.place), placed(y, case.place)
        asked = Request(Goal.DENSITY, case.method, bandwidth=h, precision=case.precision, device=device)
        asked = replace(asked, calls=1 if way == "whole" else CALLS_IN[case.place])
        with as_if_at(case.place), as_if_warm() if way == "warm" else nullcontext():
            return explained(asked, train, query, measure=False)

    def measure(self, case: Case, most: float = math.inf, patient: bool = False) -> Record:
        """Measure the candidates of a case, auto's choices first, then by predicted time.

        ``most``: predicted seconds beyond which a candidate is left out, auto's choice too, and which a call may take;
        by default what would not matter is.
        """
        x, y, h = data(case)
        asked = {way: self.explain(case, x, y, h, way) for way in WAYS_OF[case.place]}
        picks = {way: label({"name": e.backend, "device": e.device}) for way, e in asked.items()}
        others = self.beside.picks(case) if self.beside else {}
        taken = {*picks.values(), *others.values()}
        able = [c for c in asked["calls"].candidates if c.ok and c.seconds is not None]
        able = [c for c in able if c.name not in self.without or label({"name": c.name, "device": c.device}) in taken]
        want = truth(case, x, y, h)
        del x, y
        found, prices = [], []
        entries = [(self.entry(c, asked["calls"].passes, taken), c) for c in able]
        for entry, c in sorted(entries, key=lambda e: (not e[0]["chosen"], e[1].seconds)):
            found.append(entry)
            doubtful, kind = (
                not patient and not entry["chosen"] and hopeless(price(case, c), prices),
                (label(entry), case.precision, f"{case.kind} {case.spread}"),
            )
            if c.seconds > most or (doubtful and (kind in self.believed or self.doubts < 0)):
                entry["outcome"] = "skipped"
                continue
            limit = max(0.5, min(p.total for p in prices)) if doubtful else self.limit(prices)
            limit = 3 * most if patient else limit
            worker, start = self.workers.setdefault(label(entry), Worker()), time.perf_counter()
            compiling = 0.0 if c.device == "cpu" or self.compiled else PATIENCE
            entry |= worker.run(Job(case, c.name, c.device, want, patient), limit, compiling)
            if doubtful and entry["outcome"] != "measured":
                self.believed.add(kind)
                self.doubts -= RESTART + time.perf_counter() - start
            if entry["outcome"] == "measured":
                counts = case.place == "host" and not patient
                prices.append(Price(entry["seconds"], self.startup_of(c.name, c.device) if counts else 0.0))
        record = {"case": asdict(case), "picks": picks, "candidates": found}
        record |= {"beside": others} if others else {}
        if not patient:
            self.compare(case, record)
        return record

    def compare(self, case: Case, record: Record) -> None:
        """Time auto's choices and who was faster once more, in turn; long calls are not."""
        for c in record["candidates"]:
            if c["outcome"] in ("measured", "over"):
                self.startup_of(c["name"], c["device"])
        for _ in range(CONTENDERS):
            whose = [key for key in ("picks", "beside") if key in record]
            judged = [judge(record, self.startups, way, key) for way in WAYS_OF[case.place] for key in whose]
            names = {name for v in judged if v is not None and v.pick != v.fastest for name in (v.pick, v.fastest)}
            rivals = [c for c in record["candidates"] if label(c) in names and c["outcome"] == "measured"]
            if all("times_before" in c for c in rivals) or any(c["seconds"] > LONG for c in rivals):
                return
            times: dict[str, list[float]] = {label(c): [] for c in rivals}
            for c in rivals * TURNS:
                told = self.workers[label(c)].run(Job(case, c["name"], c["device"], None, again=True), PATIENCE)
                if told["outcome"] != "measured":  # given up meanwhile: what was measured stands
                    return
                times[label(c)] += told["times"]
            for c in rivals:
                c.setdefault("times_before", c["times"])
                c["times"] = times[label(c)]
                c["seconds"] = statistics.median(c["times"])

    @staticmethod
    def limit(found: list[Price]) -> float:
        """Seconds that a call may take beside those found."""
        if not found:
            return PATIENCE
        return max(2.0, TOO_SLOW * min(p.seconds for p in found), HOPELESS_IN_ALL * min(p.total for p in found))

    def entry(self, c: Candidate, passes: Sequence[PassLine], taken: set[str]) -> dict[str, Any]:
        """What is known of a candidate beforehand."""
        entry = {"name": c.name, "device": c.device, "predicted": c.seconds, "predicted_passes": list(c.pass_seconds)}
        record = registry.find(c.name)
        assert record is not None and record.info is not None
        where = {"device": c.device}
        problems = [
            Problem(Reduction(p.reduction), p.m, p.n, p.d, precision=p.precision, extent=p.extent, **where)
            for p in passes
        ]
        entry |= {"declared_startup": c.startup_seconds, "compiling": compile_seconds(record.info, problems)}
        entry |= {"compiled": compiles(record.info, c.device), "chosen": label(entry) in taken}
        entry |= {"reason": c.reason}
        self.declared[label(entry)] = c.startup_seconds
        return entry

    def priced(self, case: Case) -> list[Candidate]:
        found = priced(case, self.device if case.place == "host" else None)
        return [c for c in found if c.name not in self.without]

    def compile_ahead(self, cases: list[Case], most: float) -> None:
        """Compile what the cases need on a GPU, on all cores at once, for so many seconds at most."""
        todo = []
        for case in cases:
            able = self.priced(case)
            prices = [price(case, c) for c in able]
            todo += [
                (case, c.name, c.device) for c, p in zip(able, prices) if c.device != "cpu" and not hopeless(p, prices)
            ]
        if todo:
            jobs = max(1, min(12, hardware.cpu_threads() - 2))
            pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
            made = [pool.submit(compile_ahead, *one) for one in todo]
            _, left = wait(made, timeout=most)
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=not left, cancel_futures=True)
            self.compiled = not left
            if left:
                print(f"out of time: {len(left)} of {len(made)} are not compiled ahead", flush=True)
                for process in processes:
                    process.kill()

    def start_up(self, cases: list[Case]) -> None:
        """Measure the start-up of everything that one of the cases may take."""
        able = {(c.name, c.device) for case in cases for c in self.priced(case)}
        for name, device in sorted(able):
            try:
                self.startup_of(name, device)
            except (subprocess.SubprocessError, OSError) as error:  # then it is measured in no case, either
                print(f"{name} on {device} does not start: {error}", flush=True)

    def startup_of(self, name: str, device: str) -> float:
        """Measured at its first use."""
        key = label({"name": name, "device": device})
        if key not in self.startups:
            self.startups[key] = startup(name, device)
        return self.startups[key]

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()
        if self.beside:
            self.beside.stop()


class Beside:
    """The auto of another checkout, asked in a process that imports its code."""

    def __init__(self, checkout: Path, kind: str) -> None:
        there = checkout.resolve()
        others = os.environ.get("PYTHONPATH", "")  # packages, and this checkout, which comes later
        paths = os.pathsep.join([*(str(there / part) for part in ("", "backends", "autotune")), others])
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", BESIDE, kind],
            cwd=there,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def picks(self, case: Case) -> dict[str, str]:
        """Return its choice by way, as labels."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(asdict(case)), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the other checkout's process ended; its message is above")
        found: dict[str, str] = json.loads(answer)
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


#: What another checkout runs: any since the grid has ways.
BESIDE = """
import json, sys
import sdkde_core
from benchmarks.choice.__main__ import Bench
from benchmarks.choice.cases import Case, data
from benchmarks.choice.report import WAYS_OF, label
bench = Bench(sys.argv[1])
for line in sys.stdin:
    case = Case(**json.loads(line))
    x, y, h = data(case)
    asked = {way: bench.explain(case, x, y, h, way) for way in WAYS_OF[case.place]}
    print(json.dumps({way: label({"name": e.backend, "device": e.device}) for way, e in asked.items()}))
"""


def compiles(info: BackendInfo, device: str) -> bool:
    """Whether ``warm_up`` compiles what a backend needs for common estimates: no pass takes more than five seconds."""
    return all(compile_seconds(info, [p]) <= 5.0 for _, problems in common(info, device) for p in problems)


@contextmanager
def as_if_warm() -> Iterator[None]:
    """Have auto choose as it does after warm_up of every device, without that."""
    before = dict(registry.warm)
    try:
        for info in (r.info for r in registry.records() if r.ok and r.info is not None):
            for kind in info.devices:
                device = kind if kind == "cpu" else f"{kind}:0"
                registry.warm[info.name, device] = compiles(info, device)
        yield
    finally:
        registry.warm.clear()
        registry.warm.update(before)


@contextmanager
def as_if_at(place: str) -> Iterator[None]:
    """Have auto choose as in a process that has a GPU's context only if its data are there, whatever this one has."""
    before = judging.has_context
    judging.has_context = lambda device: place == "device" and device.startswith("cuda")
    try:
        yield
    finally:
        judging.has_context = before


def about(kind: str) -> dict[str, Any]:
    """The machine, and the rates by which auto priced."""
    versions = {p: v for p in ("sdkde-core", "numba", "torch", "triton", "finufft", "jax") if (v := version(p))}
    on = hardware.cpu()
    found = machine() | {"priced by": f"{on.name}, {on.source}", "versions": versions}
    return found | ({"gpus": [gpu.name for gpu in hardware.visible_gpus()]} if kind == "cuda" else {})


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def cases_of(options: argparse.Namespace, bench: Bench) -> list[Case]:
    """The grid that the options ask for."""

    def prices(case: Case) -> list[Price]:
        return [price(case, c) for c in bench.priced(case)]

    places = ("host",) if options.device == "cpu" else ("host", "device")
    return draw(options.count, places, options.seed, EFFORT, options.largest, prices)


def line(record: Record, startups: dict[str, float]) -> str:
    """A case's result on a line."""
    found, cells = {way: judge(record, startups, way) for way in WAYS_OF[record["case"]["place"]]}, []
    for c in record["candidates"]:
        took = {"measured": "", "over": "> "}.get(c["outcome"])
        text = c["outcome"] if took is None else f"{took}{c['seconds'] * 1e3:.4g} ms"
        if c.get("error") is not None:
            text += f" (error {c['error']:.0e})"
        cells.append(f"{'→ ' if c['chosen'] else ''}{label(c)} {text}, predicted {c['predicted'] * 1e3:.4g}")
    ratios = ", ".join(f"{way} {ratio_text(verdict)}" for way, verdict in found.items())
    return f"{case_of(record).text}: {ratios}\n    " + "\n    ".join(cells)


def show(saved: dict[str, Any]) -> None:
    """Print the tables of a grid or a headline."""
    for key, value in saved["machine"].items():
        print(f"{key}: {value}")
    records, startups = saved["records"], saved["startups"]
    if saved["what"] == "headline":
        print("\nTime and the worst row over its tolerance; in brackets the time predicted where that was too long.\n")
        print(headline_table(records))
        return
    judged = scores(records, startups)
    if not judged:
        print("nothing to judge")
        return
    print(f"\n{judged}")
    print(f"\n{grid_table(records, startups)}\n\n{by_axis(records, startups)}")
    print(f"\n{fit_table(records, startups, saved['declared'])}\n\nBeyond the goal:\n{misses(records, startups)}")
    print(f"\n{summary(records, startups)}")
    failed = {f"{label(c)}: {c['why']}" for r in records for c in r["candidates"] if c["outcome"] == "failed"}
    print("\n".join(["", *sorted(failed)]))


def explain(cases: list[Case], bench: Bench) -> None:
    """Print what explain says of ten cases."""
    for case in cases[:10]:
        print(f"=== {case.text}\n\n{bench.explain(case, *data(case))}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="grid", choices=("grid", "compile", "headline", "explain"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--budget", type=float, help=f"seconds; headline: of a call. Default: {BUDGET}, headline 60")
    parser.add_argument("--count", type=int, help=f"cases; default: {COUNT}")
    parser.add_argument("--largest", type=float, default=math.inf, help="pairs of a pass at most")
    parser.add_argument("--precisions", default="fast,high", help="of headline")
    parser.add_argument("--startups", type=Path, metavar="FILE.json", help="take those that this record has")
    parser.add_argument("--compiled", action="store_true", help="`compile` was run before, for the same grid")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="judge that one's auto by the same times, too")
    parser.add_argument("--without", default="", metavar="NAMES", help="leave these out, unless they are chosen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write every record there")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print the tables of saved records")
    options = parser.parse_args()
    if options.table:
        return show(json.loads(options.table.read_text()))
    start, call = time.perf_counter(), options.budget or 60.0
    options.budget = options.budget or BUDGET[options.device]
    options.count = options.count or COUNT[options.device]
    bench = Bench(options.device, options.budget, options.beside, options.without.split(","))
    if options.what == "headline":
        place = "host" if options.device == "cpu" else "device"
        cases = [replace(case, seed=options.seed) for case in headline(options.precisions.split(","), place)]
    else:
        cases = cases_of(options, bench)
    if options.what == "explain":
        return explain(cases, bench)
    if options.what == "compile":
        return bench.compile_ahead(cases, options.budget)
    if options.startups:
        bench.startups |= json.loads(options.startups.read_text())["startups"]
    saved: dict[str, Any] = {"what": options.what, "seed": options.seed, "machine": about(options.device)}
    saved |= {"startups": bench.startups, "declared": bench.declared, "records": []}
    try:
        if options.what == "grid":
            bench.compiled = options.compiled
            if not options.compiled:
                bench.compile_ahead(cases, options.budget)
            bench.start_up(cases)
        for done, case in enumerate(cases):
            if options.what == "grid" and time.perf_counter() - start > options.budget:
                print(f"out of time: {len(cases) - done} of {len(cases)} cases, as drawn at random, are left out")
                break
            grid, began = options.what == "grid", time.perf_counter() - start
            record = bench.measure(case) if grid else bench.measure(case, most=call, patient=True)
            record |= {"began": round(began, 2), "took": round(time.perf_counter() - start - began, 2)}  # seconds
            saved["records"].append(record)
            print(line(record, bench.startups) if grid else case.text, flush=True)
            if options.save:
                with write_atomically(options.save) as path:
                    path.write_text(json.dumps(saved) + "\n")
    finally:
        bench.stop()
    print(f"\n{time.perf_counter() - start:.0f} s\n")
    return show(saved)


if __name__ == "__main__":
    main()
