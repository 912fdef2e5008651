"""Derivatives of estimates: by autograd through the core and a backend, against textbook formulas and finite steps."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import plain_torch
import torch
from pairwise import cases

import sdkde_core
from sdkde_core.choice import registry

METHODS = ("kde", "sdkde", "laplace")
RECORDS = registry.records()
DIFFERENTIATE = [
    r.name
    for r in RECORDS
    if r.ok and "grad" in r.info.features and "cpu" in r.info.devices and r.info.load().probe("cpu").ok
]


@pytest.fixture(autouse=True, params=[pytest.param("plain-torch", marks=pytest.mark.slow), *DIFFERENTIATE])
def backend(request, monkeypatch):
    """Every backend that differentiates here, and one of plain PyTorch, by ``auto`` the only one that does."""
    plain = registry.Record("plain-torch", "ok", "installed", "tests", "1.0", "plain_torch:INFO", plain_torch.INFO)
    others = [r for r in RECORDS if r.name == request.param or r.name not in DIFFERENTIATE]
    monkeypatch.setattr(registry, "made", {})
    monkeypatch.setattr(registry, "records", lambda: (*others, plain) if request.param == plain.name else (*others,))
    return request.param


def inputs(d, n=7, m=4, bandwidth="number", weights=True, dtype=torch.float64):
    """Train, query, weights and bandwidth, all requiring grad; H by way of a matrix, so that it stays symmetric."""
    rng = np.random.default_rng([d, n, m])
    root = 0.4 * rng.normal(size=(d, d)) + 1.5 * np.eye(d)
    h = {"number": 1.3, "columns": rng.uniform(0.8, 2.0, d), "matrix": root}[bandwidth]
    given = [rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.uniform(0.2, 3.0, n) if weights else None, h]
    return [None if x is None else torch.tensor(x, dtype=dtype).requires_grad_() for x in given]


def from_root(h, bandwidth):
    return h @ h.T if bandwidth == "matrix" else h


def textbook(x, y, w, h, method="kde", log=False, goal="density"):
    """The definitions in data units, with H inverted; plain autograd does the rest."""
    d = x.shape[1]
    matrix = h if h.ndim == 2 else torch.diag(h.expand(d) ** 2)
    w = torch.full((len(x),), 1 / len(x), dtype=x.dtype) if w is None else w / w.sum()
    inverse, constant = torch.linalg.inv(matrix), -0.5 * torch.logdet(2 * math.pi * matrix)

    def exponents(rows, centres):
        away = centres - rows[:, None, :]  # (m, n, d)
        return -0.5 * torch.einsum("mni,ij,mnj->mn", away, inverse, away)

    def shift(rows, centres):
        phi = w * torch.exp(exponents(rows, centres))
        return phi @ centres / phi.sum(1, keepdim=True) - rows

    rows = x if y is None else y
    centres = x + 0.5 * shift(x, x) if method == "sdkde" else x
    if goal == "debiased":
        return centres
    if goal == "score":
        return shift(rows, centres) @ inverse
    e = exponents(rows, centres)
    factor = 1 + 0.5 * d + e if method == "laplace" else 1.0
    p = (w * torch.exp(e) * factor).sum(1) * torch.exp(constant)
    return torch.log(p) if log else p


def same_derivatives(got, want, leaves, rtol=1e-8):
    """Values and derivatives of a sum with random factors agree."""
    leaves = [x for x in leaves if x is not None]
    assert got.requires_grad
    np.testing.assert_allclose(got.detach().numpy(), want.detach().numpy(), rtol=rtol, atol=rtol * 1e-3)
    factors = torch.tensor(np.random.default_rng(5).uniform(0.5, 1.5, tuple(want.shape)))
    mine = torch.autograd.grad((got * factors).sum(), leaves, retain_graph=True)
    its = torch.autograd.grad((want * factors).sum(), leaves, retain_graph=True)
    for a, b in zip(mine, its):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert float(abs(a - b).max()) <= rtol * float(abs(b).max())


@pytest.mark.parametrize(
    ("method", "d", "queries", "weights", "bandwidth", "offset"),
    cases(METHODS, (1, 2, 5), (False, True), (False, True), ("number", "columns", "matrix"), (0.0, 1e6), strength=3),
)
def test_as_the_textbook(method, d, queries, weights, bandwidth, offset):
    x, y, w, h = inputs(d, 40, 11, bandwidth, weights)
    y = y if queries else None
    moved = [None if v is None else v + offset for v in (x, y)]
    matrix = from_root(h, bandwidth)
    # The textbook's shift is a difference of two numbers of the offset's size; the derivatives do not know of it.
    shown = [None if v is None else v - offset for v in moved]
    for log in (False, True):
        if log and method == "laplace":
            continue
        got = sdkde_core.estimate(*moved, weights=w, bandwidth=matrix, method=method, log=log, precision="float64")
        same_derivatives(got, textbook(*shown, w, matrix, method, log), (x, y, w, h), rtol=1e-8 if offset else 1e-9)
    if method == "laplace":
        return
    got = sdkde_core.grad_log_density(*moved, weights=w, bandwidth=matrix, method=method, precision="float64")
    same_derivatives(got, textbook(*shown, w, matrix, method, goal="score"), (x, y, w, h), rtol=1e-8)


def test_moved_samples_as_the_textbook():
    x, _, w, h = inputs(3, 40, 1, "matrix")
    got = sdkde_core.debias(x, weights=w, bandwidth=h @ h.T, precision="float64")
    same_derivatives(got, textbook(x, None, w, h @ h.T, "sdkde", goal="debiased"), (x, w, h))


@pytest.mark.parametrize("name", range(4))
@pytest.mark.parametrize("method", METHODS)
def test_any_one_of_them_may_require_grad(method, name):
    leaves = inputs(2, 20, 6, "columns")
    given = [v if i == name else v.detach() for i, v in enumerate(leaves)]
    got = sdkde_core.estimate(*given[:2], weights=given[2], bandwidth=given[3], method=method, precision="float64")
    same_derivatives(got, textbook(*given, method), [leaves[name]])


@pytest.mark.parametrize("method", METHODS)
def test_weights_of_zero_have_a_derivative(method):
    x, y, w, h = inputs(2, 12, 5)
    w = torch.where(torch.arange(12) % 3 == 0, 0.0, w.detach()).requires_grad_()
    got = sdkde_core.estimate(x, y, weights=w, bandwidth=h, method=method, precision="float64")
    same_derivatives(got, textbook(x, y, w, h, method), (x, y, w, h))
    if method == "kde":  # w normalised: ∂p̂/∂w_j = (N_ij − p̂_i) / Σw
        kernel = torch.distributions.Normal(0.0, h.detach())
        n_ij = kernel.log_prob((y[:, None, :] - x).detach()).sum(-1).exp()
        want = ((n_ij - got.detach()[:, None]) / w.detach().sum()).sum(0)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), w)[0], want, rtol=1e-9, atol=0)
        assert (want[::3] != 0).all()


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_equal_weights_and_weights_of_any_size(scale):
    x, y, _, h = (v.detach() for v in inputs(2, 12, 5))
    w = torch.full((12,), scale, dtype=torch.float64).requires_grad_()
    got = sdkde_core.estimate(x, y, weights=w, bandwidth=h, method="kde", precision="float64")
    unit = torch.ones(12, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(got, sdkde_core.estimate(x, y, bandwidth=h, method="kde", precision="float64"))
    (mine,), (its,) = torch.autograd.grad(got.sum(), w), torch.autograd.grad(textbook(x, y, unit, h).sum(), unit)
    torch.testing.assert_close(mine * scale, its, rtol=1e-9, atol=1e-15)


def test_single_precision_in_single_precision_out():
    leaves = inputs(3, 30, 8, "columns", dtype=torch.float32)
    got = sdkde_core.estimate(*leaves[:2], weights=leaves[2], bandwidth=leaves[3], log=True)
    assert got.dtype == torch.float32
    wide = [v.detach().double().requires_grad_() for v in leaves]
    mine = torch.autograd.grad(got.sum(), leaves)
    its = torch.autograd.grad(textbook(*wide, "sdkde", log=True).sum(), wide)
    for a, b in zip(mine, its):
        assert a.dtype == torch.float32
        assert float(abs(a - b).max()) < 2e-3 * float(abs(b).max())


def test_half_precision_and_integers():
    x = torch.arange(12).reshape(6, 2)
    y = torch.tensor([[1.0, 2.5], [3.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    got = sdkde_core.estimate(x, y, bandwidth=2.0, method="kde", log=True)
    assert got.dtype == torch.float64  # as integers count
    got.sum().backward()
    wide = y.detach().double().requires_grad_()
    textbook(x.double(), wide, None, torch.tensor(2.0, dtype=torch.float64), log=True).sum().backward()
    assert y.grad.dtype == torch.bfloat16
    torch.testing.assert_close(y.grad.double(), wide.grad, rtol=1e-2, atol=1e-3)


def test_one_dimensional_input():
    x, y, w, h = (v.detach() for v in inputs(1, 20, 6))
    x, y = x[:, 0].requires_grad_(), y[:, 0].requires_grad_()
    got = sdkde_core.estimate(x, y, weights=w, bandwidth=h, precision="float64")
    same_derivatives(got, textbook(x[:, None], y[:, None], w, h, "sdkde"), (x, y))
    assert sdkde_core.grad_log_density(x, y, bandwidth=h).shape == (6, 1)
    for matrix in (h**2, (h**2)[None], (h**2).reshape(1, 1)):
        matrix = matrix.requires_grad_()
        value = matrix if matrix.ndim == 2 else matrix.sqrt()
        got = sdkde_core.estimate(x, y, bandwidth=value, method="kde", precision="float64")
        same_derivatives(got, textbook(x[:, None], y[:, None], None, matrix.reshape(()).sqrt()), [matrix])


@pytest.mark.parametrize("train", [np.asarray, lambda x: x.tolist(), np.asfortranarray])
def test_samples_of_another_kind(train):
    x, y, w, h = inputs(2, 20, 6)
    x = x.detach()
    got = sdkde_core.estimate(train(x.numpy()), y, weights=w.detach().numpy(), bandwidth=h, precision="float64")
    same_derivatives(got, textbook(x, y, w.detach(), h, "sdkde"), (y, h))
    read_only = x.numpy().copy()
    read_only.flags.writeable = False
    sdkde_core.estimate(read_only, y).sum().backward()


def test_where_the_result_would_be_no_tensor():
    x, y, w, h = inputs(2, 20, 6)
    for call in (sdkde_core.estimate, sdkde_core.grad_log_density, sdkde_core.explain):
        with pytest.raises(TypeError, match=r"train requires grad, but query is a ndarray.*pass query as a torch"):
            call(x, y.detach().numpy())
        with pytest.raises(TypeError, match=r"weights, bandwidth requires grad, but train is a list"):
            call(x.tolist(), weights=w, bandwidth=h)
    with torch.no_grad():
        assert isinstance(sdkde_core.estimate(x, y.numpy()), np.ndarray)


@pytest.mark.parametrize("rule", sdkde_core.bandwidth.rules.RULES)
def test_a_rule_is_a_constant(rule):
    x, y, w, _ = inputs(2, 30, 6)
    method = "kde" if rule == "isj" else "sdkde"
    with torch.no_grad():
        h = sdkde_core.bandwidth.rules.resolve(
            rule, x.numpy(), torch.log(w / w.sum()).numpy(), method=method, steps=False
        )
    plain = {"weights": w, "precision": "float64", "method": method, "tails": "plain"}
    if method == "sdkde":
        plain["step"] = 0.5
    got = sdkde_core.estimate(x, y, bandwidth=rule, **plain)
    same_derivatives(got, textbook(x, y, w, torch.tensor(h.matrix), method), (x, y, w), rtol=1e-7)
    fixed = sdkde_core.estimate(x, y, bandwidth=h, **plain)
    for a, b in zip(*(torch.autograd.grad(v.sum(), (x, y, w), retain_graph=True) for v in (got, fixed))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", METHODS)
def test_without_grad_mode_estimates_are_as_always(method, mode):
    x, y, w, h = inputs(2, 30, 6, "columns")
    plain = [v.detach().clone() for v in (x, y, w, h)]
    for options in ({}, {"backend": "numpy"}):
        calls = [lambda a, o=options: sdkde_core.estimate(a[0], a[1], weights=a[2], bandwidth=a[3], method=method, **o)]
        if method != "laplace":
            calls.append(lambda a, o=options: sdkde_core.grad_log_density(*a[:2], bandwidth=a[3], method=method, **o))
        calls.append(lambda a, o=options: sdkde_core.debias(a[0], weights=a[2], **o))
        calls.append(lambda a, o=options: sdkde_core.prepare(a[0], bandwidth=a[3], **o).estimate(a[1]))
        for call in calls:
            with mode():
                got = call((x, y, w, h))
            assert not got.requires_grad
            assert torch.equal(got, call(plain))


def test_what_keeps_numbers_refuses_what_requires_grad():
    x, y, w, h = inputs(2, 20, 6)
    for options in ({"weights": w}, {"bandwidth": h}, {}):
        with pytest.raises(TypeError, match="requires grad, and only estimate, debias and grad_log_density"):
            sdkde_core.prepare(x.detach() if options else x, **options)
    ready = sdkde_core.prepare(x.detach())
    for call in (ready.estimate, ready.grad_log_density):
        with pytest.raises(TypeError, match=r"query requires grad.*query\.detach\(\), or call within torch\.no_grad"):
            call(y, progress=True)
    with pytest.raises(TypeError, match="bandwidth requires grad"):
        sdkde_core.Bandwidth.of(h, 2)
    with pytest.raises(TypeError, match="requires grad"):
        sdkde_core.estimate(x.detach(), bandwidth=[h, h])  # a list of tensors


def test_only_backends_that_differentiate_are_taken(backend):
    x, y, _, h = inputs(2, 20, 6)
    for method in METHODS:
        with pytest.raises(sdkde_core.BackendUnavailable, match=r"'numpy' cannot do this: lacks grad\n.*detached"):
            sdkde_core.estimate(x, y, bandwidth=h, backend="numpy", method=method)
    explained = sdkde_core.explain(x, y, bandwidth=h)
    assert explained.backend == backend
    assert {c.reason for c in explained.candidates if c.name == "numpy"} == {"lacks grad"}
    assert sdkde_core.explain(x.detach(), y, bandwidth=h.detach()).backend == backend
    with torch.no_grad():
        assert sdkde_core.explain(x, y, bandwidth=h).candidates[0].ok
    with pytest.raises(sdkde_core.BackendUnavailable, match="lacks grad"):
        sdkde_core.estimate(x, y[:0], backend="numpy")


def test_the_log_of_a_negative_laplace_estimate():
    x, y, _, h = inputs(2, 20, 6)
    y = (3.0 * y).detach().requires_grad_()
    with pytest.warns(RuntimeWarning, match="negative at"):
        got = sdkde_core.estimate(x, y, bandwidth=h * 0.5, method="laplace", log=True, precision="float64")
    negative = got.isnan()
    assert 0 < int(negative.sum()) < 6
    mine = torch.autograd.grad(got[~negative].sum(), (x, h), retain_graph=True)
    its = torch.autograd.grad(textbook(x, y, None, h * 0.5, "laplace", log=True)[~negative].sum(), (x, h))
    for a, b in zip(mine, its):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_far_from_every_sample_the_log_has_a_derivative():
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[300.0, 400.0]], dtype=torch.float64, requires_grad=True)
    log_density = sdkde_core.estimate(x, y, bandwidth=2.0, method="kde", log=True, precision="float64")
    log_density.sum().backward()
    torch.testing.assert_close(y.grad, torch.tensor([[-75.0, -100.0]], dtype=torch.float64))
    torch.testing.assert_close(x.grad, torch.tensor([[25.0, 100 / 3]] * 3, dtype=torch.float64))
    density = sdkde_core.estimate(x, y, bandwidth=2.0, method="kde")
    assert torch.autograd.grad(density.sum(), y)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 2), (0,)])
def test_no_queries(shape):
    x, _, w, h = inputs(2, 20, 6)
    y = torch.empty(shape, dtype=torch.float32, requires_grad=True)
    for call, wanted in ((sdkde_core.estimate, (0,)), (sdkde_core.grad_log_density, (0, 2))):
        got = call(x, y, weights=w, bandwidth=h)
        assert got.shape == wanted
        assert got.dtype == torch.float64
        for leaf, derivative in zip((x, y, w, h), torch.autograd.grad(got.sum(), (x, y, w, h))):
            assert torch.equal(derivative, torch.zeros_like(leaf))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's look at its own
def test_a_compiled_caller():
    def loss(x, y, h):
        return sdkde_core.estimate(x * 2.0, y * 2.0, bandwidth=h.exp(), log=True).sum() * 3.0

    x, y, _, h = inputs(2, 20, 6, "columns")
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager")
    for a, b in zip(*(torch.autograd.grad(f(x, y, h), (x, y, h)) for f in (compiled, loss))):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which forward mode needs itself
def test_the_pages_example_runs(capsys):
    """What gradients are for: the held-out likelihood chooses the bandwidth."""
    page = (Path(__file__).parent.parent / "docs" / "gradients.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.S)[:2]:
        exec(compile(example, "gradients.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "tensor(" in printed
    assert "[3, 2, 2]" in printed
    with torch.no_grad():
        assert names["density"].estimate(names["q"]).mean() > 1.2 * names["density"].estimate(names["held_out"]).mean()
    h = names["log_h"].detach().exp()
    assert 5.0 < float(h[1] / h[0]) < 20.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(
    "places", ["cuda cuda cuda cuda", "cuda cuda cpu cpu", "cpu cuda cpu cuda", "cuda cpu cuda cpu"]
)
@pytest.mark.parametrize("method", METHODS)
def test_on_a_device(method, places, device):
    leaves = inputs(3, 40, 11, "columns")
    x, y, w, h = (v.detach().to(place).requires_grad_() for v, place in zip(leaves, places.split()))
    got = sdkde_core.estimate(x, y, weights=w, bandwidth=h, method=method, precision="float64", device=device)
    assert got.device == y.device
    mine = torch.autograd.grad(got.sum(), (x, y, w, h))
    assert all(a.device == v.device for a, v in zip(mine, (x, y, w, h)))
    for a, b in zip(mine, torch.autograd.grad(textbook(*leaves, method).sum(), leaves)):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-8, atol=1e-12)


def test_forward_mode_within_forward_mode_is_refused():
    """PyTorch would have a second derivative of 0, in silence."""
    density = sdkde_core.prepare(torch.randn(50, 1, dtype=torch.float64), bandwidth=0.5)
    log = lambda z: density.estimate(z[None], log=True)[0]  # noqa: E731
    at = torch.tensor([0.3], dtype=torch.float64)
    assert torch.func.hessian(log)(at).item() != 0.0
    with pytest.raises(RuntimeError, match="no forward mode within forward mode"):
        torch.func.jacfwd(torch.func.jacfwd(log))(at)
    with pytest.raises(TypeError, match=r"pass value.detach\(\)"):
        sdkde_core.prepare(torch.randn(50, 2)).conditional({0: torch.tensor(0.3, requires_grad=True)})
