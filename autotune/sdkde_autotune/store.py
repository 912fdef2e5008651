"""The tuner's database. No other module writes it."""

from __future__ import annotations

import json
import shlex
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from sdkde_core import __version__
from sdkde_core.plugin import warn_once
from sdkde_core.tuning import Config

from . import lookup, salvage, schema
from .key import Key
from .records import SOURCES, Best, Outcome, Trial, now, row_of, trial_of, winners

__all__ = ["Store", "StoreError"]

#: How long to wait for other processes that write or open the database.
BUSY_SECONDS = 30.0

_ANOTHER = "name another file with --db or SDKDE_DB"
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class StoreError(ValueError):
    """A database or an import cannot be used; the message says which, why, and what to do."""


class Store:
    """One SQLite database, by default the user's. Several processes may have it open; writes are committed at once.

    Nothing is ever moved or deleted. With ``write=False`` what is in the database now is copied into memory, and no
    file is made or changed. All methods raise :class:`StoreError`.
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
        self._db.conn.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all or nothing, alone: other processes that write wait."""
        with _explained(self.path, "written"), _writing(self._db.conn):
            yield
        lookup.forget()

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
        """Store a trial in place of one with the same key and configuration, unless that was measured and this not."""
        if source not in SOURCES:
            raise ValueError(f"source is {source!r}; pass one of {', '.join(SOURCES)}")
        row = row_of(Trial(key, config, outcome, source, provenance, now(), is_default))
        with self.transaction():
            known = self._rows({**key._asdict(), "config": row["config"]})
            if all(SOURCES.index(source) <= SOURCES.index(other["source"]) for other in known):
                self._insert([row])

    def trials(self, key: Key | None = None, **filters: Any) -> list[Trial]:
        """Return trials, by time; filters are by column a value, several, or None for any."""
        return self._sound(self._rows({**(key._asdict() if key else {}), **filters}, "created, rowid"))

    def best(self, *, source: Any = None, **filters: Any) -> list[Best]:
        """Return winners, by key; filters as in :meth:`trials`."""
        return [best for best in winners(self._winning(filters)) if source is None or best.source in _several(source)]

    def dump(self, *, only_winners: bool = False, **filters: Any) -> dict[str, Any]:
        """Return trials as values for JSON, filtered as by :meth:`trials`.

        ``only_winners``: of each key the winner and the default only.
        """
        if only_winners:
            wanted = {best.key for best in self.best(**filters)}
            trials = [trial for trial in self._winning({**filters, "source": None}) if trial.key in wanted]
        else:
            trials = self.trials(**filters)
        rows = [{**row_of(t), "config": dict(t.config), "provenance": dict(t.provenance)} for t in trials]
        about = {"format": "sdkde-tuning", "schema": schema.VERSION, "sdkde": __version__, "created": now()}
        return {**about, "trial": rows}

    def load(self, dump: Mapping[str, Any] | Path | str) -> int:
        """Add what :meth:`dump` returned, a JSON file has, or another database; return how many rows are new.

        The source of trials becomes ``"imported"``, unless they were predicted. What was measured here stays; of two
        imports for a configuration the later one is kept. A row whose time is yet to come, as its machine's clock was
        ahead, counts as older than any other. Of a corrupt database the rows that can be read are added, and a warning
        says how many there are.
        """
        given = dump if isinstance(dump, Mapping) else _read(Path(dump))
        rows = _checked(given, "the import" if isinstance(dump, Mapping) else str(dump))
        with self.transaction():
            here = {_primary(row): (SOURCES.index(row["source"]), row["created"]) for row in self._rows({})}
            fresh: dict[Any, dict[str, Any]] = {}
            for row in sorted(rows, key=lambda row: str(row["created"])):
                row["source"] = "predicted" if row["source"] == "predicted" else "imported"
                rank, created = SOURCES.index(row["source"]), row["created"]
                known = here.get(_primary(row), (len(SOURCES), ""))
                if rank < known[0] or (rank == known[0] and created > known[1]):
                    fresh[_primary(row)] = row
                    here[_primary(row)] = rank, created
            self._insert(list(fresh.values()))
        return len(fresh)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _rows(self, filters: Mapping[str, Any], order: str | None = None) -> list[dict[str, Any]]:
        where, values = _where(filters)
        with _explained(self.path, "read"):
            return list(self._db.table("trial").rows_where(where or None, values, order_by=order))

    def _winning(self, filters: Mapping[str, Any]) -> list[Trial]:
        """Return of each key the trials among which the winner is."""
        where, values = _where(filters)
        with _explained(self.path, "read"):
            return self._sound(self._db.query(schema.winning(where or "1"), [*values, *values]))

    def _sound(self, rows: Iterable[Mapping[str, Any]]) -> list[Trial]:
        """Return rows as trials; one that is damaged is told once and passed over."""
        found = []
        for row in rows:
            try:
                found.append(trial_of(row))
            except ValueError as error:
                warn_once(f"a trial in {self.path} is passed over: {error}")
        return found

    def _insert(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._db.table("trial").insert_all(rows, replace=True)


def _where(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the condition that columns have the values in ``filters``, or one of several, and its arguments."""
    wanted = {name: _several(values) for name, values in filters.items() if values is not None}
    for name in filters:
        if name not in schema.COLUMNS:
            raise StoreError(f"{name!r} is no column of trial; there are {', '.join(schema.COLUMNS)}")
    parts = [f"[{name}] IN ({', '.join('?' * len(values))})" for name, values in wanted.items()]
    return " AND ".join(parts), [value for values in wanted.values() for value in values]


def _several(values: Any) -> list[Any]:
    return [values] if isinstance(values, (str, int, float)) else list(values)


def _primary(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in schema.PRIMARY)


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
    found: dict[Any, dict[str, Any]] = {}
    for values in salvage.rows(path):
        if len(values) == len(schema.COLUMNS):
            with suppress(ValueError):
                row = row_of(trial_of(dict(zip(schema.COLUMNS, values))))
                found[_primary(row)] = max(row, found.get(_primary(row), row), key=lambda row: str(row["created"]))
    warn_once(f"{path} cannot be read as a whole ({reason}); {len(found)} rows of it can")
    return {"format": "sdkde-tuning", "schema": schema.VERSION, "trial": list(found.values())}


def _checked(given: Any, name: str) -> list[dict[str, Any]]:
    """Return a dump's trials as rows.

    Raises
    ------
    StoreError
        It is not a dump, or one of another version of sdkde, or a row holds what cannot be.
    """
    if not isinstance(given, Mapping) or given.get("format") != "sdkde-tuning":
        raise StoreError(f"{name} is no export of the tuner; pass what `sdkde-autotune export` wrote, or a database")
    version, rows = given.get("schema", schema.VERSION), given.get("trial", [])
    if version != schema.VERSION:
        raise StoreError(
            f"{name} was written by another version of sdkde (schema {version!r:.20}, this one reads {schema.VERSION})"
        )
    if not isinstance(rows, list):
        raise StoreError(f"{name} has no list of rows as 'trial'; pass what `sdkde-autotune export` wrote")
    found, ahead, latest = [], 0, (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for number, row in enumerate(rows, 1):
        try:
            checked = row_of(trial_of(row))
        except ValueError as error:
            raise StoreError(f"{name}, row {number} of 'trial', is not imported, nor is the rest: {error}") from error
        if checked["created"] > latest:  # it would win over all that comes
            checked["created"], ahead = "1970-01-01T00:00:00.000000+00:00", ahead + 1
        found.append(checked)
    if ahead:
        warn_once(f"{name}: the time of {ahead} rows is yet to come; they count as older than any other")
    return found


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
        salvaged = f"sdkde-autotune import {shlex.quote(str(path))} --db {shlex.quote(f'{path}.new')}"
        return f"{path} is corrupt ({error}) and is left as it is; `{salvaged}` keeps what can be read of it"
    denied = sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR
    if isinstance(error, OSError) or code in denied:
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
    """Make the table if the database is empty."""
    with _writing(connection):
        if not schema.begun(connection):
            schema.create(connection)
        connection.execute("DELETE FROM trial WHERE 0")  # fails if the file is read-only; BEGIN does not


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
