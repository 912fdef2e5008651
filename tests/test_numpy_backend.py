"""The NumPy backend against the reference, by the tolerances of the contract."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from sdkde_numpy.backend import NumpyBackend
from sdkde_numpy.bounds import (
    PART,
    double_limit,
    exponent_error,
    extent_limit,
    single_limit,
    split_limit,
)
from sdkde_numpy.formulas import Prepared, Tiles
from sdkde_numpy.info import INFO
from threadpoolctl import threadpool_info, threadpool_limits

import sdkde_core
from sdkde_core.engine import products
from sdkde_core.plugin import exponents
from sdkde_core.protocol import PRECISIONS, Reduction
from sdkde_core.testing.problems import Case, answer, errors, make, truth, worst_error


def _check(kind, d, extent, same, exclude_self, n=211, m=67):
    case = make(kind, n, m, d, extent)
    for precision in PRECISIONS:
        for reduction, error in worst_error(
            INFO, NumpyBackend(), case, precision, same=same, exclude_self=exclude_self
        ).items():
            assert error <= 0.5, f"{reduction} at {precision}: {error:.2g} of the tolerance"


@pytest.mark.parametrize("extent", [1e5, 1e6, 1e9])
def test_clusters_very_far_apart(extent):
    _check("clusters", 3, extent, True, False)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (2, 1), (257, 1), (255, 257), (1025, 3)])
def test_odd_sizes(n, m):
    case = make("mixture", n, m, 3)
    for same in (False, True):
        want = truth(case, same=same)
        for reduction in Reduction:
            problem = case.problem(reduction, "float64", same=same)
            assert errors(problem, answer(INFO, NumpyBackend(), problem, case), want).max() <= 1.0


@pytest.mark.parametrize("reduction", Reduction)
def test_one_point_that_leaves_itself_out_is_an_empty_sum(reduction):
    case = make("mixture", 1, 1, 2)
    problem = case.problem(reduction, "float64", same=True, exclude_self=True)
    got = answer(INFO, NumpyBackend(), problem, case)
    assert got.log_sum[0] == -np.inf
    if reduction is Reduction.MEAN:
        assert not got.shift.any()
    if reduction is Reduction.LAPLACE:
        assert got.sign[0] == 0


def test_same_bits_whatever_the_number_of_threads():
    for n, m in ((3000, 2000), (200_000, 7)):
        case = make("weights", n, m, 5)
        for reduction in Reduction:
            problem = case.problem(reduction, "high")
            first = answer(INFO, NumpyBackend(threads=1), problem, case)
            for threads in (2, 3):
                again = answer(INFO, NumpyBackend(threads=threads), problem, case)
                assert np.array_equal(first.log_sum, again.log_sum)
                if first.shift is not None:
                    assert np.array_equal(first.shift, again.shift)


def test_the_error_bound_of_expanded_squares_bounds_the_error():
    rng = np.random.default_rng(0)
    for d in (1, 16, 128, 784):
        for extent in (5.0, 50.0, 300.0):
            x = rng.normal(size=(400, d))
            x *= extent / np.sqrt((x**2).sum(1))[:, None]
            x[200:] = x[:200] + rng.normal(size=(200, d)) / np.sqrt(d)
            x *= min(1.0, extent / np.sqrt((x**2).sum(1)).max())
            exact = -0.5 * ((x[:200] - x[200:]).astype(np.longdouble) ** 2).sum(1)
            for dtype in (np.float32, np.float64):
                formula = exponents.Expanded(Tiles(dtype), based=True)
                tile = formula.first(formula.rows(x[:200]), formula.columns(x[200:], None))
                off = np.abs(np.diagonal(tile).astype(float) + exponents.norms(x[:200]) - exact).max()
                assert off <= exponent_error(np.dtype(dtype).name, d, extent)


def _formula(problem, points, span=0.0):
    prepared = Prepared(problem, points, span)
    return type(prepared.formula).__name__, prepared.tiles.dtype.name


def test_formulas_follow_the_extent():
    case = make("mixture", 50, 5, 4)
    for reduction in Reduction:
        problem = case.problem(reduction, "float64")
        assert extent_limit(problem) == double_limit(problem)
        found = [
            _formula(replace(problem, extent=extent), case.points)
            for extent in (1.0, 2 * double_limit(problem), 2 * split_limit(problem))
        ]
        assert found == [("Expanded", "float64"), ("Split", "float64"), ("Direct", "float64")]
        few = replace(problem, extent=2 * double_limit(problem), m=4)
        assert _formula(few, case.points)[0] == "Direct"
        assert "direct" in INFO.supports(few).reason
    fast = case.problem(Reduction.LOG_SUM, "fast")
    assert extent_limit(fast) == single_limit(fast)
    assert _formula(fast, case.points)[1] == "float32"
    assert _formula(fast, case.points, 1e6)[1] == "float64"  # log weights that float32 would round
    assert _formula(replace(fast, extent=1e3), case.points)[1] == "float64"


def test_points_that_coincide_keep_the_level():
    """At extent 0 squares are exact in any precision, but log weights and shifts are not."""
    case = make("weights", 50, 5, 4)
    for reduction in Reduction:
        for precision in PRECISIONS:
            problem = replace(case.problem(reduction, precision), extent=0.0)
            single = precision == "fast" and reduction is not Reduction.MEAN
            assert _formula(problem, case.points)[1] == ("float32" if single else "float64")
            assert INFO.supports(problem).reason.endswith("float32" if single else "float64")
            assert _formula(problem, case.points, 1e6)[1] == "float64"
    x, weights = np.full((3, 2), 5.0), [1.0, 2.0, 1000.0]
    options = {"weights": weights, "bandwidth": 1.0, "precision": "float64", "backend": "numpy"}
    for method in ("kde", "sdkde"):
        got = sdkde_core.estimate(x, method=method, log=True, **options)
        np.testing.assert_allclose(got, -np.log(2 * np.pi), rtol=0, atol=1e-13)
        got = sdkde_core.prepare(x, method=method, **options).estimate(x, log=True)
        np.testing.assert_allclose(got, -np.log(2 * np.pi), rtol=0, atol=1e-13)


def test_the_callers_error_state_does_not_matter():
    case = make("tails", 600, 300, 3, extent=100.0)
    want = truth(case)
    for precision in PRECISIONS:
        for reduction in Reduction:
            problem = case.problem(reduction, precision)
            with np.errstate(all="raise"):
                got = answer(INFO, NumpyBackend(), problem, case)
            assert errors(problem, got, want).max() <= 1.0


def test_blas_keeps_the_threads_that_the_user_gave_it():
    """Whatever the number, after calls from several threads."""
    case = make("mixture", 2000, 600, 3)
    problem = case.problem(Reduction.LOG_SUM, "high")

    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    for limit in (None, 3, 1):
        with threadpool_limits(limit), ThreadPoolExecutor(4) as callers:
            given = threads()
            list(callers.map(lambda _: answer(INFO, NumpyBackend(threads=2), problem, case), range(4)))
            assert threads() == given
    assert not [t for t in threading.enumerate() if t.name.startswith("sdkde_")]


@pytest.mark.parametrize("d", [1, 3, 17, 90, 300])
def test_same_bits_whatever_the_number_of_threads_of_blas(d):
    for n, m in ((1300, 300), (20_000, 1)):
        case = make("weights", n, m, d)
        for reduction, precision in ((Reduction.LAPLACE, "fast"), (Reduction.MEAN, "high")):
            problem = case.problem(reduction, precision)
            with threadpool_limits(1):
                want = answer(INFO, NumpyBackend(), problem, case)
            with threadpool_limits(4), ThreadPoolExecutor(1) as other:
                got = other.submit(answer, INFO, NumpyBackend(), problem, case).result()
            for name in ("log_sum", "shift", "log_magnitude"):
                assert np.array_equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("terms", [None, PART])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(256, 9, 960), (7, 785, 960), (256, 960, 1), (65, 1, 33), (1, 300, 20_000), (12, 16384, 1)]
)
def test_products_in_pieces(m, k, n, terms):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(m, k)), rng.normal(size=(n, k)).T
    np.testing.assert_allclose(products.product(a, b, terms=terms), a @ b, rtol=1e-11, atol=1e-10)
    out = np.full((m, n + 3), np.nan)
    products.product(a, b, out[:, :n], terms=terms)  # rows of a larger tile
    np.testing.assert_allclose(out[:, :n], a @ b, rtol=1e-11, atol=1e-10)
    assert np.isnan(out[:, n:]).all()


@pytest.mark.parametrize("n", [1, 8192, 8193, 20_000])
def test_dots_in_pieces(n):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, n)), rng.normal(size=(3, n))
    np.testing.assert_allclose(products.dots(a, b), (a * b).sum(1), rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(products.dots(a, b[0]), (a * b[0]).sum(1), rtol=1e-12, atol=1e-10)


def test_threads_option_is_checked():
    with pytest.raises(ValueError, match="threads"):
        NumpyBackend(threads=0)


def test_weights_of_a_whole_tile_of_zeros():
    case = make("mixture", 1300, 20, 2)  # a tile has fewer columns
    log_w = np.full(1300, -np.inf)
    log_w[-10:] = -np.log(10)
    case = Case("zeros", case.points, case.queries, log_w)
    for same in (False, True):
        want = truth(case, same=same)
        for reduction in Reduction:
            problem = case.problem(reduction, "float64", same=same)
            assert errors(problem, answer(INFO, NumpyBackend(), problem, case), want).max() <= 1.0
