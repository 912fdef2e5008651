"""A backend under test: how checks ask it, what they ask it about, and how they compare."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.arrays import convert, to_host
from sdkde_core.engine.outliers import within_limit
from sdkde_core.plugin import each
from sdkde_core.protocol import Backend, BackendInfo, Columns, Partial, Problem

from . import problems
from .problems import Case, Truth

__all__ = ["MIXED", "NotDeclared", "Profile", "Target", "make", "same_bits", "take", "threads_set", "weighted"]
__all__ += ["within"]

#: Features that go together in any number.
MIXED = frozenset({"weights", "exclude_self"})


class NotDeclared(Exception):
    """The backend declares that it does not take this problem: nothing to check."""


class Profile(NamedTuple):
    """How much is checked.

    Parameters
    ----------
    dimensions : tuple of int
        Of the check ``tolerance``, and of ``drawn`` where ``drawn_dimensions`` is None.
    extents : tuple of float
        Bandwidths.
    draws : int
        Random problems.
    pairs : int
        Rows times columns of a problem at most: of random ones, and of those about tiles.
    drawn_dimensions : tuple of int, optional
    includes : Profile, optional
        Its random problems come first: what it catches this one catches too.
    """

    dimensions: tuple[int, ...]
    extents: tuple[float, ...]
    draws: int = 45
    pairs: int = 400_000
    drawn_dimensions: tuple[int, ...] | None = None
    includes: Profile | None = None


@dataclass(frozen=True)
class Target:
    """A backend on a device, under test."""

    info: BackendInfo
    backend: Backend
    device: str

    def problem(self, case: Case, reduction: str, precision: str, **options: Any) -> Problem:
        """Describe a reduction of a case on this device; :class:`NotDeclared` where the backend declines it.

        What lies beyond the extent at which the backend's formula holds does not count: the core splits that off.
        """
        problem = case.problem(reduction, precision, device=self.device, **options)
        lacking = problem.requires - self.info.features
        if lacking:
            raise NotDeclared(f"lacks {', '.join(sorted(lacking))}")
        self._ask(within_limit(self.info, problem, 1.0))
        return problem

    def whole_problem(self, case: Case, reduction: str, precision: str, **options: Any) -> Problem:
        """As :meth:`problem`, for a check that asks the backend itself: nothing is split off."""
        problem = self.problem(case, reduction, precision, **options)
        self._ask(problem)
        return problem

    def _ask(self, problem: Problem) -> None:
        support = self.info.supports(problem)
        if not support.ok:
            raise NotDeclared(support.reason)

    def give(self, x: Any) -> Any:
        """Return an array as the backend takes it."""
        return None if x is None else convert(x, self.info.arrays, self.device)

    def columns(self, case: Case) -> Columns:
        """Return a case's columns as the backend takes them."""
        return Columns(self.give(case.points), self.give(case.log_weights))

    def answer(self, problem: Problem, case: Case, own_offset: int = 0) -> Partial:
        """Return the backend's answer by way of the core, on the host."""
        return problems.answer(self.info, self.backend, problem, case, own_offset)

    def prepare(self, problem: Problem, case: Case) -> Any:
        """Return the backend's state for a case whose weights are all positive."""
        return self.backend.prepare(problem, self.columns(case))

    def reduce(self, problem: Problem, queries: Any, state: Any, own_offset: int = 0) -> Partial:
        """Return the backend's own answer, on the host."""
        return each(self.backend.reduce(problem, self.give(queries), state, own_offset), to_host)

    def check(self, case: Case, reduction: str, precision: str, rows: Any = None, **options: Any) -> None:
        """Assert that the answer by way of the core keeps the tolerances; ``rows``: indices of those compared."""
        problem = self.problem(case, reduction, precision, **options)
        asked = {"same": problem.same, "exclude_self": "exclude_self" in problem.requires}
        within(problem, self.answer(problem, case), problems.truth(case, rows=rows, **asked), case.name, rows)


@contextlib.contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Set ``SDKDE_NUM_THREADS``, and restore it at the end."""
    before = os.environ.get("SDKDE_NUM_THREADS")
    os.environ["SDKDE_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("SDKDE_NUM_THREADS")
        if before is not None:
            os.environ["SDKDE_NUM_THREADS"] = before


@functools.lru_cache(maxsize=64)
def make(kind: str, n: int, m: int, d: int, extent: float) -> Case:
    """Make a case; the arrays are read-only, since checks share them."""
    return frozen(replace(problems.make(kind, n, m, d, extent), name=f"{kind} within {extent:g}"))


def frozen(case: Case) -> Case:
    """Return a case whose arrays are read-only."""
    for array in (case.points, case.queries, case.log_weights):
        array.flags.writeable = False
    return case


def weighted(case: Case, spread: float = 2.0) -> Case:
    """Return a case with weights, none of them zero, whose logs differ by some ``spread`` nats."""
    log_w = spread * np.random.default_rng(len(case.points)).normal(size=len(case.points))
    log_w -= np.logaddexp.reduce(log_w)
    return replace(case, name=f"{case.name} with weights", log_weights=log_w)


def take(truth: Truth, rows: Any) -> Truth:
    """Return the truth about some rows."""
    return Truth(*(x[rows] for x in truth))


def within(problem: Problem, got: Partial, want: Truth, about: str = "", rows: Any = None) -> None:
    """Assert that rows are within the precision's tolerance.

    Parameters
    ----------
    problem : Problem
    got : Partial
        On the host.
    want : Truth
    about : str
        The kind of case, for the message.
    rows : (k,) array of int, optional
        Indices of the rows that ``want`` has; all by default.
    """
    assert got.log_sum.shape[:1] == (problem.m,), f"log_sum has shape {got.log_sum.shape} for {problem.m} queries"
    if rows is not None:
        got = each(got, lambda x: x[rows])
    for name, field in problems.compare(problem, got, want).items():
        over = field.over
        if over.size and not over.max() <= 1.0:
            worst = int(np.argmax(over))
            raise AssertionError(
                f"{name} of {_words(problem, about)}: row {worst if rows is None else rows[worst]} is "
                f"{_number(field.got[worst])}, should be {_number(field.want[worst])}; off by {field.off[worst]:.3g}, "
                f"{over[worst]:.3g} times the tolerance ({int((~(over <= 1.0)).sum())} of {over.size} rows beyond it)"
            )


def same_bits(first: Partial, other: Partial, message: str) -> None:
    """Assert that two answers are equal to the last bit."""
    for field in fields(Partial):
        a, b = (getattr(each(got, to_host), field.name) for got in (first, other))
        assert a is None or np.array_equal(a, b), f"{field.name}: {message}"


def _words(problem: Problem, about: str) -> str:
    """Say what was asked."""
    words = [f"{problem.reduction.name} at {problem.precision}", about or "a case"]
    words += [f"m={problem.m} n={problem.n} d={problem.d}", f"dtype {problem.dtype}"]
    words += ["with " + " and ".join(sorted(problem.requires))] * bool(problem.requires)
    return ", ".join([*words, *["rows the points themselves"] * problem.same])


def _number(x: Any) -> str:
    return f"{x:.9g}" if np.ndim(x) == 0 else np.array2string(x, precision=7, threshold=6)
