"""How far samples of SD-KDE move: the step, in numbers or by moments, and the bandwidth of the score."""

import pickle

import numpy as np
import pytest

import sdkde_core
from sdkde_core.bandwidth.matrix import Bandwidth

RNG = np.random.default_rng(5)
X, Y, W = RNG.normal(size=(300, 3)) * [1.0, 2.0, 0.5], RNG.normal(size=(7, 3)), RNG.random(300)
H = [[0.3, 0.1, 0.0], [0.1, 1.5, 0.0], [0.0, 0.0, 0.1]]


def score_steps(x, h, c=1.0, weights=None):
    """H times the score, from the paper's half step at c times the bandwidth."""
    wide = Bandwidth.of(np.array(h), x.shape[1]) * c
    moved = sdkde_core.debias(x, bandwidth=wide, weights=weights, precision="float64")
    return 2.0 * (moved - x) / c**2


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("h", [0.4, [0.4, 0.8, 0.2], H])
def test_steps_are_multiples_of_the_score_at_its_bandwidth(h, weights):
    options = {"bandwidth": h, "weights": weights, "precision": "float64"}
    half = sdkde_core.estimate(X, Y, **options)
    np.testing.assert_array_equal(sdkde_core.estimate(X, Y, step=0.5, **options), half)
    for step, c in ((0.9, None), (0.5, 2.0), (1.3, 0.7)):
        want = X + step * score_steps(X, h, c or 1.0, weights)
        got = sdkde_core.debias(X, step=step, score_bandwidth=c, **options)
        np.testing.assert_allclose(got, want, atol=1e-8)
        given = sdkde_core.estimate(want, Y, method="kde", **options)
        np.testing.assert_allclose(sdkde_core.estimate(X, Y, step=step, score_bandwidth=c, **options), given, rtol=1e-7)


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("c", [None, 1.5])
def test_moments_keep_the_total_variance_in_bandwidths(c, weights):
    options = {"weights": weights, "precision": "float64", "step": "moments", "score_bandwidth": c}
    shares, precision = (np.ones(300) if weights is None else weights), np.linalg.inv(H)

    def variance(z):
        z = z - np.average(z, axis=0, weights=shares)
        return np.average(np.einsum("ij,jk,ik->i", z, precision, z), weights=shares)

    mixture = sdkde_core.prepare(X, bandwidth=np.array(H), **options).mixture()
    np.testing.assert_allclose(variance(mixture.means) + 3.0, variance(X), rtol=1e-9)
    moved = sdkde_core.debias(X, bandwidth=np.array(H), **options)
    np.testing.assert_allclose(moved, mixture.means, atol=1e-9)


def test_moments_are_clipped_between_the_papers_step_and_the_longest():
    options = {"precision": "float64", "step": "moments"}
    for h, step in ((1e-3, 0.5), (1.5, 1.2)):  # samples that do not see each other; too wide to keep the variance
        want = X + step * score_steps(X, h)
        np.testing.assert_allclose(sdkde_core.debias(X, bandwidth=h, **options), want, atol=1e-8)


def test_they_are_kept_by_files_pickles_and_kinds_of_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    options = {"bandwidth": 0.5, "step": "moments", "score_bandwidth": 1.5}
    want, ready = sdkde_core.estimate(X, Y, **options), sdkde_core.prepare(X, **options)
    ready.save(tmp_path / "a.sdkde")
    for one in (ready, pickle.loads(pickle.dumps(ready)), sdkde_core.load(tmp_path / "a.sdkde")):
        np.testing.assert_allclose(one.estimate(Y), want, rtol=1e-4)
    got = sdkde_core.estimate(torch.tensor(X), torch.tensor(Y), **options)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    model = sdkde_core.KernelDensity(method="sdkde", **options).fit(X)
    np.testing.assert_allclose(model.score_samples(Y), np.log(want), rtol=1e-4)
    kde = sdkde_core.gaussian_kde(X.T, method="sdkde", step="moments", score_bandwidth=1.5)
    want = sdkde_core.estimate(X, Y, **options | {"bandwidth": kde.covariance, "precision": "float64"})
    kde.save(tmp_path / "b.sdkde")
    for one in (kde, sdkde_core.load(tmp_path / "b.sdkde")):
        np.testing.assert_allclose(one(Y.T), want)
    plain = sdkde_core.gaussian_kde(kde.prepared.mixture().means.T, lambda _: 1.0)
    plain.covariance = kde.covariance
    np.testing.assert_allclose(kde.integrate_kde(kde), plain.integrate_kde(plain))
    assert "step moments, score at 1.5 bandwidths" in repr(kde.prepared)
    assert "step moments, score at 1.5 bandwidths" in str(sdkde_core.explain(X, Y, **options))


@pytest.mark.parametrize("options", [{"step": "moments"}, {"step": 0.8, "score_bandwidth": 1.3}])
def test_derivatives_go_through_the_step(options):
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(X[:12, :2]), torch.tensor(Y[:3, :2])
    h = torch.tensor([0.6, 1.0], dtype=torch.float64)

    def estimate(x, h):
        return sdkde_core.estimate(x, y, bandwidth=h, log=True, precision="float64", **options)

    assert torch.autograd.gradcheck(estimate, (x.requires_grad_(), h.requires_grad_()), atol=1e-4)


@pytest.mark.parametrize("c", [None, 1.4])
@pytest.mark.parametrize("x", [[[0.0, 0.0], [1e3, 0.0], [0.0, 2e3]], [[1.0, 2.0]], [[1.0, 2.0]] * 3])
def test_derivatives_where_no_sample_moves_are_finite(x, c):
    torch = pytest.importorskip("torch")
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    how = {"bandwidth": 1.0, "step": "moments", "score_bandwidth": c, "log": True}
    sdkde_core.estimate(x, torch.tensor([[0.1, 0.1]]).double(), **how).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "mean"}, "pass a positive number, 'moments', or None"),
        ({"step": -1.0}, "pass a positive number"),
        ({"step": True}, "pass a positive number"),
        ({"score_bandwidth": 0}, "pass a positive number, or None"),
        ({"step": 10**400}, "pass a positive number"),
        ({"step": 0.7, "method": "kde"}, "for method='sdkde'"),
        *[({name: x}, "nearer to 1") for name, x in (("step", 1e200), ("score_bandwidth", 1e-200))],
        ({"step": "moments", "score_bandwidth": 1e-308}, "nearer to 1"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sdkde_core.estimate(X, Y, **{"bandwidth": 0.4} | options)
    assert sdkde_core.estimate(X, Y, bandwidth=0.4, step=np.float32(0.5), score_bandwidth=1e160).all()


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("options", [{"step": 0.8}, {"step": "moments"}, {"score_bandwidth": 1.5, "tails": 0.1}])
def test_data_that_are_not_in_memory_have_the_same_estimate(options, weights):
    da = pytest.importorskip("dask.array")
    options = options | {"weights": weights, "bandwidth": 0.5, "precision": "float64"}
    for estimate in (lambda x, **how: sdkde_core.estimate(x, Y, **how), sdkde_core.debias):
        got = estimate(da.from_array(X, chunks=100), **options).compute()
        np.testing.assert_allclose(got, estimate(X, **options), rtol=1e-9)


def test_auto_chooses_a_step_in_several_columns():
    rng, d = np.random.default_rng(8), 6
    x, y = rng.normal(size=(400, d)), rng.normal(size=(1000, d))
    found = sdkde_core.select_bandwidth(x)
    default = sdkde_core.estimate(x, y, log=True)
    np.testing.assert_allclose(sdkde_core.estimate(x, y, bandwidth=found, log=True), default, rtol=1e-5)
    said = {"bandwidth": np.asarray(found), "step": "moments", "score_bandwidth": 2.0, "tails": found.tails}
    np.testing.assert_allclose(sdkde_core.estimate(x, y, log=True, **said), default, rtol=1e-4)
    half = sdkde_core.estimate(x, y, step=0.5, log=True)
    truth = -0.5 * (y**2).sum(1) - 0.5 * d * np.log(2 * np.pi)
    assert (truth - default).mean() < 0.7 * (truth - half).mean()
    for how in ({}, {"step": 0.9}, {"method": "kde"}):  # what is named leaves the bandwidth as it is, here and there
        lazy = sdkde_core.estimate(pytest.importorskip("dask.array").from_array(x), y, bandwidth=found, **how)
        np.testing.assert_allclose(lazy.compute(), sdkde_core.estimate(x, y, bandwidth=found, **how), rtol=1e-4)
    assert sdkde_core.select_bandwidth(x[:, :2]).step == "moments"
    assert sdkde_core.select_bandwidth(x[:, 0]).step == "moments"
    assert sdkde_core.select_bandwidth(x[:99, 0]).step is None


@pytest.mark.parametrize("h", [0.4, [0.4, 0.8, 0.2], H])
def test_a_score_from_elsewhere_moves_samples(h):
    torch = pytest.importorskip("torch")
    own = sdkde_core.grad_log_density(X, method="kde", bandwidth=h, precision="float64")
    for step in (None, 0.9, "moments"):
        options = {"bandwidth": h, "precision": "float64", "step": step}
        want = sdkde_core.debias(X, **options)
        for score in (own, lambda x: sdkde_core.grad_log_density(x, method="kde", bandwidth=h, precision="float64")):
            np.testing.assert_allclose(sdkde_core.debias(X, score=score, **options), want, atol=1e-9)
        got = sdkde_core.debias(torch.tensor(X), score=torch.tensor(own), **options)
        np.testing.assert_allclose(got.numpy(), want, atol=1e-9)
    np.testing.assert_allclose(
        sdkde_core.debias(X[:, 0], score=-X[:, 0], bandwidth=0.2)[:, 0], 0.98 * X[:, 0], rtol=1e-12
    )
    for score, message in ((own[:5], "one gradient for each sample"), (np.nan * own, "not finite")):
        with pytest.raises(ValueError, match=message):
            sdkde_core.debias(X, bandwidth=h, score=score)
    with pytest.raises(ValueError, match="KDE's own score"):
        sdkde_core.debias(X, bandwidth=h, score=own, score_bandwidth=1.4)
