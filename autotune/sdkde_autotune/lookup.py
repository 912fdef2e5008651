"""Looks up stored launch configurations for backends: the entry point of group ``sdkde.tuning``.

Imports the standard library only, never writes, and reads the database once per process. How closely a configuration
was tuned for the problem is its rung, the best first:

================  ==================================================================================================
``exact``         the same key, found under the same versions
``provenance``    the same key, found under other versions of the software
``sizes``         the same card, the nearest sizes: n and m each at most 3 octaves off
``architecture``  another card of the same architecture, the nearest sizes
``shipped``       a table that comes with sdkde: the same card, then its architecture, the nearest sizes
``predicted``     the cost model's choice for the card, not measured, the nearest sizes
================  ==================================================================================================

A configuration that the backend does not accept (it exceeds the card, it failed to launch) is skipped.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sdkde_core.plugin import cache_folder, warn_once
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

from .key import Key, octave
from .provenance import current, same
from .schema import Refused, begun

__all__ = ["RUNGS", "calibration", "candidates", "database", "forget", "lookup", "read"]

#: From the most to the least trusted; see the module's docstring.
RUNGS = ("exact", "provenance", "sizes", "architecture", "shipped", "predicted")

#: A configuration serves problems whose sizes differ by at most so many octaves.
OCTAVES = 3

#: Tables that come with sdkde, written by ``sdkde-autotune export --winners``.
TABLES = Path(__file__).parent / "tables"

#: How long a look-up waits for a locked database.
TIMEOUT_SECONDS = 0.2

#: How often a database is read that changes while it is read.
ATTEMPTS = 6

_T = TypeVar("_T")
_COLUMNS = (*Key._fields, "config", "source", "provenance")


class _Row(NamedTuple):
    """A row of table ``best``; its JSON columns are parsed when they are needed."""

    key: Key
    config: Any
    source: str
    provenance: Any
    shipped: bool


_Rows = dict[tuple[object, ...], list[_Row]]  # by family


class _Memory:
    """What this process has read. Threads may read the same at once; as they find the same, there is no lock."""

    def __init__(self) -> None:
        self.rows: dict[str | None, _Rows] = {}  # by SDKDE_DB
        self.answers: dict[tuple[Any, ...], list[tuple[Config, str]]] = {}
        self.calibration: dict[str | None, dict[tuple[str, str], dict[str, float]]] = {}  # by SDKDE_DB


_memory = _Memory()


def lookup(
    query: Query, problem: Problem, accept: Callable[[Config], bool] | None = None
) -> tuple[dict[str, Any], str] | None:
    """Return the best known configuration and its rung, or None. Never raises, writes or measures.

    Parameters
    ----------
    query : Query
    problem : Problem
    accept : callable, optional
        ``accept(config)``: whether the kernel can be launched so. Asked on every call, for the best ones first.
    """
    memory = _memory
    try:
        # The fields that Key.of reads, as making a Key takes longer than the rest of a look-up.
        asked = (
            query,
            problem.reduction,
            problem.precision,
            problem.dtype,
            problem.requires,
            problem.deterministic,
            octave(problem.n),
            octave(problem.m),
            os.environ.get("SDKDE_DB"),
        )
        found = memory.answers.get(asked)
        if found is None:
            found = memory.answers[asked] = _ranked(memory, query, problem)
    except Exception as error:  # an estimate must not fail because of its tuning
        _warn(f"the tuning of {query.kernel}", repr(error))
        return None
    for config, rung in found:
        try:
            if accept is None or accept(config):
                return dict(config), rung
        except Exception as error:
            _warn(f"{query.kernel}, rung {rung}, {dict(config)},", repr(error))
    return None


def candidates(query: Query, problem: Problem) -> list[tuple[Config, str]]:
    """Return every configuration that can serve a problem, each with its rung, the most trusted first."""
    return _ranked(_memory, query, problem)


def calibration(backend: str, machine: str) -> Mapping[str, float]:
    """Return what ``sdkde-autotune calibrate`` stored of a backend on a machine, by name; the database is read once."""
    memory, named = _memory, os.environ.get("SDKDE_DB")
    if named not in memory.calibration:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for of_machine, of_backend, name, value in _stored(_select_calibration):
            if isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault((of_machine, of_backend), {})[name] = float(value)
            else:
                _warn(f"{name!r} in the calibration of {of_backend}", f"it is {value!r}, which is no number")
        memory.calibration[named] = found
    return memory.calibration[named].get((machine, backend), {})


def _ranked(memory: _Memory, query: Query, problem: Problem) -> list[tuple[Config, str]]:
    key = Key.of(query, problem)
    rows = _rows(memory).get(key.family, ())
    now = current(query.backend) if rows else {}
    ranked = []
    for row in rows:
        off = abs(row.key.n_octave - key.n_octave), abs(row.key.m_octave - key.m_octave)
        config, versions = _parsed(row.config), _parsed(row.provenance)
        if max(off) > OCTAVES:
            continue
        if not _plain(config):
            _warn(f"a configuration of {query.kernel}", f"it is {str(row.config)[:80]!r}, not values by name")
            continue
        fresh = same(versions, now)
        rung = _rung(row, key, fresh)
        if rung is not None:
            other_card = row.key.gpu != key.gpu
            order = (
                RUNGS.index(rung),
                row.shipped,
                other_card,
                sum(off),
                max(off),
                not fresh,
                str(row.key),
                str(row.config),
            )
            ranked.append((order, config, rung))
    ranked.sort(key=lambda item: item[0])
    return [(config, rung) for _, config, rung in ranked]


def _rung(row: _Row, key: Key, fresh: bool) -> str | None:
    if row.key.architecture != key.architecture:
        return None
    here = row.key.gpu == key.gpu
    if row.source == "predicted":
        return "predicted" if here else None
    if row.shipped:
        return "shipped"
    if row.key == key:
        return "exact" if fresh else "provenance"
    return "sizes" if here else "architecture"


def forget() -> None:
    """Let the next look-up read the database again, after it was written to."""
    global _memory
    _memory = _Memory()


def database() -> Path:
    """Return the path of the tuner's database: ``SDKDE_DB``, else ``tuning.sqlite`` in the user's cache folder.

    Raises
    ------
    ValueError
        ``SDKDE_DB`` is below a home that is not there.
    RuntimeError
        The user has no home.
    """
    named = os.environ.get("SDKDE_DB")
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise ValueError(f"SDKDE_DB is {named!r}: {error} Set the path of a file") from error
    return cache_folder() / "tuning.sqlite"


# --- reading ----------------------------------------------------------------------------------------------------------


def _rows(memory: _Memory) -> _Rows:
    """Return all winners by family, of the user's database and the shipped tables; both are read once."""
    named = os.environ.get("SDKDE_DB")
    if named not in memory.rows:
        rows: _Rows = {}
        for found in (*_stored(_select), *_shipped()):
            if type(found.key.n_octave) is type(found.key.m_octave) is int:
                rows.setdefault(found.key.family, []).append(found)
            else:
                _warn(f"a winner of {found.key.kernel}", "its sizes are no integers")
        memory.rows[named] = rows
    return memory.rows[named]


def _stored(select: Callable[[sqlite3.Connection], list[_T]]) -> list[_T]:
    """Return rows of the user's database; none, and a warning, if it cannot be read."""
    path: Path | str = "the tuner's database"
    try:
        try:
            path = database()
        except RuntimeError:  # without a home nobody has kept anything
            return []
        return read(path, select) or []
    except Exception as error:
        _warn(str(path), str(error))
        return []


def _row(values: Sequence[Any], shipped: bool) -> _Row:
    config, source, provenance = values[-3:]
    return _Row(Key._make(values[:-3]), config, source, provenance, shipped)


def _select(connection: sqlite3.Connection) -> list[_Row]:
    return [_row(values, False) for values in connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM best")]


def _select_calibration(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT machine, backend, name, value FROM calibration").fetchall()


def _shipped() -> list[_Row]:
    rows: list[_Row] = []
    for path in sorted(TABLES.glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["best"]
            rows += [_row([row[name] for name in _COLUMNS], True) for row in found]
        except Exception as error:
            _warn(str(path), f"{type(error).__name__}: {error}")
    return rows


def read(path: Path, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
    """Return ``work(connection)`` on a read-only connection; None if there is no database, or it is empty.

    No file is created, not even the -wal and -shm that SQLite makes for a reader in WAL mode. While a writer's -wal
    exists, its -shm does too, and is used. Without a -wal no writer is active, and the database is opened as immutable;
    if it changes all the same, or the writer removes its -wal meanwhile, it is read again. Only SQLite opens the file:
    closing a handle of our own would drop the locks of other connections in this process.

    Raises
    ------
    OSError, sqlite3.Error, Refused
        It cannot be read, or is not a database of the tuner.
    """
    path = Path(os.path.realpath(path))
    found = None
    for attempt in range(1, ATTEMPTS + 1):
        before = _stamp(path)
        if before is None:
            return None
        at_rest = not any(before.unwritten)
        uri = f"{path.as_uri()}?mode=ro&{'immutable' if at_rest else 'readonly_shm'}=1"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_SECONDS)) as connection:
                found = work(connection) if begun(connection) else None
            if not at_rest or _stamp(path) == before:
                break
        except sqlite3.Error as error:
            # The writer has not made or filled its -shm yet, or has just removed it.
            passing = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
            if attempt == ATTEMPTS or not (passing or _stamp(path) != before):
                raise
        time.sleep(0.002 * attempt)
    return found


class _Stamp(NamedTuple):
    """A database's modification time and size, and the sizes of its -wal and -journal."""

    changed: int
    size: int
    unwritten: tuple[int, ...]


def _stamp(path: Path) -> _Stamp | None:
    """Return the stamp of a database; None if there is none, or it is empty."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise Refused(f"it is {kind}; name another with --db or SDKDE_DB")
    beside = []
    for suffix in ("-wal", "-journal"):
        try:
            beside.append(os.stat(f"{path}{suffix}").st_size)
        except OSError:
            beside.append(0)
    return _Stamp(found.st_mtime_ns, found.st_size, tuple(beside)) if found.st_size else None


def _parsed(value: Any) -> Mapping[str, Any]:
    """Return the JSON object in a column; an empty mapping if it holds none."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(config: Mapping[str, Any]) -> bool:
    return bool(config) and all(isinstance(value, (str, int, float)) for value in config.values())


def _warn(path: str, reason: str) -> None:
    warn_once(f"{path} is not used: {reason} (`sdkde-autotune show` says more)", path)
