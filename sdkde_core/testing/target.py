"""A backend under test: how checks ask it, what they ask it about, and how they compare."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.arrays import convert, to_host
from sdkde_core.engine.outliers import within_limit
from sdkde_core.plugin import each
from sdkde_core.protocol import Backend, BackendInfo, Columns, Partial, Problem

from . import problems
from .problems import Case, Truth


class NotDeclared(Exception):
    """The backend declares that it does not take this problem: nothing to check."""


class Profile(NamedTuple):
    """How much is checked."""

    dimensions: tuple[int, ...]  # of the check ``tolerance``, and of ``drawn`` where ``drawn_dimensions`` is None
    extents: tuple[float, ...]  # bandwidths
    draws: int = 45  # random problems
    pairs: int = 400_000  # rows times columns at most, of random problems and of those about tiles
    drawn_dimensions: tuple[int, ...] | None = None
    includes: Profile | None = None  # its random problems come first: what it catches this one catches too

    @property
    def is_fast(self) -> bool:
        """Whether the backend is fast enough here for checks of memory, time and many columns: no simulator."""
        return self.pairs >= 400_000


@dataclass(frozen=True)
class Target:
    """A backend on a device, under test."""

    info: BackendInfo
    backend: Backend
    device: str

    def problem(self, case: Case, reduction: str, precision: str, *, whole: bool = False, **options: Any) -> Problem:
        """Describe a reduction of a case on this device; :class:`NotDeclared` where the backend declines it.

        Points beyond the extent at which the backend's formula holds do not count: the core sums them. With ``whole``
        they do, for a check that asks the backend itself.
        """
        problem = case.problem(reduction, precision, device=self.device, **options)
        if lacking := problem.requires - self.info.features:
            raise NotDeclared(f"lacks {', '.join(sorted(lacking))}")
        support = self.info.supports(problem if whole else within_limit(self.info, problem, 1.0))
        if not support.ok:
            raise NotDeclared(support.reason)
        return problem

    def give(self, x: Any) -> Any:
        """Return an array as the backend takes it."""
        return None if x is None else convert(x, self.info.arrays, self.device)

    def answer(self, problem: Problem, case: Case) -> Partial:
        """Return the backend's answer by way of the core, on the host."""
        return problems.answer(self.info, self.backend, problem, case)

    def prepare(self, problem: Problem, case: Case) -> Any:
        """Return the backend's state for a case whose weights are all positive."""
        return self.backend.prepare(problem, Columns(self.give(case.points), self.give(case.log_weights)))

    def reduce(self, problem: Problem, queries: Any, state: Any, own_offset: int = 0) -> Partial:
        """Return the backend's own answer, on the host."""
        return each(self.backend.reduce(problem, self.give(queries), state, own_offset), to_host)

    def direct(self, problem: Problem, case: Case) -> Partial:
        """Return the backend's own answer from a new state, on the host."""
        return self.reduce(problem, None if problem.same else case.queries, self.prepare(problem, case))

    def check(self, case: Case, reduction: str, precision: str, rows: Any = None, **options: Any) -> None:
        """Assert that the answer by way of the core keeps the tolerances; ``rows``: indices of those compared."""
        problem = self.problem(case, reduction, precision, **options)
        within(problem, self.answer(problem, case), problems.truth(case, same=problem.same, rows=rows), case.name, rows)


@functools.lru_cache(maxsize=64)
def make(kind: str, n: int, m: int, d: int, extent: float) -> Case:
    """Make a case; the arrays are read-only, since checks share them."""
    return problems.frozen(replace(problems.make(kind, n, m, d, extent), name=f"{kind} within {extent:g}"))


@functools.lru_cache(maxsize=64)
def weighted(case: Case, spread: float = 2.0) -> Case:
    """Return a case with weights, none of them zero, whose logs differ by some ``spread`` nats."""
    log_w = spread * np.random.default_rng(len(case.points)).normal(size=len(case.points))
    log_w -= np.logaddexp.reduce(log_w)
    return replace(case, name=f"{case.name} with weights", log_weights=log_w)


def within(problem: Problem, got: Partial, want: Truth, about: str = "", rows: Any = None) -> None:
    """Assert that an answer on the host is within the precision's tolerance.

    ``about`` is the kind of case, for the message; ``rows`` are the indices of the rows that ``want`` has, by default
    all.
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
    words = [f"{problem.reduction.name} at {problem.precision}", about or "a case"]
    words += [f"m={problem.m} n={problem.n} d={problem.d}", f"dtype {problem.dtype}"]
    words += ["with " + " and ".join(sorted(problem.requires))] * bool(problem.requires)
    return ", ".join([*words, *["rows the points themselves"] * problem.same])


def _number(x: Any) -> str:
    return f"{x:.9g}" if np.ndim(x) == 0 else np.array2string(x, precision=7, threshold=6)
