"""Configurations for a card that is not here: ranked by the cost model, compiled, and checked where they can be."""

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
    A winner but the default is checked once on a small problem where the backend can interpret its kernels; one that is
    wrong is passed over. The budget is in seconds for all tasks.
    """
    start, pools = time.monotonic(), (Pool(jobs), Pool(1, interpret=True, failure="invalid"))
    try:
        for first in range(0, len(tasks), 2 * jobs):
            batch = []
            for task, space in tasks[first : first + 2 * jobs]:
                known = _known(task, store)
                chosen = any(outcome.status == "ok" for outcome in known.values())
                ranked = [] if chosen else ranking(task, space, card)
                for config in ranked[:1]:
                    begin(pools[0], task, config)
                batch.append((task, space, ranked, known))
            for task, space, ranked, known in batch:
                if budget is not None and time.monotonic() - start >= budget:
                    return
                provenance = {**versions(task.query.backend), "driver": "", "card": card.source}
                yield _choose(task, space, ranked, trials, known, provenance, store, *pools)
    finally:
        for pool in pools:
            pool.close()


def _known(task: Task, store: Store) -> dict[str, Outcome]:
    """Return what earlier predictions found with the same source code."""
    source, earlier = versions(task.query.backend)["source"], store.trials(Key.of(*task), source="predicted")
    return {canonical(t.config): t.outcome for t in earlier if t.provenance.get("source") == source}


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
    provenance: dict[str, str],
    store: Store,
    compilers: Pool,
    interpreters: Pool,
) -> Result:
    """Compile candidates until one may win, and store the outcomes."""
    key, usual = Key.of(*task), canonical(space.default(task.query.kernel, task.problem, task.query.architecture))
    replayed, rank = len(known), {canonical(config): place for place, config in enumerate(ranked, 1)}
    # The default is compiled at the latest as the last.
    tried = ranked[:trials] if rank.get(usual, 0) <= trials else [*ranked[: trials - 1], ranked[rank[usual] - 1]]

    def learn(config: Config, outcome: Outcome) -> None:
        known[canonical(config)] = outcome
        store.add(key, config, outcome, "predicted", provenance, is_default=canonical(config) == usual)

    for i, config in enumerate(tried):
        name = canonical(config)
        if name in known:
            continue
        for ahead in tried[i : i + (compilers.jobs if i else 1)]:  # where one is rejected, the next may be too
            begin(compilers, task, ahead)
        found = resources(compilers, task, config)
        outcome = found if isinstance(found, Outcome) else None
        if not isinstance(found, Outcome) and (reason := space.too_much(found, task.query.architecture)):
            outcome = Outcome("compile_error", error=reason)
        if outcome is None and name != usual:
            outcome = interpreters.result((task, name), _interpreted, task, dict(config))
        learn(config, outcome or Outcome("ok", rank=rank[name]))
        if outcome is None:
            if usual in rank and usual not in known:  # for comparison: not compiled
                learn(ranked[rank[usual] - 1], Outcome("ok", rank=rank[usual]))
            break
    return Result(task, known, usual, len(known) - replayed)


def _interpreted(task: Task, config: Config) -> Outcome | None:
    """Run a small problem where the backend can interpret its kernels; return the outcome if the result is wrong."""
    from .bench import interpreted  # imports PyTorch

    worst = interpreted(task, config)
    if worst is None or worst <= 1:
        return None
    return Outcome("wrong", error=f"the worst row is off by {worst:.3g} of the tolerance, as interpreted")
