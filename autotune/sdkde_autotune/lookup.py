"""Looks up stored launch configurations for backends: the entry point of group ``sdkde.tuning``.

Imports the standard library only, never writes, and reads the database once for each question of a process. How closely
a configuration was tuned for the problem is its rung, the best first:

================  ==================================================================================================
``exact``         on the same processor, for this problem: here, imported, or in a table that comes with sdkde
``near``          on the same processor for a similar problem: n and m at most 3 octaves off each, other features
                  (weights, leave-one-out), or dimensions at most a third off
``architecture``  on another processor of the same architecture
``predicted``     the cost model's choice for the card, not measured
================  ==================================================================================================

On a rung the nearest comes first: features, then the dimension, then sizes; of equally near ones what was measured
here. A configuration that the backend does not accept (it exceeds the card, it failed to launch) is skipped.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sdkde_core.plugin import cache_folder, warn_once
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

from .key import FAMILY, Key, octave
from .records import Best, Trial, trial_of, winners
from .schema import Refused, begun, text, winning

__all__ = ["Found", "candidates", "database", "forget", "lookup", "read"]

#: A configuration serves problems whose sizes differ by at most so many octaves, and dimensions by a factor.
OCTAVES, DIMENSIONS = 3, 4 / 3

#: Tables that come with sdkde, written by ``sdkde-autotune export --winners``.
TABLES = Path(__file__).parent / "tables"

#: How long a look-up waits for a locked database, and for how long one that changes meanwhile is read again.
LOCKED_SECONDS, CHANGED_SECONDS = 0.2, 1.0

_T = TypeVar("_T")
_Row = dict[str, Any]


class Found(NamedTuple):
    """A configuration that can serve a problem, its rung, the winner that it comes from, and whether that shipped."""

    config: Config
    rung: str
    best: Best
    shipped: bool


#: What this process was asked. Threads may find the same at once; there is no lock.
_answers: dict[tuple[Any, ...], list[Found]] = {}
_shipped: dict[tuple[object, ...], list[_Row]] | None = None  # by family
_refused: dict[str | None, object] = {}  # by SDKDE_DB: the stamp of a file that could not be read


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
    try:
        named = os.environ.get("SDKDE_DB")
        if named in _refused and _refused[named] != _state():  # perhaps it is mended
            forget()
        memory = _answers
        # The fields that Key.of reads, as making a Key takes longer than the rest of a look-up.
        kind = problem.reduction, problem.precision, problem.dtype, problem.requires, problem.d
        asked = named, query, *kind, octave(problem.n), octave(problem.m)
        answers = memory.get(asked)
        if answers is None:
            memory[asked] = answers = candidates(query, problem)
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
    key, ranked = Key.of(query, problem), []
    stored = [(best, False) for best in winners(_sound(_stored(key, path), key))]
    shipped = [(best, True) for best in winners(_sound(_tables().get(key.family, ()), key))]
    for best, ships in (*stored, *shipped):
        distance = key.distance(best.key)
        rung = _rung(best, key, distance)
        if rung:
            order = ("exact", "near", "architecture", "predicted").index(rung)
            ranked.append(((order, distance, ships, best.key, str(best.config)), Found(best.config, rung, best, ships)))
    return [found for _, found in sorted(ranked, key=lambda item: item[0])]


def _rung(best: Best, key: Key, distance: tuple[float, ...]) -> str:
    """Return how closely a winner was tuned for a problem of its family; empty if it cannot serve it."""
    features, dimensions, octaves, most, _ = distance
    same = best.key.gpu == key.gpu
    if best.key.architecture != key.architecture or most > OCTAVES or dimensions > math.log2(DIMENSIONS) + 1e-9:
        return ""
    if best.source == "predicted":
        return "predicted" if same else ""
    if not same:
        return "architecture"
    return "near" if features or dimensions or octaves else "exact"


def _sound(rows: Iterable[_Row], key: Key) -> Iterator[Trial]:
    """Yield the trials of another key's neighbourhood; what is damaged is told once and passed over."""
    for row in rows:
        try:
            yield trial_of(row)
        except ValueError as error:
            _warn(f"a winner of {key.kernel}", str(error))


def forget() -> None:
    """Let the next look-up read the database again, after it was written to."""
    global _answers, _shipped, _refused
    _answers, _shipped, _refused = {}, None, {}


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


def _stored(key: Key, path: Path | None) -> list[_Row]:
    """Return what may serve a problem in a database, by default the user's; none, and a warning, if it is not read."""
    own, before = path is None, _state()
    try:
        try:
            path = path or database()
        except FileNotFoundError:  # without a home nobody has kept anything
            return []
        return read(path, lambda connection: _select(connection, key)) or []
    except Exception as error:
        if own:
            _refused[os.environ.get("SDKDE_DB")] = before
        _warn(str(path or "the tuner's database"), str(error))
        return []


def _state() -> object:
    """Return the stamp of the user's database, or why it has none."""
    try:
        return _stamp(database())
    except Exception as error:
        return str(error)


def _select(connection: sqlite3.Connection, key: Key) -> list[_Row]:
    """Return the winners that may serve a problem, and their defaults: the 64 nearest rows at most."""
    where = " AND ".join(f"{name} = ?" for name in (*FAMILY, "architecture"))
    n, m = (tuple(range(size - OCTAVES, size + OCTAVES + 1)) for size in (key.n_octave, key.m_octave))
    # The primary key begins so. Lists of octaves let SQLite search it by what follows them, too; a range would not.
    where += f" AND n_octave IN {n} AND m_octave IN {m} AND dimension BETWEEN ? AND ?"
    dimensions = math.ceil(key.dimension / DIMENSIONS), math.floor(key.dimension * DIMENSIONS)
    query = f"""{winning(where)}
        ORDER BY source = 'predicted', gpu <> ?, requires <> ?, abs(dimension - ?),
            abs(n_octave - ?) + abs(m_octave - ?), rowid LIMIT 64"""
    fixed = *key.family, key.architecture, *dimensions
    near = key.gpu, key.requires, key.dimension, key.n_octave, key.m_octave
    connection.row_factory = sqlite3.Row
    return list(map(dict, connection.execute(query, (*fixed, *fixed, *near))))


def _tables() -> dict[tuple[object, ...], list[_Row]]:
    global _shipped
    rows = _shipped
    if rows is None:
        rows = {}
        for path in sorted(TABLES.glob("*.json")):
            try:
                for row in json.loads(path.read_text(encoding="utf-8"))["trial"]:
                    rows.setdefault(tuple(row[name] for name in FAMILY), []).append(row)
            except Exception as error:
                _warn(str(path), f"{type(error).__name__}: {error}")
        _shipped = rows
    return rows


def read(path: Path, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
    """Return ``work(connection)`` in a read-only transaction; None if there is no database, or it is empty.

    No file is created, not even the -wal and -shm that SQLite makes for a reader in WAL mode. While there is a -wal,
    SQLite uses it and its -shm. Without a -wal no writer is active, and the database is opened as immutable; if it
    changes all the same, it is read again. Only SQLite opens the file: closing a handle of our own would drop the locks
    of other connections in this process.

    Raises
    ------
    OSError, sqlite3.Error, Refused
        It cannot be read, or is not a database of the tuner.
    """
    path, until = Path(os.path.realpath(path)), time.monotonic() + CHANGED_SECONDS
    while True:
        before = _stamp(path)
        if before is None:
            return None
        # At rest nothing is written, nor was left unwritten by a process that was killed. Without a -shm a writer
        # begins or ends just now; or was killed as it ended, or this is a copy.
        at_rest = not any(before[:2])
        without_shm = before[0] > 0 and not os.path.exists(f"{path}-shm")
        try:
            if not without_shm or time.monotonic() > until:
                uri = f"{path.as_uri()}?{'immutable=1' if at_rest else 'mode=ro'}"
                found = _read_copy(path, work) if without_shm else _read_once(uri, work)
                if not (without_shm or at_rest) or _stamp(path) == before:
                    return found
        except (sqlite3.Error, Refused):
            if time.monotonic() > until or _stamp(path) == before:
                raise
        if time.monotonic() > until + CHANGED_SECONDS:
            raise Refused("it is changed all the time; try again when nothing writes to it")
        time.sleep(0.002)


def _read_once(uri: str, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
    with closing(sqlite3.connect(uri, uri=True, timeout=LOCKED_SECONDS, isolation_level=None)) as connection:
        connection.text_factory = text
        connection.execute("BEGIN")
        return work(connection) if begun(connection) else None


def _read_copy(path: Path, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
    """Read a database whose -wal has no -shm: it is a copy, or its writer was killed while it closed it.

    SQLite would make the -shm beside it.
    """
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for suffix in "", "-wal":
            shutil.copyfile(f"{path}{suffix}", f"{folder}/copy{suffix}")
        return _read_once(Path(f"{folder}/copy").as_uri(), work)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what tells whether a database has changed, the sizes of its -wal and -journal first; None if it is empty.

    Raises
    ------
    OSError, Refused
        It is in a loop of symbolic links, below a file or hidden by permissions; it is no regular file.
    """
    real = os.path.realpath(path)
    try:
        found = os.stat(real)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise Refused(f"it is {kind}; name another with --db or SDKDE_DB")
    sizes, times = [0, 0], [0, 0]
    for i, suffix in enumerate(("-wal", "-journal")):
        with suppress(OSError):
            beside = os.stat(f"{real}{suffix}")
            sizes[i], times[i] = beside.st_size, beside.st_mtime_ns
    file = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return (*sizes, *times, *file) if found.st_size else None


def _warn(path: str, reason: str) -> None:
    warn_once(f"{path} is not used: {reason} (`sdkde-autotune show` says more)", path)
