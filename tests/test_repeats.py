"""Counts and rounded data: equal samples are summed once, and every sample has its result."""

import pickle

import numpy as np
import pytest

import sdkde_core
from sdkde_core.engine.repeats import distinct, distinct_share, merged_weights

RNG = np.random.default_rng(11)
SPOTS = np.unique(RNG.integers(-3, 4, size=(200, 3)) / [2.0, 1.0, 4.0], axis=0)
COUNTS = RNG.integers(1, 80, size=len(SPOTS))
X = RNG.permutation(np.repeat(SPOTS, COUNTS, axis=0))
ROWS = RNG.normal(size=(40, 3)) * 2.0
MANY = RNG.permutation(np.concatenate([np.repeat(ROWS, 100, axis=0), RNG.normal(size=(500, 3))]))
OPTIONS = {"bandwidth": 0.7, "precision": "high", "tails": 0.0}
NAMES = ["fourier", "numba", "numpy", "torch", pytest.param("keops", marks=pytest.mark.slow)]


WHICH = (X[:, None, :] == SPOTS).all(axis=2).argmax(axis=1)  # of the spots every sample is


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_estimate_of_weighted_spots(name, method):
    how = {"method": method, "negative": "keep", "log": method != "laplace", **OPTIONS}
    for query in (None, ROWS, MANY):
        want = sdkde_core.estimate(SPOTS, X if query is None else query, weights=COUNTS, backend="numpy", **how)
        np.testing.assert_allclose(sdkde_core.estimate(X, query, backend=name, **how), want, rtol=3e-5, atol=1e-5)


def test_every_sample_has_its_result():
    w, how = RNG.random(len(X)) * (RNG.random(len(X)) > 0.2), {"backend": "numpy", **OPTIONS}
    for weights in (None, w):
        given = COUNTS if weights is None else np.bincount(WHICH, weights)
        want = sdkde_core.debias(SPOTS, weights=given, **how)
        np.testing.assert_allclose(sdkde_core.debias(X, weights=weights, **how), want[WHICH], atol=1e-6)
        score = sdkde_core.grad_log_density(SPOTS, ROWS, weights=given, **how)
        np.testing.assert_allclose(sdkde_core.grad_log_density(X, ROWS, weights=weights, **how), score, atol=3e-5)
        ready = sdkde_core.prepare(X, weights=weights, **how)
        logs = sdkde_core.estimate(SPOTS, MANY, weights=given, log=True, **how)
        for density in (ready, pickle.loads(pickle.dumps(ready))):
            assert density.n_train == len(X)
            np.testing.assert_allclose(density.estimate(MANY, log=True), logs, atol=1e-5)
    told = []
    got = sdkde_core.debias(X, progress=lambda done, total: told.append((done, total)), weights=w, **how)
    np.testing.assert_allclose(got, want[WHICH], atol=1e-6)
    assert told[-1] == (len(X), len(X))


def test_rows_that_are_no_numbers_and_far_ones_stay_apart():
    rows = MANY.copy()
    rows[5], rows[7:400] = np.nan, 1e6
    got = sdkde_core.estimate(X, rows, check_finite=False, log=True, backend="numpy", **OPTIONS)
    want = sdkde_core.estimate(SPOTS, rows[[0, 7]], weights=COUNTS, log=True, backend="numpy", **OPTIONS)
    assert np.isnan(got[5]) and np.isnan(got).sum() == 1
    np.testing.assert_allclose(got[[0, 7, 399]], want[[0, 1, 1]], rtol=1e-6)


@pytest.mark.parametrize("k", [3, pytest.param(40, marks=pytest.mark.slow), 700])
def test_many_rows_that_are_no_numbers(k):
    rng = np.random.default_rng(k)
    x = rng.integers(0, k, size=(4200, 2)).astype(float)
    y = np.where(rng.random(4200)[:, None] < 0.3, np.nan, x)
    got = sdkde_core.estimate(x, y, method="kde", bandwidth=0.3, check_finite=False, backend="numpy")
    want = sdkde_core.estimate(x, x, method="kde", bandwidth=0.3, backend="numpy")
    np.testing.assert_allclose(got, np.where(np.isnan(y[:, 0]), np.nan, want), rtol=1e-5)
    x[::3] = np.nan
    assert np.isnan(sdkde_core.estimate(x, y, method="kde", bandwidth=0.3, check_finite=False, backend="numpy")).all()


def test_groups_of_equal_points():
    points = np.array([[0.0, 1.0], [2.0, 3.0], [-0.0, 1.0], [0.0, 2.0], [2.0, 3.0]])
    often = np.repeat(points, 900, axis=0)
    for some in (points, often, np.concatenate([often, RNG.random((9000, 2))])):
        first, group = distinct(some)
        assert np.array_equal(some[first][group], some) and len(first) == len(np.unique(some, axis=0))
    first, group = distinct(points)
    weights = merged_weights(np.array([-1000.0, -3.0, -np.inf, -np.inf, -5.0]), first, group)[group]
    assert weights == pytest.approx([-1000.0, np.logaddexp(-3.0, -5.0), -1000.0, -np.inf, weights[1]], rel=1e-15)


def test_few_of_many_are_found_and_priced():
    rng = np.random.default_rng(1)
    grades, apart = rng.integers(1, 6, size=(50_000, 5)).astype(float), rng.normal(size=(50_000, 5))
    assert distinct_share(apart) == 1.0 and distinct_share(grades[:100]) == 1.0
    assert distinct_share(grades) * 50_000 == pytest.approx(5**5, rel=0.2)
    few, many = (sdkde_core.explain(x, bandwidth=1.0, device="cpu").candidates for x in (grades, apart))
    few, many = (min(c.seconds for c in found if c.ok) for found in (few, many))
    assert few < 0.1 * many
    hourly = np.where(np.arange(40_960)[:, None] % 10 == 0, 0.0, rng.normal(size=(40_960, 2)))
    stamps = np.stack([86400e9 * rng.integers(0, 400, 40_960) + 1.7e18, rng.normal(size=40_960)], axis=1)
    assert (
        distinct_share(hourly) == distinct_share(stamps) == 1.0
    )  # sampled by a period, or by rounded sums, they are not
