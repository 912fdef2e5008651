"""Rules against SciPy and against their formulas; every kind of bandwidth; what is refused."""

import numpy as np
import pytest
from scipy import stats

from sdkde_core.bandwidth import RULES, Bandwidth, _Sample, resolve


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_t(3, size=(400, 3)) * [1.0, 50.0, 0.01]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rule", "scipy_name"), [("scott", "scott"), ("silverman-full", "silverman")])
def test_full_rules_are_scipys(x, rule, scipy_name, weighted):
    w = np.random.default_rng(1).random(400) if weighted else None
    want = stats.gaussian_kde(x.T, scipy_name, weights=w).covariance
    got = resolve(rule, x, None if w is None else np.log(w / w.sum())).matrix
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_silverman_per_column(x):
    q75, q25 = np.quantile(x, [0.75, 0.25], axis=0)
    spread = np.minimum(x.std(0), (q75 - q25) / 1.34)
    np.testing.assert_allclose(resolve("silverman", x).factor, 0.9 * spread * 400 ** (-1 / 7), rtol=1e-12)
    np.testing.assert_allclose(resolve("sdkde", x).factor, 0.4 * spread * 400 ** (-1 / 11), rtol=1e-12)
    np.testing.assert_allclose(resolve("silverman-iso", x).factor, 0.9 * spread.mean() * 400 ** (-1 / 7), rtol=1e-12)


def test_spread_is_the_deviation_where_the_quartiles_meet():
    x = np.zeros((100, 1))
    x[:10, 0] = np.arange(10)
    np.testing.assert_allclose(resolve("silverman", x).factor, 0.9 * x.std() * 100 ** (-1 / 5), rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_equal_weights_are_no_weights(x, rule):
    np.testing.assert_allclose(resolve(rule, x, np.full(400, -np.log(400))).matrix, resolve(rule, x).matrix, rtol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_weight_zero_is_absence(x, rule):
    w = np.random.default_rng(2).random(400)
    w[::3] = 0
    x[0] = 1e6  # weight zero
    with np.errstate(divide="ignore"):
        log_w = np.log(w / w.sum())
    kept = w > 0
    np.testing.assert_allclose(resolve(rule, x, log_w).matrix, resolve(rule, x[kept], log_w[kept]).matrix, rtol=1e-12)


def test_weighted_quantile_reduces_to_numpys(x):
    for p in (0.25, 0.5, 0.75):
        got = _Sample(x, np.full(400, 1 / 400), 400.0)._quantile(p)
        np.testing.assert_allclose(got, np.quantile(x, p, axis=0), rtol=1e-9)


@pytest.mark.parametrize("value", [0.3, [0.3, 20.0, 0.004], "matrix"])
def test_whitening_and_back(x, value):
    value = np.cov(x.T) if value == "matrix" else value
    b = Bandwidth.of(value, 3)
    centre = x[0]
    u = b.whiten(x, centre)
    np.testing.assert_allclose(b.stretch(u) + centre, x, rtol=1e-10, atol=1e-12)
    matrix = np.broadcast_to(value, (3,)) ** 2 * np.eye(3) if np.ndim(value) < 2 else value
    np.testing.assert_allclose(b.matrix, matrix, rtol=1e-12)
    squared = ((x - centre) @ np.linalg.inv(matrix) * (x - centre)).sum(1)
    np.testing.assert_allclose((u**2).sum(1), squared, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(b.pull_back(u), (x - centre) @ np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    assert b.log_determinant == pytest.approx(0.5 * np.linalg.slogdet(matrix)[1])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0.0, ValueError, "positive"),
        (-1.0, ValueError, "positive"),
        (np.nan, ValueError, "positive"),
        (np.inf, ValueError, "positive"),
        ([1.0, 0.0, 1.0], ValueError, "index 1"),
        ([1.0, 2.0], ValueError, "3 dimensions"),
        (np.eye(2), ValueError, "3 dimensions"),
        (np.ones((3, 3, 3)), ValueError, "3 dimensions"),
        ([[1.0, 0.5, 0], [0.4, 1, 0], [0, 0, 1]], ValueError, "not symmetric"),
        (np.ones((3, 3)), ValueError, r"2 of 3 directions have no spread.*x\d"),
        (np.diag([1.0, -1.0, 1.0]), ValueError, r"H\[1, 1\]"),
        (np.diag([1.0, np.nan, 1.0]), ValueError, "not finite"),
        ("silvermann", ValueError, "'silverman'"),
        (1j, TypeError, "dtype complex128"),
        (True, TypeError, "dtype bool"),
        (None, TypeError, "dtype object"),
        ([[1.0], [1.0, 2.0]], ValueError, "ragged"),
    ],
)
def test_what_is_refused(x, value, error, message):
    with pytest.raises(error, match=message):
        resolve(value, x)


def test_badly_scaled_covariances_are_fine():
    b = Bandwidth.of(np.diag([1e-20, 1.0, 1e20]), 3)
    np.testing.assert_allclose(np.diagonal(b.factor), [1e-10, 1.0, 1e10])


@pytest.mark.parametrize("rule", RULES)
def test_a_constant_column_is_named(x, rule):
    x[:, 1] = 0.1
    with pytest.raises(ValueError, match="column 1 of train is constant"):
        resolve(rule, x)


@pytest.mark.parametrize("rule", RULES)
def test_a_single_sample_has_no_rule(rule):
    with pytest.raises(ValueError, match="two samples"):
        resolve(rule, np.ones((1, 3)))


def test_dependent_columns_are_named(x):
    x[:, 2] = x[:, 0] * 2
    with pytest.raises(ValueError, match=r"1 of 3 directions have no spread, the flattest [+-]0.707·x"):
        resolve("scott", x)
