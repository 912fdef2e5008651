"""Rules against SciPy and against their formulas; every kind of bandwidth; what is refused."""

import array_api_strict
import numpy as np
import pytest
import reference
import torch
from scipy import stats

import sdkde_core
from sdkde_core.arrays import ingest
from sdkde_core.bandwidth.matrix import Bandwidth
from sdkde_core.bandwidth.rules import RULES, resolve
from sdkde_core.estimator.plan import centre_of, whitened


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


REFERENCE = {  # method -> h of d independent normal columns, in units of σ
    "kde": lambda d, n: (4 / ((d + 2) * n)) ** (1 / (d + 4)),
    "sdkde": lambda d, n: (
        (1.28 * (1 + d / 3 * (2 / 3) ** (d / 2) + d * (d + 2) / 64 * 2 ** (-d / 2)) / ((d + 2) * n)) ** (1 / (d + 8))
    ),
    "laplace": lambda d, n: (128 * (1 + d / 2 + d * (d + 2) / 16) / ((d + 2) * (d + 4) * (d + 6) * n)) ** (1 / (d + 8)),
}


@pytest.mark.parametrize("method", REFERENCE)
def test_normal_reference_is_the_methods_own(x, method):
    options = {"method": method, "bandwidth": "normal-reference"}
    spread = resolve("silverman", x).factor / (0.9 * 400 ** (-1 / 7))
    got = sdkde_core.prepare(x, **options).bandwidth
    np.testing.assert_allclose(got.factor, spread * REFERENCE[method](3, 400), rtol=1e-12)
    w = np.random.default_rng(1).random(400)
    n_eff, spread = w.sum() ** 2 / (w**2).sum(), resolve("silverman", x, np.log(w / w.sum())).factor
    got = sdkde_core.prepare(x, weights=w, **options).bandwidth.factor
    np.testing.assert_allclose(got, spread / (0.9 * n_eff ** (-1 / 7)) * REFERENCE[method](3, n_eff), rtol=1e-9)


def test_spread_is_the_deviation_where_the_quartiles_meet():
    x = np.zeros((100, 1))
    x[:10, 0] = np.arange(10)
    np.testing.assert_allclose(resolve("silverman", x).factor, 0.9 * x.std() * 100 ** (-1 / 5), rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_equal_weights_are_no_weights(x, rule):
    np.testing.assert_allclose(
        resolve(rule, x, np.full(400, -np.log(400)), method="kde").matrix,
        resolve(rule, x, method="kde").matrix,
        rtol=1e-9,
    )


@pytest.mark.parametrize("rule", RULES)
def test_weight_zero_is_absence(x, rule):
    w = np.random.default_rng(2).random(400)
    w[::3] = 0
    x[0] = 1e6  # weight zero
    with np.errstate(divide="ignore"):
        log_w = np.log(w / w.sum())
    kept = w > 0
    want = resolve(rule, x[kept], log_w[kept], method="kde").matrix
    np.testing.assert_allclose(resolve(rule, x, log_w, method="kde").matrix, want, rtol=1e-12)


def test_a_weighted_covariance_is_symmetric():
    grid = np.array(np.meshgrid(*[np.arange(6.0)] * 3)).T.reshape(-1, 3)
    p = np.random.default_rng(0).random((3, 6))
    w = np.prod(p[np.arange(3)[:, None], grid.T.astype(int)], axis=0)
    assert resolve("scott", grid, np.log(w / w.sum())).factor.shape == (3, 3)


def test_offsets_cost_no_digits(x):
    x, w = np.round(x[:100], 6), np.log(np.random.default_rng(5).random(100))
    w -= np.log(np.exp(w).sum())
    for rule in RULES:
        a, b = (resolve(rule, x + offset, w, method="kde").matrix for offset in (0.0, 2.0**20))
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_too_few_samples_for_a_covariance_is_said_at_once():
    with pytest.raises(ValueError, match=r"more samples with weight than dimensions.* 5 in 30"):
        resolve("scott", np.random.default_rng(0).normal(size=(5, 30)))


def test_one_dominant_weight_is_one_sample(x):
    with pytest.raises(ValueError, match="more than one sample"):
        resolve("scott", x, np.log(np.r_[1.0, np.full(399, 1e-20)]))


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_next_to_no_weight_is_absence(x, method):
    """Of a choice too, which sums in float32."""
    x, few = x[:90], np.geomspace(1e-250, 1e-14, 30)
    w = np.r_[np.ones(60), few] / (60 + few.sum())
    got = resolve("auto", x, np.log(w), method=method).factor
    np.testing.assert_allclose(got, resolve("auto", x[:60], method=method).factor, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-160, 1e155])
def test_spread_neither_overflows_nor_underflows(x, scale):
    np.testing.assert_allclose(
        resolve("silverman", x * scale).factor, resolve("silverman", x).factor * scale, rtol=1e-12
    )


def _nearly_singular(d, condition, n=40, seed=0):
    """A matrix, and points of a kernel of it in data units, far from 0."""
    rng = np.random.default_rng([seed, d])
    directions = np.linalg.qr(rng.normal(size=(d, d)))[0] * np.sqrt(np.geomspace(1.0, 1.0 / condition, d))
    scale = 10.0 ** rng.uniform(-3, 3, d)
    h = directions @ directions.T * scale[:, None] * scale
    return h, (1.5 * rng.normal(size=(n, d)) @ directions.T + rng.normal(size=d)) * scale


@pytest.mark.parametrize("condition", [1e3, 1e7, 1e14])
@pytest.mark.parametrize("d", [2, 3, 8, 30])
def test_a_nearly_singular_matrix_costs_no_digits(d, condition):
    h, x = _nearly_singular(d, condition, n=15)
    x, y = x[:12], x[12:]
    for method in ("kde", "sdkde", "laplace"):
        options = {"method": method, "bandwidth": h, "log": method != "laplace"}
        got, want = sdkde_core.estimate(x, y, precision="float64", **options), reference.estimate(x, y, **options)
        np.testing.assert_allclose(got, want, rtol=1e-11)
        ready = sdkde_core.prepare(x, precision="float64", method=method, bandwidth=h)
        np.testing.assert_allclose(ready.estimate(y, log=options["log"]), want, rtol=1e-11)
    # What comes back is rounded in data units, which is as much as h allows.
    shift = sdkde_core.debias(x - x[0], bandwidth=h, precision="float64") - (x - x[0])
    off = np.linalg.solve(np.linalg.cholesky(h), (shift - 0.5 * reference.sums(x, x, h).shift).T)
    assert abs(off).max() < 1e-15 * d * np.sqrt(condition)


def test_a_matrix_is_kept_as_it_was_given():
    h, x = _nearly_singular(8, 1e10)
    h = (h + h.T) / 2
    b = Bandwidth.of(h, 8)
    assert np.array_equal(b.matrix, h)
    with pytest.raises(ValueError, match="read-only"):
        b.matrix[0, 0] = 0.0
    assert b.log_determinant == pytest.approx(0.5 * np.linalg.slogdet(h)[1], rel=1e-7)  # NumPy rounds
    np.testing.assert_allclose(b.scaled(3.0).matrix, 9.0 * h, rtol=1e-13)
    # A factor stands for its own product, which is not h to the last digit.
    again, centre = Bandwidth(8, b.factor), x[0]
    u = b.whiten(x, centre)
    assert (np.linalg.norm(again.whiten(x, centre) - u, axis=1) <= 1e-6 * np.linalg.norm(u, axis=1)).all()
    off = np.linalg.norm(again.stretch(again.whiten(x, centre)) - (x - centre), axis=1)
    assert (off <= 1e-9 * np.linalg.norm(x - centre, axis=1)).all()


@pytest.mark.parametrize("outlier", [1.0, 1e9])
def test_the_centre_lies_among_the_points_where_columns_are_nearly_dependent(outlier):
    """The median of every column is a point 1e6 bandwidths away from all."""
    h, x = _nearly_singular(8, 1e14, n=200)
    x[3] *= outlier
    b = Bandwidth.of(h, 8)
    for kind in (np.asarray, torch.from_numpy, array_api_strict.asarray):
        data = ingest(kind(x))
        distances = whitened(data, b, centre_of(data.train, b))[2]
        assert np.median(np.asarray(distances)) < 10.0


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("value", [0.3, [0.3, 20.0, 0.004], "matrix"])
def test_whitened_points_are_in_c_order(x, value, kind):
    """Whatever order the data are in: kernels are given the address of the first number."""
    convert = np.asarray if kind == "numpy" else pytest.importorskip("torch").from_numpy
    b = Bandwidth.of(np.cov(x.T) if value == "matrix" else value, 3)
    centre = np.zeros(3)
    for given in (np.asfortranarray(x), x[::2], x[:, ::-1].copy()[:, ::-1]):
        if kind == "torch":
            given = np.asfortranarray(x)
        u = b.whiten(convert(given), convert(centre))
        assert u.flags.c_contiguous if kind == "numpy" else u.is_contiguous()
        np.testing.assert_allclose(np.asarray(u), b.whiten(np.ascontiguousarray(given), centre), rtol=1e-12)


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
        (True, TypeError, "bandwidth is True"),
        (None, TypeError, "bandwidth is None; pass a rule's name"),
        ([[1.0], [1.0, 2.0]], ValueError, "equal length"),
        (np.ma.array([1.0, 9.0, 2.0], mask=[0, 1, 0]), TypeError, "masked"),
        (np.longdouble("1e4000"), ValueError, "positive"),
    ],
)
def test_what_is_refused(x, value, error, message):
    with pytest.raises(error, match=message):
        resolve(value, x)


@pytest.mark.parametrize("rule", RULES)
def test_a_constant_column_is_named(x, rule):
    x[:, 1] = 0.1
    with pytest.raises(ValueError, match="column 1 of train is constant"):
        resolve(rule, x, method="kde")


@pytest.mark.parametrize("rule", RULES)
def test_a_single_sample_has_no_rule(rule):
    with pytest.raises(ValueError, match="more than one sample"):
        resolve(rule, np.ones((1, 3)), method="kde")


def test_dependent_columns_are_named(x):
    x[:, 2] = x[:, 0] * 2
    with pytest.raises(ValueError, match=r"1 of 3 directions have no spread, the flattest [+-]0.707·x"):
        resolve("scott", x)


@pytest.mark.parametrize("given", [0.5, [0.5, 2.0], [[0.25, 0.1], [0.1, 1.0]]])
def test_it_is_the_array_that_it_was_made_of_and_has_products_with_numbers(given):
    x, b = np.random.default_rng(3).normal(size=(50, 2)), Bandwidth.of(np.array(given), 2)
    wide = np.broadcast_to(given, np.asarray(b).shape) * (1.5 if np.ndim(given) < 2 else 1.5**2)
    for product in (b * 1.5, np.float64(1.5) * b):
        np.testing.assert_allclose(np.asarray(product), wide, rtol=1e-13)
        got = sdkde_core.estimate(x, bandwidth=product)
        np.testing.assert_allclose(got, sdkde_core.estimate(x, bandwidth=np.asarray(product)), rtol=1e-5)
    assert "× 1.5" in str(product)
    for bad in (0, -1.0, np.nan):
        with pytest.raises(ValueError, match="positive"):
            b * bad
    with pytest.raises(TypeError):
        b * np.ones(2)


@pytest.mark.parametrize("scale", [1.0, 3.7, 1e-9])
def test_weighted_quartiles_that_are_equal_but_for_rounding_are_no_spread(scale):
    rng = np.random.default_rng(0)
    for _ in range(4):
        x, weights = np.round(rng.normal(size=2000) / 2.0) * scale, rng.random(2000)
    for rule in ("auto", "silverman", "normal-reference"):
        h = sdkde_core.select_bandwidth(x, rule=rule, weights=weights).factor.item()
        assert 0.02 * scale < h < scale, (rule, h)


def test_a_multiple_of_the_bandwidth_of_rounded_values_keeps_the_variance():
    x = 3.0 * np.round(np.random.default_rng(3).normal(size=3000) * 10.0 / 3.0)
    found = sdkde_core.select_bandwidth(x)
    for times in (1, 2):
        variance = sdkde_core.prepare(x, bandwidth=times * found).cov()[0, 0]
        assert abs(variance / x.var() - 1.0) < 0.02
