"""Kernels as wide as samples are rare: groups of one width each."""

import math
import pickle

import numpy as np
import pytest
from scipy import stats

import sdkde_core

RNG = np.random.default_rng(12)
X, W = RNG.standard_t(3, size=(150, 2)) * [1.0, 2.0], RNG.random(150)
Y = np.concatenate([RNG.normal(size=(30, 2)), [[9.0, 0.0], [-30.0, 4.0]]])
H = np.array([[0.2, 0.1], [0.1, 0.4]])


def by_definition(x, y, method, alpha, weights=None, step=None, tails=0.0):
    """Log densities, sample by sample."""
    how = {"bandwidth": H, "weights": weights, "precision": "float64"}
    w = np.ones(len(x)) if weights is None else weights
    w = w / w.sum()
    pilot = sdkde_core.estimate(x, method="kde", log=True, **how)
    scales = 2.0 ** (np.clip(np.round(-2.0 * alpha * (pilot - w @ pilot) / math.log(2.0)), -6, 6) / 2.0)
    if method == "sdkde":
        score = sdkde_core.grad_log_density(x, method="kde", **how)
        x = x + (0.5 - alpha if step is None else step) * scales[:, None] ** 2 * score @ H
    logs = [np.log(v) + stats.multivariate_normal(m, s * s * H).logpdf(y) for v, m, s in zip(w, x, scales)]
    logs = np.logaddexp.reduce(logs)
    if tails:
        wide = [np.log(v) + stats.multivariate_normal(m, 16.0 * H).logpdf(y) for v, m in zip(w, x)]
        logs = np.logaddexp(math.log1p(-tails) + logs, math.log(tails) + np.logaddexp.reduce(wide))
    return logs


@pytest.mark.parametrize("weights", [None, W])
@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize("options", [{"alpha": 0.5}, {"alpha": 0.3, "tails": 0.05}, {"alpha": 0.25, "step": 0.2}])
def test_estimates_are_as_defined(method, weights, options):
    if method == "kde" and "step" in options:
        pytest.skip("nothing moves")
    want = by_definition(X, Y, method, weights=weights, **options)
    how = {"bandwidth": H, "method": method, "weights": weights, "adaptive": options["alpha"]}
    how |= {name: value for name, value in options.items() if name != "alpha"}
    for precision, most in (("float64", 1e-8), ("high", 4e-5), ("fast", 2e-3)):
        got = sdkde_core.estimate(X, Y, log=True, precision=precision, **how)
        np.testing.assert_allclose(got, want, atol=most, rtol=2e-6)
    ready = sdkde_core.prepare(X, precision="float64", **how)
    np.testing.assert_allclose(ready.estimate(Y, log=True), want, atol=1e-8)
    again = sdkde_core.estimate(X, log=True, precision="float64", **how)
    np.testing.assert_allclose(again, ready.estimate(X, log=True), atol=1e-8)


def test_what_a_density_gives_is_of_all_groups(tmp_path):
    torch = pytest.importorskip("torch")
    ready, e = sdkde_core.prepare(X, bandwidth=H, weights=W, adaptive=0.4, precision="float64"), 1e-5
    assert len(np.unique(ready.mixture().scales)) > 3 and ready.n_train == 150
    steps = [(ready.estimate(Y + e * k, log=True) - ready.estimate(Y - e * k, log=True)) / (2 * e) for k in np.eye(2)]
    np.testing.assert_allclose(ready.grad_log_density(Y), np.stack(steps, axis=1), rtol=1e-5, atol=1e-6)
    t = np.linspace(-60.0, 60.0, 8001)
    line = ready.marginal(1)
    assert float(np.sum(line.estimate(t)) * (t[1] - t[0])) == pytest.approx(1.0, abs=1e-3)
    assert line.cdf(line.quantile(0.01)) == pytest.approx(0.01, rel=1e-9)
    sections = ready.estimate(np.stack([np.full(8001, 0.3), t], axis=1))
    want = sections / np.sum(sections) / (t[1] - t[0])
    np.testing.assert_allclose(ready.conditional({0: 0.3}).estimate(t[3000:5000:100]), want[3000:5000:100], rtol=1e-6)
    peaks = ready.modes()
    np.testing.assert_allclose(ready.grad_log_density(peaks), 0.0, atol=1e-4)
    heavy = sdkde_core.prepare(np.random.default_rng(8).standard_t(1, size=(100, 1)), bandwidth=0.5, adaptive=1.0)
    np.testing.assert_allclose(heavy.grad_log_density(heavy.modes()), 0.0, atol=1e-4)
    ready.save(tmp_path / "a")
    for one in (sdkde_core.load(tmp_path / "a"), pickle.loads(pickle.dumps(ready))):
        np.testing.assert_array_equal(one.estimate(Y), ready.estimate(Y))
        assert one.n_train == 150 and "adaptive 0.4" in repr(one)
    got = sdkde_core.estimate(torch.tensor(X), torch.tensor(Y), bandwidth=H, weights=torch.tensor(W), adaptive=0.4)
    np.testing.assert_allclose(got, ready.estimate(Y), rtol=5e-5)
    model = sdkde_core.KernelDensity(method="sdkde", bandwidth=H, adaptive=0.4).fit(X, sample_weight=W)
    np.testing.assert_allclose(model.score_samples(Y), ready.estimate(Y, log=True), atol=1e-8)
    moved = sdkde_core.debias(X, bandwidth=H, weights=W, adaptive=0.4, precision="float64")
    means = ready.mixture().means
    np.testing.assert_allclose(np.sort(moved[:, 0]), np.sort(means[:, 0]), atol=1e-9)
    assert all(p.measured_seconds > 0 for p in sdkde_core.explain(X, Y, bandwidth=H, adaptive=0.4, measure=True).passes)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, True, "a"])
def test_what_is_refused(alpha):
    with pytest.raises(ValueError, match="pass an exponent from 0 to 1"):
        sdkde_core.estimate(X, Y, bandwidth=0.4, adaptive=alpha)
    for how in ({"method": "laplace"}, {"step": "moments"}, {"method": "kde", "kernel": "tophat"}):
        with pytest.raises(ValueError, match=r"adaptive=0\.5 is for"):
            sdkde_core.estimate(X, Y, bandwidth=0.4, adaptive=0.5, **how)
    same = sdkde_core.estimate(X, Y, bandwidth=0.4)
    np.testing.assert_array_equal(sdkde_core.estimate(X, Y, bandwidth=0.4, adaptive=0), same)


def test_tensors_that_require_grad_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X, requires_grad=True)
    with pytest.raises(ValueError, match="adaptive estimate has no derivatives"):
        sdkde_core.estimate(x, bandwidth=0.4, adaptive=0.5)
