"""Searches on recorded times, to compare samplers without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from sdkde_core.choice.cards import GPU
from sdkde_core.choice.hardware import card_called
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config

from .key import Key, canonical
from .offline import space_for
from .problems import task_of
from .runner import Outcome, Task
from .search import search
from .store import Store

__all__ = ["Record", "RecordedSpace", "recorded", "simulate"]

#: A configuration and its milliseconds; inf if it did not run.
Record = tuple[Config, float]


def simulate(
    records: Sequence[Record],
    task: Task,
    space: RecordedSpace,
    sampler: str = "tpe",
    trials: int | None = 60,
    seed: int = 0,
) -> float:
    """Search recorded times, and return by which fraction the result is slower than the best recorded one."""
    if sampler == "priced" and not space.prices:
        raise ValueError(f"what {task.query.kernel} should cost is not known without backend {task.query.backend}")
    fastest = min((ms for _, ms in records), default=float("inf"))
    if fastest == float("inf"):
        raise ValueError("no recorded configuration ran; there is nothing to compare with")
    times = {canonical(config): ms for config, ms in records}

    def run(task: Task, config: Config, best: float) -> Outcome:
        ms = times[canonical(config)]
        return Outcome("ok", (ms, ms, ms)) if ms < float("inf") else Outcome("crash", error="did not run")

    def nothing(*arguments: Any, **filters: Any) -> tuple[()]:
        return ()

    replay: Any = SimpleNamespace(prepare=nothing, run=run, provenance=lambda task: {})
    replay.finals = lambda task, configs: [run(task, config, 0.0) for config in configs]
    forgetful: Any = SimpleNamespace(add=nothing, trials=nothing, best=nothing)
    spanned: Any = space  # has what a search needs
    result = search(task, spanned, replay, forgetful, sampler=sampler, trials=trials, seed=seed)
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
        task = task_of(row.key)
        yield row.key, records, task, RecordedSpace(records, default, _prices(task, records))


def _prices(task: Task, records: Sequence[Record]) -> dict[str, float]:
    """Return what the backend's cost model says; nothing if the backend is not here, or has no such kernel."""
    card = card_called(task.query.gpu)
    with suppress(ValueError):
        if card is not None:
            space, kernel = space_for(task), task.query.kernel
            return {canonical(config): space.seconds(kernel, config, task.problem, card) for config, _ in records}
    return {}


@dataclass(frozen=True)
class RecordedSpace:
    """What a search needs of the space that records span; a configuration that was not recorded cannot run."""

    records: Sequence[Record]
    start: Config  # the default
    prices: Mapping[str, float] = field(default_factory=dict)  # seconds by the cost model, if it is here
    _names: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", frozenset(canonical(config) for config, _ in self.records))

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
        return self.prices.get(canonical(config), 0.0)


def _order(value: Any) -> tuple[bool, Any]:
    """Return a sorting key: numbers by size, then others by their text."""
    number = isinstance(value, int | float)
    return not number, value if number else json.dumps(value)
