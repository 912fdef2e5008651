"""Checks of calls that follow one another, come at once, are interrupted, or are made in a forked child."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import to_host
from sdkde_core.plugin import each
from sdkde_core.protocol import Columns, Partial, Problem

from . import problems, reference
from .accuracy import about_tiles
from .formalities import has_format
from .problems import Case, Truth
from .target import NotDeclared, Target, make, same_bits, weighted, within


class _Asked:
    """A prepared state and what is right for it."""

    def __init__(self, target: Target, problem: Problem, case: Case, expected: Problem | None = None) -> None:
        self.target, self.problem, self.case = target, problem, case
        self.state = target.prepare(expected or problem, case)

    def rows(self, about: str, start: int = 0, stop: int | None = None) -> None:
        """Assert that a batch of the queries is right."""
        queries = self.case.queries[start:stop]
        truth = Truth._make(x[start:stop] for x in problems.truth(self.case))
        problem = replace(self.problem, m=len(queries), same=False)
        got = self.target.reduce(problem, queries, self.state)
        within(problem, got, truth, f"{self.case.name}, {about}, rows from {start}")

    def points(self, about: str) -> None:
        """Assert that the points as rows are right."""
        whole = replace(self.problem, m=len(self.case.points), same=True)
        got = self.target.reduce(whole, None, self.state)
        within(whole, got, problems.truth(self.case, same=True), f"{self.case.name}, {about}")


def state_reuse(target: Target, precision: str, reduction: str) -> None:
    """A prepared state serves any number of calls, each as if it were the first, whatever states were prepared since.

    A row's answer does not depend on the rows beside it, however far those are. The m, ``same`` and extent that
    ``prepare`` is told are what to expect, not what will come. An empty query gives empty results.
    """
    case, other = (about_tiles(n, 67, 3, 10.0) for n in (211, 130))
    problem = target.problem(case, reduction, precision, whole=True)
    asked = _Asked(target, problem, case)
    for start, stop in ((0, 67), (0, 67), (60, 61), (5, 66), (0, 67)):
        asked.rows("one state", start, stop)
    others = _Asked(target, replace(problem, n=130), other)
    asked.rows("after another state was prepared")
    others.rows("another state")
    asked.rows("after another state was used")
    nothing, none = replace(problem, m=0), replace(case, queries=case.queries[:0])
    has_format(nothing, target.answer(nothing, none), case.points)
    asked = _Asked(target, problem, case, expected=nothing)
    for _ in range(2):
        has_format(nothing, target.reduce(nothing, none.queries, asked.state), case.points)
        asked.rows("after an empty query")
    case = about_tiles(130, 300, 3, 10.0)
    problem = target.problem(case, reduction, precision, whole=True)
    for m, same, extent in ((0, False, None), (7, False, None), (130, True, None), (300, False, 50.0)):
        told = replace(problem, m=m, same=same, extent=extent or problem.extent)
        asked, about = _Asked(target, problem, case, told), f"prepared for {m} rows within {told.extent:.3g}"
        asked.rows(about)
        asked.rows(about, 0, 1)
        asked.points(about)
    with contextlib.suppress(NotDeclared):
        far = make("tails", 211, 67, 3, 100.0)
        beside = _Asked(target, target.problem(far, reduction, precision, whole=True), far)
        for width in (67, 1, 13):
            for start in range(0, 67, width):
                beside.rows(f"{width} at once", start, start + width)


def results_are_the_callers(target: Target, precision: str, reduction: str) -> None:
    """A result stays as it is when others are asked for, and writing into it changes no other."""
    case, other = about_tiles(211, 67, 3, 10.0), about_tiles(211, 67, 3, 10.0, seed=1)
    problem = target.problem(case, reduction, precision, whole=True)
    asked, others = _Asked(target, problem, case), target.prepare(problem, other)
    first = target.backend.reduce(problem, target.give(case.queries), asked.state)
    kept = each(first, lambda x: np.array(to_host(x)))
    within(problem, kept, problems.truth(case), case.name)
    for m in (67, 20):
        for state, whose in ((asked.state, "the same state"), (others, "another state")):
            target.reduce(replace(problem, m=m), other.queries[:m], state)
            same_bits(first, kept, f"a call for {m} rows of {whose} changed an earlier result")
    whole = replace(problem, m=211, same=True)
    for result in (first, *(target.backend.reduce(whole, None, asked.state) for _ in range(2))):
        each(result, lambda x: x.__setitem__(..., np.nan))
    asked.rows("after earlier results were written to")
    asked.points("after earlier results were written to")


def many_alive(target: Target, precision: str, reduction: str) -> None:
    """Twenty states and forty results serve side by side: none is in a place that a later one takes."""
    cases = [about_tiles(37, 9, 3, 10.0, seed) for seed in range(20)]
    problem = _farthest(target, cases, reduction, precision)
    asked = [_Asked(target, problem, case) for case in cases] * 2
    results = [target.backend.reduce(problem, target.give(one.case.queries), one.state) for one in asked]
    for k, (one, result) in enumerate(zip(asked, results, strict=True)):
        about = f"result {k} of {len(results)}, each of one of 20 states"
        within(problem, each(result, to_host), problems.truth(one.case), about)


def _farthest(target: Target, cases: list[Case], reduction: str, precision: str) -> Problem:
    posed = [target.problem(case, reduction, precision, whole=True) for case in cases]
    return max(posed, key=lambda problem: problem.extent)


def new_contents(target: Target, precision: str, reduction: str) -> None:
    """Points, weights or queries in the memory of earlier ones are new data: an address does not identify them.

    Their first and last rows and the sum of all rows are as before, so these do not identify them either.
    """
    case, names = about_tiles(211, 67, 3, 10.0), ["points", "queries"]
    if "weights" in target.info.features:
        case, names = weighted(case), [*names, "log_weights"]
    moved: dict[str, Any] = {}
    for name in names:  # rows between the first and the last are turned about their middle
        first, *between, last = getattr(case, name)
        moved[name] = np.stack([first, *(2.0 * np.mean(between, axis=0) - between), last])
    cases = [case, *(replace(case, **{name: new}) for name, new in moved.items())]
    problem = _farthest(target, cases, reduction, precision)
    given = {name: target.give(getattr(case, name).copy()) for name in ("points", "log_weights", "queries")}
    columns = Columns(given["points"], given["log_weights"])

    def ask(state: Any, about: str) -> None:
        within(problem, target.reduce(problem, given["queries"], state), problems.truth(case), about)

    for name, new in moved.items():
        state = target.backend.prepare(problem, columns)
        ask(state, case.name)
        case = replace(case, **{name: new})
        if name != "queries":
            state = None  # while a state lives, its columns stay as they are
        given[name][...] = target.give(new)
        state = target.backend.prepare(problem, columns) if state is None else state
        ask(state, f"{case.name}, after new {name} in the memory of the old")


def threads(target: Target, precision: str, reduction: str) -> None:
    """Calls from several threads at once, with one state and with a state each, are answered as if they were alone."""
    plain = [about_tiles(211, 67, 3, 10.0, seed) for seed in range(4)]
    uneven = [[weighted(case) for case in plain]] * ("weights" in target.info.features)
    for cases in (plain, *uneven):
        _threads(target, cases, _farthest(target, cases, reduction, precision))


def _threads(target: Target, cases: list[Case], problem: Problem) -> None:
    queries, state = [target.give(case.queries) for case in cases], target.prepare(problem, cases[0])
    together = threading.Barrier(len(cases))

    def ask(k: int) -> list[tuple[Partial, Case, str]]:
        together.wait()
        found = []
        for dtype, own in itertools.product(("float64", "float32"), (False, True)):
            part, over = replace(problem, dtype=dtype), cases[k if own else 0]
            with _pauses():
                got = target.backend.reduce(part, queries[k], target.prepare(part, over) if own else state)
            found.append((got, over, "a state for each of several threads" if own else "one state, several threads"))
        return found

    with ThreadPoolExecutor(len(cases)) as pool:
        try:
            answers = list(pool.map(ask, range(len(cases))))
        except Exception as error:
            raise AssertionError(f"from several threads: {type(error).__name__}: {error}") from error
    for case, found in zip(cases, answers):
        for got, over, about in found:
            truth = reference.sums(case.queries, over.points, over.log_weights, plain=True)
            within(problem, each(got, to_host), truth, about)


@contextlib.contextmanager
def _pauses() -> Iterator[None]:
    """Let other threads run when this one enters or leaves functions: what they share is then overwritten."""
    events, before = itertools.count(1), sys.getprofile()

    def pause(*event: Any) -> None:
        k = next(events)
        if k % 7 == 1 and k < 280:
            time.sleep(1e-6)

    sys.setprofile(pause)
    try:
        yield
    finally:
        sys.setprofile(before)


# --- calls that end before their time: neither they nor others may wait for ever --------------------------------------

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
    call = functools.partial(target.direct, problem, case)
    call()
    seconds = min(timeit.repeat(call, number=1, repeat=5))
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
        for one in (state, target.prepare(problem, case)):
            within(problem, target.reduce(problem, case.queries, one), truth, f"{case.name}, in a forked child")

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
