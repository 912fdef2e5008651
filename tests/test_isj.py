"""Improved Sheather–Jones: picks of another implementation, equivariance, and odd data."""

import numpy as np
import pytest
import torch

import sdkde_core
from sdkde_core.bandwidth.isj import improved_sheather_jones
from sdkde_core.bandwidth.rules import resolve
from sdkde_core.messages import SdkdeWarning

DENSITIES = {  # of Marron and Wand (1992): weights, means, deviations
    "normal": ([1], [0], [1]),
    "strongly skewed": ([1] * 8, [3 * ((2 / 3) ** k - 1) for k in range(8)], [(2 / 3) ** k for k in range(8)]),
    "separated": ([1, 1], [-1.5, 1.5], [0.5, 0.5]),
    "claw": ([5, 1, 1, 1, 1, 1], [0, -1, -0.5, 0, 0.5, 1], [1, 0.1, 0.1, 0.1, 0.1, 0.1]),
}

SIZES = (200, 2000, 16000)

#: By KDEpy 1.1.12's equation and root finder, on 2**14 points over twice the samples' range, in units of that length;
#: its own ``bw="ISJ"`` has 2**10 points, and takes the samples' range for the length.
KDEPY = {
    "normal": [0.41781, 0.254452, 0.143206],
    "strongly skewed": [0.084313, 0.039615, 0.022169],
    "separated": [0.246277, 0.147877, 0.089773],
    "claw": [0.090141, 0.046215, 0.029339],
}


def draw(name, n):
    weights, means, deviations = map(np.array, DENSITIES[name])
    rng = np.random.default_rng([n, 1])
    which = rng.choice(len(weights), n, p=weights / weights.sum())
    return rng.normal(means[which], deviations[which])


def pick(x, weights=None):
    return float(sdkde_core.prepare(x, method="kde", bandwidth="isj", weights=weights).bandwidth.factor[0])


@pytest.fixture
def x():
    return np.random.default_rng(5).normal(size=2000)


@pytest.mark.parametrize("name", DENSITIES)
def test_picks_of_another_implementation(name):
    got = [improved_sheather_jones(draw(name, n), None, n) for n in SIZES]
    np.testing.assert_allclose(got, KDEPY[name], rtol=2e-3)


@pytest.mark.parametrize(("factor", "shift"), [(1e-12, 0.0), (1e9, 0.0), (1.0, 1e9), (-3.0, 7.0)])
def test_shifts_and_units(x, factor, shift):
    assert pick(factor * x + shift) == pytest.approx(abs(factor) * pick(x), rel=1e-5)


def test_float32_and_other_libraries(x):
    want = pick(x)
    assert pick(np.float32(x)) == pytest.approx(want, rel=1e-3)
    assert pick(torch.tensor(x)) == pytest.approx(want, rel=1e-12)


def test_weights(x):
    assert pick(x, np.full(2000, 3.0)) == pytest.approx(pick(x), rel=1e-9)
    w = (np.arange(2000) < 500).astype(float)
    assert pick(x, w) == pytest.approx(pick(x[:500]), rel=1e-9)
    w = np.random.default_rng(1).random(2000)  # three quarters as many samples
    assert 1.0 < pick(x, w) / pick(x) < 1.15


@pytest.mark.parametrize("unit", [0.01, 0.05, 0.1, 0.2])
def test_rounding_does_not_matter_below_the_bandwidth(x, unit):
    assert pick(np.round(x / unit) * unit) == pytest.approx(pick(x), rel=0.1)


def test_below_half_the_unit_of_rounding_an_estimate_would_show_it(x):
    assert pick(np.round(x)) == pytest.approx(0.5)
    assert pick(np.random.default_rng(0).poisson(2.0, 5000)) == pytest.approx(0.5)


@pytest.mark.parametrize("far", [1e2, 1e5, 1e100])
def test_outliers_cost_no_resolution(x, far):
    want = pick(x)
    x[:5] = far, -far, 3 * far, 2e3 * far, far
    assert pick(x) == pytest.approx(want, rel=0.02)


def test_clusters_far_apart_keep_their_own_scale(x):
    within = pick(x[:1000])
    x[1000:] += 1e6
    assert pick(x) == pytest.approx(within, rel=0.25)


def test_heavy_tails_are_within_reach():
    h = pick(np.random.default_rng(5).standard_cauchy(2000))
    assert 0.15 < h < 0.45


@pytest.mark.parametrize("case", ["two", "five", "zeros"])
def test_where_there_is_no_solution_silvermans_is_taken_and_that_is_said(x, case):
    x = {"two": x[:2], "five": x[:5], "zeros": np.where(np.arange(2000) % 5 == 0, 0.0, x)}[case]
    x = np.stack([np.random.default_rng(0).normal(size=len(x)) if case == "zeros" else x, x], axis=1)
    which = "column 1" if case == "zeros" else r"column 0 .*1 more"
    sdkde_core.messages._told.clear()
    with pytest.warns(SdkdeWarning, match=f"no solution for {which}"):
        h = resolve("isj", x, method="kde")
    assert h.factor[1] == pytest.approx(resolve("silverman", x).factor[1])
    assert "(silverman in column" in str(sdkde_core.explain(x, method="kde", bandwidth="isj").bandwidth)


def test_in_several_dimensions_the_rate_is_theirs(x):
    columns = x.reshape(400, 5) * [1.0, 1e3, 1e-3, 2.0, 5.0]
    want = [pick(column) * 400 ** (1 / 5 - 1 / 9) for column in columns.T]
    np.testing.assert_allclose(resolve("isj", columns, method="kde").factor, want, rtol=1e-9)


@pytest.mark.parametrize("method", ["sdkde", "laplace"])
def test_it_is_for_kde(x, method):
    with pytest.raises(ValueError, match=r"method=.kde., but method is .*pass .normal-reference"):
        sdkde_core.estimate(x, method=method, bandwidth="isj")
    with pytest.raises(ValueError, match="method='kde', but method is"):
        sdkde_core.explain((100, 3), method=method, bandwidth="isj")


@pytest.mark.parametrize("seed", range(9))
def test_odd_data_end_in_time_with_a_number_or_none(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.choice([2, 3, 7, 20, 100]))
    x = [
        np.sign(rng.normal(size=n)) * 10.0 ** rng.uniform(-150, 150, n),
        np.exp(rng.uniform(0, 20) * rng.normal(size=n)),
        np.where(rng.random(n) < 0.5, 0.0, rng.normal(size=n)) + 1e-12 * np.arange(n),
    ][seed % 3]
    h = improved_sheather_jones(x, None, n)
    assert h is None or 0 < h < np.inf
