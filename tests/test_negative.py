"""What becomes of the Laplace estimate's negative values, and how much of it is below zero."""

import json
import pickle

import numpy as np
import pytest
import reference
import torch

import sdkde_core

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 2)), 2.0 * RNG.normal(size=(300, 2))
LAPLACE = {"method": "laplace", "bandwidth": 0.4, "precision": "float64"}


def both(x, y, **options):
    """The estimate by both ways, which agree."""
    direct = sdkde_core.estimate(x, y, **LAPLACE | options)
    prepared = sdkde_core.prepare(x, **LAPLACE | {k: v for k, v in options.items() if k != "log"})
    again = pickle.loads(pickle.dumps(prepared)).estimate(y, log=options.get("log", False))
    np.testing.assert_allclose(again, direct, rtol=1e-9)
    return direct


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipped(dtype, recwarn):
    x, y = X.astype(dtype), Y.astype(dtype)
    signed = reference.estimate(x, y, bandwidth=0.4, method="laplace")
    assert 0 < (signed < 0).mean() < 1
    got = both(x, y, negative="clip")
    assert got.dtype == dtype
    np.testing.assert_allclose(got, np.maximum(signed, 0), rtol=1e-6 if dtype == "float32" else 1e-9)
    log = both(x, y, negative="clip", log=True)
    assert (log[signed < 0] == -np.inf).all()
    np.testing.assert_allclose(np.exp(log), got, rtol=1e-5 if dtype == "float32" else 1e-9)
    assert not recwarn.list


@pytest.mark.parametrize("weighted", [False, True])
def test_renormalised_integrates_to_one(weighted):
    """In one dimension by quadrature: an outlier has its own nodes, and a sample without weight none."""
    x, w = np.r_[RNG.normal(size=40), 1e3, -3e3], RNG.random(42) * np.r_[np.zeros(2), np.ones(40)]
    options = {"weights": w} if weighted else {}
    prepared = sdkde_core.prepare(x, **LAPLACE, **options)
    y = np.concatenate([np.linspace(c - 6, c + 6, 601) for c in (0.0, 1e3, -3e3)])
    signed = reference.estimate(x, y, bandwidth=0.4, method="laplace", **options)
    below = prepared.negative_mass()
    assert below.mass == pytest.approx(-np.minimum(signed, 0).sum() * 0.02, rel=2e-3)
    assert below.standard_error == 0
    got = both(x, y, negative="renormalise", **options)
    assert got.sum() * 0.02 == pytest.approx(1.0, abs=1e-4)
    np.testing.assert_allclose(got, np.maximum(signed, 0) / (1 + below.mass), rtol=1e-9)
    np.testing.assert_allclose(np.exp(both(x, y, negative="renormalise", log=True, **options)), got, rtol=1e-9)


def test_the_negative_mass_in_two_dimensions():
    grid = np.linspace(-6, 6, 241)
    y = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    want = -np.minimum(sdkde_core.estimate(X, y, **LAPLACE), 0).sum() * 0.05**2
    got = sdkde_core.prepare(X, **LAPLACE).negative_mass()
    assert 0 < got.standard_error < 0.2 * want
    assert abs(got.mass - want) < 3 * got.standard_error
    assert f"{got.mass:.3g} ± " in str(got)


def test_it_is_the_same_every_time_and_in_all_units():
    want = sdkde_core.prepare(X, **LAPLACE).negative_mass()
    assert sdkde_core.prepare(X, **LAPLACE).negative_mass() == want
    units = np.array([1e6, 1e-6])
    got = sdkde_core.prepare(X * units, **LAPLACE | {"bandwidth": 0.4 * units}).negative_mass()
    assert got.mass == pytest.approx(want.mass, rel=1e-6)


def test_scattered_samples_are_drawn_from():
    """Each alone: the mass is that of one kernel."""
    want = sdkde_core.prepare([0.0], **LAPLACE).negative_mass()
    got = sdkde_core.prepare(np.arange(2000) * 100.0, **LAPLACE).negative_mass()
    assert want.standard_error == 0.0
    assert abs(got.mass - want.mass) < 3 * got.standard_error < want.mass


def test_explain_measures_it():
    got = sdkde_core.explain(X, Y, measure=True, **LAPLACE)
    assert got.negative_mass == sdkde_core.prepare(X, **LAPLACE).negative_mass()
    assert f"its integral there is −{got.negative_mass}" in str(got)
    assert json.loads(json.dumps(got.to_dict()))["negative_mass"]["mass"] == got.negative_mass.mass
    assert sdkde_core.explain(X, Y, **LAPLACE).negative_mass is None
    assert sdkde_core.explain(X, Y, measure=True, method="kde").negative_mass is None


@pytest.mark.parametrize("log", [False, True])
def test_derivatives_are_zero_where_it_is_clipped(log):
    x, y = torch.tensor(X), torch.tensor(Y, requires_grad=True)
    signed = sdkde_core.estimate(x, y, **LAPLACE)
    (want,) = torch.autograd.grad((signed.clamp(min=1e-300).log() if log else signed.clamp(min=0)).sum(), y)
    got = sdkde_core.estimate(x, y, negative="clip", log=log, **LAPLACE)
    above = signed > 0
    (got,) = torch.autograd.grad(got[above].sum() if log else got.sum(), y)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert not got[~above].any()


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"negative is 'renormalize'; pass one of 'keep', .*'renormalise'\?"):
        sdkde_core.estimate(X, method="laplace", negative="renormalize")
    with pytest.raises(TypeError, match="negative is None; pass a string"):
        sdkde_core.estimate(X, method="laplace", negative=None)
    for call in (sdkde_core.estimate, sdkde_core.prepare, sdkde_core.debias, sdkde_core.explain):
        with pytest.raises(ValueError, match=r"negative='clip' is for method='laplace', but method='sdkde'"):
            call(X, negative="clip")
    with pytest.raises(ValueError, match="method='kde' is never negative"):
        sdkde_core.prepare(X, method="kde").negative_mass()
    x = torch.tensor(X, requires_grad=True)
    with pytest.raises(ValueError, match=r"negative='renormalise' has no derivatives.*pass negative='clip'"):
        sdkde_core.estimate(x, negative="renormalise", **LAPLACE)
    with torch.no_grad():
        assert (sdkde_core.estimate(x, negative="renormalise", **LAPLACE) >= 0).all()
