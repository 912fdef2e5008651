"""Trials and winners: how rows of SQLite and JSON are checked, and which of a key's trials wins.

Imports the standard library only, as look-ups do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, get_type_hints

from sdkde_core.tuning import Config

from .key import Key, canonical
from .runner import SOURCES, STATUSES, Outcome, fastest

__all__ = ["KEY", "Best", "Row", "StoreError", "Trial", "now", "row_of", "trial_of", "utc", "values_of", "winners"]

Row = Mapping[str, Any]

#: The key's columns and their kinds, and the values of those that are integers.
KEY: dict[str, type] = {name: kind for name, kind in get_type_hints(Key).items() if name in Key._fields}
_RANGES = {name: range(63) if name.endswith("octave") else range(1 << 31) for name in KEY if KEY[name] is int}

_QUANTILES = ("q20", "q50", "q80")

#: Milliseconds that a kernel may have taken: the least is far below what a launch takes, the greatest is a week.
TIMES = (1e-6, 7 * 86400e3)


class StoreError(ValueError):
    """A database or an import cannot be used; the message says which, why, and what to do."""


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
    """The trial that wins a key, and the default configuration, if that ran."""

    default_ms: float | None = None  # also None if only one of the two was predicted
    default_config: Config | None = None

    @property
    def ms(self) -> float:
        """Median, in milliseconds."""
        return self.outcome.median

    @property
    def noise(self) -> float:
        """Difference of the 80 % and 20 % quantiles, relative to the median."""
        low, median, high = self.outcome.ms or (math.nan,) * 3
        return (high - low) / median


def now() -> str:
    """Return the present time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def utc(time: str) -> str:
    """Return a time in the format of :func:`now`, so that times compare as text; ValueError for what is none."""
    try:
        when = datetime.fromisoformat(time)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="microseconds")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"created is {time!r}, which is no time") from error


def values_of(trial: Trial) -> dict[str, Any]:
    """Return a trial as values for JSON."""
    outcome = trial.outcome
    return {
        **trial.key._asdict(),
        "config": dict(trial.config),
        "status": outcome.status,
        "error": outcome.error,
        **dict(zip(_QUANTILES, outcome.ms or (None, None, None))),
        "phases": dict(outcome.phases),
        "source": trial.source,
        "provenance": dict(trial.provenance),
        "created": trial.created,
        "is_default": int(trial.is_default),
    }


def row_of(trial: Trial) -> dict[str, Any]:
    """Return a trial as a row of the database."""
    return {name: canonical(v) if isinstance(v, dict) else v for name, v in values_of(trial).items()}


def trial_of(row: Row) -> Trial:
    """Return the trial in a row of the database, or of an export, where configurations are no text.

    Raises
    ------
    ValueError
        A column is missing, or holds what no search stores; names it.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {_short(row)}, not values by name")
    missing = [name for name in (*Key._fields, "config", "status", "source", "created") if name not in row]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name, kind in KEY.items():
        value = row[name]
        if kind is str and not (type(value) is str and value.isprintable()):
            raise ValueError(f"{name} is {_short(value)}, which is no name")
        if kind is int and not (type(value) is int and value in _RANGES[name]):
            raise ValueError(f"{name} is {_short(value)}, not an integer in {_RANGES[name]}")
    status, source, error = row["status"], row["source"], row.get("error") or ""
    if status not in STATUSES or source not in SOURCES:
        raise ValueError(f"status is {_short(status)} and source {_short(source)}; known: {STATUSES}, {SOURCES}")
    if not isinstance(error, str):
        raise ValueError(f"error is {_short(error)}, which is no text")
    error = "".join(letter if letter.isprintable() else " " for letter in error)
    config = _values(row, "config")
    if not config:
        raise ValueError("config is empty")
    outcome = Outcome(status, _times(row) if status == "ok" else None, error, _values(row, "phases"))
    key = Key._make(row[name] for name in Key._fields)
    is_default = bool(row.get("is_default"))
    return Trial(key, config, outcome, source, _values(row, "provenance"), utc(row["created"]), is_default)


def _values(row: Row, name: str) -> dict[str, Any]:
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


def _times(row: Row) -> tuple[float, float, float]:
    found: list[Any] = [row.get(name) for name in _QUANTILES]
    low, median, high = found
    (least, most), numbers = TIMES, all(isinstance(ms, (int, float)) for ms in found)
    if not numbers or not least <= low <= median <= high <= most:
        raise ValueError(f"times are {_short(found)}; they are three, ascending, {least:g} to {most:g} milliseconds")
    return low, median, high


def _short(value: Any) -> str:
    """Return a value as one line; Python writes no integer of many thousands of digits, and no deep nesting."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def winners(trials: Iterable[Trial]) -> list[Best]:
    """Return the winners among trials, by key; one of each configuration, and there is none for a key if none ran.

    The fastest configuration that ran wins, as :func:`sdkde_autotune.runner.fastest` says. A predicted one wins only
    if no other was measured or imported.
    """
    by_key: dict[Key, list[Trial]] = {}
    for trial in trials:
        if trial.outcome.status == "ok":
            by_key.setdefault(trial.key, []).append(trial)
    return [_winner(by_key[key]) for key in sorted(by_key)]


def _winner(ran: list[Trial]) -> Best:
    usual = max((trial for trial in ran if trial.is_default), key=lambda trial: trial.created, default=None)
    default = None if usual is None else canonical(usual.config)
    known = {canonical(t.config): t for t in [t for t in ran if t.source != "predicted"] or ran}
    first = known[str(fastest({name: trial.outcome for name, trial in known.items()}, default))]
    default_ms = known[default].outcome.median if default in known else None
    return Best(**vars(first), default_ms=default_ms, default_config=usual.config if usual else None)
