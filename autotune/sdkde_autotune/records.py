"""Tasks, outcomes and trials; how rows of SQLite and JSON are checked; and which of a key's trials wins.

Imports the standard library only, as look-ups do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_type_hints

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

from .key import Key, canonical

__all__ = ["KEY", "SOURCES", "Best", "Outcome", "Task", "Trial", "fastest", "now", "row_of", "trial_of", "winners"]

#: Statuses of a candidate: it ran; it cannot be launched; it did not compile, or spills; it took too long; memory ran
#: out; its process died; its results were wrong.
STATUSES = ("ok", "invalid", "compile_error", "timeout", "oom", "crash", "wrong")

#: Where a result comes from; of two for a configuration the earlier in this order is kept.
SOURCES = ("measured", "imported", "predicted")

#: The key's columns and their types.
KEY: dict[str, type] = {name: kind for name, kind in get_type_hints(Key).items() if name in Key._fields}

#: Milliseconds that a kernel may have taken: the least is far below what a launch takes, the greatest is a week.
TIMES = (1e-6, 7 * 86400e3)


class Task(NamedTuple):
    """One kernel to tune for one problem, whose sizes are powers of two."""

    query: Query
    problem: Problem


@dataclass(frozen=True)
class Outcome:
    """The outcome of trying a candidate.

    Parameters
    ----------
    status : str
        One of :data:`STATUSES`.
    ms : tuple of float
        If it was measured: the 20 %, 50 % and 80 % quantiles of its time in milliseconds.
    error : str
        If it did not run: the reason, in one line.
    final : bool
        Whether it was timed in turns with the other finalists.
    rank : int
        If it was predicted: its place among all candidates by the cost model, from 1.
    """

    status: str
    ms: tuple[float, float, float] | None = None
    error: str = ""
    final: bool = False
    rank: int | None = None

    @property
    def median(self) -> float:
        """Median in milliseconds; of a prediction its rank; inf if it did not run."""
        return self.ms[1] if self.ms else float(self.rank or math.inf)


@dataclass(frozen=True)
class Trial:
    """A configuration that was tried for a key, and its outcome."""

    key: Key
    config: Config
    outcome: Outcome
    source: str  # one of SOURCES
    provenance: Mapping[str, Any]  # versions; see :mod:`sdkde_autotune.provenance`
    created: str  # ISO 8601, UTC
    is_default: bool = False  # whether it was the configuration that an untuned problem gets


@dataclass(frozen=True)
class Best(Trial):
    """The trial that wins a key, and the default, if it ran and has the same kind of outcome."""

    default: Trial | None = None


def now() -> str:
    """Return the present time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def row_of(trial: Trial) -> dict[str, Any]:
    """Return a trial as a row of the database."""
    outcome = trial.outcome
    return {
        **trial.key._asdict(),
        "config": canonical(trial.config),
        "status": outcome.status,
        "error": outcome.error,
        **dict(zip(("q20", "q50", "q80"), outcome.ms or (None, None, None))),
        "final": int(outcome.final),
        "rank": outcome.rank,
        "source": trial.source,
        "provenance": canonical(trial.provenance),
        "created": trial.created,
        "is_default": int(trial.is_default),
    }


def trial_of(row: Mapping[str, Any]) -> Trial:
    """Return the trial in a row of the database, or of an export, where configurations are no text.

    Raises
    ------
    ValueError
        A column is missing, or holds what no search stores; names it.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {_short(row)}, not values by name")
    missing = [name for name in (*KEY, "config", "status", "source", "created") if name not in row]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name, kind in KEY.items():
        value = row[name]
        if kind is str and not (type(value) is str and value.isprintable()):
            raise ValueError(f"{name} is {_short(value)}, which is no name")
        within = range(63) if name.endswith("octave") else range(1 << 31)
        if kind is int and not (type(value) is int and value in within):
            raise ValueError(f"{name} is {_short(value)}, not an integer in {within}")
    status, source, error = row["status"], row["source"], row.get("error") or ""
    if status not in STATUSES or source not in SOURCES:
        raise ValueError(f"status is {_short(status)} and source {_short(source)}; known: {STATUSES}, {SOURCES}")
    if not isinstance(error, str):
        raise ValueError(f"error is {_short(error)}, which is no text")
    error = "".join(letter if letter.isprintable() else " " for letter in error)
    config = _values(row, "config")
    if not config:
        raise ValueError("config is empty")
    ran, rank = status == "ok", row.get("rank")
    if ran and source == "predicted" and not (type(rank) is int and 0 < rank < 1 << 31):
        raise ValueError(f"rank is {_short(rank)}; a prediction has one, from 1")
    if ran and source == "predicted":
        outcome = Outcome(status, rank=rank)
    else:
        outcome = Outcome(status, _times(row) if ran else None, error, bool(row.get("final")))
    key, provenance = Key(*(row[name] for name in KEY)), _values(row, "provenance")
    return Trial(key, config, outcome, source, provenance, _utc(row["created"]), bool(row.get("is_default")))


def _values(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the names and plain values in a column."""
    found = row.get(name)
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is {_short(found)}, which is no JSON") from error
    if not isinstance(found, dict) or not all(isinstance(each, str) and each.isprintable() for each in found):
        raise ValueError(f"{name} is {_short(found)}, not values by name")
    for each, value in found.items():
        plain = isinstance(value, str) and value.isprintable()
        if not plain and not (isinstance(value, (int, float)) and -(1 << 63) <= value < 1 << 63):  # NaN is not either
            raise ValueError(f"{each} in {name} is {_short(value)}, neither a number of at most 64 bits nor a name")
    return found


def _times(row: Mapping[str, Any]) -> tuple[float, float, float]:
    found: list[Any] = [row.get(name) for name in ("q20", "q50", "q80")]
    low, median, high = found
    (least, most), numbers = TIMES, all(isinstance(ms, (int, float)) for ms in found)
    if not numbers or not least <= low <= median <= high <= most:
        raise ValueError(f"times are {_short(found)}; they are three, ascending, {least:g} to {most:g} milliseconds")
    return low, median, high


def _utc(time: str) -> str:
    """Return a time in the format of :func:`now`, so that times compare as text; ValueError for what is none."""
    try:
        when = datetime.fromisoformat(time)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="microseconds")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"created is {time!r}, which is no time") from error


def _short(value: Any) -> str:
    """Return a value as one line; Python writes no integer of many thousands of digits, and no deep nesting."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def fastest(outcomes: Mapping[str, Outcome], default: str | None, margin: float = 0.01) -> str | None:
    """Return the name of the configuration to use; None if none ran.

    If there are finalists, it is one of them: they were timed in turns, so no lucky time decides. The default is kept
    unless another was measured to be faster by more than ``margin``, as clocks drift by as much.
    """
    ran = {name: outcome for name, outcome in outcomes.items() if outcome.status == "ok"}
    final = {name: outcome for name, outcome in ran.items() if outcome.final} or ran
    best = min(final, key=lambda name: (final[name].median, name), default=None)
    if best is not None and default in final and final[default].ms:
        return default if final[best].median >= (1 - margin) * final[default].median else best
    return best


def winners(trials: Iterable[Trial]) -> list[Best]:
    """Return the winners among trials, by key: none for a key of which none ran.

    A predicted one wins only if no other was measured or imported.
    """
    by_key: dict[Key, dict[str, Trial]] = {}
    for trial in trials:
        if trial.outcome.status == "ok":
            by_key.setdefault(trial.key, {})[canonical(trial.config)] = trial
    found = []
    for _, every in sorted(by_key.items()):
        ran = {name: trial for name, trial in every.items() if trial.source != "predicted"} or every
        latest = sorted((trial for trial in every.values() if trial.is_default), key=lambda trial: trial.created)
        usual = canonical(latest[-1].config) if latest else None
        best = ran[str(fastest({name: trial.outcome for name, trial in ran.items()}, usual))]
        found.append(Best(**vars(best), default=ran.get(usual or "")))
    return found
