"""The database's tables, its migration from older versions, and the query for winners.

``trial`` has a row for each configuration tried, and ``calibration`` the corrections measured on a machine. Which trial
wins is derived on reading. The schema's version is SQLite's ``user_version``; the ``application_id`` tells our
databases from those of other programs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .key import Key
from .records import KEY, TIMES
from .runner import FINALS

if TYPE_CHECKING:
    from sqlite_utils import Database

__all__ = ["APPLICATION_ID", "HEADER", "MIGRATIONS", "TABLES", "Refused", "begun", "migrate", "winning"]

#: "SDKE".
APPLICATION_ID = 0x53444B45

#: What a file of ours begins with, and has at byte 68.
HEADER = b"SQLite format 3\0", APPLICATION_ID.to_bytes(4, "big")

TABLES = ("trial", "calibration")


class Refused(ValueError):
    """A file is no database of the tuner, or one of a newer sdkde; the message says why, and what to do."""


def begun(connection: sqlite3.Connection) -> int:
    """Return the version of a database's schema; 0 if it is empty.

    Raises
    ------
    Refused
        Another program wrote it, or a newer sdkde.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    kinds = dict(connection.execute("SELECT name, type FROM sqlite_master").fetchall())
    if not (application or version or kinds):
        return 0
    if application != APPLICATION_ID:
        raise Refused("it is another program's SQLite file; name another with --db or SDKDE_DB")
    if version > len(MIGRATIONS):
        raise Refused(
            f"a newer sdkde wrote it (schema {version}, this one knows {len(MIGRATIONS)}); "
            "update sdkde, or name another file with --db or SDKDE_DB"
        )
    missing = [name for name in TABLES if kinds.get(name) != "table"]
    if version and missing:
        raise Refused(f"it lacks table {', '.join(missing)}; move it away, or name another file with --db or SDKDE_DB")
    return version


def winning(version: int, where: str, apart: Sequence[str] = Key._fields) -> str:
    """Return the query for the trials among which a winner is: the fastest of each key, and its default.

    Of a configuration's trials the measured one counts, else the imported, else the predicted one. If there are
    finalists, the fastest is one of them. Predicted times are not compared with others. The version is the schema's;
    ``apart`` are the columns of the key that the condition ``where`` does not fix.
    """
    added = "" if version > 1 else ", dimension AS d, 0 AS is_default"
    alike = " AND ".join(f"o.{name} = t.{name}" for name in (*Key._fields, "config") if version > 1 or name != "d")
    least, most = TIMES
    return f"""
        WITH ran AS (
            SELECT id, is_default, row_number() OVER (
                PARTITION BY {", ".join(apart)}
                ORDER BY source = 'predicted', phases NOT LIKE '%"{FINALS}"%', q50, config
            ) AS place
            FROM (SELECT rowid AS id, *{added} FROM trial) AS t
            WHERE {where} AND status = 'ok' AND q50 BETWEEN {least} AND {most} AND (
                source = 'measured' OR NOT EXISTS (SELECT 1 FROM trial AS o WHERE {alike} AND (
                    o.source = 'measured' OR t.source = 'predicted' AND o.source = 'imported')))
        )
        SELECT trial.* FROM ran JOIN trial ON trial.rowid = id WHERE place = 1 OR ran.is_default
    """


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
        {**KEY, "config": str, "status": str, "error": str, **quantiles, "phases": str, **result, "is_default": int},
        pk=(*KEY, "config", "source"),
        not_null={*KEY, "config", "status", "error", "phases", *result, "is_default"},
        if_not_exists=True,
    )
    db["calibration"].create(
        {"machine": str, "backend": str, "name": str, "value": float, "created": str},
        pk=("machine", "backend", "name"),
        not_null={"machine", "backend", "name", "value", "created"},
        if_not_exists=True,
    )


def _second(db: Database) -> None:
    """Before, trials lacked the problem's dimension, and winners, which knew the defaults, were table ``best``."""
    if "former" not in db.table_names():
        if "d" in db["trial"].columns_dict:
            return
        db.conn.execute("PRAGMA legacy_alter_table = ON")  # somebody's view of the table stays as it is
        db.conn.execute("ALTER TABLE trial RENAME TO former")
    _first(db)
    names = ", ".join(db["former"].columns_dict)
    same = " AND ".join(f"best.{name} = former.{name}" for name in KEY if name != "d")
    default = f"config IN (SELECT default_config FROM best WHERE {same})" if "best" in db.table_names() else "0"
    db.conn.execute(
        f"INSERT OR IGNORE INTO trial ({names}, d, is_default) SELECT {names}, dimension, {default} FROM former"
    )
    for name in {"former", "best"}.intersection(db.table_names()):
        db.table(name).drop()


#: Step i takes a database from version i to i + 1. A published step never changes.
MIGRATIONS: tuple[Callable[[Database], None], ...] = (_first, _second)
