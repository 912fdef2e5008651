"""The search for a kernel's best configuration: by measuring, or by the cost model. No other module uses Optuna."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Config

from .measure import Failed, MeasuringRunner, Pool, compiling, versions
from .records import Result, Task, Trial, canonical
from .store import Store

optuna.logging.set_verbosity(optuna.logging.WARNING)


def candidates(task: Task) -> list[dict[str, Any]]:
    """Return every configuration that can run as far as its parameters tell, in order."""
    parameters = task.space.parameters(task.query.kernel)
    every = (dict(zip(parameters, values)) for values in itertools.product(*parameters.values()))
    return [config for config in every if task.limit(config) is None]


def search(
    task: Task, runner: MeasuringRunner, store: Store, *, card: GPU | None = None, trials: int = 60,
    budget: float = math.inf, again: bool = False,
    progress: Callable[[int, int, float], None] = lambda known, expected, best: None,
) -> Result:  # fmt: skip
    """Try configurations of one kernel for one problem, and store every trial.

    The default is tried first, then earlier finalists and the best-priced candidates, then the sampler's proposals. A
    configuration beyond the card's limits is never run, and none is run twice: stored trials of the same source code
    count. Optuna's median pruner ends the timing of slow ones. Finalists are timed once more in turns; the best wins.

    A ``card`` prices candidates. ``trials`` limits how many are known at the end, stored ones included. After
    ``budget`` seconds no further one is run. With ``again`` only the default and the five fastest stored ones are.
    ``progress(known, expected, best milliseconds)`` is called after every trial.
    """
    start, key, default = time.monotonic(), task.key, task.default()
    provenance, usual, stored = versions(task.query.backend), canonical(default), store.trials(key)
    known = {} if again else _known(stored, "measured", provenance["source"])
    ran = sorted((t for t in stored if t.status == "ok"), key=lambda t: (not t.final, t.median))
    early = [config for config in (default, *(t.config for t in ran[:5])) if task.limit(config) is None]
    able = [] if again else candidates(task)
    if card is not None and task.seconds(default, card):
        early += sorted(able, key=lambda config: task.seconds(config, card))[:12]
    left = {canonical(config): config for config in (*early, *random.Random(0).sample(able, len(able)))}
    left = {name: config for name, config in left.items() if name not in known}
    count = len({canonical(config) for config in early} & left.keys())
    values = task.space.parameters(task.query.kernel)
    ranges = {name: _range({*values[name], default[name]}) for name in values}
    chooser, replayed = _Chooser(left, count, ranges), len(known)
    study = optuna.create_study(sampler=chooser, pruner=optuna.pruners.MedianPruner(4))
    end = replayed + (len(left) if again else min(len(left), max(0, trials - replayed)))

    def learn(trial: Trial) -> None:
        known[trial.name] = replace(trial, provenance=provenance, is_default=trial.name == usual)
        store.add(known[trial.name])

    def spent() -> bool:
        return len(known) > replayed and time.monotonic() - start >= budget

    def slow(timings: int, median: float) -> bool:
        batch[0].report(median, timings)
        return batch[0].should_prune()

    while len(known) < end and not spent():
        # They compile side by side. Of four that the estimator proposes at once, it has not seen the others' times.
        ahead = min(16 if chooser.early > 0 else 4, end - len(known))
        batch = [study.ask(ranges) for _ in range(ahead)]
        runner.prepare(task, [asked.params for asked in batch])
        try:
            while batch and not spent():
                trial = runner.run(task, batch[0].params, slow)
                learn(trial)
                # One that did not run is pruned without a value, so it is worse than every other.
                whole = trial.status == "ok" and not batch[0].should_prune()
                state = TrialState.COMPLETE if whole else TrialState.PRUNED
                study.tell(batch.pop(0), trial.median if whole else None, state)
                progress(len(known), end, min(trial.median for trial in known.values()))
        finally:
            for asked in batch:  # the budget is spent, or Ctrl-C
                study.tell(asked, state=TrialState.FAIL)
    # The three fastest, the winner of earlier finals, and the default, if they ran.
    fast = sorted((trial for trial in known.values() if trial.status == "ok"), key=lambda trial: trial.median)
    wanted = [*fast[:3], *[trial for trial in fast if trial.final][:1], *(t for t in fast if t.name == usual)]
    final = {trial.name: trial for trial in wanted}
    if len(final) > 1 and (len(known) > replayed or not any(trial.final for trial in wanted)):
        with suppress(Failed):  # one crashed all, and it is not known which
            for trial in runner.finals(task, [trial.config for trial in final.values()]):
                learn(trial)
    return Result(task, known, len(known) - replayed)


def _known(stored: list[Trial], source: str, code: Any) -> dict[str, Trial]:
    """Return the trials that were measured or predicted with the present code, by configuration."""
    return {t.name: t for t in stored if t.source == source and t.provenance.get("source") == code}


def predict(
    tasks: Sequence[Task], card: GPU, store: Store, *, jobs: int = 1, trials: int = 16, budget: float = math.inf
) -> Generator[Result, None, None]:
    """Compile candidates in the order of :func:`ranking` until one compiles cleanly, which wins; store their ranks.

    At most ``trials``, the default among them. The budget is in seconds for all tasks.
    """

    @functools.cache
    def begin(i: int) -> tuple[dict[str, Trial], list[Config]]:
        """Return what is known of a task; and the candidates in order, unless one was chosen before."""
        known = _known(store.trials(tasks[i].key), "predicted", versions(tasks[i].query.backend)["source"])
        return known, [] if any(t.status == "ok" for t in known.values()) else ranking(tasks[i], card)

    start = time.monotonic()
    with closing(Pool(jobs)) as compilers:
        for i, task in enumerate(tasks):
            if time.monotonic() - start >= budget:
                return
            for j in range(i, min(i + jobs, len(tasks))):  # several problems are compiled side by side
                for config in begin(j)[1][:1]:
                    compilers.submit(*compiling(tasks[j], config))
            known, ranked = begin(i)
            usual, replayed = task.default(), len(known)
            provenance = versions(task.query.backend) | {"driver": "", "card": card.source}
            about: Any = {"source": "predicted", "provenance": provenance}
            tried = [*ranked[: trials - 1], usual] if ranked else []
            left = [config for config in tried if canonical(config) not in known]
            for k, config in enumerate(left):
                for ahead in left[k : k + (jobs if k else 1)]:  # where one is rejected, the next may be too
                    compilers.submit(*compiling(task, ahead))
                try:
                    compilers.compiled(task, config)
                    able = [config, usual] if config != usual else [config]  # the default's rank is for comparison
                    able = [each for each in able if each in ranked and canonical(each) not in known]
                    found = [Trial(task.key, each, rank=ranked.index(each) + 1, **about) for each in able]
                except Failed as failed:
                    found = [Trial(task.key, config, *failed.args, **about)]
                for trial in found:
                    known[trial.name] = replace(trial, is_default=trial.config == usual)
                    store.add(known[trial.name])
                if found[0].status == "ok":
                    break
            yield Result(task, known, len(known) - replayed)


def ranking(task: Task, card: GPU) -> list[Config]:
    """Return the candidates by the time that the cost model predicts; of equal ones the nearest to the default first.

    The default stands before those that are predicted to be faster by at most 5 %: the model's error is larger, see
    benchmarks/notes/tuning.md.
    """
    default = task.default()

    def price(config: Config) -> tuple[float, int, str]:
        seconds = task.seconds(config, card) * (0.95 if config == default else 1)
        return seconds, sum(default.get(name) != value for name, value in config.items()), canonical(config)

    able: list[Config] = list(candidates(task))
    return sorted(able + [default] * (default not in able and task.limit(default) is None), key=price)


class _Chooser(optuna.samplers.TPESampler):
    """Optuna's tree-structured Parzen estimator, among the candidates that are left; the first ``early`` come in order.

    It proposes configurations that cannot run, and some twice, so the nearest candidate that is left is taken.
    """

    def __init__(self, left: dict[str, Config], early: int, ranges: dict[str, BaseDistribution]) -> None:
        super().__init__(multivariate=True, constant_liar=True, seed=0)
        self.left, self.early, self.ranges = left, early, ranges

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return self.ranges

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        chosen, self.early = next(iter(self.left)), self.early - 1
        if self.early < 0:
            free = {name: each for name, each in search_space.items() if not each.single()}
            if wish := super().sample_relative(study, trial, free):  # nothing while it knows few trials
                chosen = min(self.left, key=lambda name: _distance(self.left[name], wish))
        return dict(self.left.pop(chosen))


def _distance(config: Config, wish: Mapping[str, Any]) -> float:
    """Return how far two configurations are apart: octaves between numbers, and 1 for each other value that differs."""
    pairs = [(config[name], value) for name, value in wish.items()]
    numbers = (isinstance(a, int) and isinstance(b, int) and min(a, b) > 0 for a, b in pairs)
    return sum(abs(math.log2(a / b)) if number else a != b for (a, b), number in zip(pairs, numbers))


def _range(values: set[Any]) -> BaseDistribution:
    if all(type(value) is int and value > 0 for value in values):
        return IntDistribution(min(values), max(values), log=True)
    return CategoricalDistribution(sorted(values, key=str))
