"""Partial results join to the whole: over chunks of columns, and where the core takes far points off a backend."""

from dataclasses import replace
from itertools import pairwise

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdkde_numpy.backend import NumpyBackend
from sdkde_numpy.info import INFO

from sdkde_core.exact import reduce_exact
from sdkde_core.merge import each, merge
from sdkde_core.protocol import Columns, DeviceOutOfMemory, Partial, Reduction, Support
from sdkde_core.split import reduce_pass
from sdkde_core.testing.problems import CASES, errors, make, truth


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 40), max_size=5), kind=st.sampled_from(sorted(CASES))
)
def test_column_chunks_merge_to_the_whole(seed, cuts, kind):
    case = make(kind, 40, 7, 2, seed=seed)
    kept = np.isfinite(case.log_weights)
    case = replace(case, points=case.points[kept], log_weights=case.log_weights[kept])
    edges = [0, *sorted(min(c, kept.sum()) for c in cuts), kept.sum()]
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        parts = [
            reduce_exact(problem, case.queries, Columns(case.points[a:b], case.log_weights[a:b]))
            for a, b in pairwise(edges)
            if b > a
        ]
        assert errors(problem, merge(parts), truth(case)).max() <= 1.0


def test_merge_is_the_same_bits_for_the_same_order():
    case = make("weights", 300, 50, 3)
    problem = case.problem(Reduction.MEAN, "high")
    parts = [
        reduce_exact(problem, case.queries, Columns(case.points[a : a + 100], case.log_weights[a : a + 100]))
        for a in (0, 100, 200)
    ]
    assert np.array_equal(merge(parts).shift, merge(parts).shift)


def test_empty_sums_merge():
    empty = Partial(np.array([-np.inf]), shift=np.zeros((1, 2)))
    some = Partial(np.array([-3.0]), shift=np.array([[1.0, 2.0]]))
    both = merge([empty, some])
    assert both.log_sum[0] == -3.0
    assert both.shift.tolist() == [[1.0, 2.0]]
    assert merge([empty, empty]).log_sum[0] == -np.inf
    cancel = Partial(np.zeros(1), sign=np.ones(1), log_magnitude=np.zeros(1))
    nothing = merge([cancel, replace(cancel, sign=-np.ones(1))])
    assert nothing.sign[0] == 0
    assert nothing.log_magnitude[0] == -np.inf


def test_merge_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def _limited(limit):
    """The NumPy backend, as if its formula held only to ``limit``; it refuses to see more."""

    class Strict(NumpyBackend):
        def prepare(self, problem, columns):
            assert problem.extent <= limit
            assert np.sqrt((columns.points**2).sum(1)).max() <= limit
            assert np.isfinite(columns.log_weights).all()
            assert problem.n == len(columns.points)
            return super().prepare(problem, columns)

        def reduce(self, problem, queries, state, own_offset=0):
            if queries is not None and len(queries):
                assert np.sqrt((queries**2).sum(1)).max() <= limit
                assert problem.m == len(queries)
            return super().reduce(problem, queries, state, own_offset)

    def supports(problem):
        return Support(problem.extent <= limit, f"holds to {limit}")

    return replace(INFO, extent_limit=lambda problem: limit, supports=supports), Strict()


def _spoil(case, rng, zeros):
    """Send a few points and queries far away; give some of each zero weight."""
    case.points[[3, 50]] *= 1e3
    case.queries[[0, 20]] *= 1e4
    if zeros:
        log_w = np.log(rng.random(len(case.points)))
        log_w[[3, 7, 8]] = -np.inf
        log_w -= np.log(np.exp(log_w).sum())
        case = replace(case, log_weights=log_w)
    return case


@pytest.mark.parametrize("scales", [(), (0.7, 2.0)])
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("reduction", Reduction)
def test_far_points_are_summed_exactly(reduction, zeros, same, exclude_self, scales):
    rng = np.random.default_rng(5)
    case = _spoil(make("mixture", 120, 90, 3), rng, zeros)
    values = None if reduction is Reduction.LAPLACE else rng.normal(size=(120, 2))
    info, backend = _limited(30.0)
    requires = ({"multi_scale"} if scales else set()) | (set() if values is None else {"values"})
    problem = case.problem(
        reduction,
        "float64",
        same=same,
        exclude_self=exclude_self,
        requires=requires,
        scales=scales,
        n_values=0 if values is None else 2,
    )
    queries = None if same else case.queries
    columns = Columns(case.points, case.log_weights, values)
    got, taken_off = reduce_pass(backend, info, problem, columns, queries)
    assert taken_off == ((1 if zeros else 2) if same else (3 if zeros else 4))
    for s, scale in enumerate(scales or (1.0,)):
        want = truth(case, same=same, exclude_self=exclude_self, values=values, scale=scale)
        one = got
        if scales:
            one = each(got, lambda x, s=s: x[:, s])
        assert errors(problem, one, want).max() <= 1.0
        if values is not None:
            np.testing.assert_allclose(one.values, want.values, atol=1e-10)


def test_many_far_points_are_left_to_the_backend():
    case = make("clusters", 60, 20, 2, extent=1e4)
    problem = case.problem(Reduction.LOG_SUM, "float64")
    info = replace(INFO, extent_limit=lambda problem: 30.0)
    got, taken_off = reduce_pass(NumpyBackend(), info, problem, Columns(case.points, case.log_weights), case.queries)
    assert taken_off == 0
    assert errors(problem, got, truth(case)).max() <= 1.0


def test_every_column_with_weight_is_far():
    case = make("mixture", 100, 50, 2)
    case.points[:5] += 1e3
    log_w = np.full(100, -np.inf)
    log_w[:5] = -np.log(5)
    case = replace(case, log_weights=log_w)
    info, backend = _limited(30.0)
    for same in (False, True):
        problem = case.problem(Reduction.MEAN, "float64", same=same)
        got, _ = reduce_pass(backend, info, problem, Columns(case.points, log_w), None if same else case.queries)
        assert errors(problem, got, truth(case, same=same)).max() <= 1.0


@pytest.mark.parametrize("reduction", Reduction)
def test_the_exact_path_runs_on_any_array_library(reduction):
    xp = array_api_strict
    case = make("weights", 60, 30, 3)
    kept = np.isfinite(case.log_weights)
    problem = case.problem(reduction, "float64")
    columns = Columns(xp.asarray(case.points[kept]), xp.asarray(case.log_weights[kept]))
    got = reduce_exact(problem, xp.asarray(case.queries), columns)
    numpy_got = Partial(
        *(None if x is None else np.asarray(x) for x in (got.log_sum, got.shift, got.sign, got.log_magnitude))
    )
    assert errors(problem, numpy_got, truth(case)).max() <= 1.0


def test_the_exact_path_in_blocks(monkeypatch):
    monkeypatch.setattr("sdkde_core.exact.BLOCK", 64)
    case = make("mixture", 70, 31, 3)
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        got = reduce_exact(problem, case.queries, Columns(case.points, case.log_weights))
        assert errors(problem, got, truth(case)).max() <= 1.0


def _cramped(rows, n_calls):
    """The NumPy backend on a device that holds only so many rows."""

    class Cramped(NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            n_calls.append(problem.m)
            if problem.m > rows:
                raise DeviceOutOfMemory(f"{problem.m} rows")
            return super().reduce(problem, queries, state, own_offset)

    return Cramped()


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("reduction", Reduction)
def test_running_out_of_memory_cuts_rows(reduction, same, exclude_self):
    case, calls = make("mixture", 120, 90, 3), []
    problem = case.problem(reduction, "float64", same=same, exclude_self=exclude_self)
    columns = Columns(case.points, case.log_weights)
    got, _ = reduce_pass(_cramped(20, calls), INFO, problem, columns, None if same else case.queries)
    assert max(calls) > 20
    assert errors(problem, got, truth(case, same=same, exclude_self=exclude_self)).max() <= 1.0


def test_a_device_that_holds_no_row_is_an_error():
    case = make("mixture", 12, 9, 3)
    problem = case.problem(Reduction.MEAN, "high")
    with pytest.raises(DeviceOutOfMemory):
        reduce_pass(_cramped(0, []), INFO, problem, Columns(case.points, case.log_weights), case.queries)


def test_an_answer_of_another_shape_is_refused():
    class Wrong(NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            return Partial(np.zeros(3))

    case = make("mixture", 12, 9, 3)
    for reduction in Reduction:
        with pytest.raises(RuntimeError, match="has shape"):
            problem = case.problem(reduction, "high")
            reduce_pass(Wrong(), INFO, problem, Columns(case.points, case.log_weights), case.queries)


@pytest.mark.parametrize("far", [1e4, 1e7])
def test_the_exact_path_keeps_shifts_far_from_every_point(far):
    """On a lattice many columns are nearly as far as the nearest: what counts are differences of huge exponents."""
    axis = np.arange(-3.0, 4.0)
    points = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    case = replace(make("mixture", 49, 3, 2), points=points, queries=np.array([[far, 0.0], [0.0, far], [far, 1e-9]]))
    problem = case.problem(Reduction.MEAN, "float64")
    got = reduce_exact(problem, case.queries, Columns(case.points, case.log_weights))
    assert errors(problem, got, truth(case)).max() <= 1.0


def test_no_rows_and_weights_of_zero():
    case = make("weights", 50, 0, 2)
    for reduction in Reduction:
        problem = case.problem(reduction, "high")
        columns = Columns(case.points, case.log_weights)
        assert reduce_pass(NumpyBackend(), INFO, problem, columns, case.queries)[0].log_sum.shape == (0,)


@pytest.mark.parametrize("far", [1e12, 1e16, 1e100, 1e140])
def test_a_point_at_any_distance_is_neither_inf_nor_nan(far):
    """At 1e16 bandwidths rounding picks a column that is not the nearest."""
    case = make("mixture", 300, 400, 2)
    case.queries[7] = far
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        got, _ = reduce_pass(NumpyBackend(), INFO, problem, Columns(case.points, case.log_weights), case.queries)
        assert errors(problem, got, truth(case))[np.arange(400) != 7].max() <= 1.0
        assert got.log_sum[7] == pytest.approx(-(far**2), rel=1e-9)
        if got.shift is not None:
            assert got.shift[7] == pytest.approx([-far, -far])
