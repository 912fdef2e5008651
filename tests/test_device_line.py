"""One column on a device: without a card, where NumPy or interpreted kernels say what bandwidths do; on a card."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from interpreter import interpreted

from sdkde_core import select_bandwidth
from sdkde_core.bandwidth import distinct, rules
from sdkde_core.bandwidth.line import Line
from sdkde_core.bandwidth.normal import normal_reference
from sdkde_core.bandwidth.sample import Sample, most_of

METHODS = ("kde", "sdkde", "laplace")


def columns(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    yield "normal", x
    yield "float32", x.astype(np.float32)  # with ties, if there are many
    yield "far", rng.standard_t(1.5 if n < 1000 else 8.0, size=n)
    yield "groups", np.where(np.arange(n) % 3, x, 500.0 + 0.01 * x)
    yield "ties", np.repeat(x, 2)[:n]
    yield "noise", np.where(np.arange(n) % 3, x, 1e-20 * x)  # what the host takes for equal
    yield "rounded", x.round(1)
    yield "counts", rng.poisson(3.0, size=n).astype(float)
    yield "ends", rng.exponential(size=n)
    yield "small", 1e-200 * x
    yield "large", 1e300 * x
    if n > 1000:
        yield "tail", np.exp(2.0 * x)  # takes more bins than there are


def line_of(u, folds, method, score):
    return Line(u.numpy(), np.full(len(u), 1.0 / len(u)), folds, method, score)


def geometric(first, growth, k):
    return first * np.exp(growth * np.arange(k))


def line_left_out(u, folds, others, bandwidths, method, score):
    line = line_of(u, folds.numpy(), method, score)
    np.testing.assert_allclose(others.numpy(), 1.0 - line.held, rtol=1e-12)
    found = torch.tensor(np.stack([np.transpose(line.sums(h)) for h in geometric(*bandwidths)], axis=1))
    return torch.cat([found, 0.5 + 0.0 * found[..., :1]], 2)


def line_deviations(u, pilot, widths, method, score):
    line = line_of(u, np.zeros(len(u), int), method, score)
    found = np.zeros((1 + widths[2], 6))
    found[1:, 1], found[1:, 0], found[1:, 5] = np.transpose(line.deviations(line.pilot(pilot), geometric(*widths)))
    found[:, 1] = 0.5 * (found[:, 0] - found[:, 1])
    return torch.tensor(found)


@pytest.mark.parametrize("rule", ["auto", "lscv", "lcv"])
@pytest.mark.parametrize("n", [5, 60, 700])
def test_the_choice_is_that_of_the_host(monkeypatch, n, rule):
    asked = []

    def left_out(*given):
        asked.append(given[3])
        return line_left_out(*given)

    kernels = SimpleNamespace(line_left_out=left_out, line_deviations=line_deviations)
    monkeypatch.setattr(distinct, "_logger", None)  # a kernel that fails is an error
    for name, x in columns(n):
        for method in METHODS[: 2 if rule == "lcv" else 3]:
            want = select_bandwidth(x, rule=rule, method=method)
            asked.clear()
            with monkeypatch.context() as patched:
                patched.setattr(Sample, "kernels", kernels)
                patched.setattr(rules, "on_gpu", lambda x: True)
                got = rules.resolve(rule, torch.from_numpy(x)[:, None], method=method)
            assert got.selection.reason == want.selection.reason
            np.testing.assert_allclose(got.factor, want.factor, rtol=1e-5)
            assert (got.step, got.score_bandwidth) == pytest.approx((want.step, want.score_bandwidth))
            assert len(asked) <= 6, "bandwidths are asked about one by one"
            assert bool(asked) == (
                name not in ("noise", "rounded", "counts", "small", "large") and (n, name) != (5, "ties")
            )


@pytest.mark.parametrize(("share", "there"), [(0.95, True), (1.05, False)])
def test_what_takes_too_many_bins_is_chosen_on_the_host(monkeypatch, share, there):
    """Unless no such bandwidth is looked at."""
    x, last = next(columns(700))[1], []
    want = select_bandwidth(x)
    least = share * want.selection.multiples.min() * normal_reference("sdkde", 1, 700)

    def left_out(*given):
        found = line_left_out(*given)
        found[:, geometric(*given[3]) < least] = torch.nan
        return found

    kernels = SimpleNamespace(
        line_left_out=left_out, line_deviations=lambda *given: last.append(1) or line_deviations(*given)
    )
    monkeypatch.setattr(Sample, "kernels", kernels)
    monkeypatch.setattr(rules, "on_gpu", lambda x: True)
    got = rules.resolve("auto", torch.from_numpy(x)[:, None])
    assert got.factor == pytest.approx(want.factor, rel=1e-5)
    assert bool(last) == there


def sampled(n, kind):
    rng = np.random.default_rng(n)
    u = np.sort(rng.normal(size=n) + (50.0 if kind == "apart" else 1.0) * (np.arange(n) % 2))
    often, folds = rng.integers(1, 3, n), rng.permutation(n) % 3
    u, folds = np.repeat(u, often), np.repeat(folds, often)
    return [torch.from_numpy(x) for x in (u, folds, 1.0 - np.bincount(folds) / len(u))]


@interpreted
@pytest.mark.parametrize(
    ("method", "score", "kind"),
    [
        ("sdkde", 1.4, "apart"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("sdkde", None, ""), ("kde", None, "apart"))),
        pytest.param("laplace", None, "", marks=pytest.mark.slow),
    ],
)
def test_kernels_are_the_array_code(monkeypatch, method, score, kind):
    from sdkde_triton import line

    monkeypatch.setattr(line, "LENGTH", 8192)
    monkeypatch.setattr(line, "TILES", line.tl.constexpr(8192 // line.TILE))
    u, *folds = sampled(20, kind)
    given = u, *folds, (1.6, -0.3, 2), method, score
    got = line.line_left_out(*given)
    np.testing.assert_allclose(got[..., :5], line_left_out(*given)[..., :5], rtol=1e-6)
    assert (got[..., 5] == 0.5).all() == (score is None)
    given = u, 0.9, (8.0, 0.0, 1), method, score
    (own, got), (_, want) = line.line_deviations(*given), line_deviations(*given)
    bias, of_line = (x[0] - 2.0 * x[1] + y for x, y in ((got, own[0]), (want, 0.0)))
    np.testing.assert_allclose([bias, got[0], got[5]], [of_line, want[0], want[5]], rtol=1e-6)
    if kind:
        monkeypatch.setattr(line, "LENGTH", 256)
        monkeypatch.setattr(line, "TILES", line.tl.constexpr(1))
        there = line.line_left_out(u, *folds, (20.0, -6.0, 2), method, score)[..., :5].isnan()
        assert there[:, 1].all() and not there[:, 0].any(), "what takes too many bins"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [5, 60, 700, 20_000, most_of(1) + 9])
def test_the_choice_on_a_card_is_that_of_the_host(monkeypatch, n, method):
    if n < 1000:  # else narrow kernels of far samples may take more bins than there are
        monkeypatch.setattr(distinct, "_logger", None)
    for name, x in columns(n):
        if name == "noise" and n > 1000:  # the mean's last bit says how many of them are equal
            continue
        for rule in ("auto", "lscv", "lcv")[: 2 if method == "laplace" else 3]:
            want = select_bandwidth(x, rule=rule, method=method)
            got, again = (select_bandwidth(torch.from_numpy(x).cuda(), rule=rule, method=method) for _ in range(2))
            assert got.factor == again.factor
            assert abs(got.factor / want.factor - 1.0) < 1e-3, (name, rule, got.selection.reason, want.selection.reason)
