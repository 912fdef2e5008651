"""What a prepared density says of itself: values, moments, entropy, regions, conditionals of many rows, its page."""

import functools
import math
import pickle
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from scipy import stats

import sdkde_core
from sdkde_core import prepare

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 2)) @ [[1.0, 0.8], [0.0, 0.5]] + [5.0, -3.0]
SKEW = np.exp(X - [5.0, -3.0])
W = RNG.random(300) * (np.arange(300) % 9 > 0)
DENSITIES = {
    "sdkde": lambda: prepare(X, weights=W),
    "columns": lambda: prepare(X, bandwidth=[0.3, 0.2], method="kde"),
    "adaptive": lambda: prepare(X, method="kde", adaptive=0.5),
    "stacked": lambda: prepare(X, method="stacked"),
    "tophat": lambda: prepare(X, method="kde", kernel="tophat", bandwidth=0.7),
    "exponential": lambda: prepare(X, method="kde", kernel="exponential", bandwidth=0.2),
    "log": lambda: prepare(SKEW, coordinates="log", method="kde", bandwidth=0.3),
    "stacked in coordinates": lambda: prepare(SKEW[:150], method="stacked"),
    "support": lambda: prepare(abs(X - [5.0, -3.0]), support=[(0, None), (0, 6)]),
}


@functools.cache
def made(name):
    return DENSITIES[name]()


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_values_are_those_of_estimate(kind):
    density, y = prepare(kind(X), bandwidth=0.5), kind(X[:5].astype(np.float32))
    for got, want in ((density.pdf(y), density.estimate(y)), (density(y), density.estimate(y))):
        assert type(got) is type(want) and got.dtype == want.dtype and bool((got == want).all())
    assert bool((density.logpdf(y) == density.estimate(y, log=True)).all())
    with pytest.raises(ValueError, match="query has 3 dimensions"):
        density.pdf(np.zeros((1, 3)))


@pytest.mark.parametrize("name", DENSITIES)
def test_means_and_covariances_are_those_of_draws(name):
    density, n = made(name), 40_000
    for one in (density, pickle.loads(pickle.dumps(density))):
        y = one.sample(n, random_state=1)
        mean = one.mean()
        assert mean.shape == (2,)
        assert (abs(mean - y.mean(axis=0)) < 5 * y.std(axis=0) / math.sqrt(n)).all()
    if name in ("log", "support"):
        with pytest.raises(ValueError, match=r"take numpy.cov\(density.sample"):
            density.cov()
        column = density.marginal(0)  # fewer draws say its variance well: a median of parts
        parts = np.var(column.sample(n, random_state=2)[:, 0].reshape(20, -1), axis=1)
        assert parts.min() < column.cov()[0, 0] < parts.max()
    elif name != "stacked in coordinates":
        fourth = np.sqrt(np.outer(*[np.mean((y - y.mean(axis=0)) ** 4, axis=0)] * 2))
        assert (abs(density.cov() - np.cov(y.T)) < 5 * np.sqrt(fourth / n)).all()


def test_moments_are_exact():
    """Of a normal kernel at each sample; Laplace's kernel has no covariance; far from 0 no digits are lost."""
    h = np.array([[0.3, 0.1], [0.1, 0.2]])
    for x in (X, X + 1e7):
        density, weights = prepare(x, weights=W, method="kde", bandwidth=h), W / W.sum()
        np.testing.assert_allclose(density.mean(), weights @ x, rtol=1e-12)
        np.testing.assert_allclose(density.cov(), np.cov(x.T, aweights=weights, ddof=0) + h, rtol=1e-8)
    laplace = prepare(X, method="laplace", bandwidth=0.5)
    np.testing.assert_allclose(laplace.cov(), np.cov(X.T, ddof=0), rtol=1e-10)
    one = prepare([1.0, 2.0, 4.0], method="kde", bandwidth=0.5, coordinates="log")  # a mixture of log-normals
    parts = stats.lognorm(0.5, scale=[1.0, 2.0, 4.0])
    mean, second = parts.mean().mean(), (parts.var() + parts.mean() ** 2).mean()
    assert one.mean()[0] == pytest.approx(mean, rel=1e-4)
    assert one.cov()[0, 0] == pytest.approx(second - mean**2, rel=1e-3)


def test_the_guard_of_the_tails_counts_for_moments():
    x = np.exp(np.random.default_rng(1).normal(size=2000))
    guarded, plain = (prepare(x, coordinates="log", tails=tails) for tails in (None, "plain"))
    assert plain.mean()[0] == pytest.approx(x.mean(), rel=0.02) and guarded.mean()[0] > plain.mean()[0]


def test_what_has_no_moments_says_what_to_do():
    angles = prepare(RNG.random(200), support=("circular", 1.0))
    with pytest.raises(ValueError, match=r"go round a circle.*sample"):
        angles.mean()
    with pytest.raises(ValueError, match="negative='clip'"):
        prepare(X, method="laplace", negative="clip", bandwidth=0.5).mean()


def test_entropy():
    """Of a normal sample: ½ log(2πe) and what the kernels add."""
    density = prepare([0.0], method="kde", bandwidth=2.0)
    got = density.entropy()
    assert got == density.entropy() != density.entropy(random_state=1)
    exact = 0.5 * math.log(2.0 * math.pi * math.e * 4.0)
    assert abs(got.mean - exact) < 4 * got.standard_error and 0.005 < got.standard_error < 0.01
    with pytest.raises(ValueError, match="fewer than 2"):
        density.entropy(n=1)
    with pytest.raises(ValueError, match="laplace"):
        prepare(X, method="laplace").entropy()


def test_regions_of_a_normal_density():
    one, plane = prepare([[3.0]], method="kde", bandwidth=2.0), prepare([[0.0, 0.0]], method="kde", bandwidth=1.0)
    shares = np.array([[0.5, 0.9], [0.95, 0.99]])
    want = stats.norm.pdf(stats.norm.ppf(0.5 + 0.5 * shares)) / 2.0
    np.testing.assert_allclose(one.hdr(shares), want, rtol=1e-3)
    got = plane.hdr(shares, n=40_000)  # the log density falls by half a chi-squared variable
    np.testing.assert_allclose(got, (1.0 - shares) / (2.0 * np.pi), rtol=0.15)
    assert np.ndim(one.hdr(0.5)) == 0 and plane.hdr(0.5) == plane.hdr(0.5)
    np.testing.assert_allclose(plane.hdr(0.5, log=True), np.log(plane.hdr(0.5)))
    many = prepare(np.zeros((1, 500)), method="kde", bandwidth=10.0)
    assert many.hdr(0.9) == 0.0 and -2000 < many.hdr(0.9, log=True) < -1000  # where numbers underflow
    for wrong in (0.0, 1.0, 1.5, [0.5, np.nan]):
        with pytest.raises(ValueError, match="mass"):
            one.hdr(wrong)


@pytest.mark.parametrize("name", ["sdkde", "stacked", "tophat", "log", "stacked in coordinates", "support"])
def test_regions_hold_their_mass(name):
    for density, error in ((made(name), 0.02), *((one.marginal(0), 0.01) for one in [made(name)] if name != "tophat")):
        values, masses = density.pdf(density.sample(20_000, random_state=5)), np.array([0.5, 0.95])
        held = np.mean(values[:, None] >= density.hdr(masses), axis=0)
        np.testing.assert_allclose(held, masses, rtol=0.0, atol=error)


@pytest.mark.parametrize("name", [n for n in DENSITIES if n not in ("tophat", "exponential")])
def test_conditionals_of_many_rows_are_those_of_each(name):
    density, given = made(name), (X if made(name).mean()[1] < -1 else SKEW)[:3, 0]
    many, q = density.conditional({0: given}), [0.01, 0.5, 0.9]
    got = many.quantile(q)
    assert len(many) == 3 and got.shape == (3, 3) and many.quantile(0.5).shape == (3,)
    for i, value in enumerate(given):
        one = density.conditional({0: value})
        np.testing.assert_allclose(got[i], one.quantile(q), rtol=1e-7)
        np.testing.assert_allclose(many.pdf(got[:, 1])[i], one.pdf(got[i, 1:2])[0], rtol=2e-4)
        if name not in ("log", "support", "stacked in coordinates"):
            np.testing.assert_allclose(many.mean()[i], one.mean()[0], rtol=1e-9)
    if name in ("log", "support"):
        with pytest.raises(ValueError, match=r"quantile\(0.5\)"):
            many.mean()
        np.testing.assert_allclose(many[2].mean(), density.conditional({0: given[2]}).mean())


def test_regression_curves():
    """Of normal data: a line, and quantiles beside it; far from all samples too, by the names of columns."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": RNG.normal(40, 10, 1000)})
    frame["zip"], frame["pay"] = RNG.random(1000), 2.0 * frame["age"] + RNG.normal(0, 5, 1000)
    density, ages = prepare(frame), frame["age"][:400]
    curve = density.marginal(["age", "pay"]).conditional({"age": ages})
    assert np.sqrt(np.mean((curve.mean() - 2.0 * ages) ** 2)) < 2.0
    assert np.mean(frame["pay"][:400] < curve.quantile(0.9)) == pytest.approx(0.9, abs=0.05)
    both = density.conditional({"age": ages[:5], "zip": 0.5})
    np.testing.assert_allclose(both.mean(), [density.conditional({0: a, 1: 0.5}).mean()[0] for a in ages[:5]])
    assert density.conditional({"age": ages[:5]}).mean().shape == (5, 2)
    assert np.isfinite(curve.density.conditional({"age": [1e4, -1e4]}).quantile([0.1, 0.9])).all()
    assert density.conditional({"age": []}).mean().shape == (0, 2)


@pytest.mark.parametrize(
    ("given", "call", "error", "message"),
    [
        ({0: [1.0, np.nan]}, None, ValueError, "given is .*finite"),
        ({0: [[1.0]]}, None, ValueError, r"shape \(m,\)"),
        ({0: [1.0, 2.0], 1: [1.0, 2.0, 3.0]}, None, ValueError, r"given has .*all 2|shapes"),
        ({"a": [1.0]}, None, TypeError, "given has 'a'"),
        ({0: ["a"]}, None, TypeError, r"given\[0\]"),
        ({0: [1.0, 2.0]}, lambda c: c.quantile(1.0), ValueError, "q is 1.0"),
        ({0: [1.0, 2.0]}, lambda c: c.pdf([1.0]), ValueError, r"y has shape \(1, 1\).*each of the 2"),
    ],
)
def test_conditionals_refuse(given, call, error, message):
    with pytest.raises(error, match=message):
        call(made("sdkde").conditional(given)) if call else made("sdkde").conditional(given)
    with pytest.raises(ValueError, match="in row 1, where the density is 0"):
        made("log").conditional({0: [1.0, -1.0]})
    with pytest.raises(ValueError, match="laplace"):
        prepare(X, method="laplace").conditional({0: [1.0]})


class Frame:
    columns = ("<b>a</b>", "x&y")

    def __array__(self, dtype=None, copy=None):
        return X


def test_the_page_of_a_notebook():
    page = prepare(Frame())._repr_html_()
    ElementTree.fromstring(page)  # well-formed: names are escaped
    assert "&lt;b&gt;a&lt;/b&gt;" in page and page.count("<svg") == 2 and "300 × 2" in page
    for density, curves in (
        (made("sdkde").marginal(0), 1),
        (made("stacked"), 2),
        (made("log"), 2),
        (made("tophat"), 0),
    ):
        page = density._repr_html_()
        assert page.count("<svg") == curves and density.method in page and "<table>" in page
        ElementTree.fromstring(page)
        for points in re.findall(r'points="([^"]*)"', page):
            heights = np.array([point.split(",") for point in points.split()], dtype=float)[:, 1]
            assert heights.min() == 2.0 and 55.0 < heights.max() <= 58.0
    large = prepare(np.zeros((300_000, 1)) + RNG.normal(size=(300_000, 1)), bandwidth=0.3, method="kde")
    assert "<svg" not in large._repr_html_() and "300,000" in large._repr_html_()


def test_plots_are_those_of_the_module(monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots(2)
    assert prepare(X[:, 0]).plot(X[:, 0], ax=axes[0]) is axes[0] and axes[0].lines
    assert prepare(X).plot(ax=axes[1], shares=[0.5]) is axes[1] and len(axes[1].collections) > 0
    figure = Figure()
    assert prepare(np.c_[X, X[::-1, 0]]).plot(figure=figure) is figure and len(figure.axes) == 6
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"sdkde-core\[plot\]"):
        prepare(X).plot()
    assert "<svg" in prepare(X)._repr_html_()


def test_saved_densities_say_the_same(tmp_path):
    density = made("stacked")
    density.save(tmp_path / "x.sdkde")
    again = sdkde_core.load(tmp_path / "x.sdkde")
    np.testing.assert_array_equal(again.mean(), density.mean())
    np.testing.assert_array_equal(again.cov(), density.cov())
    np.testing.assert_array_equal(again.labels(X), density.labels(X))
