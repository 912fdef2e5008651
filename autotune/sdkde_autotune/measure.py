"""Trying candidates: compiled side by side, for any card, then checked and timed in a worker process.

A candidate may make its process hang, crash, run out of memory or lose its CUDA context; the process is then replaced.
"""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import os
import signal
import statistics
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import sdkde_core
from sdkde_core.choice import hardware, registry
from sdkde_core.fresh import spawning
from sdkde_core.tuning import Config

from .records import Task, Trial


class Failed(Exception):
    """A candidate did not run; the arguments are its status, see :class:`~sdkde_autotune.records.Trial`, and why."""


class MeasuringRunner:
    """Tries candidates on ``"cpu"`` or ``"cuda:0"``."""

    def __init__(self, device: str, compilers: int = 1) -> None:
        self.device, self._compilers = device, Pool(compilers)
        # For its first answer the worker imports PyTorch or Numba, and makes data.
        self._worker = Pool(1, patience=180.0, failure="crash")

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Start to compile the candidates that will be run next."""
        for config in configs if self.device != "cpu" else ():
            self._compilers.submit(*compiling(task, config))

    def run(self, task: Task, config: Config, slow: Callable[[int, float], bool]) -> Trial:
        """Compile, check and time a candidate, until ``slow(number of timings, median so far)``, in milliseconds."""
        times: list[float] = []
        try:
            if self.device != "cpu":
                self._compilers.compiled(task, config, spills=True)  # the kernel may still be fast
            self._ask(task, "check", dict(config))
            for count in 3, 6, 12:
                if times and slow(len(times), statistics.median(times)):
                    break
                times += self._ask(task, "times", [dict(config)], count)[0]
        except Failed as failed:
            return Trial(task.key, config, *failed.args)
        return Trial(task.key, config, ms=_quantiles(times))

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Trial]:
        """Time finalists again, in turns, so that a drifting clock affects all alike; Failed if one does not run."""
        every = self._ask(task, "times", list(map(dict, configs)), 25)
        return [Trial(task.key, c, ms=_quantiles(times), final=True) for c, times in zip(configs, every)]

    def close(self) -> None:
        self._compilers.close()
        self._worker.close()

    def _ask(self, task: Task, method: str, *arguments: Any) -> Any:
        """Return what a method of the worker's :class:`~sdkde_autotune.bench.Bench` gives."""
        return self._worker.result(object(), _measure, self.device, task, method, *arguments)


def _quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    ordered, last = sorted(times), len(times) - 1  # interpolated quantiles of equal times need not ascend
    return ordered[round(0.2 * last)], statistics.median(ordered), ordered[round(0.8 * last)]


def compiling(task: Task, config: Config) -> tuple[Any, ...]:
    """Return a :class:`Pool`'s arguments that compile a candidate, by a name that problems of all sizes share."""
    query = task.query
    name = query.backend, query.architecture, task.space.code(query.kernel, config, task.problem)
    return name, task.space.compile, query.kernel, dict(config), task.problem, query.architecture


class Pool:
    """Fresh interpreters side by side: this one may have PyTorch's threads, or Triton's interpreter, loaded.

    Work is given up after ``patience`` seconds. If it raises, the status is ``failure``.
    """

    def __init__(self, jobs: int, patience: float = 120.0, failure: str = "compile_error") -> None:
        self.jobs, self.patience, self.failure = jobs, patience, failure
        self._pool: ProcessPoolExecutor | None = None
        self.begun: dict[Hashable, Future[Any]] = {}

    def submit(self, name: Hashable, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start work, unless work of that name was begun before."""
        if name not in self.begun:
            with spawning() as method:
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(self.jobs, method, _enter)
                self.begun[name] = self._pool.submit(work, *arguments)
        return self.begun[name]

    def result(self, name: Hashable, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what work gives; raise Failed if it raises, takes too long, or its process dies."""
        try:
            return self.submit(name, work, *arguments).result(self.patience)
        except TimeoutError:
            failed = Failed("timeout", f"took more than {self.patience:g} s")
        except BrokenProcessPool:
            failed = Failed("crash", "its process died")
        except Exception as error:  # whatever a compiler raises
            failed = error if isinstance(error, Failed) else Failed(self.failure, _first_line(error))
        if failed.args[0] in ("timeout", "crash"):
            self.close()
        raise failed

    def compiled(self, task: Task, config: Config, spills: bool = False) -> None:
        """Compile a candidate; raise Failed if that fails, it needs too much, or spills and must not."""
        found = self.result(*compiling(task, config))
        if reason := task.space.too_much(found._replace(spills=0) if spills else found, task.query.architecture):
            raise Failed("compile_error", reason)

    def close(self) -> None:
        """Kill the processes, and what they have started. Work is begun again when it is asked for."""
        if self._pool:
            for process in list((self._pool._processes or {}).values()):
                if process.pid and hasattr(os, "killpg"):
                    with suppress(OSError):  # it does not lead its group yet, or has ended
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self.begun = None, {}


def _enter() -> None:
    """Make this process lead a group, which a terminal's Ctrl-C does not reach; the group ends with the tuner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported, which is yet to come
    parent = multiprocessing.parent_process()
    assert parent is not None

    def outlive() -> None:
        wait([parent.sentinel])
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=outlive, daemon=True).start()


_bench: Any = None


def _measure(device: str, task: Task, method: str, *arguments: Any) -> Any:
    """Return what a method of the bench gives; the bench keeps a problem's data."""
    from .bench import Bench, CudaBench

    global _bench
    if _bench is None or _bench.task.problem != task.problem or _bench.task.query.backend != task.query.backend:
        _bench = None  # free its memory first
        _bench = (Bench if device == "cpu" else CudaBench)(task, device)
    _bench.task = task
    try:
        return getattr(_bench, method)(*arguments)
    except Failed:
        raise
    except Exception as error:
        raise Failed(_bench.status(error), _first_line(error)) from None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@functools.cache
def versions(backend: str) -> dict[str, str]:
    """Return the versions that a backend runs under; empty text for what is not here.

    ``source`` is a hash of the backend's Python files: outcomes of other code are measured again.
    """
    found = {"sdkde": sdkde_core.__version__, "driver": hardware.driver_version() or "", "source": ""}
    for name in "triton", "torch", "numba":
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    record = registry.find(backend)
    if record and record.info:
        package = importlib.import_module(record.info.implementation.partition(":")[0].partition(".")[0])
        folders, code = getattr(package, "__path__", ()), 0
        files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
        for path in files or [Path(str(package.__file__))]:
            code = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes() + b"\0", code)
        found["source"] = f"{code:08x}"
    return found
