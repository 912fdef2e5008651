"""Configurations for a card that is not here: ranked by the cost model, and compiled for its architecture."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Config, Space

from .measure import begin, resources, versions
from .processes import Pool
from .records import Key, Outcome, Task, canonical
from .search import Result, candidates

if TYPE_CHECKING:
    from .problems import Tunable
    from .store import Store

__all__ = ["predict", "ranking"]


def predict(
    tasks: Sequence[Tunable], card: GPU, store: Store, *, jobs: int = 1, trials: int = 16, budget: float | None = None
) -> Generator[Result, None, None]:
    """Choose configurations by the cost model, and store them with their ranks.

    Candidates are compiled in the order of :func:`ranking`, at most ``trials``, until one compiles cleanly; it wins.
    The budget is in seconds for all tasks.
    """
    start, compilers = time.monotonic(), Pool(jobs)
    try:
        for first in range(0, len(tasks), 2 * jobs):
            batch = []
            for task, space in tasks[first : first + 2 * jobs]:
                source, stored = versions(task.query.backend)["source"], store.trials(Key.of(*task), source="predicted")
                same = [trial for trial in stored if trial.provenance.get("source") == source]
                known = {canonical(trial.config): trial.outcome for trial in same}
                chosen = any(outcome.status == "ok" for outcome in known.values())
                batch.append((task, space, known, [] if chosen else ranking(task, space, card)))
                for config in batch[-1][3][:1]:
                    begin(compilers, task, config)
            for task, space, known, ranked in batch:
                if budget is not None and time.monotonic() - start >= budget:
                    return
                yield _choose(task, space, ranked, trials, known, card, store, compilers)
    finally:
        compilers.close()


def ranking(task: Task, space: Space, card: GPU) -> list[Config]:
    """Return the candidates by the time that the cost model predicts; of equal ones the nearest to the default first.

    The default stands before those that are predicted to be faster by at most 5 %: the model's error is larger, see
    benchmarks/notes/tuning.md.
    """
    kernel, problem, architecture = task.query.kernel, task.problem, task.query.architecture
    default = space.default(kernel, problem, architecture)

    def price(config: Config) -> tuple[float, int, str]:
        seconds = space.seconds(kernel, config, problem, card) * (0.95 if config == default else 1)
        return seconds, sum(default.get(name) != value for name, value in config.items()), canonical(config)

    able: list[Config] = list(candidates(task, space))
    if default not in able and space.limit(kernel, default, problem, architecture) is None:
        able.append(default)
    return sorted(able, key=price)


def _choose(
    task: Task,
    space: Space,
    ranked: list[Config],
    trials: int,
    known: dict[str, Outcome],
    card: GPU,
    store: Store,
    compilers: Pool,
) -> Result:
    """Compile candidates until one may win, and store the outcomes."""
    provenance = {**versions(task.query.backend), "driver": "", "card": card.source}
    usual = space.default(task.query.kernel, task.problem, task.query.architecture)
    replayed, rank = len(known), {canonical(config): place for place, config in enumerate(ranked, 1)}
    last = rank.get(canonical(usual), 0)  # the default is compiled at the latest as the last
    tried = ranked[:trials] if last <= trials else [*ranked[: trials - 1], usual]

    def learn(config: Config, outcome: Outcome) -> None:
        known[canonical(config)] = outcome
        store.add(Key.of(*task), config, outcome, "predicted", provenance, is_default=config == usual)

    for i, config in enumerate(tried):
        if canonical(config) in known:
            continue
        for ahead in tried[i : i + (compilers.jobs if i else 1)]:  # where one is rejected, the next may be too
            begin(compilers, task, ahead)
        found = resources(compilers, task, config)
        if isinstance(found, Outcome):
            learn(config, found)
        elif reason := space.too_much(found, task.query.architecture):
            learn(config, Outcome("compile_error", error=reason))
        else:
            learn(config, Outcome("ok", rank=rank[canonical(config)]))
            if last and canonical(usual) not in known:  # for comparison: not compiled
                learn(usual, Outcome("ok", rank=last))
            break
    return Result(task, known, canonical(usual), len(known) - replayed)
