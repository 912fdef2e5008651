"""Measuring stored winners again: do they still run, are they still right, and still faster than the defaults?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sdkde_core.choice import registry
from sdkde_core.tuning import Query, Space, space_of

from .key import Key
from .problems import problems
from .records import Best
from .runner import FINALS, MARGIN, Outcome, Runner, Task
from .store import Store

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True)
class Verdict:
    """What became of a stored winner.

    Parameters
    ----------
    before, after : Best or None
        The row before and now: another configuration, or none, where it did not hold.
    now : Outcome
        Of what was stored, measured now.
    default : Outcome
        Of the default, measured with it.
    """

    before: Best
    after: Best | None
    now: Outcome
    default: Outcome

    @property
    def holds(self) -> bool:
        """Whether it still is the winner, or as fast as that one within :data:`MARGIN`."""
        return self.after is not None and self.now.median <= (1 + MARGIN) * self.after.ms

    @property
    def reason(self) -> str:
        """One line for people."""
        if self.now.status != "ok":
            return f"{self.now.status}: {self.now.error}"
        if self.holds:
            return "holds"
        best = self.after is not None and self.after.config == self.after.default_config
        return "the default is as fast now" if best else "another is faster now"


def _task_of(key: Key) -> tuple[Task, Space]:
    """Return a problem that has this key, and what can be tuned of its backend.

    Raises
    ------
    ValueError
        The backend is not there, has another version of its configurations, or runs no such kernel.
    """
    record = registry.find(key.backend)
    space = space_of(record.info) if record is not None and record.ok and record.info is not None else None
    if space is None:
        raise ValueError(f"backend {key.backend!r} is not here, or has nothing to tune")
    if space.config_version != key.config_version:
        raise ValueError(f"stored for version {key.config_version} of its parameters, which has become another")
    n, m = 2**key.n_octave, 2**key.m_octave
    (problem,) = problems((key.reduction,), (key.dimension,), (n,), (m,), (key.precision,))
    query = Query(key.backend, key.kernel, key.config_version, key.dimension, key.gpu, key.architecture)
    if key.kernel not in space.kernels(problem) or Key.of(query, problem) != key:
        raise ValueError("the tuner makes no such problems; it was stored by another version or program")
    return Task(query, problem), space


def verify(stored: Iterable[Best], runner: Runner, store: Store) -> Iterator[Verdict | tuple[Best, str]]:
    """Measure winners again, each beside the default and the other finalists, and settle anew who wins.

    Yields
    ------
    Verdict, or the row and why it cannot be measured
    """
    for best in stored:
        try:
            task, space = _task_of(best.key)
        except ValueError as error:
            yield best, str(error)
            continue
        default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
        # The finalists of then too: no time of another day is to win.
        final = [dict(t.config) for t in store.trials(best.key) if FINALS in t.outcome.phases]
        configs = [dict(best.config)]
        configs += [config for config in (default, *final) if config not in configs]
        runner.prepare(task, configs)
        # First each by itself: checked, and in a process that it may take down.
        outcomes = [runner.run(task, config, float("inf")) for config in configs]
        ran = [i for i, outcome in enumerate(outcomes) if outcome.status == "ok"]
        for i, outcome in zip(ran, runner.finals(task, [configs[i] for i in ran]) if ran else ()):
            phases = {**outcomes[i].phases, **outcome.phases, FINALS: 0.0}
            outcomes[i] = Outcome(outcome.status, outcome.ms, outcome.error, phases)
        for config, outcome in zip(configs, outcomes):
            store.add(best.key, config, outcome, runner.source, runner.provenance(task))
        store.settle(best.key, default)
        after = next(iter(store.best(**best.key._asdict())), None)
        yield Verdict(best, after, outcomes[0], outcomes[configs.index(default)])
