"""What was tried: keys and trials; how rows of SQLite and JSON are checked; which trial wins.

Imports the standard library only, as look-ups do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_type_hints

from sdkde_core.messages import brief, warn_once
from sdkde_core.protocol import Problem
from sdkde_core.tuning import GPU, Config, Query, Space

#: The first columns of the key: a configuration shares them with every problem that it can serve.
FAMILY = ("backend", "kernel", "config_version", "reduction", "precision", "dtype")

#: Sources of results. A result replaces one of a later source for the same configuration.
SOURCES = ("measured", "imported", "predicted")


class Key(NamedTuple):
    """The problem, kernel and processor that a configuration was tuned for."""

    backend: str
    kernel: str
    config_version: int
    reduction: str
    precision: str
    dtype: str
    requires: str  # the problem's features: sorted names, separated by commas
    d: int  # the problem's dimension
    dimension: int  # as the kernel pads it, by which configurations are found
    n_octave: int  # log2 of the number of columns, rounded
    m_octave: int  # and of rows
    gpu: str  # the GPU's name; or the CPU's, for a backend that runs there
    architecture: str

    @classmethod
    def of(cls, query: Query, problem: Problem) -> Key:
        kind = str(problem.reduction), problem.precision, problem.dtype, ",".join(sorted(problem.requires))
        size = problem.d, query.dimension, octave(problem.n), octave(problem.m)
        return cls(query.backend, query.kernel, query.config_version, *kind, *size, query.gpu, query.architecture)


def octave(count: int) -> int:
    """Return log2 of a count, rounded to the nearest integer."""
    return round(math.log2(max(count, 1)))


def canonical(values: Mapping[str, Any]) -> str:
    """Return values by name as text that does not depend on their order: how a configuration is stored and compared."""
    return json.dumps(dict(values), sort_keys=True)


KEY: dict[str, type] = get_type_hints(Key)

#: The columns of the database with their types, in order.
COLUMNS: dict[str, type] = {
    **KEY,
    **dict.fromkeys(("config", "status", "error"), str),
    **dict.fromkeys(("q20", "q50", "q80"), float),
    **dict.fromkeys(("final", "rank"), int),
    **dict.fromkeys(("source", "provenance", "created"), str),
    "is_default": int,
}


class Task(NamedTuple):
    """One kernel to tune for one problem, whose sizes are powers of two; methods are those of the backend's space."""

    query: Query
    problem: Problem
    space: Space

    @property
    def key(self) -> Key:
        return Key.of(self.query, self.problem)

    def default(self) -> dict[str, Any]:
        return dict(self.space.default(self.query.kernel, self.problem, self.query.architecture))

    def limit(self, config: Config) -> str | None:
        return self.space.limit(self.query.kernel, config, self.problem, self.query.architecture)

    def seconds(self, config: Config, card: GPU) -> float:
        return self.space.seconds(self.query.kernel, config, self.problem, card)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Trial:
    """A configuration that was tried for a key, and what became of it.

    Its status is ``"ok"`` (it ran), ``"invalid"`` (it cannot be launched), ``"compile_error"`` (it did not compile, or
    spills), ``"timeout"``, ``"oom"`` (memory ran out), ``"crash"`` (its process died) or ``"wrong"`` (its results are).
    """

    key: Key
    config: Config
    status: str = "ok"
    error: str = ""  # if it did not run: why, in one line
    ms: tuple[float, float, float] | None = None  # if measured: 20 %, 50 %, 80 % quantiles of its milliseconds
    final: bool = False  # whether it was timed in turns with the other finalists
    rank: int | None = None  # if predicted: its place among all candidates by the cost model, from 1
    source: str = "measured"  # one of SOURCES
    provenance: Mapping[str, Any] = field(default_factory=dict)  # see :func:`sdkde_autotune.measure.versions`
    created: str = field(default_factory=now)  # ISO 8601, UTC
    is_default: bool = False  # whether it was the configuration that an untuned problem gets

    @property
    def median(self) -> float:
        """Median in milliseconds; of a prediction its rank; inf if it did not run."""
        return self.ms[1] if self.ms else float(self.rank or math.inf)

    @property
    def name(self) -> str:
        return canonical(self.config)


@dataclass(frozen=True)
class Best(Trial):
    """The trial that wins a key, and the default, if it ran and was measured, or predicted, as the winner was."""

    default: Trial | None = None


def row_of(trial: Trial) -> dict[str, Any]:
    """Return a trial as a row of an export; the database has the configuration and the provenance as text."""
    low, median, high = trial.ms or (None, None, None)
    values = {**trial.key._asdict(), **vars(trial), "q20": low, "q50": median, "q80": high}
    values |= {"config": dict(trial.config), "provenance": dict(trial.provenance)}
    return {name: int(values[name]) if name in ("final", "is_default") else values[name] for name in COLUMNS}


def trial_of(row: Any) -> Trial:
    """Return the trial in a row of the database, or of an export, where a configuration is a mapping.

    ValueError, which names the column, if one is missing or holds what no search stores.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {brief(row)}, not values by name")
    if missing := [name for name in (*KEY, "config", "status", "source", "created") if name not in row]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    config, provenance = _values(row, "config"), _values(row, "provenance")
    status, source, created, error = row["status"], row["source"], row["created"], row.get("error") or ""
    ran, predicted = status == "ok", source == "predicted"
    rank: Any = row.get("rank")
    times: Any = row.get("q20"), row.get("q50"), row.get("q80")
    statuses = ("ok", "invalid", "compile_error", "timeout", "oom", "crash", "wrong")
    utc = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00"  # so that times compare as text
    right = {name: (_is_name if kind is str else _is_count)(row[name]) for name, kind in KEY.items()}
    right |= {"config": bool(config), "status": status in statuses, "source": source in SOURCES}
    right |= {"error": isinstance(error, str), "created": _is_name(created) and bool(re.fullmatch(utc, created))}
    right["rank"] = not (ran and predicted) or (_is_count(rank) and rank > 0)
    if wrong := [name for name, holds in right.items() if not holds]:
        raise ValueError(f"{wrong[0]} is {brief(row.get(wrong[0]))}, which no search stores")
    # Far less than any launch takes, and a week. The comparison also turns NaN away.
    numbers = all(isinstance(ms, (int, float)) for ms in times)
    if ran and not predicted and not (numbers and 1e-6 <= times[0] <= times[1] <= times[2] <= 7 * 86400e3):
        raise ValueError(f"times are {brief(times)}; they are three, ascending, 1e-6 to 6e8 milliseconds")
    error = "".join(letter if letter.isprintable() else " " for letter in error)
    times, rank = times if ran and not predicted else None, rank if ran and predicted else None
    key, final = Key(*(row[name] for name in KEY)), bool(row.get("final")) and not predicted
    is_default = bool(row.get("is_default"))
    return Trial(key, config, status, error, times, final, rank, source, provenance, created, is_default)


def sound(rows: Iterable[Mapping[str, Any]], what: str) -> list[Trial]:
    """Return rows as trials; a damaged row is skipped, with one warning."""
    found = []
    for row in rows:
        try:
            found.append(trial_of(row))
        except ValueError as error:
            warn_once(f"{what} is passed over: {error}", what)
    return found


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _values(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = row.get(name)
    try:
        values = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is {brief(found)}, which is no JSON") from error
    if not isinstance(values, dict) or not all(map(_is_name, values)):
        raise ValueError(f"{name} is {brief(found)}, not values by name")
    for each, value in values.items():
        if not (_is_name(value) or (isinstance(value, (int, float)) and abs(value) < 1 << 63)):  # nor NaN
            raise ValueError(f"{each} in {name} is {brief(value)}, neither a number of at most 64 bits nor a name")
    return values


def winners(trials: Iterable[Trial]) -> list[Best]:
    """Return the winners among trials, by key. A key has none if no trial ran.

    A predicted one wins only if no other was measured or imported. If there are finalists, the fastest of them wins:
    they were timed in turns, so no lucky time decides. The default is kept unless another was measured to be faster by
    more than one percent: clocks drift by as much.
    """
    by_key: dict[Key, dict[str, Trial]] = {}
    for trial in trials:
        if trial.status == "ok":
            by_key.setdefault(trial.key, {})[trial.name] = trial
    found = []
    for _, every in sorted(by_key.items()):
        ran = {name: trial for name, trial in every.items() if trial.source != "predicted"} or every
        defaults = sorted((trial.created, trial.name) for trial in every.values() if trial.is_default)
        usual = ran.get(defaults[-1][1]) if defaults else None
        final = [trial for trial in ran.values() if trial.final] or list(ran.values())
        best = min(final, key=lambda trial: (trial.median, trial.name))
        if usual in final and usual.ms and best.median >= 0.99 * usual.median:
            best = usual
        found.append(Best(**vars(best), default=usual))
    return found


class Result(NamedTuple):
    """The result of a search or of a prediction: trials by configuration, as text."""

    task: Task
    known: Mapping[str, Trial]
    tried: int  # the other trials were in the store

    @property
    def best(self) -> Best | None:
        return next(iter(winners(self.known.values())), None)
