"""The database's tables, and its migration from older versions.

``trial`` has a row for each configuration tried, ``best`` the winner of each key, derived from ``trial``, and
``calibration`` the corrections measured on a machine. The schema's version is SQLite's ``user_version``; the
``application_id`` tells our databases from those of other programs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, get_type_hints

from .key import Key

if TYPE_CHECKING:
    from sqlite_utils import Database

__all__ = ["APPLICATION_ID", "KEY", "MIGRATIONS", "TABLES", "Refused", "begun", "migrate"]

#: "SDKE".
APPLICATION_ID = 0x53444B45

TABLES = ("trial", "best", "calibration")

#: The key's columns and their kinds.
KEY: dict[str, type] = {name: kind for name, kind in get_type_hints(Key).items() if name in Key._fields}


class Refused(ValueError):
    """A file is no database of the tuner, or one of a newer sdkde; the message says why, and what to do."""


def begun(connection: sqlite3.Connection) -> bool:
    """Whether a database has our tables; False if it is empty.

    Raises
    ------
    Refused
        Another program wrote it, or a newer sdkde.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not (application or version or tables):
        return False
    if application != APPLICATION_ID:
        raise Refused("it is another program's SQLite file; name another with --db or SDKDE_DB")
    if version > len(MIGRATIONS):
        raise Refused(
            f"a newer sdkde wrote it (schema {version}, this one knows {len(MIGRATIONS)}); "
            "update sdkde, or name another file with --db or SDKDE_DB"
        )
    missing = [name for name in TABLES if name not in tables]
    if version == len(MIGRATIONS) and missing:
        raise Refused(f"it lacks {', '.join(missing)}; move it away, or name another file with --db or SDKDE_DB")
    return True


def migrate(db: Database) -> None:
    """Bring a database to this version, each step in a transaction.

    sqlite-utils before 4 commits after every table, so a step must be repeatable after it was interrupted.
    """
    for number, step in enumerate(MIGRATIONS, start=1):
        db.conn.execute("BEGIN IMMEDIATE")
        try:
            if db.conn.execute("PRAGMA user_version").fetchone()[0] < number:
                db.conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                step(db)
                db.conn.execute(f"PRAGMA user_version = {number}")
            db.conn.commit()
        except BaseException:
            db.conn.rollback()
            raise


def _first(db: Database) -> None:
    result = {"source": str, "provenance": str, "created": str}
    quantiles = {"q20": float, "q50": float, "q80": float}
    db["trial"].create(
        {**KEY, "config": str, "status": str, "error": str, **quantiles, "phases": str, **result},
        pk=(*KEY, "config", "source"),
        not_null={*KEY, "config", "status", "error", "phases", *result},
        if_not_exists=True,
    )
    db["best"].create(
        {**KEY, "config": str, "ms": float, "default_config": str, "default_ms": float, "noise": float, **result},
        pk=tuple(KEY),
        not_null={*KEY, "config", "ms", "noise", *result},
        if_not_exists=True,
    )
    db["calibration"].create(
        {"machine": str, "backend": str, "name": str, "value": float, "created": str},
        pk=("machine", "backend", "name"),
        not_null={"machine", "backend", "name", "value", "created"},
        if_not_exists=True,
    )


#: Step i takes a database from version i to i + 1. A published step never changes.
MIGRATIONS: tuple[Callable[[Database], None], ...] = (_first,)
