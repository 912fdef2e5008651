"""A density that is a weighted list of fitted ones: sdkde and smoothed mixtures."""

import math
import pickle

import numpy as np
import pytest

import sdkde_core

N = 100
RNG = np.random.default_rng(21)
A = np.array([[1.0, 0.0], [0.8, 0.4]])


def two(n, rng=RNG):
    """A correlated normal, and a narrow one beside it."""
    near = rng.random(n) < 0.6
    return np.where(near[:, None], rng.normal(size=(n, 2)) @ A.T, [5.0, 0.0] + 0.4 * rng.normal(size=(n, 2)))


def log_density(y):
    inverse = np.linalg.inv(A)
    first = -0.5 * ((y @ inverse.T) ** 2).sum(1) - math.log(np.linalg.det(A)) + math.log(0.6)
    second = -0.5 * (((y - [5.0, 0.0]) / 0.4) ** 2).sum(1) - 2 * math.log(0.4) + math.log(0.4)
    return np.logaddexp(first, second) - math.log(2 * math.pi)


X, Y = two(N), two(100)


@pytest.fixture(scope="module")
def ready():
    return sdkde_core.prepare(X, method="stacked")


def test_it_is_the_sum_of_its_parts(ready):
    shares = np.array([share for _, share, _ in ready.parts])
    assert shares.sum() == pytest.approx(1.0) and ready.method == "stacked" and ready.n_train == N
    want = sum(share * part.estimate(Y) for _, share, part in ready.parts)
    np.testing.assert_allclose(ready.estimate(Y), want, rtol=1e-9)
    np.testing.assert_allclose(ready.estimate(Y, log=True), np.log(want), rtol=1e-9)
    np.testing.assert_allclose(sdkde_core.estimate(X, Y, method="stacked"), want, rtol=1e-9)
    out = np.empty(len(Y))
    assert sdkde_core.estimate(X, Y, method="stacked", out=out) is out
    np.testing.assert_allclose(out, want, rtol=1e-9)
    said = str(sdkde_core.explain(X, Y, method="stacked"))
    assert all(label in repr(ready) and label in said for label, _, _ in ready.parts)
    assert "left-out samples -" in said


@pytest.mark.slow
def test_it_is_better_than_sdkde_where_a_mixture_is_right():
    rng, kl = np.random.default_rng(5), {}
    x, y = two(600, rng), two(4000, rng)
    for method in ("sdkde", "stacked"):
        kl[method] = float(np.mean(log_density(y) - sdkde_core.estimate(x, y, method=method, log=True)))
    assert kl["stacked"] < 0.6 * kl["sdkde"]


def test_scores_are_derivatives_of_the_logs(ready):
    e = 1e-5
    steps = [(ready.estimate(Y + e * k, log=True) - ready.estimate(Y - e * k, log=True)) / (2 * e) for k in np.eye(2)]
    np.testing.assert_allclose(ready.grad_log_density(Y), np.stack(steps, axis=1), rtol=1e-5, atol=1e-6)
    got = sdkde_core.grad_log_density(X, Y, method="stacked")
    np.testing.assert_allclose(got, ready.grad_log_density(Y), rtol=1e-9)


def test_groups_that_add_nothing_at_a_row_are_not_missed():
    angle, rng = np.linspace(0.0, 6.28, 200), np.random.default_rng(3)
    ring = np.c_[np.cos(angle), np.sin(angle)]
    ready = sdkde_core.prepare(
        ring * (1.0 + 0.05 * rng.normal(size=(200, 1))), method="stacked", coordinates="identity", check_finite=False
    )
    assert sum(label.startswith("smoothed") for label, _, _ in ready.parts) > 3
    y = np.concatenate([ring + 0.1 * rng.normal(size=(200, 2)), ring[:100] * np.logspace(0.0, 3.0, 100)[:, None]])
    logs = np.stack([math.log(share) + part.estimate(y, log=True) for _, share, part in ready.parts])
    want = np.logaddexp.reduce(logs)
    assert want.min() < -1e6
    scores = np.stack([part.grad_log_density(y) for *_, part in ready.parts])
    slope = np.einsum("em,emd->md", np.exp(logs - want), scores)
    got, found = ready.estimate(y, log=True), ready.grad_log_density(y)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found, slope, rtol=1e-8, atol=1e-8)
    np.testing.assert_array_equal(ready.estimate(y, log=True), got)
    for i in (0, 299):
        np.testing.assert_allclose(ready.estimate(y[i : i + 1], log=True), got[i : i + 1], rtol=1e-10)
    many = np.resize(y, (70_000, 2))  # more than are summed at a time
    np.testing.assert_allclose(ready.estimate(many, log=True), np.resize(got, 70_000), rtol=1e-10, atol=1e-10)
    y[5, 1] = np.nan
    np.testing.assert_array_equal(np.isnan(ready.estimate(y)), np.arange(300) == 5)
    np.testing.assert_allclose(np.delete(ready.grad_log_density(y), 5, 0), np.delete(found, 5, 0), rtol=1e-8, atol=1e-8)


def test_what_a_density_gives_is_of_all_parts(ready):
    drawn = ready.sample(60_000, 0)
    np.testing.assert_array_equal(drawn, ready.sample(60_000, 0))
    inside = ((drawn > -1) & (drawn < 1)).all(axis=1).mean()
    assert ready.probability(-1, 1) == pytest.approx(inside, abs=8e-3)
    t = np.linspace(-30.0, 30.0, 6001)
    sections = ready.estimate(np.stack([np.full(6001, 0.3), t], axis=1))
    total = float(np.sum(sections) * (t[1] - t[0]))
    assert ready.marginal(0).estimate([0.3])[0] == pytest.approx(total, rel=1e-4)
    np.testing.assert_allclose(
        ready.conditional({0: 0.3}).estimate(t[2500:3500:50]), sections[2500:3500:50] / total, rtol=1e-4
    )
    assert np.isfinite(ready.conditional({0: 1e10}).estimate([0.0], log=True))  # where shares of the parts underflow
    line = ready.marginal(1)
    assert line.cdf(line.quantile(0.01)) == pytest.approx(0.01, rel=1e-9)
    assert (line.sample(20_000, 1) < line.quantile(0.3)).mean() == pytest.approx(0.3, abs=0.02)
    peaks = ready.modes()
    np.testing.assert_allclose(ready.grad_log_density(peaks), 0.0, atol=1e-3)
    assert abs(peaks - [5.0, 0.0]).sum(axis=1).min() < 0.3
    np.testing.assert_allclose(
        ready.modes([[4.5, 0.2]])[0], peaks[np.argmin(abs(peaks - [5.0, 0.0]).sum(axis=1))], atol=1e-3
    )
    assert ready.divergence(ready).mean == 0.0
    with pytest.raises(ValueError, match="parts"):
        ready.mixture()


def test_files_pickles_and_classes_keep_it(ready, tmp_path):
    want = ready.estimate(Y)
    ready.save(tmp_path / "a")
    for one in (sdkde_core.load(tmp_path / "a"), pickle.loads(pickle.dumps(ready))):
        np.testing.assert_array_equal(one.estimate(Y), want)
        assert (repr(one), one.n_train) == (repr(ready), N)
    model = sdkde_core.KernelDensity(method="stacked", bandwidth="auto").fit(X)
    np.testing.assert_allclose(model.score_samples(Y), np.log(want), atol=1e-4)
    model.save(tmp_path / "b")
    np.testing.assert_array_equal(sdkde_core.load(tmp_path / "b").score_samples(Y), model.score_samples(Y))


@pytest.mark.slow
def test_shifts_units_weights_and_copies_do_not_matter(ready):
    for unit, shift in (([1000.0, 0.01], [5.0, -3.0]), ([1e-200, 1e200], 0.0), ([1e250, 1e150], 0.0)):
        moved, want = sdkde_core.prepare(X * unit + shift, method="stacked"), ready.estimate(Y, log=True)
        want -= np.log(unit).sum()
        np.testing.assert_allclose(moved.estimate(Y * unit + shift, log=True), want, atol=2e-3)
    got = moved.conditional({0: 0.3e250}).estimate(Y[:, 1] * 1e150)
    np.testing.assert_allclose(got * 1e150, ready.conditional({0: 0.3}).estimate(Y[:, 1]), rtol=2e-3)
    np.testing.assert_allclose(moved.modes() / unit, ready.modes(), atol=1e-3)
    light = np.concatenate([X, X + 100.0])
    weights = np.repeat([2.0, 0.0], N)
    weighted = sdkde_core.prepare(light, weights=weights, method="stacked")
    np.testing.assert_allclose(weighted.estimate(Y, log=True), ready.estimate(Y, log=True), atol=0.3)
    assert weighted.estimate([[100.0, 100.0]])[0] < 1e-12


@pytest.mark.slow
def test_tensors_in_tensors_out(ready):
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
    got = sdkde_core.estimate(x, y, method="stacked", log=True)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), ready.estimate(Y, log=True), atol=0.02)
    assert sdkde_core.estimate(x, y.requires_grad_(), method="stacked").requires_grad
    with pytest.raises(TypeError, match=r"other than 'stacked' .* pass train.detach\(\)"):
        sdkde_core.estimate(x.requires_grad_(), y, method="stacked")


@pytest.mark.parametrize("n", [2, 3, 8])
def test_few_samples_are_sdkdes(n):
    x = RNG.normal(size=(n, 2))
    got = sdkde_core.estimate(x, Y[:5], method="stacked")
    np.testing.assert_allclose(got, sdkde_core.estimate(x, Y[:5]), rtol=1e-9)


def test_what_is_refused(ready):
    for call in (
        lambda: sdkde_core.debias(X, method="stacked"),
        lambda: sdkde_core.select_bandwidth(X, method="stacked"),
        lambda: sdkde_core.estimate(X, method="stacked", tails="guard"),
        lambda: sdkde_core.estimate(X, method="stacked", step=0.5),
        lambda: sdkde_core.estimate(np.where(X > 3, np.nan, X), method="stacked"),
        lambda: sdkde_core.estimate(X, [[0.0, -np.inf]], method="stacked", check_finite=False),
        lambda: ready.conditional({0: 1e160}),
    ):
        with pytest.raises(ValueError, match=r"method|tails|step|finite|stacked|given is \{0: 1e\+160\}, too far"):
            call()


@pytest.mark.slow
def test_rare_values_and_rounded_columns_have_a_density():
    rng = np.random.default_rng(0)
    rare = np.c_[rng.normal(size=(300, 3)), np.arange(300) == 0]
    counts = np.c_[rng.normal(size=(400, 2)), rng.poisson(0.1, 400)]
    for x in (rare, counts, np.c_[X, rng.integers(0, 3, N)]):
        logs = sdkde_core.estimate(x, method="stacked", log=True)
        assert logs.min() > sdkde_core.estimate(x, log=True).min() - 5.0
    assert np.isfinite(sdkde_core.estimate(np.c_[rng.normal(size=(2500, 1)), np.arange(2500) < 3], [[0.0, 0.5]])).all()


def test_empty_queries_plots_and_units(ready):
    pytest.importorskip("matplotlib").use("agg")
    assert ready.estimate([]).shape == (0,) and ready.grad_log_density(np.empty((0, 2))).shape == (0, 2)
    sdkde_core.plots.curves(ready.marginal(0))
    sdkde_core.plots.contours(ready)
    with pytest.raises(ValueError, match="starts is empty"):
        ready.modes(np.empty((0, 2)))
    for x in (np.ones((100, 2)), np.r_[X, [[np.nan, 0.0]]]):
        how = {"bandwidth": 0.3, "method": "stacked", "check_finite": False}
        assert sdkde_core.prepare(x, **how).parts[-1][1] > 0.0


@pytest.mark.parametrize(
    ("n", "d"), [(30, 1), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((300, 2), (500, 5)))]
)
def test_the_order_of_the_rows_does_not_matter(n, d):
    rng = np.random.default_rng(n)
    x = np.round(np.exp(0.4 * rng.normal(size=(n, d)) + rng.integers(3, size=(n, 1))), 2)
    weights, order, y = rng.random(n), rng.permutation(n), x[:40] * 1.01
    for w in (None, weights):
        how = {"method": "stacked", "device": "cpu"}
        want = sdkde_core.prepare(x, weights=w, **how).estimate(y, log=True)
        got = sdkde_core.prepare(x[order], weights=None if w is None else w[order], **how).estimate(y, log=True)
        np.testing.assert_allclose(got, want, atol=1e-6)
