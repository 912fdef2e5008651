"""Looks up stored launch configurations for backends: the entry point of group ``sdkde.tuning``.

Imports the standard library only, never writes, and reads the database once for each question of a process. The rungs
are in docs/autotuning.md. On a rung the nearest comes first: features, then the dimension, then sizes; of equally near
ones what was measured here.

The database is one SQLite file. Its table ``trial`` has a row for each configuration tried; which wins is derived on
reading. SQLite's ``user_version`` is the schema's, and the ``application_id`` tells our files from other programs'.
The file has SQLite's rollback journal, not a write-ahead log. So readers make no files beside it, a file without write
permission can be read, and the users' homes may be on a network file system, where a write-ahead log does not work.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from sdkde_core.plugin import cache_folder, warn_once
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

from .records import COLUMNS, FAMILY, KEY, Best, Key, octave, sound, winners

#: A configuration serves problems whose sizes differ by at most so many octaves, and dimensions by a factor.
OCTAVES, DIMENSIONS = 3, 4 / 3

#: Tables that come with sdkde, written by ``sdkde-autotune export --winners``.
TABLES = Path(__file__).parent / "tables"

VERSION = 1

#: The primary key, in the order in which a look-up searches: what must agree, then what may be near.
PRIMARY = tuple(dict.fromkeys((*FAMILY, "architecture", "n_octave", "m_octave", "dimension", *KEY, "config")))


class Found(NamedTuple):
    """The winner of a problem, how closely it was tuned for the problem that is asked for, and whether it shipped."""

    best: Best
    rung: str
    shipped: bool


#: What this process was asked. Threads may find the same at once; there is no lock.
_answers: dict[tuple[Any, ...], list[Found]] = {}


def lookup(query: Query, problem: Problem, accept: Callable[[Config], bool] | None = None) -> tuple[Config, str] | None:
    """Return the best known configuration and its rung, or None. Never writes or measures.

    ``accept(config)`` says whether the kernel can be launched so. It is asked on every call, for the best ones first.
    """
    named, memory = os.environ.get("SDKDE_DB"), _answers
    # The fields that Key.of reads, as making a Key takes longer than the rest of a look-up.
    kind = problem.reduction, problem.precision, problem.dtype, problem.requires, problem.d
    asked = named, query, *kind, octave(problem.n), octave(problem.m)
    answers = memory.get(asked)
    if answers is None:
        memory[asked] = answers = candidates(query, problem)
    for found in answers:
        if accept is None or accept(found.best.config):
            return dict(found.best.config), found.rung
    return None


def candidates(query: Query, problem: Problem, path: Path | None = None) -> list[Found]:
    """Return every configuration that can serve a problem, the most trusted first; of the database ``path``."""
    key, ranked = Key.of(query, problem), []
    for ships, rows in (False, _stored(key, path)), (True, _tables(TABLES).get(key[: len(FAMILY)], ())):
        for best in winners(sound(rows, f"a winner of {key.kernel}")):
            rung, distance = _closeness(best, key)
            if rung:
                place = ("exact", "near", "architecture", "predicted").index(rung), distance, ships
                ranked.append(((*place, best.key, best.name), Found(best, rung, ships)))
    return [found for _, found in sorted(ranked, key=lambda item: item[0])]


def _closeness(best: Best, key: Key) -> tuple[str, tuple[float, ...]]:
    """Return the rung of a winner for a problem of its family, and how far it is; no rung if it cannot serve it."""
    features = {*key.requires.split(",")} ^ {*best.key.requires.split(",")}
    octaves = abs(key.n_octave - best.key.n_octave), abs(key.m_octave - best.key.m_octave)
    dimensions = abs(math.log2(key.dimension / best.key.dimension))
    distance = len(features - {""}), dimensions, sum(octaves), max(octaves), abs(key.d - best.key.d)
    same, predicted = best.key.gpu == key.gpu, best.source == "predicted"
    far = max(octaves) > OCTAVES or dimensions > math.log2(DIMENSIONS) + 1e-9
    if far or best.key.architecture != key.architecture or (predicted and not same):
        return "", distance
    rung = "near" if any(distance[:3]) else "exact"
    return "predicted" if predicted else rung if same else "architecture", distance


def forget() -> None:
    """Let the next look-up read the database again, after it was written to."""
    global _answers
    _answers = {}  # a look-up that is under way fills the old one


def _stored(key: Key, path: Path | None) -> list[dict[str, Any]]:
    """Return each key's fastest trials that may serve a problem; none, and a warning, if the database is not read."""
    where = " AND ".join(f"{name} = :{name}" for name in (*FAMILY, "architecture"))
    for name in "n_octave", "m_octave":
        where += f" AND {name} BETWEEN :{name} - {OCTAVES} AND :{name} + {OCTAVES}"
    where += f" AND dimension BETWEEN :dimension / {DIMENSIONS} AND :dimension * {DIMENSIONS}"
    # SQLite takes the other columns from the row that has the minimum.
    query = f"""
        SELECT *, min(iif(source = 'predicted', rank, q50)) FROM trial WHERE {where} AND status = 'ok'
        GROUP BY {", ".join(PRIMARY[:-1])}, source = 'predicted', final, is_default"""
    try:
        path = path or database()
        with closing(connect(path)) as connection:
            connection.row_factory = sqlite3.Row
            return list(map(dict, connection.execute(query, key._asdict())))
    except FileNotFoundError:  # or the user has no home
        return []
    except Exception as error:  # an estimate must not fail because of its tuning
        name = str(path or "the tuner's database")
        warn_once(f"{name} is not used: {error} (`sdkde-autotune show` says more)", name)
        return []


@functools.cache
def _tables(folder: Path) -> dict[tuple[object, ...], list[dict[str, Any]]]:
    """Return the rows of the tables that come with sdkde, by family."""
    rows: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["trial"]:
            rows.setdefault(tuple(row[name] for name in FAMILY), []).append(row)
    return rows


class StoreError(ValueError):
    """A database or an import cannot be used; the message says why."""


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
    path: Path, wait: float = 0.5, prepare: Callable[[sqlite3.Connection, bool], None] | None = None
) -> sqlite3.Connection:
    """Open a database, and wait so many seconds for a lock.

    Without ``prepare`` it is only read, and no file is made. With it the file is written, by any number of processes at
    once; ``prepare(connection, empty)`` is called while the others wait. If a tuner was killed within a transaction,
    the first who opens the file, and may write to it, rolls that back.

    FileNotFoundError if there is nothing to read; StoreError if another program, or another version of sdkde, wrote the
    file; OSError or sqlite3.Error if it cannot be read, or a column is gone.
    """
    real = Path(os.path.realpath(path))
    if (prepare is None or real.exists()) and not stat.S_ISREG(real.stat().st_mode):
        raise StoreError("it is no regular file")
    mode = "rwc" if prepare else "rw"
    connection = sqlite3.connect(f"{real.as_uri()}?mode={mode}", uri=True, timeout=wait, isolation_level=None)
    try:
        with connection:
            connection.execute(f"PRAGMA query_only = {prepare is None}")
            connection.execute("BEGIN IMMEDIATE" if prepare else "BEGIN")
            empty = _is_empty(connection)
            if prepare:
                prepare(connection, empty)
            elif empty:
                raise FileNotFoundError(f"there is nothing in {path}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether nothing is in a database; if it is not the tuner's, raise what :func:`connect` does."""
    application, version = (connection.execute(f"PRAGMA {x}").fetchone()[0] for x in ("application_id", "user_version"))
    if not (application or version or connection.execute("SELECT 1 FROM sqlite_master").fetchone()):
        return True
    if application != int.from_bytes(b"SDKE"):
        raise StoreError("it is another program's SQLite file")
    if version != VERSION:
        raise StoreError(f"another version of sdkde wrote it (schema {version}, this one reads {VERSION})")
    connection.execute(f"SELECT {', '.join(COLUMNS)} FROM trial LIMIT 0")
    return False
