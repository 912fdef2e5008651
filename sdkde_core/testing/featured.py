"""Checks of the features ``"exclude_self"``, a row's own column left out, and ``"kernel"``, other than the Gaussian."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.protocol import TOLERANCES, Partial, Problem, Reduction

from . import problems, reference
from .accuracy import COLUMNS, ROWS, about_tiles, some
from .formalities import has_format
from .problems import Case
from .target import MIXED, Target, make, same_bits, weighted, within

__all__ = ["exclude_self", "kernel"]


def exclude_self(target: Target, parameter: str) -> None:
    """Row i leaves out column i + own_offset, where there is one: any offset, weights, empty sums."""
    precision, reduction = parameter.split("-")
    for kind, extent in (("mixture", 10.0), ("duplicates", 10.0), ("outlier", 10.0), ("clusters", 1e5)):
        case = make(kind, COLUMNS, ROWS, 3, extent)
        for same in (True, False):
            rows = some(COLUMNS if same else ROWS, ROWS)
            target.check(case, reduction, precision, rows, same=same, exclude_self=True)
    cases = [about_tiles(COLUMNS, ROWS, 3, 10.0)]
    if "weights" in target.info.features:
        cases.append(weighted(cases[0]))
    for case in cases:
        _offsets(target, case, reduction, precision)
    alone = make("mixture", 1, 1, 3, 10.0)
    got = target.answer(target.problem(alone, reduction, precision, same=True, exclude_self=True), alone)
    assert got.log_sum[0] == -np.inf, f"an empty sum has log sum −inf, not {got.log_sum[0]}"
    assert got.shift is None or not got.shift.any(), f"an empty sum has shift 0, not {got.shift[0]}"
    assert got.sign is None or got.sign[0] == 0, f"an empty sum has sign 0, not {got.sign[0]}"


def _offsets(target: Target, case: Case, reduction: str, precision: str) -> None:
    """Ask for rows that begin anywhere: such are batches of them, and shards of the columns."""
    n, m = COLUMNS, ROWS
    problem = target.whole_problem(case, reduction, precision, exclude_self=True)
    state = target.prepare(problem, case)
    near = case.points[20 : 20 + m]  # row i is column 20 + i
    for offset in (20, 0, -1, -40, 1 - m, -m, -m - 9, n - m, n - 1, n, n + 9, 5 * n):
        want = reference.near_sums(near, case.points, case.log_weights, np.arange(m) + offset)
        within(problem, target.reduce(problem, near, state, offset), want, f"{case.name}, own_offset {offset}")


def kernel(target: Target, parameter: str) -> None:
    """Another kernel: tolerances, weights, own columns, rows out of reach and far off, NaN."""
    precision, name = parameter.split("-")
    asked = functools.partial(_problem, target, precision, name)
    for case in _cases():
        # Rows that reach none but columns of little weight are those columns themselves.
        for same in (False, True) if len(case.points) < 131 or case.name.startswith("weights") else (False,):
            if "weights" in target.info.features or (case.log_weights == case.log_weights[0]).all():
                problem = asked(case, same=same)
                _bounded(problem, target.answer(problem, case), case)
    for distance in (1e9, 1e100):
        case = problems.far(29, 13, 2, distance, stray=True)
        problem = asked(case, whole=True)
        _bounded(problem, target.reduce(problem, case.queries, target.prepare(problem, case)), case)
    _mixed(target, asked)
    if "exclude_self" in target.info.features:
        alone = make("mixture", 1, 1, 3, 6.0)
        got = target.answer(asked(alone, same=True, exclude_self=True), alone)
        assert got.log_sum[0] == -np.inf, f"an empty sum has log sum −inf, not {got.log_sum[0]}"
    case = make("mixture", 131, 11, 3, 6.0)
    problem, queries, points = asked(case), case.queries.copy(), case.points.copy()
    queries[2, 1] = points[65, 0] = np.nan
    logs = target.answer(problem, replace(case, queries=queries)).log_sum
    assert np.isnan(logs).tolist() == [i == 2 for i in range(11)], "rows with a NaN, and no others, have NaN"
    logs = target.answer(problem, replace(case, points=points)).log_sum
    assert np.isnan(logs).all(), "where a point has a NaN every row has"


def _problem(target: Target, precision: str, name: str, case: Case, *, whole: bool = False, **options: Any) -> Problem:
    ask = target.whole_problem if whole else target.problem
    requires = {"kernel", *options.pop("requires", ())}
    return ask(case, Reduction.LOG_SUM, precision, kernel=name, requires=requires, **options)


@functools.cache
def _cases() -> list[Case]:
    """In few and many dimensions, on a lattice, where r is 1 exactly, with weights, beside the edges of tiles."""
    lattice = np.stack(np.meshgrid(np.arange(9.0), np.arange(5.0)), axis=-1).reshape(-1, 2) - [4.0, 2.0]
    on_lattice = Case("a lattice", lattice, lattice[::3] + np.array([0.0, 1.0]), np.full(45, -np.log(45)))
    near = [about_tiles(131, 23, d, 6.0) for d in (1, 3, 17)]
    near += [about_tiles(n, m, 2, 4.0) for n, m in ((1, 1), (64, 8), (1025, 5), (4097, 3), (9, 257))]
    return [*near, on_lattice, make("tails", 131, 23, 2, 100.0), make("weights", 131, 23, 2, 6.0)]


def _mixed(target: Target, asked: Any) -> None:
    """All other features at once, at any offset."""
    features = target.info.features & MIXED
    case = about_tiles(131, 23, 2, 5.0)
    case = weighted(case) if "weights" in features else case
    problem = asked(case, whole=True, requires=features - {"weights"})
    state = target.prepare(problem, case)
    for offset in (0, 40, -9, 134) if "exclude_self" in features else (0,):
        got = target.reduce(problem, case.queries, state, offset)
        has_format(problem, got, case.points)
        _bounded(problem, got, case, offset)
    again = target.reduce(problem, case.queries, target.prepare(problem, case), offset)
    same_bits(got, again, "differs from one call to the next")


def _bounded(problem: Problem, got: Partial, case: Case, own_offset: int = 0) -> None:
    """Assert that log sums lie between those of distances that are a little longer or shorter; see `KERNELS`."""
    rows = case.points if problem.same else case.queries
    own = np.arange(len(rows)) + own_offset if "exclude_self" in problem.requires else False
    absolute, relative = TOLERANCES[problem.precision][Reduction.LOG_SUM]
    low, high = (
        sign * -absolute
        + reference.kernel_log_sum(
            rows,
            case.points,
            problem.kernel,
            1.0 / (1.0 + sign * relative),
            log_weights=case.log_weights,
            exclude_self=own,
        )
        for sign in (1.0, -1.0)
    )
    right = (low <= got.log_sum) & (got.log_sum <= high)  # not NaN
    if not right.all():
        i = int(np.flatnonzero(~right)[0])
        raise AssertionError(
            f"log_sum of the {problem.kernel} kernel at {problem.precision}, {case.name}, own_offset {own_offset}, "
            f"m={problem.m} n={problem.n} d={problem.d}: row {i} is {got.log_sum[i]:.9g}, should be from {low[i]:.9g} "
            f"to {high[i]:.9g} ({int((~right).sum())} of {right.size} rows are not)"
        )
