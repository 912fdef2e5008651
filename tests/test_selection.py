"""Bandwidths chosen from the data: exact leave-one-out against brute force, and what a choice must not depend on."""

import json
import math

import array_api_strict
import numpy as np
import pytest
import torch
from pairwise import cases

import sdkde_core
from sdkde_core import select_bandwidth
from sdkde_core.bandwidth import selection
from sdkde_core.bandwidth.line import FOLDS, Line
from sdkde_core.bandwidth.normal import normal_reference, widest
from sdkde_core.bandwidth.pairs import Pairs
from sdkde_core.bandwidth.rules import RULES, resolve
from sdkde_core.bandwidth.selection import CHOOSERS

METHODS = ("kde", "sdkde", "laplace")


def moved(x, w, h, method):
    if method != "sdkde":
        return x
    near = w * np.exp(-((x[:, None] - x) ** 2).sum(2) / (2 * h**2))
    return 0.5 * (x + near @ x / near.sum(1)[:, None])


def log_density(x, w, y, h, method):
    """log |p̂(y)| of samples x with weights that sum to 1, without (2π)^(−d/2), in the log domain; and its sign."""
    d, q = x.shape[1], ((y[:, None] - moved(x, w, h, method)) ** 2).sum(2) / (2 * h**2)
    least = q.min(1)
    sums = (np.exp(least[:, None] - q) * (1 + d / 2 - q if method == "laplace" else 1.0)) @ w
    return np.log(abs(sums)) - least - d * math.log(h), np.sign(sums)


def without_each(x, w, h, method):
    """The same at each sample, without it."""
    each = np.arange(len(x))
    parts = [log_density(x[each != i], w[each != i] / w[each != i].sum(), x[i : i + 1], h, method) for i in each]
    return np.array([p[0][0] for p in parts]), np.array([p[1][0] for p in parts])


def some(n, d, spread=0.0, seed=0):
    """Normal samples, the first of them far off, and weights over ``spread`` powers of ten."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(n, d)), 10 ** (spread * rng.random(n))
    x[0] += 12.0
    x -= np.median(x, axis=0)
    return x, w / w.sum()


@pytest.mark.parametrize(("method", "d", "spread"), cases(METHODS, (1, 3, 17), (0.0, 1.0, 4.0)))
def test_leave_one_out_is_brute_force(method, d, spread):
    x, w = some(90, d, spread)  # two blocks of rows
    pairs = Pairs(x, w, method)
    for h in (0.02, 0.3, 1.0) if d == 1 else (0.3, 1.0):
        (got,), (want, sign) = pairs.at([h]), without_each(x, w, h, method)
        scale = log_density(x, w, x, h, "kde")[0] if method == "laplace" else want  # the sum may cancel
        wrong = abs(got.sign * np.exp(got.log_density - scale) - sign * np.exp(want - scale))
        np.testing.assert_array_less(wrong, (1e-3 if spread == 4 else 1e-5) * (1 + abs(want)), str(h))


@pytest.mark.parametrize("method", METHODS)
def test_twins_far_from_others_have_no_negative_distance(method):
    rng = np.random.default_rng(0)
    x = np.repeat(8e6 * rng.random((30, 2)), 2, axis=0) + 1e-9 * rng.normal(size=(60, 2))
    for left in Pairs(x, np.full(60, 1 / 60), method).at([1e-3, 0.006, 1.0]):
        assert np.isfinite(left.log_density).all() and np.isfinite(left.log_square)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_search_by_some_samples_first_loses_nothing(monkeypatch, method, seed):
    """The bandwidths that are left have neighbours on both sides of the best, for its parabola."""
    x = np.random.default_rng(seed).normal(size=(800, 12))
    got = select_bandwidth(x, method=method, rule="lscv").selection.multiple
    monkeypatch.setattr(selection, "asked_first", lambda n: n)
    assert got == pytest.approx(select_bandwidth(x, method=method, rule="lscv").selection.multiple, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_integral_of_the_square_is_a_quadrature(method):
    x, w = some(70, 1, 1.0)
    for h in (0.05, 0.4, 1.5):
        grid = np.linspace(x.min() - 9 * h, x.max() + 9 * h, 4001)
        log, _ = log_density(x, w, grid[:, None], h, method)
        want = np.exp(2 * log).sum() * (grid[1] - grid[0]) / (2 * np.pi)
        got = math.exp(Pairs(x, w, method).at([h])[0].log_square) / math.sqrt(2 * np.pi)
        assert got == pytest.approx(want, rel=3e-6)


def test_a_line_is_judged_by_the_step_that_keeps_the_variance():
    x, w = some(160, 1, 1.0)
    x, w = x[np.argsort(x[:, 0])], w[np.argsort(x[:, 0])]
    folds = np.random.default_rng(1).permutation(160) % FOLDS
    line, held = Line(x[:, 0], w, folds, "sdkde", 1.4), np.bincount(folds, w)
    for h in (0.06, 0.3, 1.0):
        want, how = 0.0, {"bandwidth": h, "step": "moments", "score_bandwidth": 1.4}
        grid = np.arange(x[0, 0] - 9 * h, x[-1, 0] + 9 * h, h / 8)
        for fold in range(FOLDS):
            rest = folds != fold
            p, q = (sdkde_core.estimate(x[rest], y, weights=w[rest], **how) for y in (grid[:, None], x[~rest]))
            want += held[fold] * (p**2).sum() * h / 8 - 2 * w[~rest] @ q
        assert held @ line.said(h, *line.sums(h)).least_squares == pytest.approx(want, rel=2e-3)


@pytest.mark.parametrize("method", METHODS)
def test_criteria_of_a_line_are_brute_force(method):
    x, w = some(160, 1, 1.0)
    x, w = x[np.argsort(x[:, 0])], w[np.argsort(x[:, 0])]
    folds = np.random.default_rng(1).permutation(160) % FOLDS
    line, held = Line(x[:, 0], w, folds, method), np.bincount(folds, w)
    for h in (0.06, 0.3, 1.0):
        got, grid = line.said(h, *line.sums(h)), np.arange(x[0, 0] - 9 * h, x[-1, 0] + 9 * h, h / 8)
        want = np.zeros(3)
        for fold in range(FOLDS):
            rest = folds != fold
            parts = x[rest], w[rest] / w[rest].sum()
            (everywhere, signs), (there, sign) = (log_density(*parts, y, h, method) for y in (grid[:, None], x[~rest]))
            p, q = (s * np.exp(log) / math.sqrt(2 * math.pi) for log, s in ((everywhere, signs), (there, sign)))
            whole, seen = h / 8, w[~rest]
            want[0] += held[fold] * (np.maximum(p, 0) ** 1.25).sum() * whole - 5 * seen @ np.maximum(q, 0) ** 0.25
            want[1] += held[fold] * (p**2).sum() * whole - 2 * seen @ q
            want[2] -= seen @ np.log(np.maximum(q, 1e-15))
        # A density of next to nothing, of the far sample, is not known to better than 1e-15.
        assert held @ got.power == pytest.approx(want[0], rel=2e-3)
        assert held @ got.least_squares == pytest.approx(want[1], rel=1e-3)
        assert method == "laplace" or h < 1 or held @ got.likelihood == pytest.approx(want[2], rel=0.02)


@pytest.mark.parametrize("method", ["kde", *(pytest.param(m, marks=pytest.mark.slow) for m in ("sdkde", "laplace"))])
def test_one_column_is_judged_from_all_samples(method):
    rng = np.random.default_rng(0)
    x = np.where(rng.random(16_000) < 0.3, 0.1 * rng.normal(size=16_000), rng.normal(size=16_000))

    def over_best(h):
        errors = [
            ise(x, lambda y: 0.3 * normal(y, sd=0.1) + 0.7 * normal(y), method=method, bandwidth=h.scaled(k))
            for k in (1.0, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4)
        ]
        return errors[0] / min(errors)

    chosen = select_bandwidth(x, method=method)
    assert chosen.selection.used == 16_000
    assert over_best(chosen) < 1.15


@pytest.mark.parametrize(("method", "unit"), [("sdkde", 0.02), *((method, 0.1) for method in METHODS)])
def test_rounding_costs_next_to_nothing(method, unit):
    logs = 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = rng.choice((-1.5, 1.5), 1000) + 0.5 * rng.normal(size=1000)
        errors = [
            ise(y, lambda y: (normal(y, -1.5, 0.5) + normal(y, 1.5, 0.5)) / 2, method=method)
            for y in (np.round(x / unit) * unit, x)
        ]
        logs += math.log(errors[0] / errors[1]) / 3
    assert logs < math.log(1.15)


def test_the_estimate_has_the_variance_of_what_was_rounded():
    """Rounding adds unit² / 12 to a variance, which the step takes off: within a fifth of it."""
    for weights in (None, np.random.default_rng(1).uniform(0.5, 1.5, 2000)):
        x = np.random.default_rng(0).normal(size=2000)
        g = 5.0 + np.round(x / 0.45) * 0.45
        how = {"bandwidth": select_bandwidth(g, weights=weights), "weights": weights, "tails": "plain"}
        had = np.cov(g, aweights=weights, ddof=0)
        assert had - sdkde_core.prepare(g, **how).cov().item() == pytest.approx(0.45**2 / 12, rel=0.2)


def test_rounded_peaks_are_estimated_better_by_that_step():
    logs = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        narrow = rng.random(2000) < 0.4
        g = np.round((rng.normal(size=2000) * np.where(narrow, 0.1, 1.0)) / 0.1) * 0.1
        found = select_bandwidth(g)
        other = {"step": "moments", "score_bandwidth": found.score_bandwidth}
        errors = [
            ise(g, lambda y: 0.4 * normal(y, sd=0.1) + 0.6 * normal(y), method="sdkde", bandwidth=found, **more)
            for more in ({}, other)
        ]
        logs.append(math.log(errors[0] / errors[1]))
    assert np.mean(logs) < math.log(0.8) and max(logs) < 0.0


def test_only_units_that_matter_and_are_no_counts_change_the_step():
    x = np.random.default_rng(0).normal(size=2000)
    steps = [select_bandwidth(np.round(x / unit) * unit if unit else x).step for unit in (0.0, 0.01, 0.3, 0.7)]
    assert steps[:2] == ["moments"] * 2 and steps[3] == "moments"
    assert isinstance(steps[2], float) and 0.5 < steps[2] < 1.2 * 1.4**2
    found = select_bandwidth(np.round(x / 0.3) * 0.3)
    assert f"the step is {found.step:.3g}, for what was rounded; values are multiples of 0.3" in found.selection.reason
    assert select_bandwidth(np.round(x / 0.3) * 0.3, method="kde").step is None
    assert select_bandwidth(1e-9 * np.round(x / 0.3)).step == pytest.approx(found.step, rel=1e-6)
    assert select_bandwidth(np.round(x[:90] / 0.3) * 0.3).step is None


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("scale", "start", "said"),
    [(0.1, 0.0, "are multiples of 0.1"), (1.0, 0.0, "of 1,"), (12.0, 5.0, "differ by multiples of 12")],
)
def test_units_are_found(scale, start, said, kind):
    rng = np.random.default_rng(0)
    x = np.c_[start + scale * np.round(4 * rng.normal(size=90)), rng.normal(size=90)].astype(kind)
    for given, column in ((x[:, 0], ""), (x, "of column 0 ")):
        chosen = select_bandwidth(given)
        assert f"values {column}" in chosen.selection.reason and said in chosen.selection.reason
        assert np.sqrt(chosen.matrix[0, 0]) >= 0.4999 * scale
        assert chosen.selection.units[0] == pytest.approx(scale, rel=1e-6) and not chosen.selection.units[1:].any()
    order = rng.permutation(90)
    np.testing.assert_allclose(select_bandwidth(x[order]).matrix, select_bandwidth(x).matrix, 1e-6)
    assert "multiples" not in select_bandwidth(x[:, 1]).selection.reason


def test_columns_that_are_coarse_have_wide_kernels():
    """As in unrounded data of that spread: half a unit at least, and no atom is taken for a peak."""
    x = np.random.default_rng(0).normal(size=(1000, 2))
    want = select_bandwidth(x).factor
    for unit in (0.01, 0.1, 0.3):
        got = np.sqrt(np.diagonal(select_bandwidth(np.round(x / unit) * unit).matrix))
        np.testing.assert_allclose(got, want, 0.15)
    assert (np.sqrt(np.diagonal(select_bandwidth(np.round(x / 2) * 2).matrix)) >= 1.0 - 1e-12).all()


def mise_of_normal(method, d, n, h):
    """The MISE on the standard normal, times (4π)^(d/2): exact for kde and laplace.

    For sdkde the exact bias and the leading variance.
    """
    t = np.linspace(0, 40 if d == 1 else 16, 1501)  # radius in the Fourier domain; weights make ∫ e^(−t²) over R^d one
    log = (d - 1) * np.log(np.maximum(t, 1e-300)) + math.log(2) - math.lgamma(d / 2)
    weight = np.exp(log) * (t[1] - t[0])
    q = (h * t) ** 2
    kernel = np.exp(-q / 2) * {"kde": 1, "laplace": 1 + q / 2, "sdkde": 1 + q / 2 * np.exp(-q / 2)}[method]
    phi = np.exp(-(t**2) / 2)
    mean = kernel * phi
    if method == "sdkde":
        mean = np.exp(-(t**2) / 2 * ((1 - 0.5 * h**2 / (1 + h**2)) ** 2 + h**2))
    variance = weight @ kernel**2 if method == "sdkde" else weight @ (kernel**2 * (1 - phi**2))
    return weight @ (mean - phi) ** 2 + variance / n


@pytest.mark.parametrize(("d", "n"), [(1, 200), (1, 20_000), (3, 2000), (16, 2000)])
@pytest.mark.parametrize("method", METHODS)
def test_widest_is_the_best_for_normal_samples(method, d, n):
    over = np.exp(np.linspace(-0.3, 0.8, 111))
    reference = normal_reference(method, d, n)
    best = over[np.argmin([mise_of_normal(method, d, n, reference * k) for k in over])]
    assert widest(method, d, n) == pytest.approx(best, rel=0.015)


def pick(x, method="sdkde", **options):
    with np.errstate(all="raise"):
        return select_bandwidth(x, method=method, **options).factor


@pytest.fixture(scope="module")
def x():
    """Two modes in one column, skew in another."""
    rng = np.random.default_rng(0)
    return np.c_[rng.normal(size=300) + 5 * (rng.random(300) < 0.4), rng.gamma(2.0, size=300)]


@pytest.mark.parametrize("rule", CHOOSERS)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_choice_does_not_depend_on(x, method, rule):
    if (method, rule) == ("laplace", "lcv"):
        with pytest.raises(ValueError, match="'lscv' or 'auto'"):
            pick(x, method, rule=rule)
        return
    x, rng = x[:160], np.random.default_rng(1)
    h = pick(x, method, rule=rule)
    assert h.shape == (2,) and np.isfinite(h).all()
    np.testing.assert_array_equal(pick(x, method, rule=rule), h)
    np.testing.assert_allclose(pick(x + np.array([1e3, -7.0]), method, rule=rule), h, 1e-5)
    np.testing.assert_allclose(pick(x * [1e-8, 1e5], method, rule=rule), h * [1e-8, 1e5], 1e-5)
    np.testing.assert_allclose(pick(x[rng.permutation(160)], method, rule=rule), h, 1e-6)
    np.testing.assert_allclose(pick(x * (1 + 1e-9 * rng.normal(size=x.shape)), method, rule=rule), h, 1e-3)
    np.testing.assert_allclose(pick(torch.tensor(x), method, rule=rule), h, 1e-6)
    np.testing.assert_allclose(pick(array_api_strict.asarray(x), method, rule=rule), h, 1e-3)  # not on NumPy's path
    np.testing.assert_allclose(pick(x.astype(np.float32), method, rule=rule), h, 1e-3)
    np.testing.assert_allclose(pick(x, method, rule=rule, weights=np.full(160, 7.0)), h, 1e-3)
    np.testing.assert_allclose(pick(np.r_[x, x[:1] + 50], method, rule=rule, weights=np.r_[np.ones(160), 0]), h, 1e-3)


def test_integer_weights_are_repeated_samples(x):
    """But for the number of samples, which rules take to be (Σw)²/Σw²."""
    times = np.random.default_rng(2).integers(1, 4, 300)
    once, often = (
        select_bandwidth(x, **options).selection
        for x, options in ((x, {"weights": times}), (np.repeat(x, times, axis=0), {}))
    )
    n_eff = times.sum() ** 2 / (times**2).sum()
    ratio = once.multiple / widest("sdkde", 2, n_eff) / (often.multiple / widest("sdkde", 2, times.sum()))
    assert ratio == pytest.approx(1, rel=0.02)  # quartiles differ by n too


def test_threads_do_not_matter(monkeypatch):
    x = np.random.default_rng(0).normal(size=(700, 2))
    picks = []
    for threads in "12":
        monkeypatch.setenv("SDKDE_NUM_THREADS", threads)
        picks.append(pick(x, rule="lscv"))
    np.testing.assert_array_equal(*picks)


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_subsample_knows_no_order(weighted):
    """A prefix or a stride of sorted samples would."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.normal(size=20_000) + 6 * (rng.random(20_000) < 0.5))
    weights = {"weights": 1 + 3 * rng.random(20_000)} if weighted else {}
    whole = pick(x, "kde", **weights)
    order = rng.permutation(20_000)
    mixed = pick(x[order], "kde", **{k: v[order] for k, v in weights.items()})
    assert whole == pytest.approx(mixed, rel=0.15)


@pytest.mark.parametrize("d", [2, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_a_search_finds_what_a_look_at_every_bandwidth_does(monkeypatch, method, d):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = rng.standard_t(3, size=(200, d)) + 4 * (rng.random((200, 1)) < 0.4)
        for rule in ("auto", "lscv"):
            found = select_bandwidth(x, method=method, rule=rule).selection
            with monkeypatch.context() as patch:
                patch.setattr("sdkde_core.bandwidth.selection._Criteria.closely", lambda self, rule, steps: steps)
                want = select_bandwidth(x, method=method, rule=rule).selection
            assert found.multiple == pytest.approx(want.multiple, rel=5e-3)
            assert len(found.multiples) <= len(want.multiples)
        assert len(found.multiples) < len(want.multiples) == 37


ODD = {
    "rounded": lambda z: np.round(2 * z[:, 0]) / 2,
    "counts": lambda z: np.floor(np.exp(z[:, 0] + 1)),
    "zero-inflated": lambda z: np.where(z[:, 0] < 0.3, 0.0, z[:, 0]),
    "a binary column": lambda z: np.c_[z[:, 0] > 0, z[:, 1]],
    "a rounded column": lambda z: np.c_[np.round(z[:, 0]), z[:, 1]],
    "a column of zeros": lambda z: np.c_[np.where(z[:, 0] < 1.3, 0.0, z[:, 0]), z[:, 1]],
    "all binary": lambda z: (z > 0) * 1.0,
}


@pytest.mark.parametrize("rule", ["auto", "lscv"])
@pytest.mark.parametrize("name", ODD)
def test_ties_do_not_send_the_bandwidth_to_zero(name, rule):
    """The narrowest that is looked at is a hundredth of the normal reference."""
    z = np.random.default_rng(0).normal(size=(300, 3))
    for method in METHODS:
        assert select_bandwidth(ODD[name](z), method=method, rule=rule).selection.multiple > 0.15


@pytest.mark.parametrize("method", METHODS)
def test_few_far_and_light_samples(method):
    rng = np.random.default_rng(0)
    for n in range(2, 11):
        chosen = select_bandwidth(rng.normal(size=(n, 2)), method=method)
        wider = 1.08 if method == "sdkde" else 1.0
        assert 0 < chosen.selection.multiple <= wider * widest(method, 2, float(n)) and chosen.selection.reason
        assert np.isfinite(chosen.factor).all()
    x = rng.normal(size=200)
    h = pick(x, method)
    np.testing.assert_allclose(pick(np.r_[x, 1e9], method), h, 0.1)
    np.testing.assert_allclose(pick(np.r_[x, 1e9], method, rule="lscv"), pick(x, method, rule="lscv"), 0.25)
    light = pick(np.r_[x, x + 3], method, weights=np.r_[np.ones(200), np.full(200, 1e-200)])
    np.testing.assert_allclose(light, h, 0.05)
    pairs = rng.normal(size=(300, 2))
    for least in (1e-7, 1e-12):  # float32 has no digits left for a light sample, once its heavy neighbour is taken off
        lost = pick(pairs, method, weights=np.where(np.arange(300) % 3, 1.0, least))
        np.testing.assert_allclose(lost, pick(pairs[np.arange(300) % 3 > 0], method), 1e-3)
    for rule in ("auto", "lscv"):
        assert np.isfinite(pick(np.r_[x, 1e6 + x], method, rule=rule)).all()
        assert np.isfinite(pick(np.r_[1e-9 * x, 1e300, -1e300], method, rule=rule)).all()
        assert np.isfinite(pick(np.r_[x, x * (1 + 1e-15)], method, rule=rule)).all()
    heavy = np.r_[1e6, np.ones(199)]
    assert np.isfinite(pick(x, method, weights=heavy)).all()


def test_the_likelihood_has_two_maxima():
    """A tenth of the samples lie thirty times as far out: the nearer maximum says 90 nats less of unseen ones."""
    x, y = np.random.default_rng(2).normal(size=(2, 300, 64))
    x[:30] *= 30.0
    y[:30] *= 30.0
    chosen = select_bandwidth(x)
    logs = [np.mean(sdkde_core.estimate(x, y, bandwidth=scale * chosen, log=True)) for scale in (1.0, 0.5)]
    assert logs[0] > logs[1] + 50.0


@pytest.mark.parametrize(
    ("method", "d"),
    [
        *(("kde", 784), ("sdkde", 128), ("laplace", 784)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("kde", 128), ("sdkde", 784), ("laplace", 128))),
    ],
)
def test_many_dimensions(method, d):
    """Densities there differ by more powers of ten than float64 has."""
    x = np.random.default_rng(0).normal(size=(80, d))
    for rule in ("auto", "lscv"):
        chosen = select_bandwidth(x, method=method, rule=rule).selection
        assert 0.8 < chosen.multiple < 3
        assert np.isfinite(chosen.least_squares).all()


@pytest.mark.slow
def test_bases(x):
    def chosen(base, **options):
        return select_bandwidth(x, base=base, **options)

    scott = chosen("scott")
    shape = resolve("scott", x).matrix
    np.testing.assert_allclose(scott.matrix / scott.matrix[0, 0], shape / shape[0, 0], 1e-9)
    np.testing.assert_allclose(chosen(7 * shape).matrix, scott.matrix, 1e-6)
    np.testing.assert_allclose(chosen(scott).matrix, scott.matrix, 1e-6)
    number = chosen(3.0).factor
    assert number[0] == number[1]
    columns = chosen([1.0, 4.0]).factor
    assert columns[1] == pytest.approx(4 * columns[0])
    assert scott.rule.startswith("auto × scott") and scott.selection.multiple > 0
    np.testing.assert_allclose(  # a common shape is equivariant to any map
        chosen("scott", rule="lscv").matrix * [[4, 2], [2, 1]],
        select_bandwidth(x * [2.0, 1.0], base="scott", rule="lscv").matrix,
        1e-4,
    )
    with pytest.raises(ValueError, match="leave base out"):
        chosen(1.0, rule="silverman")


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_selected(x, rule):
    chosen = select_bandwidth(x, method="kde", rule=rule)
    np.testing.assert_array_equal(chosen.matrix, resolve(rule, x, method="kde").matrix)
    assert (chosen.selection is not None) == (rule in CHOOSERS)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_selection_tells(x, method):
    chosen = select_bandwidth(x, method=method).selection
    told = json.loads(json.dumps(chosen.to_dict(), allow_nan=False))
    assert told["multiple"] == chosen.multiple and told["used"] == 300
    assert (told["likelihood"] is None) == (method == "laplace")
    assert len(told["multiples"]) == len(told["least_squares"]) and min(told["least_squares"]) == 0


def ise(x, density, **options):
    grid = np.linspace(-6, 6, 601)
    return ((sdkde_core.estimate(x, grid, backend="numpy", **options) - density(grid)) ** 2).sum()


def normal(y, at=0.0, sd=1.0):
    return np.exp(-0.5 * ((y - at) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("method", ["sdkde", *(pytest.param(m, marks=pytest.mark.slow) for m in ("kde", "laplace"))])
def test_auto_is_better_than_silverman(method):
    """Geometric means over three draws: far better on separate modes, and near the best rule on one."""
    separated = normal_ones = 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        z, side = rng.normal(size=500), rng.choice((-1.5, 1.5), 500)
        here = ise(side + 0.5 * z, lambda y: (normal(y, -1.5, 0.5) + normal(y, 1.5, 0.5)) / 2, method=method)
        kde = {"method": "kde", "bandwidth": "silverman"}
        there = ise(side + 0.5 * z, lambda y: (normal(y, -1.5, 0.5) + normal(y, 1.5, 0.5)) / 2, **kde)
        separated += math.log(here / there) / 3
        reference = ise(z, normal, method=method, bandwidth="normal-reference")
        normal_ones += math.log(ise(z, normal, method=method) / reference) / 3
    assert separated < math.log(0.6)
    assert normal_ones < math.log(1.4)


@pytest.mark.parametrize("n", [3, pytest.param(8, marks=pytest.mark.slow), 30])
def test_few_samples_do_not_mislead(n):
    logs = []
    for seed in range(40):
        x = np.random.default_rng([seed, n]).normal(size=n)
        logs.append(math.log(ise(x, normal) / ise(x, normal, method="kde", bandwidth="silverman")))
    assert np.mean(logs) < 0 and max(logs) < math.log(2.5)


@pytest.mark.parametrize("n", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_strong_correlation_is_never_missed(n):
    for seed in range(6):
        z = np.random.default_rng([seed, n]).normal(size=(n, 2))
        h = select_bandwidth(np.c_[z[:, 0], 0.9 * z[:, 0] + math.sqrt(0.19) * z[:, 1]]).matrix
        assert h[0, 1] > 0.8 * math.sqrt(h[0, 0] * h[1, 1])
        assert select_bandwidth(z).selection.shape is None
