"""Derivatives of the PyTorch backend's reductions, beside what the conformance suite has of them."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from sdkde_torch.backend import TorchBackend

from sdkde_core.protocol import Columns, Problem, Reduction


def _data(d, weighted=False, m=5, n=9):
    rng = np.random.default_rng(d)
    x, y, w = rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.random(n) + 0.1
    w[[0, n // 2]] = 0.0
    return [
        None if a is None else torch.tensor(a, requires_grad=True) for a in (x, y, w / w.sum() if weighted else None)
    ]


def _reduce(reduction, x, y, w, extent=20.0, precision="float64", **options):
    n, requires = len(x), {"grad"} | ({"weights"} if w is not None else set())
    how = {"precision": precision, "device": "cpu", "requires": frozenset(requires), "extent": extent}
    problem, backend = Problem(reduction, len(y), n, x.shape[1], **how), TorchBackend(**options)
    log_w = torch.full((n,), -math.log(n), dtype=torch.float64) if w is None else w.detach().log()
    state = backend.prepare(problem, Columns(x, log_w, weights=w))
    return backend.reduce(problem, y, state)


def _differentiable(reduction, got):
    if reduction is Reduction.LOG_SUM:
        return (got.log_sum,)
    return (got.log_sum, got.shift) if reduction is Reduction.MEAN else (got.log_magnitude,)


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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", Reduction)
def test_chunks_change_nothing(reduction, weighted):
    """Many blocks of rows and of columns."""
    x, y, w = _data(3, weighted, m=70, n=2500)
    got = []
    for memory in ("64MiB", 360 << 10):
        first = _differentiable(reduction, _reduce(reduction, x, y, w, memory=memory))
        leaves = [t for t in (x, y, w) if t is not None]
        got.append(torch.autograd.grad(sum(t.sum() for t in first), leaves))
    for a, b in zip(*got):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("extent", [20.0, 1e4])  # what the forward pass sums beside, and what a second one does
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_alone_have_the_same_derivatives(weighted, extent):
    x, y, w = _data(40, weighted, m=70, n=2500)
    for precision in ("fast", "high", "float64"):
        log_sum = _reduce(Reduction.LOG_SUM, x, y, w, extent, precision=precision).log_sum
        alone = _reduce(
            Reduction.LOG_SUM, x.detach(), y, None if w is None else w.detach(), extent, precision=precision
        ).log_sum
        (want,), (got,) = (torch.autograd.grad((v**2).sum(), y) for v in (log_sum, alone))
        torch.testing.assert_close(alone, log_sum, rtol=1e-6, atol=5e-4 if precision == "fast" else 1e-5)
        torch.testing.assert_close(got, want, rtol=1e-5 if precision == "fast" else 1e-9, atol=1e-10)


@pytest.mark.parametrize("alone", [False, True])
def test_second_derivatives_are_refused(alone):
    x, y, _ = _data(2)
    x = x.detach() if alone else x
    result = _reduce(Reduction.LOG_SUM, x, y, None).log_sum
    (by_y,) = torch.autograd.grad(result.sum(), [y], create_graph=True)
    penalty = result.sum() + (by_y**2).sum()  # part of it is differentiable
    with pytest.raises(RuntimeError, match="differentiates once"):
        penalty.backward()
