"""Criteria and steps of EM by Triton's kernels: against the array code, interpreted; and on a card."""

import functools

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from interpreter import interpreted
from sdkde_triton import criteria

from sdkde_core import select_bandwidth
from sdkde_core.bandwidth import selection
from sdkde_core.bandwidth.pairs import Pairs
from sdkde_core.bandwidth.sample import Kernels, Sample
from sdkde_core.bandwidth.shapes import find_shape
from sdkde_core.choice import registry

METHODS = ("kde", "sdkde", "laplace")
CPU = Kernels(*(functools.partial(f, device="cpu") for f in (criteria.left_out, criteria.climb)))


def drawn(n, d, kind, seed=0):
    """Samples and weights that sum to 1: over a power of ten if ``"weighted"``, a third of nothing if ``"light"``."""
    rng = np.random.default_rng([n, d, seed])
    x = rng.normal(size=(n, d)) @ (np.eye(d) + 0.5 * rng.normal(size=(d, d)) / d)
    if kind == "apart":  # as far as gaps are shortened to
        x[::2] += 20.0
    elif kind == "rounded":  # as duplicates are spread
        x = np.round(x) + 1e-3 * rng.normal(size=x.shape)
    kinds = {"weighted": 10 ** rng.random(n), "light": np.where(np.arange(n) % 3, 1.0, 1e-7)}
    weights = kinds.get(kind, np.ones(n))
    return x, weights / weights.sum()


SLOW = [(20, 17), (300, 16), (140, 64)]


@interpreted
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["weighted", "light", "apart", "rounded"])
@pytest.mark.parametrize(("n", "d"), [(5, 1), (60, 2), *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW)])
def test_criteria_are_those_of_the_array_code(n, d, kind, method):
    u, weights = drawn(n, d, kind)
    bandwidths = [0.01, 0.3, 1.2]
    logs, signs, squares = criteria.left_out(u, weights, bandwidths, method, "cpu")
    for i, want in enumerate(Pairs(u, weights, method).at(bandwidths)):
        scale, expected = np.maximum(want.log_density, logs[i]), want.sign * np.ones(n)
        off = signs[i] * np.exp(logs[i] - scale) - expected * np.exp(want.log_density - scale)
        # A Laplace estimate may cancel, and coordinates of 20 are rounded to 1e-6, 1e-4 of the narrowest bandwidth.
        rough = method == "laplace" or bandwidths[i] < 0.1
        allowed = (1e-3 if rough else 1e-5) * (1 + abs(want.log_density))
        np.testing.assert_array_less(abs(off), allowed)
        assert squares[i] == pytest.approx(want.log_square, rel=1e-6, abs=1e-5)


@interpreted
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("d", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_a_climb_is_brute_force(d, common):
    u, weights = drawn(30, d, "weighted")
    shares, lengths = np.linspace(1.0, 2.0, 30) / 45, [1.6, 4.0]
    rates, moment, logs = criteria.climb(u, weights, shares, lengths, 1e-6, common, "cpu")
    away, g = u[:, None] - u, np.ones(d)
    for length in (*lengths, None):
        terms = weights * np.exp(-0.5 * away**2 @ g) * (1 - np.eye(30))
        parts = shares[:, None] * terms / terms.sum(1)[:, None]
        want = np.einsum("ij,ijk,ijl->kl", parts, away, away) * np.sqrt(g[:, None] * g)
        step = np.diagonal(want).mean() if common else np.diagonal(want)
        g = g if length is None else g / step**length
    np.testing.assert_allclose(rates, g, rtol=1e-9)
    np.testing.assert_allclose(moment, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(logs, np.log(terms.sum(1)), rtol=1e-9)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("n", "d"), [(60, 2), (60, 5)])
def test_shapes_are_those_of_the_array_code(n, d, mixed):
    u, weights = drawn(n, d, "weighted")
    u[:, 1] = u[:, 0] + 0.2 * u[:, 1] if mixed else 0.1 * u[:, 1] + 3.0 * (np.arange(n) % 2)
    u /= u.std(0)
    found = []
    for kernels in (None, CPU):
        sample = Sample(u, weights, n)
        sample.kernels = kernels
        found.append(find_shape(sample, u, weights, np.arange(n)))
    (want, reason), (got, again) = found
    assert ("column" in reason or mixed) and again == reason
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_choice_is_the_same(monkeypatch, method):
    x, _ = drawn(24, 2, "equal")
    want = select_bandwidth(x, method=method)
    monkeypatch.setattr(Sample, "kernels", CPU)
    monkeypatch.setattr(selection, "_logger", None)  # a kernel that fails is an error
    np.testing.assert_allclose(select_bandwidth(x, method=method).matrix, want.matrix, rtol=1e-5, atol=1e-7)


def test_kernels_that_fail_are_done_without(monkeypatch):
    def fails(*given):
        raise RuntimeError("no kernel image is available for execution on the device")

    x, _ = drawn(60, 2, "equal")
    want = select_bandwidth(x)
    monkeypatch.setattr(Sample, "kernels", Kernels(fails, fails))
    np.testing.assert_array_equal(select_bandwidth(x).matrix, want.matrix)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["equal", "weighted", "apart", "rounded"])
@pytest.mark.parametrize("d", [1, 2, 16, 33, 64])
def test_the_choice_on_a_card_is_that_on_the_cpu(monkeypatch, d, kind, method):
    monkeypatch.setattr(selection, "_logger", None)  # a kernel that fails is an error
    for n, rule in ((5, "auto"), (200, "lscv"), (200, "auto"), (6000, "auto")):
        x, weights = drawn(n, d, kind)
        weights = weights if kind == "weighted" else None
        on_card = torch.from_numpy(x).cuda()
        sample = Sample(on_card, None, n)
        assert (sample.kernels is not None) == registry.start(registry.find("triton").info, "cuda:0")[1].ok
        want = select_bandwidth(x, weights=weights, method=method, rule=rule)
        given = None if weights is None else torch.from_numpy(weights).cuda()
        got = select_bandwidth(on_card, weights=given, method=method, rule=rule)
        scale = np.sqrt(np.diagonal(want.matrix))
        off = abs(got.matrix - want.matrix) / scale[:, None] / scale
        assert off.max() < 2e-3, (n, rule, off.max(), want.selection.reason, got.selection.reason)
