"""The tuner's database. No other module writes it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
from sqlite_utils import Database

from sdkde_core.plugin import warn_once
from sdkde_core.tuning import Config

from . import lookup, records, schema
from .key import Key
from .records import Best, StoreError, Trial
from .runner import SOURCES, STATUSES, Outcome

__all__ = ["Best", "Store", "StoreError", "Trial"]

#: How long to wait for other processes that write or open the database.
BUSY_SECONDS = 30.0

_ANOTHER = "name another file with --db or SDKDE_DB"
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DENIED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR)


class Store:
    """One SQLite database. Several processes may have it open; every write is committed at once.

    A corrupt one is moved aside, with a warning, and a new one is made.

    Parameters
    ----------
    path : path, optional
        Default: :func:`sdkde_autotune.lookup.database`.

    Raises
    ------
    StoreError
        Another program or a newer sdkde wrote the file, it is locked, or it cannot be written. All methods raise so.
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
        """Close the database."""
        self._db.conn.close()

    # --- trials ---------------------------------------------------------------------------------------------------

    def add(self, key: Key, config: Config, outcome: Outcome, source: str, provenance: Mapping[str, Any]) -> None:
        """Store a trial; one with the same key, configuration and source is replaced."""
        if source not in SOURCES or outcome.status not in STATUSES:
            raise ValueError(f"source is {source!r} and status {outcome.status!r}; pass of {SOURCES} and {STATUSES}")
        with self._transaction():
            self._insert(
                "trial", [records.row_of_trial(Trial(key, config, outcome, source, provenance, records.now()))]
            )

    def trials(self, key: Key) -> list[Trial]:
        """Return the trials of a key, by time."""
        return self.all_trials(**key._asdict())

    def all_trials(self, **filters: Any) -> list[Trial]:
        """Return trials, by time.

        Parameters
        ----------
        **filters
            By column (those of the key, ``source``, ``status``) a value, several, or None for any.
        """
        with _explained(self.path):
            return [records.trial_of(row) for row in records.select(self._db, "trial", filters)]

    # --- winners --------------------------------------------------------------------------------------------------

    def settle(self, key: Key, default: Config | None = None) -> None:
        """Derive the winner of a key from its trials; there is none if none ran.

        Of a configuration's trials the measured one counts, else the imported, else the predicted one. The fastest
        configuration that ran wins. A predicted one wins only if no other was measured or imported.

        Parameters
        ----------
        key : Key
        default : mapping, optional
            The default configuration; None: the one that was given before.
        """
        with self._transaction():
            self._settle(key, default)
        lookup.forget()

    def _settle(self, key: Key, default: Config | None) -> None:
        before = next(iter(records.select(self._db, "best", key._asdict())), None)
        if default is None and before is not None and before["default_config"]:
            default = json.loads(before["default_config"])
        first = records.winner(
            [records.trial_of(row) for row in records.select(self._db, "trial", key._asdict())], default
        )
        if first is not None:
            self._insert("best", [records.row_of_best(first)])
        elif before is not None:
            self._db.table("best").delete(tuple(key))

    def best(self, **filters: Any) -> list[Best]:
        """Return winners, by key; filters as in :meth:`all_trials`."""
        with _explained(self.path):
            return [records.best_of(row) for row in records.select(self._db, "best", filters)]

    # --- calibration ----------------------------------------------------------------------------------------------

    def calibrate(self, machine: str, backend: str, values: Mapping[str, float]) -> None:
        """Store a backend's calibration on a machine, by name."""
        now = records.now()
        found = [
            {"machine": machine, "backend": backend, "name": name, "value": float(value), "created": now}
            for name, value in values.items()
        ]
        with self._transaction():
            self._insert("calibration", found)

    def calibration(self, machine: str, backend: str) -> dict[str, float]:
        """Return a backend's calibration on a machine, by name."""
        with _explained(self.path):
            found = records.select(self._db, "calibration", {"machine": machine, "backend": backend})
            return {row["name"]: row["value"] for row in found}

    # --- exchange -------------------------------------------------------------------------------------------------

    def dump(self, **filters: Any) -> dict[str, Any]:
        """Return trials and winners as values for JSON; without filters the calibration too."""
        with _explained(self.path):
            return records.dump(self._db, filters)

    def load(self, dump: Mapping[str, Any] | Path | str) -> int:
        """Add the results in a dump; return how many rows are new.

        The source of trials becomes ``"imported"``, unless they were predicted. Of two for a configuration the later
        one is kept.

        Parameters
        ----------
        dump : mapping or path
            From :meth:`dump`; a JSON file with that; or another database, which is only read.
        """
        given = dump if isinstance(dump, Mapping) else records.read_dump(Path(dump))
        name = "the import" if isinstance(dump, Mapping) else str(dump)
        trials, calibration, defaults = records.checked(given, name)
        with self._transaction():
            here: dict[Any, dict[str, str]] = {}
            for row in records.select(self._db, "trial", {}):
                here.setdefault((records.key_of(row), row["config"]), {})[row["source"]] = row["created"]
            fresh: dict[Any, dict[str, Any]] = {}
            for row in sorted(trials, key=lambda row: row["created"]):
                row["source"] = "predicted" if row["source"] == "predicted" else "imported"
                known = here.get((records.key_of(row), row["config"]), {})
                # Equal times: it was exported from here.
                if row["created"] not in known.values() and row["created"] > known.get(row["source"], ""):
                    fresh[(records.key_of(row), row["config"], row["source"])] = row
            mine = {records.calibrated(row): row["created"] for row in records.select(self._db, "calibration", {})}
            calibration = [row for row in calibration if row["created"] > mine.get(records.calibrated(row), "")]
            self._insert("trial", list(fresh.values()))
            self._insert("calibration", calibration)
            told = {records.key_of(row) for row in records.select(self._db, "best", {}) if row["default_config"]}
            for key in dict.fromkeys(map(records.key_of, trials)):
                self._settle(key, None if key in told else defaults.get(key))
        lookup.forget()
        return len(fresh) + len(calibration)

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all or nothing. The write lock is taken first: SQLite does not wait for it once we have read."""
        connection = self._db.conn
        with _explained(self.path):
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def _insert(self, table: str, found: Sequence[Mapping[str, Any]]) -> None:
        if found:
            self._db.table(table).insert_all(found, replace=True)


# --- opening ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error into a StoreError that says which file, why, and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:  # a bug
        raise
    except (filelock.Timeout, sqlite3.Error, OSError, schema.Refused) as error:
        raise StoreError(_why(path, error)) from error


def _why(path: Path, error: Exception) -> str:
    code = _code(error)
    if isinstance(error, schema.Refused):
        return f"{path} is not used: {error}"
    if isinstance(error, filelock.Timeout) or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is locked by another process; wait for it or end it, or {_ANOTHER}"
    if code in _CORRUPT:
        return f"{path} is corrupt ({error}); run the tuner again, which moves it aside, or {_ANOTHER}"
    if isinstance(error, OSError) or code in _DENIED:
        return f"{path} cannot be written ({getattr(error, 'strerror', None) or error}); make it so, or {_ANOTHER}"
    return f"{path} cannot be used ({error}); {_ANOTHER}"


def _code(error: Exception) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _open(path: Path) -> Database:
    """Open, create or migrate, in one process at a time: others would find the file locked, or half made."""
    with suppress(sqlite3.Error, OSError):
        lookup.read(path, lambda connection: None)  # a file that is not ours is refused, untouched
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock", timeout=BUSY_SECONDS):
        try:
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if _code(error) not in _CORRUPT:
                raise
            aside = _move_aside(path)
            warn_once(f"{path} is corrupt ({error}): it was moved to {aside}, and a new one made")
            return _connect(path)


def _connect(path: Path) -> Database:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS)
    try:
        if schema.begun(connection):
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                error = sqlite3.DatabaseError(found.splitlines()[-1])
                error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise error
        # In WAL mode readers and a writer do not wait for each other. Commits survive the process; for them to survive
        # a crash of the machine would take an fsync per row.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        db = Database(connection)
        schema.migrate(db)
        connection.execute("DELETE FROM calibration WHERE 0")  # fails if the file is read-only; BEGIN would not
        connection.commit()
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
