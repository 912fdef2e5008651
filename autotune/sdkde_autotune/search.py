"""The search for a kernel's best configuration by measuring. The only module that uses Optuna."""

from __future__ import annotations

import itertools
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Config, Space

from .records import Key, Outcome, Task, canonical, fastest

if TYPE_CHECKING:
    from .measure import MeasuringRunner
    from .store import Store

__all__ = ["Result", "candidates", "search", "studies"]


class Result(NamedTuple):
    """The result of a search or of a prediction: outcomes by configuration, as canonical text."""

    task: Task
    known: Mapping[str, Outcome]
    default: str
    tried: int  # the other outcomes were in the store

    @property
    def best(self) -> Config | None:
        """The fastest configuration; None if none ran."""
        found = fastest(self.known, self.default)
        return json.loads(found) if found else None

    @property
    def outcome(self) -> Outcome | None:
        """That of the fastest configuration."""
        return self.known[canonical(self.best)] if self.best else None


def candidates(task: Task, space: Space) -> list[dict[str, Any]]:
    """Return every configuration that can run as far as its parameters tell, in order."""
    parameters = space.parameters(task.query.kernel)
    every = (dict(zip(parameters, values)) for values in itertools.product(*parameters.values()))
    return [config for config in every if _fits(task, space, config)]


@contextmanager
def studies(store: Store) -> Iterator[optuna.storages.RDBStorage]:
    """Open the file beside the database in which Optuna keeps a study of each search.

    ``optuna-dashboard sqlite:///PATH`` shows it. What is used later is in the database alone.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    path = store.path.with_name(f"{store.path.stem}-studies.sqlite")
    connected = {"connect_args": {"timeout": 30.0, "factory": _Connection}}
    with store.transaction():  # Optuna makes its tables without a lock of its own
        try:
            with closing(sqlite3.connect(path, timeout=30.0)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            storage = optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}", engine_kwargs=connected)
        except Exception as error:
            raise ValueError(f"{path} cannot keep studies: {error}; move it away, or pass another --db") from error
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def search(
    task: Task,
    space: Space,
    runner: MeasuringRunner,
    store: Store,
    *,
    storage: optuna.storages.BaseStorage | None = None,
    card: GPU | None = None,
    sampler: str = "tpe",
    trials: int | None = 60,
    budget: float | None = None,
    again: bool = False,
    progress: Callable[[int, int, float], None] = lambda known, expected, best: None,
) -> Result:
    """Try configurations of one kernel for one problem, and store every outcome.

    The default is tried first, then earlier finalists and the best-priced candidates, then the sampler's proposals. A
    configuration whose parameters exceed the card's limits is never run, and none is run twice: stored outcomes of the
    same source code count. Optuna's median pruner ends the timing of slow ones early. Finalists are timed again in
    turns, and the fastest of them wins.

    ``storage`` keeps the study, by default memory does. A ``card`` prices candidates. ``sampler`` is ``"tpe"``,
    ``"random"``, or ``"grid"`` for all in order. ``trials`` is the number of outcomes at the end, stored ones included;
    None: one for every configuration. After ``budget`` seconds no further candidate is run. With ``again`` the default
    and the five fastest finalists that are stored are measured, and nothing else. ``progress(known, expected, best)``
    is called after every outcome, with the best time in milliseconds.
    """
    start, key, kernel = monotonic(), Key.of(*task), task.query.kernel
    default = dict(space.default(kernel, task.problem, task.query.architecture))
    usual, source, stored = canonical(default), runner.provenance(task).get("source"), store.trials(key)
    same = [t for t in stored if t.source == "measured" and t.provenance.get("source") == source and not again]
    known = {canonical(trial.config): trial.outcome for trial in same}
    replayed = len(known)
    ran = sorted((t for t in stored if t.outcome.status == "ok"), key=lambda t: t.outcome.median)
    finalists = sorted(ran, key=lambda trial: not trial.outcome.final)[:5]
    able = candidates(task, space)
    early = [config for config in (default, *(dict(t.config) for t in finalists)) if _fits(task, space, config)]
    if card is not None and sampler == "tpe" and not again:
        early += sorted(able, key=lambda config: space.seconds(kernel, config, task.problem, card))[:12]
    every = list(dict.fromkeys(map(canonical, early if again else [*early, *able])))
    chooser = _Chooser(sampler, [name for name in every if name not in known], early, space.parameters(kernel), default)
    study = _study(key, source, chooser, storage)
    many = len(chooser.left) if again or trials is None else min(len(chooser.left), max(0, trials - replayed))

    def learn(name: str, outcome: Outcome) -> None:
        known[name] = outcome
        store.add(key, json.loads(name), outcome, "measured", runner.provenance(task), is_default=name == usual)

    def spent() -> bool:
        return budget is not None and len(known) > replayed and monotonic() - start >= budget

    while len(known) < replayed + many and not spent():
        batch = [study.ask(chooser.ranges) for _ in range(min(chooser.ahead, replayed + many - len(known)))]
        runner.prepare(task, [trial.params for trial in batch])
        try:
            while batch and not spent():
                slow = _Slow(batch[0])
                outcome = runner.run(task, batch[0].params, slow)
                learn(canonical(batch[0].params), outcome)
                _tell(study, batch.pop(0), outcome, slow.pruned)
                progress(len(known), replayed + many, min(outcome.median for outcome in known.values()))
        finally:
            for trial in batch:  # the budget is spent, or Ctrl-C
                study.tell(trial, state=TrialState.FAIL)
    final = _finalists(known, usual)
    if len(final) > 1 and (len(known) > replayed or not any(known[name].final for name in final)):
        outcomes = runner.finals(task, [json.loads(name) for name in final])
        if any(outcome.status == "ok" for outcome in outcomes):  # else one crashed all, and it is not known which
            for name, outcome in zip(final, outcomes):
                learn(name, replace(outcome, final=True))
    return Result(task, known, usual, len(known) - replayed)


def _finalists(known: Mapping[str, Outcome], default: str) -> list[str]:
    """Return the three fastest, the winner of earlier finals, and the default, if they ran."""
    ran = sorted((name for name in known if known[name].status == "ok"), key=lambda name: known[name].median)
    earlier = [name for name in ran if known[name].final]
    return list(dict.fromkeys([*ran[:3], *earlier[:1], *(name for name in ran if name == default)]))


def _fits(task: Task, space: Space, config: Config) -> bool:
    return space.limit(task.query.kernel, config, task.problem, task.query.architecture) is None


# --- Optuna -----------------------------------------------------------------------------------------------------------


class _Chooser(optuna.samplers.TPESampler):
    """Optuna's sampler, among candidates that are left: each can run, and is proposed once.

    ``early`` ones come first. The tree-structured Parzen estimator proposes configurations that cannot run, and some
    twice, so the nearest candidate that is left is taken, in steps between the values of each parameter.
    """

    def __init__(
        self,
        sampler: str,
        left: list[str],
        early: list[dict[str, Any]],
        parameters: Mapping[str, tuple[Any, ...]],
        default: Config,
    ) -> None:
        super().__init__(multivariate=True, constant_liar=True, seed=0)
        order = left if sampler == "grid" else [left[i] for i in np.random.default_rng(0).permutation(len(left))]
        self.sampler, self.left = sampler, {name: json.loads(name) for name in order}
        self.queue = [name for name in dict.fromkeys(map(canonical, early)) if name in self.left]
        self.values = {name: [*values] for name, values in parameters.items()}
        worth = {name: {*values, default[name]} for name, values in parameters.items()}
        self.ranges: dict[str, BaseDistribution] = {name: _range(values) for name, values in worth.items()}

    @property
    def ahead(self) -> int:
        """How many candidates to ask for at a time, so that they compile side by side; TPE has not seen their times."""
        return 4 if self.sampler == "tpe" and not self.queue else 16

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return self.ranges

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        chosen = self.queue.pop(0) if self.queue else ""
        if not chosen and self.sampler == "tpe":
            free = {name: each for name, each in search_space.items() if not each.single()}
            wish = super().sample_relative(study, trial, free)  # nothing while it knows few trials
            if wish:
                chosen = min(self.left, key=lambda name: self._steps(self.left[name], wish))
        chosen = chosen or next(iter(self.left))
        return dict(self.left.pop(chosen))

    def _steps(self, config: Config, wish: Mapping[str, Any]) -> float:
        """Return how many values lie between two configurations, over all parameters."""
        steps = 0.0
        for name, value in wish.items():
            values, here = self.values[name], config[name]
            if isinstance(self.ranges[name], IntDistribution):
                steps += abs(float(np.diff(np.interp(np.log([here, value]), np.log(values), range(len(values))))[0]))
            else:
                steps += here != value
        return steps


def _range(values: set[Any]) -> BaseDistribution:
    if all(type(value) is int and value > 0 for value in values):
        return IntDistribution(min(values), max(values), log=True)
    return CategoricalDistribution(sorted(values, key=str))


def _study(key: Key, source: Any, chooser: _Chooser, storage: optuna.storages.BaseStorage | None) -> optuna.Study:
    """Return the study of a problem and the backend's code."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    size = f"d={key.d} n=2^{key.n_octave} m=2^{key.m_octave}"
    words = (key.kernel, key.reduction, key.precision, size, key.requires, key.gpu, key.backend, key.config_version)
    return optuna.create_study(
        storage=storage,
        study_name=" ".join(str(word) for word in (*words, source or "") if word != ""),
        sampler=chooser,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )


class _Connection(sqlite3.Connection):
    """One whose commits survive the process; for them to survive a crash of the machine takes an fsync each."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA synchronous = NORMAL")


class _Slow:
    """Reports a trial's medians to Optuna, and asks its pruner."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.pruned = trial, False

    def __call__(self, timings: int, median: float) -> bool:
        self.trial.report(median, timings)
        self.pruned = self.trial.should_prune()
        return self.pruned


def _tell(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, slow: bool) -> None:
    """Tell an outcome; one that did not run is pruned without a value, so worse than every other."""
    trial.set_user_attr("status", outcome.status)
    if outcome.error:
        trial.set_user_attr("error", outcome.error)
    if slow or outcome.status != "ok":
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, outcome.median)
