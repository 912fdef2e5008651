"""Searches on recorded times, to compare samplers without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sdkde_core.choice.cards import GPU
from sdkde_core.protocol import Problem, Reduction
from sdkde_core.tuning import Compiled, Config, Space

from .key import Key, canonical
from .runner import Outcome, Task
from .search import search
from .store import Store

__all__ = ["Record", "RecordedSpace", "recorded", "simulate", "task_of"]

#: A configuration and its milliseconds; inf if it did not run.
Record = tuple[Config, float]


def simulate(
    records: Sequence[Record], task: Task, space: Space, sampler: str = "tpe", trials: int = 60, seed: int = 0
) -> float:
    """Search recorded times, and return by which fraction the result is slower than the best recorded one.

    Parameters
    ----------
    records : sequence of (mapping, float)
    task : Task
    space : Space
        Usually :class:`RecordedSpace`.
    sampler : str
    trials, seed : int

    Returns
    -------
    float
        0 if the best was found; inf if no configuration that runs was found.

    Raises
    ------
    ValueError
        No recorded configuration ran.
    """
    fastest = min((ms for _, ms in records), default=float("inf"))
    if fastest == float("inf"):
        raise ValueError("no recorded configuration ran; there is nothing to compare with")
    replay = _Replay({canonical(config): ms for config, ms in records})
    result = search(task, space, replay, _Forgetful(), sampler=sampler, trials=trials, seed=seed)
    return (result.outcome.median if result.outcome else float("inf")) / fastest - 1


def recorded(path: Path) -> Iterator[tuple[Key, list[Record], Task, RecordedSpace]]:
    """Yield the searches in an export or a database; predicted times only where none were measured."""
    with TemporaryDirectory() as folder, Store(Path(folder) / "recorded.sqlite") as store:
        store.load(path)
        winners = store.best()
        trials = {row.key: store.trials(row.key) for row in winners}
    for row in winners:
        measured = [trial for trial in trials[row.key] if trial.source != "predicted"] or trials[row.key]
        names = row.config.keys()
        records = [(trial.config, trial.outcome.median) for trial in measured if trial.config.keys() == names]
        default = next((config for config, _ in records if config == row.default_config), records[0][0])
        yield row.key, records, task_of(row.key), RecordedSpace(records, default)


def task_of(key: Key) -> Task:
    """Return a task that has the key."""
    problem = Problem(
        Reduction(key.reduction),
        2**key.m_octave,
        2**key.n_octave,
        key.d,
        key.dtype,
        key.precision,
        "cuda:0",
        requires=key.features,
        deterministic=bool(key.deterministic),
    )
    return Task(key.query, problem)


@dataclass(frozen=True)
class RecordedSpace:
    """The search space that records span; a configuration that was not recorded cannot run.

    Parameters
    ----------
    records : sequence of (mapping, float)
        Configurations with the same parameters, and their milliseconds.
    start : mapping
        The default configuration.
    """

    records: Sequence[Record]
    start: Config
    config_version: int = 1
    _names: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", frozenset(canonical(config) for config, _ in self.records))

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def dimension(self, kernel: str, problem: Problem) -> int:
        return problem.d

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        values: dict[str, dict[str, Any]] = {}
        for config, _ in self.records:
            for name, value in config.items():
                values.setdefault(name, {})[json.dumps(value)] = value
        return {name: tuple(sorted(found.values(), key=_order)) for name, found in values.items()}

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        return self.start

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        return None if canonical(config) in self._names else "not recorded"

    def seconds(self, kernel: str, config: Config, problem: Problem, card: GPU) -> float:
        raise ValueError("a record has no cost model")

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        raise ValueError("a record cannot be compiled")

    def too_much(self, compiled: Compiled, architecture: str) -> str | None:
        return None


def _order(value: Any) -> tuple[bool, Any]:
    """Return a sorting key: numbers by size, then others by their text."""
    number = isinstance(value, int | float)
    return not number, value if number else json.dumps(value)


class _Replay:
    """A runner whose outcomes are recorded times."""

    source = "measured"

    def __init__(self, times: Mapping[str, float]) -> None:
        self._times = times

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        pass

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        ms = self._times.get(canonical(config))
        if ms is None:
            return Outcome("invalid", error="not recorded")
        return Outcome("ok", (ms, ms, ms)) if ms < float("inf") else Outcome("crash", error="did not run")

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        return [self.run(task, config, 0.0) for config in configs]

    def provenance(self, task: Task) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _Forgetful:
    """A store that keeps nothing."""

    def add(self, *args: Any, **how: Any) -> None:
        pass

    def trials(self, key: Key) -> Sequence[Any]:
        return ()

    def best(self, **filters: Any) -> Sequence[Any]:
        return ()
