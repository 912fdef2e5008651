"""A guard of the tails: a second group of kernels, of the same samples, four times as wide."""

import math
import pickle

import numpy as np
import pytest
import reference

import sdkde_core
from sdkde_core.engine.groups import places

RNG = np.random.default_rng(11)
X, W = RNG.normal(size=(150, 2)) * [1.0, 2.0], RNG.random(150)
Y = np.concatenate([RNG.normal(size=(20, 2)), [[30.0, 0.0]]])
H = np.array([[0.2, 0.1], [0.1, 0.4]])


def prepared(h=H, method="sdkde", weights=W, **options):
    options = {"tails": "guard", "precision": "float64"} | options
    return sdkde_core.prepare(X, bandwidth=h, method=method, weights=weights, **options)


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_estimates_are_the_oracles(method, weights, share):
    options = {"method": method, "weights": weights, "bandwidth": H, "log": True, "tails": share}
    for query in (Y, None):
        want = reference.estimate(X, query, **options)
        for precision, most in (("float64", 1e-9), ("high", 3e-5), ("fast", 1.1e-3)):
            got = sdkde_core.estimate(X, query, precision=precision, **options)
            np.testing.assert_allclose(got, want, atol=most, rtol=2e-6)
    assert want.min() > -60  # a kernel of the bandwidth's width would be at e^−1000
    ready = prepared(method=method, weights=weights, tails=share)
    np.testing.assert_allclose(ready.estimate(Y, log=True), reference.estimate(X, Y, **options), atol=1e-9)


@pytest.mark.parametrize("n", [8192, 16_384])
def test_rounding_does_not_decide_which_samples_are_in_the_guard(n):
    logs, k = np.full(n, -math.log(n)), np.arange(4096)
    for off in (0.0, 1e-13, -1e-13):  # as other sums are
        found = places(logs + off * np.sin(np.arange(n)), 4096)
        np.testing.assert_array_equal(found, -(-(2 * k + 1) * n // 8192) - 1)


def test_the_guard_of_many_samples_has_some_of_them_by_their_weights():
    x = np.random.default_rng(1).standard_t(3, size=(6000, 2))
    weights = np.where(np.arange(6000) % 2, 1e-3, 1.0)
    for w in (None, weights):
        options = {"bandwidth": 0.3, "weights": w, "precision": "float64"}
        ready = sdkde_core.prepare(x, tails="guard", **options)
        assert ready.mixture().weights.shape == (10_096,)
        assert ready.mixture().weights.sum() == pytest.approx(1.0)
        assert ready.probability(-math.inf, [0.0, math.inf]) == pytest.approx(
            sdkde_core.prepare(x, **options).probability(-math.inf, [0.0, math.inf]), abs=3e-3
        )
        np.testing.assert_allclose(sdkde_core.estimate(x, Y, tails="guard", **options), ready.estimate(Y), rtol=1e-9)


def test_scores_are_derivatives_of_the_logs():
    ready, e = prepared(), 1e-5
    steps = [(ready.estimate(Y + e * k, log=True) - ready.estimate(Y - e * k, log=True)) / (2 * e) for k in np.eye(2)]
    np.testing.assert_allclose(ready.grad_log_density(Y), np.stack(steps, axis=1), rtol=1e-6, atol=1e-7)
    got = sdkde_core.grad_log_density(X, Y, bandwidth=H, weights=W, tails="guard", precision="float64")
    np.testing.assert_allclose(got, ready.grad_log_density(Y), rtol=1e-9)


def test_what_a_density_gives_is_of_both_groups():
    ready = prepared()
    t = np.linspace(-25.0, 25.0, 4001)
    line = ready.marginal(1)
    sections = ready.estimate(np.stack([np.full(4001, 0.3), t], axis=1))
    whole = float(np.sum(sections) * (t[1] - t[0]))
    assert ready.marginal(0).estimate([0.3])[0] == pytest.approx(whole, rel=1e-9)
    np.testing.assert_allclose(ready.conditional({0: 0.3}).estimate(t[::400]), sections[::400] / whole, rtol=1e-9)
    far = ready.conditional({0: 40.0})  # where only the guard has weight
    assert float(np.sum(far.estimate(t + 15.0)) * (t[1] - t[0])) == pytest.approx(1.0, abs=1e-3)
    inside = float(line.estimate(t[(t >= -1) & (t <= 2)]).sum() * (t[1] - t[0]))
    assert line.probability(-1, 2) == pytest.approx(inside, abs=5e-3)
    assert line.cdf(2.0) - line.cdf(-1.0) == pytest.approx(line.probability(-1, 2), rel=1e-9)
    assert line.cdf(line.quantile(0.003)) == pytest.approx(0.003, rel=1e-9)
    assert ready.probability([-1, -math.inf], [2, math.inf]) == pytest.approx(ready.marginal(0).probability(-1, 2))
    drawn = ready.sample(100_000, 0)
    inside = ((drawn > -1) & (drawn < 2)).all(axis=1).mean()
    assert ready.probability([-1, -1], [2, 2]) == pytest.approx(inside, abs=8e-3)
    means, weights, covariance, scales = ready.mixture()
    want = covariance * (weights @ scales**2) + np.cov(means.T, aweights=weights, ddof=0)
    np.testing.assert_allclose(np.cov(drawn.T), want, rtol=0.03, atol=0.02)
    peaks = ready.modes()
    np.testing.assert_allclose(ready.grad_log_density(peaks), 0.0, atol=1e-5)


def test_files_pickles_and_classes_keep_it(tmp_path):
    torch = pytest.importorskip("torch")
    ready = prepared()
    want = ready.estimate(Y)
    for name, one in (("a", ready), ("b", ready.marginal([1, 0])), ("c", ready.conditional({0: 40.0}))):
        one.save(tmp_path / name)
        query = Y if name == "a" else Y[:, ::-1] if name == "b" else Y[:, 0]
        for other in (sdkde_core.load(tmp_path / name), pickle.loads(pickle.dumps(one))):
            np.testing.assert_array_equal(other.estimate(query), one.estimate(query))
    model = sdkde_core.KernelDensity(method="sdkde", bandwidth=H, tails="guard").fit(X, sample_weight=W)
    np.testing.assert_allclose(model.score_samples(Y), np.log(want), atol=1e-9)
    got = sdkde_core.estimate(torch.tensor(X), torch.tensor(Y), bandwidth=H, weights=torch.tensor(W), tails=0.02)
    np.testing.assert_allclose(got, want, rtol=3e-5)
    assert "2 % of the weight a guard of the tails" in repr(ready)
    explained = sdkde_core.explain(X, Y, bandwidth=H, tails="guard", measure=True)
    assert "the guard of its tails" in str(explained)
    assert all(p.measured_seconds > 0 for p in explained.passes)


def test_derivatives_go_through_both_groups():
    torch = pytest.importorskip("torch")
    x, y, w = torch.tensor(X[:6]), torch.tensor(Y[-3:]), torch.tensor(W[:6])

    def estimate(x, w):
        how = {"bandwidth": 0.6, "tails": "guard", "log": True, "precision": "float64"}
        return sdkde_core.estimate(x, y, weights=w, **how)

    assert torch.autograd.gradcheck(estimate, (x.requires_grad_(), w.requires_grad_()), atol=1e-4)


@pytest.mark.parametrize("options", [{"tails": "fat"}, {"tails": 1.0}, {"tails": -0.1}, {"tails": True}])
def test_what_is_refused(options):
    with pytest.raises(ValueError, match=r"tails is .*pass 'guard', 'plain', a number from 0"):
        sdkde_core.estimate(X, Y, bandwidth=0.4, **options)
    with pytest.raises(ValueError, match="for method='sdkde' or 'kde'"):
        sdkde_core.estimate(X, Y, bandwidth=0.4, method="laplace", tails="guard")
    np.testing.assert_array_equal(
        sdkde_core.estimate(X, Y, bandwidth=0.4, tails="plain"), sdkde_core.estimate(X, Y, bandwidth=0.4)
    )


def test_auto_guards_the_tails_of_two_columns_and_more():
    found = sdkde_core.select_bandwidth(X)
    assert found.tails and not sdkde_core.select_bandwidth(X, method="kde").tails
    default = sdkde_core.estimate(X, Y, log=True)
    np.testing.assert_allclose(sdkde_core.estimate(X, Y, log=True, bandwidth=found), default, rtol=1e-5)
    assert default[-1] > -700 > sdkde_core.estimate(X, Y, log=True, tails="plain")[-1]


def test_weights_of_zero_and_derivatives_leave_the_guard_as_it_is():
    torch = pytest.importorskip("torch")
    x, q = np.random.default_rng(6).normal(size=(3000, 1)), [[0.0], [8.0], [30.0]]
    more, w = np.concatenate([x, np.zeros((3000, 1))]), np.repeat([1.0, 0.0], 3000)
    how = {"bandwidth": 0.3, "log": True, "precision": "float64", "tails": "guard"}
    want = sdkde_core.estimate(x, q, **how)
    np.testing.assert_allclose(sdkde_core.estimate(more, q, weights=w, **how), want, rtol=1e-9)
    ready = sdkde_core.prepare(more, weights=w, bandwidth=0.3, precision="float64", tails="guard")
    np.testing.assert_allclose(ready.estimate(q, log=True), want, rtol=1e-9)
    heavy = torch.tensor(np.random.default_rng(7).exponential(size=5000) ** 4)
    x, y = torch.tensor(np.random.default_rng(8).normal(size=(5000, 1))), torch.tensor([[0.0], [50.0]]).double()
    plain = sdkde_core.estimate(x, y, weights=heavy, **how)
    for attached in ((x, y, heavy.clone().requires_grad_()), (x.clone().requires_grad_(), y, heavy)):
        got = sdkde_core.estimate(*attached[:2], weights=attached[2], **how)
        np.testing.assert_allclose(got.detach().numpy(), plain.numpy(), rtol=1e-7)
        got.sum().backward()
        assert all(a.grad.isfinite().all() for a in attached if a.requires_grad)


def test_files_of_far_conditionals(tmp_path):
    x = np.c_[np.random.default_rng(9).integers(0, 3, 100), np.random.default_rng(10).normal(size=100)]
    far = sdkde_core.prepare(x, bandwidth=0.4, tails="guard", method="kde").conditional({0: 1e5})
    far.save(tmp_path / "far.sdkde")
    np.testing.assert_array_equal(
        sdkde_core.load(tmp_path / "far.sdkde").estimate([0.0, 1.0]), far.estimate([0.0, 1.0])
    )
