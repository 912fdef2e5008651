"""The search for a kernel's best configuration by measuring. The only module that uses Optuna."""

from __future__ import annotations

import itertools
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Config, Space

from .key import Key, canonical
from .records import Outcome, Task, Trial, fastest

if TYPE_CHECKING:
    from .measure import MeasuringRunner
    from .store import Store

__all__ = ["PAPER", "SAMPLERS", "Result", "candidates", "search", "studies"]

#: What chooses the next candidate; ``grid``: all in order.
SAMPLERS = ("tpe", "random", "grid")

#: The configuration of the paper's kernels, tried early.
PAPER: Config = {"block_m": 64, "block_n": 1024, "num_warps": 2, "num_stages": 2}

#: How many of the fastest are timed again, in turns with the default.
FINALISTS = 3


@dataclass(frozen=True)
class Result:
    """The result of a search, or of a prediction."""

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
    def of(cls, task: Task, known: Mapping[str, Outcome], default: str, replayed: int, start: float) -> Result:
        """Return the result of outcomes by configuration, as :func:`~sdkde_autotune.key.canonical` text."""
        best, key = fastest(known, default), Key.of(task.query, task.problem)
        counts = Counter(outcome.status for outcome in known.values())
        errors = Counter(outcome.error for outcome in known.values() if outcome.status != "ok")
        reason = errors.most_common(1)[0][0] if errors else ""
        config, outcome = (json.loads(best), known[best]) if best else (None, None)
        numbers = len(known) - replayed, replayed, monotonic() - start
        return cls(task, key, config, outcome, known.get(default), counts, *numbers, reason)


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
    optuna.logging.set_verbosity(optuna.logging.WARNING)
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
    again: Config | None = None,
    progress: Callable[[int, int, float], None] = lambda known, expected, best: None,
) -> Result:
    """Try configurations of one kernel for one problem, and store every outcome.

    The default is tried first, then earlier finalists, winners of neighbouring problems, the paper's configuration and
    the best-priced ones, then the sampler's proposals. A configuration whose parameters exceed the card's limits is
    never run, and none is run twice: stored outcomes of the same source code count. So an interrupted search resumes.
    Optuna's median pruner ends the timing of slow ones early. Finalists are timed again in turns, and the fastest of
    them wins.

    Parameters
    ----------
    storage : optuna storage, optional
        Keeps the study; see :func:`studies`. Default: memory.
    card : GPU, optional
        Prices candidates; None: they are not priced.
    sampler : str
        One of :data:`SAMPLERS`.
    trials : int, optional
        Number of outcomes at the end, stored ones included; None: one for every configuration.
    budget : float, optional
        Seconds after which no further candidate is run.
    again : Config, optional
        Measure only this one, the default and the earlier finalists, whatever is stored of them.
    progress : callable
        ``progress(known, expected, best)`` after every outcome; ``best`` in milliseconds, inf without any.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler is {sampler!r}; pass one of {', '.join(SAMPLERS)}")
    start, key = monotonic(), Key.of(task.query, task.problem)
    default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
    source, before = runner.provenance(task).get("source"), store.trials(key)
    same = [t for t in before if t.source == "measured" and t.provenance.get("source") == source and not again]
    known = {canonical(t.config): t.outcome for t in same}
    replayed = len(known)
    early = [default] if _fits(task, space, default) else []
    likely = [again] if again else [*_neighbours(store, key), PAPER]
    early += _inside([*_finalists(before), *likely], task, space, default)
    able = [] if again else candidates(task, space)
    every = dict.fromkeys(map(canonical, [*early, *able]))
    expected = min(len({*every, *known}), len(every) if again or trials is None else trials)
    left = {name: json.loads(name) for name in every if name not in known}
    if card is not None and sampler == "tpe":
        early += sorted(able, key=lambda config: space.seconds(task.query.kernel, config, task.problem, card))[:12]
    chooser = _Chooser(sampler, left, early, space.parameters(task.query.kernel), default)
    study = _study(key, source, chooser, storage, known)

    def learn(name: str, outcome: Outcome) -> None:
        known[name] = outcome
        provenance, usual = runner.provenance(task), name == canonical(default)
        store.add(key, json.loads(name), outcome, "measured", provenance, is_default=usual)

    def spent() -> bool:
        return budget is not None and len(known) > replayed and monotonic() - start >= budget

    while len(known) < expected and chooser.left and not spent():
        many = min(chooser.ahead, expected - len(known), len(chooser.left))
        batch = [study.ask(chooser.ranges) for _ in range(many)]
        runner.prepare(task, [trial.params for trial in batch])
        try:
            while batch and not spent():
                slow = _Slow(batch[0])
                outcome = runner.run(task, batch[0].params, slow)
                learn(canonical(batch[0].params), outcome)
                _tell(study, batch.pop(0), outcome, slow.pruned)
                progress(len(known), expected, min(outcome.median for outcome in known.values()))
        finally:
            for trial in batch:  # the budget is spent, or Ctrl-C
                study.tell(trial, state=TrialState.FAIL)
    _race(task, runner, known, canonical(default), len(known) > replayed, learn)
    return Result.of(task, known, canonical(default), replayed, start)


def _race(
    task: Task,
    runner: MeasuringRunner,
    known: Mapping[str, Outcome],
    default: str,
    fresh: bool,
    learn: Callable[[str, Outcome], None],
) -> None:
    """Time the fastest, the winner of earlier finals and the default again, in turns."""
    ran = sorted((name for name in known if known[name].status == "ok"), key=lambda name: known[name].median)
    earlier = [name for name in ran if known[name].final]
    final = list(dict.fromkeys([*ran[:FINALISTS], *earlier[:1], *(name for name in ran if name == default)]))
    if len(final) > 1 and (fresh or not earlier):
        outcomes = runner.finals(task, [json.loads(name) for name in final])
        if any(outcome.status == "ok" for outcome in outcomes):  # else one crashed all, and it is not known which
            for name, outcome in zip(final, outcomes):
                learn(name, replace(outcome, final=True))


def _fits(task: Task, space: Space, config: Config) -> bool:
    return space.limit(task.query.kernel, config, task.problem, task.query.architecture) is None


def _inside(configs: Iterable[Config], task: Task, space: Space, default: Config) -> list[dict[str, Any]]:
    """Return the configurations that are in the space and can run; what they lack is taken from the default."""
    parameters = space.parameters(task.query.kernel)
    known = [{**default, **config} for config in configs if config.keys() <= parameters.keys()]
    inside = (c for c in known if all(c[name] in values for name, values in parameters.items()))
    return [config for config in inside if _fits(task, space, config)]


def _finalists(trials: Sequence[Trial]) -> list[Config]:
    """Return earlier finalists of the same problem, fastest first, whatever code or machine they are of."""
    final = [trial for trial in trials if trial.outcome.status == "ok" and trial.outcome.final]
    return [trial.config for trial in sorted(final, key=lambda trial: trial.outcome.median)][: FINALISTS + 2]


def _neighbours(store: Store, key: Key) -> list[Config]:
    """Return four winners of the same family: of the same card first, then of its architecture; nearest sizes first."""
    found = store.best(backend=key.backend, kernel=key.kernel, config_version=key.config_version)

    def apart(best: Trial) -> tuple[Any, ...]:
        return best.key.gpu != key.gpu, best.key.architecture != key.architecture, key.distance(best.key), best.key

    near = sorted((best for best in found if best.key.family == key.family), key=apart)
    return list({canonical(best.config): best.config for best in near}.values())[:4]


# --- Optuna -----------------------------------------------------------------------------------------------------------


class _Chooser(optuna.samplers.TPESampler):
    """Optuna's sampler, among candidates that are left: each can run, and is proposed once.

    ``early`` ones come first. The tree-structured Parzen estimator proposes configurations that cannot run, and some
    twice, so the nearest candidate that is left is taken, in steps between the values of each parameter.
    """

    def __init__(
        self,
        sampler: str,
        left: dict[str, Config],
        early: Iterable[Config],
        parameters: Mapping[str, tuple[Any, ...]],
        default: Config,
    ) -> None:
        super().__init__(multivariate=True, constant_liar=True, seed=0, n_startup_trials=10)
        order = list(left)
        if sampler != "grid":
            order = [order[i] for i in np.random.default_rng(0).permutation(len(order))]
        self.sampler, self.left = sampler, {name: left[name] for name in order}
        self.queue = [name for name in dict.fromkeys(map(canonical, early)) if name in left]
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


def _study(
    key: Key, source: Any, chooser: _Chooser, storage: optuna.storages.BaseStorage | None, known: Mapping[str, Outcome]
) -> optuna.Study:
    """Return the study of a problem and the backend's code; stored outcomes that it lacks are added."""
    size = f"d={key.d} n=2^{key.n_octave} m=2^{key.m_octave}"
    words = (key.kernel, key.reduction, key.precision, size, key.requires, key.gpu, key.backend, key.config_version)
    study = optuna.create_study(
        storage=storage,
        study_name=" ".join(str(word) for word in (*words, source or "") if word != ""),
        sampler=chooser,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )
    there = {canonical(trial.params) for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()}
    for name, outcome in known.items():
        ran = outcome.status == "ok"
        with suppress(ValueError):  # a value outside those worth trying
            if name not in there:
                trial = optuna.trial.create_trial(
                    params=json.loads(name),
                    distributions=chooser.ranges,
                    value=outcome.median if ran else None,
                    state=TrialState.COMPLETE if ran else TrialState.PRUNED,
                    user_attrs={"status": outcome.status, "error": outcome.error},
                )
                study.add_trial(trial)
    return study


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
