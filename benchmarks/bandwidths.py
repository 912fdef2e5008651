"""What each choice of a bandwidth costs: integrated errors where the density is known, held-out likelihood elsewhere.

    python benchmarks/bandwidths.py run --seed 1 --save FILE.jsonl [--group report|develop|real] [--rules auto,lscv,…]
        [--dims 1,2] [--sizes 200,2000,16000] [--draws 20] [--device cpu|cuda] [--jobs N] [--seconds S]
    python benchmarks/bandwidths.py times --save TIMES.jsonl [--rules …] [--device cpu|cuda]
    python benchmarks/bandwidths.py line --seed 1 [--group eleven|fresh|develop|few] [--sizes 200,2000] [--draws 20]
        [--rounded .1]                                     one dimension, many draws, errors on a grid
    python benchmarks/bandwidths.py tables FILE.jsonl TIMES.jsonl … [--markdown] [--rules auto,kdepy]
    python benchmarks/bandwidths.py plot FILE.jsonl … --to FILE.png [--rules auto,normal-reference]

The error against n, with fitted slopes:

    python benchmarks/bandwidths.py run --seed 1 --save SLOPES.jsonl --densities normal,bimodal,normal-2
        --methods kde,sdkde --rules auto --sizes 250,1000,4000,16000,64000 --draws 100
    python benchmarks/bandwidths.py convergence SLOPES.jsonl --to FILE.png

A draw is n samples of a density. For each method, every rule chooses its bandwidth, and the best multiple of σ₁ per
column (min(std, IQR/1.34)) is searched with the density known. Errors are over those of KDE with Silverman's rule on
the same draw. FILE.jsonl has one line a draw and grows while the study runs: a run that was stopped, or that ended with
its --seconds, goes on where it was when it is called again. Draws come in turn for all densities, so a part is
balanced. --seed: figures are reported with another seed, and on other densities (--group), than anything was tuned on.

Other libraries' choices for KDE, where they are installed: SciPy's default, scikit-learn's KernelDensity with a grid
search, KDEpy's improved Sheather-Jones; and the plug-in of R's ks by its formula. They are bandwidths, so the estimates
are our sums.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from bandwidth_data import REAL, split
from bandwidth_line import GROUPS, line
from bandwidth_peers import peers
from bandwidth_plots import convergence, plot_errors
from bandwidth_report import print_tables, read_lines
from densities import DEVELOP, FRESH, REPORT, named
from density_errors import HELD_OUT, HeldOut, errors_of
from numpy.typing import NDArray

from sdkde_core.bandwidth.matrix import Bandwidth

METHODS = ("kde", "sdkde", "laplace")
SIZES = (200, 2000, 16000)
SEARCH = {1: (0.01, 3.0), 2: (0.03, 3.0)}  # multiples of σ₁ between which the best is looked for
COARSE, FINER = 22, 3  # multiples at first, and halvings of their distance

Array = NDArray[Any]


# One draw


def choose(x: Any, method: str, rule: str) -> Any:
    """Return the bandwidth that the rule chooses for the method."""
    from sdkde_core.estimator.plan import read
    from sdkde_core.estimator.request import Goal, Request

    options = {"method": method, "bandwidth": rule, "device": "cpu" if isinstance(x, np.ndarray) else None}
    return read(Request.of(Goal.DENSITY, options), x)[1]


def best(loss: Callable[[float], float], low: float, high: float) -> float:
    """Return the multiple with the least loss: a grid of logarithms, whose distance then halves about its best."""
    step = math.log(high / low) / (COARSE - 1)
    known = {float(k): loss(low * math.exp(k * step)) for k in range(COARSE)}
    for halving in range(1, FINER + 1):
        at = min(known, key=known.__getitem__)
        for k in (at - 0.5**halving, at + 0.5**halving):
            known[k] = loss(low * math.exp(k * step))
    return low * math.exp(min(known, key=known.__getitem__) * step)


def draw(name: str, n: int, index: int, how: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one draw of a density, or of one split of a real set (n = 0).

    ``how``: seed, methods, rules, device.
    """
    start = time.perf_counter()
    rng = np.random.default_rng([how["seed"], zlib.crc32(name.encode()), n, index])
    if n == 0:
        (samples, held_out), judge = split(name, rng), HeldOut()
    else:
        density = named(name)
        samples, held_out, judge = density.sample(rng, n), density.sample(rng, HELD_OUT), errors_of(density)
        if how.get("rounded"):
            unit = how["rounded"] * samples.std(axis=0)
            samples = np.round(samples / unit) * unit
    x, d = there(samples, how["device"]), samples.shape[1]
    spread = choose(x, "kde", "silverman").scaled(1 / (0.9 * len(samples) ** (-1 / (d + 4))))  # σ₁ per column

    def judged(method: str, bandwidth: Any, seconds: float | None = None) -> dict[str, Any]:
        multiple = math.exp((bandwidth.log_determinant - spread.log_determinant) / d)
        errors = judge.all(x, method, bandwidth, held_out, device=how["device"])
        return {"multiple": multiple, "seconds": seconds} | dataclasses.asdict(errors)

    methods: dict[str, dict[str, Any]] = {}
    for method in how["methods"]:
        found = methods[method] = {}
        for rule in how["rules"]:
            try:
                begun = time.perf_counter()
                bandwidth = choose(x, method, rule)
            except ValueError as error:  # a rule that is not for this method, or not for these data
                found[rule] = {"refused": str(error)}
            else:
                found[rule] = judged(method, bandwidth, time.perf_counter() - begun)
        if n == 0 and method == "laplace":
            continue  # where it is negative, it has no likelihood to look for the best of
        shapes = {"best": spread}
        if n == 0:  # real columns are correlated, and may share a unit
            shapes["best iso"] = choose(x, method, "silverman-iso").scaled(1 / (0.9 * len(samples) ** (-1 / (d + 4))))
            if len(samples) > d:
                shapes["best full"] = choose(x, method, "scott").scaled(len(samples) ** (1 / (d + 4)))
        for rule, shape in shapes.items():
            loss = functools.partial(judged_loss, judge, x, method, shape, held_out, how["device"])
            found[rule] = judged(method, shape.scaled(best(loss, *SEARCH.get(d, (0.1, 3.0)))))
    if "kde" in methods:
        for peer, (value, seconds) in peers(samples, index).items():
            methods["kde"][peer] = judged("kde", Bandwidth.of(value, d), seconds)
    seconds = time.perf_counter() - start
    return {
        "name": name,
        "d": d,
        "n": len(samples),
        "draw": index,
        "real": n == 0,
        "seconds": seconds,
        "methods": methods,
    }


def judged_loss(judge: Any, x: Any, method: str, base: Any, held_out: Array, device: str, multiple: float) -> float:
    return judge.loss(x, method, base.scaled(multiple), held_out, device=device)


def there(samples: Array, device: str) -> Any:
    """The samples on the device: NumPy's on the CPU."""
    if device == "cpu":
        return samples
    import torch

    return torch.as_tensor(samples, device=device)


# The run


def tasks(arguments: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Density, n (0: a real set) and number of every draw: the longest first, the draws in turn."""
    groups = {"report": REPORT, "develop": DEVELOP, "fresh": FRESH}
    pairs = [(name, 0) for name in REAL] if "real" in arguments.group else []
    for density in itertools.chain.from_iterable(groups.get(group, ()) for group in arguments.group):
        if density.d in arguments.dims and (not arguments.densities or density.name in arguments.densities):
            pairs += [(density.name, n) for n in arguments.sizes]
    pairs.sort(key=lambda pair: -pair[1])
    for index in range(arguments.draws):
        for name, n in pairs:
            yield name, n, index


def run(arguments: argparse.Namespace) -> None:
    """Take the draws that the file lacks."""
    how = {name: getattr(arguments, name) for name in ("seed", "methods", "rules", "device", "rounded")}
    key = lambda line: (line["name"], 0 if line["real"] else line["n"], line["draw"])  # noqa: E731
    take(arguments, how, tasks(arguments), draw, key)


def take(
    arguments: argparse.Namespace,
    how: dict[str, Any],
    tasks: Iterable[tuple[Any, ...]],
    draw: Callable[..., dict[str, Any]],
    key: Callable[[dict[str, Any]], tuple[Any, ...]],
) -> None:
    """Take the draws that the file lacks, in processes of their own, until the time is up.

    A task is the arguments of ``draw`` before ``how``, and ends with the number of the draw; ``key`` returns a line's.
    """
    started, path = time.monotonic(), arguments.save
    how = json.loads(json.dumps(how))  # as it is read back
    before = read_lines([path]) if path.exists() else []
    if before and not path.read_text(encoding="utf-8").endswith("\n"):  # a line was cut off
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    if settings := [line["how"] for line in before if "how" in line]:
        if settings[-1] != how:
            raise SystemExit(f"{path} was begun with {settings[-1]}, not {how}: name another file")
    else:
        append(path, {"how": how, "machine": machine(arguments)})
    done = {key(line) for line in before if "name" in line}
    todo = [task for task in tasks if task not in done]
    taken: dict[tuple[Any, ...], float] = {}  # the seconds of the last draw
    running: dict[Future[dict[str, Any]], tuple[Any, ...]] = {}
    finished = 0
    os.environ.setdefault("SDKDE_NUM_THREADS", str(max(1, cores() // arguments.jobs)))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # the processes have the cores already
        os.environ.setdefault(variable, os.environ["SDKDE_NUM_THREADS"])
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        while todo or running:
            while todo and len(running) < arguments.jobs:
                task = todo.pop(0)
                if time.monotonic() - started + taken.get(task[:-1], 0.0) > arguments.seconds:
                    continue
                running[pool.submit(draw, *task, how)] = task
            for future in wait(running, return_when=FIRST_COMPLETED)[0] if running else ():
                task = running.pop(future)
                if error := future.exception():
                    print(f"{task}: {type(error).__name__}: {error}", file=sys.stderr)
                    continue
                line = future.result()
                taken[task[:-1]] = line["seconds"]
                append(path, line)
                finished += 1
    print(f"{finished} draws in {time.monotonic() - started:.0f} s, {len(done) + finished} in {path}")


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Versions and hardware; nothing that names the machine."""
    versions = {}
    for package in ("sdkde-core", "numpy", "scipy", "numba", "finufft", "torch", "triton", "scikit-learn", "KDEpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    card = None
    if arguments.device != "cpu":
        import torch

        card = torch.cuda.get_device_name(arguments.device)
    return {
        "python": platform.python_version(),
        "versions": versions,
        "cores": cores(),
        "card": card,
        "jobs": arguments.jobs,
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# What choosing takes


def times(arguments: argparse.Namespace) -> None:
    """Time every rule, and SD-KDE with as many queries as samples: medians, all cores, nothing else running."""
    import sdkde_core

    def median(call: Callable[[], Any]) -> float:
        call()  # compiles
        return statistics.median(seconds(call) for _ in range(arguments.repeat))

    def seconds(call: Callable[[], Any]) -> float:
        wait_for(device)
        start = time.perf_counter()
        call()
        wait_for(device)
        return time.perf_counter() - start

    device = arguments.device
    append(arguments.save, {"how": {"device": device, "repeat": arguments.repeat}, "machine": machine(arguments)})
    if device == "cpu":  # with data on a card start-up hardly counts in the choice of the backend
        sdkde_core.warm_up(device)
    for d, n in itertools.product(arguments.dims, arguments.sizes):
        x = there(named(f"mixture-{d}" if d > 1 else "trimodal").sample(np.random.default_rng(n), n), device)
        h = choose(x, "kde", "silverman")
        line: dict[str, Any] = {"d": d, "n": n, "where": machine(arguments)["card"] or f"{cores()} cores"}
        line["backend"] = sdkde_core.explain(x, x, bandwidth=h, device=device).backend
        line["floor"] = 0.5 if device == "cpu" else 0.02
        line["estimate"] = median(lambda x=x, h=h: sdkde_core.estimate(x, bandwidth=h, device=device))
        line["choose"] = {method: {} for method in arguments.methods}
        for method, rule in itertools.product(arguments.methods, arguments.rules):
            with contextlib.suppress(ValueError):  # not for this method
                line["choose"][method][rule] = median(lambda x=x, m=method, r=rule: choose(x, m, r))
        append(arguments.save, {"times": line})
    print_tables(read_lines([arguments.save]))


def wait_for(device: str) -> None:
    """Until the card has done what was asked of it."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


# The command line


def known_rules() -> tuple[str, ...]:
    """The rules that the package has, those that need the data's own sums included."""
    from sdkde_core.bandwidth.rules import RULES

    names = dict.fromkeys((*RULES, "auto", "lscv", "lcv", "isj", "normal-reference"))
    probe, known = np.random.default_rng(0).normal(size=(64, 1)), []
    for name in names:
        try:
            choose(probe, "kde", name)
        except ValueError:
            continue
        known.append(name)
    return tuple(known)


def words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, words(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="run | times | tables | plot | convergence")
    command = commands.add_parser("run", help="take draws")
    command.set_defaults(call=run)
    command.add_argument("--group", type=words, default=("report", "real"), help="report, fresh, develop, real")
    command.add_argument("--densities", type=words, default=(), help="of the groups, these only")
    command.add_argument("--dims", type=numbers, default=(1, 2, 5, 16))
    command.add_argument("--sizes", type=numbers, default=SIZES)
    command.add_argument("--draws", type=int, default=20)
    command.add_argument("--methods", type=words, default=METHODS)
    command.add_argument("--rules", type=words, default=None, help="default: all that the package has")
    command.add_argument("--rounded", type=float, default=0.0, help="to multiples of so many standard deviations")
    command.add_argument("--seed", type=int, required=True)
    command.add_argument("--save", type=Path, required=True, metavar="FILE.jsonl")
    command.add_argument("--device", default="cpu")
    command.add_argument("--jobs", type=int, default=cores())
    command.add_argument("--seconds", type=float, default=math.inf)
    command = commands.add_parser("times", help="time every rule")
    command.set_defaults(call=times, jobs=1)
    command.add_argument("--dims", type=numbers, default=(1, 2, 5, 16))
    command.add_argument("--sizes", type=numbers, default=SIZES)
    command.add_argument("--methods", type=words, default=METHODS)
    command.add_argument("--rules", type=words, default=None, help="default: all that the package has")
    command.add_argument("--repeat", type=int, default=5)
    command.add_argument("--save", type=Path, required=True, metavar="FILE.jsonl")
    command.add_argument("--device", default="cpu")
    command = commands.add_parser("line", help="one dimension: errors of auto, fast")
    command.set_defaults(call=line)
    command.add_argument("--group", choices=GROUPS, default="fresh")
    command.add_argument("--sizes", type=numbers, default=SIZES)
    command.add_argument("--draws", type=int, default=20)
    command.add_argument("--methods", type=words, default=METHODS)
    command.add_argument("--rounded", type=float, default=0.0, help="to multiples of so many σ₁")
    command.add_argument("--seed", type=int, required=True)
    command.add_argument("--jobs", type=int, default=cores())
    command = commands.add_parser("tables", help="print what was recorded")
    command.set_defaults(
        call=lambda arguments: print_tables(read_lines(arguments.files), arguments.markdown, arguments.rules)
    )
    command.add_argument("files", type=Path, nargs="+", metavar="FILE.jsonl")
    command.add_argument("--rules", type=words, default=(), help="these alone and the best, the methods side by side")
    command.add_argument("--markdown", action="store_true")
    command = commands.add_parser("plot", help="draw the errors of every density")
    command.set_defaults(call=lambda arguments: plot_errors(read_lines(arguments.files), arguments.to, arguments.rules))
    command.add_argument("files", type=Path, nargs="+", metavar="FILE.jsonl")
    command.add_argument("--rules", type=words, default=("auto",), help="five at most")
    command.add_argument("--to", type=Path, required=True, metavar="FILE.png")
    command = commands.add_parser("convergence", help="fit the slopes of the error against n, and draw them")
    command.set_defaults(
        call=lambda arguments: convergence(
            read_lines(arguments.files), arguments.to, arguments.rule, arguments.markdown
        )
    )
    command.add_argument("files", type=Path, nargs="+", metavar="FILE.jsonl")
    command.add_argument("--rule", default="auto", help="beside the best h")
    command.add_argument("--to", type=Path, metavar="FILE.png")
    command.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if getattr(arguments, "rules", ()) is None:
        arguments.rules = known_rules()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
