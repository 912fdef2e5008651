"""A runner that measures on a card: candidates are compiled side by side, then checked and timed in a worker process.

A candidate may make the worker hang, run out of memory or lose its CUDA context. The worker is then replaced.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from sdkde_core.tuning import Config

from .offline import Compilers, space_for
from .processes import Pool, first_line
from .provenance import clocks, current
from .runner import Outcome, Task

__all__ = ["MeasuringRunner"]

#: Seconds after which a worker is killed that does not answer; for its first answer it imports PyTorch and makes data.
PATIENCE = 180.0

#: A candidate is timed TIMES times, but only EARLY times if it is HOPELESS times slower than the best.
TIMES, EARLY, HOPELESS = 21, 5, 1.5

#: Rounds of the finals; each times every finalist once.
ROUNDS = 25


class MeasuringRunner:
    """Tries candidates on a card that is here. A failing one is an outcome, never an exception."""

    def __init__(self, device: str = "cuda:0", jobs: int = 1) -> None:
        self.device, self._compilers = device, Compilers(jobs)
        self._worker = Pool(1, patience=PATIENCE, failure="crash")
        self._clocks: dict[str, Any] = {}

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start to compile the candidates that will be run next."""
        for config in configs:
            self._compilers.begin(task, config)

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        """Compile, check and time a candidate. One much slower than ``best`` (milliseconds) is stopped early."""
        compiled = self._compilers.resources(task, config)
        if isinstance(compiled, Outcome):
            return compiled
        resources, seconds = compiled
        reason = space_for(task).too_much(resources._replace(spills=0), task.query.architecture)
        if reason:  # spilling is no reason here: the kernel may still be fast
            return Outcome("compile_error", error=reason, phases={"compile": seconds})
        (outcome,) = self._ask(_run, task, [dict(config)], best)
        return Outcome(outcome.status, outcome.ms, outcome.error, {"compile": seconds, **outcome.phases})

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        """Time finalists again, in turns, so that a drifting clock affects all alike; return them in order."""
        return self._ask(_finals, task, [dict(c) for c in configs], math.inf)

    def provenance(self, task: Task) -> dict[str, Any]:
        """Return versions, and the card's clock and load after the last measurement."""
        return {**current(task.query.backend), **self._clocks}

    def close(self) -> None:
        """Stop the compilers and the worker."""
        self._compilers.close()
        self._worker.close()

    def _ask(self, what: Callable[..., Any], task: Task, configs: list[Config], best: float) -> list[Outcome]:
        self._worker.begun.clear()  # nothing is to be remembered
        found = self._worker.result("measured", _measure, what, self.device, task, configs, best)
        if isinstance(found, Outcome):
            self._worker.close()
            return [found] * len(configs)
        outcomes, fatal, self._clocks = found
        if fatal:
            self._worker.close()
        answers: list[Outcome] = outcomes
        return answers


# --- in the worker process ------------------------------------------------------------------------------------------

_bench: Any = None


def _measure(what: Callable[..., Any], device: str, task: Task, configs: list[Config], best: float) -> Any:
    """Return outcomes, whether the process is of no more use, and the card's clocks; keeps the problem's data."""
    from .bench import Bench  # imports PyTorch

    global _bench
    if _bench is None or _bench.task.problem != task.problem or _bench.task.query.backend != task.query.backend:
        _bench = None  # free its memory first
        _bench = Bench(task, device)
    _bench.task = task
    return (*what(_bench, configs, best), clocks(device))


def _run(bench: Any, configs: list[Config], best: float) -> tuple[list[Outcome], bool]:
    (config,), start = configs, time.perf_counter()
    try:
        worst = bench.check(config)
        checked = time.perf_counter()
        phases = {"check": checked - start}
        if not worst <= 1:
            error = f"the worst row is off by {worst:.3g} of the tolerance"
            return [Outcome("wrong", error=error, phases=phases)], False
        times: list[float] = []
        for count in range(TIMES):
            times.append(bench.time(config))
            if count + 1 == EARLY and statistics.median(times) > HOPELESS * best:
                break
        phases["time"] = time.perf_counter() - checked
        return [Outcome("ok", quantiles(times), phases=phases)], False
    except Exception as error:
        return [_failed(bench, error)], bench.lost(error)


def _finals(bench: Any, configs: list[Config], best: float) -> tuple[list[Outcome], bool]:
    times: list[list[float]] = [[] for _ in configs]
    try:
        for _ in range(ROUNDS):
            for config, mine in zip(configs, times):
                mine.append(bench.time(config))
    except Exception as error:
        return [_failed(bench, error)] * len(configs), bench.lost(error)
    return [Outcome("ok", quantiles(mine)) for mine in times], False


def _failed(bench: Any, error: Exception) -> Outcome:
    if bench.memory(error):
        return Outcome("oom", error=first_line(error))
    return Outcome("crash" if bench.lost(error) else "invalid", error=first_line(error))


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20 %, 50 % and 80 % quantiles."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return ordered[round(0.2 * last)], statistics.median(ordered), ordered[round(0.8 * last)]
