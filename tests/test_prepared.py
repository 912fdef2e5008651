"""Prepared training sets: the numbers of estimate, with the training samples moved and packed once."""

import copy
import pickle
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
import reference
from sdkde_numpy.backend import NumpyBackend
from sdkde_numpy.info import INFO

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.protocol import TOLERANCES, BackendUnavailable, Reduction, Support

METHODS = ("kde", "sdkde", "laplace")
SCALE = np.array([0.01, 1.0, 100.0])
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(300, 3)) + 5) * SCALE, (RNG.normal(size=(80, 3)) + 5) * SCALE
W = RNG.random(300) * (RNG.random(300) > 0.2)
H = 0.4 * X.std(0)


def _register(monkeypatch, name, implementation, **info):
    """A backend of its own, the only one."""
    monkeypatch.setitem(sys.modules, f"{name}_backend", SimpleNamespace(Implementation=implementation))
    info = replace(INFO, name=name, implementation=f"{name}_backend:Implementation", **info)
    record = registry.Record(name, "ok", "installed", "tests", "1.0", f"{name}_backend:INFO", info)
    monkeypatch.setattr(registry, "made", {})
    monkeypatch.setattr(registry, "records", lambda: (record,))


@pytest.fixture
def limited(monkeypatch):
    """The NumPy backend as if its formula held to a limit, checking what it is given."""

    def limit(extent, takes_all=False):
        class Strict(NumpyBackend):
            def prepare(self, problem, columns):
                assert np.sqrt((columns.points**2).sum(1)).max() <= problem.extent
                assert np.isfinite(columns.log_weights).all()
                assert problem.n == len(columns.points)
                return problem, super().prepare(problem, columns)

            def reduce(self, problem, queries, state, own_offset=0):
                made, state = state
                assert (problem.n, problem.reduction) == (made.n, made.reduction)
                assert problem.extent <= made.extent
                if queries is not None:
                    assert np.sqrt((queries**2).sum(1)).max(initial=0.0) <= problem.extent
                    assert problem.m == len(queries)
                return super().reduce(problem, queries, state, own_offset)

        def supports(problem):
            return Support(takes_all or problem.extent <= extent, f"holds to {extent}")

        _register(monkeypatch, "strict", Strict, extent_limit=lambda problem: extent, supports=supports)

    return limit


# --- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bandwidth", ["silverman", "scott", "given"])
@pytest.mark.parametrize("method", METHODS)
def test_batches_of_any_size_are_right_to_ten_digits(method, bandwidth, weighted):
    options = {"method": method, "bandwidth": H if bandwidth == "given" else bandwidth}
    options["weights"] = W if weighted else None
    ready = sdkde_core.prepare(X, precision="float64", **options)
    want = sdkde_core.estimate(X, Y, precision="float64", **options)
    batches = [ready.estimate(Y[a:b]) for a, b in ((0, 1), (1, 3), (3, 40), (40, 80))]
    np.testing.assert_allclose(np.concatenate(batches), want, rtol=1e-10)
    np.testing.assert_allclose(ready.estimate(X), sdkde_core.estimate(X, precision="float64", **options), rtol=1e-10)
    if bandwidth == "given":
        np.testing.assert_allclose(want, reference.estimate(X, Y, **options), rtol=1e-10)
    if method != "laplace":
        np.testing.assert_allclose(ready.estimate(Y, log=True), np.log(want), rtol=1e-10)


@pytest.mark.parametrize("precision", ["fast", "high", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_for_queries_among_the_samples(method, precision):
    options = {"method": method, "bandwidth": H, "precision": precision, "weights": W}
    y = (X[:50] + X[50:100]) / 2
    assert np.array_equal(sdkde_core.prepare(X, **options).estimate(y), sdkde_core.estimate(X, y, **options))


@pytest.mark.parametrize("precision", ["fast", "high", "float64"])
@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize("far", [3.0, 100.0, 1e4])
def test_levels_hold_far_from_the_samples(far, method, precision):
    y = np.concatenate([Y, (Y - 5 * SCALE) * far])
    want = reference.estimate(X, y, method=method, bandwidth=H, log=True)
    got = sdkde_core.prepare(X, method=method, bandwidth=H, precision=precision).estimate(y, log=True)
    assert (abs(got - want) <= 2 * TOLERANCES[precision][Reduction.LOG_SUM].at(want)).all()


@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize("h", ["scott", 0.5, "silverman"])
def test_the_gradient(method, h):
    x, y = X / SCALE, Y / SCALE
    ready = sdkde_core.prepare(x, method=method, bandwidth=h, precision="float64", weights=W)
    want = sdkde_core.grad_log_density(x, y, method=method, bandwidth=h, precision="float64", weights=W)
    np.testing.assert_allclose(ready.grad_log_density(y), want, rtol=1e-9)
    np.testing.assert_allclose(ready.grad_log_density(y[:1]), want[:1], rtol=1e-9)
    assert ready.grad_log_density(y[:0]).shape == (0, 3)


@pytest.mark.parametrize("method", METHODS)
def test_a_single_sample_and_one_dimension(method):
    options = {"method": method, "bandwidth": 0.5, "precision": "float64"}
    ready, plain = sdkde_core.prepare([[1.0, 2.0]], **options), {"method": method, "bandwidth": 0.5}
    for y in ([[1.0, 2.0], [1.5, 2.0]], [[1.0, 2.0 + 1e-9]], [[40.0, 2.0]]):
        np.testing.assert_allclose(ready.estimate(y), reference.estimate([[1.0, 2.0]], y, **plain), rtol=1e-9)
    ready = sdkde_core.prepare(X[:, 1], **options)
    want = reference.estimate(X[:, 1], Y[:, 1], **plain)
    for y in (Y[:, 1], Y[:, 1:2]):
        np.testing.assert_allclose(ready.estimate(y), want, rtol=1e-9)


def test_attributes():
    ready = sdkde_core.prepare(X, bandwidth="scott", weights=W)
    assert isinstance(ready, sdkde_core.Prepared)
    assert (ready.n_train, ready.n_dimensions, ready.method) == (300, 3, "sdkde")
    assert (ready.precision, ready.backend, ready.device) == ("high", "numpy", "cpu")
    factor = (W.sum() ** 2 / (W**2).sum()) ** (-2 / 7)
    np.testing.assert_allclose(ready.bandwidth.matrix, np.cov(X.T, aweights=W, ddof=1) * factor)
    assert repr(ready).startswith("Prepared(sdkde, 300 × 3, scott: full matrix")
    assert repr(ready).endswith("high, numpy on cpu)")


# --- arrays in and out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "float32", "torch", "strict", "fortran"])
def test_results_are_of_the_querys_kind(kind):
    torch = pytest.importorskip("torch")
    convert = {
        "list": np.ndarray.tolist,
        "float32": lambda a: a.astype("f4"),
        "torch": torch.from_numpy,
        "strict": array_api_strict.asarray,
        "fortran": np.asfortranarray,
    }[kind]
    for train in (X, torch.from_numpy(X), np.asfortranarray(X)):
        ready = sdkde_core.prepare(train, bandwidth=H)
        query = convert(Y)
        got, want = ready.estimate(query), sdkde_core.estimate(train, query, bandwidth=H)
        assert type(got) is type(want)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-9)
        empty = ready.estimate(query[:0] if kind != "strict" else query[:0, :])
        assert type(empty) is type(want)
        assert (tuple(empty.shape), empty.dtype) == ((0,), want.dtype)
    assert ready.estimate([]).shape == (0,)


@pytest.mark.parametrize(
    ("train", "query", "out", "precision"),
    [("f4", "f4", "f4", "fast"), ("f4", "f8", "f8", "fast"), ("f8", "f4", "f8", "high"), ("i4", "f4", "f8", "high")],
)
def test_dtypes_are_promoted_and_the_level_is_trains(train, query, out, precision):
    ready = sdkde_core.prepare((X / SCALE * 9).astype(train), bandwidth=4.0)
    assert ready.precision == precision
    assert ready.estimate((Y / SCALE * 9).astype(query)).dtype == np.dtype(out)


# --- once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("precision", ["fast", "float64"])
def test_bits_do_not_depend_on_the_batches_before(precision, outlier):
    """Of whatever extents and sizes they are: alone, few rows are summed by another formula."""
    x = np.concatenate([X, X[:1] + 300 * H]) if outlier else X
    y = Y - 5 * SCALE
    farthest = y[np.argsort(abs(y / SCALE).sum(1))[-2:]]
    batches = [rows * far + 5 * SCALE for rows in (farthest, y) for far in (1, 5, 400, 2000, 1e5)]
    options = {"method": "kde", "bandwidth": H, "precision": precision}
    fresh = [sdkde_core.prepare(x, **options).estimate(y, log=True) for y in batches]
    ready = sdkde_core.prepare(x, **options)
    for order in (range(10), (9, 5, 0, 6, 1, 7, 8, 2, 3, 4), range(9, -1, -1)):
        for i in order:
            assert np.array_equal(ready.estimate(batches[i], log=True), fresh[i])


# --- far points, zero weights -----------------------------------------------------------------------------------


def _far(rng, zeros):
    x, y = rng.normal(size=(400, 3)), rng.normal(size=(300, 3))
    x[[3, 50]] *= 1e3
    y[0] *= 1e4
    w = rng.random(400)
    w[[3, 7, 8]] = 0
    return x, y, w if zeros else None


@pytest.mark.parametrize("takes_all", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_far_samples_and_queries_are_summed_apart(method, zeros, takes_all, limited):
    x, y, w = _far(np.random.default_rng(5), zeros)
    limited(60.0, takes_all)
    options = {"method": method, "bandwidth": 0.5, "weights": w}
    ready = sdkde_core.prepare(x, precision="float64", **options)
    want = reference.estimate(x, y, **options)
    for rows in (slice(None), slice(1, None), slice(1), slice(None)):  # of the third, one row, all is far
        np.testing.assert_allclose(ready.estimate(y[rows]), want[rows], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("far", [30, 70])
def test_most_samples_are_far(far, limited):
    x = np.random.default_rng(5).normal(size=(100, 3))
    x[: far // 2] += 1e3
    x[far // 2 : far] -= 1e3
    limited(60.0, takes_all=True)
    ready = sdkde_core.prepare(x, method="kde", bandwidth=0.5, precision="float64")
    for batch in (x[far:], x[:far], x):
        want = reference.estimate(x, batch, method="kde", bandwidth=0.5)
        np.testing.assert_allclose(ready.estimate(batch), want, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_every_sample_with_weight_is_far(method, limited):
    limited(30.0)
    x, y = np.random.default_rng(6).normal(size=(100, 2)), np.random.default_rng(7).normal(size=(50, 2))
    x[:5] += 1e3
    options = {"method": method, "bandwidth": 1.0, "weights": np.r_[np.ones(5), np.zeros(95)]}
    ready = sdkde_core.prepare(x, precision="float64", **options)
    for batch in (y, y + 1e3, np.concatenate([y, y + 1e3])):
        got, want = ready.estimate(batch), reference.estimate(x, batch, **options)
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-300)


# --- threads ----------------------------------------------------------------------------------------------------


def test_threads_share_a_prepared_set():
    ready = sdkde_core.prepare(X, bandwidth=H, weights=W)
    batches = [(Y - 5 * SCALE) * far + 5 * SCALE for far in (1, 4, 40, 400)] * 4
    want = [sdkde_core.prepare(X, bandwidth=H, weights=W).estimate(y, log=True) for y in batches[:4]] * 4
    scores = sdkde_core.prepare(X, bandwidth=H, weights=W).grad_log_density(Y)
    right = [False] * len(batches)

    def work(i):
        same = np.array_equal(ready.estimate(batches[i], log=True), want[i])
        right[i] = same and np.array_equal(ready.grad_log_density(Y), scores)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(right)


# --- what is refused --------------------------------------------------------------------------------------------


def _message(call, *arguments, **options):
    with pytest.raises((TypeError, ValueError, BackendUnavailable)) as caught:
        call(*arguments, **options)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        Y[0],
        np.ones(5),
        np.ones((5, 2)),
        np.ones((2, 2, 3)),
        np.where(np.arange(240).reshape(80, 3) == 7, np.nan, Y),
        np.where(np.arange(240).reshape(80, 3) == 7, -np.inf, Y),
        Y.astype(complex),
        [[1.0, 2.0], [1.0]],
        np.ma.masked_array(Y, Y > 1),
    ],
    ids=range(9),
)
def test_queries_are_refused_as_estimate_does(query):
    ready = sdkde_core.prepare(X, bandwidth=H)
    for mine, its in ((ready.estimate, sdkde_core.estimate), (ready.grad_log_density, sdkde_core.grad_log_density)):
        assert _message(mine, query) == _message(its, X, query, bandwidth=H)


def test_there_is_no_query_of_none():
    with pytest.raises(TypeError, match="query"):
        sdkde_core.prepare(X, bandwidth=H).estimate(None)


# --- immutable, and at home elsewhere -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("h", ["auto", "silverman", "scott"])
def test_copies_and_pickles_give_the_same_bits(method, h):
    ready = sdkde_core.prepare(X[:100], method=method, bandwidth=h, weights=W[:100])
    want = ready.estimate(Y)
    for other in (copy.copy(ready), copy.deepcopy(ready), pickle.loads(pickle.dumps(ready))):
        assert np.array_equal(other.estimate(Y), want)
        assert repr(other) == repr(ready)
        assert (other.bandwidth.selection is not None) is (h == "auto")
    again = pickle.loads(pickle.dumps(ready.bandwidth))
    assert np.array_equal(again.matrix, ready.bandwidth.matrix)


def test_where_its_backend_is_not_another_takes_over(monkeypatch):
    """Unless the user named one: a named backend never falls back."""
    kept = {}
    with monkeypatch.context() as patch:
        _register(patch, "here", NumpyBackend)
        for name in ("auto", "here"):
            ready = sdkde_core.prepare(X, backend=name, bandwidth=H, precision="float64")
            assert ready.backend == "here"
            kept[name] = pickle.dumps(ready), ready.estimate(Y)
    packed, want = kept["auto"]
    there = pickle.loads(packed)
    assert there.backend == "numpy"
    np.testing.assert_allclose(there.estimate(Y), want, rtol=1e-10)
    with pytest.raises(BackendUnavailable, match="'here' is unknown"):
        pickle.loads(kept["here"][0])


def test_nothing_of_it_can_be_changed():
    ready = sdkde_core.prepare(X, bandwidth=[0.1, 0.2, 0.3])
    for name in ("bandwidth", "method", "backend"):
        with pytest.raises(AttributeError):
            setattr(ready, name, "other")
    for h in (ready.bandwidth, pickle.loads(pickle.dumps(ready.bandwidth))):
        with pytest.raises(ValueError, match="read-only"):
            h.factor[0] = 0.0
        with pytest.raises(AttributeError):
            h.factor = np.zeros(3)
    given = np.array([0.1, 0.2, 0.3])
    h = sdkde_core.Bandwidth(3, given)
    given[:] = 0.0
    assert h.factor.tolist() == [0.1, 0.2, 0.3]


@pytest.mark.slow
def test_modes_start_from_all_of_few_samples():
    x = np.random.default_rng(9).exponential(size=400)
    density = sdkde_core.prepare(x, coordinates="log")
    np.testing.assert_allclose(density.modes(), density.modes(x), atol=1e-6)
