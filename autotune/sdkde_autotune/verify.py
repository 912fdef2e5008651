"""Measuring stored winners again: do they still run, are they still right, and still faster than the defaults?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sdkde_core import registry
from sdkde_core.tuning import Query, Space, space_of

from .key import Key
from .measure import Outcome, Runner, Task
from .problems import problems
from .rows import Best
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
        """Whether it still is the winner."""
        return self.after is not None and self.after.config == self.before.config

    @property
    def reason(self) -> str:
        """One line for people."""
        if self.now.status != "ok":
            return f"{self.now.status}: {self.now.error}"
        if self.holds:
            return "holds"
        return "the default is faster now" if self.default.median < self.now.median else "another is faster now"


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
    (problem,) = problems((key.reduction,), (key.dimension,), (n,), (m,), (key.level,))
    query = Query(key.backend, key.kernel, key.config_version, key.dimension, key.gpu, key.architecture)
    if key.kernel not in space.kernels(problem) or Key.of(query, problem) != key:
        raise ValueError("the tuner makes no such problems; it was stored by another version or program")
    return Task(query, problem), space


def verify(stored: Iterable[Best], runner: Runner, store: Store) -> Iterator[Verdict | tuple[Best, str]]:
    """Measure winners again, each beside the default, and settle anew who wins.

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
        configs = [dict(best.config)] + ([default] if default != dict(best.config) else [])
        runner.prepare(task, configs)
        # First each by itself: checked, and in a process that it may take down.
        outcomes = [runner.run(task, config, float("inf")) for config in configs]
        ran = [i for i, outcome in enumerate(outcomes) if outcome.status == "ok"]
        if len(ran) > 1:
            for i, outcome in zip(ran, runner.finals(task, [configs[i] for i in ran])):
                phases = {**outcomes[i].phases, **outcome.phases, "finals": 0.0}
                outcomes[i] = Outcome(outcome.status, outcome.ms, outcome.error, phases)
        for config, outcome in zip(configs, outcomes):
            store.add(best.key, config, outcome, runner.source, runner.provenance(task))
        store.settle(best.key, default)
        after = next(iter(store.best(**best.key._asdict())), None)
        yield Verdict(best, after, outcomes[0], outcomes[-1])
