"""Criteria and steps of EM by Triton's kernels: against the array code, interpreted; and on a card."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton.language as tl
from interpreter import interpreted
from sdkde_triton import criteria, fits, samples

from sdkde_core import select_bandwidth
from sdkde_core.bandwidth import distinct, selection, shapes
from sdkde_core.bandwidth.pairs import Pairs
from sdkde_core.bandwidth.rules import resolve
from sdkde_core.bandwidth.sample import Sample
from sdkde_core.choice import registry
from sdkde_core.engine.launches import Launches, Lists

METHODS = ("kde", "sdkde", "laplace")
CPU = SimpleNamespace(
    left_out=criteria.left_out, narrowed=criteria.narrowed, terms=criteria.terms, shaped=fits.shaped,
    ordered=samples.ordered,
)  # fmt: skip


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
@pytest.mark.parametrize("kind", ["weighted", "light", "apart", pytest.param("rounded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("n", "d"), [(5, 1), (36, 2), *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW)])
def test_criteria_are_those_of_the_array_code(n, d, kind, method):
    u, weights = drawn(n, d, kind)
    bandwidths = [0.01, 0.3, 1.2]
    given = torch.from_numpy(u), torch.from_numpy(weights)
    said = criteria.left_out(*given, bandwidths, method).numpy()
    logs, signs, squares = criteria.terms(said, n, d, bandwidths, method)
    for i, want in enumerate(Pairs(u, weights, method).at(bandwidths)):
        scale, expected = np.maximum(want.log_density, logs[i]), want.sign * np.ones(n)
        off = signs[i] * np.exp(logs[i] - scale) - expected * np.exp(want.log_density - scale)
        # A Laplace estimate may cancel, and coordinates of 20 are rounded to 1e-6, 1e-4 of the narrowest bandwidth.
        rough = method == "laplace" or bandwidths[i] < 0.1
        allowed = (1e-3 if rough else 1e-5) * (1 + abs(want.log_density))
        np.testing.assert_array_less(abs(off), allowed)
        assert squares[i] == pytest.approx(want.log_square, rel=1e-6, abs=1e-5)


@pytest.fixture
def few(monkeypatch):
    """Room for few samples: the interpreter takes eight times as long for that of 512."""
    monkeypatch.setattr(fits, "MOST", tl.constexpr(64))


def shaped(d, kind):
    """Samples whose shape is of that kind: none, a scale per column, their correlation, or a matrix, twice; weights."""
    rng, n = np.random.default_rng([d, kind, 4]), 60 if kind == 4 else 40
    u, sides = rng.normal(size=(n, d)), rng.choice((-3.0, 3.0), n)
    if kind == 1:
        u[:, 0] = 0.05 * u[:, 0] + sides
    elif kind:
        u[:, 1] = 0.97 * u[:, 0] + 0.2 * u[:, 1]
    if kind == 3:
        u[:, :2] += np.c_[sides, -sides]
    elif kind == 4:  # twins, by which one scale is small; all of them are correlated, too
        base = rng.normal(size=(n // 2, d))
        base[:, 1] = base[:, 0] + 0.5 * base[:, 1]
        u = np.repeat(base, 2, axis=0) + 1e-4 * u
    weights = 10 ** rng.random(n) if kind == 2 else np.ones(n)
    return u, weights / weights.sum()


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero")  # of the interpreter
@pytest.mark.parametrize("kind", [1, 3, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (0, 2, 4))])
@pytest.mark.parametrize(
    ("d", "mixed"),
    [(2, True), *(pytest.param(d, mixed, marks=pytest.mark.slow) for d, mixed in ((3, False), (3, True), (17, True)))],
)
def test_shapes_are_those_of_the_array_code(few, d, mixed, kind):
    u, weights = shaped(d, kind)
    share, centred, n = float(weights @ weights), u - weights @ u, len(u)
    host = shapes.Fits(u, weights, (centred * weights[:, None]).T @ centred)
    want, why = shapes.find_shape(host, share, mixed=mixed)
    if d == 2 or (mixed and d == 3):
        assert (want is None) == (kind == 0) and ("", "scale", "correlation", "matrix", "matrix")[kind] in why
    asked = shapes.scale_of(weights, d), shapes.SCALE_LENGTHS, shapes.LENGTHS, shapes.LEAST
    # More samples, without weight, change no covariance.
    more = np.concatenate([u, u[:3]])
    given = torch.from_numpy(more), torch.from_numpy(np.concatenate([weights, np.zeros(3)]))
    found, (which, log_times, *inverse) = fits.shaped(
        *given, n, mixed, *asked, d * (d - 1) * share, shapes.enough(n, d)
    )
    inverse = np.reshape(inverse, (d, d))
    np.testing.assert_allclose(found, more @ inverse.T, atol=1e-12)
    assert (shapes.said(int(which), log_times) if which else "") == why
    if which:
        size = np.sqrt(np.diagonal(want))
        off = np.linalg.inv(inverse.T @ inverse) - want
        np.testing.assert_allclose(off / size[:, None] / size, 0.0, atol=1e-4)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_choice_is_the_same(monkeypatch, few, method):
    x, _ = drawn(24, 2, "equal")
    want = select_bandwidth(x, method=method)
    monkeypatch.setattr(Sample, "kernels", CPU)
    monkeypatch.setattr(distinct, "_logger", None)  # a kernel that fails is an error
    got = resolve("auto", torch.from_numpy(x), method=method)
    np.testing.assert_allclose(got.matrix, want.matrix, rtol=1e-4, atol=1e-6)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy's, which the interpreter computes by
@pytest.mark.parametrize(
    ("d", "method", "rule", "kind"),
    [
        (2, "laplace", "lscv", "apart"),
        pytest.param(2, "sdkde", "lcv", "equal", marks=pytest.mark.slow),
        *(pytest.param(9, method, "auto", "apart", marks=pytest.mark.slow) for method in METHODS),
    ],
)
def test_a_search_by_some_samples_finds_what_the_hosts_does(monkeypatch, few, d, method, rule, kind):
    for module in (distinct, selection):
        monkeypatch.setattr(module, "asked_first", lambda n: 20)
    x, _ = drawn(44, d, kind)
    want = select_bandwidth(x, method=method, rule=rule)
    monkeypatch.setattr(Sample, "kernels", CPU)
    monkeypatch.setattr(distinct, "_logger", None)  # a kernel that fails is an error
    got = resolve(rule, torch.from_numpy(x), method=method)
    np.testing.assert_allclose(got.selection.multiples, want.selection.multiples, rtol=1e-9)
    np.testing.assert_allclose(got.matrix, want.matrix, rtol=1e-4, atol=1e-6)


def unasked(asked):
    """The same, with nothing said of bandwidths, which takes the interpreter long; ``asked`` gets the samples."""
    left_out = {"left_out": lambda u, *_: asked.append(u.numpy()) or torch.zeros(0)}
    return SimpleNamespace(**vars(CPU) | left_out | {"terms": lambda *_: ((), (), ())})


def prepared(x):
    """Samples on a device as a choice looks at them, and as their bandwidths are asked for."""
    sample, asked = Sample(torch.from_numpy(x), None, len(x)), []
    sample.kernels = unasked(asked)
    return distinct.OnCard(sample, "lscv", True), sample, asked[0]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy's, which the interpreter computes by
@pytest.mark.parametrize(
    ("order", "size"), [("columns", 1.0), ("some", 1.0), ("far", 1.0), ("far", 1e160), ("", 1e-170)]
)
def test_a_device_measures_samples_as_the_host_does(order, size):
    x, _ = drawn(60, 2, "equal")
    x = size * (x + 1e6 * (order == "far"))
    given = {"columns": np.asfortranarray(x), "some": np.repeat(x, 2, axis=1)[::2, ::2]}.get(order, x)
    (found, sample, u), want = prepared(given), Sample(np.ascontiguousarray(given), None, len(given))
    np.testing.assert_allclose(sample.spread(), want.spread(), rtol=1e-9)
    np.testing.assert_array_equal(sample.ends, want.ends)
    if size == 1.0:
        np.testing.assert_allclose(u, selection.distinct(want, want.spread()).u, atol=1e-8)
    else:
        assert not found.good


@interpreted
@pytest.mark.parametrize("n", [5, 700, pytest.param(2500, marks=pytest.mark.slow)])
def test_quartiles_by_digits(n):
    x = np.random.default_rng(n).normal(size=(2, n)) * np.array([[1e-3], [1e9]])
    x[0, n // 3 :] = np.round(x[0, n // 3 :], 3)  # many are equal, and some are zeros of both signs
    x[1] = abs(x[1])
    taken = torch.arange(5)
    *_, columns = samples.ordered(torch.from_numpy(x), taken, taken, False)
    np.testing.assert_array_equal(columns[3:6], np.stack([x.min(1), x.max(1), x[:, 0]]))
    np.testing.assert_allclose(columns[0], x.std(1), rtol=1e-12)
    np.testing.assert_allclose(columns[1:3], np.quantile(x, [0.25, 0.75], axis=1), rtol=1e-14)


@interpreted
@pytest.mark.parametrize("n", [pytest.param(250, marks=pytest.mark.slow), 400])
@pytest.mark.parametrize("d", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_device_prepares_samples_as_the_host_does(monkeypatch, n, d):
    for module in (distinct, selection):
        monkeypatch.setattr(module, "most_of", lambda d: 300)
    x, _ = drawn(n, d, "equal")
    if n > 300:
        x[:2, 0] = x[2, 0] + np.array([0.0, 1e-9])  # two share a value, and a third is near
    found, sample, u = prepared(x)
    assert found.good
    host = selection.distinct(Sample(x, None, n), sample.spread())
    np.testing.assert_allclose(u, host.u, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.weights, host.weights)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy's, which the interpreter computes by
@pytest.mark.parametrize("what", ["", "equal", "rounded", "ties", "gap", "constant", "nan"])
def test_a_device_says_what_the_host_has_to_prepare(what):
    x, _ = drawn(100, 2, "equal")
    if what == "equal":
        x[7] = x[90]
    elif what == "rounded":
        x[:, 1] = np.round(x[:, 1], 1)
    elif what == "ties":
        x[:20, 1] = 0.5
    elif what == "gap":
        x[:3, 1] += 100.0
    elif what:
        x[:, 1] = {"constant": 1.0, "nan": np.nan}[what]
    assert prepared(x)[0].good == (not what)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy's, which the interpreter computes by
def test_a_number_that_is_none_is_named(monkeypatch):
    x, _ = drawn(60, 2, "equal")
    x[7, 1] = np.nan
    monkeypatch.setattr(Sample, "kernels", unasked([]))
    with pytest.raises(ValueError, match="row 7, column 1"):
        resolve("lscv", torch.from_numpy(x))


def test_kernels_that_fail_are_done_without(monkeypatch):
    def fails(*given):
        raise RuntimeError("no kernel image is available for execution on the device")

    x, _ = drawn(60, 2, "equal")
    want = select_bandwidth(x)
    monkeypatch.setattr(Sample, "kernels", SimpleNamespace(**dict.fromkeys(vars(CPU), fails)))
    np.testing.assert_allclose(resolve("auto", torch.from_numpy(x)).matrix, want.matrix, rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["equal", "weighted", "apart", "rounded"])
@pytest.mark.parametrize("d", [1, 2, 16, 33, 64])
def test_the_choice_on_a_card_is_that_on_the_cpu(monkeypatch, d, kind, method):
    monkeypatch.setattr(distinct, "_logger", None)  # a kernel that fails is an error
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("n", "d"), [(700, 3), (2048, 16), (6000, 40)])
def test_launches_of_a_choice_are_kept_with_the_same_bits_on_a_card(monkeypatch, n, d):
    runs, run = [], Launches.run
    monkeypatch.setattr(Launches, "run", lambda *given: runs.append(1) or run(*given))
    for device, call in itertools.product(range(torch.cuda.device_count()), range(8)):
        numbers = torch.randn(n * d + 1, device=f"cuda:{device}", dtype=torch.float64)[call == 3 :][: n * d]
        x = numbers.view(d, n).T if call % 2 else numbers.view(n, d)
        x[::2] *= 0.5
        with torch.cuda.stream(torch.cuda.Stream(device) if call == 6 else torch.cuda.current_stream(device)):
            torch.cuda.synchronize(device)
            for rule in ("auto", "lscv"):
                got = select_bandwidth(x, rule=rule).matrix
                with monkeypatch.context() as patched:
                    patched.setattr(Lists, "serve", lambda self, key, given, launch, served: launch()[0])
                    np.testing.assert_array_equal(got, select_bandwidth(x, rule=rule).matrix)
    assert len(runs) >= 4 * torch.cuda.device_count(), "there is no list"
