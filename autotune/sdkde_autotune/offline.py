"""Compiling for a card that is not here: candidates get a predicted time, or the reason why they must not run."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from sdkde_core.choice import cards, cost, registry
from sdkde_core.choice.cards import GPU
from sdkde_core.tuning import Compiled, Config, Space, space_of

from .measure import Outcome, Task
from .provenance import current

__all__ = ["Compilers", "OfflineRunner", "first_line", "space_for"]

#: Seconds after which a compiler is given up.
PATIENCE = 120.0


class Compilers:
    """Compilers side by side, each a process of its own, which may crash or hang."""

    def __init__(self, jobs: int) -> None:
        self.jobs = max(1, jobs)
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: dict[Any, Future[tuple[Compiled, float]]] = {}

    def submit(self, task: Task, config: Config) -> Future[tuple[Compiled, float]]:
        """Begin to compile a candidate, unless that was begun before."""
        name = _name(task, config)
        if name not in self._ahead:
            if self._pool is None:
                # A fresh interpreter: the parent may have PyTorch's threads, or Triton's interpreter, loaded.
                method = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.jobs, mp_context=method, initializer=_compiler_only)
            self._ahead[name] = self._pool.submit(_compile, task, dict(config))
        return self._ahead[name]

    def result(self, task: Task, config: Config) -> tuple[Compiled, float] | Outcome:
        """What compiling told and how long it took, in seconds; or why there is nothing."""
        try:
            return self.submit(task, config).result(PATIENCE)
        except TimeoutError:
            self._kill()
            return Outcome("timeout", error=f"did not compile within {PATIENCE:g} s")
        except BrokenProcessPool:
            self._kill()
            return Outcome("crash", error="the compiler's process died")
        except Exception as error:  # whatever a compiler raises says that it did not compile
            return Outcome("compile_error", error=first_line(error))
        finally:
            self._ahead.pop(_name(task, config), None)

    def close(self) -> None:
        """Stop them."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._ahead = None, {}

    def _kill(self) -> None:
        """Replace all; what they had not finished is asked for again when its turn comes."""
        if self._pool:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self.close()


class OfflineRunner:
    """A :class:`~sdkde_autotune.measure.Runner` that runs nothing: compiled resources, and the cost model's time.

    Parameters
    ----------
    card : GPU
        Whose figures to take.
    jobs : int
        Compilers side by side.
    """

    source = "predicted"

    def __init__(self, card: GPU, jobs: int) -> None:
        self.card, self._compilers = card, Compilers(jobs)

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start compiling."""
        for config in configs:
            self._compilers.submit(task, config)

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        """Compile a candidate, and price it."""
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
        """The same again: a prediction has no noise."""
        return [self.run(task, config, float("inf")) for config in configs]

    def provenance(self, task: Task) -> dict[str, Any]:
        """Versions of what compiled, and on whose figures the times rest."""
        return {**current(task.query.backend), "driver": "", "card": self.card.source, "model": _cost_model()}

    def close(self) -> None:
        """Stop the compilers."""
        self._compilers.close()


@functools.cache
def _cost_model() -> str:
    """A hash of what prices candidates besides the backend itself: under another one they are priced anew."""
    text = b"".join(Path(str(module.__file__)).read_bytes() for module in (cost, cards))
    return hashlib.sha256(text).hexdigest()[:16]


def space_for(task: Task) -> Space:
    """What can be tuned of the task's backend."""
    record = registry.find(task.query.backend)
    space = space_of(record.info) if record and record.info else None
    if space is None:
        raise ValueError(f"backend {task.query.backend!r} has nothing to tune")
    return space


def first_line(error: BaseException) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _compiler_only() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(task: Task, config: Config) -> tuple[Compiled, float]:
    start = time.perf_counter()
    compiled = space_for(task).compile(task.query.kernel, config, task.problem, task.query.architecture)
    return compiled, time.perf_counter() - start


def _name(task: Task, config: Config) -> Any:
    return task, tuple(sorted(config.items()))
