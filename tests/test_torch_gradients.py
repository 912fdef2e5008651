"""Derivatives of the PyTorch backend's reductions, against finite differences and autograd through plain formulas."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from plain_torch import PlainTorch
from sdkde_torch.backend import TorchBackend

from sdkde_core.protocol import Columns, Problem, Reduction

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


def _weights(kind, n, rng):
    if kind == "none":
        return None
    w = rng.random(n) + 0.1
    if kind == "zeros":
        w[[0, n // 2]] = 0.0
    if kind == "tiny":
        w[1], w[2] = 1e-250, 1e-40
    return w / w.sum()


def _data(d, weights="none", m=5, n=9, seed=0, device="cpu"):
    rng = np.random.default_rng([seed, d])
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    x[3] = x[4]  # duplicates
    y[0] = x[3]
    y[-1] = 12.0 / math.sqrt(d) * np.ones(d)  # far from every point: φ near exp(−60)
    w = _weights(weights, n, rng)
    return [None if a is None else torch.tensor(a, device=device, requires_grad=True) for a in (x, y, w)]


def _reduce(reduction, x, y, w, precision="float64", backend=None, extent=20.0):
    requires = {"grad"} | ({"weights"} if w is not None else set())
    m, n = len(x if y is None else y), len(x)
    more = {"same": y is None, "requires": frozenset(requires), "extent": extent}
    problem = Problem(reduction, m, n, x.shape[1], precision=precision, device=str(x.device), **more)
    backend = backend or TorchBackend()
    log_w = torch.full((n,), -math.log(n), dtype=torch.float64, device=x.device) if w is None else w.detach().log()
    state = backend.prepare(problem, Columns(x, log_w, weights=w))
    return backend.reduce(problem, y, state)


def _differentiable(reduction, got):
    if reduction is Reduction.LOG_SUM:
        return (got.log_sum,)
    return (got.log_sum, got.shift) if reduction is Reduction.MEAN else (got.log_magnitude,)


def _compare(reduction, tensors, rtol=1e-8, atol=1e-10, **options):
    """Derivatives of a random combination of the results, by both ways."""
    leaves = [t for t in tensors if t is not None]
    x, y, w = tensors
    got = _differentiable(reduction, _reduce(reduction, x, y, w, **options))
    want = _differentiable(reduction, _reduce(reduction, x, y, w, backend=PlainTorch()))
    generator = torch.Generator(device=x.device).manual_seed(0)
    by_got, by_want = 0.0, 0.0
    for a, b in zip(got, want):
        c = torch.randn(a.shape, dtype=torch.float64, device=x.device, generator=generator)
        by_got, by_want = by_got + (a * c).sum(), by_want + (b * c).sum()
    for a, b in zip(torch.autograd.grad(by_got, leaves), torch.autograd.grad(by_want, leaves)):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("weights", ["none", "some", "zeros", "tiny"])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("reduction", Reduction)
def test_derivatives_are_those_of_the_formula(reduction, d, same, weights, device):
    x, y, w = _data(d, weights, device=device)
    _compare(reduction, (x, None if same else y, w))


@pytest.mark.parametrize("d", [1, 5])
@pytest.mark.parametrize("reduction", Reduction)
def test_the_derivative_by_a_weight_of_zero(reduction, d):
    """One-sided differences, as a weight cannot fall below zero."""
    x, y, w = _data(d, "zeros")
    got = _differentiable(reduction, _reduce(reduction, x, y, w))
    (by_w,) = torch.autograd.grad(sum(t.sum() for t in got), [w])
    for j in (0, len(w) // 2):
        step = torch.zeros_like(w)
        step[j] = 1e-9
        more = _differentiable(reduction, _reduce(reduction, x, y, w + step))
        slope = sum(((a - b) / 1e-9).sum() for a, b in zip(more, got))
        assert float(by_w[j]) != 0.0
        torch.testing.assert_close(by_w[j], slope.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("distance", [40.0, 1e3, 1e5])
@pytest.mark.parametrize("reduction", Reduction)
def test_far_tails_and_far_clusters(reduction, distance):
    """Where every φ underflows, and clusters that no expanded square holds."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3))
    x[6:, 0] += distance
    y = rng.normal(size=(6, 3))
    y[2:4, 0] += distance
    y[4:, 1] += distance
    x, y = (torch.tensor(a, requires_grad=True) for a in (x, y))
    _compare(reduction, (x, y, None), extent=2 * distance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("far", [1e9, 1e20, 1e100])
def test_a_weight_of_zero_counts_for_nothing_at_any_distance(far):
    """The nearest point to a far row has no weight; all others are at one place."""
    x, y = torch.zeros(5, 2, dtype=torch.float64), torch.tensor([[far, 0.0], [0.5, 0.0]], dtype=torch.float64)
    x[0, 0] = far
    w = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    for t in (x, y, w):
        t.requires_grad_()
    log_sum = _reduce(Reduction.LOG_SUM, x, y, w, extent=far).log_sum
    torch.testing.assert_close(log_sum, torch.tensor([-0.5 * far**2, -0.125], dtype=torch.float64))
    by_x, by_y = torch.autograd.grad(log_sum.sum(), (x, y))
    torch.testing.assert_close(by_y, -y.detach())
    assert float(by_x[0].norm()) <= 1e-16 * far
    torch.testing.assert_close(by_x[1:], (y.detach().sum(0) / 4).expand(4, 2))


@pytest.mark.parametrize("weights", ["none", "zeros"])
@pytest.mark.parametrize("reduction", Reduction)
def test_chunks_change_nothing(reduction, weights):
    """Many blocks of rows and of columns."""
    x, y, w = _data(3, weights, m=70, n=2500)
    got = []
    for memory in ("64MiB", 360 << 10):
        first = _differentiable(reduction, _reduce(reduction, x, y, w, backend=TorchBackend(memory)))
        leaves = [t for t in (x, y, w) if t is not None]
        got.append(torch.autograd.grad(sum(t.sum() for t in first), leaves))
    for a, b in zip(*got):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("reduction", Reduction)
def test_other_levels(reduction, precision):
    _compare(reduction, _data(4, "some"), precision=precision, rtol=2e-3 if precision == "fast" else 1e-5, atol=1e-4)


def test_second_derivatives_are_refused():
    x, y, _ = _data(2)
    result = _reduce(Reduction.LOG_SUM, x, y, None).log_sum
    (by_y,) = torch.autograd.grad(result.sum(), [y], create_graph=True)
    penalty = result.sum() + (by_y**2).sum()  # part of it is differentiable
    with pytest.raises(RuntimeError, match="differentiates once"):
        penalty.backward()


def test_an_sdkde_by_hand():
    """Two passes, the points moved in between: as the core chains them."""
    x, y, w = _data(3, "some")

    def estimate(backend):
        moved = x + 0.5 * _reduce(Reduction.MEAN, x, None, w, backend=backend).shift
        return _reduce(Reduction.LOG_SUM, moved, y, w, backend=backend).log_sum

    got, want = (torch.autograd.grad(estimate(by).sum(), [x, y, w]) for by in (TorchBackend(), PlainTorch()))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
