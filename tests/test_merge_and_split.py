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

import sdkde_core
from sdkde_core.engine.columns import PackedColumns
from sdkde_core.engine.exact import reduce_exact
from sdkde_core.engine.merge import each, merge
from sdkde_core.protocol import Columns, DeviceOutOfMemory, Partial, Reduction, Support
from sdkde_core.spreading.devices import OnDevices
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
        columns = [Columns(case.points[a:b], case.log_weights[a:b]) for a, b in pairwise(edges) if b > a]
        parts = [reduce_exact(problem, case.queries, some) for some in columns]
        assert errors(problem, merge(parts), truth(case)).max() <= 1.0


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
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def _limited(limit):
    """The NumPy backend, as if its formula held only to ``limit``; it refuses to see more."""

    class Strict(NumpyBackend):
        def prepare(self, problem, columns):
            assert problem.extent <= limit
            assert _radii(columns.points).max() <= limit
            assert np.isfinite(columns.log_weights).all()
            assert problem.n == len(columns.points)
            return super().prepare(problem, columns)

        def reduce(self, problem, queries, state, own_offset=0):
            if queries is not None and len(queries):
                assert _radii(queries).max() <= limit
                assert problem.m == len(queries)
            return super().reduce(problem, queries, state, own_offset)

    def supports(problem):
        return Support(problem.extent <= limit, f"holds to {limit}")

    return replace(INFO, extent_limit=lambda problem: limit, supports=supports), Strict()


def _reduce(case, problem, backend=None, info=INFO):
    """The sums of a case, and how many outliers were summed apart."""
    packed = PackedColumns(backend or NumpyBackend(), info, problem, Columns(case.points, case.log_weights))
    with np.errstate(all="ignore"):
        return packed.reduce(None if problem.same else case.queries)


def _radii(points):
    return np.sqrt((points**2).sum(1))


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


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize(("n", "m", "d"), [(120, 90, 3), (90, 120, 1), (60, 40, 17)])
def test_far_points_are_summed_apart(n, m, d, reduction, zeros, same):
    """By the backend where it takes their extent, else exactly."""
    rng = np.random.default_rng(5)
    case = _spoil(make("mixture", n, m, d), rng, zeros)
    problem = case.problem(reduction, "float64", same=same)
    far_columns, far_rows = {50} if zeros else {3, 50}, {0, 20}
    off = 2 if same else len(far_columns) + len(far_rows)
    want = truth(case, same=same)
    slower = replace(INFO, extent_limit=lambda problem: 30.0), NumpyBackend()
    for info, backend in (_limited(30.0), slower):
        got, taken_off = _reduce(case, problem, backend, info)
        assert taken_off == off
        assert errors(problem, got, want).max() <= 1.0


@pytest.mark.parametrize("features", [INFO.features, INFO.features - {"range"}])
def test_no_rows_are_asked_for_beyond_the_limit_that_is_theirs(features):
    """Rows without their own columns are in another order than these: they are other rows to the backend."""
    case = make("mixture", 70, 20, 3, 25.0)
    case.points[[3, 50, 60]] = 23.0 * np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [0.0, -4.0, 0.0]])  # 40, 46, 92

    def limit(problem):
        return 50.0 if problem.same else 30.0

    def supports(problem):
        return Support(problem.extent <= limit(problem), "its formula ends there")

    class Strict(NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            assert supports(problem).ok
            return super().reduce(problem, queries, state, own_offset)

    info = replace(INFO, features=features, extent_limit=limit, supports=supports)
    problem = case.problem(Reduction.MEAN, "float64", same=True)
    columns = Columns(case.points, case.log_weights)
    packed = PackedColumns(Strict(), info, problem, columns)
    for start, stop in ((0, 70), (10, 55)):
        got, _ = packed.reduce(some=(start, stop))
        want = truth(case, same=True, rows=np.arange(start, stop))
        assert errors(problem, got, want).max() <= 1.0
    got, off = OnDevices(("cpu", "cpu"), Strict(), info, problem, columns).reduce(case.queries)
    assert errors(problem, got, truth(case)).max() <= 1.0
    assert off == 3 + np.count_nonzero(_radii(case.queries) > 30.0)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("outlier", [1.0, 1e5])
def test_a_query_that_is_nan_has_a_density_that_is_nan(method, outlier):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(300, 2)), rng.normal(size=(200, 2))
    x[7] = y[9] = outlier
    y[3, 1] = np.nan
    options = {"method": method, "bandwidth": 0.5, "check_finite": False}
    for precision in ("fast", "float64"):
        got = sdkde_core.estimate(x, y, precision=precision, **options)
        assert np.flatnonzero(np.isnan(got)).tolist() == [3]


def test_nan_stays_nan_on_the_exact_path_and_in_merging():
    case = make("mixture", 50, 20, 2)
    case.queries[3, 1] = np.nan
    columns = [Columns(case.points[a:b], case.log_weights[a:b]) for a, b in ((0, 20), (20, 50))]
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        parts = [reduce_exact(problem, case.queries, c) for c in columns]
        for got in (*parts, merge(parts)):
            for x in (got.log_sum, got.shift, got.sign, got.log_magnitude):
                assert x is None or np.unique(np.argwhere(np.isnan(x))[:, 0]).tolist() == [3]


def test_many_far_points_are_left_to_the_backend():
    case = make("clusters", 60, 20, 2, extent=1e4)
    problem = case.problem(Reduction.LOG_SUM, "float64")
    info = replace(INFO, extent_limit=lambda problem: 30.0)
    got, taken_off = _reduce(case, problem, info=info)
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
        got, _ = _reduce(case, problem, backend, info)
        assert errors(problem, got, truth(case, same=same)).max() <= 1.0


@pytest.mark.parametrize("reduction", Reduction)
def test_the_exact_path_runs_on_any_array_library(reduction):
    xp = array_api_strict
    case = make("weights", 60, 30, 3)
    kept = np.isfinite(case.log_weights)
    problem = case.problem(reduction, "float64")
    columns = Columns(xp.asarray(case.points[kept]), xp.asarray(case.log_weights[kept]))
    got = reduce_exact(problem, xp.asarray(case.queries), columns)
    assert errors(problem, each(got, np.asarray), truth(case)).max() <= 1.0


def test_the_exact_path_in_blocks():
    case = make("mixture", 3000, 3, 784)
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        got = reduce_exact(problem, case.queries, Columns(case.points, case.log_weights))
        assert errors(problem, got, truth(case)).max() <= 1.0


def _cramped(rows):
    """The NumPy backend on a device that holds only so many rows."""

    class Cramped(NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            if problem.m > rows:
                raise DeviceOutOfMemory(f"{problem.m} rows")
            return super().reduce(problem, queries, state, own_offset)

    return Cramped()


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("far", [0, 30])
@pytest.mark.parametrize("reduction", Reduction)
def test_running_out_of_memory_cuts_rows(reduction, far, same):
    case = make("mixture", 120, 90, 3)
    case.points[:far] += 1e3
    case.queries[:far] += 1e3
    problem = case.problem(reduction, "float64", same=same)
    info = replace(INFO, extent_limit=lambda problem: 50.0)
    got, taken_off = _reduce(case, problem, _cramped(20), info)
    assert taken_off == (far if same else 2 * far)
    assert errors(problem, got, truth(case, same=same)).max() <= 1.0


@pytest.mark.parametrize("features", [INFO.features, INFO.features - {"range"}])
@pytest.mark.parametrize("kind", ["mixture", "outliers", "no weight"])
@pytest.mark.parametrize("reduction", Reduction)
def test_some_of_the_points_are_rows(reduction, kind, features):
    """Points beyond the limit are still summed apart; where memory does not suffice ranges are cut."""
    case = make("mixture", 120, 1, 3)
    if kind != "mixture":
        case = _spoil(make("mixture", 120, 90, 3), np.random.default_rng(5), zeros=kind == "no weight")
    problem = case.problem(reduction, "float64", same=True)
    info = replace(INFO, features=features, extent_limit=lambda problem: 30.0)
    packed = PackedColumns(_cramped(25), info, problem, Columns(case.points, case.log_weights))
    for start, stop in ((0, 60), (10, 40), (40, 120), (50, 51)):
        got, _ = packed.reduce(some=(start, stop))
        want = truth(case, same=True, rows=np.arange(start, stop))
        assert errors(problem, got, want).max() <= 1.0


def test_a_device_that_holds_no_row_is_an_error():
    case = make("mixture", 12, 9, 3)
    problem = case.problem(Reduction.MEAN, "high")
    with pytest.raises(DeviceOutOfMemory):
        _reduce(case, problem, _cramped(0))


def test_an_answer_of_another_shape_is_refused():
    class Wrong(NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            return Partial(np.zeros(3))

    case = make("mixture", 12, 9, 3)
    for reduction in Reduction:
        with pytest.raises(RuntimeError, match="has shape"):
            _reduce(case, case.problem(reduction, "high"), Wrong())


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
        assert _reduce(case, case.problem(reduction, "high"))[0].log_sum.shape == (0,)


@pytest.mark.parametrize("far", [1e12, 1e16, 1e100, 1e140])
def test_a_point_at_any_distance_is_neither_inf_nor_nan(far):
    """At 1e16 bandwidths rounding picks a column that is not the nearest."""
    case = make("mixture", 300, 400, 2)
    case.queries[7] = far
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        got, _ = _reduce(case, problem)
        assert errors(problem, got, truth(case))[np.arange(400) != 7].max() <= 1.0
        assert got.log_sum[7] == pytest.approx(-(far**2), rel=1e-9)
        if got.shift is not None:
            assert got.shift[7] == pytest.approx([-far, -far])
