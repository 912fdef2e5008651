"""The search for a kernel's best configuration. The only module that uses Optuna."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from typing import Protocol as TypingProtocol

import numpy as np

from sdkde_core.choice.hardware import card_called
from sdkde_core.tuning import Config, Space

from .key import Key, canonical
from .runner import FINALS, Outcome, Runner, Task, fastest

__all__ = ["PAPER", "SAMPLERS", "Memory", "Result", "candidates", "search", "size"]

#: What chooses the next candidate. ``grid``: all in order; ``priced``: by ascending predicted time.
SAMPLERS = ("tpe", "random", "grid", "priced")

#: The configuration of the paper's kernels, tried early.
PAPER: Config = {"block_m": 64, "block_n": 1024, "num_warps": 2, "num_stages": 2}

#: How many of the fastest are timed again, in turns with the default.
FINALISTS = 3

#: How many winners of other problems are tried early.
NEIGHBOURS = 4


class Memory(TypingProtocol):
    """The methods of :class:`sdkde_autotune.store.Store` that a search needs."""

    def add(
        self,
        key: Key,
        config: Config,
        outcome: Outcome,
        source: str,
        provenance: Mapping[str, Any],
        *,
        is_default: bool = False,
    ) -> None:
        """Store an outcome at once; from then on it may be the key's winner."""

    def trials(self, key: Key) -> Sequence[Any]:
        """Return the trials of a key."""

    def best(self, **filters: Any) -> Sequence[Any]:
        """Return winners."""


@dataclass(frozen=True)
class Result:
    """The result of a search.

    Parameters
    ----------
    task : Task
    key : Key
    best : mapping or None
        The best configuration; None if none ran.
    outcome, default : Outcome or None
        Of the best configuration and of the default one.
    counts : mapping of str to int
        Number of configurations by status, replayed ones included.
    tried, replayed : int
        Number of configurations that were run, and whose outcomes were in the store.
    seconds : float
    reason : str
        The most frequent error; empty if there was none.
    """

    task: Task
    key: Key
    best: Config | None
    outcome: Outcome | None
    default: Outcome | None
    counts: Mapping[str, int]
    tried: int
    replayed: int
    seconds: float
    reason: str = ""

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
    return [config for config in every if _limit(task, space, config) is None]


def search(
    task: Task,
    space: Space,
    runner: Runner,
    store: Memory,
    *,
    sampler: str = "tpe",
    trials: int | None = 60,
    budget: float | None = None,
    seed: int = 0,
    first: Iterable[Config] = (),
    progress: Callable[[int, int, float], None] | None = None,
) -> Result:
    """Try configurations of one kernel for one problem, and store every outcome.

    The default is tried first, then ``first``, winners of neighbouring problems and the paper's configuration, then the
    sampler's proposals. A configuration whose parameters exceed the card's limits is never run, and none is run twice:
    the sampler is told the stored outcomes of the same kind of runner and the same source code. So an interrupted
    search resumes. Measured finalists are timed again in turns, and the fastest of them wins.

    Parameters
    ----------
    task : Task
    space : Space
    runner : Runner
    store : Memory
    sampler : str
        One of :data:`SAMPLERS`.
    trials : int, optional
        Number of outcomes at the end, replayed ones included; None: one for every configuration. With ``"priced"`` the
        default is tried in addition, if it is not among them.
    budget : float, optional
        Seconds after which no further candidate is run.
    seed : int
    first : iterable of mapping
        Configurations to try early, unless they are not in the space. Missing parameters are taken from the default.
    progress : callable, optional
        ``progress(known, expected, best)`` after every outcome; ``best`` in milliseconds, inf without any.

    Returns
    -------
    Result

    Raises
    ------
    KeyboardInterrupt
        The outcomes so far are stored.
    """
    start = time.monotonic()
    key = Key.of(task.query, task.problem)
    default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
    version = _version(runner.provenance(task))
    before = store.trials(key)
    same = [t for t in before if t.source == runner.source and _version(t.provenance) == version]
    known: dict[str, Outcome] = {canonical(trial.config): trial.outcome for trial in same}
    configs: dict[str, Config] = {canonical(trial.config): trial.config for trial in same}
    replayed = len(known)

    valid = candidates(task, space)
    proposals: _Proposals
    if sampler == "tpe":
        proposals = _Tpe(space.parameters(task.query.kernel), valid, seed)
    else:
        proposals = _Ordered(_order(sampler, task, space, valid, seed))
    early = [default] if _limit(task, space, default) is None else []
    if sampler != "priced":
        early += _fitting([*first, *_earlier(before), *_neighbours(store, key), PAPER], task, space, default)
    queue = list({canonical(config): config for config in early if canonical(config) not in known}.values())
    expected = len({canonical(config) for config in (*valid, *early)} | set(known))
    if trials is not None:
        extra = sampler == "priced" and canonical(default) not in map(canonical, proposals.ask(trials))
        expected = min(expected, trials + extra)
    for name, outcome in known.items():
        proposals.tell(configs[name], outcome)

    def learn(config: Config, outcome: Outcome) -> None:
        usual = config == default
        store.add(key, config, outcome, runner.source, runner.provenance(task), is_default=usual)
        known[canonical(config)], configs[canonical(config)] = outcome, config

    def best() -> float:
        return min((outcome.median for outcome in known.values()), default=float("inf"))

    def spent() -> bool:
        return budget is not None and len(known) > replayed and time.monotonic() - start >= budget

    while len(known) < expected and not spent():
        batch = (queue or proposals.ask(proposals.ahead))[: expected - len(known)]
        if not batch:
            break
        runner.prepare(task, batch)
        for config in batch:
            if spent():
                break
            outcome = runner.run(task, config, best())
            learn(config, outcome)
            proposals.tell(config, outcome)
            if progress is not None:
                progress(len(known), expected, best())
        queue = []
    tried = len(known) - replayed
    final = _finalists(known, canonical(default)) if runner.source == "measured" else []
    if len(final) > 1 and (tried or not any(FINALS in known[name].phases for name in final)):
        began = time.monotonic()
        outcomes = runner.finals(task, [configs[name] for name in final])
        share = (time.monotonic() - began) / len(final)
        if any(outcome.status == "ok" for outcome in outcomes):  # else one crashed all, and it is not known which
            for name, outcome in zip(final, outcomes):
                phases = {**known[name].phases, **outcome.phases, FINALS: share}
                learn(configs[name], replace(outcome, phases=phases))

    winner = fastest(known, canonical(default))
    errors = Counter(outcome.error for outcome in known.values() if outcome.status != "ok")
    return Result(
        task,
        key,
        configs[winner] if winner else None,
        known[winner] if winner else None,
        known.get(canonical(default)),
        Counter(outcome.status for outcome in known.values()),
        tried,
        replayed,
        time.monotonic() - start,
        errors.most_common(1)[0][0] if errors else "",
    )


def _version(provenance: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the hashes of the code behind an outcome: the backend's, and for a prediction the cost model's."""
    return provenance.get("source"), provenance.get("model")


def _limit(task: Task, space: Space, config: Config) -> str | None:
    return space.limit(task.query.kernel, config, task.problem, task.query.architecture)


def _fitting(configs: Iterable[Config], task: Task, space: Space, default: Config) -> list[dict[str, Any]]:
    """Return the configurations that are in the space and can run."""
    parameters = space.parameters(task.query.kernel)
    known = [{**default, **config} for config in configs if config.keys() <= parameters.keys()]
    return [
        config
        for config in known
        if all(config[name] in values for name, values in parameters.items()) and _limit(task, space, config) is None
    ]


def _earlier(trials: Sequence[Any]) -> list[Config]:
    """Return earlier finalists of the same problem, of other code or another machine, fastest first."""
    final = [t for t in trials if t.outcome.status == "ok" and FINALS in t.outcome.phases]
    return [trial.config for trial in sorted(final, key=lambda trial: trial.outcome.median)][: FINALISTS + 2]


def _neighbours(store: Memory, key: Key) -> list[Config]:
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


# --- samplers ------------------------------------------------------------------------------------------------------


class _Proposals(TypingProtocol):
    """A sampler: proposes candidates whose outcomes it has not been told, each at most once."""

    #: How many candidates are asked for at a time, so that they are compiled side by side.
    ahead: int

    def ask(self, count: int) -> list[Config]: ...

    def tell(self, config: Config, outcome: Outcome) -> None: ...


def _order(sampler: str, task: Task, space: Space, valid: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    if sampler == "grid":
        return valid
    if sampler == "random":
        return [valid[i] for i in np.random.default_rng(seed).permutation(len(valid))]
    if sampler == "priced":
        card = card_called(task.query.gpu)
        if card is None:
            raise ValueError(f"the rates of {task.query.gpu!r} are unknown, so no time is predicted; measure on it")
        return sorted(valid, key=lambda config: space.seconds(task.query.kernel, config, task.problem, card))
    raise ValueError(f"sampler is {sampler!r}; pass one of {', '.join(SAMPLERS)}")


class _Ordered:
    """Proposes candidates in a fixed order."""

    ahead = 16

    def __init__(self, order: Sequence[Config]) -> None:
        self._left = {canonical(config): config for config in order}

    def ask(self, count: int) -> list[Config]:
        return list(itertools.islice(self._left.values(), count))

    def tell(self, config: Config, outcome: Outcome) -> None:
        self._left.pop(canonical(config), None)


class _Tpe:
    """Optuna's tree-structured Parzen estimator, over the index of each parameter's value.

    Optuna proposes configurations that cannot run, and some twice. Each proposal is replaced by the nearest valid
    candidate that has not been tried, in steps of the indices, so the search ends when all have been tried.
    """

    ahead = 4

    def __init__(self, parameters: Mapping[str, Sequence[Any]], valid: Sequence[Config], seed: int) -> None:
        import warnings

        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._names = optuna, list(parameters)
        self._places = {name: {json.dumps(v): i for i, v in enumerate(vs)} for name, vs in parameters.items()}
        self._range = {
            name: optuna.distributions.IntDistribution(0, max(0, len(values) - 1))
            for name, values in parameters.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `multivariate` was called experimental up to Optuna 4
            sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed)
        self._study = optuna.create_study(sampler=sampler)
        shuffled = np.random.default_rng(seed).permutation(len(valid))  # so that ties are broken at random
        self._left = {canonical(valid[i]): (self._place(valid[i]), valid[i]) for i in shuffled}

    def _place(self, config: Config) -> list[int] | None:
        try:
            return [self._places[name][json.dumps(config[name])] for name in self._names]
        except KeyError:  # a default outside the values worth trying
            return None

    def ask(self, count: int) -> list[Config]:
        asked = [self._study.ask(self._range) for _ in range(min(count, len(self._left)))]
        chosen: dict[str, Config] = {}
        for trial in asked:
            names = [name for name in self._left if name not in chosen]
            places = np.array([self._left[name][0] for name in names])
            steps = np.abs(places - [trial.params[name] for name in self._names]).sum(axis=1)
            nearest = names[int(steps.argmin())]
            chosen[nearest] = self._left[nearest][1]
            # The sampler ignores failed trials; the candidate that runs instead is added by `tell`.
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return list(chosen.values())

    def tell(self, config: Config, outcome: Outcome) -> None:
        self._left.pop(canonical(config), None)
        place = self._place(config)
        if place is None:
            return
        state = self._optuna.trial.TrialState
        ran = outcome.status == "ok"
        self._study.add_trial(
            self._optuna.create_trial(
                params=dict(zip(self._names, place)),
                distributions=self._range,
                value=outcome.median if ran else None,
                state=state.COMPLETE if ran else state.PRUNED,  # pruned: worse than every one that ran
            )
        )
