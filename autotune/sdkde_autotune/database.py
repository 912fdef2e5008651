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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sdkde_core.plugin import cache_folder

from .records import FAMILY, KEY

VERSION = 1

#: The columns with their types, in order.
COLUMNS: dict[str, type] = {
    **KEY,
    **dict.fromkeys(("config", "status", "error"), str),
    **dict.fromkeys(("q20", "q50", "q80"), float),
    **dict.fromkeys(("final", "rank"), int),
    **dict.fromkeys(("source", "provenance", "created"), str),
    "is_default": int,
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


def connect(
    path: Path, wait: float = 0.5, prepare: Callable[[sqlite3.Connection, bool], None] | None = None, mode: str = "ro"
) -> sqlite3.Connection | None:
    """Open a database, and wait so many seconds for a lock.

    Without ``prepare`` it is read: no file is made, and None is returned if there is none, or it is empty. With it the
    file is written, by any number of processes at once; ``prepare(connection, empty)`` is called while the others
    wait. If a tuner was killed within a transaction, the first who opens the file rolls that back.

    Raises Refused if another program wrote the file, or another version of sdkde; OSError if it is in a loop of links,
    below a file or hidden by permissions; sqlite3.Error, also if a column is gone.
    """
    real = Path(os.path.realpath(path))
    try:
        found = real.stat()
    except FileNotFoundError:
        found = None
    if found and not stat.S_ISREG(found.st_mode):
        raise Refused("it is a directory" if stat.S_ISDIR(found.st_mode) else "it is no regular file")
    if prepare is None and not (found and found.st_size):
        return None
    uri = f"{real.as_uri()}?mode={'rwc' if prepare else mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=wait, isolation_level=None)
    try:
        with transaction(connection, "IMMEDIATE" if prepare else "DEFERRED"):
            empty = _is_empty(connection)
            if prepare:
                prepare(connection, empty)
        if prepare or not empty:
            return connection
    except BaseException as error:
        connection.close()
        if mode == "ro" and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
            return connect(path, wait, mode="rw")
        raise
    connection.close()
    return None


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


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether nothing is in a database; if it is not the tuner's, raise what :func:`connect` does."""
    application, version = (connection.execute(f"PRAGMA {x}").fetchone()[0] for x in ("application_id", "user_version"))
    if not (application or version or connection.execute("SELECT 1 FROM sqlite_master").fetchone()):
        return True
    if application != int.from_bytes(b"SDKE"):
        raise Refused("it is another program's SQLite file")
    if version != VERSION:
        raise Refused(f"another version of sdkde wrote it (schema {version}, this one reads {VERSION})")
    connection.execute(f"SELECT {', '.join(COLUMNS)} FROM trial LIMIT 0")
    return False
