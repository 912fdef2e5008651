"""Answers backends from what the tuner stored: the entry point of group ``sdkde.tuning``.

Standard library only, read-only, once per process. The ladder, by the rung's name in the answer:

================  ==================================================================================================
``exact``         the same key, found under the same versions
``provenance``    the same key, found under other versions
``sizes``         the same card, the nearest sizes: n and m each at most 3 octaves off
``architecture``  another card of the same architecture, the nearest sizes
``shipped``       a table that comes with sdkde: the same card, then its architecture, the nearest sizes
``predicted``     nobody measured it: the cost model's choice for the card, the nearest sizes
================  ==================================================================================================

Whatever is not accepted (it does not fit the card, it failed to launch) is passed over, and the next one asked.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sdkde_core.plugin import cache_folder
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

from .key import Key, octave
from .provenance import current, same
from .schema import Refused, begun

__all__ = ["RUNGS", "calibration", "candidates", "database", "forget", "lookup", "read"]

#: From the most to the least trusted.
RUNGS = ("exact", "provenance", "sizes", "architecture", "shipped", "predicted")

#: A configuration serves sizes up to so many octaves off.
OCTAVES = 3

#: Tables that come with sdkde: what ``sdkde-autotune export`` writes.
TABLES = Path(__file__).parent / "tables"

#: How long a look-up waits for a file that is locked.
TIMEOUT_SECONDS = 0.2

#: How often a file is read that changes meanwhile.
ATTEMPTS = 6

_T = TypeVar("_T")
_COLUMNS = (*Key._fields, "config", "source", "provenance")
_logger = logging.getLogger("sdkde")


class _Row(NamedTuple):
    """A row of ``best``; JSON is parsed when it is asked for."""

    key: Key
    config: Any
    source: str
    provenance: Any
    shipped: bool


_Rows = dict[tuple[object, ...], list[_Row]]  # by family


class _Memory:
    """What this process has read. Threads may read the same at the same time: they find the same."""

    def __init__(self) -> None:
        self.rows: dict[str | None, _Rows] = {}  # by SDKDE_DB
        self.answers: dict[tuple[Any, ...], list[tuple[Config, str]]] = {}
        self.calibration: dict[str | None, dict[tuple[str, str], dict[str, float]]] = {}  # by SDKDE_DB


_memory = _Memory()
_warned: dict[str, object] = {}


def lookup(
    query: Query, problem: Problem, accept: Callable[[Config], bool] | None = None
) -> tuple[dict[str, Any], str] | None:
    """Return the best known configuration and its rung, or None. Never raises, writes or measures.

    Parameters
    ----------
    query : Query
    problem : Problem
    accept : callable, optional
        ``accept(config)``: whether the kernel can be launched so. Asked on every call.
    """
    memory = _memory
    try:
        # What of the problem the key has: see Key.of. To make a Key takes longer than all the rest.
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
    except Exception as error:  # an estimate must not fail for what could have made it faster
        _warn(f"what is tuned for {query.kernel}", repr(error))
        return None
    for config, rung in found:
        try:
            if accept is None or accept(config):
                return dict(config), rung
        except Exception as error:
            _warn(f"{query.kernel}, rung {rung}, {dict(config)},", repr(error))
    return None


def candidates(query: Query, problem: Problem) -> list[tuple[Config, str]]:
    """Return every configuration that could serve, the most trusted first, each with its rung."""
    return _ranked(_memory, query, problem)


def calibration(backend: str, machine: str) -> Mapping[str, float]:
    """Return what ``sdkde-autotune calibrate`` measured of a backend on a machine, by name; read once."""
    memory, named = _memory, os.environ.get("SDKDE_DB")
    if named not in memory.calibration:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for of_machine, of_backend, name, value in _stored(_select_calibration):
            found.setdefault((of_machine, of_backend), {})[name] = float(value)
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
        if max(off) > OCTAVES or not _plain(config):
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
    """Read the file anew at the next look-up: something was written, or ``SDKDE_DB`` names it no longer."""
    global _memory
    _memory = _Memory()


def database() -> Path:
    """Return where the tuner's file is: ``SDKDE_DB``, else in the user's cache folder."""
    named = os.environ.get("SDKDE_DB")
    if named:
        return Path(named).expanduser()
    return cache_folder() / "tuning.sqlite"


# --- reading ----------------------------------------------------------------------------------------------------------


def _rows(memory: _Memory) -> _Rows:
    """Everything known, by family; read once."""
    named = os.environ.get("SDKDE_DB")
    if named not in memory.rows:
        rows: _Rows = {}
        for found in (*_stored(_select), *_shipped()):
            if type(found.key.n_octave) is type(found.key.m_octave) is int:
                rows.setdefault(found.key.family, []).append(found)
        memory.rows[named] = rows
    return memory.rows[named]


def _stored(select: Callable[[sqlite3.Connection], list[_T]]) -> list[_T]:
    """Rows of the user's file; none where it cannot be read, with a warning."""
    path: Path | str = "the tuner's database"
    try:
        path = database()
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
    """Return ``work(connection)`` on a read-only connection; None where there is no file, or nothing in it yet.

    Nothing is created, no -wal and no -shm beside the file either, as SQLite would for a reader in WAL mode. While a
    -wal is there, so is the writer's -shm, which serves us too. Without one the file is at rest, and read as if it
    could not change; should it change after all, it is read again, as it is when the writer tidies up under us. It is
    opened by SQLite only: to close it would take the locks from a connection that this process may have.

    Raises
    ------
    OSError, sqlite3.Error, Refused
        It cannot be read, or is not ours.
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
            # A -shm that is not there yet, or no more, or not yet filled.
            passing = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
            if attempt == ATTEMPTS or not (passing or _stamp(path) != before):
                raise
        time.sleep(0.002 * attempt)
    return found


class _Stamp(NamedTuple):
    """Time of change and size of a database, and the sizes of its -wal and -journal."""

    changed: int
    size: int
    unwritten: tuple[int, ...]


def _stamp(path: Path) -> _Stamp | None:
    """None for a database that is not there, or empty."""
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
    """A column that holds a JSON object; empty if it does not."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _plain(config: Mapping[str, Any]) -> bool:
    return bool(config) and all(isinstance(value, (str, int, float)) for value in config.values())


def _warn(path: str, reason: str) -> None:
    mine = object()
    if _warned.setdefault(path, mine) is mine:
        _logger.warning("%s is not used: %s (`sdkde-autotune show` says more)", path, reason)
