"""Checks of calls that follow one another, that come at once, and of whose memory is whose."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import to_host
from sdkde_core.plugin import each, merge
from sdkde_core.protocol import Columns, Partial, Problem, Reduction

from . import problems, reference
from .accuracy import COLUMNS, ROWS, about_tiles
from .formalities import has_format, overwrite
from .problems import Case, Truth
from .target import MIXED, Target, make, take, weighted, within

__all__ = [
    "column_chunks",
    "expected_rows",
    "many_alive",
    "new_contents",
    "no_rows",
    "query_chunks",
    "results_are_the_callers",
    "state_reuse",
    "threads",
]


def _problem(target: Target, case: Case, parameter: str) -> Problem:
    precision, reduction = parameter.split("-")
    return target.whole_problem(case, Reduction(reduction), precision)


def _near(case: Case, same: bool = False) -> Truth:
    return reference.near_sums(case.points if same else case.queries, case.points, case.log_weights)


def state_reuse(target: Target, parameter: str) -> None:
    """A prepared state serves many calls, each as if it were the first, whatever else was prepared meanwhile."""
    case, other = (about_tiles(n, ROWS, 3, 10.0) for n in (COLUMNS, 130))
    problem = _problem(target, case, parameter)
    state, truth = target.prepare(problem, case), _near(case)
    for start, stop in ((0, 67), (0, 67), (60, 61), (5, 66), (0, 67)):
        part = replace(problem, m=stop - start)
        got = target.reduce(part, case.queries[start:stop], state)
        within(part, got, take(truth, slice(start, stop)), f"rows {start} to {stop} of {case.name}")
    second = replace(problem, n=130)
    others = target.prepare(second, other)
    within(
        problem, target.reduce(problem, case.queries, state), truth, f"{case.name}, after another state was prepared"
    )
    within(second, target.reduce(second, other.queries, others), _near(other), "another state")
    within(problem, target.reduce(problem, case.queries, state), truth, f"{case.name}, after another state was used")


def no_rows(target: Target, parameter: str) -> None:
    """An empty query gives empty results of the right shapes, and leaves the state as it was."""
    precision, reduction = parameter.split("-")
    case = about_tiles(31, 9, 3, 10.0)
    empty = replace(case, queries=case.queries[:0])
    problem = target.problem(empty, Reduction(reduction), precision)
    has_format(problem, target.answer(problem, empty), case.points)
    problem = _problem(target, case, parameter)
    nothing, state, truth = replace(problem, m=0), target.prepare(replace(problem, m=0), case), _near(case)
    for _ in range(2):
        has_format(nothing, target.reduce(nothing, empty.queries, state), case.points)
        within(problem, target.reduce(problem, case.queries, state), truth, f"{case.name}, after an empty query")


def expected_rows(target: Target, parameter: str) -> None:
    """The m and ``same`` that ``prepare`` is told are what to expect, not what will come."""
    case = about_tiles(130, 300, 3, 10.0)
    problem = _problem(target, case, parameter)
    for m, same in ((0, False), (7, False), (130, True)):
        state = target.prepare(replace(problem, m=m, same=same), case)
        told = f"{case.name}, prepared for {m} rows"
        for rows in (300, 1):
            part = replace(problem, m=rows)
            within(part, target.reduce(part, case.queries[:rows], state), take(_near(case), slice(rows)), told)
        whole = replace(problem, m=130, same=True)
        within(whole, target.reduce(whole, None, state), _near(case, same=True), told)
    state = target.prepare(replace(problem, extent=50.0), case)
    within(problem, target.reduce(problem, case.queries, state), _near(case), f"{case.name}, prepared for more extent")


def query_chunks(target: Target, parameter: str) -> None:
    """A row's answer does not depend on the rows beside it, however far those are."""
    case = make("tails", COLUMNS, ROWS, 3, 100.0)
    problem = _problem(target, case, parameter)
    truth, state = problems.truth(case), target.prepare(problem, case)
    for width in (67, 1, 13):
        for start in range(0, 67, width):
            stop = min(start + width, 67)
            part = replace(problem, m=stop - start)
            got = target.reduce(part, case.queries[start:stop], state)
            within(part, got, take(truth, slice(start, stop)), f"tails, rows {start} to {stop}")


def column_chunks(target: Target, parameter: str) -> None:
    """Reductions over chunks of columns, merged by the core, equal one over all."""
    case = make("weights" if "weights" in target.info.features else "mixture", COLUMNS, ROWS, 3, 10.0)
    problem = _problem(target, case, parameter)
    kept, parts = np.flatnonzero(np.isfinite(case.log_weights)), []
    for columns in np.array_split(kept, [1, 60, 100]):
        part = replace(problem, n=len(columns))
        chunk = replace(case, points=case.points[columns], log_weights=case.log_weights[columns])
        parts.append(target.reduce(part, case.queries, target.prepare(part, chunk)))
    within(problem, merge(parts), problems.truth(case), f"{case.name}, columns in four chunks")


def results_are_the_callers(target: Target, parameter: str) -> None:
    """A result stays as it is when others are asked for, and writing into it changes no other."""
    case, other = about_tiles(COLUMNS, ROWS, 3, 10.0), about_tiles(COLUMNS, ROWS, 3, 10.0, seed=1)
    problem = _problem(target, case, parameter)
    state, others, truth = target.prepare(problem, case), target.prepare(problem, other), _near(case)
    first = target.backend.reduce(problem, target.give(case.queries), state)
    kept = each(first, lambda x: np.array(to_host(x)))
    within(problem, kept, truth, case.name)
    for m, told in ((ROWS, "rows as many"), (20, "fewer rows")):
        part = replace(problem, m=m)
        for asked, whose in ((state, "of the same state"), (others, "of another state")):
            target.reduce(part, other.queries[:m], asked)
            _unchanged(first, kept, f"a call for {told} {whose} changed an earlier result")
    whole = replace(problem, m=COLUMNS, same=True)
    results = [first, target.backend.reduce(whole, None, state), target.backend.reduce(whole, None, state)]
    for result in results:
        each(result, overwrite)
    told = f"{case.name}, after earlier results were written to"
    within(problem, target.reduce(problem, case.queries, state), truth, told)
    within(whole, target.reduce(whole, None, state), _near(case, same=True), told)


def many_alive(target: Target, parameter: str) -> None:
    """Twenty states and forty results serve side by side: none is in a place that a later one takes."""
    cases = [about_tiles(37, 9, 3, 10.0, seed) for seed in range(20)]
    problem = _problem(target, max(cases, key=lambda case: _extent(case)), parameter)
    states = [target.prepare(problem, case) for case in cases]
    results = [
        (case, target.backend.reduce(problem, target.give(case.queries), state))
        for _ in range(2)
        for case, state in zip(cases, states, strict=True)
    ]
    for k, (case, result) in enumerate(results):
        within(problem, each(result, to_host), _near(case), f"result {k} of {len(results)}, each of one of 20 states")


def _extent(case: Case) -> float:
    return case.problem(Reduction.LOG_SUM, "high").extent


def new_contents(target: Target, parameter: str) -> None:
    """Points, weights or queries that come in the memory of earlier ones are new: their addresses are no names.

    The first and the last row and the sum of all rows are as before, so neither are those.
    """
    case = about_tiles(COLUMNS, ROWS, 3, 10.0)
    case = weighted(case) if "weights" in target.info.features else case
    moved = {name: _mixed(getattr(case, name)) for name in ("points", "queries")}
    moved |= {"log_weights": _mixed(case.log_weights)} if "weights" in target.info.features else {}
    problem = _problem(target, case, parameter)
    problem = replace(problem, extent=max(_extent(replace(case, **{k: v})) for k, v in moved.items()))
    given = {name: target.give(getattr(case, name).copy()) for name in ("points", "log_weights", "queries")}

    def ask(state: Any, about: str) -> Any:
        """Check the answer of a state, or of a new one."""
        state = state or target.backend.prepare(problem, Columns(given["points"], given["log_weights"]))
        within(problem, each(target.backend.reduce(problem, given["queries"], state), to_host), _near(case), about)
        return state

    for name, new in moved.items():
        state = ask(None, case.name)
        case = replace(case, **{name: new})
        state = state if name == "queries" else None  # while a state lives, its columns stay as they are
        given[name][...] = target.give(new)
        ask(state, f"{case.name}, after new {name} in the memory of the old")


def _mixed(x: Any) -> Any:
    """Return rows of the same first and last one and the same sum: those between are turned about their middle."""
    between = x[1:-1]
    return np.concatenate([x[:1], 2.0 * between.mean(axis=0) - between, x[-1:]])


def _unchanged(result: Partial, kept: Partial, message: str) -> None:
    for name in ("log_sum", "shift", "sign", "log_magnitude"):
        was = getattr(kept, name)
        assert was is None or np.array_equal(to_host(getattr(result, name)), was), f"{name}: {message}"


#: Threads that call at once, how often each does, and how often each of these calls lets others run.
CALLERS, CALLS, PAUSES = 4, 2, 40


def threads(target: Target, parameter: str) -> None:
    """Calls from several threads at once, with one state and with a state each, are answered as if they were alone."""
    precision, name = parameter.split("-")
    cases = [about_tiles(COLUMNS, ROWS, 3, 10.0, seed) for seed in range(CALLERS)]
    for requires in (frozenset[str](), target.info.features & MIXED):
        if "weights" in requires:
            cases = [weighted(case) for case in cases]
        asked = [target.whole_problem(case, Reduction(name), precision, requires=requires) for case in cases]
        _threads(target, cases, replace(asked[0], extent=max(problem.extent for problem in asked)))


def _threads(target: Target, cases: list[Case], problem: Problem) -> None:
    queries = [target.give(case.queries) for case in cases]

    def truth(rows: Case, columns: Case) -> Truth:
        own = "exclude_self" in problem.requires
        return reference.near_sums(rows.queries, columns.points, columns.log_weights, own)

    state, shared = target.prepare(problem, cases[0]), [truth(case, cases[0]) for case in cases]
    apart = [truth(case, case) for case in cases]

    def ask(k: int) -> Iterator[tuple[Partial, Truth, str]]:
        for call in range(CALLS):
            part = replace(problem, dtype=("float64", "float32")[call % 2])
            with _pauses():
                got = target.backend.reduce(part, queries[k], state)
            yield got, shared[k], "one state, several threads"
            with _pauses():
                got = target.backend.reduce(part, queries[k], target.prepare(part, cases[k]))
            yield got, apart[k], "a state for each of several threads"

    for got, want, about in _at_once(ask):
        within(problem, each(got, to_host), want, about)


def _at_once(ask: Callable[[int], Iterator[Any]]) -> list[Any]:
    """Run ``ask(k)`` in a thread for each k, all from the same moment; return what they yield."""
    together = threading.Barrier(CALLERS)
    found: list[Any] = []
    raised: list[Exception] = []

    def run(k: int) -> None:
        together.wait()
        try:
            found.extend(ask(k))
        except Exception as error:
            raised.append(error)

    running = [threading.Thread(target=run, args=(k,)) for k in range(CALLERS)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if raised:
        raise AssertionError(f"from several threads: {type(raised[0]).__name__}: {raised[0]}") from raised[0]
    return found


@contextmanager
def _pauses() -> Iterator[None]:
    """Let other threads run whenever this one enters or leaves a function: what they share is then overwritten."""
    events, before = 0, sys.getprofile()

    def pause(*event: Any) -> None:
        nonlocal events
        events += 1
        if events % 7 == 1 and events < 7 * PAUSES:
            time.sleep(1e-6)

    sys.setprofile(pause)
    try:
        yield
    finally:
        sys.setprofile(before)
