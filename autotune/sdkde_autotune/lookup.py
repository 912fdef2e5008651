"""Looks up stored launch configurations for backends: the entry point of group ``sdkde.tuning``.

Imports the standard library only, never writes, and reads the database once for each question of a process. How closely
a configuration was tuned for the problem is its rung, the best first:

================  ==================================================================================================
``exact``         here, for this problem, under the same versions
``provenance``    here, for this problem, under other versions of the software
``shipped``       for this problem, in a table that comes with sdkde
``sizes``         on the same card for other sizes: n and m each at most 3 octaves off
``near``          on the same card with other features (weights, leave-one-out), or in dimensions at most a third off
``architecture``  on another card of the same architecture
``predicted``     the cost model's choice for the card, not measured
================  ==================================================================================================

On a rung the nearest comes first: features, then the dimension, then sizes; of equally near ones what was measured here
under the same versions. A configuration that the backend does not accept (it exceeds the card, it failed to launch) is
skipped.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sdkde_core.choice.calibration import implausible
from sdkde_core.plugin import cache_folder, warn_once
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

from .key import FAMILY, Key, octave
from .provenance import same
from .records import Best, Row, Trial, trial_of, winners
from .schema import Refused, begun, winning

__all__ = ["RUNGS", "Found", "calibration", "candidates", "database", "forget", "lookup", "read", "stamp"]

#: From the most to the least trusted; see the module's docstring.
RUNGS = ("exact", "provenance", "shipped", "sizes", "near", "architecture", "predicted")

#: A configuration serves problems whose sizes differ by at most so many octaves, and dimensions by a factor.
OCTAVES, DIMENSIONS = 3, 4 / 3

#: At most so many stored rows are looked at for a question.
NEAREST = 64

#: Tables that come with sdkde, written by ``sdkde-autotune export --winners``.
TABLES = Path(__file__).parent / "tables"

#: How long a look-up waits for a locked database.
TIMEOUT_SECONDS = 0.2

#: How often a database is read that changes while it is read.
ATTEMPTS = 6

_T = TypeVar("_T")


class Found(NamedTuple):
    """A configuration that can serve a problem, its rung, the winner that it comes from, and whether that shipped."""

    config: Config
    rung: str
    best: Best
    shipped: bool


class _Memory:
    """What this process has read. Threads may read the same at once; as they find the same, there is no lock."""

    def __init__(self) -> None:
        self.answers: dict[tuple[Any, ...], list[Found]] = {}
        self.shipped: dict[tuple[object, ...], list[Row]] | None = None  # by family
        self.calibration: dict[str | None, dict[tuple[str, str], dict[str, float]]] = {}  # by SDKDE_DB
        self.unread: set[str | None] = set()  # values of SDKDE_DB whose file cannot be read


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
        kind = problem.reduction, problem.precision, problem.dtype, problem.requires, problem.deterministic, problem.d
        asked = query, *kind, octave(problem.n), octave(problem.m), os.environ.get("SDKDE_DB")
        answers = memory.answers.get(asked)
        if answers is None:
            answers = memory.answers[asked] = _ranked(memory, Key.of(query, problem))
    except Exception as error:  # an estimate must not fail because of its tuning
        _warn(f"the tuning of {query.kernel}", repr(error))
        return None
    for found in answers:
        try:
            if accept is None or accept(found.config):
                return dict(found.config), found.rung
        except Exception as error:
            _warn(f"{query.kernel}, rung {found.rung}, {dict(found.config)},", repr(error))
    return None


def candidates(query: Query, problem: Problem, path: Path | None = None) -> list[Found]:
    """Return every configuration that can serve a problem, the most trusted first; of the database ``path``."""
    return _ranked(_Memory(), Key.of(query, problem), path)


def calibration(backend: str, machine: str) -> Mapping[str, float]:
    """Return what ``sdkde-autotune calibrate`` stored of a backend on a machine, by name; the database is read once."""
    memory, named = _memory, os.environ.get("SDKDE_DB")
    if named not in memory.calibration:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for of_machine, of_backend, name, value in _stored(memory, _select_calibration):
            reason = implausible(name, value)
            if reason:
                _warn(f"{name!r} in the calibration of {of_backend}", reason)
            else:
                found.setdefault((of_machine, of_backend), {})[name] = float(value)
        memory.calibration[named] = found
    return memory.calibration[named].get((machine, backend), {})


def _ranked(memory: _Memory, key: Key, path: Path | None = None) -> list[Found]:
    near = [(best, False) for best in winners(_sound(_stored(memory, lambda db: _select(db, key), path), key))]
    near += [(best, True) for best in winners(_sound(_shipped(memory).get(key.family, ()), key))]
    ranked = []
    for best, shipped in near:
        fresh, distance = same(best.provenance, key.backend), key.distance(best.key)
        rung = _rung(best, distance, fresh, shipped)
        if rung is not None:
            order = (RUNGS.index(rung), distance, shipped, not fresh, best.key, str(best.config))
            ranked.append((order, Found(best.config, rung, best, shipped)))
    return [found for _, found in sorted(ranked, key=lambda item: item[0])]


def _rung(best: Best, distance: tuple[float, ...], fresh: bool, shipped: bool) -> str | None:
    """Return how closely a winner was tuned for a problem of its family; None if it cannot serve it."""
    card, architecture, features, dimensions, _, octaves, _ = distance
    if architecture or octaves > OCTAVES or dimensions > math.log2(DIMENSIONS) + 1e-9:
        return None
    if best.source == "predicted":
        return None if card else "predicted"
    if card:
        return "architecture"
    if features or dimensions:
        return "near"
    if octaves:
        return "sizes"
    if shipped:
        return "shipped"
    return "exact" if fresh else "provenance"


def _sound(rows: Iterable[Row], key: Key) -> Iterator[Trial]:
    """Yield the trials of another key's neighbourhood; what is damaged is told once and passed over."""
    for row in rows:
        try:
            yield trial_of(row)
        except ValueError as error:
            _warn(f"a winner of {key.kernel}", str(error))


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
    FileNotFoundError
        The user has no home.
    """
    named = os.environ.get("SDKDE_DB")
    if not named:
        return cache_folder() / "tuning.sqlite"
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ValueError(f"SDKDE_DB is {named!r}: {error} Set the path of a file") from error


# --- reading ----------------------------------------------------------------------------------------------------------


def _stored(memory: _Memory, select: Callable[[sqlite3.Connection], list[_T]], path: Path | None = None) -> list[_T]:
    """Return rows of a database, by default the user's; none, and a warning, if it cannot be read."""
    named = os.environ.get("SDKDE_DB")
    if named in memory.unread:
        return []
    try:
        try:
            path = path or database()
        except FileNotFoundError:  # without a home nobody has kept anything
            return []
        return read(path, select) or []
    except Exception as error:
        memory.unread.add(named)
        _warn(str(path or "the tuner's database"), str(error))
        return []


def _select(connection: sqlite3.Connection, key: Key) -> list[Row]:
    """Return the winners that may serve a problem, and their defaults: at most NEAREST rows."""
    where = " AND ".join(f"{name} = ?" for name in (*FAMILY, "architecture"))
    where += " AND n_octave BETWEEN ? AND ? AND m_octave BETWEEN ? AND ? AND dimension BETWEEN ? AND ?"
    n, m = ((size - OCTAVES, size + OCTAVES) for size in (key.n_octave, key.m_octave))
    dimensions = math.ceil(key.dimension / DIMENSIONS), math.floor(key.dimension * DIMENSIONS)
    apart = ("requires", "d", "dimension", "n_octave", "m_octave", "gpu")
    query = f"""{winning(begun(connection), where, apart)}
        ORDER BY source = 'predicted', gpu <> ?, requires <> ?, abs(dimension - ?),
            abs(n_octave - ?) + abs(m_octave - ?), rowid LIMIT {NEAREST}"""
    near = key.gpu, key.requires, key.dimension, key.n_octave, key.m_octave
    connection.row_factory = sqlite3.Row
    return list(map(dict, connection.execute(query, (*key.family, key.architecture, *n, *m, *dimensions, *near))))


def _select_calibration(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    connection.text_factory = lambda text: text.decode(errors="replace")  # a bad name spoils itself only
    return connection.execute("SELECT machine, backend, name, value FROM calibration").fetchall()


def _shipped(memory: _Memory) -> dict[tuple[object, ...], list[Row]]:
    if memory.shipped is None:
        rows: dict[tuple[object, ...], list[Row]] = {}
        for path in sorted(TABLES.glob("*.json")):
            try:
                for row in json.loads(path.read_text(encoding="utf-8"))["trial"]:
                    rows.setdefault(tuple(row[name] for name in FAMILY), []).append(row)
            except Exception as error:
                _warn(str(path), f"{type(error).__name__}: {error}")
        memory.shipped = rows
    return memory.shipped


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
        before = stamp(path)
        if before is None:
            return None
        at_rest = not any(before[2:])
        uri = f"{path.as_uri()}?mode=ro&{'immutable' if at_rest else 'readonly_shm'}=1"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_SECONDS)) as connection:
                found = work(connection) if begun(connection) else None
            if not at_rest or stamp(path) == before:
                break
        except sqlite3.Error as error:
            # The writer has not made or filled its -shm yet, or has just removed it.
            passing = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
            if attempt == ATTEMPTS or not (passing or stamp(path) != before):
                raise
        time.sleep(0.002 * attempt)
    return found


def stamp(path: Path) -> tuple[int, ...] | None:
    """Return a database's time and size, and the sizes of its -wal and -journal; None if it is absent or empty."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise Refused(f"it is {kind}; name another with --db or SDKDE_DB")
    unwritten = []
    for suffix in "-wal", "-journal":
        with suppress(OSError):
            unwritten.append(os.stat(f"{path}{suffix}").st_size)
    return (found.st_mtime_ns, found.st_size, *unwritten) if found.st_size else None


def _warn(path: str, reason: str) -> None:
    warn_once(f"{path} is not used: {reason} (`sdkde-autotune show` says more)", path)
