"""The NumPy backend against the reference, by the tolerances of the contract."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sdkde_numpy.backend import NumpyBackend
from sdkde_numpy.info import INFO
from threadpoolctl import threadpool_info, threadpool_limits

import sdkde_core
from sdkde_core.engine import products
from sdkde_core.protocol import Reduction
from sdkde_core.testing.problems import answer, make


def test_points_that_coincide_keep_the_level():
    """At extent 0 squares are exact in any precision, but log weights and shifts are not."""
    x, weights = np.full((3, 2), 5.0), [1.0, 2.0, 1000.0]
    options = {"weights": weights, "bandwidth": 1.0, "precision": "float64", "backend": "numpy"}
    for method in ("kde", "sdkde"):
        got = sdkde_core.estimate(x, method=method, log=True, **options)
        np.testing.assert_allclose(got, -np.log(2 * np.pi), rtol=0, atol=1e-13)
        got = sdkde_core.prepare(x, method=method, **options).estimate(x, log=True)
        np.testing.assert_allclose(got, -np.log(2 * np.pi), rtol=0, atol=1e-13)


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
def test_same_bits_whatever_the_number_of_threads(d):
    """Of the backend's, and of those that BLAS might use."""
    for n, m in ((1300, 600), (20_000, 1), (200_000 if d == 3 else 1, 7)):
        case = make("weights", n, m, d)
        for reduction, precision in ((Reduction.LAPLACE, "fast"), (Reduction.MEAN, "high")):
            problem = case.problem(reduction, precision)
            with threadpool_limits(1):
                want = answer(INFO, NumpyBackend(threads=1), problem, case)
            with threadpool_limits(4), ThreadPoolExecutor(1) as other:
                got = other.submit(answer, INFO, NumpyBackend(threads=3), problem, case).result()
            for name in ("log_sum", "shift", "log_magnitude"):
                assert np.array_equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("terms", [None, 80])
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
