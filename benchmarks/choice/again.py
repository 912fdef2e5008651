"""What auto would take by today's prices in the cases of a record of the grid, and how good that was there.

    python -m benchmarks.choice.again benchmarks/recorded/choice-cpu.json
    python -m benchmarks.choice.again benchmarks/recorded/choice-h200.json --gpu "NVIDIA H200" --threads 16 \\
        --core benchmarks/recorded/core-h200.json

For work on prices without the machine: data are made again, every backend installed here is priced on the processors
named, and times are the record's. Prices fitted to a record say little about others: see what a new one gives.

--core: rates of one core, as `sdkde doctor --measure` keeps them; default: the nominal ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import sdkde_core
from sdkde_core.choice import cards, hardware, select
from sdkde_core.choice.judge import Candidate
from sdkde_core.estimator import plan as execute
from sdkde_core.estimator.resolution import CLEAR

from .__main__ import as_if_warm
from .cases import Case, data
from .report import WAYS, WAYS_OF, Record, counted, label


class _Asked(Exception):
    """Carries what auto was to choose for."""


def _ask(problems: Any, **options: Any) -> Any:
    raise _Asked(problems, options["share"])


def ranked(case: Case, cpu_alone: bool, way: str, replays: bool) -> list[Candidate]:
    """All candidates for a case, by the data that it has."""
    x, y, h = data(case)
    try:
        sdkde_core.estimate(x, y, method=case.method, bandwidth=h, precision=case.precision)
    except _Asked as asked:
        problems, share = asked.args
    where = "cuda:0" if case.place == "device" else "cpu"
    how = {"data_device": where, "share": share, "calls": 1 if way == "whole" else None}
    how |= {
        "device": "cpu" if cpu_alone else None,
        "replays": replays and where != "cpu" and problems[0].extent <= CLEAR,
    }
    with as_if_warm() if way == "warm" else nullcontext():
        return select.rank(select.at(problems, where), **how)


def measured(candidate: dict[str, Any]) -> bool:
    return candidate["outcome"] == "measured"


def judged(record: Record, startups: dict[str, float], cpu_alone: bool, way: str) -> tuple[float, str]:
    """Time of what is taken now over the fastest of the record (inf: it was not measured), and both in words."""
    case = Case(**record["case"])
    took = {label(c): c["seconds"] + counted(c, case.place, startups, way) for c in record["candidates"] if measured(c)}
    known = {label(c) for c in record["candidates"]}
    replays = "picks" in record  # older ones have times of calls that were not replayed
    able = [c for c in ranked(case, cpu_alone, way, replays) if c.ok and c.seconds is not None]
    able = [c for c in able if label({"name": c.name, "device": c.device}) in known]
    pick, best = label({"name": able[0].name, "device": able[0].device}), min(took, key=lambda name: took[name])
    ratio = took[pick] / took[best] if pick in took else math.inf
    return ratio, f"{case.text}: {pick}, where {best} is the fastest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gpu", default="", help="the driver's name of a card; none: the CPU alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--core", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    os.environ["SDKDE_NUM_THREADS"] = str(options.threads)
    core = json.loads(options.core.read_text()) if options.core else None
    processor = cards.Processor(**{k: v for k, v in core.items() if k != "numpy"}) if core else None
    hardware._measured_core = functools.cache(lambda: processor)
    hardware.visible_gpus = lambda root="": (hardware.ListedGPU(options.gpu, ""),) * bool(options.gpu)
    execute.select.choose = _ask
    saved = json.loads(options.record.read_text())
    for way, text in WAYS.items():
        those = [
            r for r in saved["records"] if way in WAYS_OF[r["case"]["place"]] and any(map(measured, r["candidates"]))
        ]
        found = [judged(record, saved["startups"], not options.gpu, way) for record in those]
        good, bad = sum(r <= 1.1 for r, _ in found), sum(r > 2 for r, _ in found)
        print(f"{text}: within 1.1 times the fastest in {good / len(found):.1%}, beyond 2 times in {bad}")
        for ratio, case in sorted(found, reverse=True):
            if ratio > 1.1:
                print(f"  {ratio:.2f} {case}")


if __name__ == "__main__":
    main()
