"""One column on a device: without a card, where NumPy or interpreted kernels say what bandwidths do; on a card."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from interpreter import interpreted

from sdkde_core import select_bandwidth
from sdkde_core.bandwidth import distinct, rules
from sdkde_core.bandwidth.line import STEP, Line, descend
from sdkde_core.bandwidth.normal import normal_reference, roughness
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
    yield "nearly rounded", x.round(1) + 2e-3 * rng.normal(size=n)  # the criterion falls again at narrow bandwidths
    if n > 1000:
        yield "tail", np.exp(2.0 * x)  # takes more bins than there are


def line_search(u, folds, others, bandwidths, n_eff, steps, top, criterion, method, score, least=0.0):
    """As a backend's, by the array code; bandwidths below ``least`` take too many bins."""
    line = Line(u.numpy(), np.full(len(u), 1.0 / len(u)), folds.numpy(), method, score)
    np.testing.assert_allclose(others.numpy(), 1.0 - line.held, rtol=1e-12)
    first, growth = bandwidths
    looks = SimpleNamespace(width=lambda k: first * math.exp(growth * (k - steps[0])))

    @functools.cache
    def sums(k):
        found = np.transpose([*line.sums(looks.width(k)), 0.5 + 0.0 * line.held])
        return np.where(looks.width(k) < least, np.nan, found)

    def loss(k):
        found = float(line.held @ line.said(looks.width(k), *sums(k).T[:5])[criterion])
        return math.inf if math.isnan(found) else found

    def expected(pilot):
        at = line.deviations(looks, pilot)
        found = {k: at(k) for k in range(pilot - 4, pilot + 5)}

        def error(k):
            bias, square, step = found[k]
            h = 12.0 * math.exp(growth * (k - pilot))
            return bias + (roughness(method, 1, step, score or 1.0) / (2.0 * math.sqrt(math.pi) * h) - square) / n_eff

        rows = [[square, 0.5 * (square - bias), 0.0, 0.0, 0.0, step] for bias, square, step in found.values()]
        return [np.zeros(6), *rows], round(descend(error, pilot, pilot - 4, min(pilot + 4, top)))

    best = min(steps, key=loss)
    found = [np.stack([sums(k) for k in steps], axis=1) for steps in (steps, range(best - 2, best + 3))]
    picks = [best, round(descend(loss, best, -31, top))]
    if not criterion:
        rows, pilot = expected(picks[1])
        picks.append(pilot)
        found += [rows] if method == "laplace" else [rows, expected(pilot)[0]]
    return torch.tensor(np.concatenate([*map(np.ravel, found), [*picks, 0][:3]]))


@pytest.mark.parametrize("rule", ["auto", "lscv", "lcv"])
@pytest.mark.parametrize("n", [9, 60, 700])
def test_the_choice_is_that_of_the_host(monkeypatch, n, rule):
    asked = []

    def search(*given):
        asked.append(given[5])
        return line_search(*given)

    kernels = SimpleNamespace(line_search=search)
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
            assert len(asked) <= 1 + (name == "nearly rounded"), "the device is read more than once"
            assert bool(asked) == (
                name not in ("noise", "rounded", "counts", "small", "large") and (n, name) != (9, "ties")
            )


@pytest.mark.parametrize(("share", "there"), [(0.95, True), (1.05, False)])
def test_what_takes_too_many_bins_is_chosen_on_the_host(monkeypatch, caplog, share, there):
    """Unless no such bandwidth is looked at."""
    x, found = next(columns(700))[1], []
    want = select_bandwidth(x)
    least = share * want.selection.multiples.min() * normal_reference("sdkde", 1, 700)

    def search(*given):
        found.append(line_search(*given, least))
        return found[-1]

    caplog.set_level("DEBUG", "sdkde")
    monkeypatch.setattr(Sample, "kernels", SimpleNamespace(line_search=search))
    monkeypatch.setattr(rules, "on_gpu", lambda x: True)
    got = rules.resolve("auto", torch.from_numpy(x)[:, None])
    assert got.factor == pytest.approx(want.factor, rel=1e-5)
    assert len(found) == 1 and found[0].isnan().any()
    assert ("more bins" in caplog.text) != there


def sampled(n, kind):
    rng = np.random.default_rng(n)
    u = np.sort(rng.normal(size=n) + (50.0 if kind == "apart" else 1.0) * (np.arange(n) % 2))
    often, folds = rng.integers(1, 3, n), rng.permutation(n) % 2
    u, folds = np.repeat(u, often), np.repeat(folds, often)
    return [torch.from_numpy(x) for x in (u, folds, 1.0 - np.bincount(folds) / len(u))]


@interpreted
@pytest.mark.parametrize(
    ("method", "score", "kind", "criteria"),
    [
        ("sdkde", 1.4, "apart", [1]),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("sdkde", 1.4, "", [0]),
                ("sdkde", None, "apart", [0]),
                ("kde", None, "apart", [0, 1, 2]),
                ("laplace", None, "", [0]),
            )
        ),
    ],
)
def test_kernels_are_the_array_code(monkeypatch, method, score, kind, criteria):
    from sdkde_triton import line

    length = 512 if criteria == [1] or not kind else 1024
    monkeypatch.setattr(line, "LENGTH", length)
    monkeypatch.setattr(line, "TILES", line.tl.constexpr(length // line.TILE))
    for criterion in criteria:
        given = *sampled(20, kind), (1.1, STEP), 18.0, range(-25, -30, -3), -24, criterion, method, score
        got, want = line.line_search(*given), line_search(*given)
        pilots = 0 if criterion else 1 if method == "laplace" else 2
        got[len(got) - 2 + pilots :] = want[len(got) - 2 + pilots :] = 0.0
        assert got.shape == want.shape and (got[-3:] == want[-3:]).all()
        got, want = (torch.split(x, [24, 60, len(x) - 84]) for x in (got, want))
        for one, other in zip(got[:2], want[:2]):
            one, other = one.reshape(-1, 6), other.reshape(-1, 6)
            np.testing.assert_allclose(one[:, :5], other[:, :5], rtol=1e-6)
            assert (one[:, 5] == 0.5).all() == (score is None)
        for one, other in zip(got[2][:-3].reshape(-1, 10, 6), want[2][:-3].reshape(-1, 10, 6)):
            said = [[x[1:, 0] - 2.0 * x[1:, 1] + x[0, 0], x[1:, 0], x[1:, 5]] for x in (one, other)]
            np.testing.assert_allclose(*map(torch.stack, said), rtol=1e-6)


@interpreted
def test_kernels_tell_what_takes_too_many_bins(monkeypatch):
    from sdkde_triton import line

    monkeypatch.setattr(line, "LENGTH", 256)
    monkeypatch.setattr(line, "TILES", line.tl.constexpr(1))
    given = *sampled(20, "apart"), (20.0, 2.0), 18.0, range(0, -4, -3), 0, 1, "kde", None
    there = line.line_search(*given)[:24].reshape(2, 2, 6)[..., :5].isnan()
    assert there[:, 1].all() and not there[:, 0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [5, 9, 60, 700, 20_000, most_of(1) + 9])
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
