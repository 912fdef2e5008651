"""How good today's auto would have been in the cases of saved records of the grid, beside the choices saved with them.

    python -m benchmarks.choice.again FILE.json [FILE.json ...] [--misses]

For work on prices without the machine: data are made again, every backend installed here is priced on the processors
that the record names, and times are the record's. Prices fitted to a record say little about others: judge them by a
new one. A choice that was not measured counts as what was predicted of it then, and one that was given up as the time
after which it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import sdkde_core
from sdkde_core.choice import hardware, select
from sdkde_core.choice.judge import Candidate
from sdkde_core.estimator import plan

from .__main__ import as_if_at, as_if_warm
from .cases import Case, data
from .report import BAD, CALLS_IN, GOOD, WAYS, WAYS_OF, Record, counted, figures, label, pick_of, rows_of, time_text


class _Asked(Exception):
    """Carries what auto was to choose for."""


def _ask(problems: Any, **options: Any) -> Any:
    raise _Asked(problems, options["share"])


def asked(case: Case) -> tuple[Any, Any]:
    """The passes of a case, by the data that it has, and the share of their pairs beyond an extent."""
    x, y, h = data(case)
    try:
        sdkde_core.estimate(x, y, method=case.method, bandwidth=h, precision=case.precision)
    except _Asked as found:
        return found.args[0], found.args[1]
    raise AssertionError("no backend was asked for")


def ranked(case: Case, found: tuple[Any, Any], cpu_alone: bool, way: str) -> list[Candidate]:
    """Those that can, best first."""
    problems, share = found
    where = "cuda:0" if case.place == "device" else "cpu"
    calls = 1 if way == "whole" else CALLS_IN[case.place]
    wanted = select.Wanted("auto", "cpu" if cpu_alone else None, where, calls)
    with as_if_at(case.place), as_if_warm() if way == "warm" else nullcontext():
        return [c for c in select.ranked(select.at(problems, where), share, wanted) if c.ok and c.seconds is not None]


def seconds(c: dict[str, Any], place: str, startups: dict[str, float], way: str) -> float:
    """What a candidate took, with what counts of its start-up, or was predicted to take where it was not measured."""
    took = c["seconds"] if c["outcome"] in ("measured", "over") else c["predicted"]
    started = label(c) in startups
    return float(took + (counted(c, place, startups, way) if started else c["declared_startup"]))


def judged(record: Record, startups: dict[str, float], way: str, now: list[Candidate]) -> list[tuple[float, str]]:
    """Time over the fastest of what is taken now and of what was taken then, and in words."""
    case = Case(**record["case"])
    known = {label(c): c for c in record["candidates"] if c["outcome"] != "failed"}
    took = {name: seconds(c, case.place, startups, way) for name, c in known.items()}
    best = min((name for name, c in known.items() if c["outcome"] == "measured"), key=lambda name: took[name])
    priced = {label({"name": c.name, "device": c.device}): c.total_seconds for c in now}
    taken = {"today": next((name for name in priced if name in known), None)}
    for whose in ("picks", "beside"):
        then = pick_of(record, way, whose)
        taken |= {whose: label(then)} if then is not None and label(then) in known else {}
    found = []
    for whose, name in taken.items():
        if name is not None:
            prices = ", ".join(f"{x} {time_text(took[x])}, priced {time_text(priced.get(x))}" for x in (name, best))
            found.append((whose, max(1.0, took[name] / took[best]), f"{case.text}: {prices}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--misses", action="store_true", help=f"list what takes more than {GOOD:g} times the fastest")
    options = parser.parse_args()
    plan.select.choose = _ask
    rows = []
    for path in options.records:
        saved = json.loads(path.read_text())
        gpus = [hardware.ListedGPU(name, "") for name in saved["machine"].get("gpus", ())]
        hardware.visible_gpus = lambda found=gpus: tuple(found)
        threads = re.search(r"(\d+) threads", saved["machine"]["priced by"])
        os.environ["SDKDE_NUM_THREADS"] = threads[1] if threads else "1"
        found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
        for record in saved["records"]:
            case = Case(**record["case"])
            if any(c["outcome"] == "measured" for c in record["candidates"]):
                problems = asked(case)
                for way in WAYS_OF[case.place]:
                    now = ranked(case, problems, not gpus, way)
                    for whose, ratio, text in judged(record, saved["startups"], way, now):
                        found.setdefault((case.place, way, whose), []).append((ratio, text))
        for (place, way, whose), cases in sorted(found.items()):
            rows.append([path.stem, f"{place}, {WAYS[way]}", whose, *figures([ratio for ratio, _ in cases])])
            if options.misses and whose == "today":
                print(f"{path.stem}, {place}, {WAYS[way]}")
                print("\n".join(f"  {ratio:.2f} {text}" for ratio, text in sorted(cases)[::-1] if ratio > GOOD))
    head = ("record", "", "auto", "cases", "geometric mean", f"within {GOOD:g}", f"beyond {BAD:g}", "worst")
    print(rows_of(head, *rows, right=3))


if __name__ == "__main__":
    main()
