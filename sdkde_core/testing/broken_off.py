"""Checks of calls that end before their time, and of what a forked child can do: neither may wait for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from sdkde_core.protocol import Partial

from . import problems
from .accuracy import about_tiles
from .target import NotDeclared, Target, make, within

#: Seconds after which a call is taken for one that does not end.
PATIENCE = 60.0


class _Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises in the main thread, at any moment."""


def interrupts(target: Target, parameter: str) -> None:
    """A call that Ctrl-C interrupts ends, and so do later ones, whenever that comes; their answers are right."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise NotDeclared("needs timers in the main thread")
    case = about_tiles(211, 67, 3, 10.0)
    problem, truth = target.problem(case, "log_sum", target.info.precisions[0], whole=True), problems.truth(case)

    def call() -> Partial:
        return target.direct(problem, case)

    call()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    many, torch = max(2, min(10, int(0.5 / seconds))), sys.modules.get("torch")
    records = torch is None or torch.is_grad_enabled()  # which is this thread's
    for k in range(many):
        _, raised = _alarmed(call, (k + 0.5) / many * seconds)
        assert raised < 2, f"a call that was interrupted did not end within {PATIENCE:g} s"
        got, raised = _alarmed(call, PATIENCE)
        assert got is not None and not raised, f"after one that was interrupted no call ends within {PATIENCE:g} s"
        within(problem, got, truth, f"{case.name}, after a call that was interrupted")
        kept = torch is None or torch.is_grad_enabled() == records
        assert kept, "a call that was interrupted has left PyTorch's recording of gradients off"


def _alarmed(call: Callable[[], Any], seconds: float) -> tuple[Any, int]:
    """Call, with an exception after ``seconds`` and one every PATIENCE; return the result and how many came."""
    raised, result = 0, None

    def alarm(number: int, frame: Any) -> None:
        nonlocal raised
        raised += 1
        raise _Interrupt

    def unraisable(lost: Any) -> None:  # Python drops what is raised in a destructor, and tells
        if not isinstance(lost.exc_value, _Interrupt):
            tell(lost)

    tell, sys.unraisablehook = sys.unraisablehook, unraisable
    handler, timer = signal.signal(signal.SIGALRM, alarm), signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), PATIENCE)
        result = call()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Interrupt:  # our own, and counted
        pass
    except RuntimeError as error:  # of a lock of Python's own that ours broke off; the core sees what it came of
        if not isinstance(error.__context__, _Interrupt):
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
        sys.unraisablehook = tell
    return result, raised


def forked_child(target: Target, parameter: str) -> None:
    """A child that is forked after a call answers as its parent does, with its state and a new one, or raises."""
    if not sys.platform.startswith("linux") or target.device != "cpu":
        raise NotDeclared("for CPUs, where a process can go on after a fork")
    case = make("mixture", 11_000, 5, 3, 5.0)  # so many numbers that libraries share them out among threads
    problem, truth = target.problem(case, "log_sum", target.info.precisions[0], whole=True), problems.truth(case)
    state = target.prepare(problem, case)
    target.reduce(problem, case.queries, state)

    def answer() -> None:
        for each in (state, target.prepare(problem, case)):
            within(problem, target.reduce(problem, case.queries, each), truth, f"{case.name}, in a forked child")

    status = _status_of_child(answer)
    assert status is not None, f"a forked child did not answer within {PATIENCE:g} s"
    assert status == 0, "a forked child's answers are wrong, or it crashes"


def _status_of_child(call: Callable[[], None]) -> int | None:
    """Call in a forked child: 0, also if it raises what is no AssertionError; None if it does not end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are other threads
        child = os.fork()
    if not child:
        status = 1
        try:
            call()
            status = 0
        except Exception as error:
            status = int(isinstance(error, AssertionError))
        finally:
            os._exit(status)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
