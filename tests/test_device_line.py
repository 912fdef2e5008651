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
from sdkde_core.bandwidth import distinct, rules, selection
from sdkde_core.bandwidth.line import STEP, Line, descend
from sdkde_core.bandwidth.normal import normal_reference, roughness
from sdkde_core.bandwidth.sample import Sample, most_of, spread_of

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


def line_search(
    every, std, index, bandwidths, steps, top, splits, criterion, method, score, some=None, least=0.0
):  # fmt: skip
    """As a backend's, by the array code; bandwidths below ``least`` take too many bins."""
    every, index, (first, growth) = every.numpy(), index.numpy(), bandwidths
    u = every if some is None else some.numpy()
    n, gaps, extent = len(u), np.diff(u, prepend=u[:1]), u[-1] - u[0]
    value = np.cumsum(gaps != 0.0)
    low, high = np.quantile(every, (0.25, 0.75))
    close, odd = (gaps > 1e-12 * extent) & (gaps <= extent / (100 * n + 1000)), (gaps > 0.0) & (gaps < 1e-15 * extent)
    often, folds = np.bincount(value)[value], (index[index <= value[-1]] % splits)[value]
    said = every[0], every[-1], std, low, high - low, close.sum(), odd.sum(), value[-1] + 1, often.sum()
    head = [*said, *np.bincount(folds, minlength=splits), *np.zeros(8 - splits)]
    if not 1e-140 < std < 1e140 or value[-1] + 1 < splits:
        pilots = 0 if criterion else 1 if method == "laplace" else 2
        return torch.tensor([0, 0, 0, *head, *[math.nan] * (6 * splits * (len(steps) + 5) + 60 * pilots), *u])
    line, n_eff = Line(u - u[0], np.full(n, 1.0 / n), folds, method, score), n**2 / often.sum()
    first *= spread_of(np.array([[std], [low], [high]]))[0]
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
    return torch.tensor(np.concatenate([[*picks, 0][:3], head, *map(np.ravel, found), u[: n * (n <= 2048)]]))


@pytest.mark.parametrize("rule", ["auto", "lscv", "lcv"])
@pytest.mark.parametrize("n", [9, 60, 700])
def test_the_choice_is_that_of_the_host(monkeypatch, n, rule):
    asked, prepared = [], []

    def search(*given):
        asked.append(given)
        return line_search(*given)

    def prepare(*given, distinct=selection.distinct):
        prepared.append(given)
        return distinct(*given)

    kernels = SimpleNamespace(line_search=search)
    monkeypatch.setattr(distinct, "_logger", None)  # a kernel that fails is an error
    for name, x in columns(n):
        for method in METHODS[: 2 if rule == "lcv" else 3]:
            want = select_bandwidth(x, rule=rule, method=method)
            asked.clear(), prepared.clear()
            with monkeypatch.context() as patched:
                patched.setattr(Sample, "kernels", kernels)
                patched.setattr(rules, "on_gpu", lambda x: True)
                patched.setattr(selection, "distinct", prepare)
                got = rules.resolve(rule, torch.from_numpy(x)[:, None], method=method)
            assert got.selection.reason == want.selection.reason
            np.testing.assert_allclose(got.factor, want.factor, rtol=1e-5)
            assert (got.step, got.score_bandwidth) == pytest.approx((want.step, want.score_bandwidth))
            assert len(asked) <= 1 + (name in ("nearly rounded", "ties")), "the device is read more than once"
            on_host = name in ("noise", "rounded", "counts", "small", "large") or (n, name) == (9, "ties")
            assert bool(prepared) == on_host


@pytest.mark.parametrize(("share", "there"), [(0.95, True), (1.05, False)])
def test_what_takes_too_many_bins_is_chosen_on_the_host(monkeypatch, caplog, share, there):
    """Unless no such bandwidth is looked at."""
    x, found = next(columns(700))[1], []
    want = select_bandwidth(x)
    least = share * want.selection.multiples.min() * normal_reference("sdkde", 1, 700)

    def search(*given):
        found.append(line_search(*given, least=least))
        return found[-1]

    caplog.set_level("DEBUG", "sdkde")
    monkeypatch.setattr(Sample, "kernels", SimpleNamespace(line_search=search))
    monkeypatch.setattr(rules, "on_gpu", lambda x: True)
    got = rules.resolve("auto", torch.from_numpy(x)[:, None])
    assert got.factor == pytest.approx(want.factor, rel=1e-5)
    assert len(found) == 1 and found[0].isnan().any()
    assert ("more bins" in caplog.text) != there


def sampled(n, kind):
    """Samples in order, some of them equal, their standard deviation, and a permutation; a bandwidth for them."""
    rng = np.random.default_rng(n)
    u = np.sort(rng.normal(size=n) + (50.0 if kind == "apart" else 1.0) * (np.arange(n) % 2))
    u = np.repeat(u, rng.integers(1, 3, n))
    spread = spread_of(np.array([[u.std()], *np.quantile(u, ((0.25,), (0.75,)))]))[0]
    return *(torch.from_numpy(x) for x in (u, np.array(u.std()), rng.permutation(len(u)))), (1.1 / spread, STEP)


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
    monkeypatch.setattr(line, "SPAN", 16)
    monkeypatch.setattr(line, "TILES", line.tl.constexpr(length // line.TILE))
    for criterion in criteria:
        given = *sampled(20, kind), range(-25, -30, -3), -24, 2, criterion, method, score
        got, want = line.line_search(*given), line_search(*given)
        pilots = 0 if criterion else 1 if method == "laplace" else 2
        got[1 + pilots : 3] = want[1 + pilots : 3] = 0.0
        assert got.shape == want.shape and (got[:3] == want[:3]).all()
        np.testing.assert_allclose(got[3:14], want[3:14], rtol=1e-13)
        assert (got[-len(given[0]) :] == given[0]).all()
        got, want = (torch.split(x, [20, 24, 60, 60 * pilots, len(given[0])])[1:4] for x in (got, want))
        for one, other in zip(got[:2], want[:2]):
            one, other = one.reshape(-1, 6), other.reshape(-1, 6)
            np.testing.assert_allclose(one[:, :5], other[:, :5], rtol=1e-6)
            assert (one[:, 5] == 0.5).all() == (score is None)
        for one, other in zip(got[2].reshape(-1, 10, 6), want[2].reshape(-1, 10, 6)):
            said = [[x[1:, 0] - 2.0 * x[1:, 1] + x[0, 0], x[1:, 0], x[1:, 5]] for x in (one, other)]
            np.testing.assert_allclose(*map(torch.stack, said), rtol=1e-6)


@interpreted
def test_kernels_tell_what_takes_too_many_bins(monkeypatch):
    from sdkde_triton import line

    monkeypatch.setattr(line, "LENGTH", 256)
    monkeypatch.setattr(line, "TILES", line.tl.constexpr(1))
    given = *sampled(20, "apart")[:3], (0.8, 2.0), range(0, -4, -3), 0, 2, 1, "kde", None
    there = line.line_search(*given)[20:44].reshape(2, 2, 6)[..., :5].isnan()
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
