"""Points so far from the centre that float64 does not hold what sets them apart."""

import re

import numpy as np
import pytest
import reference
import torch

import sdkde_core
from sdkde_core import SdkdeWarning
from sdkde_core.estimator.resolution import REACH
from sdkde_core.protocol import TOLERANCES, Reduction

FULL = [[0.25, 0.1, 0.0], [0.1, 0.25, 0.0], [0.0, 0.0, 0.25]]


def _clusters(distance, d=3, n=60, seed=0):
    """Most points at the origin, where the centre is, the others at ``distance`` bandwidths of 0.6."""
    rng = np.random.default_rng([seed, d])
    x, towards = rng.normal(size=(n, d)), rng.normal(size=d)
    x[2 * n // 3 :] += 0.6 * distance * towards / np.linalg.norm(towards)
    return x


@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize("d", [1, 2, 8])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_what_is_accepted_is_right_and_what_is_refused_is_nearly_wrong(precision, d, method, untold):
    reach, tolerance = REACH[precision], TOLERANCES[precision][Reduction.LOG_SUM]

    def error(distance, away):
        x, options = _clusters(distance, d), {"method": method, "bandwidth": 0.6, "log": True}
        y = x + away / np.sqrt(d)
        got, want = sdkde_core.estimate(x, y, precision=precision, **options), reference.estimate(x, y, **options)
        return (abs(got - want) / tolerance.at(want)).max()

    for away in (0.1, 3.0, 27.0, 300.0):  # at 45 bandwidths rounding matters most beside the tolerance
        assert error(0.9 * reach, away) < 1.0
    said = re.escape(f"precision='{precision}' holds up to {reach:.2g}")
    with pytest.warns(SdkdeWarning, match=said) if precision == "float64" else pytest.raises(ValueError, match=said):
        assert error(10.0 * reach, 0.1) < 10.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REACH, precision, np.inf)
        assert error(300.0 * reach, 12.0) > 1.0


@pytest.mark.parametrize("precision", TOLERANCES)
def test_fill_values_are_no_precision_lost(precision):
    """Equal numbers, however far; and points that are far from one another."""
    x = np.random.default_rng(0).normal(size=(200, 3))
    x[3:9, 0], x[20:30, 1], x[40:42], x[50, 2], x[60] = 1e20, -1e20, 1e20, 9.96921e36, [1e100, 0.0, 1.0]
    y = np.concatenate([x[:70], 1e100 * x[100:110]])
    options = {"bandwidth": 0.5, "log": True}
    for method in ("kde", "sdkde"):
        for query in (None, y):
            got = sdkde_core.estimate(x, query, method=method, precision=precision, **options)
            want = reference.estimate(x, query, method=method, **options)
            assert (abs(got - want) <= 2 * TOLERANCES[precision][Reduction.LOG_SUM].at(want)).all()


def test_nothing_is_refused_where_each_point_is_alone():
    """At 1e12 bandwidths, of which even the nearest two are 1e8 apart: every sample sees itself only."""
    x = np.random.default_rng(0).normal(size=(300, 2))
    for precision in TOLERANCES:
        for query in (None, x):
            got = sdkde_core.estimate(x, query, bandwidth=1e-12, precision=precision, log=True)
            assert np.ptp(got) < 1e-9


def test_what_a_matrix_mixes_is_refused(untold):
    x = np.random.default_rng(0).normal(size=(200, 3))
    x[3] = [1e20, 0.1, 0.2]
    assert np.isfinite(sdkde_core.estimate(x, bandwidth=FULL, log=True)).all()
    x[4] = [1e20, 0.3, 0.7]
    with pytest.raises(ValueError, match=r"row 3 of train is .* from row 4 of train: rounding .* pass a larger"):
        sdkde_core.estimate(x, bandwidth=FULL)
    assert np.isfinite(sdkde_core.estimate(x, bandwidth=0.5, log=True)).all()
    x[3], x[4] = 1e4, 1e4 + 0.01  # beyond the reach of 15,000 bandwidths by three coordinates within it
    with pytest.warns(SdkdeWarning, match=r"row 3 of train is 1.7e\+04 away, and 0.017 from row 4 of train"):
        sdkde_core.estimate(x, bandwidth=np.eye(3), precision="float64")


def test_far_by_many_coordinates_is_no_precision_lost_and_far_by_one_of_them_is(untold):
    """In 784 dimensions coordinates within the reach of 15,000 bandwidths add up to points beyond it."""
    x = 1500.0 * np.random.default_rng(0).normal(size=(60, 784))
    y, how = x[:20] + 0.01, {"method": "kde", "bandwidth": 1.0, "log": True}
    want, got = reference.estimate(x, y, **how), sdkde_core.estimate(x, y, precision="float64", **how)
    assert (abs(got - want) <= TOLERANCES["float64"][Reduction.LOG_SUM].at(want)).all()
    x[7, 500], y[7, 500] = 2e4, 2e4 + 0.01
    with pytest.warns(SdkdeWarning, match=r"row 7 of query is .* from row 7 of train: rounding"):
        sdkde_core.estimate(x, y, precision="float64", **how)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_rows_are_named_and_ways_out(kind):
    x = _clusters(5e9)
    y = np.concatenate([x[:3], x[-1:] + 0.1])
    x, y = kind(x), kind(y)
    options = {"bandwidth": 0.6, "precision": "high"}
    said = r"row 3 of query is 5.0e\+09 away, and \S+ from row \d+ of train: .* by 1e-06; pass precision='fast', which"
    with pytest.raises(ValueError, match=said):
        sdkde_core.estimate(x, y, method="kde", **options)
    with pytest.raises(ValueError, match="row 40 of train"):
        sdkde_core.debias(x, **options)
    ready = sdkde_core.prepare(x, method="kde", **options)
    assert ready.estimate(y[:3]).shape == (3,)
    with pytest.raises(ValueError, match=said):
        ready.estimate(y)
    with pytest.raises(ValueError, match=said):
        ready.grad_log_density(y)
    near = sdkde_core.prepare(x[:40], method="kde", **options)
    assert near.estimate(y, log=True)[3] < -1e13, "rows may be anywhere where no sample is"
    assert sdkde_core.estimate(x, y, bandwidth=0.5, precision="fast").shape == (4,)


@pytest.mark.parametrize("fill", [9.97e36, -1e20])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.98])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_samples_keep_their_digits_where_most_are_missing(fill, share, kind):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(300, 2)), rng.normal(size=(20, 2))
    x[rng.permutation(300)[: int(300 * share)], 1] = fill
    for method in ("kde", "sdkde", "laplace"):
        how = {"method": method, "bandwidth": 0.4}
        want = reference.estimate(x, y, **how)
        np.testing.assert_allclose(np.asarray(sdkde_core.estimate(kind(x), kind(y), **how)), want, rtol=1e-4, atol=1e-9)
        ready = sdkde_core.prepare(kind(x), **how)
        np.testing.assert_allclose(np.asarray(ready.estimate(kind(y))), want, rtol=1e-4, atol=1e-9)


def test_times_keep_their_digits_where_some_are_zero():
    rng = np.random.default_rng(4)
    x = np.concatenate([1.7e18 + 1e9 * rng.normal(size=200), np.zeros(30)])
    how = {"method": "kde", "bandwidth": 3e8}
    np.testing.assert_allclose(sdkde_core.estimate(x, **how), reference.estimate(x, **how), rtol=1e-4)
