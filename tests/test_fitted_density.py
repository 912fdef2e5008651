"""What a fitted density can do besides being evaluated: draws, marginals, conditionals, integrals, modes, gradients."""

import math
import pickle

import numpy as np
import pytest
import reference
import torch
from scipy import stats

import sdkde_core

METHODS = ("kde", "sdkde", "laplace")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 3)) @ RNG.normal(size=(3, 3)) + [0.0, 100.0, -5.0]
W = RNG.random(50) * (np.arange(50) != 7)
SHAPES = {"number": 0.5, "columns": np.array([0.4, 0.6, 0.9]), "matrix": 0.3 * np.cov(X.T)}


def prepared(method, shape="matrix", x=X, **options):
    options = {"weights": W, "precision": "float64", "bandwidth": SHAPES[shape]} | options
    return sdkde_core.prepare(x, method=method, **options)


def density(mixture, y):
    """The mixture's density by SciPy, (m,)."""
    parts = [w * stats.multivariate_normal(mean, mixture.covariance).pdf(y) for mean, w in zip(*mixture[:2])]
    return np.sum(parts, axis=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_marginals(method, shape):
    """The marginal is the integral over the other dimension, in the order that was asked for."""
    whole = prepared(method, shape)
    part = whole.marginal([2, 0])
    assert (part.method, part.n_dimensions, part.precision) == (method, 2, "float64")
    y, t = np.array([[-4.5, 0.3], [-6.0, 1.0]]), np.linspace(60.0, 140.0, 4001)
    rows = [[b, s, a] for a, b in y for s in t]
    integral = whole.estimate(rows).reshape(2, -1).sum(axis=1) * (t[1] - t[0])
    np.testing.assert_allclose(part.estimate(y), integral, rtol=1e-10)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(part)).estimate(y), integral, rtol=1e-10)
    np.testing.assert_allclose(part.marginal(1).estimate([0.3]), whole.marginal(0).estimate([0.3]), rtol=1e-12)
    np.testing.assert_allclose(whole.marginal([-3, 1, 2]).estimate(X), whole.estimate(X), rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["kde", "sdkde"])
def test_conditionals(method, shape):
    """p(y₀, y₂ | y₁) = p(y) / p(y₁), also where p(y₁) underflows."""
    whole = prepared(method, shape)
    for value in (100.5, 130.0):
        y = np.array([[0.3, value, -4.5], [2.0, value, -5.0]])
        want = whole.estimate(y, log=True) - whole.marginal(1).estimate([value], log=True)
        got = whole.conditional({1: value}).estimate(y[:, [0, 2]], log=True)
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9)
    one = whole.conditional({2: -5.0, 0: 0.3})
    want = whole.estimate(y[:1], log=True) - whole.marginal([0, 2]).estimate([[0.3, -4.5]], log=True)
    np.testing.assert_allclose(whole.conditional({2: -4.5, 0: 0.3}).estimate([value], log=True), want, rtol=1e-8)
    assert one.n_dimensions == 1


def test_dimensions_of_a_frame_have_names():
    class Frame:
        columns = ("a", "b", "c")

        def __array__(self, dtype=None, copy=None):
            return X

    whole = prepared("sdkde", x=Frame())
    np.testing.assert_array_equal(
        whole.marginal(["c", "a"]).estimate(X[:, [2, 0]]), whole.marginal([2, 0]).estimate(X[:, [2, 0]])
    )
    named = whole.conditional({"b": 100.0})
    np.testing.assert_array_equal(named.estimate(X[:, [0, 2]]), whole.conditional({1: 100.0}).estimate(X[:, [0, 2]]))
    assert named.marginal("c").n_dimensions == 1
    with pytest.raises(TypeError, match="names of columns: a, b, c"):
        whole.marginal("d")


@pytest.mark.parametrize("method", ["kde", "sdkde"])
def test_the_mixture(method):
    got = prepared(method).mixture()
    assert got.weights.sum() == pytest.approx(1.0)
    moved = sdkde_core.debias(X, weights=W, bandwidth=SHAPES["matrix"], precision="float64") if method == "sdkde" else X
    np.testing.assert_allclose(got.means, moved, atol=1e-11)
    np.testing.assert_allclose(density(got, X), prepared(method).estimate(X), rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_have_the_mixtures_moments(shape):
    whole, n = prepared("sdkde", shape), 40_000
    y = whole.sample(n, random_state=1)
    means, weights, covariance, _ = whole.mixture()
    want = covariance + np.cov(means.T, aweights=weights, ddof=0)
    error = np.sqrt(np.diag(want) / n)
    assert (abs(y.mean(axis=0) - weights @ means) < 5 * error).all()
    assert (abs(np.cov(y.T) - want) < 6 * np.sqrt(2 / n) * np.sqrt(np.outer(np.diag(want), np.diag(want)))).all()


def test_draws_in_one_dimension_follow_the_distribution_function():
    whole = prepared("sdkde", x=X[:, 0], bandwidth=0.3)
    assert stats.kstest(whole.sample(4000, 3)[:, 0], whole.cdf).pvalue > 1e-3


def test_seeds_kinds_and_sizes_of_draws():
    whole = prepared("kde")
    np.testing.assert_array_equal(whole.sample(5, 1), whole.sample(5, np.random.default_rng(1)))
    np.testing.assert_array_equal(whole.sample(5, np.random.RandomState(1)), whole.sample(5, np.random.RandomState(1)))
    assert not np.array_equal(whole.sample(5, 1), whole.sample(5, 2))
    assert whole.sample().shape == (1, 3)
    assert whole.sample(0).shape == (0, 3)
    single = sdkde_core.prepare(torch.tensor(X, dtype=torch.float32), bandwidth=0.5)
    for one in (single, single.marginal([0, 1, 2]), pickle.loads(pickle.dumps(single))):
        assert isinstance(one.sample(4), torch.Tensor) and one.sample(4).dtype == torch.float32
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="n is"):
            whole.sample(wrong)
    for wrong in ("seed", -3):
        with pytest.raises((TypeError, ValueError), match="random_state is"):
            whole.sample(1, wrong)


def test_a_sample_without_weight_is_never_drawn():
    whole = sdkde_core.prepare([0.0, 50.0, 100.0], weights=[1, 0, 1], bandwidth=0.1, method="kde")
    assert (abs(whole.sample(2000, 0) - 50) > 10).all()


@pytest.mark.parametrize("method", METHODS)
def test_probabilities_of_boxes(method):
    """Products of normal probabilities, by quadrature of the density in one and two dimensions."""
    line = prepared(method, x=X[:, 0], bandwidth=0.4)
    t = np.linspace(-1.0, 2.0, 20_001)
    middle = 0.5 * (t[1:] + t[:-1])
    assert line.probability(-1.0, 2.0) == pytest.approx(line.estimate(middle).sum() * 1.5e-4, rel=1e-8)
    assert line.probability(-np.inf, np.inf) == 1.0
    assert line.probability(1.0, 1.0) == 0.0
    for shape in ("columns", "matrix"):
        if (method, shape) == ("laplace", "matrix"):
            continue
        plane = prepared(method, shape).marginal([0, 1])
        a, b = (low + (np.arange(500) + 0.5) * 4.0 / 500 for low in (-2.0, 98.0))
        grid = np.stack(np.meshgrid(a, b), axis=-1).reshape(-1, 2)
        want = plane.estimate(grid).sum() * (4.0 / 500) ** 2
        assert plane.probability([-2, 98], [2, 102]) == pytest.approx(want, rel=1e-5)
        whole = prepared(method, shape)
        assert whole.probability([-2, 98, -np.inf], [2, 102, np.inf]) == pytest.approx(want, rel=1e-5)


def test_probabilities_in_more_dimensions_under_a_matrix():
    whole = prepared("sdkde")
    low, high = np.array([-2.0, 98.0, -7.0]), np.array([2.0, np.inf, -4.0])
    means, weights, covariance, _ = whole.mixture()
    each = [stats.multivariate_normal(m, covariance).cdf(high, lower_limit=low) for m in means]
    assert whole.probability(low, high) == pytest.approx(weights @ each, abs=3e-4)


def test_probabilities_of_narrow_correlated_boxes():
    """A correlation of 0.9999 makes the inner integral steep: the nodes follow it."""
    h = np.array([[1.0, 0.9999], [0.9999, 1.0]])
    one = sdkde_core.prepare([[0.0, 0.0]], method="kde", bandwidth=h)
    exact = stats.multivariate_normal([0, 0], h).cdf([0.3, 0.31])
    assert one.probability(-np.inf, [0.3, 0.31]) == pytest.approx(exact, abs=1e-5)
    assert one.probability([10, 10], [11, 11]) == pytest.approx(stats.norm.sf(10), rel=0.15)  # nearly one variable


@pytest.mark.parametrize("method", METHODS)
def test_the_distribution_function(method):
    x = np.r_[X[:, 0], 30.0]
    line = sdkde_core.prepare(x, method=method, bandwidth=0.4, precision="float64")
    for y in (-3.0, 0.2, 1.7, 29.9, 60.0):
        assert line.cdf(y) == pytest.approx(line.probability(-np.inf, y), rel=1e-12)
    got = line.cdf(np.array([[0.2, -3.0], [29.9, 1.7]]))
    assert got.shape == (2, 2) and got[1, 0] == pytest.approx(line.cdf(29.9), rel=1e-14)
    if method == "kde":  # the lower tail keeps its digits
        assert line.cdf(-12.0) == pytest.approx(stats.norm(x, 0.4).cdf(-12.0).mean(), rel=1e-12)
        many = np.linspace(-5, 35, 777)
        np.testing.assert_allclose(line.cdf(many), stats.norm(x, 0.4).cdf(many[:, None]).mean(axis=1), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tensors_for_tensors(dtype):
    torch = pytest.importorskip("torch")
    line, y = prepared("kde", x=X[:, 0], bandwidth=0.4), np.array([-0.5, 0.25], dtype)
    for call in (line.cdf, lambda q: line.quantile(abs(q)), line.labels):
        got = call(torch.tensor(y))
        assert got.dtype == (torch.int64 if call == line.labels else getattr(torch, dtype))
        np.testing.assert_allclose(got.numpy(), call(y), rtol=1e-6)
    assert line.cdf(torch.tensor(0.25)).shape == ()
    assert type(line.labels(torch.tensor(y), return_modes=True)[0]) is torch.Tensor


def test_quantiles_invert_the_distribution_function():
    line = prepared("sdkde", x=1e6 + X[:, 0], bandwidth=0.4)
    q = np.array([1e-300, 1e-12, 0.01, 0.5, 0.99, 1 - 1e-12])
    np.testing.assert_allclose(line.cdf(line.quantile(q)), q, rtol=1e-6)
    assert line.quantile(0.0) == -np.inf and line.quantile(1.0) == np.inf
    assert sdkde_core.prepare(np.append(X[:, 0], 1e12), bandwidth=0.4).quantile([0.5, 1 - 1e-9])[1] > 9e11
    for wrong in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="q "):
            line.quantile(wrong)


def test_modes():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(-3.0, 0.5, (700, 2)), rng.normal(2.0, 0.5, (300, 2))])
    whole = sdkde_core.prepare(x, bandwidth=0.5)
    got = whole.modes()
    assert got.shape == (2, 2)
    assert abs(got - [[-3.0, -3.0], [2.0, 2.0]]).max() < 0.2
    assert abs(whole.grad_log_density(got)).max() < 1e-5
    np.testing.assert_allclose(whole.modes([[3.0, 3.0]]), got[1:], atol=1e-5)


def test_divergence():
    rng = np.random.default_rng(0)
    p, q = (sdkde_core.prepare(rng.normal(m, 1.0, 4000)) for m in (0.0, 1.0))
    got = p.divergence(q)
    assert abs(got.mean - 0.5) < 0.1 and 0 < got.standard_error < 0.05
    held_out = rng.normal(0.0, 1.0, 500)
    assert p.divergence(q, held_out).mean == pytest.approx(-q.divergence(p, held_out).mean)
    with pytest.raises(TypeError, match="other is"):
        p.divergence(prepared("kde"))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_the_laplace_estimate(shape):
    """By its definition, in autograd of PyTorch: ∇ log of Σ w φ (1 + d/2 − ½ r²); NaN where that is negative."""
    y = X[:20] + 0.7 * RNG.normal(size=(20, 3))
    h = SHAPES[shape] if shape == "matrix" else np.diag(np.broadcast_to(SHAPES[shape], (3,)) ** 2)
    at = torch.tensor(y, requires_grad=True)
    away = at[:, None] - torch.tensor(X)
    squared = torch.einsum("mni,ij,mnj->mn", away, torch.tensor(np.linalg.inv(h)), away)
    values = (torch.tensor(W) * torch.exp(-0.5 * squared) * (2.5 - 0.5 * squared)).sum(1)
    values.abs().log().sum().backward()
    want = np.where((values.detach().numpy() < 0)[:, None], np.nan, at.grad.numpy())
    assert 0 < np.isnan(want[:, 0]).sum() < 20
    options = {"method": "laplace", "weights": W, "bandwidth": SHAPES[shape]}
    np.testing.assert_allclose(sdkde_core.grad_log_density(X, y, **options), want, rtol=1e-8)
    np.testing.assert_allclose(prepared("laplace", shape).grad_log_density(y), want, rtol=1e-8)
    assert sdkde_core.grad_log_density(X, y[:0], **options).shape == (0, 3)
    assert sdkde_core.grad_log_density(X, torch.tensor(y), **options).shape == (20, 3)


def test_the_gradient_of_the_laplace_estimate_has_no_derivatives():
    x = torch.tensor(X, requires_grad=True)
    with pytest.raises(ValueError, match="no derivatives of its own"):
        sdkde_core.grad_log_density(x, method="laplace", bandwidth=0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.sample(3),
        lambda p: p.mixture(),
        lambda p: p.conditional({0: 1.0}),
        lambda p: p.marginal(0).quantile(0.5),
        lambda p: p.modes(),
    ],
)
def test_the_signed_method_refuses(call):
    with pytest.raises(ValueError, match="laplace"):
        call(prepared("laplace", "columns"))


def test_what_is_clipped_has_no_closed_forms():
    clipped = prepared("laplace", "columns", negative="clip")
    for call in (lambda: clipped.marginal(0), lambda: clipped.probability(0, 1)):
        with pytest.raises(ValueError, match="negative='clip'"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.marginal([]), ValueError, "at least one dimension"),
        (lambda p: p.marginal([0, 0]), ValueError, "each once"),
        (lambda p: p.marginal([0, -3]), ValueError, "each once"),
        (lambda p: p.marginal(3), ValueError, "below 3"),
        (lambda p: p.marginal(1.0), TypeError, "indices"),
        (lambda p: p.marginal(True), ValueError, "indices"),
        (lambda p: p.conditional([1.0]), TypeError, "mapping"),
        (lambda p: p.conditional({}), ValueError, "at least one"),
        (lambda p: p.conditional({0: "a"}), TypeError, "a number"),
        (lambda p: p.conditional({0: math.inf}), ValueError, "finite"),
        (lambda p: p.conditional({0: 1.0, 1: 1.0, 2: 1.0}), ValueError, "all 3 dimensions"),
        (lambda p: p.conditional({0: 1e200}), ValueError, "too far"),
        (lambda p: p.probability(1, 0), ValueError, "lower is above upper"),
        (lambda p: p.probability([0, 0], 1), ValueError, "lower is"),
        (lambda p: p.probability(0, np.nan), ValueError, "upper is"),
        (lambda p: p.probability("a", 1), TypeError, "lower is"),
        (lambda p: p.cdf(0.0), ValueError, "has 3 dimensions"),
        (lambda p: p.marginal(0).cdf("a"), TypeError, "x is"),
        (lambda p: p.divergence(3), TypeError, "other is 3"),
        (lambda p: p.modes([[0.0]]), ValueError, "3"),
        (lambda p: p.modes(np.empty((0, 3))), ValueError, "starts is empty"),
        (lambda p: p.modes([[0.0, np.inf, 0.0]]), ValueError, "starts is"),
        (lambda p: p.modes([[0.0, 1e300, 0.0]]), ValueError, "starts is"),
    ],
)
def test_what_cannot_be_right_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(prepared("kde"))


def test_the_conditional_of_far_values_is_that_of_the_nearest_component():
    x = np.array([[0.0, 0.0], [0.0, 10.0]])
    whole = sdkde_core.prepare(x, method="kde", bandwidth=0.1, precision="float64")
    far = whole.conditional({1: 1e4})
    want = reference.estimate(x[1:, :1], [[0.3]], bandwidth=0.1, method="kde")
    np.testing.assert_allclose(far.estimate([0.3]), want, rtol=1e-9)
