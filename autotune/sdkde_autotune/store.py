"""The tuner's database. No other module writes it."""

from __future__ import annotations

import json
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from sdkde_core import __version__
from sdkde_core.choice.calibration import implausible
from sdkde_core.plugin import warn_once
from sdkde_core.tuning import Config

from . import lookup, salvage, schema
from .key import Key
from .records import KEY, Best, StoreError, Trial, now, row_of, trial_of, utc, values_of, winners
from .runner import SOURCES, STATUSES, Outcome

__all__ = ["Best", "Store", "StoreError", "Trial"]

#: How long to wait for other processes that write or open the database.
BUSY_SECONDS = 30.0

#: The time of a row whose clock was ahead: older than any other.
UNKNOWN = "1970-01-01T00:00:00.000000+00:00"

_FORMAT = "sdkde-tuning"
_ANOTHER = "name another file with --db or SDKDE_DB"
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DENIED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR)


class Store:
    """One SQLite database. Several processes may have it open; every write is committed at once.

    Nothing is ever moved or deleted: a corrupt one is an error, which names the command that reads what is left.

    Parameters
    ----------
    path : path, optional
        Default: :func:`sdkde_autotune.lookup.database`.
    write : bool
        False: what is in the database now is copied into memory, and no file is made, moved or changed.

    Raises
    ------
    StoreError
        It is no database of the tuner, another version of sdkde wrote it, it is corrupt or locked, or it cannot be read
        or written. All methods raise so.
    """

    def __init__(self, path: Path | str | None = None, *, write: bool = True) -> None:
        self.path = Path(path) if path is not None else lookup.database()
        with _explained(self.path, "written" if write else "read"):
            connection = _open(self.path) if write else _copy(self.path)
        connection.text_factory = schema.text
        self._db = Database(connection)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._db.conn.close()

    # --- trials and winners ---------------------------------------------------------------------------------------

    def add(
        self,
        key: Key,
        config: Config,
        outcome: Outcome,
        source: str,
        provenance: Mapping[str, Any],
        *,
        is_default: bool = False,
    ) -> None:
        """Store a trial; one with the same key, configuration and source is replaced."""
        if source not in SOURCES or outcome.status not in STATUSES:
            raise ValueError(f"source is {source!r} and status {outcome.status!r}; pass of {SOURCES} and {STATUSES}")
        row = row_of(Trial(key, config, outcome, source, provenance, now(), is_default))
        with self._transaction():
            self._insert("trial", [row])

    def trials(self, key: Key) -> list[Trial]:
        """Return the trials of a key, by time."""
        return self.all_trials(**key._asdict())

    def all_trials(self, **filters: Any) -> list[Trial]:
        """Return trials, by time; filters are by column a value, several, or None for any."""
        return self._sound(self._rows("trial", filters, "created, rowid"))

    def best(self, *, source: Any = None, **filters: Any) -> list[Best]:
        """Return winners, by key; filters as in :meth:`all_trials`."""
        found = winners(self._winning(filters))
        return [best for best in found if source is None or best.source in _several(source)]

    # --- calibration ----------------------------------------------------------------------------------------------

    def calibrate(self, machine: str, backend: str, values: Mapping[str, float]) -> None:
        """Store a backend's calibration on a machine, by name."""
        place = {"machine": machine, "backend": backend, "created": now()}
        with self._transaction():
            self._insert("calibration", [{**place, "name": name, "value": float(values[name])} for name in values])

    # --- exchange -------------------------------------------------------------------------------------------------

    def dump(self, *, only_winners: bool = False, **filters: Any) -> dict[str, Any]:
        """Return trials as values for JSON, filtered as by :meth:`all_trials`; without filters the calibration too.

        ``only_winners``: of each key the winner and the default only, and no calibration.
        """
        if only_winners:
            wanted = {best.key for best in self.best(**filters)}
            trials = [trial for trial in self._winning({**filters, "source": None}) if trial.key in wanted]
        else:
            trials = self.all_trials(**filters)
        whole = not only_winners and all(wanted is None for wanted in filters.values())
        calibration = self._rows("calibration", {}) if whole else []
        return {
            "format": _FORMAT,
            "schema": schema.VERSION,
            "sdkde": __version__,
            "created": now(),
            "trial": list(map(values_of, trials)),
            "calibration": [row for row in calibration if not implausible(row["name"], row["value"])],
        }

    def load(self, dump: Mapping[str, Any] | Path | str) -> int:
        """Add what :meth:`dump` returned, a JSON file has, or another database; return how many rows are new.

        The source of trials becomes ``"imported"``, unless they were predicted. Of two for a configuration the later
        one is kept. A row whose time is yet to come, as its machine's clock was ahead, counts as older than any other.
        Of a corrupt database the rows that can be read are added, and a warning says how many there are.
        """
        given = dump if isinstance(dump, Mapping) else _read(Path(dump))
        trials, calibration = _checked(given, "the import" if isinstance(dump, Mapping) else str(dump))
        with self._transaction():
            here: dict[Any, dict[str, str]] = {}
            for row in self._rows("trial", {}):
                known = here.setdefault(_named(row, *KEY, "config"), {})
                known[row["source"]] = row["created"] if row["created"] <= _latest() else ""
            fresh: dict[Any, dict[str, Any]] = {}
            for row in sorted(trials, key=lambda row: row["created"]):
                row["source"] = "predicted" if row["source"] == "predicted" else "imported"
                known = here.get(_named(row, *KEY, "config"), {})
                # Equal times: it was exported from here.
                if row["created"] not in known.values() and row["created"] > known.get(row["source"], ""):
                    fresh[_named(row, *KEY, "config", "source")] = row
            mine = {_named(row, *schema.CALIBRATION): row["created"] for row in self._rows("calibration", {})}
            later = [row for row in calibration if row["created"] > mine.get(_named(row, *schema.CALIBRATION), "")]
            self._insert("trial", list(fresh.values()))
            self._insert("calibration", later)
        return len(fresh) + len(later)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _rows(self, table: str, filters: Mapping[str, Any], order: str | None = None) -> list[dict[str, Any]]:
        where, values = self._where(table, filters)
        with _explained(self.path, "read"):
            return list(self._db.table(table).rows_where(where or None, values, order_by=order))

    def _winning(self, filters: Mapping[str, Any]) -> list[Trial]:
        """Return of each key the trials among which the winner is."""
        where, values = self._where("trial", filters)
        with _explained(self.path, "read"):
            return self._sound(self._db.query(schema.winning(where or "1"), [*values, *values]))

    def _where(self, table: str, filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Return the condition that columns have the values in ``filters``, or one of several, and its arguments."""
        columns = list(self._db.table(table).columns_dict)
        wanted = {name: _several(values) for name, values in filters.items() if values is not None}
        for name in filters:
            if name not in columns:
                raise StoreError(f"{name!r} is no column of {table}; there are {', '.join(columns)}")
        parts = [f"[{name}] IN ({', '.join('?' * len(values))})" for name, values in wanted.items()]
        return " AND ".join(parts), [value for values in wanted.values() for value in values]

    def _sound(self, rows: Iterable[Mapping[str, Any]]) -> list[Trial]:
        """Return rows as trials; one that is damaged is told once and passed over."""
        found = []
        for row in rows:
            try:
                found.append(trial_of(row))
            except ValueError as error:
                warn_once(f"a trial in {self.path} is passed over: {error}")
        return found

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all or nothing. The write lock is taken first: SQLite does not wait for it once we have read."""
        with _explained(self.path, "written"), _writing(self._db.conn):
            yield
        lookup.forget()

    def _insert(self, table: str, found: list[dict[str, Any]]) -> None:
        if found:
            self._db.table(table).insert_all(found, replace=True)


def _latest() -> str:
    """Return the latest time that a clock may have shown: a later one would win over all that comes."""
    return (datetime.now(UTC) + timedelta(days=1)).isoformat()


def _several(values: Any) -> list[Any]:
    return [values] if isinstance(values, (str, int, float)) else list(values)


def _named(row: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


# --- imports ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Any:
    """Return the dump in a JSON file, or the dump of another database."""
    try:
        path.stat()
        with Store(path, write=False) as other:
            return other.dump()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    except StoreError as error:
        if _ours(path) and _code(error.__cause__) in _CORRUPT:
            return _salvaged(path, error.__cause__)
        if _code(error.__cause__) != sqlite3.SQLITE_NOTADB:
            raise
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} is neither a database nor JSON ({error})") from error


def _salvaged(path: Path, reason: object) -> dict[str, Any]:
    """Return the dump of the rows that can be read in a damaged database, and say how many these are."""
    found: dict[str, dict[Any, dict[str, Any]]] = {table: {} for table in schema.TABLES}
    for values in salvage.rows(path):
        for table, (columns, primary) in schema.TABLES.items():
            if len(values) == len(columns):
                with suppress(ValueError):
                    row = _CHECKS[table](dict(zip(columns, values)))
                    other = found[table].setdefault(_named(row, *primary), row)
                    found[table][_named(row, *primary)] = max(row, other, key=lambda row: row["created"])
    counts = ", ".join(f"{table}: {len(rows)} rows" for table, rows in found.items())
    warn_once(f"{path} cannot be read as a whole ({reason}); read of it: {counts}")
    return {"format": _FORMAT, "schema": schema.VERSION, **{table: [*rows.values()] for table, rows in found.items()}}


def _checked(given: Any, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a dump's trials and calibration as rows.

    Raises
    ------
    StoreError
        It is not a dump, or one of another version of sdkde, or a row holds what cannot be.
    """
    if not isinstance(given, Mapping) or given.get("format") != _FORMAT:
        raise StoreError(f"{name} is no export of the tuner; pass what `sdkde-autotune export` wrote, or a database")
    version = given.get("schema", schema.VERSION)
    if version != schema.VERSION:
        raise StoreError(
            f"{name} was written by another version of sdkde (schema {version!r:.20}, this one reads {schema.VERSION})"
        )
    found: dict[str, list[dict[str, Any]]] = {}
    ahead = 0
    for table, check in _CHECKS.items():
        rows, found[table] = given.get(table, []), []
        if not isinstance(rows, list):
            raise StoreError(f"{name} has no list of rows as {table!r}; pass what `sdkde-autotune export` wrote")
        for number, row in enumerate(rows, 1):
            try:
                checked = check(row)
            except ValueError as error:
                raise StoreError(
                    f"{name}, row {number} of {table!r}, is not imported, nor is the rest: {error}"
                ) from error
            if checked["created"] > _latest():
                checked["created"] = UNKNOWN
                ahead += 1
            found[table].append(checked)
    if ahead:
        warn_once(f"{name}: the time of {ahead} rows is yet to come; they count as older than any other")
    return found["trial"], found["calibration"]


def _calibration(row: Any) -> dict[str, Any]:
    names = (*schema.CALIBRATION, "value", "created")
    if not isinstance(row, Mapping) or not all(name in row for name in names):
        raise ValueError(f"a row has {', '.join(names)}")
    if not all(isinstance(row[name], str) and row[name].isprintable() for name in schema.CALIBRATION):
        raise ValueError(f"{', '.join(schema.CALIBRATION)} are names")
    if reason := implausible(row["name"], row["value"]):
        raise ValueError(f"{row['name']!r} of {row['backend']}: {reason}")
    return {**{name: row[name] for name in names}, "value": float(row["value"]), "created": utc(row["created"])}


#: What makes a row of each table from values of an import; ValueError for what cannot be.
_CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "trial": lambda row: row_of(trial_of(row)),
    "calibration": _calibration,
}


# --- opening ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turn an error into a StoreError that says which file, why, and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:  # a bug
        raise
    except (sqlite3.Error, OSError, schema.Refused) as error:
        raise StoreError(_why(path, error, what)) from error


def _why(path: Path, error: Exception, what: str) -> str:
    code = _code(error)
    if isinstance(error, schema.Refused):
        return f"{path} is not used: {error}"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is locked by another process; wait for it or end it, or {_ANOTHER}"
    if code in _CORRUPT and not _ours(path):
        return f"{path} is no database of the tuner, and is left alone; {_ANOTHER}"
    if code in _CORRUPT:
        new = shlex.quote(f"{path}.new")
        salvage = f"sdkde-autotune import {shlex.quote(str(path))} --db {new}"
        return f"{path} is corrupt ({error}) and is left as it is; `{salvage}` keeps what can be read of it"
    if isinstance(error, OSError) or code in _DENIED:
        return f"{path} cannot be {what} ({getattr(error, 'strerror', None) or error}); make it so, or {_ANOTHER}"
    return f"{path} cannot be used ({error}); {_ANOTHER}"


def _code(error: BaseException | None) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _ours(path: Path) -> bool:
    """Whether a file begins as the tuner's do."""
    with suppress(OSError), path.open("rb") as file:
        header = file.read(72)
        return (header[:16], header[68:]) == schema.HEADER
    return False


def _copy(path: Path) -> sqlite3.Connection:
    """Copy a database into memory; an empty one if it is not there."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    lookup.read(path, lambda connection: connection.backup(memory))
    _begin(memory)
    return memory


def _open(path: Path) -> sqlite3.Connection:
    """Open or create a database for writing; any number of processes may at once."""
    with suppress(sqlite3.OperationalError):  # such as a lock, for which the connection below waits
        lookup.read(path, lambda connection: None)  # not even a -wal is put beside a file that is not ours
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        _in_wal_mode(connection)
        _begin(connection)
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            error = sqlite3.DatabaseError(found.splitlines()[-1])
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
    except BaseException:
        connection.close()
        raise
    return connection


def _in_wal_mode(connection: sqlite3.Connection) -> None:
    """Let readers and a writer not wait for each other.

    SQLite waits for other processes that read or write, but not for those that change the mode, as all do that begin a
    new file at once. The change writes one page, which needs no -journal on disk; left by a process that was killed,
    that would keep readers out.
    """
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = MEMORY")
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.005)
    # Commits survive the process; for them to survive a crash of the machine would take an fsync per row.
    connection.execute("PRAGMA synchronous = NORMAL")


def _begin(connection: sqlite3.Connection) -> None:
    """Make the tables if the database is empty."""
    with _writing(connection):
        if not schema.begun(connection):
            schema.create(connection)
        connection.execute("DELETE FROM calibration WHERE 0")  # fails if the file is read-only; BEGIN does not


@contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit all or nothing. The write lock is taken first: SQLite does not wait for it once we have read."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise
