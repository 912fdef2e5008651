"""Shapes of bandwidths chosen from the data: against brute force, where they pay, and where there must be none."""

import json
import math

import numpy as np
import pytest

import sdkde_core
from sdkde_core import select_bandwidth
from sdkde_core.bandwidth.rules import resolve
from sdkde_core.bandwidth.shapes import Fits


def correlated(n=240, seed=0):
    """Three columns, of which two are correlated by 0.95."""
    z = np.random.default_rng(seed).normal(size=(n, 3))
    z[:, 1] = 0.95 * z[:, 0] + np.sqrt(1 - 0.95**2) * z[:, 1]
    return z


def apart(n=240, seed=0):
    """Two groups far apart in the first column, and narrow there: its spread says nothing of them."""
    rng = np.random.default_rng(seed)
    return np.c_[0.1 * rng.normal(size=n) + 6 * (rng.random(n) < 0.5), rng.normal(size=n)]


def parallel(n=400, seed=0):
    """Two groups correlated by 0.95, which lie so that all samples together are correlated by −0.8."""
    z, side = correlated(n, seed)[:, :2], np.random.default_rng(seed).choice((-3.0, 3.0), n)
    return z + np.c_[side, -side]


def test_a_fit_is_brute_force():
    rng = np.random.default_rng(0)
    u, w, factor = rng.normal(size=(60, 3)), rng.random(60), rng.normal(size=(3, 3)) + 2 * np.eye(3)
    w /= w.sum()
    kernels = Fits(u, w, np.eye(3))
    fit = kernels.judged(kernels.fit(factor, np.linalg.inv(factor)))
    matrix, logs, moment = factor @ factor.T, [], np.zeros((3, 3))
    for i in range(60):
        a = np.delete(u - u[i], i, axis=0)
        density = np.delete(w, i) / (1 - w[i]) * np.exp(-0.5 * (a @ np.linalg.inv(matrix) * a).sum(1))
        logs.append(np.log(density.sum() / np.sqrt(np.linalg.det(matrix))))
        moment += w[i] * (a.T * density) @ a / density.sum()
    np.testing.assert_allclose(np.asarray(fit.logs), logs, 1e-6, 1e-6)
    np.testing.assert_allclose(factor @ fit.moment @ factor.T, moment, 1e-5, 1e-6)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_matrix_follows_correlation(method):
    x = correlated()
    chosen = select_bandwidth(x, method=method)
    assert chosen.selection.shape.shape == (3, 3) and "that of the samples' correlation" in chosen.selection.reason
    scale = np.sqrt(np.diagonal(chosen.matrix))
    assert (chosen.matrix / scale[:, None] / scale)[0, 1] == pytest.approx(0.95, abs=0.05)
    assert json.loads(json.dumps(chosen.selection.to_dict()))["shape"] == chosen.selection.shape.tolist()
    np.testing.assert_allclose(chosen.selection.shape, select_bandwidth(x).selection.shape)  # the same for all methods
    assert select_bandwidth(x, method=method, base=x.std(0)).factor.ndim == 1


@pytest.mark.parametrize(("sample", "gain"), [(correlated, 0.15), (apart, 0.2), (parallel, 0.03)])
def test_a_shape_pays_for_samples_not_seen(sample, gain):
    x, unseen = sample(), sample(1000, seed=1)
    shaped, plain = select_bandwidth(x), select_bandwidth(x, base=resolve("normal-reference", x))
    logs = [sdkde_core.estimate(x, unseen, bandwidth=h, log=True, backend="numpy").mean() for h in (shaped, plain)]
    assert logs[0] > logs[1] + gain


def test_a_scale_per_column():
    chosen = select_bandwidth(apart())
    assert chosen.factor.shape == (2,) and "a scale of its own per column" in chosen.selection.reason
    plain = resolve("normal-reference", apart()).factor
    assert chosen.factor[0] / plain[0] < 0.3 * chosen.factor[1] / plain[1]


def test_a_matrix_is_that_of_the_groups_and_not_of_all_samples():
    assert np.corrcoef(parallel().T)[0, 1] < -0.5
    chosen = select_bandwidth(parallel())
    assert chosen.matrix[0, 1] > 0 and "a full matrix" in chosen.selection.reason
    rng = np.random.default_rng(0)
    diagonal = 0.5 * rng.normal(size=(300, 2)) + rng.choice((-3.0, 3.0), (300, 1))
    assert select_bandwidth(diagonal).factor.ndim == 1  # though the columns are correlated


def test_a_shape_is_that_of_the_samples_with_weight():
    """Two groups in one place, of opposite correlation: one of them has hardly any weight."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 200, 2)) * [1.0, 0.3]
    one[:, 1] += 0.95 * one[:, 0]
    other[:, 1] -= 0.95 * other[:, 0]
    chosen = select_bandwidth(np.r_[one, other], weights=np.r_[np.ones(200), np.full(200, 1e-3)]).matrix
    assert chosen[0, 1] / math.sqrt(chosen[0, 0] * chosen[1, 1]) > 0.9


def test_samples_beside_each_other_have_a_shape():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(120, 3))
    chosen = select_bandwidth(np.r_[x, x + rng.normal(size=x.shape) * [1e-5, 1e-7, 1e-9]])  # moments are not positive
    assert np.linalg.eigvalsh(chosen.matrix)[0] > 0


@pytest.mark.parametrize("name", ["normal", "standard_t", "uniform"])
def test_no_shape_where_columns_are_alike(name):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = getattr(rng, name)(*((3,) if name == "standard_t" else ()), size=(250, 2))
        chosen = select_bandwidth(x, method="kde")
        assert chosen.selection.shape is None
        np.testing.assert_allclose(chosen.factor / chosen.factor[0], (h := resolve("silverman", x).factor) / h[0])
    assert select_bandwidth(np.exp(x[:, 0])).selection.shape is None


@pytest.mark.parametrize("sample", [correlated, apart])
def test_what_a_shape_does_not_depend_on(sample):
    x = sample(160)
    n, d = x.shape
    rng, units, h = np.random.default_rng(1), np.array([1e-8, 1e5, 3.0])[:d], select_bandwidth(x).matrix
    order = np.arange(d)[::-1]

    def same(x, rtol):
        with np.errstate(all="raise"):
            got = select_bandwidth(x).matrix
        np.testing.assert_allclose(got, h, rtol, rtol * np.diagonal(h).min())

    assert select_bandwidth(x).selection.shape is not None
    same(x, 0)
    same(x + np.array([1e3, -7.0, 0.0])[:d], 1e-5)
    same(x[rng.permutation(n)], 1e-5)
    same(x * (1 + 1e-9 * rng.normal(size=x.shape)), 1e-3)
    np.testing.assert_allclose(select_bandwidth(x * units).matrix / units[:, None] / units, h, 1e-4, 1e-5)
    np.testing.assert_allclose(select_bandwidth(x[:, order]).matrix[np.ix_(order, order)], h, 1e-3, 1e-5)


def test_weights_are_repeated_samples():
    x, times = correlated(200), np.random.default_rng(2).integers(1, 4, 200)
    shapes = [
        select_bandwidth(*data, **options).selection.shape
        for data, options in (((x,), {"weights": times}), ((np.repeat(x, times, axis=0),), {}))
    ]
    np.testing.assert_allclose(*shapes, rtol=0.1, atol=0.05)


DEPENDENT = {
    "a column twice": lambda x: np.c_[x, x[:, 0]],
    "nearly a column twice": lambda x: np.c_[x, x[:, 0] + 1e-5 * x[:, 2]],
    "a sum of columns": lambda x: np.c_[x, x.sum(1)],
    "a category's columns": lambda x: np.c_[x[:, 0], x[:, :1] < 0, x[:, :1] >= 0],
    "as many columns as samples": lambda x: np.random.default_rng(0).normal(size=(40, 40)) + 5 * x[:40, :1],
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_columns_that_depend_on_each_other_get_no_matrix(name):
    chosen = select_bandwidth(DEPENDENT[name](correlated()), method="kde")
    assert chosen.factor.ndim == 1 and np.isfinite(chosen.factor).all()


def test_a_matrix_that_float64_does_not_hold_is_not_chosen():
    x = correlated()
    chosen = select_bandwidth(x * [1e-200, 1.0, 1e200])
    assert chosen.factor.ndim == 1 and (chosen.factor > 0).all()


def test_far_values_do_not_hide_a_shape():
    x = correlated()
    x[0], x[1, 1] = 1e9, -999.0
    matrix = select_bandwidth(x).matrix
    assert matrix[0, 1] / np.sqrt(matrix[0, 0] * matrix[1, 1]) > 0.6


def test_explain_tells_the_shape():
    told = str(sdkde_core.explain(correlated()))
    assert "auto: full matrix" in told and "times as likely" in told
