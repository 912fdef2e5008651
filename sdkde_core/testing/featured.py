"""Checks of the protocol's features: leaving out a row's own column, derivatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import detached, to_host
from sdkde_core.plugin import each, merge, reduce_pass
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from . import derivatives, problems, reference
from .accuracy import COLUMNS, ROWS, about_tiles, some
from .problems import Case
from .target import Target, make, weighted, within

__all__ = ["exclude_self", "grad"]

#: What an error of a derivative may be relative to the largest one, in tolerances of a log sum: like that it is a sum
#: of terms with the errors of their φ_ij, if of several with different signs.
OF_DERIVATIVES = 10.0


def exclude_self(target: Target, parameter: str) -> None:
    """Row i leaves out column i + own_offset, where there is one: batches, shards, weights, empty sums."""
    precision, reduction = parameter.split("-")
    for kind in ("mixture", "duplicates", "outlier", "clusters"):
        case = make(kind, COLUMNS, ROWS, 3, 1e5 if kind == "clusters" else 10.0)
        for same in (True, False):
            rows = some(COLUMNS if same else ROWS, ROWS)
            problem = target.problem(case, Reduction(reduction), precision, same=same, exclude_self=True)
            want = problems.truth(case, same=same, exclude_self=True, rows=rows)
            within(problem, target.answer(problem, case), want, kind, rows=rows)
    cases = [about_tiles(COLUMNS, ROWS, 3, 10.0)]
    if "weights" in target.info.features:
        cases.append(weighted(cases[0]))
    for case in cases:
        _offsets(target, case, Reduction(reduction), precision)
    _nothing_left(target, Reduction(reduction), precision)


def _offsets(target: Target, case: Case, reduction: Reduction, precision: str) -> None:
    """Ask for rows and columns that begin anywhere."""
    n, m = COLUMNS, ROWS
    problem = target.whole_problem(case, reduction, precision, exclude_self=True)
    state = target.prepare(problem, case)
    near = replace(case, queries=case.points[20 : 20 + m])  # row i is column 20 + i
    for offset in (20, 0, -1, -40, 1 - m, -m, -m - 9, n - m, n - 1, n, n + 9, 5 * n):
        want = reference.near_sums(near.queries, case.points, case.log_weights, np.arange(m) + offset)
        got = target.reduce(problem, near.queries, state, own_offset=offset)
        within(problem, got, want, f"{case.name}, own_offset {offset}")
    every = reference.near_sums(case.points, case.points, case.log_weights, True)
    for start, stop in ((0, 130), (130, n)):  # the points in batches
        part = replace(problem, m=stop - start)
        want = reference.Sums(*(x[start:stop] for x in every))
        got = target.reduce(part, case.points[start:stop], state, own_offset=start)
        within(part, got, want, f"{case.name}, points {start} to {stop} as rows")
    parts = []
    for start, stop in ((0, 100), (100, n)):  # the columns in shards
        part = replace(problem, m=n, n=stop - start)
        shard = replace(case, points=case.points[start:stop], log_weights=case.log_weights[start:stop])
        parts.append(target.reduce(part, case.points, target.prepare(part, shard), own_offset=-start))
    within(replace(problem, m=n), merge(parts), every, f"{case.name}, columns in two shards")


def _nothing_left(target: Target, reduction: Reduction, precision: str) -> None:
    case = make("mixture", 1, 1, 3, 10.0)
    problem = target.problem(case, reduction, precision, same=True, exclude_self=True)
    got = target.answer(problem, case)
    assert got.log_sum[0] == -np.inf, f"an empty sum has log sum −inf, not {got.log_sum[0]}"
    if reduction is Reduction.MEAN:
        assert not got.shift.any(), f"an empty sum has shift 0, not {got.shift[0]}"
    if reduction is Reduction.LAPLACE:
        assert got.sign[0] == 0, f"an empty sum has sign 0, not {got.sign[0]}"


def grad(target: Target, parameter: str) -> None:
    """Derivatives by queries, points and weights, of zero weights too, whichever of them require grad."""
    precision, name = parameter.split("-")
    reduction = Reduction(name)
    allowed = OF_DERIVATIVES * TOLERANCES[precision][Reduction.LOG_SUM].absolute
    for kind in derivatives.KINDS:
        case = derivatives.make(kind)
        with_weights = kind == "weights"
        if with_weights and "weights" not in target.info.features:
            continue
        for same in (False, True):
            problem = target.problem(case, reduction, precision, same=same, requires={"grad"})
            truth = problems.truth(case, same=same)
            leaves = ["points"] + ["queries"] * (not same) + ["weights"] * with_weights

            def reduce(columns: Columns, queries: Any, problem: Problem = problem) -> Partial:
                return reduce_pass(target.backend, target.info, problem, columns, queries)

            for of in derivatives.OF[reduction]:
                if kind == "far" and of == "shift":  # there the distance multiplies what rounding makes of its shares
                    continue
                want = derivatives.closed_form(case, of, same)
                for chosen in dict.fromkeys([(*leaves,), *((leaf,) for leaf in leaves)]):
                    partial, got = derivatives.answered(reduce, target.give, problem, case, of, chosen)
                    within(problem, each(partial, lambda x: to_host(detached(x))), truth, kind)
                    for leaf in chosen:
                        off = abs(got[leaf] - want[leaf]).max() / abs(want[leaf]).max()
                        assert off <= allowed, (
                            f"{kind}{', same' * same}: {of} by {leaf}, with grad of {', '.join(chosen)}: off by "
                            f"{off:.3g} of the largest derivative, allowed {allowed:.3g}"
                        )
