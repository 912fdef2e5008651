"""The check of the feature ``"kernel"``: other kernels than the Gaussian, also at the edge of their support."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.plugin import concatenate, merge
from sdkde_core.protocol import KERNELS, TOLERANCES, BackendInfo, Partial, Problem, Reduction

from . import problems, reference
from .accuracy import about_tiles
from .formalities import has_format
from .problems import Array, Case
from .target import MIXED, Profile, Target, make, weighted

__all__ = ["bounds", "kernel", "parameters"]

#: Rows and columns, sizes that divide nothing; and what lies beside the edges of tiles.
COLUMNS, ROWS = 131, 23
SIZES = ((1, 1), (64, 8), (1025, 5), (4097, 3), (9, 257))


def parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every precision and kernel."""
    for precision in info.precisions if "kernel" in info.features else ():
        for name in KERNELS:
            if name != "gaussian":
                yield f"{precision}-{name}"


class Bounds(NamedTuple):
    """What a log sum must lie between, (m,); see :data:`sdkde_core.protocol.KERNELS`."""

    low: Array
    high: Array


def bounds(kernel: str, precision: str, rows: Array, case: Case, own: Any = False) -> Bounds:
    """Return what the log sums of rows must lie between: those of distances that are a little longer or shorter."""
    absolute, relative = TOLERANCES[precision][Reduction.LOG_SUM]
    how = {"log_weights": case.log_weights, "exclude_self": own}
    low, high = (
        reference.kernel_log_sum(rows, case.points, kernel, 1.0 / (1.0 + sign * relative), **how)
        for sign in (1.0, -1.0)
    )
    return Bounds(low - absolute, high + absolute)


def kernel(target: Target, parameter: str) -> None:
    """Another kernel: tolerances, weights, own columns, rows out of reach and far off, NaN, batches, shards."""
    precision, name = parameter.split("-")
    asked = functools.partial(_problem, target, precision, name)
    for case in _cases():
        # Rows that reach none but columns of little weight are those columns themselves.
        for same in (False, True) if len(case.points) < COLUMNS or case.name == "weights" else (False,):
            if "weights" in target.info.features or (case.log_weights == case.log_weights[0]).all():
                problem = asked(case, same=same)
                _within(problem, target.answer(problem, case), _truth(problem, case), case.name)
    for distance in (1e9, 1e100):
        case = problems.far(29, 13, 2, distance, stray=True)
        problem = asked(case, whole=True)
        got = target.reduce(problem, case.queries, target.prepare(problem, case))
        _within(problem, got, _truth(problem, case), case.name)
    _mixed(target, asked)
    _nothing_in_reach(target, asked)
    _not_a_number(target, asked)


def _problem(target: Target, precision: str, name: str, case: Case, *, whole: bool = False, **options: Any) -> Problem:
    ask = target.whole_problem if whole else target.problem
    requires = {"kernel", *options.pop("requires", ())}
    return ask(case, Reduction.LOG_SUM, precision, kernel=name, requires=requires, **options)


@functools.cache
def _cases() -> list[Case]:
    """In few and many dimensions, on a lattice, where r is 1 exactly, with weights, beside the edges of tiles."""
    lattice = np.stack(np.meshgrid(np.arange(9.0), np.arange(5.0)), axis=-1).reshape(-1, 2) - [4.0, 2.0]
    on_lattice = Case("a lattice", lattice, lattice[::3] + np.array([0.0, 1.0]), np.full(45, -np.log(45)))
    near = [about_tiles(COLUMNS, ROWS, d, 6.0) for d in (1, 3, 17)]
    near += [about_tiles(n, m, 2, 4.0) for n, m in SIZES]
    return [*near, on_lattice, make("tails", COLUMNS, ROWS, 2, 100.0), make("weights", COLUMNS, ROWS, 2, 6.0)]


def _truth(problem: Problem, case: Case, own_offset: int = 0) -> Bounds:
    """What the log sums must lie between."""
    rows = case.points if problem.same else case.queries
    own = np.arange(len(rows)) + own_offset if "exclude_self" in problem.requires else False
    return bounds(problem.kernel, problem.precision, rows, case, own)


def _mixed(target: Target, asked: Any) -> None:
    """All other features at once: rows in batches, columns in shards, any offset."""
    features = target.info.features & MIXED
    case = about_tiles(COLUMNS, ROWS, 2, 5.0)
    case = weighted(case) if "weights" in features else case
    problem = asked(case, whole=True, requires=features - {"weights"})
    state = target.prepare(problem, case)
    for offset in (0, 40, -9, COLUMNS + 3) if "exclude_self" in features else (0,):
        got = target.reduce(problem, case.queries, state, offset)
        has_format(problem, got, case.points)
        _within(problem, got, _truth(problem, case, offset), f"{case.name}, own_offset {offset}")
    again = target.reduce(problem, case.queries, target.prepare(problem, case), offset)
    assert np.array_equal(got.log_sum, again.log_sum), "log_sum differs from one call to the next"
    truth = _truth(problem, case)
    batches = [
        target.reduce(replace(problem, m=stop - start), case.queries[start:stop], state, start)
        for start, stop in ((0, 7), (7, ROWS))
    ]
    _within(problem, concatenate(batches), truth, f"{case.name}, rows in batches")
    shards = []
    for start, stop in ((0, 70), (70, COLUMNS)):
        shard = replace(case, points=case.points[start:stop], log_weights=case.log_weights[start:stop])
        part = replace(problem, n=stop - start)
        shards.append(target.reduce(part, case.queries, target.prepare(part, shard), -start))
    _within(problem, merge(shards), truth, f"{case.name}, columns in shards")


def _nothing_in_reach(target: Target, asked: Any) -> None:
    """A row that reaches no column has log sum −inf; so has a point alone without its own."""
    if "exclude_self" in target.info.features:
        alone = make("mixture", 1, 1, 3, 6.0)
        got = target.answer(asked(alone, same=True, exclude_self=True), alone)
        assert got.log_sum[0] == -np.inf, f"an empty sum has log sum −inf, not {got.log_sum[0]}"


def _not_a_number(target: Target, asked: Any) -> None:
    case = make("mixture", COLUMNS, 11, 3, 6.0)
    problem, queries, points = asked(case), case.queries.copy(), case.points.copy()
    queries[2, 1] = points[COLUMNS // 2, 0] = np.nan
    got = target.answer(problem, replace(case, queries=queries)).log_sum
    assert np.isnan(got).tolist() == [i == 2 for i in range(11)], "rows with a NaN, and no others, have NaN"
    got = target.answer(problem, replace(case, points=points)).log_sum
    assert np.isnan(got).all(), "where a point has a NaN every row has"


def _within(problem: Problem, got: Partial, want: Bounds, about: str) -> None:
    low, high = want
    right = (low <= got.log_sum) & (got.log_sum <= high)  # not NaN
    if not right.all():
        i = int(np.flatnonzero(~right)[0])
        raise AssertionError(
            f"log_sum of the {problem.kernel} kernel at {problem.precision}, {about}, m={problem.m} n={problem.n} "
            f"d={problem.d}: row {i} is {got.log_sum[i]:.9g}, should be from {low[i]:.9g} to {high[i]:.9g} "
            f"({int((~right).sum())} of {right.size} rows are not)"
        )
