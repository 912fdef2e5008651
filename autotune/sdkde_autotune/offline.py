"""Compiling for a card that is not here: candidates get a predicted time, or the reason why they must not run."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from sdkde_core import registry
from sdkde_core.hardware import GPU
from sdkde_core.tuning import Compiled, Config, space_of

from .measure import Outcome, Task
from .provenance import current

__all__ = ["OfflineRunner"]

#: Seconds after which a compiler is given up.
PATIENCE = 120.0


class OfflineRunner:
    """A :class:`~sdkde_autotune.measure.Runner` that runs nothing: compiled resources, and the cost model's time.

    Parameters
    ----------
    card : GPU
        Whose figures to take.
    jobs : int
        Compilers side by side; each is a process of its own, which may crash or hang.
    """

    source = "predicted"

    def __init__(self, card: GPU, jobs: int) -> None:
        self.card, self.jobs = card, max(1, jobs)
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: dict[Any, Future[tuple[Compiled, float]]] = {}

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start compiling."""
        for config in configs:
            self._submit(task, config)

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        """Compile a candidate, and price it."""
        try:
            compiled, seconds = self._submit(task, config).result(PATIENCE)
        except TimeoutError:
            self._start_again()
            return Outcome("timeout", error=f"did not compile within {PATIENCE:g} s")
        except BrokenProcessPool:
            self._start_again()
            return Outcome("crash", error="the compiler's process died")
        except Exception as error:  # whatever a compiler raises says that it did not compile
            return Outcome("compile_error", error=_line(error))
        finally:
            self._ahead.pop(_name(task, config), None)
        phases = {"compile": seconds}
        space = _space(task.query.backend)
        reason = space.too_much(compiled, task.query.architecture)
        if reason:
            return Outcome("compile_error", error=reason, phases=phases)
        ms = 1e3 * space.seconds(task.query.kernel, config, task.problem, self.card)
        return Outcome("ok", (ms, ms, ms), phases=phases)

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        """The same again: a prediction has no noise."""
        return [self.run(task, config, float("inf")) for config in configs]

    def provenance(self, task: Task) -> dict[str, Any]:
        """Versions of what compiled, and on whose figures the times rest."""
        return {**current(task.query.backend), "driver": "", "card": self.card.source}

    def close(self) -> None:
        """Stop the compilers."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._ahead = None, {}

    def _submit(self, task: Task, config: Config) -> Future[tuple[Compiled, float]]:
        name = _name(task, config)
        if name not in self._ahead:
            if self._pool is None:
                # A fresh interpreter: the parent may have PyTorch's threads, or Triton's interpreter, loaded.
                method = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.jobs, mp_context=method, initializer=_compiler_only)
            self._ahead[name] = self._pool.submit(_compile, task, dict(config))
        return self._ahead[name]

    def _start_again(self) -> None:
        """Replace all compilers; what they had not finished is asked for again when its turn comes."""
        if self._pool:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self.close()


def _compiler_only() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(task: Task, config: Config) -> tuple[Compiled, float]:
    start = time.perf_counter()
    query = task.query
    compiled = _space(query.backend).compile(query.kernel, config, task.problem, query.architecture)
    return compiled, time.perf_counter() - start


def _space(backend: str) -> Any:
    record = registry.find(backend)
    space = space_of(record.info) if record and record.info else None
    if space is None:
        raise ValueError(f"backend {backend!r} has nothing to tune")
    return space


def _name(task: Task, config: Config) -> Any:
    return task, tuple(sorted(config.items()))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
