"""Trying candidates: compiled side by side, for any card, then checked and timed in a worker process.

A candidate may make the worker hang, run out of memory or lose its CUDA context. The worker is then replaced.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from sdkde_core.choice import registry
from sdkde_core.tuning import Compiled, Config, Space, space_of

from .processes import Pool, first_line
from .provenance import clocks, current
from .records import Outcome, Task

__all__ = ["MeasuringRunner", "begin", "quantiles", "resources", "space_for"]


class MeasuringRunner:
    """Tries candidates on a processor that is here. A failing one is an outcome, never an exception.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:0"``.
    jobs : int
        Compilers side by side.
    """

    def __init__(self, device: str = "cuda:0", jobs: int = 1) -> None:
        self.device, self._compilers = device, Pool(jobs)
        # For its first answer the worker imports PyTorch or Numba, and makes data.
        self._worker = Pool(1, patience=180.0, failure="crash")
        self._clocks: dict[str, Any] = {}

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start to compile the candidates that will be run next."""
        for config in configs if self.device != "cpu" else ():
            begin(self._compilers, task, config)

    def run(self, task: Task, config: Config, slow: Callable[[int, float], bool]) -> Outcome:
        """Compile, check and time a candidate, until ``slow(number of timings, median so far)``, in milliseconds."""
        if self.device != "cpu":
            compiled = resources(self._compilers, task, config)
            if isinstance(compiled, Outcome):
                return compiled
            # Spilling is no reason here: the kernel may still be fast.
            reason = space_for(task).too_much(compiled._replace(spills=0), task.query.architecture)
            if reason:
                return Outcome("compile_error", error=reason)
        found = self._ask(_check, task, [dict(config)])
        times: list[float] = []
        for count in 3, 6, 12:
            if isinstance(found, Outcome) or (times and slow(len(times), statistics.median(times))):
                break
            found = self._ask(_time, task, [dict(config)], count)
            times += [] if isinstance(found, Outcome) else found[0]
        return found if isinstance(found, Outcome) else Outcome("ok", quantiles(times))

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        """Time finalists again, in turns, so that a drifting clock affects all alike; return them in order."""
        found = self._ask(_time, task, [dict(config) for config in configs], 25)
        if isinstance(found, Outcome):
            return [found] * len(configs)
        return [Outcome("ok", quantiles(times), final=True) for times in found]

    def provenance(self, task: Task) -> dict[str, Any]:
        """Return versions, and the card's clock and load after the last measurement."""
        return {**current(task.query.backend), **self._clocks}

    def close(self) -> None:
        """Stop the compilers and the worker."""
        self._compilers.close()
        self._worker.close()

    def _ask(self, what: Callable[..., Any], task: Task, configs: list[Config], *more: int) -> Any:
        """Return what the worker answers; the outcome of what failed there."""
        self._worker.begun.clear()  # nothing is to be remembered
        found = self._worker.result("measured", _measure, what, self.device, task, configs, *more)
        if isinstance(found, Outcome):
            self._worker.close()
            return found
        answer, lost, self._clocks = found
        if lost:
            self._worker.close()
        return answer


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20 %, 50 % and 80 % quantiles."""
    ordered, last = sorted(times), len(times) - 1
    return ordered[round(0.2 * last)], statistics.median(ordered), ordered[round(0.8 * last)]


def space_for(task: Task) -> Space:
    """Return the search space of the task's backend."""
    record = registry.find(task.query.backend)
    space = space_of(record.info) if record and record.ok and record.info else None
    if space is None:
        raise ValueError(f"backend {task.query.backend!r} is not here, or has nothing to tune")
    return space


def begin(compilers: Pool, task: Task, config: Config) -> None:
    """Start to compile a candidate; problems that differ in their numbers of points share kernels."""
    compilers.submit(_code(task, config), _compile, task, dict(config))


def resources(compilers: Pool, task: Task, config: Config) -> Compiled | Outcome:
    """Return a compiled candidate's resources; if it failed, the outcome."""
    found: Compiled | Outcome = compilers.result(_code(task, config), _compile, task, dict(config))
    return found


def _code(task: Task, config: Config) -> Hashable:
    query = task.query
    return query.backend, query.architecture, space_for(task).code(query.kernel, config, task.problem)


# --- in other processes -----------------------------------------------------------------------------------------------

_bench: Any = None


def _compile(task: Task, config: Config) -> Compiled:
    return space_for(task).compile(task.query.kernel, config, task.problem, task.query.architecture)


def _measure(what: Callable[..., Any], device: str, task: Task, configs: list[Config], *more: int) -> Any:
    """Return the answer, whether the process is of no more use, and the card's clocks; keeps the problem's data."""
    from .bench import Bench, CudaBench

    global _bench
    if _bench is None or _bench.task.problem != task.problem or _bench.task.query.backend != task.query.backend:
        _bench = None  # free its memory first
        _bench = (Bench if device == "cpu" else CudaBench)(task, device)
    _bench.task = task
    try:
        return what(_bench, configs, *more), False, clocks(device)
    except Exception as error:
        status, lost = _bench.failed(error)
        return Outcome(status, error=first_line(error)), lost, clocks(device)


def _check(bench: Any, configs: list[Config]) -> Outcome | None:
    worst = bench.check(configs[0])
    return None if worst <= 1 else Outcome("wrong", error=f"the worst row is off by {worst:.3g} of the tolerance")


def _time(bench: Any, configs: list[Config], count: int) -> list[list[float]]:
    """Return times of each configuration, measured in turns."""
    rounds = [[bench.time(config) for config in configs] for _ in range(count)]
    return [list(times) for times in zip(*rounds)]
