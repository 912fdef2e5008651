"""Compiling for any card, here or not, and configurations that are chosen by the cost model instead of measured."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdkde_core.choice import cards, cost, registry
from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Compiled, Config, Space, space_of

from .key import Key, canonical
from .processes import Pool
from .provenance import current
from .runner import Outcome, Task
from .search import Result, candidates, version

if TYPE_CHECKING:
    from .problems import Tunable
    from .store import Store

__all__ = ["MARGIN", "Compilers", "predict", "space_for"]

#: The default is kept unless another is predicted to be faster by more than this fraction: benchmarks/notes/tuning.md.
MARGIN = 0.05


class Compilers(Pool):
    """Compiles candidates, each once: problems that differ in their numbers of points share kernels."""

    def begin(self, task: Task, config: Config) -> None:
        """Start to compile a candidate."""
        self.submit(_code(task, config), _compile, task, dict(config))

    def knows(self, task: Task, config: Config) -> bool:
        """Whether a candidate was begun before."""
        return _code(task, config) in self.begun

    def resources(self, task: Task, config: Config) -> tuple[Compiled, float] | Outcome:
        """Return a compiled candidate's resources and the seconds that it took; if it failed, the outcome."""
        found: tuple[Compiled, float] | Outcome
        found = self.result(_code(task, config), _compile, task, dict(config))
        return found


def _code(task: Task, config: Config) -> Hashable:
    query = task.query
    return query.backend, query.architecture, space_for(task).code(query.kernel, config, task.problem)


def predict(
    tasks: Iterable[Tunable],
    card: GPU,
    store: Store,
    *,
    jobs: int = 1,
    trials: int = 16,
    check: bool = True,
    budget: float | None = None,
) -> Generator[Result, None, None]:
    """Choose configurations by the cost model, and store them.

    Candidates are compiled in the order of their predicted times until one compiles cleanly; it wins. The default
    stands before those that it is at most :data:`MARGIN` slower than. A winner but the default is checked once on a
    small problem where the backend can interpret its kernels; one that is wrong is passed over.

    At most ``trials`` are compiled for a task, and the budget is in seconds for all.
    """
    start = time.monotonic()
    compilers, interpreters = Compilers(jobs), Pool(1, interpret=True, failure="invalid") if check else None
    left, begun = iter(tasks), deque[_Plan]()
    try:
        while budget is None or time.monotonic() - start < budget:
            # The first candidates of the next tasks are compiled meanwhile.
            for task, space in itertools.islice(left, 4 * compilers.jobs - len(begun)):
                begun.append(_planned(task, space, card, store, trials, compilers))
                for first in begun[-1].configs[:1]:
                    compilers.begin(task, first)
            if not begun:
                return
            yield _chosen(begun.popleft(), store, compilers, interpreters)
    finally:
        compilers.close()
        if interpreters:
            interpreters.close()


class _Plan(NamedTuple):
    """A task, the candidates to compile, in order, with their predicted times, and what is known of some of them."""

    task: Task
    space: Space
    key: Key
    default: str
    prices: Mapping[str, float]  # milliseconds; none if a candidate was chosen before
    provenance: Mapping[str, Any]
    known: dict[str, Outcome]

    @property
    def configs(self) -> list[Config]:
        """The candidates that are left."""
        return [json.loads(name) for name in self.prices if name not in self.known]


def _planned(task: Task, space: Space, card: GPU, store: Store, trials: int, compilers: Compilers) -> _Plan:
    key, query = Key.of(task.query, task.problem), task.query
    provenance = {**current(query.backend), "driver": "", "card": card.source, "model": _cost_model()}
    earlier = [trial for trial in store.trials(key) if trial.source == "predicted"]
    known = {canonical(t.config): t.outcome for t in earlier if version(t.provenance) == version(provenance)}
    default = dict(space.default(query.kernel, task.problem, query.architecture))
    if any(outcome.status == "ok" for outcome in known.values()):
        return _Plan(task, space, key, canonical(default), {}, provenance, known)
    able = candidates(task, space)
    if space.limit(query.kernel, default, task.problem, query.architecture) is None:
        able.append(default)
    priced = {canonical(c): 1e3 * space.seconds(query.kernel, c, task.problem, card) for c in able}
    usual = canonical(default)

    def worth(name: str) -> tuple[float, int, str]:
        """Of equal prices the nearest to the default is taken."""
        return priced[name], sum(default.get(k) != value for k, value in json.loads(name).items()), name

    order = sorted(priced, key=worth)
    if usual in priced:
        better = [name for name in order if priced[name] < (1 - MARGIN) * priced[usual]]
        alike = [name for name in better if priced[name] <= (1 + MARGIN) * priced[better[0]]]
        shared = [name for name in alike if compilers.knows(task, json.loads(name))]  # as another size's problem asked
        order = list(dict.fromkeys([*list(dict.fromkeys([*shared, *better]))[: trials - 1], usual, *order]))
    prices = {name: priced[name] for name in order[:trials]}
    return _Plan(task, space, key, usual, prices, provenance, known)


def _chosen(plan: _Plan, store: Store, compilers: Compilers, interpreters: Pool | None) -> Result:
    """Compile candidates until one may win, and store the outcomes."""
    start, task, known, replayed = time.monotonic(), plan.task, plan.known, len(plan.known)
    configs = plan.configs
    for i, config in enumerate(configs):
        for ahead in configs[i : i + (compilers.jobs if i else 1)]:  # where one is rejected, the next may be too
            compilers.begin(task, ahead)
        name = canonical(config)
        known[name] = _outcome(plan, config, compilers, interpreters if name != plan.default else None)
        store.add(plan.key, config, known[name], "predicted", plan.provenance, is_default=name == plan.default)
        if known[name].status == "ok":
            break
    tried, usual = len(known) - replayed, plan.prices.get(plan.default)
    if usual is not None and plan.default not in known:  # for comparison: it was not compiled
        known[plan.default] = Outcome("ok", (usual,) * 3)
        default = json.loads(plan.default)
        store.add(plan.key, default, known[plan.default], "predicted", plan.provenance, is_default=True)
    return Result.of(task, plan.key, known, plan.default, tried, replayed, time.monotonic() - start)


def _outcome(plan: _Plan, config: Config, compilers: Compilers, interpreters: Pool | None) -> Outcome:
    found = compilers.resources(plan.task, config)
    if isinstance(found, Outcome):
        return found
    phases = {"compile": found[1]}
    reason = plan.space.too_much(found[0], plan.task.query.architecture)
    if reason:
        return Outcome("compile_error", error=reason, phases=phases)
    if interpreters:
        start = time.monotonic()
        worst = interpreters.result(_code(plan.task, config), _interpreted, plan.task, dict(config))
        phases["check"] = time.monotonic() - start
        if isinstance(worst, Outcome):
            return replace(worst, phases=phases)
        if worst is not None and not worst <= 1:
            error = f"the worst row is off by {worst:.3g} of the tolerance, as interpreted"
            return Outcome("wrong", error=error, phases=phases)
    return Outcome("ok", (plan.prices[canonical(config)],) * 3, phases=phases)


@functools.cache
def _cost_model() -> str:
    """Return a hash of the cost model and its cards; when it changes, candidates are predicted again."""
    text = b"".join(Path(str(module.__file__)).read_bytes() for module in (cost, cards))
    return hashlib.sha256(text).hexdigest()[:16]


# --- in other processes -----------------------------------------------------------------------------------------------


def space_for(task: Task) -> Space:
    """Return the search space of the task's backend."""
    record = registry.find(task.query.backend)
    space = space_of(record.info) if record and record.ok and record.info else None
    if space is None:
        raise ValueError(f"backend {task.query.backend!r} is not here, or has nothing to tune")
    return space


def _compile(task: Task, config: Config) -> tuple[Compiled, float]:
    start = time.perf_counter()
    compiled = space_for(task).compile(task.query.kernel, config, task.problem, task.query.architecture)
    return compiled, time.perf_counter() - start


def _interpreted(task: Task, config: Config) -> float | None:
    from .bench import interpreted  # imports PyTorch

    return interpreted(task, config)
