"""The search for a kernel's best configuration by measuring. The only module that uses Optuna."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sdkde_core.choice.hardware import card_called
from sdkde_core.tuning import Config, Space

from .key import Key, canonical
from .runner import FINALS, Outcome, Task, fastest

if TYPE_CHECKING:
    from .store import Store
    from .worker import MeasuringRunner

__all__ = ["PAPER", "SAMPLERS", "Result", "candidates", "search", "size", "tune", "version"]

#: What chooses the next candidate. ``grid``: all in order; ``priced``: by ascending predicted time.
SAMPLERS = ("tpe", "random", "grid", "priced")

#: The configuration of the paper's kernels, tried early.
PAPER: Config = {"block_m": 64, "block_n": 1024, "num_warps": 2, "num_stages": 2}

#: How many of the fastest are timed again, in turns with the default.
FINALISTS = 3

#: How many winners of other problems are tried early.
NEIGHBOURS = 4

#: How many of the best-priced TPE begins with.
PRICED = 12

#: How many candidates are asked for at a time, so that they are compiled side by side; TPE has not seen their times.
AHEAD, TPE_AHEAD = 16, 4


@dataclass(frozen=True)
class Result:
    """The result of a search."""

    task: Task
    key: Key
    best: Config | None  # none ran
    outcome: Outcome | None  # of the best
    default: Outcome | None
    counts: Mapping[str, int]  # of configurations by status, replayed ones included
    tried: int
    replayed: int  # their outcomes were in the store
    seconds: float
    reason: str  # the most frequent error

    @classmethod
    def of(
        cls, task: Task, key: Key, known: Mapping[str, Outcome], default: str, tried: int, replayed: int, seconds: float
    ) -> Result:
        """Return the result of outcomes by configuration, as :func:`~sdkde_autotune.key.canonical` text."""
        best = fastest(known, default)
        counts = Counter(outcome.status for outcome in known.values())
        errors = Counter(outcome.error for outcome in known.values() if outcome.status != "ok")
        reason = errors.most_common(1)[0][0] if errors else ""
        config, outcome = (json.loads(best), known[best]) if best else (None, None)
        return cls(task, key, config, outcome, known.get(default), counts, tried, replayed, seconds, reason)

    @property
    def rejected(self) -> int:
        """Number of configurations that did not run."""
        return sum(self.counts.values()) - self.counts.get("ok", 0)


def size(task: Task, space: Space) -> int:
    """Return the number of configurations in a space, those that cannot run included."""
    return int(np.prod([len(values) for values in space.parameters(task.query.kernel).values()], dtype=float))


def candidates(task: Task, space: Space) -> list[dict[str, Any]]:
    """Return every configuration that can run as far as its parameters tell, in order."""
    parameters = space.parameters(task.query.kernel)
    every = (dict(zip(parameters, values)) for values in itertools.product(*parameters.values()))
    return [config for config in every if _fits(task, space, config)]


def version(provenance: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the hashes of the code behind an outcome: the backend's, and for a prediction the cost model's."""
    return provenance.get("source"), provenance.get("model")


def tune(
    tasks: Sequence[tuple[Task, Space]],
    runner: MeasuringRunner,
    store: Store,
    *,
    budget: float | None = None,
    shared: bool = True,
    progress: Callable[[str], AbstractContextManager[Any]],
    **options: Any,
) -> Iterator[Result]:
    """Search each task's configurations in turn; end early when the budget, in seconds for all, is spent.

    With ``shared`` each search gets its share of the time left, so that all are begun; else the time that it needs.
    ``progress(label)`` yields the ``progress`` of :func:`search`, to which ``options`` go too.
    """
    start = time.monotonic()
    for i, (task, space) in enumerate(tasks):
        left = None if budget is None else budget - (time.monotonic() - start)
        if left is not None and left <= 0:
            return
        share = left / (len(tasks) - i) if left is not None and shared else left
        with progress(
            f"{i + 1}/{len(tasks)} {task.query.kernel} {task.problem.reduction} d={task.problem.d}"
        ) as advance:
            found = search(task, space, runner, store, budget=share, progress=advance, **options)
        yield found


def search(
    task: Task,
    space: Space,
    runner: MeasuringRunner,
    store: Store,
    *,
    sampler: str = "tpe",
    trials: int | None = 60,
    budget: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int, float], None] = lambda known, expected, best: None,
) -> Result:
    """Try configurations of one kernel for one problem, and store every outcome.

    The default is tried first, then winners of neighbouring problems and the paper's configuration, then the sampler's
    proposals. A configuration whose parameters exceed the card's limits is never run, and none is run twice:
    the sampler is told the stored outcomes of the same source code. So an interrupted search resumes. Finalists are
    timed again in turns, and the fastest of them wins.

    Parameters
    ----------
    sampler : str
        One of :data:`SAMPLERS`.
    trials : int, optional
        Number of outcomes at the end, replayed ones included; None: one for every configuration.
    budget : float, optional
        Seconds after which no further candidate is run.
    progress : callable
        ``progress(known, expected, best)`` after every outcome; ``best`` in milliseconds, inf without any.
    """
    start, key = time.monotonic(), Key.of(task.query, task.problem)
    default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
    now, before = version(runner.provenance(task)), store.trials(key)
    known = {canonical(t.config): t.outcome for t in before if t.source == "measured" and version(t.provenance) == now}
    replayed = len(known)

    early = [default] if _fits(task, space, default) else []
    if sampler != "priced":
        early += _inside([*_earlier(before), *_neighbours(store, key), PAPER], task, space, default)
    queue = [name for name in dict.fromkeys(map(canonical, early)) if name not in known]
    proposals = _Proposals(sampler, task, space, seed)
    expected = len({*map(canonical, early), *proposals.left, *known})
    expected = expected if trials is None else min(expected, trials)
    for name, outcome in known.items():
        proposals.tell(name, outcome)

    def learn(name: str, outcome: Outcome) -> None:
        known[name] = outcome
        provenance, usual = runner.provenance(task), name == canonical(default)
        store.add(key, json.loads(name), outcome, "measured", provenance, is_default=usual)

    def spent() -> bool:
        return budget is not None and len(known) > replayed and time.monotonic() - start >= budget

    while len(known) < expected and not spent():
        batch = (queue or proposals.ask())[: expected - len(known)]
        queue = []
        if not batch:
            break
        runner.prepare(task, [json.loads(name) for name in batch])
        for name in itertools.takewhile(lambda name: not spent(), batch):
            best = min((outcome.median for outcome in known.values()), default=float("inf"))
            learn(name, runner.run(task, json.loads(name), best))
            proposals.tell(name, known[name])
            progress(len(known), expected, min(best, known[name].median))
    tried = len(known) - replayed
    final = _finalists(known, canonical(default))
    if len(final) > 1 and (tried or not any(FINALS in known[name].phases for name in final)):
        began = time.monotonic()
        outcomes = runner.finals(task, [json.loads(name) for name in final])
        share = (time.monotonic() - began) / len(final)
        if any(outcome.status == "ok" for outcome in outcomes):  # else one crashed all, and it is not known which
            for name, outcome in zip(final, outcomes):
                learn(name, replace(outcome, phases={**known[name].phases, **outcome.phases, FINALS: share}))
    return Result.of(task, key, known, canonical(default), tried, replayed, time.monotonic() - start)


def _fits(task: Task, space: Space, config: Config) -> bool:
    return space.limit(task.query.kernel, config, task.problem, task.query.architecture) is None


def _inside(configs: Iterable[Config], task: Task, space: Space, default: Config) -> list[dict[str, Any]]:
    """Return the configurations that are in the space and can run; what they lack is taken from the default."""
    parameters = space.parameters(task.query.kernel)
    known = [{**default, **config} for config in configs if config.keys() <= parameters.keys()]
    inside = (c for c in known if all(c[name] in values for name, values in parameters.items()))
    return [config for config in inside if _fits(task, space, config)]


def _earlier(trials: Sequence[Any]) -> list[Config]:
    """Return earlier finalists of the same problem, of other code or another machine, fastest first."""
    final = [t for t in trials if t.outcome.status == "ok" and FINALS in t.outcome.phases]
    return [trial.config for trial in sorted(final, key=lambda trial: trial.outcome.median)][: FINALISTS + 2]


def _neighbours(store: Store, key: Key) -> list[Config]:
    """Return winners of the same family: of the same card first, then of its architecture; nearest sizes first."""
    found = store.best(backend=key.backend, kernel=key.kernel, config_version=key.config_version)
    same = [row for row in found if row.key.family == key.family]
    near = sorted(same, key=lambda row: (key.distance(row.key), row.key))
    return list({canonical(row.config): row.config for row in near}.values())[:NEIGHBOURS]


def _finalists(known: Mapping[str, Outcome], default: str) -> list[str]:
    """Return the fastest, the winner of earlier finals, and the default, if they ran."""
    ran = sorted((name for name in known if known[name].status == "ok"), key=lambda name: known[name].median)
    earlier = [name for name in ran if FINALS in known[name].phases]
    return list(dict.fromkeys([*ran[:FINALISTS], *earlier[:1], *(name for name in ran if name == default)]))


class _Proposals:
    """Proposes candidates whose outcomes it has not been told, each at most once: in an order, or Optuna's.

    Optuna's tree-structured Parzen estimator works on the index of each parameter's value, and learns from the outcomes
    of the best-priced candidates first. It proposes configurations that cannot run, and some twice, so the nearest
    candidate that is left is taken, in steps of the indices; of several the best-priced.
    """

    def __init__(self, sampler: str, task: Task, space: Space, seed: int) -> None:
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler is {sampler!r}; pass one of {', '.join(SAMPLERS)}")
        order, card = candidates(task, space), card_called(task.query.gpu)
        if sampler in ("tpe", "random"):
            order = [order[i] for i in np.random.default_rng(seed).permutation(len(order))]
        if sampler in ("tpe", "priced") and card is not None:
            order.sort(key=lambda config: space.seconds(task.query.kernel, config, task.problem, card))
        elif sampler == "priced":
            raise ValueError(f"the rates of {task.query.gpu!r} are unknown, so no time is predicted; measure on it")
        self._first = PRICED if sampler == "tpe" and card is not None else 0
        self._values = {k: list(map(json.dumps, v)) for k, v in space.parameters(task.query.kernel).items()}
        self.left = {name: self._place(name) for name in map(canonical, order)}
        self._study, self._told = None, 0
        if sampler == "tpe":
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._optuna = optuna
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `multivariate` was called experimental up to Optuna 4
                chooser = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed)
            self._study = optuna.create_study(sampler=chooser)
            self._range = {k: optuna.distributions.IntDistribution(0, len(v) - 1) for k, v in self._values.items()}

    def _place(self, name: str) -> list[int]:
        config = json.loads(name)
        return [values.index(json.dumps(config[k])) for k, values in self._values.items()]

    def ask(self) -> list[str]:
        """Return the names of the next candidates; none if none is left."""
        if self._study is None or self._told < self._first:
            return list(itertools.islice(self.left, AHEAD if self._study is None else self._first - self._told))
        chosen: list[str] = []
        for _ in range(min(TPE_AHEAD, len(self.left))):
            trial = self._study.ask(self._range)
            names = [name for name in self.left if name not in chosen]
            steps = np.abs(np.array([self.left[name] for name in names]) - [trial.params[k] for k in self._values]).sum(
                axis=1
            )
            chosen.append(names[int(steps.argmin())])
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # `tell` adds the one that runs instead
        return chosen

    def tell(self, name: str, outcome: Outcome) -> None:
        """Learn an outcome."""
        place = self.left.pop(name, None)
        self._told += 1
        if self._study is None or place is None:  # an order, or a default outside the values worth trying
            return
        ran, state = outcome.status == "ok", self._optuna.trial.TrialState
        self._study.add_trial(
            self._optuna.create_trial(
                params=dict(zip(self._values, place)),
                distributions=self._range,
                value=outcome.median if ran else None,
                state=state.COMPLETE if ran else state.PRUNED,  # pruned: worse than every one that ran
            )
        )
