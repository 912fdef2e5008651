"""Plans of points that nobody has all of: the same numbers as in one piece, and errors that name what is wrong."""

import pickle
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

import sdkde_core
from sdkde_core import scale
from sdkde_core.bandwidth.rules import RULES, resolve
from sdkde_core.estimator import blockwise, survey
from sdkde_core.estimator.blockwise import Shape
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.estimator.survey import Counting

RNG = np.random.default_rng(0)
N, M, D = 2549, 1101, 3
X, Y = RNG.normal(size=(N, D)) * [1.0, 10.0, 0.1], RNG.normal(size=(M, D)) * [1.0, 10.0, 0.1]
X[17] *= 30.0
W = RNG.random(N)
W[::7] = 0.0


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(blockwise, "NUMBERS", 1024 * D)


def asked_of(question, x, w=None):
    """The answer of all blocks."""
    merged = None
    for start, stop in Shape(*x.shape).shards:
        answer = question.of(x[start:stop], None if w is None else w[start:stop], start)
        merged = answer if start == 0 else question.merge(merged, answer)
    return merged


def plan(x=X, y=Y, w=None, **options):
    with ExitStack() as kept:
        return scale.job(kept, Request(Goal.DENSITY, weights=w, **options), x, y).plan


@pytest.mark.parametrize("precision", ["fast", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_the_numbers_are_those_of_one_piece(method, weighted, precision):
    options = {"method": method, "bandwidth": "silverman", "precision": precision, "backend": "numpy"}
    w = W if weighted else None
    for y in (Y, None):
        got = scale.estimate(X, y, weights=w, **options)
        expected = sdkde_core.estimate(X, y, weights=w, **options)
        tolerance = {"fast": 2e-3, "float64": 1e-9}[precision]
        size = sdkde_core.estimate(X, y, weights=w, **options | {"method": "kde"}) if method == "laplace" else expected
        assert (abs(got - expected) <= tolerance * abs(size)).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("isj", "lscv", "lcv")])
def test_bandwidths_over_blocks(rule, weighted):
    w = None
    if weighted:  # those that a choice is made from are others then
        w = W / W.sum()
    got = plan(y=None, w=w, bandwidth=rule, method="kde", backend="numpy").bandwidth
    with np.errstate(divide="ignore"):
        expected = resolve(rule, X, None if w is None else np.log(w), method="kde")
    rtol = 0.25 if weighted and rule == "auto" else 1e-10
    np.testing.assert_allclose(got.matrix, expected.matrix, rtol=rtol, atol=rtol * np.diag(expected.matrix).min())


@pytest.mark.parametrize("weighted", [False, True])
def test_quartiles_are_exact(weighted, monkeypatch):
    """By counting, with ties, far outliers, and a sample that says little."""
    monkeypatch.setattr(survey, "SORTED", 50)
    n, rng = 1237, np.random.default_rng(1)
    x = np.stack([rng.normal(size=n), np.round(rng.normal(size=n)), rng.standard_cauchy(n) * 1e300], axis=1)
    w = rng.random(n) if weighted else None
    n_eff, total = (float(n), None) if w is None else (w.sum() ** 2 / (w @ w), np.log(w.sum()))
    question = Counting.first(x[:40], x.min(axis=0), x.max(axis=0), n_eff, total)
    for _ in range(400):
        answer = asked_of(question, x, w)
        if question.listed:
            break
        question = question.next(answer)
    if w is None:
        expected = np.quantile(x, [0.25, 0.75], axis=0)
    else:
        sample = sdkde_core.bandwidth.sample.Sample(x / 1e10, w / w.sum(), n_eff)
        expected = 1e10 * (np.array(sample._quartiles()) - sample.x[0]) * sample.unit + x[0]
    np.testing.assert_allclose(question.quartiles(answer), expected, rtol=1e-9)


def test_what_cannot_be_is_said():
    bad = X.copy()
    bad[1024 + 5, 1] = np.nan
    not_finite = f"values that are not finite, the first nan at row {1024 + 5}, column 1"
    negative = np.where(np.arange(N) == 1024 + 3, -1.0, 1.0)
    cases = [
        ({"x": bad, "bandwidth": 1.0}, f"train has {not_finite}"),
        ({"w": negative, "bandwidth": 1.0}, f"weights has negative values, the first -1.0 at index {1024 + 3}"),
        ({"w": np.zeros(N), "bandwidth": 1.0}, "weights are all zero"),
        ({"y": bad, "bandwidth": 1.0}, f"query has {not_finite}"),
        ({"x": np.where([True, True, False], X, 4.0), "bandwidth": "silverman"}, "column 2 of train is constant"),
        ({"bandwidth": 1e-160}, "beyond 1e149 bandwidths"),
        ({"bandwidth": 1e-9, "precision": "float64"}, "holds up to 1.5e\\+04"),
        ({"bandwidth": "isj", "method": "kde"}, "isj' needs all samples in memory"),
        ({"method": "laplace", "negative": "renormalise", "bandwidth": 1.0}, "negative='renormalise' needs all"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            plan(**given)


def test_a_shard_without_weight_adds_nothing():
    w = np.where(np.arange(N) < 1024, 0.0, 1.0 + np.arange(N) / N)
    for method in ("kde", "sdkde", "laplace"):
        options = {"weights": w, "bandwidth": 0.7, "method": method, "backend": "numpy"}
        expected = sdkde_core.estimate(X, Y, **options)
        np.testing.assert_allclose(scale.estimate(X, Y, **options), expected, rtol=1e-4, atol=1e-6 * expected.max())


def test_the_identity_has_the_names_of_cards(monkeypatch):
    """Kernels cut the work by the card, so another model has other bits; another card of one model has not."""
    cards = {"cuda:0": "H100", "cuda:1": "H200", "cuda:2": "H200"}
    monkeypatch.setattr(blockwise, "gpu_name", cards.get)
    base = pickle.loads(pickle.dumps(plan(bandwidth=0.5, backend="numpy")))
    assert base.identity()["device"] == ["cpu", 1]
    found = [replace(base, device=device).identity() for device in cards]
    assert [one["device"] for one in found] == [["cuda", 1, "H100"], ["cuda", 1, "H200"], ["cuda", 1, "H200"]]
    assert found[0] != found[1] == found[2]
    two = replace(base, device="cuda:0", devices=("cuda:0", "cuda:2"))
    assert two.identity()["device"] == ["cuda", 2, "H100", "H200"]
