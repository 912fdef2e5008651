"""What is made of the records of the grid: how good auto's choices are, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .cases import KINDS, SPREADS, Case

#: How start-up counts, and auto chooses: as on the command line, as in one of a library's calls, or after warm_up.
WAYS = {"whole": "start-up whole", "calls": "start-up as of one of many calls", "warm": "after warm_up"}

#: Calls over which start-up is spread, by where the data are: what auto takes where no GPU is used but for those.
CALLS_IN = {"host": 10, "device": 10_000}

#: Those that occur, by where the data are: the command line has none on a device.
WAYS_OF = {"host": ("whole", "calls", "warm"), "device": ("calls", "warm")}

#: A record: {"case": fields of Case, "picks": auto's choice by way, as a label, "candidates": [...]}. A candidate has
#: "name", "device", "predicted", "predicted_passes", "declared_startup", "compiling" (of that, seconds), "compiled" (by
#: warm_up), "chosen" (in some way), "outcome" ("measured", "skipped", "over", "failed"), and by outcome "seconds",
#: "pass_seconds", "error", "why"; "over" has in "seconds" what it took at least. "began" and "took" are seconds of the
#: run and of the case. Older ones have no picks: auto counted start-up whole for data on the host, and none for data on
#: a device.
Record = dict[str, Any]

#: Goals: the ratio that GOOD_SHARE of the cases keep, and the one that all do.
GOOD, GOOD_SHARE, BAD = 1.1, 0.95, 2.0


class Verdict(NamedTuple):
    """auto's choice in a case beside the fastest; times in seconds, with what counts of start-up."""

    pick: str
    pick_seconds: float
    fastest: str
    fastest_seconds: float
    ratio: float
    at_least: bool  # the pick was not waited for: the ratio is a lower bound


def label(candidate: dict[str, Any]) -> str:
    """The backend and, but for the CPU, its device."""
    return candidate["name"] if candidate["device"] == "cpu" else f"{candidate['name']} ({candidate['device']})"


def case_of(record: Record) -> Case:
    return Case(**record["case"])


def counted(c: dict[str, Any], place: str, startups: dict[str, float], way: str) -> float:
    """What counts of a candidate's start-up: as measured, with kernels compiled before, and compiling as declared."""
    compiling = c.get("compiling", 0.0)
    if way == "warm" and c.get("compiled", True):
        return 0.0
    left = compiling if way == "warm" else startups[label(c)] + compiling
    return left / (1 if way == "whole" else CALLS_IN[place])


def pick_of(record: Record, way: str, whose: str = "picks") -> dict[str, Any] | None:
    """auto's choice, or the one ``"beside"`` it; None where it is not known, or nothing can."""
    picks = record.get(whose)
    if picks is None and whose == "picks":
        old = {"host": "whole", "device": "warm"}[record["case"]["place"]]
        picks = {old: next((label(c) for c in record["candidates"] if c["chosen"]), None)}
    return next((c for c in record["candidates"] if label(c) == (picks or {}).get(way)), None)


def judge(record: Record, startups: dict[str, float], way: str, whose: str = "picks") -> Verdict | None:
    """Compare auto's choice with all that were measured, in one of WAYS; None where it failed, or none was."""
    pick = pick_of(record, way, whose)
    done = [c for c in record["candidates"] if c["outcome"] == "measured"]
    if pick is None or pick["outcome"] not in ("measured", "over") or not done:
        return None

    def honest(c: dict[str, Any]) -> float:
        return c["seconds"] + counted(c, record["case"]["place"], startups, way)

    best = min(done, key=honest)
    if pick["outcome"] == "over":  # it may still be the best: nobody knows
        best = min(best, pick, key=honest)
    ratio = honest(pick) / honest(best)
    return Verdict(label(pick), honest(pick), label(best), honest(best), ratio, pick["outcome"] == "over")


def verdicts(records: Sequence[Record], startups: dict[str, float], way: str) -> list[Verdict]:
    """Those that there are."""
    return [v for record in records if (v := judge(record, startups, way)) is not None]


class Score(NamedTuple):
    """How often auto's choice is near the fastest."""

    cases: int
    good: float  # share within GOOD
    bad: int  # cases beyond BAD
    worst: float


def score(judged: Sequence[Verdict]) -> Score:
    ratios = [v.ratio for v in judged]
    return Score(len(ratios), sum(r <= GOOD for r in ratios) / len(ratios), sum(r > BAD for r in ratios), max(ratios))


def summary(records: Sequence[Record], startups: dict[str, float]) -> str:
    """A short table of this checkout's auto, and of the one beside it, over the cases in which both can be judged."""
    rows = []
    for place in sorted({r["case"]["place"] for r in records}, reverse=True):
        for way in WAYS_OF[place]:
            both = [
                {whose: judge(r, startups, way, whose) for whose in ("picks", "beside") if whose in r}
                for r in records
                if r["case"]["place"] == place
            ]
            both = [verdicts for verdicts in both if verdicts and None not in verdicts.values()]
            for whose, name in (("picks", "this one"), ("beside", "beside")):
                ratios = [verdicts[whose].ratio for verdicts in both if whose in verdicts]
                if ratios:
                    rows.append([f"{place}, {WAYS[way]}", name, *figures(ratios)])
    return rows_of(
        ("", "auto of", "cases", "geometric mean", f"within {GOOD:g}", f"beyond {BAD:g}", "worst"), *rows, right=2
    )


def figures(ratios: Sequence[float]) -> list[str]:
    """Of ratios over the fastest: their number, geometric mean, shares within GOOD and beyond BAD, and the worst."""
    n = len(ratios)
    good, bad = sum(r <= GOOD for r in ratios) / n, sum(r > BAD for r in ratios) / n
    mean = math.exp(sum(map(math.log, ratios)) / n)
    return [str(n), f"{mean:.3f}", f"{good:.1%}", f"{bad:.1%}", f"{max(ratios):.2f}"]


class Fit(NamedTuple):
    """Predicted over measured times of a backend."""

    count: int
    mean: float  # geometric
    worst: float  # farthest from 1
    where: str


def fit(records: Sequence[Record], backend: str) -> Fit | None:
    """Of all cases in which the backend was measured and priced; None where there is none."""
    found = [
        (math.log(c["predicted"] / c["seconds"]), case_of(record).text)
        for record in records
        for c in record["candidates"]
        if label(c) == backend and c["outcome"] == "measured" and c["predicted"]
    ]
    if not found:
        return None
    worst, where = max(found, key=lambda pair: abs(pair[0]))
    return Fit(len(found), math.exp(sum(f for f, _ in found) / len(found)), math.exp(worst), where)


def names(records: Sequence[Record]) -> list[str]:
    return sorted({label(c) for record in records for c in record["candidates"]})


# --- tables in Markdown ---------------------------------------------------------------------------------------------


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def passes_text(passes: Sequence[float] | None) -> str:
    return " + ".join(time_text(p) for p in passes) if passes else "?"


def rows_of(*rows: Sequence[str], right: int = 1) -> str:
    """A Markdown table, header first; columns from ``right`` on to the right."""
    head, *body = ([str(cell) for cell in row] for row in rows)
    rule = ["---" if i < right else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def said(score: Score) -> str:
    return (
        f"{score.cases} cases: within {GOOD:g} times the fastest in {score.good:.1%} (goal {GOOD_SHARE:.0%}), "
        f"beyond {BAD:g} times in {score.bad} (goal 0), the worst {score.worst:.2f}"
    )


def scores(records: Sequence[Record], startups: dict[str, float]) -> str:
    """A line for every way, and for either place of the data."""
    lines = []
    for way, text in WAYS.items():
        for place in sorted({r["case"]["place"] for r in records}, reverse=True):
            here = verdicts([r for r in records if r["case"]["place"] == place], startups, way)
            if here:
                lines.append(f"Data on the {place}, {text}, {said(score(here))}.")
    return "\n".join(lines)


def grid_table(records: Sequence[Record], startups: dict[str, float]) -> str:
    """Every case, way by way: auto's choice and its time, the fastest and its time, their ratio; then its error."""
    head = ["method, precision", "n × m", "d", "data", *WAYS, "worst error over the tolerance"]
    rows = []
    for record in sorted(records, key=lambda r: (r["case"]["place"], r["case"]["d"], case_of(r).pairs)):
        case, found = case_of(record), [judge(record, startups, way) for way in WAYS]
        what = [f"{case.method} {case.precision}", f"{case.n} × {case.m}", str(case.d)]
        what.append(f"{case.kind} {case.spread}" + ("" if case.place == "host" else ", on the GPU"))
        known = [pick["error"] for way in WAYS if (pick := pick_of(record, way)) and pick.get("error") is not None]
        rows.append([*what, *map(verdict_text, found), error_text(max(known, default=None))])
    return rows_of(head, *rows, right=7)


def verdict_text(verdict: Verdict | None) -> str:
    if verdict is None:
        return "?"
    taken = f"{verdict.pick} {'≥ ' if verdict.at_least else ''}{time_text(verdict.pick_seconds)}"
    if verdict.pick == verdict.fastest:
        return taken
    return f"{taken}, {ratio_text(verdict)} times {verdict.fastest} {time_text(verdict.fastest_seconds)}"


def ratio_text(verdict: Verdict | None) -> str:
    return "?" if verdict is None else f"{'≥ ' if verdict.at_least else ''}{verdict.ratio:.2f}"


def error_text(error: float | None) -> str:
    return "" if error is None else f"{error:.0e}"


def misses(records: Sequence[Record], startups: dict[str, float]) -> str:
    """The cases beyond GOOD in some way, worst first, with what was predicted and measured of every candidate."""
    judged = [({way: judge(record, startups, way) for way in WAYS}, record) for record in records]
    worst = [(max((v.ratio for v in found.values() if v), default=0.0), found, record) for found, record in judged]
    lines = []
    for _, found, record in sorted((w for w in worst if w[0] > GOOD), key=lambda w: -w[0]):
        ratios = ", ".join(f"{way} {ratio_text(v)}" for way, v in found.items() if v)
        lines.append(f"{case_of(record).text}: {ratios}")
        for c in record["candidates"]:
            priced = f"predicted {passes_text(c['predicted_passes'])} + start-up {time_text(c['declared_startup'])}"
            lines.append(f"  {'→' if c['chosen'] else ' '} {label(c)}: {priced}; {found_text(c, startups)}")
    return "\n".join(lines) or "none"


def found_text(c: dict[str, Any], startups: dict[str, float]) -> str:
    if c["outcome"] == "measured":
        passes = f" (passes {passes_text(c['pass_seconds'])})" if c["pass_seconds"] else ""
        return f"took {time_text(c['seconds'])}{passes} + start-up {time_text(startups.get(label(c)))}"
    if c["outcome"] == "over":
        return f"took more than {time_text(c['seconds'])}"
    return c["outcome"] + (f": {c['why']}" if c.get("why") else "")


def fit_table(records: Sequence[Record], startups: dict[str, float], declared: dict[str, float]) -> str:
    """Of every backend: predicted over measured times, its start-up, and its worst error."""
    rows = []
    for name in names(records):
        found = fit(records, name)
        mine = [c for record in records for c in record["candidates"] if label(c) == name]
        errors = [c["error"] for c in mine if c["outcome"] == "measured" and c["error"] is not None]
        outcomes = [sum(c["outcome"] == o for c in mine) for o in ("measured", "skipped", "over", "failed")]
        means = [f"{found.mean:.2f}", f"{found.worst:.2f}", found.where] if found else ["", "", ""]
        starts = [time_text(startups.get(name)), time_text(declared.get(name))]
        rows.append([name, *map(str, outcomes), *means, *starts, error_text(max(errors, default=None))])
    head = ["backend", "measured", "skipped", "over", "failed", "predicted / measured", "farthest", "where"]
    return rows_of([*head, "start-up", "priced", "error"], *rows)


def by_axis(records: Sequence[Record], startups: dict[str, float]) -> str:
    """The share of good choices by the value of every axis, way by way: within GOOD, beyond BAD, the worst."""
    rows = []
    order = {name: i for i, name in enumerate([*SPREADS, *KINDS])}
    for axis in ("method", "precision", "d", "spread", "kind", "place"):
        for value in sorted({r["case"].get(axis, "benign") for r in records}, key=lambda v: (order.get(v, 0), v)):
            mine = [r for r in records if r["case"].get(axis, "benign") == value]
            told = [score(v) if (v := verdicts(mine, startups, way)) else None for way in WAYS]
            cells = ["" if t is None else f"{t.good:.0%}, {t.bad}, {t.worst:.2f}" for t in told]
            rows.append([f"{axis} {value}", str(len(mine)), *cells])
    return rows_of(("", "cases", *WAYS), *rows)


def headline_table(records: Sequence[Record]) -> str:
    """Time and worst error of every backend, auto's choice in bold."""
    columns = names(records)
    rows = []
    for record in records:
        case, by_name = case_of(record), {label(c): c for c in record["candidates"]}
        pick = pick_of(record, "calls") or next((c for c in record["candidates"] if c["chosen"]), None)
        cells = []
        for name in columns:
            c = by_name.get(name)
            text = "" if c is None else headline_cell(c)
            cells.append(f"**{text}**" if c is not None and c is pick else text)
        rows.append([f"{case.n} × {case.m}, d = {case.d}, {case.precision}", *cells])
    return rows_of(("SD-KDE", *columns), *rows)


def headline_cell(c: dict[str, Any]) -> str:
    if c["outcome"] == "measured":
        return f"{time_text(c['seconds'])}, {error_text(c['error'])}"
    if c["outcome"] == "over":
        return f"> {time_text(c['seconds'])}"
    return f"({time_text(c['predicted'])})" if c["outcome"] == "skipped" else c["outcome"]
