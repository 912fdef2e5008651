"""What lies between the sums of two groups, by Triton's kernels: against the array code, interpreted."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from interpreter import interpreted
from sdkde_triton import moves, whiten

from sdkde_core.engine.groups import Group, places
from sdkde_core.engine.merge import merge
from sdkde_core.estimator.density import density
from sdkde_core.estimator.moving import limits, moments, products
from sdkde_core.protocol import Columns, Partial

pytestmark = interpreted


@pytest.mark.parametrize("kind", ["mean shift", "away", "still", "steep"])
@pytest.mark.parametrize(
    ("n", "d", "c"), [(70, 3, 1.4), (300, 1, 1.0), pytest.param(700, 17, 2.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_samples_move_by_the_array_codes_step(n, d, c, kind, weighted):
    rng = np.random.default_rng(n)
    u = rng.normal(size=(n, d)) + 5.0
    towards = (u.mean(0) - u) * {"mean shift": 0.7, "away": -0.1, "still": 0.0, "steep": 6.0}[kind]
    points, shift = (torch.from_numpy(x) for x in (u, towards + 0.1 * rng.normal(size=(n, d)) * (kind != "still")))
    logs = torch.from_numpy(rng.normal(size=n) * weighted).log_softmax(0)
    s = shift / c
    step = float(moments(products(Columns(points, logs), s), c))
    got = moves.displaced(points, shift, logs if weighted else None, c, *limits(c))
    np.testing.assert_allclose(got, points + step * s, rtol=1e-11)
    got = moves.displaced(points, shift, logs if weighted else None, c, 0.7, 0.7)  # a number as step
    np.testing.assert_allclose(got, points + 0.7 * s, rtol=1e-13)


@pytest.mark.parametrize("n", [70, 2500])
def test_points_in_a_unit_and_some_by_their_weights(n):
    x = torch.randn(n, 3, dtype=torch.float64)
    assert torch.equal(moves.in_unit(x, 5.3), x / 5.3)
    weights = torch.rand(n, dtype=torch.float64)
    for some, w in ((n // 2, torch.ones_like(weights)), (n // 3, weights), (n, weights**9), (1, weights)):
        logs = w.log().log_softmax(0)
        assert torch.equal(moves.in_unit(x, 5.3, some, logs), x[places(logs, some)] / 5.3)
        equal = torch.full((n,), -math.log(n), dtype=torch.float64)
        assert torch.equal(moves.in_unit(x, 5.3, some), x[places(equal, some)] / 5.3)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_are_joined(log, dtype):
    none = Columns(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    groups = Group(none, 1.0, math.log(0.98)), Group(none, 4.0, math.log(0.02))
    a = torch.tensor([0.0, -3.0, -1000.0, -math.inf, -math.inf, math.nan, 1.0, -1e5], dtype=torch.float64)
    b = torch.tensor([-2.0, -1.0, -900.0, -5.0, -math.inf, 0.0, math.nan, -1e5], dtype=torch.float64)
    want = density(merge([g.raised(Partial(x), 3) for g, x in zip(groups, (a, b))]), 2.5, log).to(dtype)
    got = moves.joined((a, b), tuple(2.5 + g.raise_by(3) for g in groups), log, dtype)
    np.testing.assert_allclose(got, want, rtol=1e-6 if dtype is torch.float32 else 1e-13)
    assert got.dtype is dtype


def test_shifts_of_groups_are_joined():
    none = Columns(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    groups = Group(none, 1.0, math.log(0.98)), Group(none, 4.0, math.log(0.02))
    logs = tuple(
        torch.tensor(x, dtype=torch.float64) for x in ([0.0, -3.0, -1e3, -math.inf], [-2.0, -1.0, -900.0, -5.0])
    )
    shifts = tuple(torch.randn(4, 3, dtype=torch.float64) for _ in groups)
    want = merge([g.raised(Partial(x, s), 3) for g, x, s in zip(groups, logs, shifts)]).shift
    got = moves.joined_shifts(logs, tuple(2.5 + g.raise_by(3) for g in groups), shifts, (1.0, 4.0))
    np.testing.assert_allclose(got, want, rtol=1e-13)
    nothing = (logs[0] - math.inf,) * 2
    assert not moves.joined_shifts(nothing, (0.0, 0.0), shifts, (1.0, 4.0)).any()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize("n", [1, 2500])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")  # of the interpreter
def test_weights_are_normalised_and_their_span_is_read(n, dtype):
    x, least = torch.randn(n, 2, dtype=dtype), 1e-30 if dtype is torch.float32 else 1e-300
    for w in (
        torch.rand(n, dtype=dtype) + 0.01,
        torch.logspace(math.log10(least), 0, n, dtype=dtype),
        least * x[:, 0].abs().contiguous(),
    ):
        found = whiten.whiten((x,), 1.0, weights=w)
        want, span = w.double().log().log_softmax(0), float(w.double().max().log() - w.double().min().log())
        np.testing.assert_allclose(found.log_weights, want, rtol=1e-12, atol=1e-12)
        assert found.extent()[1] == pytest.approx(span)
    for wrong in (0.0, -1.0, math.nan, math.inf, *[1.7e308] * (n > 1 and dtype is torch.float64)):
        w[n // 2] = w[0] = wrong
        assert whiten.whiten((x,), 1.0, weights=w).extent()[1] == math.inf
