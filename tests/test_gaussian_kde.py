"""gaussian_kde beside SciPy's, and what it has besides. SciPy's own tests run in test_gaussian_kde_by_others.py."""

import pickle

import numpy as np
import pytest

import sdkde_core
from sdkde_core import gaussian_kde

stats = pytest.importorskip("scipy.stats")
integrate = pytest.importorskip("scipy.integrate")

METHODS = ("kde", "sdkde", "laplace")


def _data(d, n=60, seed=0):
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(d, d)) + 2 * np.eye(d)
    return mixing @ rng.normal(size=(d, n)), rng.random(n)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [1, 3])
def test_numbers_are_scipys(d, weighted):
    x, weights = _data(d)
    weights = weights if weighted else None
    other, other_weights = _data(d, 40, seed=1)
    points = np.hstack([x[:, :9], 5 * x[:, :1]])
    for bw in (None, "silverman", 0.3, lambda kde: kde.neff**-0.3):
        ours, theirs = gaussian_kde(x, bw, weights), stats.gaussian_kde(x, bw, weights)
        for name in ("factor", "neff", "weights", "covariance", "inv_cov", "cho_cov", "log_det", "d", "n"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(ours(points), theirs(points), rtol=1e-11)
        np.testing.assert_allclose(ours.logpdf(points), theirs.logpdf(points), rtol=1e-12, atol=1e-11)
        np.testing.assert_allclose(
            ours.integrate_gaussian(np.ones(d), np.eye(d)), theirs.integrate_gaussian(np.ones(d), np.eye(d)), rtol=1e-12
        )
        second = gaussian_kde(other, 0.4, other_weights), stats.gaussian_kde(other, 0.4, other_weights)
        expected = theirs.integrate_kde(second[1])
        assert ours.integrate_kde(second[0]) == pytest.approx(expected, rel=1e-10)
        assert ours.integrate_kde(second[1]) == pytest.approx(expected, rel=1e-10)
        np.testing.assert_allclose(ours.resample(7, seed=3), theirs.resample(7, seed=3), rtol=1e-12)
        assert ours.resample().shape == theirs.resample().shape


def test_boxes():
    x, weights = _data(1)
    ours, theirs = gaussian_kde(x, weights=weights), stats.gaussian_kde(x, weights=weights)
    for low, high in ((-1, 0.5), (0.5, -1), (-np.inf, np.inf), (3.0, 1e100)):
        expected = theirs.integrate_box_1d(low, high)
        assert ours.integrate_box_1d(low, high) == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert ours.integrate_box([low], [high]) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    x, weights = _data(2)
    ours, theirs = gaussian_kde(x, weights=weights), stats.gaussian_kde(x, weights=weights)
    for low, high in (([-1, -2], [0, 2]), ([1, 2], [0, -1]), ([-np.inf, 0], [np.inf, 1])):
        expected = theirs.integrate_box(low, high)
        assert ours.integrate_box(low, high) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="only handles 1D"):
        ours.integrate_box_1d(0, 1)


@pytest.mark.parametrize("method", METHODS)
def test_integrals_are_those_of_the_density(method):
    x, weights = _data(1)
    kde = gaussian_kde(x, weights=weights, method=method)
    grid = np.linspace(x.min() - 9, x.max() + 9, 2001)
    density, step = kde(grid), grid[1] - grid[0]
    assert density.sum() * step == pytest.approx(1)
    expected = (density * stats.norm.pdf(grid, 0.3, 0.7)).sum() * step
    assert kde.integrate_gaussian(0.3, 0.7**2) == pytest.approx(expected, rel=1e-10)
    assert kde.integrate_box_1d(-np.inf, grid[800]) == pytest.approx(
        density[:800].sum() * step + density[800] * step / 2, rel=1e-4
    )
    if method != "laplace":
        assert kde.integrate_kde(kde) == pytest.approx((density**2).sum() * step, rel=1e-10)


def test_integrals_in_two_dimensions():
    """Of the density times a normal one; of Laplace's kernels, whose covariance is not in proportion to that."""
    x, weights = _data(2)
    axis = np.linspace(-14, 14, 281)
    points, step = np.stack(np.meshgrid(axis, axis)).reshape(2, -1), axis[1] - axis[0]
    normal = stats.multivariate_normal([0.5, 0.1], [[1.0, 0.4], [0.4, 0.7]])
    for method in ("sdkde", "laplace"):
        kde = gaussian_kde(x, weights=weights, method=method)
        expected = (kde(points) * normal.pdf(points.T)).sum() * step**2
        assert kde.integrate_gaussian(normal.mean, normal.cov) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_those_of_estimate(method):
    x, weights = _data(2)
    kde = gaussian_kde(x, weights=weights, method=method)
    expected = sdkde_core.estimate(x.T, method=method, bandwidth=kde.covariance, weights=weights, precision="float64")
    np.testing.assert_allclose(kde(x), expected, rtol=1e-9, atol=1e-12)


def test_debiased_samples_are_drawn_and_projected():
    x, weights = _data(3)
    kde = gaussian_kde(x, weights=weights, method="sdkde")
    moved = sdkde_core.debias(x.T, bandwidth=kde.covariance, weights=weights, precision="float64").T
    still = stats.gaussian_kde(x, weights=weights)
    chosen = np.random.RandomState(5)
    chosen.multivariate_normal(np.zeros(3), still.covariance, size=7)
    index = chosen.choice(60, size=7, p=still.weights)
    np.testing.assert_allclose(kde.resample(7, 5) - still.resample(7, 5), (moved - x)[:, index], atol=1e-9)
    part, points = kde.marginal([-1, 0]), x[[2, 0], :5]
    spread = part.covariance
    np.testing.assert_allclose(spread, kde.covariance[np.ix_([2, 0], [2, 0])], rtol=1e-12)
    kernels = [stats.multivariate_normal(m, spread).pdf(points.T) for m in moved[[2, 0]].T]
    np.testing.assert_allclose(part(points), kde.weights @ np.array(kernels), rtol=1e-9)
    part.set_bandwidth(0.5)
    np.testing.assert_allclose(part(points), gaussian_kde(x[[2, 0]], 0.5, weights, method="sdkde")(points), rtol=1e-9)


@pytest.mark.parametrize("method", ["kde", "laplace"])
def test_marginals(method):
    x, weights = _data(2)
    kde = gaussian_kde(x, weights=weights, method=method)
    expected, _ = integrate.quad(lambda y: kde([0.3, y])[0], -20, 20, epsabs=1e-10, limit=200)
    assert kde.marginal(0)(0.3) == pytest.approx(expected, rel=1e-7)


def test_the_signed_method_refuses():
    x, _ = _data(1)
    kde = gaussian_kde(x, method="laplace")
    for call in (kde.resample, lambda: kde.integrate_kde(kde), lambda: gaussian_kde(x).integrate_kde(kde)):
        with pytest.raises(ValueError, match="signed"):
            call()


@pytest.mark.slow
def test_a_stack_answers_by_its_parts(tmp_path):
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.normal(size=(200, 2)) @ [[1.0, 0.8], [0.0, 0.4]], [4, 0] + 0.4 * rng.normal(size=(100, 2))])
    options = {"method": "stacked", "precision": "float64", "coordinates": "identity"}
    kde, want = gaussian_kde(x.T, method="stacked"), sdkde_core.prepare(x, **options)
    axis = np.linspace(-7, 9, 401)
    points, step = np.stack(np.meshgrid(axis, axis)).reshape(2, -1), axis[1] - axis[0]
    density = kde(points)
    np.testing.assert_allclose(density, want.estimate(points.T), rtol=1e-9)
    normal, theirs = stats.multivariate_normal([0.5, 0.1], [[1.0, 0.4], [0.4, 0.7]]), stats.gaussian_kde(x.T)
    for got, other in (
        (kde.integrate_gaussian(normal.mean, normal.cov), normal.pdf(points.T)),
        (kde.integrate_kde(kde), density),
        (kde.integrate_kde(theirs), theirs(points)),
        (gaussian_kde(x.T).integrate_kde(kde), theirs(points)),
    ):
        assert got == pytest.approx((density * other).sum() * step**2, rel=1e-7)
    assert kde.integrate_box([-1, -1], [1, 2]) == pytest.approx(want.probability([-1, -1], [1, 2]), rel=1e-9)
    part = kde.marginal(-1)
    np.testing.assert_allclose(part(axis), density.reshape(401, 401).sum(axis=1) * step, rtol=1e-6, atol=1e-7)
    assert part.integrate_box_1d(-1, 1) == pytest.approx(want.probability([-np.inf, -1], [np.inf, 1]), rel=1e-9)
    drawn = kde.resample(4000, seed=1)
    assert (abs(drawn[1]) < 1).mean() == pytest.approx(part.integrate_box_1d(-1, 1), abs=0.03)
    kde.save(tmp_path / "a")
    for again in (sdkde_core.load(tmp_path / "a"), pickle.loads(pickle.dumps(kde))):
        np.testing.assert_allclose(again(points[:, ::99]), density[::99], rtol=1e-13)
    for call in (lambda: kde.set_bandwidth(0.3), lambda: gaussian_kde(x.T, "auto", method="stacked")):
        with pytest.raises(ValueError, match="leave it out: a stack"):
            call()
    for call in (lambda: kde.factor, lambda: kde.inv_cov, lambda: theirs.integrate_kde(kde)):
        with pytest.raises(AttributeError, match=r"several bandwidths; see those of prepared\.parts"):
            call()


def test_other_rules():
    x, weights = _data(1, 200)
    for rule in ("isj", "auto", "lscv"):
        kde = gaussian_kde(x, rule, weights)
        h = sdkde_core.prepare(x.T, method="kde", bandwidth=rule, weights=weights).bandwidth.factor
        assert kde.covariance[0, 0] == pytest.approx(h[0] ** 2, rel=1e-6), rule
    x, weights = _data(2, 200)
    kde = gaussian_kde(x, "auto", weights, method="sdkde")
    chosen = sdkde_core.select_bandwidth(x.T, weights=weights, base=gaussian_kde(x, 1.0, weights).covariance)
    np.testing.assert_allclose(kde.covariance, chosen.matrix, rtol=1e-6)
    kde.set_bandwidth(kde.factor * 0.5)  # as seaborn's bw_adjust
    np.testing.assert_allclose(kde.covariance, chosen.matrix / 4, rtol=1e-6)
    assert gaussian_kde(x, "isj").factor > 0


def test_the_density_is_prepared_once_per_bandwidth():
    x = _data(1)[0][0]
    kde = gaussian_kde(x)
    first = kde.prepared
    kde(1.0)
    assert kde.prepared is first
    kde.set_bandwidth(0.5)
    assert kde.prepared is not first
    assert kde.prepared.bandwidth.factor[0] == pytest.approx(0.5 * np.std(x, ddof=1))
    for bw in (0.3, "isj", "silverman"):
        kde.set_bandwidth(bw)
        again = pickle.loads(pickle.dumps(kde))
        np.testing.assert_array_equal(again([0.5, 7.0]), kde([0.5, 7.0]))
        again.set_bandwidth("scott")
        assert again.factor == kde.scotts_factor()


def test_arrays_of_other_kinds():
    torch = pytest.importorskip("torch")
    x, _ = _data(2)
    kde, plain = gaussian_kde(torch.asarray(x)), gaussian_kde(x)
    values = kde(torch.asarray(x))
    assert isinstance(values, torch.Tensor)
    np.testing.assert_array_equal(values.numpy(), plain(x))
    np.testing.assert_array_equal(kde(x.tolist()), plain(x))
    np.testing.assert_array_equal(kde.resample(3, 0).numpy(), plain.resample(3, 0))
    assert gaussian_kde(x.astype("f4"))(x.astype("f4")).dtype == np.float64


@pytest.mark.parametrize("method", METHODS)
def test_arrays_on_a_device(method):
    """array_api_strict's second device mixes with nothing else, as a GPU would."""
    strict = pytest.importorskip("array_api_strict")
    x, weights = _data(2)
    there, host = (strict.Device(name) for name in ("device1", "CPU_DEVICE"))
    kde = gaussian_kde(strict.asarray(x, device=there), weights=strict.asarray(weights, device=there), method=method)
    plain = gaussian_kde(x, weights=weights, method=method)
    pairs = [(kde(strict.asarray(x, device=there)), plain(x)), (kde.marginal(1)(1.0), plain.marginal(1)(1.0))]
    if method != "laplace":
        pairs.append((kde.resample(3, 0), plain.resample(3, 0)))
    for got, expected in pairs:
        got = got if isinstance(got, np.ndarray) else np.asarray(strict.asarray(got, device=host))
        np.testing.assert_allclose(got, expected, rtol=1e-9)
    assert pairs[0][0].device == there
    assert kde.integrate_gaussian([0, 0], np.eye(2)) == pytest.approx(plain.integrate_gaussian([0, 0], np.eye(2)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), ValueError, "multiple elements"),
        (([1.0, 1.0, 1.0],), np.linalg.LinAlgError, "lower-dimensional subspace"),
        (([[0.0, 1.0, 3.0], [0.0, 2.0, 6.0]],), np.linalg.LinAlgError, "lower-dimensional subspace"),
        (([[0.0, 1.0], [5.0, 2.0]],), np.linalg.LinAlgError, "lower-dimensional subspace"),
        (([0.0, 1.0, 3.0], None, [0.0, 1.0, 0.0]), np.linalg.LinAlgError, "lower-dimensional subspace"),
        ((np.ones((3, 2)),), ValueError, "3 > 2.*transposing"),
        ((np.ones((3, 2, 2)),), ValueError, r"dataset has shape \(3, 2, 2\)"),
        (([0.0, 1.0, np.nan],), ValueError, "dataset has values that are not finite"),
        (([0.0, 1.0, 1j],), TypeError, "dataset is .* pass real numbers"),
        (([0.0, 1.0], "auot"), ValueError, "bw_method is 'auot'.*did you mean 'auto'"),
        (([0.0, 1.0], [0.1, 0.2]), ValueError, "bw_method is .* a number, or a callable"),
        (([0.0, 1.0], 0.0), ValueError, "factor 0.0"),
        (([0.0, 1.0], None, [1.0, -1.0]), ValueError, "weights has values that are negative"),
        (([0.0, 1.0], None, [1.0]), ValueError, "of length n: it has 1, dataset has 2 columns"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        gaussian_kde(*arguments)


def test_bad_options_and_points():
    x, _ = _data(2)
    with pytest.raises(ValueError, match="method is 'sd'"):
        gaussian_kde(x, method="sd")
    with pytest.raises(ValueError, match="bw_method='isj' is made for"):
        gaussian_kde(x, "isj", method="sdkde")
    kde = gaussian_kde(x)
    with pytest.raises(ValueError, match="points have dimension 3, dataset has dimension 2"):
        kde(np.ones((3, 3)))
    with pytest.raises(ValueError, match="points has values that are not finite"):
        kde([np.inf, 0.0])
    with pytest.raises(ValueError, match="not the same dimensionality"):
        kde.integrate_kde(gaussian_kde(x[0]))
    with pytest.raises(np.linalg.LinAlgError):
        kde.integrate_gaussian([0, 0], -np.eye(2) * 1e6)
    with pytest.raises(ValueError, match="mean does not have dimension 2"):
        kde.integrate_gaussian([0], np.eye(2))


def test_a_covariance_of_the_users_and_numbers_of_numpys_are_saved(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 60))
    kde = sdkde_core.gaussian_kde(x, method="sdkde", step=np.float32(0.3), support=[(np.int64(-9), None), None])
    kde.save(tmp_path / "a.sdkde")
    assert sdkde_core.load(tmp_path / "a.sdkde")([0, 0]) == kde([0, 0])
    kde = sdkde_core.gaussian_kde(x)
    kde.covariance = 0.1 * np.eye(2)
    kde.save(tmp_path / "b.sdkde")
    loaded = sdkde_core.load(tmp_path / "b.sdkde")
    assert np.array_equal(loaded.covariance, kde.covariance) and loaded([0, 0]) == kde([0, 0])
    assert loaded.integrate_kde(loaded) == kde.integrate_kde(kde)
    assert np.array_equal(loaded.resample(seed=0), kde.resample(seed=0))
