"""Configurations for a card that is not here: ranked by the cost model, compiled, and checked where they can be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Config, Space

from .measure import begin, resources
from .processes import Pool
from .provenance import current
from .records import Key, Outcome, Task, canonical
from .search import Result, candidates

if TYPE_CHECKING:
    from .problems import Tunable
    from .store import Store

__all__ = ["predict"]

#: The default is kept unless another is predicted to be faster by more than this fraction: benchmarks/notes/tuning.md.
MARGIN = 0.05


def predict(
    tasks: Sequence[Tunable], card: GPU, store: Store, *, jobs: int = 1, trials: int = 16, budget: float | None = None
) -> Generator[Result, None, None]:
    """Choose configurations by the cost model, and store them with their ranks.

    Candidates are compiled in the order of their predicted times until one compiles cleanly; it wins. The default
    stands before those that it is at most :data:`MARGIN` slower than. A winner but the default is checked once on a
    small problem where the backend can interpret its kernels; one that is wrong is passed over.

    At most ``trials`` are compiled for a task, and the budget is in seconds for all.
    """
    start, plans = time.monotonic(), deque[_Plan]()
    compilers, interpreters = Pool(jobs), Pool(1, interpret=True, failure="invalid")
    try:
        for i in range(len(tasks)):
            if budget is not None and time.monotonic() - start >= budget:
                return
            # The first candidates of the next tasks are compiled meanwhile.
            for task, space in tasks[i + len(plans) : i + 2 * jobs]:
                plans.append(_planned(task, space, card, store, trials))
                for first in plans[-1].ranked[:1]:
                    begin(compilers, task, first)
            yield _chosen(plans.popleft(), store, compilers, interpreters)
    finally:
        compilers.close()
        interpreters.close()


class _Plan(NamedTuple):
    """A task, its candidates in the order in which they are compiled, and what is known of some of them."""

    task: Task
    space: Space
    default: dict[str, Any]
    ranked: list[dict[str, Any]]  # none if one was chosen before
    rank: int  # of the default
    provenance: dict[str, Any]
    known: dict[str, Outcome]


def _planned(task: Task, space: Space, card: GPU, store: Store, trials: int) -> _Plan:
    kernel, problem, architecture = task.query.kernel, task.problem, task.query.architecture
    provenance = {**current(task.query.backend), "driver": "", "card": card.source}
    earlier = [trial for trial in store.trials(Key.of(*task)) if trial.source == "predicted"]
    same = [trial for trial in earlier if trial.provenance.get("source") == provenance["source"]]
    known = {canonical(trial.config): trial.outcome for trial in same}
    default = dict(space.default(kernel, problem, architecture))
    if any(outcome.status == "ok" for outcome in known.values()):
        return _Plan(task, space, default, [], 0, provenance, known)
    able = candidates(task, space)
    if default not in able and space.limit(kernel, default, problem, architecture) is None:
        able.append(default)

    def price(config: Config) -> tuple[float, int, str]:
        """Of equal prices the nearest to the default is taken."""
        seconds = space.seconds(kernel, config, problem, card) * (1 - MARGIN if config == default else 1)
        return seconds, sum(default.get(name) != value for name, value in config.items()), canonical(config)

    ranked = sorted(able, key=price)
    rank = ranked.index(default) if default in ranked else len(ranked)
    # The default is compiled at the latest as the last.
    tried = ranked[:trials] if rank < trials else [*ranked[: trials - 1], *ranked[rank : rank + 1]]
    return _Plan(task, space, default, tried, rank + 1, provenance, known)


def _chosen(plan: _Plan, store: Store, compilers: Pool, interpreters: Pool) -> Result:
    """Compile candidates until one may win, and store the outcomes."""
    task, known, replayed = plan.task, plan.known, len(plan.known)

    def learn(config: Config, outcome: Outcome) -> None:
        known[canonical(config)] = outcome
        store.add(Key.of(*task), config, outcome, "predicted", plan.provenance, is_default=config == plan.default)

    for i, config in enumerate(plan.ranked):
        if canonical(config) in known:
            continue
        for ahead in plan.ranked[i : i + (compilers.jobs if i else 1)]:  # where one is rejected, the next may be too
            begin(compilers, task, ahead)
        usual = config == plan.default
        outcome = _outcome(plan, config, compilers, None if usual else interpreters)
        learn(config, outcome or Outcome("ok", rank=plan.rank if usual else i + 1))
        if outcome is None:
            if canonical(plan.default) not in known and plan.default in plan.ranked:  # for comparison: not compiled
                learn(plan.default, Outcome("ok", rank=plan.rank))
            break
    return Result(task, known, canonical(plan.default), len(known) - replayed)


def _outcome(plan: _Plan, config: Config, compilers: Pool, interpreters: Pool | None) -> Outcome | None:
    """Return why a candidate is passed over; None if it is not."""
    found = resources(compilers, plan.task, config)
    if isinstance(found, Outcome):
        return found
    reason = plan.space.too_much(found, plan.task.query.architecture)
    if reason:
        return Outcome("compile_error", error=reason)
    if interpreters:
        worst = interpreters.result((plan.task, canonical(config)), _interpreted, plan.task, dict(config))
        if isinstance(worst, Outcome):
            return worst
        if worst is not None and not worst <= 1:
            return Outcome("wrong", error=f"the worst row is off by {worst:.3g} of the tolerance, as interpreted")
    return None


# --- in another process -----------------------------------------------------------------------------------------------


def _interpreted(task: Task, config: Config) -> float | None:
    from .bench import interpreted  # imports PyTorch

    return interpreted(task, config)
