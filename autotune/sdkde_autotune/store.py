"""The tuner's database. No other module writes it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from sdkde_core import __version__

from . import lookup
from .lookup import COLUMNS, PRIMARY, VERSION, StoreError, connect, database, transaction
from .records import SOURCES, Best, Key, Trial, canonical, now, row_of, sound, trial_of, winners


class Store(AbstractContextManager["Store"]):
    """One SQLite database, by default the user's. Several processes may have it open; writes are committed at once.

    Nothing is ever moved or deleted. With ``write=False`` no file is made or changed. ``wait`` is in seconds, for other
    processes that write. All methods raise :class:`StoreError`.
    """

    def __init__(self, path: Path | str | None = None, *, write: bool = True, wait: float = 30.0) -> None:
        self.path = Path(path) if path is not None else database()
        with _explained(self.path, "written" if write else "read"):
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = connect(self.path, wait, _prepare if write else None)
        if connection is None:
            raise StoreError(f"nothing is tuned yet: there is nothing in {self.path}; run sdkde-autotune, or pass --db")
        self._db = Database(connection)

    def __exit__(self, *exception: object) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all or nothing, alone: other processes that write wait."""
        with _explained(self.path, "written"), transaction(self._db.conn):
            yield
        lookup.forget()

    def add(self, *trials: Trial) -> int:
        """Store trials, and return how many are new or replace others.

        Of trials with the same key and configuration the measured one stays, before the imported and the predicted one;
        of two that were measured the last one, else the later one.
        """
        names, marks = ", ".join(COLUMNS), ", ".join(f":{name}" for name in COLUMNS)
        changes = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in PRIMARY)
        rank = " ".join(reversed(SOURCES))
        query = f"""
            INSERT INTO trial ({names}) VALUES ({marks}) ON CONFLICT DO UPDATE SET {changes}
            WHERE excluded.source = 'measured' OR (instr('{rank}', excluded.source), excluded.created)
                                                > (instr('{rank}', trial.source), trial.created)"""
        rows = [row_of(t) | {"config": t.name, "provenance": canonical(t.provenance)} for t in trials]
        with self.transaction():
            before = self._db.conn.total_changes
            self._db.conn.executemany(query, rows)
            return int(self._db.conn.total_changes - before)

    def trials(self, key: Key | None = None, **filters: Any) -> list[Trial]:
        """Return trials, by time; filters are by column a value, or a tuple or list of several."""
        wanted = {**(key._asdict() if key else {}), **filters}
        several = {name: each if isinstance(each, tuple | list) else (each,) for name, each in wanted.items()}
        where = " AND ".join(f"[{name}] IN ({', '.join('?' * len(each))})" for name, each in several.items())
        values = [value for each in several.values() for value in each]
        with _explained(self.path, "read"):
            rows = self._db.table("trial").rows_where(where or "1", values, order_by="created, rowid")
            return sound(rows, f"a trial in {self.path}")

    def best(self, *, source: tuple[str, ...] = SOURCES, **filters: Any) -> list[Best]:
        """Return winners of the named sources, by key; filters as in :meth:`trials`."""
        return [best for best in winners(self.trials(**filters)) if best.source in source]

    def dump(self, *, only_winners: bool = False, **filters: Any) -> dict[str, Any]:
        """Return trials as values for JSON, filtered as by :meth:`trials`.

        With ``only_winners`` these are the winner and the default of each key.
        """
        trials: list[Trial] = [] if only_winners else self.trials(**filters)
        for best in self.best(**filters) if only_winners else ():
            trials += [best] if best.default is None or best.default.name == best.name else [best, best.default]
        rows = list(map(row_of, trials))
        return {"format": "sdkde-tuning", "schema": VERSION, "sdkde": __version__, "created": now(), "trial": rows}

    def load(self, path: Path) -> int:
        """Add what a JSON file has that :meth:`dump` gave, or another database; return how many rows are new.

        The source of trials becomes ``"imported"``, unless they were predicted.
        """
        found = _read(path)
        return self.add(*(t if t.source == "predicted" else replace(t, source="imported") for t in found))


def _prepare(connection: sqlite3.Connection, empty: bool) -> None:
    """Make the table in an empty database; raise if another one cannot be written, or is corrupt."""
    if empty:
        connection.execute(f"PRAGMA application_id = {int.from_bytes(b'SDKE')}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        needed = COLUMNS.keys() - {"q20", "q50", "q80", "rank"}
        Database(connection).table("trial").create(COLUMNS, pk=PRIMARY, not_null=needed)
    connection.execute("DELETE FROM trial WHERE 0")  # fails if the file is read-only; BEGIN does not
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        error = sqlite3.DatabaseError(found.splitlines()[-1])
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _read(path: Path) -> list[Trial]:
    """Return the trials in another database, or in an export.

    StoreError if the file is neither, or of another version, or a row of an export is unsound.
    """
    written = "pass what `sdkde-autotune export` wrote, or a database of the tuner"
    try:
        with path.open("rb") as file:
            stored = file.read(16) == b"SQLite format 3\0"
        given = None if stored else json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}; {written}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is neither a database nor JSON ({error}); {written}") from error
    if stored:
        with Store(path, write=False) as other:
            return other.trials()
    if not isinstance(given, Mapping) or given.get("format") != "sdkde-tuning":
        raise StoreError(f"{path} is no export of the tuner; {written}")
    version, rows, found = given.get("schema", VERSION), given.get("trial", []), []
    if version != VERSION:
        other_version = f"schema {version!r:.20}, this one reads {VERSION}"
        raise StoreError(f"{path} was written by another version of sdkde ({other_version})")
    if not isinstance(rows, list):
        raise StoreError(f"{path} has no list of rows as 'trial'; {written}")
    for number, row in enumerate(rows, 1):
        try:
            found.append(trial_of(row))
        except ValueError as error:
            raise StoreError(f"{path}, row {number} of 'trial', is not imported, nor is the rest: {error}") from error
    return found


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turn an error into a StoreError that says which file, why, and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:  # a bug
        raise
    except (sqlite3.Error, OSError, StoreError) as error:
        code = int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
        reasons = {
            sqlite3.SQLITE_BUSY: "is locked by another process; wait for it or end it, or",
            sqlite3.SQLITE_NOTADB: "is no database of the tuner, and is left alone;",
            sqlite3.SQLITE_CORRUPT: f"is corrupt ({error}) and is left as it is; move it away, or",
        }
        denied = sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR
        if isinstance(error, OSError) or code in denied:
            why = f"cannot be {what} ({getattr(error, 'strerror', None) or error}); make it so, or"
        elif isinstance(error, StoreError):
            why = f"is not used: {error};"
        else:
            why = reasons.get(code, f"cannot be used ({error});")
        raise StoreError(f"{path} {why} name another file with --db or SDKDE_DB") from error
