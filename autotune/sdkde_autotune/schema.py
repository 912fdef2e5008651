"""The database's tables, what tells our databases from others, and the query for winners.

``trial`` has a row for each configuration tried, and ``calibration`` the corrections measured on a machine. Which trial
wins is derived on reading. The schema's version is SQLite's ``user_version``; the ``application_id`` tells our
databases from those of other programs.
"""

from __future__ import annotations

import sqlite3

from .key import FAMILY, Key
from .records import KEY, TIMES
from .runner import FINALS

__all__ = [
    "APPLICATION_ID",
    "CALIBRATION",
    "HEADER",
    "TABLES",
    "VERSION",
    "Refused",
    "begun",
    "create",
    "text",
    "winning",
]

#: "SDKE".
APPLICATION_ID = 0x53444B45

#: What a file of ours begins with, and has at byte 68.
HEADER = b"SQLite format 3\0", APPLICATION_ID.to_bytes(4, "big")

VERSION = 1

#: Primary keys. Trials are in the order in which a look-up searches them: what must agree, then what may be near.
CALIBRATION = ("machine", "backend", "name")
_NEAR = ("architecture", "n_octave", "m_octave", "dimension")
TRIAL = (*FAMILY, *_NEAR, *(name for name in KEY if name not in (*FAMILY, *_NEAR)), "config", "source")

_TEXT, _REAL = "TEXT NOT NULL", "REAL"

#: The columns of each table with their types, in order, and its primary key.
TABLES = {
    "trial": (
        {
            **{name: "INTEGER NOT NULL" if kind is int else _TEXT for name, kind in KEY.items()},
            **dict.fromkeys(("config", "status", "error"), _TEXT),
            **dict.fromkeys(("q20", "q50", "q80"), _REAL),
            **dict.fromkeys(("phases", "source", "provenance", "created"), _TEXT),
            "is_default": "INTEGER NOT NULL",
        },
        TRIAL,
    ),
    "calibration": ({**dict.fromkeys(CALIBRATION, _TEXT), "value": "REAL NOT NULL", "created": _TEXT}, CALIBRATION),
}


class Refused(ValueError):
    """A file is no database of the tuner, or one of another version; the message says why, and what to do."""


def begun(connection: sqlite3.Connection) -> bool:
    """Return whether a database has our tables; False if it is empty. The connection must be in a transaction.

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
    if application != APPLICATION_ID:
        raise Refused("it is another program's SQLite file; name another with --db or SDKDE_DB")
    if version != VERSION:
        raise Refused(
            f"another version of sdkde wrote it (schema {version}, this one reads {VERSION}); "
            "name another file with --db or SDKDE_DB"
        )
    for table, (columns, _) in TABLES.items():
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if kinds.get(table) != "table":  # but a view, which may take for ever to read
            there = set()
        missing = ", ".join(name for name in columns if name not in there)
        if missing:
            raise Refused(f"its table {table} lacks {missing}; name another file with --db or SDKDE_DB")
    return True


def create(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty database, in the transaction that the connection is in."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    for table, (columns, primary) in TABLES.items():
        listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        connection.execute(f"CREATE TABLE {table} ({listed}, PRIMARY KEY ({', '.join(primary)}))")


def text(stored: bytes) -> str:
    """Return text of a column; what is damaged is no printable text, and spoils its own row only."""
    return stored.decode(errors="surrogateescape")


def winning(where: str) -> str:
    """Return the query for the trials among which a winner is: the fastest of each key, and its default.

    Of a configuration's trials the measured one counts, else the imported, else the predicted one. If there are
    finalists, the fastest is one of them. Predicted times are not compared with others. The arguments of the condition
    ``where`` are passed twice.
    """
    alike = " AND ".join(f"o.{name} = t.{name}" for name in (*Key._fields, "config"))
    least, most = TIMES
    ran = f"""FROM trial AS t
            WHERE {where} AND status = 'ok' AND q50 BETWEEN {least} AND {most} AND (
                source = 'measured' OR NOT EXISTS (SELECT 1 FROM trial AS o WHERE {alike} AND (
                    o.source = 'measured' OR t.source = 'predicted' AND o.source = 'imported')))"""
    # Finalists first, predictions last. A window function, which can order by three columns, takes three times as long.
    order = f"""q50 + {2 * most} * (phases NOT LIKE '%"{FINALS}"%') + {4 * most} * (source = 'predicted')"""
    return f"""
        SELECT * FROM trial WHERE rowid IN (
            SELECT id FROM (SELECT rowid AS id, min({order}) {ran} GROUP BY {", ".join(TRIAL[:-2])})
            UNION ALL SELECT rowid {ran} AND is_default)
    """
