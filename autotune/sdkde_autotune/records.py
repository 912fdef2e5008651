"""Trials and winners, how they become rows of SQLite and JSON, and how a winner is chosen among trials."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from sqlite_utils import Database

import sdkde_core
from sdkde_core.tuning import Config

from . import lookup, schema
from .key import Key, canonical
from .runner import SOURCES, STATUSES, Outcome, fastest

__all__ = ["Best", "StoreError", "Trial", "checked", "dump", "read_dump", "select", "winner"]

_FORMAT = "sdkde-tuning"
_JSON = ("config", "default_config", "phases", "provenance")
_QUANTILES = ("q20", "q50", "q80")

#: Sources, the most trusted first: of several trials of a configuration the most trusted one counts.
_TRUST = ("measured", "imported", "predicted")


class StoreError(ValueError):
    """A database or an import cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Trial:
    """A configuration that was tried for a key, and its outcome.

    Parameters
    ----------
    key : Key
    config : mapping
        The configuration.
    outcome : Outcome
    source : str
        One of :data:`sdkde_autotune.runner.SOURCES`.
    provenance : mapping
        Versions; see :mod:`sdkde_autotune.provenance`.
    created : str
        ISO 8601, UTC.
    """

    key: Key
    config: Config
    outcome: Outcome
    source: str
    provenance: Mapping[str, Any]
    created: str


@dataclass(frozen=True)
class Best:
    """The winner for a key.

    Parameters
    ----------
    key : Key
    config : mapping
    ms : float
        Median, in milliseconds.
    default_ms : float or None
        Median of the default configuration; None if it did not run, or only one of the two was predicted.
    noise : float
        Difference of the 80 % and 20 % quantiles, relative to the median.
    source, provenance, created
        As of the winner's :class:`Trial`.
    default_config : mapping or None
        The default configuration, if the tuner said which.
    """

    key: Key
    config: Config
    ms: float
    default_ms: float | None
    noise: float
    source: str
    provenance: Mapping[str, Any]
    created: str
    default_config: Config | None = None


def now() -> str:
    """Return the present time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _utc(time: str) -> str:
    """Return a time in the format of :func:`now`, so that times compare as text."""
    when = datetime.fromisoformat(time)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="microseconds")


def select(db: Database, table: str, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows whose columns have the values in ``filters``, or one of several; trials by time, others by key."""
    found = db.table(table)
    columns, arguments, parts = list(found.columns_dict), list[Any](), list[str]()
    for name, wanted in filters.items():
        if name not in columns:
            raise StoreError(f"{name!r} is no column of {table}; there are {', '.join(columns)}")
        if wanted is not None:
            values = [wanted] if isinstance(wanted, (str, int, float)) else list(wanted)
            parts.append(f"[{name}] IN ({', '.join('?' * len(values))})")
            arguments += values
    order = "created, rowid" if table == "trial" else ", ".join(f"[{name}]" for name in found.pks)
    return list(found.rows_where(" AND ".join(parts) or None, arguments, order_by=order))


def key_of(row: Mapping[str, Any]) -> Key:
    return Key._make(row[name] for name in Key._fields)


def calibrated(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["machine"], row["backend"], row["name"]


def row_of_trial(trial: Trial) -> dict[str, Any]:
    outcome = trial.outcome
    return {
        **trial.key._asdict(),
        "config": canonical(trial.config),
        "status": outcome.status,
        "error": outcome.error,
        **dict(zip(_QUANTILES, outcome.ms or (None, None, None))),
        "phases": canonical(outcome.phases),
        "source": trial.source,
        "provenance": canonical(trial.provenance),
        "created": trial.created,
    }


def trial_of(row: Mapping[str, Any]) -> Trial:
    ms = cast(tuple[float, float, float], tuple(row[name] for name in _QUANTILES))
    outcome = Outcome(row["status"], None if None in ms else ms, row["error"], json.loads(row["phases"]))
    provenance = json.loads(row["provenance"])
    return Trial(key_of(row), json.loads(row["config"]), outcome, row["source"], provenance, row["created"])


def row_of_best(best: Best) -> dict[str, Any]:
    return {
        **best.key._asdict(),
        "config": canonical(best.config),
        "ms": best.ms,
        "default_config": None if best.default_config is None else canonical(best.default_config),
        "default_ms": best.default_ms,
        "noise": best.noise,
        "source": best.source,
        "provenance": canonical(best.provenance),
        "created": best.created,
    }


def best_of(row: Mapping[str, Any]) -> Best:
    values = {name: row[name] for name in ("ms", "default_ms", "noise", "source", "created")}
    default = row["default_config"]
    return Best(
        key=key_of(row),
        config=json.loads(row["config"]),
        provenance=json.loads(row["provenance"]),
        default_config=json.loads(default) if default else None,
        **values,
    )


def winner(trials: Iterable[Trial], default: Config | None) -> Best | None:
    """Return the winner among a key's trials, see :meth:`sdkde_autotune.store.Store.settle`; None if none ran."""
    trusted: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: _TRUST.index(trial.source)):
        trusted.setdefault(canonical(trial.config), trial)
    ran = [trial for trial in trusted.values() if trial.outcome.status == "ok" and math.isfinite(trial.outcome.median)]
    ran = [trial for trial in ran if trial.source != "predicted"] or ran
    if not ran:
        return None
    known = {canonical(trial.config): trial for trial in ran}
    usual = None if default is None else canonical(default)
    first = known[str(fastest({name: trial.outcome for name, trial in known.items()}, usual))]
    low, median, high = first.outcome.ms or (math.nan,) * 3
    return Best(
        key=first.key,
        config=first.config,
        ms=median,
        default_ms=known[usual].outcome.median if usual in known else None,
        noise=(high - low) / median if median else 0.0,
        source=first.source,
        provenance=first.provenance,
        created=first.created,
        default_config=default,
    )


# --- exchange ---------------------------------------------------------------------------------------------------------


def dump(db: Database, filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a database as values for JSON; see :meth:`sdkde_autotune.store.Store.dump`."""

    def rows(table: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {name: json.loads(value) if name in _JSON and value else value for name, value in row.items()}
            for row in select(db, table, wanted)
        ]

    filtered = any(wanted is not None for wanted in filters.values())
    of_best = {name: wanted for name, wanted in filters.items() if name != "status"}
    return {
        "format": _FORMAT,
        "schema": len(schema.MIGRATIONS),
        "sdkde": sdkde_core.__version__,
        "created": now(),
        "trial": rows("trial", filters),
        "best": rows("best", of_best),
        "calibration": [] if filtered else rows("calibration", {}),
    }


def read_dump(path: Path) -> Mapping[str, Any]:
    """Return the dump in a JSON file, or the dump of another database."""
    try:
        try:
            found = lookup.read(path, _dump_of)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_NOTADB:
                raise
            return cast(Mapping[str, Any], json.loads(path.read_text(encoding="utf-8")))
        if found is None and not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except (OSError, sqlite3.Error, schema.Refused) as error:
        raise StoreError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise StoreError(f"{path} is neither a database nor JSON ({error})") from error
    return found or {"format": _FORMAT, "schema": 0}


def _dump_of(connection: sqlite3.Connection) -> dict[str, Any]:
    """Dump a database; one of an older schema is migrated, in memory."""
    with closing(sqlite3.connect(":memory:")) as memory:
        connection.backup(memory)
        db = Database(memory)
        schema.migrate(db)
        return dump(db, {})


_Checked = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[Key, Config]]


def checked(given: Any, name: str) -> _Checked:
    """Return a dump's trials and calibration as rows, and its default configurations by key.

    Raises
    ------
    StoreError
        It is not a dump, or one of a newer sdkde.
    """
    if not isinstance(given, Mapping) or given.get("format") != _FORMAT:
        raise StoreError(f"{name} is no export of the tuner; pass what `sdkde-autotune export` wrote, or a database")
    if given.get("schema", 0) > len(schema.MIGRATIONS):
        raise StoreError(f"{name} was written by a newer sdkde (schema {given['schema']}); update sdkde")
    row: Any = None
    try:
        trials, calibration, defaults = [], [], {}
        for row in given.get("trial", ()):
            trial = trial_of(
                {**row, **{column: canonical(row[column]) for column in ("config", "phases", "provenance")}}
            )
            if trial.outcome.status not in STATUSES or trial.source not in SOURCES:
                raise ValueError(f"status {trial.outcome.status!r}, source {trial.source!r}")
            if not all(map(isinstance, (*trial.key, trial.created), (*schema.KEY.values(), str))):
                raise ValueError("a column is of another kind")
            if trial.outcome.ms and not all(isinstance(ms, (int, float)) for ms in trial.outcome.ms):
                raise ValueError("times are numbers")
            if not all(isinstance(value, (str, int, float)) for value in trial.config.values()):
                raise ValueError("a configuration has values that are no numbers or names")
            trials.append(row_of_trial(replace(trial, created=_utc(trial.created))))
        for row in given.get("calibration", ()):
            names = {column: str(row[column]) for column in ("machine", "backend", "name")}
            calibration.append({**names, "value": float(row["value"]), "created": _utc(row["created"])})
        for row in given.get("best", ()):
            if row.get("default_config"):
                defaults[key_of(row)] = row["default_config"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{name} has a row that cannot be read ({error!r}): {str(row)[:200]}") from error
    return trials, calibration, defaults
