"""Measures stored winners again: whether they still run, are right, and are faster than the defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sdkde_core.tuning import Space

from .key import Key
from .offline import space_for
from .problems import task_of
from .runner import FINALS, MARGIN, Outcome, Task
from .store import Best, Store
from .worker import MeasuringRunner

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True)
class Verdict:
    """A stored winner, measured again, and the default, measured with it."""

    before: Best
    after: Best | None  # None: nothing runs any more
    now: Outcome
    default: Outcome

    @property
    def holds(self) -> bool:
        """Whether it is still the winner, or as fast as the new one within :data:`MARGIN`."""
        return self.after is not None and self.now.median <= (1 + MARGIN) * self.after.ms

    @property
    def reason(self) -> str:
        """One line that says what was found."""
        if self.now.status != "ok":
            return f"{self.now.status}: {self.now.error}"
        if self.holds:
            return "holds"
        best = self.after is not None and self.after.config == self.after.default_config
        return "the default is as fast now" if best else "another is faster now"


def _task(key: Key) -> tuple[Task, Space]:
    """Return a task that has this key, and its search space; ValueError if there is none here."""
    task = task_of(key)
    space = space_for(task)
    if space.config_version != key.config_version:
        raise ValueError(
            f"stored for version {key.config_version} of its parameters; the present is {space.config_version}"
        )
    if key.kernel not in space.kernels(task.problem) or Key.of(task.query, task.problem) != key:
        raise ValueError("this version of the tuner makes no such problem; another version or program stored it")
    return task, space


def verify(stored: Iterable[Best], runner: MeasuringRunner, store: Store) -> Iterator[Verdict | tuple[Best, str]]:
    """Measure winners again, in turns with the default and the other finalists, and store who wins now.

    Of a winner that cannot be measured it yields why.
    """
    for best in stored:
        try:
            task, space = _task(best.key)
        except ValueError as error:
            yield best, str(error)
            continue
        default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
        # The other finalists too, so that none wins by its time of another day.
        final = [dict(t.config) for t in store.trials(best.key) if FINALS in t.outcome.phases]
        configs = [dict(best.config)]
        configs += [config for config in (default, *final) if config not in configs]
        runner.prepare(task, configs)
        # First each by itself: it is checked, and may crash its process without the others.
        outcomes = [runner.run(task, config, float("inf")) for config in configs]
        ran = [i for i, outcome in enumerate(outcomes) if outcome.status == "ok"]
        for i, outcome in zip(ran, runner.finals(task, [configs[i] for i in ran]) if ran else ()):
            phases = {**outcomes[i].phases, **outcome.phases, FINALS: 0.0}
            outcomes[i] = Outcome(outcome.status, outcome.ms, outcome.error, phases)
        for config, outcome in zip(configs, outcomes):
            usual = config == default
            store.add(best.key, config, outcome, "measured", runner.provenance(task), is_default=usual)
        after = next(iter(store.best(**best.key._asdict())), None)
        yield Verdict(best, after, outcomes[0], outcomes[configs.index(default)])
