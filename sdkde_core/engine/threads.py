"""Threads of a CPU: how many a call may use, and tasks shared out over them."""

from __future__ import annotations

import operator
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

A = TypeVar("A")
R = TypeVar("R")


def check_threads(threads: Any) -> int | None:
    """Return the option ``threads`` of a backend; ValueError for what is neither None nor a positive integer."""
    if threads is not None and (isinstance(threads, bool) or operator.index(threads) < 1):
        raise ValueError(f"threads is {threads!r}; pass a positive integer")
    return None if threads is None else operator.index(threads)


class _Stopped(BaseException):
    """Ends a task whose call was interrupted, or has another task that failed."""


_here = threading.local()  # the call that this thread works for, and the listener to calls that it makes


class telling:
    """Call ``advance`` with the rows done, whenever a task of ``map_threads(…, told=True)`` ends, and at the end."""

    def __init__(self, rows: int, advance: Callable[[int], None]) -> None:
        self._rows, self._advance, self._done = rows, advance, 0

    def _tell(self, share: float) -> None:
        more, self._done = int(share * self._rows) - self._done, max(self._done, int(share * self._rows))
        _here.tell = None  # ``advance`` may estimate something itself
        try:
            if more > 0:
                self._advance(more)
        except (Exception, SystemExit) as error:  # the user's error, not the backend's that calls this
            raise _Stopped from error
        _here.tell = self._tell

    def __enter__(self) -> None:
        _here.tell = self._tell

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self._tell(1.0)
        except _Stopped as stopped:
            error = stopped
        finally:
            _here.tell = None
        if isinstance(error, _Stopped):
            raise error.__cause__ or error from None


def map_threads(
    task: Callable[[A], R], arguments: Sequence[A], threads: int, *, apart: bool = False, pool: Executor | None = None,
    told: bool = False,
) -> list[R]:  # fmt: skip
    """Return ``[task(a) for a in arguments]``, computed by up to ``threads`` threads that end with the call.

    After an exception no further task begins, and those that run end at their next :func:`checkpoint`. Where no thread
    can be started the calling one does the work. ``apart`` leaves the calling thread idle, also for a single task: so
    an interrupt need not wait for tasks without checkpoints. ``pool`` has threads to use instead of new ones, and
    implies ``apart``. ``told``: the tasks together sum all rows of a call, and after each the user's ``progress`` gets
    the rows done.
    """
    threads, tell = min(threads, len(arguments)), getattr(_here, "tell", None) if told else None
    if threads < 1 or (threads == 1 and not apart and pool is None and tell is None):
        return [task(a) for a in arguments]
    call, running, share = _Call(task, arguments), list[Future[None]](), 0.0
    workers = pool or ThreadPoolExecutor(threads, thread_name_prefix="sdkde")
    try:
        with suppress(RuntimeError):  # no more threads can be started, or the process is ending
            for _ in range(threads):
                running.append(workers.submit(call.run))
        if not running:
            call.run()
        while not call.stopped and share < 1.0:
            if not call.listen(0.1) and not call.inside:  # an interrupt does not always wake a thread that waits
                for one in running:
                    if one.done():
                        one.result()  # raises where the pool itself failed
            share = len(call.finished) / len(arguments)
            if tell is not None:
                tell(0.99 * share)  # outliers' sums and the merge come after the last task
        if call.error is not None:
            raise call.error
        return call.results
    finally:
        call.stopped, call.error = True, None  # an error that is kept would keep the arrays of its frames
        end = time.monotonic() + 0.25  # seconds; threads that reach no checkpoint until then finish by themselves
        while call.inside and time.monotonic() < end:
            call.listen(0.25)
        if pool is None:
            workers.shutdown(wait=not call.inside, cancel_futures=True)


class _Call:
    """Tasks that several threads take in turn, until there is none or the call is stopped.

    The calling thread waits for a SimpleQueue: the lock of a future could stay locked after an interrupt.
    """

    def __init__(self, task: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
        self.task, self.arguments = task, arguments
        self.left = deque(range(len(arguments)))
        self.results: list[Any] = [None] * len(arguments)
        self.finished: list[int] = []
        self.inside: list[int] = []  # threads
        self.stopped = False
        self.error: BaseException | None = None
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def listen(self, seconds: float) -> bool:
        """Return whether a thread ends its work within so many seconds."""
        with suppress(queue.Empty):
            self.bell.get(timeout=seconds)
            return True
        return False

    def run(self) -> None:
        before, _here.call = getattr(_here, "call", None), self
        self.inside.append(threading.get_ident())
        try:
            while not self.stopped and self.left:
                try:
                    i = self.left.popleft()
                except IndexError:  # another thread was faster
                    break
                with np.errstate(all="ignore"):  # as in the thread that calls: NumPy's state is a thread's own
                    self.results[i] = self.task(self.arguments[i])
                self.finished.append(i)
        except _Stopped:  # by a checkpoint: the thread that stopped the call raises the reason
            pass
        except BaseException as error:
            self.error = self.error or error
            self.stopped = True
        finally:
            _here.call = before
            self.inside.remove(threading.get_ident())
            self.bell.put(None)


def checkpoint() -> None:
    """End the task that this thread works on, if its call was interrupted; tasks call it every tenth of a second."""
    call = getattr(_here, "call", None)
    if call is not None and call.stopped:
        raise _Stopped
