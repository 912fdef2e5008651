"""Densities of columns in other coordinates: z = T(x), and log T′ added at the end."""

import math
import pickle

import numpy as np
import pytest

import sdkde_core
from sdkde_core.coordinates.columns import NAMES, fit

RNG = np.random.default_rng(12)
POSITIVE = np.exp(RNG.normal(size=400))
PART = RNG.beta(2.0, 5.0, size=400)
X = np.c_[POSITIVE, PART, RNG.normal(size=400) * POSITIVE]
TABLE = {0: "log", 1: "logit", 2: "normal-scores"}
READY = sdkde_core.prepare(X, coordinates=TABLE)


class Cubic:
    """A user's map, without a derivative of log_jacobian."""

    def forward(self, x):
        return x + x**3

    def inverse(self, z):
        r = np.sqrt(z * z / 4 + 1 / 27)
        return np.cbrt(z / 2 + r) + np.cbrt(z / 2 - r)

    def log_jacobian(self, x):
        return np.log1p(3 * x**2)


class Frame:
    """What a data frame is to the library."""

    columns = ("price", "part", "gain")

    def __array__(self, dtype=None, copy=None):
        return X


SAMPLES = {
    "normal": RNG.normal(3.0, 2.0, 300),
    "cauchy": RNG.standard_cauchy(300),
    "far": np.r_[RNG.normal(size=150), 1000.0 + RNG.normal(size=150)],
    "counts": RNG.poisson(1.0, 300).astype(float),
    "exponential": RNG.exponential(size=300),
    "part": RNG.beta(0.5, 0.5, 300),
    "one value away": np.r_[np.zeros(299), 1.0],
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("name", SAMPLES)
def test_maps_are_monotone_and_their_inverses_and_derivatives_right(kind, name):
    x = SAMPLES[name]
    if (kind == "log" and x.min() <= 0) or (kind == "logit" and not 0 < x.min() < x.max() < 1):
        with pytest.raises(ValueError, match=rf"{kind}.*column 0 has .* in row \d+"):
            sdkde_core.prepare(x, coordinates=kind)
        return
    (one,) = fit(kind, x[:, None], np.full(300, 1 / 300)).maps
    z = np.linspace(-12.0, 12.0, 5001)
    y = np.sort(np.unique(one.inverse(z)))
    back = one.forward(y)
    assert (np.diff(back) > 0).all()
    np.testing.assert_allclose(one.inverse(back), y, rtol=1e-9, atol=1e-12 * np.std(x))
    middle, step = 0.5 * (y[1:] + y[:-1]), np.diff(y)
    slopes, known = np.diff(back) / step, step > 1e-8 * abs(y[1:])
    assert np.median(abs(slopes / np.exp(one.log_jacobian(middle)) - 1)[known]) < 1e-3
    e = 1e-5 * step
    second = (one.log_jacobian(middle + e) - one.log_jacobian(middle - e)) / (2 * e)
    np.testing.assert_allclose(np.median((second - one.slope(middle))[known] * step[known]), 0.0, atol=1e-4)
    assert np.isfinite(one.log_jacobian(np.r_[x, y])).all()


def test_columns_are_mapped_together_as_each_alone_also_by_pytorch():
    x = np.c_[POSITIVE, PART, SAMPLES["cauchy"][:300].repeat(2)[:400], X[:, 2], POSITIVE + 1.0, X[:, 2] ** 3]
    names = ["log", "logit", "asinh", "normal-scores", None, "normal-scores"]
    coordinates = fit(names, x, np.full(400, 1 / 400))
    y = np.concatenate([x[:50], 3.0 * x[:5] - 1.0, np.full((1, 6), np.inf), np.full((1, 6), np.nan)])
    with np.errstate(all="ignore"):
        z = np.stack([one.forward(np.where(np.isinf(v), np.nan, v)) for one, v in zip(coordinates.maps, y.T)], axis=1)
        logs, turns = (
            np.stack([getattr(one, what)(v) for one, v in zip(coordinates.maps, y.T)], axis=1)
            for what in ("log_jacobian", "slope")
        )
        got = *coordinates.placed(y), coordinates.turns(y)
    for together, alone in zip(got, (np.where(np.isinf(y), y, z), logs, turns)):
        np.testing.assert_array_equal(together[:55], alone[:55])
    assert (got[0][55] == np.inf).all() and (got[1][55] == -np.inf).all() and np.isnan(got[0][56]).all()
    torch = pytest.importorskip("torch")
    for there, here in zip((*coordinates.placed(torch.from_numpy(y)), coordinates.turns(torch.from_numpy(y))), got):
        np.testing.assert_allclose(there.numpy(), here, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_a_gpu_maps_its_queries_itself():
    torch = pytest.importorskip("torch")
    y = np.concatenate([READY.sample(200, 1), [[-1.0, 0.5, 0.0]]])  # the last has no density
    there = sdkde_core.prepare(torch.from_numpy(X).cuda(), coordinates=TABLE)
    assert there.device == "cuda:0"
    for log in (True, False):
        got = there.estimate(torch.from_numpy(y).cuda(), log=log)
        assert got.is_cuda
        np.testing.assert_allclose(got.cpu(), READY.estimate(y, log=log), rtol=1e-3, atol=1e-4)
    score = there.grad_log_density(torch.from_numpy(y).cuda()).cpu().numpy()
    np.testing.assert_allclose(score[:-1], READY.grad_log_density(y[:-1]), rtol=1e-2, atol=1e-2)
    assert np.isnan(score[-1]).all()


@pytest.mark.parametrize(
    "coordinates", ["log", *(pytest.param(x, marks=pytest.mark.slow) for x in ("asinh", "normal-scores"))]
)
@pytest.mark.parametrize("method", [pytest.param("sdkde", marks=pytest.mark.slow), "kde", "laplace"])
def test_a_density_of_one_column_and_its_integrals(coordinates, method):
    ready = sdkde_core.prepare(POSITIVE, coordinates=coordinates, method=method)
    z = sdkde_core.prepare(POSITIVE, coordinates="asinh").sample(2000, 0).ravel()
    y = np.unique(np.r_[z, np.linspace(-5, 40, 10_001)])
    p = ready.estimate(y)
    reached = np.r_[0.0, np.cumsum(0.5 * (p[1:] + p[:-1]) * np.diff(y))]
    np.testing.assert_allclose(ready.cdf(y) - ready.cdf(y[0]), reached, atol=2e-4)
    assert ready.cdf(np.inf) == pytest.approx(1.0) and ready.cdf(-np.inf) == pytest.approx(0.0)
    assert ready.probability(0.5, 2.0) == pytest.approx(float(ready.cdf(2.0) - ready.cdf(0.5)), rel=1e-9)
    np.testing.assert_allclose(ready.estimate(y[p > 0], log=True), np.log(p[p > 0]), atol=1e-9)
    assert (p[y <= 0] == 0).all() == (coordinates == "log")
    if method != "laplace":
        q = np.array([1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
        np.testing.assert_allclose(ready.cdf(ready.quantile(q)), q, rtol=1e-8)
        drawn = np.sort(ready.sample(20_000, 0).ravel())
        assert abs(ready.cdf(drawn) - (np.arange(20_000) + 0.5) / 20_000).max() < 0.012
        top = ready.modes([[1.0]])[0, 0]
        assert ready.grad_log_density([[top]])[0, 0] == pytest.approx(0.0, abs=1e-3)
        assert ready.modes()[0, 0] == pytest.approx(y[np.argmax(p)], abs=2e-2)


def test_queries_outside_have_no_density_and_others_are_as_they_were():
    got = READY.estimate([[1.0, 0.5, 0.0], [-1.0, 0.5, 0.0], [1.0, 1.0, 0.0]])
    assert got[0] > 0 and (got[1:] == 0).all()
    logs = READY.estimate([[0.0, 0.5, 0.0], [1.0, 0.5, 0.0]], log=True)
    assert logs[0] == -math.inf and logs[1] == pytest.approx(math.log(got[0]))
    slopes = READY.grad_log_density([[1.0, 2.0, 0.0], [1.0, 0.5, 0.0]])
    assert np.isnan(slopes[0]).all() and np.isfinite(slopes[1]).all()
    assert READY.estimate(np.empty((0, 3))).shape == (0,)
    assert np.isfinite(sdkde_core.estimate(X[:, 2], [-1e200, 1e200], coordinates="normal-scores", log=True)).all()
    far = np.r_[X[:, 2], -1e200, 1e200]
    assert sdkde_core.estimate(far, [0.0], coordinates="normal-scores")[0] > 0.1
    assert sdkde_core.estimate(X[:1, 2], X[:1, 2], coordinates="normal-scores", bandwidth=0.5)[0] > 0.0
    with pytest.raises(ValueError, match="query has values that are not finite"):
        READY.estimate([[np.nan, 0.5, 0.0]])


def test_several_columns_gradients_sections_and_boxes():
    y, e = READY.sample(40, 1), 1e-6
    steps = [(READY.estimate(y + e * k, log=True) - READY.estimate(y - e * k, log=True)) / (2 * e) for k in np.eye(3)]
    np.testing.assert_allclose(READY.grad_log_density(y), np.stack(steps, axis=1), rtol=1e-4, atol=1e-4)
    section = READY.conditional({0: 1.5, 2: 0.2})
    t = np.linspace(0.0, 1.0, 5001)[1:-1]
    joint = READY.estimate(np.stack([np.full(len(t), 1.5), t, np.full(len(t), 0.2)], axis=1))
    total = float(joint.sum() * (t[1] - t[0]))
    np.testing.assert_allclose(section.estimate(t[:, None]), joint / total, rtol=2e-3, atol=1e-6)
    assert READY.marginal([0, 2]).estimate([[1.5, 0.2]])[0] == pytest.approx(total, rel=2e-3)
    drawn = READY.sample(40_000, 2)
    low, high = [0.5, -1.0, -1.0], [2.0, 0.4, np.inf]
    inside = ((drawn > low) & (drawn < high)).all(axis=1).mean()
    assert READY.probability(low, high) == pytest.approx(inside, abs=0.015)
    assert (drawn[:, 0] > 0).all() and ((drawn[:, 1] > 0) & (drawn[:, 1] < 1)).all()
    with pytest.raises(ValueError, match=r"given is .*outside of the coordinates log"):
        READY.conditional({0: -1.0})
    with pytest.raises(ValueError, match="no mixture of normals"):
        READY.mixture()
    assert READY.divergence(READY).mean == 0.0


def test_the_bandwidth_is_that_of_the_mapped_columns():
    want = sdkde_core.estimate(np.log(POSITIVE), np.log([0.5, 2.0])) / [0.5, 2.0]
    np.testing.assert_allclose(sdkde_core.estimate(POSITIVE, [0.5, 2.0], coordinates="log"), want, rtol=1e-6)
    chosen = sdkde_core.select_bandwidth(POSITIVE, coordinates="log")
    np.testing.assert_allclose(chosen.factor, sdkde_core.select_bandwidth(np.log(POSITIVE)).factor)
    moved = sdkde_core.debias(POSITIVE, coordinates="log")
    np.testing.assert_allclose(moved, np.exp(sdkde_core.debias(np.log(POSITIVE))), rtol=1e-6)
    exact = sdkde_core.debias(POSITIVE, coordinates="log", score=lambda x: (-1.0 - np.log(x)) / x)
    np.testing.assert_allclose(exact, np.exp(sdkde_core.debias(np.log(POSITIVE), score=-np.log(POSITIVE))), rtol=1e-9)
    weights = RNG.random(400)
    want = sdkde_core.estimate(np.log(POSITIVE), np.log([2.0]), weights=weights) / 2.0
    np.testing.assert_allclose(
        sdkde_core.estimate(POSITIVE, [2.0], weights=weights, coordinates="log"), want, rtol=1e-6
    )


def test_a_users_map():
    x = RNG.normal(size=300)
    ready = sdkde_core.prepare(x, coordinates=Cubic())
    want = sdkde_core.estimate(x + x**3, [0.5 + 0.125]) * (1 + 3 * 0.25)
    assert ready.estimate([0.5])[0] == pytest.approx(want[0], rel=1e-6)
    e = 1e-5
    slope = (ready.estimate([0.5 + e], log=True) - ready.estimate([0.5 - e], log=True)) / (2 * e)
    assert ready.grad_log_density([0.5])[0, 0] == pytest.approx(slope[0], rel=1e-4)
    assert ready.cdf(ready.quantile(0.3)) == pytest.approx(0.3) and "Cubic" in repr(ready)
    assert pickle.loads(pickle.dumps(ready)).estimate([0.5]) == ready.estimate([0.5])
    with pytest.raises(TypeError, match="a map of yours"):
        ready.save("never")

    class Falling(Cubic):
        def forward(self, x):
            return -x

    with pytest.raises(ValueError, match="is no map of column 0"):
        sdkde_core.estimate(x, coordinates=Falling())


def test_a_users_map_is_asked_for_nothing_only_where_it_has_values():
    class Shifted:
        def forward(self, x):
            return np.where(x <= -3.0, -np.inf, np.log(np.maximum(x, -2.999) + 3.0)) + 0.0 * x.max()

        def inverse(self, z):
            return np.exp(z) - 3.0

        def log_jacobian(self, x):
            return -np.log(x + 3.0) + 0.0 * x.max()  # NumPy's and scikit-learn's functions refuse empty arrays too

    ready = sdkde_core.prepare(X[:50, 2].clip(-2.5, 3.0), coordinates=Shifted())
    assert (ready.estimate([-4.0, -5.0]) == 0.0).all() and np.isnan(ready.grad_log_density([-4.0])).all()
    assert ready.probability([-4.0], [np.inf]) == pytest.approx(1.0)
    assert ready.estimate([]).shape == (0,) and ready.grad_log_density(np.empty((0, 1))).shape == (0, 1)
    round_it = sdkde_core.prepare(X[:50, 2], support=("circular", 6.0), bandwidth=0.3)
    assert round_it.grad_log_density(np.empty((0, 1))).shape == (0, 1)

    class Column(Cubic):
        def log_jacobian(self, x):
            return super().log_jacobian(x)[:, None]

    with pytest.raises(ValueError, match="is no map of column 0"):
        sdkde_core.prepare(X[:50, 2], coordinates=Column())


def test_a_file_is_read_whose_map_hardly_rises_in_a_gap(tmp_path):
    x = np.random.default_rng(0).normal(size=1000)
    x[0] = 1e20  # as files of the climate have where there is no value
    ready = sdkde_core.prepare(x, coordinates="normal-scores", bandwidth=0.5)
    ready.save(tmp_path / "far")
    np.testing.assert_array_equal(sdkde_core.load(tmp_path / "far").estimate(x[:9]), ready.estimate(x[:9]))


def test_coordinates_pickled_as_a_plain_tuple_are_read():
    known = fit(["log", "normal-scores"], X[:, :2], np.full(400, 1 / 400))
    before = type(known).__new__(type(known), known.maps, known.names)  # all that pickle does for a tuple
    for each in (before, pickle.loads(pickle.dumps(before))):
        np.testing.assert_array_equal(each.placed(X[:9, :2]), known.placed(X[:9, :2]))


def test_files_frames_tensors_and_explanations(tmp_path):
    y = READY.sample(30, 3)
    READY.save(tmp_path / "a")
    for one in (sdkde_core.load(tmp_path / "a"), pickle.loads(pickle.dumps(READY))):
        np.testing.assert_array_equal(one.estimate(y), READY.estimate(y))
        assert repr(one) == repr(READY) and "log of column 0" in repr(one)
    assert "in coordinates log of column 0" in str(sdkde_core.explain(X, y, coordinates=TABLE))
    out = np.empty(30)
    np.testing.assert_allclose(sdkde_core.estimate(X, y, coordinates=TABLE, out=out), READY.estimate(y), rtol=1e-6)
    frame = Frame()
    named = sdkde_core.prepare(frame, coordinates={"price": "log", "part": "logit", "gain": "normal-scores"})
    np.testing.assert_allclose(named.estimate(y), READY.estimate(y), rtol=1e-6)
    assert "log of price" in repr(named) and repr(named.marginal("part")).count("logit")
    with pytest.raises(ValueError, match=r"'log' takes values above 0, but column 2 \('gain'\) has"):
        sdkde_core.prepare(frame, coordinates={"gain": "log"})
    torch = pytest.importorskip("torch")
    x, q = torch.tensor(X), torch.tensor(y, dtype=torch.float32)
    got = sdkde_core.estimate(x, q, coordinates=TABLE, log=True)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), READY.estimate(y, log=True), atol=1e-3)
    assert sdkde_core.prepare(x.float(), coordinates=TABLE).sample(3, 0).dtype == torch.float32
    with pytest.raises(TypeError, match=r"train requires grad, and only .* without coordinates"):
        sdkde_core.estimate(x.requires_grad_(), q, coordinates="asinh")


def test_classes_and_the_command(tmp_path):
    y = READY.sample(20, 5)
    neighbors = pytest.importorskip("sklearn.neighbors")
    assert issubclass(sdkde_core.KernelDensity, neighbors.KernelDensity)
    model = sdkde_core.KernelDensity(method="sdkde", bandwidth="auto", coordinates=TABLE).fit(X)
    np.testing.assert_allclose(model.score_samples(y), READY.estimate(y, log=True), atol=1e-6)
    model.save(tmp_path / "k")
    np.testing.assert_array_equal(sdkde_core.load(tmp_path / "k").score_samples(y), model.score_samples(y))
    kde, plain = sdkde_core.gaussian_kde(POSITIVE, coordinates="log"), sdkde_core.gaussian_kde(np.log(POSITIVE))
    np.testing.assert_allclose(kde.covariance, plain.covariance)
    np.testing.assert_allclose(kde(POSITIVE[:9]), plain(np.log(POSITIVE[:9])) / POSITIVE[:9], rtol=1e-6)
    assert kde.integrate_box_1d(1.0, 2.0) == pytest.approx(plain.integrate_box_1d(0.0, math.log(2.0)))
    assert kde.resample(50, 0).shape == (1, 50) and (kde.resample(50, 0) > 0).all()
    both = sdkde_core.gaussian_kde(X[:, :2].T, coordinates=["log", "logit"], method="sdkde")
    assert both.marginal(0)([2.0])[0] == pytest.approx(both.prepared.marginal(0).estimate([2.0])[0])
    both.save(tmp_path / "g")
    np.testing.assert_allclose(sdkde_core.load(tmp_path / "g")(y[:, :2].T), both(y[:, :2].T), rtol=1e-9)
    pytest.importorskip("matplotlib").use("agg")
    sdkde_core.plots.curves(READY.marginal(0))
    with pytest.raises(ValueError, match="no such integrals"):
        kde.integrate_kde(plain)
    click = pytest.importorskip("click.testing")
    from sdkde_core.cli.main import main

    np.savetxt(tmp_path / "x.csv", X[:, :2], delimiter=",", header="price,part", comments="")
    np.save(tmp_path / "y.npy", y[:, :2])
    args = ["estimate", str(tmp_path / "x.csv"), str(tmp_path / "y.npy"), "-o", str(tmp_path / "p.npy"), "-q"]
    how = ["--coordinates", "price:log", "--coordinates", "1:logit"]
    result = click.CliRunner().invoke(main, [*args, *how], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    want = sdkde_core.estimate(X[:, :2], y[:, :2], coordinates=["log", "logit"])
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), want, rtol=1e-4)
    result = click.CliRunner().invoke(main, [*args, "--coordinates", "cost:log"])
    assert result.exit_code == 2 and "'cost'" in result.output


@pytest.mark.slow
def test_a_stack_tries_other_coordinates_by_itself():
    rng = np.random.default_rng(3)
    x, y = np.exp(rng.normal(size=(2, 500)))
    ready = sdkde_core.prepare(x, method="stacked")
    assert " in log" in repr(ready) and any(label.endswith("in log") for label, *_ in ready.parts)
    assert sum(share for _, share, _ in ready.parts) == pytest.approx(1.0)
    plain = sdkde_core.prepare(x, method="stacked", coordinates="identity")
    assert not any(" in " in label for label, *_ in plain.parts)
    assert np.mean(ready.estimate(y, log=True) - plain.estimate(y, log=True)) > 0.01
    want = sum(share * part.estimate(y) for _, share, part in ready.parts)
    np.testing.assert_allclose(ready.estimate(y), want, rtol=1e-9)
    assert ready.cdf(ready.quantile(0.2)) == pytest.approx(0.2, rel=1e-9)
    copula = rng.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], size=800)
    skewed = np.c_[np.exp(copula[:, 0]), copula[:, 1] ** 3]
    both = sdkde_core.prepare(skewed, method="stacked")
    assert (
        " in log of column 0" in repr(both) or "in other coordinates" in repr(both) or "in normal-scores" in repr(both)
    )
    e, q = 1e-6, both.sample(20, 0)
    steps = [(both.estimate(q + e * k, log=True) - both.estimate(q - e * k, log=True)) / (2 * e) for k in np.eye(2)]
    np.testing.assert_allclose(both.grad_log_density(q), np.stack(steps, axis=1), rtol=1e-2, atol=1e-3)
    section = both.conditional({0: 1.0})
    t = np.sort(section.sample(400, 0).ravel())
    joint = both.estimate(np.c_[np.ones(400), t]) / both.marginal(0).estimate([1.0])
    np.testing.assert_allclose(section.estimate(t), joint, rtol=1e-6)
    copy = pickle.loads(pickle.dumps(both))
    np.testing.assert_array_equal(copy.estimate(q), both.estimate(q))
    log = sdkde_core.prepare(skewed, method="stacked", coordinates={0: "log"})
    assert repr(log).count("in coordinates log of column 0") == 1 and "normal-scores" not in repr(log)


def test_what_is_refused():
    for call, message in {
        lambda: sdkde_core.estimate(X, coordinates="logs"): "did you mean 'log'",
        lambda: sdkde_core.estimate(X, coordinates=["log", "logit"]): "coordinates is for 2 columns, but train has 3",
        lambda: sdkde_core.estimate(X, coordinates={7: "log"}): "column 7",
        lambda: sdkde_core.estimate(X, coordinates={"price": "log"}): "column 'price'",
        lambda: sdkde_core.explain((100, 3), coordinates="asinh"): "not to their shape",
        lambda: sdkde_core.estimate(np.where(X > 3, np.nan, X), coordinates="asinh"): "train has values that are not",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="coordinates is 3"):
        sdkde_core.estimate(X, coordinates=3)


def test_the_guard_does_not_carry_the_mean_of_many_samples_away():
    x = np.exp(np.random.default_rng(0).normal(size=20_000))
    assert sdkde_core.prepare(x, coordinates="log").mean() == pytest.approx([x.mean()], rel=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_normal_scores_of_few_samples_keep_all_mass(seed):
    x = np.random.default_rng(seed).standard_t(3, size=12)
    density = sdkde_core.prepare(x, coordinates="normal-scores")
    y = np.median(x) + np.ptp(x) * np.sinh(np.linspace(-9.0, 9.0, 100_001))
    assert np.trapezoid(density.pdf(y), y) == pytest.approx(1.0, abs=2e-3)
    assert (np.diff(density.cdf(y)) >= -1e-9).all()
    assert abs(density.quantile([1e-3, 0.999]) - np.median(x)).max() < 200.0 * np.ptp(x)
