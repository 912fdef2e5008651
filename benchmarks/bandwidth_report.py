"""Tables and plots of what benchmarks/bandwidths.py recorded."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from densities import DENSITIES, ELEVEN, REPORT
from numpy.typing import NDArray

__all__ = ["Study", "geometric", "number", "print_tables", "read_lines", "table", "title"]

Array = NDArray[Any]
Line = dict[str, Any]
FOUR = ("normal", "separated", "mixture", "t3")

ALL = tuple(density.name for density in REPORT)
ONE = tuple(density.name for density in ELEVEN)
MIXTURES = ("mixture-16", "wide mixture-16")


class Figure(NamedTuple):
    """What is asked of ``bandwidth="auto"``: the geometric mean at most ``mean``, no density above ``worst``."""

    title: str
    method: str
    names: tuple[str, ...]
    n: int
    mean: float
    worst: float = math.inf
    over: str = "silverman"  # of KDE; of the method itself for "best"


FIGURES = (
    Figure("eleven densities, d = 1", "sdkde", ONE, 200, 0.65, 1.15),
    Figure("eleven densities, d = 1", "sdkde", ONE, 2000, 0.40, 1.05),
    Figure("eleven densities, d = 1", "sdkde", ONE, 16000, 0.30, 1.05),
    Figure("four densities, d = 2", "sdkde", tuple(f"{name}-2" for name in FOUR), 2000, 0.45, 1.05),
    Figure("four densities, d = 5", "sdkde", tuple(f"{name}-5" for name in FOUR), 2000, 0.45, 1.05),
    Figure("all reported, over the best h", "sdkde", ALL, 2000, 1.3, over="best"),
    Figure("all reported, over the best h", "sdkde", ALL, 16000, 1.3, over="best"),
    Figure("eleven densities, d = 1", "laplace", ONE, 2000, 0.45, 1.1),
    Figure("two mixtures, d = 16", "sdkde", MIXTURES, 16000, 0.9),
    *(
        Figure("eleven densities, d = 1, over KDEpy's ISJ", "kde", ONE, n, 1.0, over="kdepy")
        for n in (200, 2000, 16000)
    ),
    *(Figure("all reported", "kde", ALL, n, math.inf, 1.05) for n in (200, 2000, 16000)),
)


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """All lines of the files; one that was cut off in the middle is left out."""
    lines = []
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


class Study:
    """The draws of a record by density (or real set) and n; of the rules those in ``kept``, all if it is empty."""

    def __init__(self, lines: Sequence[Line], kept: Sequence[str] = ()) -> None:
        self.kept = kept
        order = {density.name: k for k, density in enumerate(DENSITIES)}
        drawn = [line for line in lines if "name" in line]
        drawn.sort(key=lambda line: (order.get(line["name"], -1), line["n"], line["draw"]))
        self.draws: dict[tuple[str, int], list[Line]] = defaultdict(list)
        for line in drawn:
            self.draws[line["name"], line["n"]].append(line)
        every = [line for lines in self.draws.values() for line in lines]
        self.real = {line["name"] for line in every if line["real"]}
        self.dimension = {line["name"]: line["d"] for line in every}
        self.methods = list(dict.fromkeys(method for line in every for method in line["methods"]))

    def rules(self, method: str, names: Iterable[str], n: int) -> list[str]:
        """Those that chose a bandwidth for the method at least once, the best last; of ``kept`` only, if there are."""
        found: dict[str, None] = {}
        for line in (line for name in names for line in self.draws.get((name, n), ())):
            found |= dict.fromkeys(r for r, v in line["methods"].get(method, {}).items() if "refused" not in v)
        best = [rule for rule in found if rule.startswith("best")]
        chosen = [rule for rule in found if rule not in best and (not self.kept or rule in self.kept)]
        return chosen + best

    def values(self, name: str, n: int, method: str, rule: str, what: str) -> list[float]:
        """What was measured, a draw each; NaN where the rule refused."""
        lines = self.draws.get((name, n), ())
        found = (line["methods"].get(method, {}).get(rule, {}).get(what) for line in lines)
        return [math.nan if value is None else value for value in found]

    def ratio(self, name: str, n: int, method: str, rule: str, over: str = "silverman", what: str = "ise") -> float:
        """Geometric mean over draws: an error over KDE's by the rule ``over``, or over the method's own best."""
        base = self.values(name, n, method if over == "best" else "kde", over, what)
        pairs = [a / b for a, b in zip(self.values(name, n, method, rule, what), base) if a > 0 and b > 0]
        return math.exp(np.mean(np.log(pairs))) if pairs else math.nan

    def gain(self, name: str, n: int, method: str, rule: str) -> Array:
        """Held-out log-likelihood beyond KDE's with Silverman's rule, nats per point, for the draws with the rule."""
        base = self.values(name, n, "kde", "silverman", "likelihood")
        draws = self.draws.get((name, n), ())
        taken = ["likelihood" in line["methods"].get(method, {}).get(rule, {}) for line in draws]
        return (np.array(self.values(name, n, method, rule, "likelihood")) - base)[taken]


def geometric(values: Iterable[float]) -> float:
    kept = [value for value in values if not math.isnan(value)]
    return math.exp(np.mean(np.log(kept))) if kept else math.nan


def table(head: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool) -> None:
    """Print a table, its first column aligned left."""
    rows = [list(map(str, row)) for row in rows]
    if markdown:
        print("| " + " | ".join(head) + " |")
        print("|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
    else:
        widths = [max(len(row[k]) for row in [list(head), *rows]) for k in range(len(head))]
        for row in [list(head), *rows]:
            print("  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths))))
    print()


def number(value: float) -> str:
    """Two or three digits, as 0.41, 13.2 or 5100; a dash for what is not known."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if value < 9.995 else f"{value:.3g}"


def title(text: str, markdown: bool) -> None:
    print(f"**{text}**\n" if markdown else text)


def print_tables(lines: Sequence[Line], markdown: bool = False, rules: Sequence[str] = ()) -> None:
    """Print everything that the record has; of ``rules`` alone, if there are, the methods side by side."""
    study = Study(lines, rules)
    for line in lines:
        if "how" in line and not markdown:
            print(line["how"], line["machine"], sep="\n")
    _figures(study, markdown)
    known = [key for key in study.draws if key[0] not in study.real]
    groups = sorted({(study.dimension[name], n) for name, n in known})
    for d, n in groups:
        names = [name for name, size in known if size == n and study.dimension[name] == d]
        columns = [[(method, rule) for rule in study.rules(method, names, n)] for method in study.methods]
        for some in [list(itertools.chain(*columns))] if rules else columns:
            _errors(study, d, n, names, some, markdown)
    _summary(study, groups, known, markdown)
    _real(study, markdown)
    _times(lines, markdown)


def _figures(study: Study, markdown: bool) -> None:
    rows = []
    for figure in FIGURES:
        ratios = {name: study.ratio(name, figure.n, figure.method, "auto", figure.over) for name in figure.names}
        ratios = {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
        if not ratios:
            continue
        mean, top = geometric(ratios.values()), max(ratios, key=ratios.__getitem__)
        bounds = {"mean": figure.mean, "worst": figure.worst}
        asked = ", ".join(f"{what} ≤ {bound}" for what, bound in bounds.items() if bound < math.inf)
        held = "yes" if mean <= figure.mean and ratios[top] <= figure.worst else "no"
        got = number(mean), f"{number(ratios[top])} ({top})"
        where = f"{figure.title}, n = {figure.n}"
        rows.append([where, figure.method, *got, asked, held, f"{len(ratios)} of {len(figure.names)}"])
    if (gain := _beyond_any_rule(study, "sdkde", MIXTURES, 16000)) is not None:
        where = "two mixtures, d = 16, n = 16000: log-likelihood less the best rule's"
        rows.append([where, "sdkde", "", f"{gain:+.3f}", "≥ 0", "yes" if gain >= 0 else "no", ""])
    if rows:
        title('Asked of bandwidth="auto": ISE over that of KDE with Silverman\'s rule', markdown)
        table(["", "method", "geometric mean", "worst", "asked", "held", "densities"], rows, markdown)


def _beyond_any_rule(study: Study, method: str, names: Sequence[str], n: int) -> float | None:
    """The least over densities: the mean held-out log-likelihood with "auto" less that with any other rule."""
    least = []
    for name in names:
        means = {rule: study.gain(name, n, method, rule).mean() for rule in study.rules(method, [name], n)}
        others = [mean for rule, mean in means.items() if rule != "auto" and not rule.startswith("best")]
        if "auto" in means and others:
            least.append(means["auto"] - max(others))
    return min(least, default=None)


def _errors(study: Study, d: int, n: int, names: list[str], columns: list[tuple[str, str]], markdown: bool) -> None:
    """The ratios of every density, a column for a method with a rule."""
    if not columns:
        return
    draws = _range(sorted({len(study.draws[name, n]) for name in names}))
    title(f"d = {d}, n = {n}: ISE over that of KDE with Silverman's rule, {draws} draws", markdown)
    ratios = {column: [study.ratio(name, n, *column) for name in names] for column in columns}
    rows = [[name, *(number(ratios[column][k]) for column in columns)] for k, name in enumerate(names)]
    rows.append(["geometric mean", *(number(geometric(ratios[column])) for column in columns)])
    rows.append(["worst", *(number(np.fmax.reduce(ratios[column])) for column in columns)])
    table(["", *(f"{method}, {rule}" for method, rule in columns)], rows, markdown)


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _summary(study: Study, groups: list[tuple[int, int]], known: list[tuple[str, int]], markdown: bool) -> None:
    """Over the densities of a dimension and a size: every measure of every rule."""
    rows = []
    for d, n in groups:
        names = [name for name, size in known if size == n and study.dimension[name] == d]
        for method in study.methods:
            for rule in study.rules(method, names, n):
                ratios = [
                    geometric(study.ratio(name, n, method, rule, *over) for name in names)
                    for over in (("silverman",), ("best",), ("silverman", "l1"))
                ]
                gains = [study.gain(name, n, method, rule) for name in names]
                gain = "–" if np.isnan(np.concatenate(gains)).any() else f"{np.median([g.mean() for g in gains]):+.3f}"
                negative = np.concatenate([study.values(name, n, method, rule, "negative") for name in names])
                took = np.concatenate([study.values(name, n, method, rule, "seconds") for name in names])
                cost = "–" if np.isnan(took).all() else number(1e3 * np.nanmedian(took))
                share = "0" if method != "laplace" else f"{100 * np.nanmean(negative):.2f} %"
                rows.append([f"d = {d}, n = {n}", method, rule, *map(number, ratios), gain, share, cost])
    if rows:
        title("Geometric means over the densities; the median gain of the held-out log-likelihood", markdown)
        table(
            ["", "method", "rule", "ISE", "over the best h's", "L1", "gain", "negative", "ms to choose"], rows, markdown
        )


def _real(study: Study, markdown: bool) -> None:
    rows = []
    for (name, n), draws in study.draws.items():
        if name not in study.real:
            continue
        for method in study.methods:
            for rule in study.rules(method, [name], n):
                gain = study.gain(name, n, method, rule)
                error = np.std(gain) / math.sqrt(len(gain))
                multiple = geometric(study.values(name, n, method, rule, "multiple"))
                share = 100 * np.nanmean(study.values(name, n, method, rule, "negative"))
                what = f"{name}, {n} × {draws[0]['d']}"
                shown = "–" if np.isnan(gain).any() else f"{gain.mean():+.2f} ± {error:.2f}"
                rows.append([what, method, rule, number(multiple), shown, f"{share:.1f} %"])
    if rows:
        title("Held-out log-likelihood, nats per point beyond that of KDE with Silverman's rule", markdown)
        table(["", "method", "rule", "h / σ₁", "gain", "not positive"], rows, markdown)


def _times(lines: Sequence[Line], markdown: bool) -> None:
    """What ``times`` recorded, and what a choice may take: a fifth of SD-KDE with m = n, or a fixed time if longer."""
    rows = []
    for line in (line["times"] for line in lines if "times" in line):
        allowed = max(line["floor"], line["estimate"] / 5)
        for method, rules in line["choose"].items():
            for rule, seconds in rules.items():
                held = "yes" if seconds <= allowed else "no"
                estimate = f"{1e3 * line['estimate']:.3g} ({line['backend']})"
                size = f"{line['where']}, d = {line['d']}, n = {line['n']}"
                share = f"{100 * seconds / line['estimate']:.0f} %"
                rows.append([size, method, rule, f"{1e3 * seconds:.3g}", estimate, share, f"{1e3 * allowed:.3g}", held])
    if rows:
        title("Time to choose a bandwidth, ms", markdown)
        table(["", "method", "rule", "choice", "SD-KDE, m = n", "share", "allowed", "held"], rows, markdown)
