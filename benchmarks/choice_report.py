"""What benchmarks/choice.py makes of its records: how good auto's choices are, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from choice_cases import KINDS, SPREADS, Case

#: A record: {"case": fields of Case, "candidates": [...]}. A candidate has "name", "device", "predicted",
#: "predicted_passes", "declared_startup", "chosen", "outcome" ("measured", "skipped", "over", "failed"), and by outcome
#: "seconds", "pass_seconds", "error", "why"; "over" has in "seconds" what it took at least.
Record = dict[str, Any]

#: Goals: the ratio that GOOD_SHARE of the cases keep, and the one that all do.
GOOD, GOOD_SHARE, BAD = 1.1, 0.95, 2.0


class Verdict(NamedTuple):
    """auto's choice in a case beside the fastest; times in seconds, with start-up where that counts."""

    pick: str
    pick_seconds: float
    fastest: str
    fastest_seconds: float
    ratio: float
    warm_fastest: str
    warm_ratio: float
    at_least: bool  # the pick was not waited for: the ratios are lower bounds


def label(candidate: dict[str, Any]) -> str:
    """The backend and, but for the CPU, its device."""
    return candidate["name"] if candidate["device"] == "cpu" else f"{candidate['name']} ({candidate['device']})"


def case_of(record: Record) -> Case:
    return Case(**record["case"])


def judge(record: Record, startups: dict[str, float]) -> Verdict | None:
    """Compare auto's choice with all that were measured; None where it failed, or none was.

    For data on the host a backend's start-up counts, as measured, since auto chooses as if nothing were imported. For
    data on a device it does not.
    """
    pick = next((c for c in record["candidates"] if c["chosen"]), None)
    done = [c for c in record["candidates"] if c["outcome"] == "measured"]
    if pick is None or pick["outcome"] not in ("measured", "over") or not done:
        return None
    counts = record["case"]["place"] == "host"

    def honest(c: dict[str, Any]) -> float:
        return c["seconds"] + (startups[label(c)] if counts else 0.0)

    best, warm = min(done, key=honest), min(done, key=lambda c: c["seconds"])
    if pick["outcome"] == "over":  # it may still be the best: nobody knows
        best, warm = min(best, pick, key=honest), min(warm, pick, key=lambda c: c["seconds"])
    ratio, warm_ratio = honest(pick) / honest(best), pick["seconds"] / warm["seconds"]
    return Verdict(
        label(pick), honest(pick), label(best), honest(best), ratio, label(warm), warm_ratio, pick["outcome"] == "over"
    )


class Score(NamedTuple):
    """How often auto's choice is near the fastest."""

    cases: int
    good: float  # share within GOOD
    bad: int  # cases beyond BAD
    worst: float
    warm_good: float
    warm_worst: float


def score(verdicts: Sequence[Verdict]) -> Score:
    ratios, warm = [v.ratio for v in verdicts], [v.warm_ratio for v in verdicts]
    share = [sum(r <= GOOD for r in each) / len(each) for each in (ratios, warm)]
    return Score(len(ratios), share[0], sum(r > BAD for r in ratios), max(ratios), share[1], max(warm))


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
        f"beyond {BAD:g} times in {score.bad} (goal 0), the worst {score.worst:.2f}. "
        f"Without start-up: within {GOOD:g} in {score.warm_good:.1%}, the worst {score.warm_worst:.2f}."
    )


def grid_table(records: Sequence[Record], startups: dict[str, float]) -> str:
    """Every case: auto's choice, the fastest, ratios, and the choice's worst error over the tolerance."""
    head = (
        "method, precision | n × m | d | data | auto's choice | time | the fastest | time | ratio | ratio warm | error"
    )
    rows = []
    for record in sorted(records, key=lambda r: (r["case"]["place"], r["case"]["d"], case_of(r).pairs)):
        case, verdict = case_of(record), judge(record, startups)
        what = [f"{case.method} {case.precision}", f"{case.n} × {case.m}", str(case.d)]
        what.append(f"{case.kind} {case.spread}" + ("" if case.place == "host" else ", on the GPU"))
        if verdict is None:
            rows.append([*what, *["?"] * 7])
            continue
        pick = next(c for c in record["candidates"] if c["chosen"])
        more = "≥ " if verdict.at_least else ""
        rows.append(
            [
                *what,
                *(verdict.pick, more + time_text(verdict.pick_seconds)),
                *(verdict.fastest, time_text(verdict.fastest_seconds)),
                *(f"{more}{verdict.ratio:.2f}", f"{more}{verdict.warm_ratio:.2f}", error_text(pick.get("error"))),
            ]
        )
    return rows_of(head.split(" | "), *rows, right=5)


def error_text(error: float | None) -> str:
    return "" if error is None else f"{error:.0e}"


def misses(records: Sequence[Record], startups: dict[str, float]) -> str:
    """The cases beyond GOOD, worst first, with what was predicted and measured of every candidate."""
    judged = [(judge(record, startups), record) for record in records]
    beyond = [(v, r) for v, r in judged if v is not None and v.ratio > GOOD]
    lines = []
    for verdict, record in sorted(beyond, key=lambda pair: -pair[0].ratio):
        lines.append(f"{case_of(record).text}: {verdict.ratio:.2f} (warm {verdict.warm_ratio:.2f})")
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
    """The share of good choices by the value of every axis."""
    rows = []
    order = {name: i for i, name in enumerate([*SPREADS, *KINDS])}
    for axis in ("method", "precision", "d", "spread", "kind", "place"):
        for value in sorted({r["case"].get(axis, "benign") for r in records}, key=lambda v: (order.get(v, 0), v)):
            verdicts = [judge(r, startups) for r in records if r["case"].get(axis, "benign") == value]
            told = [v for v in verdicts if v is not None]
            if told:
                mine = score(told)
                cells = [str(mine.cases), f"{mine.good:.0%}", str(mine.bad), f"{mine.worst:.2f}"]
                rows.append([f"{axis} {value}", *cells])
    return rows_of(("", "cases", f"within {GOOD:g}", f"beyond {BAD:g}", "worst"), *rows)


def headline_table(records: Sequence[Record]) -> str:
    """Time and worst error of every backend, auto's choice in bold."""
    columns = names(records)
    rows = []
    for record in records:
        case, by_name = case_of(record), {label(c): c for c in record["candidates"]}
        cells = []
        for name in columns:
            c = by_name.get(name)
            text = "" if c is None else headline_cell(c)
            cells.append(f"**{text}**" if c is not None and c["chosen"] else text)
        rows.append([f"{case.n} × {case.m}, d = {case.d}, {case.precision}", *cells])
    return rows_of(("SD-KDE", *columns), *rows)


def headline_cell(c: dict[str, Any]) -> str:
    if c["outcome"] == "measured":
        return f"{time_text(c['seconds'])}, {error_text(c['error'])}"
    if c["outcome"] == "over":
        return f"> {time_text(c['seconds'])}"
    return f"({time_text(c['predicted'])})" if c["outcome"] == "skipped" else c["outcome"]
