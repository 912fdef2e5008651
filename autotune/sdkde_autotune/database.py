"""The tuner's SQLite file: its path, its table, and how it is opened. Imports the standard library only.

``trial`` has a row for each configuration tried. Which trial wins is derived on reading. The schema's version is
SQLite's ``user_version``; the ``application_id`` tells our files from those of other programs.

The file has SQLite's rollback journal, not a write-ahead log. So readers make no files beside it, a file without write
permission can be read, and the users' homes may be on a network file system, where a write-ahead log does not work.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdkde_core.plugin import cache_folder

from .records import FAMILY, KEY

__all__ = ["COLUMNS", "PRIMARY", "VERSION", "Refused", "begun", "connect", "database", "open_file"]
__all__ += ["transaction"]

VERSION = 1

#: The columns with their types, in order.
COLUMNS = {
    **{name: "INTEGER NOT NULL" if kind is int else "TEXT NOT NULL" for name, kind in KEY.items()},
    **dict.fromkeys(("config", "status", "error"), "TEXT NOT NULL"),
    **dict.fromkeys(("q20", "q50", "q80"), "REAL"),
    "final": "INTEGER NOT NULL",
    "rank": "INTEGER",
    **dict.fromkeys(("source", "provenance", "created"), "TEXT NOT NULL"),
    "is_default": "INTEGER NOT NULL",
}

#: The primary key, in the order in which a look-up searches: what must agree, then what may be near.
PRIMARY = tuple(dict.fromkeys((*FAMILY, "architecture", "n_octave", "m_octave", "dimension", *KEY, "config")))


class Refused(ValueError):
    """A file is no database of the tuner, or one of another version; the message says why."""


def database() -> Path:
    """Return the path of the tuner's database: ``SDKDE_DB``, else ``tuning.sqlite`` in the user's cache folder.

    ValueError if ``SDKDE_DB`` is below a home that is not there; FileNotFoundError if the user has none.
    """
    named = os.environ.get("SDKDE_DB")
    if not named:
        return cache_folder() / "tuning.sqlite"
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ValueError(f"SDKDE_DB is {named!r}: {error} Set the path of a file") from error


def filled(path: Path) -> bool:
    """Return whether there is a file, and it is not empty.

    Refused if it is no regular file; OSError if it is in a loop of links, below a file or hidden by permissions.
    """
    try:
        found = os.stat(os.path.realpath(path))
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise Refused("it is a directory" if stat.S_ISDIR(found.st_mode) else "it is no regular file")
    return found.st_size > 0


def connect(path: Path, wait: float = 0.5, mode: str = "ro") -> sqlite3.Connection | None:
    """Open a database, and wait so many seconds for a lock.

    With the mode ``"ro"`` it is read: no file is made, and None is returned if there is none, or it is empty. With
    ``"rwc"`` it is written, and made if there is none; any number of processes may do so at once. If a tuner was killed
    within a transaction, the first who opens the file rolls that back. Raises what :func:`filled` and :func:`begun` do,
    and sqlite3.Error.
    """
    make = mode == "rwc"
    if not filled(path) and not make:
        return None
    connection = open_file(path, mode, wait)
    try:
        with transaction(connection, "IMMEDIATE" if make else "DEFERRED"):
            if begun(connection, make):
                if make:
                    _check(connection)
                return connection
    except BaseException as error:
        connection.close()
        if mode == "ro" and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
            return connect(path, wait, "rw")
        raise
    connection.close()
    return None


def _check(connection: sqlite3.Connection) -> None:
    """Raise if a database cannot be written, or is corrupt."""
    connection.execute("DELETE FROM trial WHERE 0")  # fails if the file is read-only; BEGIN does not
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        error = sqlite3.DatabaseError(found.splitlines()[-1])
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def open_file(path: Path, mode: str, wait: float) -> sqlite3.Connection:
    """Open an SQLite file in a mode of SQLite's URIs."""
    uri = f"{Path(os.path.realpath(path)).as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=wait, isolation_level=None)
    # Text that is damaged is not printable then, which spoils its own row only.
    connection.text_factory = lambda stored: stored.decode(errors="surrogateescape")
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit all or nothing. An immediate one takes the write lock first: SQLite waits for it only then."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def begun(connection: sqlite3.Connection, make: bool = False) -> bool:
    """Return whether a database has our table; if it is empty, ``make`` it, or return False.

    Refused if another program wrote it, or another version of sdkde. The connection must be in a transaction.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if not (application or version or connection.execute("SELECT 1 FROM sqlite_master").fetchone()):
        if make:
            connection.execute(f"PRAGMA application_id = {int.from_bytes(b'SDKE')}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            listed = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
            connection.execute(f"CREATE TABLE trial ({listed}, PRIMARY KEY ({', '.join(PRIMARY)}))")
        return make
    if application != int.from_bytes(b"SDKE"):
        raise Refused("it is another program's SQLite file")
    if version != VERSION:
        raise Refused(f"another version of sdkde wrote it (schema {version}, this one reads {VERSION})")
    connection.execute(f"SELECT {', '.join(COLUMNS)} FROM trial LIMIT 0")  # fails if a column is gone
    return True
