"""Densities of columns that end somewhere, or go round, against numerical integration and plain images."""

import pickle

import numpy as np
import pytest

import sdkde_core

CIRCLE = ("circular", 2.0 * np.pi)


def exponential(n=1000):
    return np.random.default_rng(0).exponential(size=n)


def angles(n=800):
    rng = np.random.default_rng(1)
    return np.stack([np.mod(rng.vonmises(0.0, 4.0, n), 2.0 * np.pi), rng.beta(1.0, 3.0, n)], axis=1)


def grid(low, high, k=301):
    return np.linspace(low, high, k)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_it_integrates_to_one_and_does_not_sag(method):
    prepared = sdkde_core.prepare(exponential(), method=method, support=(0, None))
    y = grid(0.0, 14.0, 4001)
    density = prepared.estimate(y)
    assert abs(np.trapezoid(density, y) - 1.0) < 1e-4
    assert 0.8 < density[0] < 1.2
    assert prepared.estimate([-0.1, -5.0]).tolist() == [0.0, 0.0]
    assert prepared.estimate([-0.1], log=True)[0] == -np.inf
    assert "support (0, ∞)" in repr(prepared)


def test_a_given_bandwidth_is_plain_images_where_the_density_is_flat():
    """Of a sample that is its own mirror image about the middle the slope at the ends is what it is: none is fitted."""
    x = np.concatenate([(half := np.random.default_rng(2).random(300)), 1.0 - half])
    y = grid(0.0, 1.0)
    got = sdkde_core.estimate(x, y, method="kde", bandwidth=0.05, support=(0.0, 1.0))
    images = sdkde_core.estimate(np.concatenate([x, -x, 2.0 - x]), y, method="kde", bandwidth=0.05) * 3.0
    assert abs(got / images - 1.0).max() < 0.15  # but for the little slope that chance gives
    assert abs(np.trapezoid(got, y) - 1.0) < 1e-6


def test_circles_are_images_by_periods():
    x = angles()[:, 0]
    y = grid(0.0, 2.0 * np.pi)
    got = sdkde_core.estimate(x, y, method="kde", bandwidth=1.5, support=CIRCLE)
    images = np.concatenate([x + k * 2.0 * np.pi for k in range(-4, 5)])
    want = 9.0 * sdkde_core.estimate(images, y, method="kde", bandwidth=1.5)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(got[0], got[-1], rtol=1e-9)
    around = sdkde_core.estimate(x, y + 6.0 * np.pi, method="kde", bandwidth=1.5, support=CIRCLE)
    np.testing.assert_allclose(got, around, rtol=1e-9)


def test_circles_have_no_beginning():
    """Turned samples have the turned density, wherever 0 is: bandwidth, step, distribution and quantiles too."""
    x, y = np.random.default_rng(3).vonmises(0.3, 20.0, 500), grid(0.0, 2.0 * np.pi, 2001)
    plain, turned = (sdkde_core.prepare(np.mod(x + by, 2.0 * np.pi), support=CIRCLE) for by in (0.0, 2.0))
    np.testing.assert_allclose(turned.estimate(y + 2.0), plain.estimate(y), rtol=1e-9)
    density, steps = plain.estimate(y), np.diff(y)
    reached = np.append(0.0, np.cumsum(0.5 * steps * (density[1:] + density[:-1])))
    np.testing.assert_allclose(plain.cdf(y), reached, atol=1e-5)
    q = np.array([0.0, 0.01, 0.4, 0.99, 1.0])
    np.testing.assert_allclose(plain.cdf(plain.quantile(q)), q, atol=1e-9)
    assert plain.quantile(q)[[0, -1]].tolist() == [0.0, 2.0 * np.pi]


def test_all_of_a_fitted_density():
    x = angles(300)
    prepared = sdkde_core.prepare(x, support=[CIRCLE, (0, 1)])
    u, v = grid(0.0, 2.0 * np.pi), grid(0.0, 1.0)
    both = np.stack([a.ravel() for a in np.meshgrid(u, v, indexing="ij")], axis=1)
    density = prepared.estimate(both).reshape(len(u), len(v))
    whole = np.trapezoid(np.trapezoid(density, v, axis=1), u)
    assert abs(whole - 1.0) < 1e-3
    margin = prepared.marginal([0])
    np.testing.assert_allclose(margin.estimate(u), np.trapezoid(density, v, axis=1), rtol=2e-3, atol=1e-6)
    given = prepared.conditional({0: u[7]})
    np.testing.assert_allclose(given.estimate(v), density[7] / np.trapezoid(density[7], v), rtol=2e-3)
    here = u < 0.5
    part = np.trapezoid(np.trapezoid(density, v, axis=1)[here], u[here])
    assert abs(prepared.probability([0.0, 0.0], [u[here][-1], 1.0]) - part) < 1e-3
    arc = prepared.probability([-0.5, 0.2], [0.5, 0.4])
    assert (
        abs(arc - np.mean((np.minimum(x[:, 0], 2 * np.pi - x[:, 0]) < 0.5) & (x[:, 1] > 0.2) & (x[:, 1] < 0.4))) < 0.04
    )
    assert abs(prepared.probability([-1.0, -1.0], [7.0, 2.0]) - 1.0) < 1e-9
    draws = prepared.sample(500, random_state=0)
    assert draws.min() >= 0.0 and (draws.max(axis=0) <= [2.0 * np.pi, 1.0]).all()
    rows, step = draws[:5], 1e-5
    slopes = prepared.grad_log_density(rows)
    for j in range(2):
        away = np.zeros(2)
        away[j] = step
        numeric = (prepared.estimate(rows + away, log=True) - prepared.estimate(rows - away, log=True)) / (2.0 * step)
        np.testing.assert_allclose(slopes[:, j], numeric, rtol=1e-3, atol=1e-3)
    (mode, *_) = prepared.modes()
    assert min(mode[0], 2.0 * np.pi - mode[0]) < 0.5 and 0.0 <= mode[1] < 0.3
    again = pickle.loads(pickle.dumps(prepared))
    np.testing.assert_array_equal(again.estimate(rows), prepared.estimate(rows))


def test_one_column_has_a_distribution_function(tmp_path):
    prepared = sdkde_core.prepare(exponential(), support={0: (0, None)})
    y = grid(0.0, 14.0, 1001)
    reached = np.concatenate([[0.0], np.cumsum(0.5 * np.diff(y) * (lambda p: p[1:] + p[:-1])(prepared.estimate(y)))])
    np.testing.assert_allclose(prepared.cdf(y), reached, atol=1e-4)
    assert prepared.cdf([-1.0, np.inf]).tolist() == [0.0, 1.0]
    q = np.array([0.0, 0.01, 0.5, 0.99])
    np.testing.assert_allclose(prepared.cdf(prepared.quantile(q)), q, atol=1e-9)
    assert prepared.quantile([0.0])[0] == 0.0
    prepared.save(tmp_path / "density")
    loaded = sdkde_core.load(tmp_path / "density")
    np.testing.assert_array_equal(loaded.estimate(y), prepared.estimate(y))
    assert loaded.n_train == prepared.n_train == 1000


def test_weights_debias_and_choosing():
    x, rng = exponential(400), np.random.default_rng(3)
    weights = rng.integers(1, 4, 400)
    y = grid(0.0, 6.0, 50)
    got = sdkde_core.estimate(x, y, weights=weights, bandwidth=0.3, support=(0, None))
    want = sdkde_core.estimate(np.repeat(x, weights), y, bandwidth=0.3, support=(0, None))
    np.testing.assert_allclose(got, want, rtol=0.1)  # ends are fitted with n_eff
    moved = sdkde_core.debias(x, support=(0, None))
    assert moved.shape == (400, 1) and (moved >= 0.0).all()
    wide = float(sdkde_core.select_bandwidth(x, support=(0, None)).matrix[0, 0])
    assert wide > 1.5 * float(sdkde_core.select_bandwidth(x).matrix[0, 0])  # no edge asks for narrow kernels


def test_a_far_support_changes_nothing():
    x = np.random.default_rng(4).normal(size=(300, 2))
    want = sdkde_core.estimate(x, bandwidth=0.4, device="cpu", backend="numpy")
    got = sdkde_core.estimate(x, bandwidth=0.4, support=[(-1e3, 1e3), (None, 1e9)], device="cpu", backend="numpy")
    np.testing.assert_allclose(got, want, rtol=1e-13)
    x = np.r_[exponential(300), 3e8]
    open_ended, ended = (sdkde_core.estimate(x, x, bandwidth=0.3, support=(0, high)) for high in (None, 1e9))
    np.testing.assert_allclose(ended, open_ended, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"support": (1.0, None)}, r"support: column 0 has 0\.\d+ in row \d+, outside"),
        ({"support": (2.0, 1.0)}, "None, \\(low, high\\)"),
        ({"support": "positive"}, "a sequence, or a dict"),
        ({"support": [None, (0, 1)]}, "support is for 2 columns, but train has 1"),
        ({"support": {"age": (0, None)}}, "support has column 'age'; train's are without names: pass .* below 1"),
        ({"support": (0, None), "coordinates": "log"}, "pass one of them"),
        ({"support": (0, None), "method": "stacked", "coordinates": "log"}, "leave coordinates out"),
        ({"train": np.ones((9, 2)), "support": (0, None)}, "support is for 1 columns, but train has 2"),
        ({"support": (0, None), "kernel": "tophat", "method": "kde", "bandwidth": 1.0}, "Gaussian"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sdkde_core.estimate(**{"train": exponential(50)} | options)


def test_kernels_that_couple_a_column_that_ends():
    with pytest.raises(ValueError, match="couples columns 0 and 1"):
        sdkde_core.estimate(angles(50), bandwidth=[[1.0, 0.5], [0.5, 1.0]], support=[None, (0, 1)])


def test_a_signed_density_that_is_cut_off_integrates_to_one():
    prepared = sdkde_core.prepare(np.random.default_rng(5).gamma(2.2, size=300), method="laplace", support=(0, None))
    y = grid(0.0, 30.0, 20_001)
    assert abs(np.trapezoid(prepared.estimate(y), y) - 1.0) < 1e-4
    assert abs(prepared.cdf(np.inf) - 1.0) < 1e-12
    with pytest.raises(ValueError, match="support"):
        prepared.negative_mass()
    with pytest.raises(ValueError, match="negative='renormalise' yet"):
        sdkde_core.prepare(exponential(50), method="laplace", negative="renormalise", support=(0, None))


@pytest.mark.parametrize(
    ("x", "high", "h"), [([2.0], None, 0.3), (np.zeros(50), 1.0, 0.3), (exponential(50) * 1e-200, 1e-199, "auto")]
)
def test_equal_samples_and_tiny_units(x, high, h):
    prepared = sdkde_core.prepare(x, bandwidth=h, support=(0, high))
    y = grid(0.0, high or 5.0, 2001)
    density = prepared.estimate(y)
    assert abs(0.5 * float((density[1:] + density[:-1]) @ np.diff(y)) - 1.0) < 1e-3


@pytest.mark.slow
def test_arcs_the_distribution_function_and_modes_round_a_circle():
    x = np.r_[angles()[:, 0], np.full(3, 3.0)]
    prepared = sdkde_core.prepare(x, support=CIRCLE, bandwidth=0.2, tails="guard")
    np.testing.assert_allclose(prepared.probability(5.0, 1.0), prepared.probability(5.0, 1.0 + 2.0 * np.pi))
    assert (np.diff(prepared.cdf(grid(-2.0, 9.0))) >= 0.0).all()
    np.testing.assert_allclose(prepared.quantile([0.0, 1.0]), [0.0, 2.0 * np.pi])
    modes = prepared.modes()[:, 0]
    apart = abs(modes[:, None] - modes)
    assert (np.minimum(apart, 2.0 * np.pi - apart)[~np.eye(len(modes), dtype=bool)] > 1e-2).all()
    few = sdkde_core.prepare(np.linspace(1.2, 1.7, 40), support=CIRCLE, bandwidth=0.1, tails="guard")
    logs = few.estimate([0.0, 2.0 * np.pi - 1e-9], log=True)
    assert abs(logs[0] - logs[1]) < 1e-3
    assert np.allclose(sdkde_core.estimate(x, [1.0], bandwidth=1e7, method="kde", support=CIRCLE), 0.5 / np.pi, 1e-3)


def test_modes_at_an_end_are_maxima_along_it():
    rng = np.random.default_rng(6)
    x = np.stack([rng.exponential(size=300), rng.normal(size=300)], axis=1)
    prepared = sdkde_core.prepare(x, method="kde", bandwidth=[0.3, 0.6], support=[(0, None), None])
    (mode, *more) = prepared.modes()
    assert mode[0] < 0.1 and len(more) < 8
    assert abs(prepared.grad_log_density([mode, *more])[:, 1]).max() < 1e-3


def test_rows_outside_and_files_of_tuples(tmp_path):
    with pytest.raises(ValueError, match="has -5 in row 2"):
        sdkde_core.estimate([1.0, 2.0, -5.0], weights=[0.0, 1.0, 0.0], bandwidth=1.0, support={np.int64(0): (0, None)})
    pytest.importorskip("sklearn")
    model = sdkde_core.KernelDensity(bandwidth=0.3, support=[(0, None)]).fit(exponential(50)[:, None])
    assert model.score_samples([[-1.0]])[0] == -np.inf
    assert model.sample(50, random_state=0).min() >= 0.0
    model.save(tmp_path / "k")
    assert sdkde_core.load(tmp_path / "k").score_samples([[0.5]]) == model.score_samples([[0.5]])


@pytest.mark.slow
def test_stacks_are_inside_and_take_logs_where_these_say_more(tmp_path):
    rng, y = np.random.default_rng(7), grid(0.0, 60.0, 60_001)
    flat = sdkde_core.prepare(exponential(), method="stacked", support=(0, None))
    assert 0.85 < flat.estimate([0.0])[0] < 1.15  # no part that is 0 there
    x = np.exp(rng.normal(size=500))
    prepared = sdkde_core.prepare(x, method="stacked", support=(0, None))
    assert "in log" in repr(prepared) and "support (0, ∞)" in repr(prepared)
    density = prepared.estimate(y)
    assert abs(np.trapezoid(density, y) - 1.0) < 1e-2
    assert prepared.estimate([-0.1], log=True)[0] == -np.inf
    below = sdkde_core.prepare(3.0 - x, method="stacked", support=(None, 3.0))
    assert abs(np.trapezoid(below.estimate(3.0 - y), y) - 1.0) < 1e-2
    assert below.estimate([3.1]).tolist() == [0.0]
    assert prepared.sample(500, random_state=0).min() > 0.0
    assert abs(prepared.cdf(prepared.quantile([0.1, 0.9])) - [0.1, 0.9]).max() < 1e-6
    prepared.save(tmp_path / "s")
    np.testing.assert_array_equal(sdkde_core.load(tmp_path / "s").estimate(y), density)
    two = np.stack([x, rng.beta(2.0, 5.0, 500), rng.normal(size=500)], axis=1)
    both = sdkde_core.prepare(two, method="stacked", support=[(0, None), (0, 1), None])
    assert both.estimate([[1.0, 1.2, 0.0], [-1.0, 0.5, 0.0]]).tolist() == [0.0, 0.0]
    inside = both.sample(400, random_state=1)
    assert inside[:, 0].min() > 0.0 and 0.0 < inside[:, 1].min() <= inside[:, 1].max() < 1.0
    assert abs(both.marginal(1).cdf([1.0]) - 1.0).max() < 1e-9


def test_a_stack_round_a_circle_is_sdkde_alone():
    x, y = angles(300), angles(50)
    got = sdkde_core.estimate(x, y, method="stacked", support=[CIRCLE, (0, 1)])
    np.testing.assert_array_equal(got, sdkde_core.estimate(x, y, support=[CIRCLE, (0, 1)]))


def test_gaussian_kde_ends_too(tmp_path):
    x, y = exponential(), grid(0.0, 14.0, 4001)
    kde = sdkde_core.gaussian_kde(x, 0.2, support=(0, None))
    width = float(np.sqrt(kde.covariance[0, 0]))
    np.testing.assert_allclose(
        kde(y), sdkde_core.estimate(x, y, method="kde", bandwidth=width, support=(0, None), precision="float64"), 1e-9
    )
    assert kde.integrate_box_1d(-1.0, 0.0) == 0.0
    assert kde.resample(500, seed=0).min() >= 0.0
    with pytest.raises(ValueError, match="average over draws"):
        kde.integrate_gaussian(0.0, 1.0)
    chosen = sdkde_core.gaussian_kde(x, "auto", method="sdkde", support=(0, None))
    assert abs(chosen([0.0])[0] - 1.0) < 0.15
    chosen.save(tmp_path / "g")
    np.testing.assert_array_equal(sdkde_core.load(tmp_path / "g")(y), chosen(y))
    two = sdkde_core.gaussian_kde(np.stack([x, x + np.random.default_rng(8).normal(size=1000)]), support={0: (0, None)})
    assert two.covariance[0, 1] == 0.0
    assert two([[-1.0], [1.0]])[0] == 0.0
    width = float(np.sqrt(two.covariance[0, 0]))
    alone = sdkde_core.prepare(x, method="kde", bandwidth=width, support=(0, None))
    np.testing.assert_allclose(two.marginal([0])(y), alone.estimate(y), rtol=0.2)


@pytest.mark.slow
def test_stacks_beside_a_wide_tail_and_by_names():
    """Where sdkde is nearly 0 at a few left-out samples these do not hide what logs say of the others."""
    rng = np.random.default_rng(0)
    x, unseen = rng.lognormal(0.0, 2.0, 400), rng.lognormal(0.0, 2.0, 2000)
    free, ended = (sdkde_core.prepare(x, method="stacked", **how) for how in ({}, {"support": (0, None)}))
    assert ended.estimate(unseen, log=True).mean() > free.estimate(unseen, log=True).mean() - 0.05
    assert ended.quantile([0.0, 1.0]).tolist() == [0.0, np.inf]
    assert ended.modes([-1.0]).shape == (0, 1)
    below = np.array([-1e-3, -2e-3])  # where parts in logs are 0 and have no score
    score = (free.estimate(below + 1e-6, log=True) - free.estimate(below - 1e-6, log=True)) / 2e-6
    np.testing.assert_allclose(free.grad_log_density(below)[:, 0], score, rtol=1e-4)
    assert np.isnan(ended.grad_log_density(below)).all()
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"wait": x[:200], "size": rng.normal(size=200)})
    assert sdkde_core.estimate(frame, frame[:1], method="stacked", support={"wait": (0, None)}).shape == (1,)


def test_axes_end_where_the_support_ends():
    pytest.importorskip("matplotlib").use("Agg")
    waits, round_ = exponential(200), angles(200)[:, 0]
    assert sdkde_core.plots.curves(sdkde_core.prepare(waits, support=(0, None))).lines[1].get_xdata()[0] == 0.0
    both = sdkde_core.prepare(np.stack([waits, round_], axis=1), support=[(0, None), CIRCLE])
    ax = sdkde_core.plots.contours(both)
    assert ax.get_xlim()[0] >= 0.0 and ax.get_ylim()[0] >= 0.0 and ax.get_ylim()[1] <= 2.0 * np.pi + 1e-9


def test_a_stack_round_a_circle_has_one_mode_across_its_beginning():
    angles = np.mod(np.random.default_rng(0).normal(350, 30, 200), 360)
    density = sdkde_core.prepare(angles, support=("circular", 360), method="stacked")
    assert density.modes().shape == (1, 1) and np.ptp(density.labels(angles)) == 0
    plane = sdkde_core.prepare(np.stack([angles, angles], axis=1), support=[("circular", 360)] * 2, method="stacked")
    with pytest.raises(ValueError, match="none that goes round"):
        plane.conditional({0: [10.0, 20.0]}).quantile(0.5)


@pytest.mark.parametrize(
    ("draw", "unit"),
    [
        (lambda r: np.where(r.random(600) < 0.6, 0.0, r.exponential(size=600)), 0.0),
        (lambda r: np.round(2.0 * r.exponential(size=2000)) / 2.0, 0.5),
        (lambda r: r.poisson(2.0, size=1000) * 1.0, 1.0),
    ],
)
def test_zeros_and_rounding_bend_nothing(draw, unit):
    x = draw(np.random.default_rng(0))
    density = sdkde_core.prepare(x, support=(0, None))
    for low, high in [(-0.5 * unit, 0.5 * unit), (0.5 * unit, 1.5 * unit)] if unit else [(0.0, 1.5), (1.5, 3.0)]:
        assert abs(density.probability(low, high) - np.mean((low <= x) & (x < high))) < 0.04


@pytest.mark.parametrize("high", [0.0, 1.0, 0.1])
def test_samples_on_the_upper_end_have_images_as_on_the_lower_one(high):
    x = np.minimum(np.random.default_rng(0).normal(size=500), 1.0) - 1.0
    how = {"method": "kde", "bandwidth": 0.3}
    upper = sdkde_core.prepare(x + high, support=(None, high), **how).pdf([high])
    lower = sdkde_core.prepare(-x - high, support=(-high, None), **how).pdf([-high])
    assert upper == pytest.approx(lower, rel=1e-9)


def test_a_signed_density_round_a_circle_has_its_own_distribution_function():
    density = sdkde_core.prepare([1.0, 2.5], method="laplace", bandwidth=0.5, support=("circular", 6))
    y = grid(0.0, 1.0, 10001)
    assert density.cdf(1.0) == pytest.approx(np.trapezoid(density.pdf(y), y), abs=1e-6)
    assert density.cdf(1.0) == pytest.approx(density.probability(0, 1), abs=1e-9)


def test_stacks_of_samples_on_an_end_or_rounded_are_saved(tmp_path):
    x = np.random.default_rng(0).beta(1, 2, size=(300, 2)) * 0.6 + 0.1
    x[:5, 0] = 0.1
    density = sdkde_core.prepare(x, method="stacked", support=[(0.1, 0.7), None])
    density.save(tmp_path / "stack.sdkde")
    assert np.array_equal(sdkde_core.load(tmp_path / "stack.sdkde").estimate(x), density.estimate(x))
    rounded = np.round(np.random.default_rng(9).exponential(size=(500, 2)), 1)
    assert np.isfinite(sdkde_core.prepare(rounded, method="stacked", support=[(0, None)] * 2).logpdf(rounded)).all()


def test_cells_go_across_the_cut_and_fit_into_the_support():
    density = sdkde_core.prepare(angles(300)[:, 0], support=CIRCLE)
    heights = density.pdf(density.sample(100_000, 1)[:, 0])
    for mass in (0.05, 0.5, 0.95):
        assert abs((heights >= density.hdr(mass)).mean() - mass) < 0.006
    wide = sdkde_core.prepare([0.2, 0.4, 0.7], method="kde", bandwidth=20.0, support=(0, 1))
    assert wide.cov()[0, 0] == pytest.approx(1 / 12, rel=1e-3) and wide.hdr(0.5) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="makes more than"):
        sdkde_core.prepare(np.random.default_rng(0).random((300, 6)), support=[("circular", 1)] * 6)
