"""The tuner's output: tables, JSON, progress, and the reasons for a configuration."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sdkde_core.cli.console import table

from . import lookup
from .measure import versions
from .records import Best, Key, Result, Task, Trial

_HEADINGS = {"n_octave": "n", "m_octave": "m", "requires": "features", "created": "UTC", "config": "configuration"}


def show(rows: Sequence[Mapping[str, Any]], as_json: bool, *columns: str) -> None:
    """Print rows as JSON; or columns of them as a table, those that name the problem first."""
    if as_json or not rows:
        click.echo(json.dumps(rows, indent=2) if as_json else "nothing matches")
        return
    names = ["backend", "kernel", "reduction", "precision", "d", "n_octave", "m_octave", "requires", *columns]
    if not any(row["requires"] for row in rows):
        names.remove("requires")
    first = [_HEADINGS.get(name, name.replace("_", " ")) for name in names]
    click.echo(table([first, *([_cell(name, row.get(name, "")) for name in names] for row in rows)]))


def _cell(name: str, value: Any) -> str:
    if name.endswith("_octave"):
        return f"2^{value}"
    if name == "created":
        return str(value)[:16].replace("T", " ")
    if isinstance(value, Mapping):
        return config_text(value)
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def config_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as ``block_m=64 num_warps=4``."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def took(trial: Trial | None) -> str:
    """Return a time with its spread, or a prediction's rank."""
    if trial is None or trial.status != "ok":
        return "-"
    if trial.ms is None:
        return f"rank {trial.rank}"
    low, median, high = trial.ms
    return f"{median:.4g} ms ±{(high - low) / median / 2:.0%}"


def row(key: Key, best: Best | None) -> dict[str, Any]:
    """Return a winner and the default as values for JSON, and their times or ranks as text."""
    found: dict[str, Any] = key._asdict()
    default = best.default if best else None
    for name, trial in ("", best), ("default_", default):
        found[f"{name}config"] = dict(trial.config) if trial else None
        found[f"{name}ms"] = trial.ms[1] if trial and trial.ms else None
        found[f"{name}rank"] = trial.rank if trial else None
    if best:
        found |= {"source": best.source, "created": best.created, "provenance": best.provenance}
    return {**found, "best": took(best), "default": took(default)}


def result_row(result: Result) -> dict[str, Any]:
    trials = result.known.values()
    counts = Counter(trial.status for trial in trials)
    errors = Counter(trial.error for trial in trials if trial.status != "ok").most_common(1)
    found = {**row(result.task.key, result.best), "tried": result.tried, "known before": len(trials) - result.tried}
    found |= {"rejected": len(trials) - counts["ok"], "counts": dict(counts)}
    return found | {"most often": errors[0][0] if errors else ""}


class Progress:
    """Lines on standard error: a problem's result; before it every 10 s, or 60 in a log, the trials so far."""

    def __init__(self, todo: Sequence[Task], budget: float) -> None:
        self.todo, self.done, self.budget, self.start = todo, 0, budget, time.monotonic()
        self.last, self.every = self.start, 10.0 if sys.stderr.isatty() else 60.0

    def during(self, task: Task, known: int, expected: int, best: float) -> None:
        if time.monotonic() - self.last >= self.every:
            self._show(task, f"{known}/{expected}, best {best:.4g} ms")

    def finished(self, result: Result) -> None:
        self.done, best = self.done + 1, result.best
        self._show(result.task, f"{took(best)} by {config_text(best.config)}" if best else "nothing ran")

    def _show(self, task: Task, text: str) -> None:
        self.last, problem = time.monotonic(), task.problem
        what = f"{task.query.kernel} {problem.reduction} {problem.precision} d={problem.d} n={problem.n}"
        limit = "" if math.isinf(self.budget) else f" of {_clock(self.budget)}"
        click.echo(f"{self.done}/{len(self.todo)}, {_clock(self.last - self.start)}{limit}: {what}: {text}", err=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def explained(task: Task, db: Path | None = None) -> list[dict[str, Any]]:
    """Return the configurations that a look-up finds for a problem, and why; the last one is used, as it can run."""
    key, rows = task.key._asdict(), list[dict[str, Any]]()
    for found in lookup.candidates(task.query, task.problem, db):
        limit = task.limit(found.best.config)
        why = f"not used: {limit}" if limit else _why(found, key)
        rows.append({**key, "rung": found.rung, "config": dict(found.best.config), "why": why})
        if limit is None:
            return rows
    why = "nothing else is stored: the backend's default"
    return [*rows, {**key, "rung": "heuristic", "config": task.default(), "why": why}]


def _why(found: lookup.Found, key: dict[str, Any]) -> str:
    """Return where a configuration comes from, in what its problem differs, and under which versions it was tuned."""
    best, parts = found.best, ["from a table that comes with sdkde" if found.shipped else found.best.source]
    if best.source == "predicted":
        parts = [f"predicted, not measured: the cost model's choice (rank {best.rank}) that compiles"]
    other = {name: value for name, value in best.key._asdict().items() if value != key[name]}
    parts += [f"{_HEADINGS.get(name, name)} {_cell(name, value) or 'none'}" for name, value in other.items()]
    if not found.shipped:
        for name, now in versions(best.key.backend).items():
            then = best.provenance.get(name)
            parts += [f"{name} was {then}, now {now or 'none'}"] if then and then != now else []
    return "; ".join([*parts, best.created[:10]])
