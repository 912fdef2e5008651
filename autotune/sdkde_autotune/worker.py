"""A runner that measures on a card: candidates are compiled side by side, then checked and timed in a worker process.

A candidate may make the worker hang, run out of memory or lose its CUDA context. The worker is then replaced.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from sdkde_core.plugin import spawning
from sdkde_core.tuning import Config

from .offline import Compilers, space_for
from .processes import end, enter, first_line
from .provenance import clocks, current
from .runner import Outcome, Task

__all__ = ["MeasuringRunner"]

#: Seconds after which a worker is killed that does not answer; for its first answer it imports PyTorch and makes data.
PATIENCE, FIRST = 60.0, 180.0

#: A candidate is timed TIMES times, but only EARLY times if it is HOPELESS times slower than the best.
TIMES, EARLY, HOPELESS = 21, 5, 1.5

#: Rounds of the finals; each times every finalist once.
ROUNDS = 25


class MeasuringRunner:
    """A :class:`~sdkde_autotune.runner.Runner` for a card that is here.

    Parameters
    ----------
    device : str
        ``"cuda:0"``.
    jobs : int
        Number of compiler processes.
    """

    def __init__(self, device: str = "cuda:0", jobs: int = 1) -> None:
        self.device, self._compilers = device, Compilers(jobs)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._clocks: dict[str, Any] = {}

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start to compile the candidates."""
        for config in configs:
            self._compilers.begin(task, config)

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        """Compile, check and time a candidate."""
        compiled = self._compilers.resources(task, config)
        if isinstance(compiled, Outcome):
            return compiled
        resources, seconds = compiled
        reason = space_for(task).too_much(resources._replace(spills=0), task.query.architecture)
        if reason:  # spilling is no reason here: the kernel may still be fast
            return Outcome("compile_error", error=reason, phases={"compile": seconds})
        (outcome,) = self._ask("run", task, [dict(config)], best)
        return Outcome(outcome.status, outcome.ms, outcome.error, {"compile": seconds, **outcome.phases})

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        """Time the finalists again, in turns."""
        return self._ask("finals", task, [dict(c) for c in configs], math.inf)

    def provenance(self, task: Task) -> dict[str, Any]:
        """Return versions, and the card's clock and load after the last measurement."""
        return {**current(task.query.backend), **self._clocks}

    def close(self) -> None:
        """Stop the compilers and the worker."""
        self._compilers.close()
        self._stop()

    def _ask(self, what: str, task: Task, configs: list[Config], best: float) -> list[Outcome]:
        started = self._process is None
        if self._process is None:
            with spawning() as method:
                self._pipe, theirs = method.Pipe()
                self._process = method.Process(target=_serve, args=(theirs, self.device), daemon=True)
                self._process.start()
            theirs.close()
        assert self._pipe is not None
        patience = (FIRST if started else PATIENCE) * (1 if what == "run" else len(configs))
        try:
            self._pipe.send((what, task, configs, best))
            if not self._pipe.poll(patience):
                self._stop()
                return [Outcome("timeout", error=f"no answer within {patience:g} s")] * len(configs)
            outcomes, fatal, self._clocks = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self._stop()
            return [Outcome("crash", error=f"the measuring process ended with status {code}")] * len(configs)
        except KeyboardInterrupt:
            self._stop()
            raise
        if fatal:
            self._stop()
        answers: list[Outcome] = outcomes
        return answers

    def _stop(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


# --- in the worker process ------------------------------------------------------------------------------------------


def _serve(pipe: Connection, device: str) -> None:
    """Answer requests until the parent closes the pipe."""
    enter()
    bench: Any = None
    while True:
        try:
            what, task, configs, best = pipe.recv()
        except EOFError:
            return
        from .bench import Bench  # imports PyTorch

        if bench is None or bench.task.problem != task.problem or bench.task.query.backend != task.query.backend:
            bench = None  # free its memory first
            bench = Bench(task, device)
        bench.task = task
        if what == "run":
            outcomes, fatal = _run(bench, configs[0], best)
        else:
            outcomes, fatal = _finals(bench, configs)
        pipe.send((outcomes, fatal, clocks(device)))


def _run(bench: Any, config: Config, best: float) -> tuple[list[Outcome], bool]:
    start = time.perf_counter()
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


def _finals(bench: Any, configs: list[Config]) -> tuple[list[Outcome], bool]:
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
