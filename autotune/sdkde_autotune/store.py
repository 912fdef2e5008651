"""The tuner's database. No other module writes it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from sdkde_core import __version__

from .lookup import PRIMARY, VERSION, StoreError, connect, database, forget
from .records import COLUMNS, SOURCES, Best, Key, Trial, canonical, now, row_of, sound, trial_of, winners


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
            self._db = Database(connect(self.path, wait, _prepare if write else None))

    def __exit__(self, *exception: object) -> None:
        self._db.close()

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
        with _explained(self.path, "written"), self._db.conn as connection:  # all or nothing
            connection.execute("BEGIN IMMEDIATE")  # waits for others that write, which SQLite does only here
            before = connection.total_changes
            connection.executemany(query, rows)
        forget()
        return connection.total_changes - before

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
        """Return trials as values for JSON, filtered as by :meth:`trials`; or each key's winner and default."""
        trials: list[Trial] = [] if only_winners else self.trials(**filters)
        for best in self.best(**filters) if only_winners else ():
            trials += [best] if best.default is None or best.default.name == best.name else [best, best.default]
        rows = list(map(row_of, trials))
        return {"format": "sdkde-tuning", "schema": VERSION, "sdkde": __version__, "created": now(), "trial": rows}

    def load(self, path: Path) -> int:
        """Add what a JSON file has that :meth:`dump` gave, or another database; return how many rows are new."""
        return self.add(*(t if t.source == "predicted" else replace(t, source="imported") for t in _read(path)))


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
        raise StoreError(f"it is corrupt ({found.splitlines()[-1]})")


def _read(path: Path) -> list[Trial]:
    """Return the trials in another database, or in an export."""
    remedy = "pass what `sdkde-autotune export` wrote, or a database of the tuner"
    try:
        content = path.read_bytes()
        stored = content.startswith(b"SQLite format 3\0")
        given = None if stored else json.loads(content)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is neither a database nor JSON ({error}); {remedy}") from error
    if stored:
        with Store(path, write=False) as other:
            return other.trials()
    if not isinstance(given, dict) or given.get("format") != "sdkde-tuning":
        raise StoreError(f"{path} is no export of the tuner; {remedy}")
    if (version := given.get("schema", VERSION)) != VERSION:
        other_version = f"schema {version!r:.20}, this one reads {VERSION}"
        raise StoreError(f"{path} was written by another version of sdkde ({other_version})")
    found, rows = list[Trial](), given.get("trial", [])
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
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
    except FileNotFoundError as error:
        why = f"nothing is tuned yet: there is nothing in {path}; run sdkde-autotune, or pass --db"
        raise StoreError(why) from error
    except (sqlite3.Error, OSError, StoreError) as error:
        code = int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
        reasons = {
            sqlite3.SQLITE_BUSY: "is locked by another process; wait for it or end it, or",
            sqlite3.SQLITE_NOTADB: "is no database of the tuner, and is left alone;",
            sqlite3.SQLITE_CORRUPT: f"is not used: it is corrupt ({error}); move it away, or",
        }
        denied = sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR
        if isinstance(error, StoreError):
            why = f"is not used: {error};"
        elif isinstance(error, OSError) or code in denied:
            why = f"cannot be {what} ({getattr(error, 'strerror', None) or error}); make it so, or"
        else:
            why = reasons.get(code, f"cannot be used ({error});")
        raise StoreError(f"{path} {why} name another file with --db or SDKDE_DB") from error
