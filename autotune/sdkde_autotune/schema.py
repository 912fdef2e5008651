"""The database's table, what tells our databases from others, and the query for winners.

``trial`` has a row for each configuration tried. Which trial wins is derived on reading. The schema's version is
SQLite's ``user_version``; the ``application_id`` tells our databases from those of other programs.
"""

from __future__ import annotations

import sqlite3

from .key import FAMILY
from .records import KEY, TIMES

__all__ = ["COLUMNS", "HEADER", "PRIMARY", "VERSION", "Refused", "begun", "create", "text", "winning"]

VERSION = 1

#: What a file of ours begins with, and what it has at byte 68: the application's id, "SDKE".
HEADER = b"SQLite format 3\0", b"SDKE"

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
    """A file is no database of the tuner, or one of another version; the message says why, and what to do."""


def begun(connection: sqlite3.Connection) -> bool:
    """Return whether a database has our table; False if it is empty. The connection must be in a transaction.

    Raises
    ------
    Refused
        Another program wrote it, or another version of sdkde.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    kinds = dict(connection.execute("SELECT name, type FROM sqlite_master").fetchall())
    if not (application or version or kinds):
        return False
    if application != int.from_bytes(HEADER[1]):
        raise Refused("it is another program's SQLite file; name another with --db or SDKDE_DB")
    if version != VERSION:
        raise Refused(
            f"another version of sdkde wrote it (schema {version}, this one reads {VERSION}); "
            "name another file with --db or SDKDE_DB"
        )
    there = {row[1] for row in connection.execute("PRAGMA table_info(trial)")}
    if kinds.get("trial") != "table":  # but a view, which may take for ever to read
        there = set()
    missing = ", ".join(name for name in COLUMNS if name not in there)
    if missing:
        raise Refused(f"its table trial lacks {missing}; name another file with --db or SDKDE_DB")
    return True


def create(connection: sqlite3.Connection) -> None:
    """Make the table in an empty database, in the transaction that the connection is in."""
    connection.execute(f"PRAGMA application_id = {int.from_bytes(HEADER[1])}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    listed = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    connection.execute(f"CREATE TABLE trial ({listed}, PRIMARY KEY ({', '.join(PRIMARY)}))")


def text(stored: bytes) -> str:
    """Return text of a column; what is damaged is no printable text, and spoils its own row only."""
    return stored.decode(errors="surrogateescape")


def winning(where: str) -> str:
    """Return the query for the trials among which a winner is: the fastest of each key, and its default.

    If there are finalists, the fastest is one of them. Ranks are not compared with times. The arguments of the
    condition ``where`` are passed twice.
    """
    least, most = TIMES
    ran = f"""FROM trial WHERE {where} AND status = 'ok'
              AND (source = 'predicted' AND rank > 0 OR q50 BETWEEN {least} AND {most})"""
    # Finalists first, predictions last. A window function, which can order by three columns, takes three times as long.
    order = f"CASE source WHEN 'predicted' THEN {4 * most} + rank ELSE q50 + {2 * most} * (final = 0) END"
    return f"""
        SELECT * FROM trial WHERE rowid IN (
            SELECT id FROM (SELECT rowid AS id, min({order}) {ran} GROUP BY {", ".join(PRIMARY[:-1])})
            UNION ALL SELECT rowid {ran} AND is_default)
    """
