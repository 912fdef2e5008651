"""Data on a device: what the core reads back, what it measures, and what it refuses.

The device is array_api_strict's second one, which mixes with nothing else, as a GPU would; the backend there is the
exact path.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
import reference

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.engine.exact import Exact
from sdkde_core.protocol import BackendInfo, Support

DEVICE = array_api_strict.Device("device1")
RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(60, 3)) + 5, RNG.normal(size=(20, 3)) + 5, RNG.random(60)


class Checked(Exact):
    """Direct differences, wherever the arrays are; checks that extents are bounds."""

    def probe(self, device):
        return Support(True, "anywhere")

    def prepare(self, problem, columns):
        assert _radii(columns.points).max() <= problem.extent
        return columns

    def reduce(self, problem, queries, state, own_offset=0):
        assert np.nanmax(_radii(state.points if queries is None else queries), initial=0.0) <= problem.extent
        return super().reduce(problem, queries, state)


def _host(x):
    there = type(x).__module__.startswith("array_api_strict")
    return np.asarray(array_api_strict.asarray(x, device=array_api_strict.Device("CPU_DEVICE"))) if there else x


def _radii(points):
    return np.sqrt((_host(points) ** 2).sum(axis=1))


def _there(x):
    return None if x is None else array_api_strict.asarray(x, device=DEVICE)


@pytest.fixture(autouse=True)
def _backend(monkeypatch):
    """The backend of the device, and the same for NumPy arrays."""
    monkeypatch.setitem(sys.modules, "exact_anywhere", SimpleNamespace(Checked=Checked))
    monkeypatch.setitem(sys.modules, "array_api_compat.strict", array_api_strict)
    monkeypatch.setattr("sdkde_core.protocol.ARRAYS", ("numpy", "strict"))
    monkeypatch.setattr(registry, "made", {})
    records = []
    for name, device, library in (("there", str(DEVICE).lower(), "strict"), ("here", "cpu", "numpy")):
        features = frozenset({"weights"})
        info = BackendInfo(name, (1, 0), "exact_anywhere:Checked", (device,), ("float64",), features)
        info = BackendInfo(**{**vars(info), "arrays": library})
        records.append(registry.Record(name, "ok", "installed", "tests", "1.0", "exact_anywhere:INFO", info))
    monkeypatch.setattr(registry, "records", lambda: tuple(records))


@pytest.mark.parametrize("weights", [None, W, np.where(W < 0.3, 0, W)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_the_result_is_on_the_device_beside_outliers_too(monkeypatch, method, same, dtype, weights):
    records = [replace(r, info=replace(r.info, extent_limit=lambda problem: 30.0)) for r in registry.records()]
    monkeypatch.setattr(registry, "records", lambda: tuple(records))
    x, y = X.astype(dtype), None if same else Y.astype(dtype)
    for far in (0.0, 1e3):
        x[[4, 7]] += far
        how = {"method": method, "bandwidth": 0.5, "precision": "float64"}
        got = sdkde_core.estimate(_there(x), _there(y), weights=_there(weights), **how)
        assert got.device == DEVICE
        where = x.astype(float), None if same else y.astype(float)
        want = reference.estimate(*where, method=method, bandwidth=0.5, weights=weights)
        np.testing.assert_allclose(_host(got), want, rtol=1e-9 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize("bandwidth", [0.5, [0.4, 0.5, 0.6], "silverman", "scott"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found_late_but_named(bandwidth, bad):
    spoilt, both = X.copy(), Y.copy()
    spoilt[3, 1] = both[2, 0] = bad
    for train, query, message in (
        (spoilt, Y, "train has values that are not finite.* row 3, column 1"),
        (spoilt, both, "train has values"),
        (X, both, "query has values that are not finite.* row 2, column 0"),
        (spoilt, None, "train has values"),
        (spoilt, Y[:0], "train has values"),
        (np.full_like(X, bad), Y, "train has values.* row 0, column 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sdkde_core.estimate(_there(train), _there(query), bandwidth=bandwidth, precision="float64")


def test_what_is_not_finite_is_said_before_what_else_is_wrong():
    x = X.copy()
    x[7] = np.nan
    for options in ({"bandwidth": -1.0}, {"bandwidth": "nonsense"}, {"bandwidth": 0.5, "backend": "nonsense"}):
        with pytest.raises(ValueError, match="row 7"):
            sdkde_core.estimate(_there(x), **options)


def test_a_bandwidth_that_is_too_small_is_still_that():
    with pytest.raises(ValueError, match="too small for the data"):
        sdkde_core.estimate(_there(X), bandwidth=1e-200, precision="float64")


def test_the_check_can_be_skipped():
    """The extent is that of the other rows."""
    y = Y.copy()
    y[2] = np.nan
    options = {"bandwidth": 0.5, "precision": "float64", "check_finite": False}
    got = _host(sdkde_core.estimate(_there(X), _there(y), **options))
    np.testing.assert_allclose(np.delete(got, 2), np.delete(reference.estimate(X, Y, bandwidth=0.5), 2), rtol=1e-9)
    np.testing.assert_array_equal(got, sdkde_core.estimate(X, y, **options))  # as on the host
