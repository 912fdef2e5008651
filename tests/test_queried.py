"""Derivatives of fitted densities by their queries: autograd, forward mode and torch.func."""

import pickle

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.utils.checkpoint
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import sdkde_core

# Which forward mode needs itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

RNG = np.random.default_rng(7)
X, Y, W = RNG.normal(size=(60, 3)), torch.tensor(RNG.normal(size=(5, 3))), RNG.uniform(0.1, 2.0, 60)
ROOT = 0.3 * RNG.normal(size=(3, 3)) + np.eye(3)
PLAIN = {
    "kde": {"method": "kde"},
    "sdkde and a guard": {},
    "weights": {"weights": W, "bandwidth": [0.5, 0.6, 0.9]},
    "matrix": {"bandwidth": 0.5 * ROOT @ ROOT.T, "backend": "torch"},
    "adaptive": {"bandwidth": 0.6, "adaptive": 0.5},
}
OTHERS = {
    "laplace": {"method": "laplace", "bandwidth": 1.0},
    "renormalised": {"method": "laplace", "bandwidth": 1.0, "negative": "renormalise"},
    "stack": {"method": "stacked"},
    "support": {"support": [(-5.0, None), None, ("circular", 7.0)]},
    "coordinates": {"coordinates": "asinh"},
}


def ready(options, **more):
    return sdkde_core.prepare(X, **{"precision": "float64"} | options | more)


def attached(y=Y):
    return y.detach().clone().requires_grad_()


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_finite_differences_agree(name):
    p = ready((PLAIN | OTHERS)[name])
    y = Y[p.estimate(Y) > 0][:2]
    for log in (False, True):
        assert gradcheck(lambda q, log=log: p.estimate(q, log=log), attached(y), atol=1e-7, check_forward_ad=True)
    (slope,) = torch.autograd.grad(p.estimate(q := attached(y), log=True).sum(), q)
    assert torch.equal(slope, p.grad_log_density(y))
    assert torch.equal(p.estimate(q, log=True), p.estimate(y, log=True))
    with torch.no_grad():
        assert not p.estimate(q).requires_grad


@pytest.mark.parametrize("name", PLAIN)
def test_second_derivatives(name):
    p = ready(PLAIN[name])
    for log in (False, True):
        assert gradgradcheck(lambda q, log=log: p.estimate(q, log=log), attached(Y[:2]), atol=1e-6)
    assert gradcheck(p.grad_log_density, attached(Y[:2]), atol=1e-6, check_forward_ad=True)


@pytest.mark.parametrize("name", OTHERS)
def test_second_derivatives_are_refused(name):
    p = ready(OTHERS[name])
    score = p.grad_log_density(q := attached())
    with pytest.raises(ValueError, match="no derivatives of its own; prepare with method='sdkde' or 'kde' alone"):
        score.nansum().backward()
    (slope,) = torch.autograd.grad(p.estimate(q, log=True).nansum(), q, create_graph=True)
    with pytest.raises(ValueError, match="no derivatives of its own"):
        slope.sum().backward()


def test_third_derivatives_are_refused():
    p = ready({"bandwidth": 0.6})
    with pytest.raises(RuntimeError, match="differentiates twice"):
        vmap(jacrev(hessian(lambda q: p.estimate(q[None])[0])))(Y)


@pytest.mark.filterwarnings("ignore:the Laplace estimate is negative")
@pytest.mark.parametrize("negative", ["keep", "clip"])
def test_a_signed_density_differentiates_as_estimate_does(negative):
    options = {"method": "laplace", "bandwidth": 0.5, "negative": negative, "precision": "float64"}
    y = torch.cat([Y, 2.0 * Y])
    p = sdkde_core.prepare(X, **options)
    assert 0 < int((p.estimate(y) <= 0).sum()) < len(y)
    for log in (False, True):
        values = p.estimate(q := attached(y), log=log), sdkde_core.estimate(X, q, log=log, **options)
        slopes = [torch.autograd.grad(v[v.isfinite()].sum(), q)[0] for v in values]
        torch.testing.assert_close(*values, rtol=1e-9, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-12)


def test_outside_the_support_nothing_moves():
    p = sdkde_core.prepare(X[:, 0] ** 2, support=[(0.0, None)])
    for log in (False, True):
        value = p.estimate(q := attached(torch.tensor([-1.0, 1.0])), log=log)
        (slope,) = torch.autograd.grad(value.sum(), q)
        assert slope[0] == 0
        assert 0 < abs(slope[1]) < 10


@pytest.mark.parametrize("backend", ["numpy", "torch", "auto"])
def test_dtypes_shapes_and_backends(backend):
    p = pickle.loads(pickle.dumps(sdkde_core.prepare(X.astype(np.float32), bandwidth=0.6, backend=backend)))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        value = p.estimate(q := attached(Y.to(dtype)), log=True)
        value.sum().backward()
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert q.grad.dtype == dtype
        torch.testing.assert_close(q.grad, p.grad_log_density(q.detach()).to(dtype))
    again = torch.utils.checkpoint.checkpoint(p.estimate, q := attached(), use_reentrant=False)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), q)[0] for v in (again, p.estimate(q))))
    for shape in ((0, 3), (0,)):
        p.estimate(q := torch.empty(shape, requires_grad=True)).sum().backward()
        assert q.grad.shape == shape
    line = sdkde_core.prepare(X[:, 0], bandwidth=0.5, precision="float64", backend=backend)
    assert gradcheck(lambda q: line.estimate(q, log=True), attached(Y[:, 0]))
    with pytest.raises(ValueError, match=r"query\[None, :\] for one point"):
        p.estimate(attached(Y[0]))


def one(call, **how):
    """The first answer of a call, for one point."""
    return lambda q: call(q[None], **how)[0]


@pytest.mark.parametrize("fitted", [True, False])
def test_functions_of_functions(fitted):
    options = {"bandwidth": 0.6, "precision": "float64"}
    p = sdkde_core.prepare(X, **options)
    x = torch.tensor(X)
    call = p.estimate if fitted else lambda q, **how: sdkde_core.estimate(x, q, **options, **how)
    score = p.grad_log_density if fitted else lambda q: sdkde_core.grad_log_density(x, q, **options)
    want, slope = p.estimate(Y, log=True), p.grad_log_density(Y)
    point = one(call, log=True)
    near = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(vmap(point)(Y), want, **near)
    torch.testing.assert_close(vmap(point, in_dims=1, chunk_size=2)(Y.T), want, **near)
    torch.testing.assert_close(vmap(vmap(point))(Y[:, None])[:, 0], want, **near)
    torch.testing.assert_close(vmap(call)(Y[:, None]), call(Y)[:, None], **near)
    torch.testing.assert_close(vmap(grad(point))(Y), slope, **near)
    torch.testing.assert_close(vmap(one(score))(Y), slope, **near)
    for jacobian in (jacrev, jacfwd):
        got = jacobian(lambda q: call(q, log=True))(Y)
        torch.testing.assert_close(got.diagonal().T, slope, **near)
    torch.testing.assert_close(jvp(lambda q: call(q, log=True), (Y,), (Y,))[1], (slope * Y).sum(1), **near)
    curved = torch.autograd.functional.jacobian(lambda q: p.grad_log_density(q).sum(0), Y).permute(1, 0, 2)
    torch.testing.assert_close(vmap(hessian(point))(Y), curved, **near)
    other = grad(lambda q: (call(q, log=True) * call(Y, log=True)).sum())(Y)  # Y itself is not followed
    torch.testing.assert_close(other, slope * want[:, None], **near)


def test_what_functions_of_functions_refuse():
    x, h = torch.tensor(X), torch.tensor(0.6)
    for name, call, at in (
        ("train", lambda t: sdkde_core.estimate(t, Y, bandwidth=0.6), x),
        ("train", lambda t: sdkde_core.debias(t, bandwidth=0.6), x),
        ("bandwidth", lambda t: sdkde_core.estimate(x, Y, bandwidth=t), h),
        ("query", lambda t: ready({}).estimate(t, out=np.empty(5)), Y),
    ):
        with pytest.raises(TypeError, match=f"{name} is a tensor within torch.func .* their query alone"):
            grad(lambda t, call=call: call(t).sum())(at)
    with pytest.raises(TypeError, match="train requires grad"):
        w = x.clone().requires_grad_()
        grad(lambda t: sdkde_core.estimate(w, t, bandwidth=0.6).sum())(Y)
    hat = sdkde_core.prepare(X, method="kde", kernel="tophat", bandwidth=2.0)
    assert torch.equal(vmap(hat.estimate)(Y[:, None])[:, 0], hat.estimate(Y))
    with pytest.raises(ValueError, match="kernel='tophat' has densities and draws, no derivatives"):
        hat.estimate(attached())
