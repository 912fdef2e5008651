"""Processes that the tuner starts. Each may crash or hang without harm to it, and ends when the tuner does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from sdkde_core.fresh import spawning

from .records import Outcome

__all__ = ["Pool", "first_line"]


def first_line(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class Pool:
    """Fresh interpreters side by side: this one may have PyTorch's threads, or Triton's interpreter, loaded.

    Work is given up after ``patience`` seconds. If it raises, its outcome has the status ``failure``.
    """

    def __init__(self, jobs: int, patience: float = 120.0, failure: str = "compile_error") -> None:
        self.jobs, self.patience, self.failure = max(1, jobs), patience, failure
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
        """Return what work gives; if it failed, an :class:`~sdkde_autotune.records.Outcome`."""
        try:
            return self.submit(name, work, *arguments).result(self.patience)
        except TimeoutError:
            outcome = Outcome("timeout", error=f"took more than {self.patience:g} s")
        except BrokenProcessPool:
            outcome = Outcome("crash", error="its process died")
        except Exception as error:  # whatever a compiler raises
            return Outcome(self.failure, error=first_line(error))
        self.close()
        return outcome

    def close(self) -> None:
        """Kill the processes, and what they have started. Unfinished work is begun again when it is asked for."""
        if self._pool:
            for process in list((self._pool._processes or {}).values()):
                if process.pid and hasattr(os, "killpg"):
                    with suppress(OSError):  # it does not lead its group yet, or has ended
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
        done = {name: future for name, future in self.begun.items() if future.done() and not future.cancelled()}
        self.begun = {name: future for name, future in done.items() if not future.exception()}
        self._pool = None


def _enter() -> None:
    """Make this process one of the tuner's.

    It leads a process group, which a terminal's Ctrl-C does not reach: the tuner ends it. If the tuner is killed, the
    process ends itself, and the assembler that it may be running with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported, which is yet to come
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_outlive, args=(parent.sentinel,), daemon=True).start()


def _outlive(parent: int) -> None:
    wait([parent])
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
