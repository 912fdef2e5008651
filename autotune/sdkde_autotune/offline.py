"""Compiling for any card, here or not, and a runner that predicts times instead of measuring them."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from sdkde_core.choice import cards, cost, registry
from sdkde_core.choice.cards import GPU
from sdkde_core.plugin import spawning
from sdkde_core.tuning import Compiled, Config, Space, space_of

from .provenance import current
from .runner import Outcome, Task

__all__ = ["Compilers", "OfflineRunner", "first_line", "space_for"]

#: Seconds after which a compiler is stopped.
PATIENCE = 120.0


class Compilers:
    """Compiler processes side by side. Each may crash or hang without harm to this process."""

    def __init__(self, jobs: int) -> None:
        self.jobs = max(1, jobs)
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: dict[Any, Future[tuple[Compiled, float]]] = {}

    def submit(self, task: Task, config: Config) -> Future[tuple[Compiled, float]]:
        """Start to compile a candidate, unless it was started before."""
        name = _name(task, config)
        if name not in self._ahead:
            # Fresh interpreters: the parent may have PyTorch's threads, or Triton's interpreter, loaded.
            with spawning() as method:
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(self.jobs, mp_context=method, initializer=_compiler_only)
                self._ahead[name] = self._pool.submit(_compile, task, dict(config))  # starts a process, up to `jobs`
        return self._ahead[name]

    def result(self, task: Task, config: Config) -> tuple[Compiled, float] | Outcome:
        """Return a compiled candidate's resources and the seconds that it took; if it failed, the outcome."""
        try:
            return self.submit(task, config).result(PATIENCE)
        except TimeoutError:
            self.close()
            return Outcome("timeout", error=f"did not compile within {PATIENCE:g} s")
        except BrokenProcessPool:
            self.close()
            return Outcome("crash", error="the compiler's process died")
        except Exception as error:  # whatever the compiler raised: it did not compile
            return Outcome("compile_error", error=first_line(error))
        finally:
            self._ahead.pop(_name(task, config), None)

    def close(self) -> None:
        """Kill the processes. Candidates that were not finished are submitted again when their turn comes."""
        if self._pool:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._ahead = None, {}


class OfflineRunner:
    """A :class:`~sdkde_autotune.runner.Runner` that compiles candidates and predicts their times by the cost model.

    Parameters
    ----------
    card : GPU
        The card to compile and to predict for.
    jobs : int
        Number of compiler processes.
    """

    source = "predicted"

    def __init__(self, card: GPU, jobs: int) -> None:
        self.card, self._compilers = card, Compilers(jobs)

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start compiling."""
        for config in configs:
            self._compilers.submit(task, config)

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        """Compile a candidate, and predict its time."""
        found = self._compilers.result(task, config)
        if isinstance(found, Outcome):
            return found
        compiled, seconds = found
        phases, space = {"compile": seconds}, space_for(task)
        reason = space.too_much(compiled, task.query.architecture)
        if reason:
            return Outcome("compile_error", error=reason, phases=phases)
        ms = 1e3 * space.seconds(task.query.kernel, config, task.problem, self.card)
        return Outcome("ok", (ms, ms, ms), phases=phases)

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        """Return the outcomes once more; a prediction has no noise."""
        return [self.run(task, config, float("inf")) for config in configs]

    def provenance(self, task: Task) -> dict[str, Any]:
        """Return the versions of the compiling software, and the sources of the predicted times."""
        return {**current(task.query.backend), "driver": "", "card": self.card.source, "model": _cost_model()}

    def close(self) -> None:
        """Stop the compilers."""
        self._compilers.close()


@functools.cache
def _cost_model() -> str:
    """Return a hash of the cost model and its cards; when it changes, candidates are predicted again."""
    text = b"".join(Path(str(module.__file__)).read_bytes() for module in (cost, cards))
    return hashlib.sha256(text).hexdigest()[:16]


def space_for(task: Task) -> Space:
    """Return the search space of the task's backend."""
    record = registry.find(task.query.backend)
    space = space_of(record.info) if record and record.info else None
    if space is None:
        raise ValueError(f"backend {task.query.backend!r} has nothing to tune")
    return space


def first_line(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _compiler_only() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(task: Task, config: Config) -> tuple[Compiled, float]:
    start = time.perf_counter()
    compiled = space_for(task).compile(task.query.kernel, config, task.problem, task.query.architecture)
    return compiled, time.perf_counter() - start


def _name(task: Task, config: Config) -> Any:
    return task, tuple(sorted(config.items()))
