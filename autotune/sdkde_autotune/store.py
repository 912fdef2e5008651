"""The tuner's file: the only place that writes it."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import filelock
from sqlite_utils import Database

import sdkde_core
from sdkde_core.tuning import Config

from . import lookup, schema
from .key import Key
from .measure import SOURCES, STATUSES, Outcome

__all__ = ["Best", "Store", "StoreError", "Trial"]

#: How long to wait for other processes that write or open the file.
BUSY_SECONDS = 30.0

_ANOTHER = "name another file with --db or SDKDE_DB"
_FORMAT = "sdkde-tuning"
_JSON = ("config", "default_config", "phases", "provenance")
_QUANTILES = ("q20", "q50", "q80")
_logger = logging.getLogger("sdkde")


class StoreError(ValueError):
    """The file cannot be used: which, why, and what to do."""


@dataclass(frozen=True)
class Trial:
    """An attempt.

    Parameters
    ----------
    key : Key
    config : mapping
        The configuration tried.
    outcome : Outcome
    source : str
        One of :data:`sdkde_autotune.measure.SOURCES`.
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
        That of the default configuration, if it ran and came about in the same way: both predicted, or neither.
    noise : float
        Distance of the 20 % and 80 % quantiles, relative to the median.
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


class Store:
    """One SQLite file. Several processes may have it open; every write is committed at once.

    A corrupt file is moved aside, with a warning, and a new one begun.

    Parameters
    ----------
    path : path, optional
        Default: :func:`sdkde_autotune.lookup.database`.

    Raises
    ------
    StoreError
        The file is another program's or a newer sdkde's, is locked, or cannot be written. So do all methods.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else lookup.database()
        with _explained(self.path):
            self._db = _open(self.path)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.conn.close()

    # --- trials ---------------------------------------------------------------------------------------------------

    def add(self, key: Key, config: Config, outcome: Outcome, source: str, provenance: Mapping[str, Any]) -> None:
        """Keep an attempt; one of the same configuration and source for the key is replaced."""
        with self._transaction():
            self._insert("trial", [_trial_row(Trial(key, config, outcome, source, provenance, _now()))])

    def trials(self, key: Key) -> list[Trial]:
        """Return what was tried for a key, in order of time."""
        return self.all_trials(**key._asdict())

    def all_trials(self, **filters: Any) -> list[Trial]:
        """Return what was tried, in order of time.

        Parameters
        ----------
        **filters
            A value, or several, by column: the key's, ``source``, ``status``. None: any.
        """
        with _explained(self.path):
            return [_trial(row) for row in _select(self._db, "trial", filters)]

    # --- winners --------------------------------------------------------------------------------------------------

    def settle(self, key: Key, default: Config | None = None) -> None:
        """Derive the winner for a key from its trials; without one that ran there is none.

        What was measured here speaks for a configuration before what was imported, and that before what was predicted;
        of the configurations that ran, the fastest wins, and predicted ones only where none was ever measured.

        Parameters
        ----------
        key : Key
        default : mapping, optional
            The default configuration; without it the one that was given before.
        """
        with self._transaction():
            before = next(iter(_select(self._db, "best", key._asdict())), None)
            if default is None and before is not None and before["default_config"]:
                default = json.loads(before["default_config"])
            winner = _winner([_trial(row) for row in _select(self._db, "trial", key._asdict())], default)
            if winner is not None:
                self._insert("best", [_best_row(winner)])
            elif before is not None:
                self._db.table("best").delete(tuple(key))
        lookup.forget()

    def best(self, **filters: Any) -> list[Best]:
        """Return the winners, by key; filters as of :meth:`all_trials`."""
        with _explained(self.path):
            return [_best(row) for row in _select(self._db, "best", filters)]

    # --- calibration ----------------------------------------------------------------------------------------------

    def calibrate(self, machine: str, backend: str, values: Mapping[str, float]) -> None:
        """Keep what was measured of a machine, by name."""
        now = _now()
        rows = [
            {"machine": machine, "backend": backend, "name": name, "value": float(value), "created": now}
            for name, value in values.items()
        ]
        with self._transaction():
            self._insert("calibration", rows)

    def calibration(self, machine: str, backend: str) -> dict[str, float]:
        """Return what was measured of a machine, by name."""
        with _explained(self.path):
            rows = _select(self._db, "calibration", {"machine": machine, "backend": backend})
            return {row["name"]: row["value"] for row in rows}

    # --- exchange -------------------------------------------------------------------------------------------------

    def dump(self, **filters: Any) -> dict[str, Any]:
        """Return trials and winners as JSON can hold them, and all of the calibration where nothing is filtered."""
        with _explained(self.path):
            return _dump(self._db, filters)

    def load(self, dump: Mapping[str, Any] | Path | str) -> int:
        """Take in what another machine found, or this one long ago; return how many rows are new.

        Trials become ``"imported"`` unless they were predicted. Of two for one configuration the later counts.

        Parameters
        ----------
        dump : mapping or path
            From :meth:`dump`; a JSON file with that; or another database, which is only read.
        """
        given = dump if isinstance(dump, Mapping) else _read(Path(dump))
        name = "what is imported" if isinstance(dump, Mapping) else str(dump)
        trials, calibration, defaults = _checked(given, name)
        with self._transaction():
            here: dict[Any, dict[str, str]] = {}
            for row in _select(self._db, "trial", {}):
                here.setdefault((_key(row), row["config"]), {})[row["source"]] = row["created"]
            fresh: dict[Any, dict[str, Any]] = {}
            for row in sorted(trials, key=lambda row: row["created"]):
                row["source"] = "predicted" if row["source"] == "predicted" else "imported"
                known = here.get((_key(row), row["config"]), {})
                # Equal times: it began its travels here.
                if row["created"] not in known.values() and row["created"] > known.get(row["source"], ""):
                    fresh[(_key(row), row["config"], row["source"])] = row
            mine = {_calibrated(row): row["created"] for row in _select(self._db, "calibration", {})}
            calibration = [row for row in calibration if row["created"] > mine.get(_calibrated(row), "")]
            self._insert("trial", list(fresh.values()))
            self._insert("calibration", calibration)
        known_defaults = {best.key: best.default_config for best in self.best()}
        for key in dict.fromkeys(_key(row) for row in fresh.values()):
            self.settle(key, known_defaults.get(key) or defaults.get(key))
        return len(fresh) + len(calibration)

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing. The write lock is taken at once: SQLite waits for it here, but not once we have read."""
        connection = self._db.conn
        with _explained(self.path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._db.table(table).insert_all(rows, replace=True)


# --- opening ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say which file, why, and what to do."""
    try:
        yield
    except (filelock.Timeout, sqlite3.Error, OSError, schema.Refused) as error:
        raise StoreError(_why(path, error)) from error


def _why(path: Path, error: Exception) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, schema.Refused):
        return f"{path} is not used: {error}"
    if isinstance(error, filelock.Timeout) or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is locked by another process; wait for it or end it, or {_ANOTHER}"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return f"{path} is corrupt ({error}); run the tuner again, which moves it aside, or {_ANOTHER}"
    if code == sqlite3.SQLITE_FULL:
        return f"{path} cannot grow ({error}); make room, or {_ANOTHER}"
    return f"{path} cannot be written ({getattr(error, 'strerror', None) or error}); make it writable, or {_ANOTHER}"


def _open(path: Path) -> Database:
    """Open, create or migrate: one process at a time, or they would find the file locked, or half made."""
    if path.is_dir():
        raise schema.Refused(f"it is a directory; {_ANOTHER}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock", timeout=BUSY_SECONDS):
        try:
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            aside = _move_aside(path)
            _logger.warning("%s is corrupt (%s): moved to %s, and a new one begun", path, error, aside)
            return _connect(path)


def _connect(path: Path) -> Database:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS)
    try:
        if schema.begun(connection):
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                error = sqlite3.DatabaseError(found.partition("\n")[0])
                error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise error
        # In WAL mode readers and a writer do not wait for each other, and what is committed outlives the process; to
        # outlive the machine it would take an fsync a row.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        db = Database(connection)
        schema.migrate(db)
        return db
    except BaseException:
        connection.close()
        raise


def _move_aside(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    aside = real.with_name(f"{real.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
    for suffix in ("-wal", "-shm", ""):
        part = Path(f"{real}{suffix}")
        if part.exists():
            part.rename(f"{aside}{suffix}")
    return aside


# --- rows -------------------------------------------------------------------------------------------------------------


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _select(db: Database, table: str, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
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


def _key(row: Mapping[str, Any]) -> Key:
    return Key._make(row[name] for name in Key._fields)


def _calibrated(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["machine"], row["backend"], row["name"]


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True)


def _trial_row(trial: Trial) -> dict[str, Any]:
    outcome = trial.outcome
    return {
        **trial.key._asdict(),
        "config": _text(trial.config),
        "status": outcome.status,
        "error": outcome.error,
        **dict(zip(_QUANTILES, outcome.ms or (None, None, None))),
        "phases": _text(outcome.phases),
        "source": trial.source,
        "provenance": _text(trial.provenance),
        "created": trial.created,
    }


def _trial(row: Mapping[str, Any]) -> Trial:
    ms = cast(tuple[float, float, float], tuple(row[name] for name in _QUANTILES))
    outcome = Outcome(row["status"], None if None in ms else ms, row["error"], json.loads(row["phases"]))
    provenance = json.loads(row["provenance"])
    return Trial(_key(row), json.loads(row["config"]), outcome, row["source"], provenance, row["created"])


def _best_row(best: Best) -> dict[str, Any]:
    return {
        **best.key._asdict(),
        "config": _text(best.config),
        "ms": best.ms,
        "default_config": None if best.default_config is None else _text(best.default_config),
        "default_ms": best.default_ms,
        "noise": best.noise,
        "source": best.source,
        "provenance": _text(best.provenance),
        "created": best.created,
    }


def _best(row: Mapping[str, Any]) -> Best:
    values = {name: row[name] for name in ("ms", "default_ms", "noise", "source", "created")}
    default = row["default_config"]
    return Best(
        key=_key(row),
        config=json.loads(row["config"]),
        provenance=json.loads(row["provenance"]),
        default_config=json.loads(default) if default else None,
        **values,
    )


def _winner(trials: Iterable[Trial], default: Config | None) -> Best | None:
    trusted: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: _TRUST.index(trial.source)):
        trusted.setdefault(_text(trial.config), trial)
    ran = [trial for trial in trusted.values() if trial.outcome.status == "ok" and trial.outcome.ms]
    ran = [trial for trial in ran if trial.source != "predicted"] or ran
    if not ran:
        return None
    # Finalists were timed side by side: a lucky time of another does not beat them.
    final = [trial for trial in ran if "finals" in trial.outcome.phases] or ran
    winner = min(final, key=lambda trial: (trial.outcome.median, _text(trial.config)))
    of_default = [trial.outcome.median for trial in ran if default is not None and trial.config == dict(default)]
    low, median, high = winner.outcome.ms or (math.nan,) * 3
    return Best(
        key=winner.key,
        config=winner.config,
        ms=median,
        default_ms=of_default[0] if of_default else None,
        noise=(high - low) / median if median else 0.0,
        source=winner.source,
        provenance=winner.provenance,
        created=winner.created,
        default_config=default,
    )


#: Who speaks for a configuration.
_TRUST = ("measured", "imported", "predicted")


# --- exchange ---------------------------------------------------------------------------------------------------------


def _dump(db: Database, filters: Mapping[str, Any]) -> dict[str, Any]:
    def rows(table: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {name: json.loads(value) if name in _JSON and value else value for name, value in row.items()}
            for row in _select(db, table, wanted)
        ]

    filtered = any(wanted is not None for wanted in filters.values())
    of_best = {name: wanted for name, wanted in filters.items() if name != "status"}
    return {
        "format": _FORMAT,
        "schema": len(schema.MIGRATIONS),
        "sdkde": sdkde_core.__version__,
        "created": _now(),
        "trial": rows("trial", filters),
        "best": rows("best", of_best),
        "calibration": [] if filtered else rows("calibration", {}),
    }


def _read(path: Path) -> Mapping[str, Any]:
    """A dump from a JSON file, or of another database."""
    try:
        with path.open("rb") as file:
            database = file.read(16) == b"SQLite format 3\0"
        if not database:
            return cast(Mapping[str, Any], json.loads(path.read_text(encoding="utf-8")))
        found = lookup.read(path, _dump_of)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # also schema.Refused
        raise StoreError(f"{path} cannot be imported: {error}") from error
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    return found or {"format": _FORMAT, "schema": 0}


def _dump_of(connection: sqlite3.Connection) -> dict[str, Any]:
    """Dump a database of this schema or an older one, which is migrated in memory."""
    with _closing_memory() as memory:
        connection.backup(memory)
        db = Database(memory)
        schema.migrate(db)
        return _dump(db, {})


@contextmanager
def _closing_memory() -> Iterator[sqlite3.Connection]:
    memory = sqlite3.connect(":memory:")
    try:
        yield memory
    finally:
        memory.close()


_Checked = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[Key, Config]]


def _checked(given: Any, name: str) -> _Checked:
    """Rows for the tables, and default configurations by key.

    Raises
    ------
    StoreError
        It is not what :meth:`Store.dump` returns, or of a newer sdkde.
    """
    if not isinstance(given, Mapping) or given.get("format") != _FORMAT:
        raise StoreError(f"{name} is no export of the tuner; pass what `sdkde-autotune export` wrote, or a database")
    if given.get("schema", 0) > len(schema.MIGRATIONS):
        raise StoreError(f"{name} is of a newer sdkde (schema {given['schema']}); update sdkde")
    row: Any = None
    try:
        trials, calibration, defaults = [], [], {}
        for row in given.get("trial", ()):
            trial = _trial({**row, **{column: _text(row[column]) for column in ("config", "phases", "provenance")}})
            if trial.outcome.status not in STATUSES or trial.source not in SOURCES:
                raise ValueError(f"status {trial.outcome.status!r}, source {trial.source!r}")
            if not all(map(isinstance, (*trial.key, trial.created), (*schema.KEY.values(), str))):
                raise ValueError("a column is of another kind")
            if trial.outcome.ms and not all(isinstance(ms, (int, float)) for ms in trial.outcome.ms):
                raise ValueError("times are numbers")
            trials.append(_trial_row(trial))
        for row in given.get("calibration", ()):
            names = ("machine", "backend", "name", "created")
            calibration.append({**{column: str(row[column]) for column in names}, "value": float(row["value"])})
        for row in given.get("best", ()):
            if row.get("default_config"):
                defaults[_key(row)] = row["default_config"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{name} has a row that cannot be read ({error!r}): {str(row)[:200]}") from error
    return trials, calibration, defaults
