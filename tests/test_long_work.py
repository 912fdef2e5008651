"""Work that takes long: batches that somebody watches, with queries and results that are never whole in memory."""

import sys
import threading
import tracemalloc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
from pairwise import cases

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.choice.cost import predict
from sdkde_core.choice.hardware import cpu
from sdkde_core.engine.threads import map_threads, telling
from sdkde_core.estimator import batches
from sdkde_core.protocol import TOLERANCES, BackendUnavailable, Columns, Problem, Reduction, Support

RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(700, 2)), RNG.normal(size=(1100, 2)), RNG.random(700)
H = 0.4


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Several batches in both passes, the last one short."""
    monkeypatch.setattr(batches, "ROWS", 256)


@pytest.fixture
def mapped(tmp_path):
    """A memory map of the queries, and a place for results."""
    np.save(tmp_path / "y.npy", Y)
    out = np.lib.format.open_memmap(tmp_path / "p.npy", "w+", np.float64, (len(Y),))
    return np.load(tmp_path / "y.npy", mmap_mode="r"), out


class Watch:
    def __init__(self):
        self.told = []

    def __call__(self, done, rows):
        self.told.append((done, rows))

    def steps(self, rows):
        assert all(total == rows for _, total in self.told)
        assert self.told[-1][0] == rows
        return np.diff([0, *(done for done, _ in self.told)]).tolist()


def near(got, want, precision="high"):
    np.testing.assert_allclose(got, want, atol=2.1 * TOLERANCES[precision][Reduction.LOG_SUM].absolute, rtol=2e-6)


# --- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "precision", "weighted", "prepared"),
    cases(("kde", "sdkde", "laplace"), ("fast", "high", "float64"), (False, True), (False, True)),
)
def test_the_numbers_of_batches_are_those_of_the_whole(method, precision, weighted, prepared, mapped):
    query, out = mapped
    options = {"method": method, "precision": precision, "bandwidth": H, "weights": W if weighted else None}
    watch = Watch()
    want = sdkde_core.estimate(X, Y, **options)
    if prepared:
        ready = sdkde_core.prepare(X, **options)
        got = ready.estimate(query, out=out, progress=watch)
        moved = []
        assert np.array_equal(ready.estimate(Y, progress=print), got)
    else:
        got = sdkde_core.estimate(X, query, out=out, progress=watch, **options)
        moved = [256, 256, 188] if method == "sdkde" else []
    assert got is out
    assert watch.steps(len(Y) + sum(moved)) == [*moved, 256, 256, 256, 256, 76]
    scale = want.max() if method == "laplace" else want
    near((got - want) / scale, np.zeros(len(Y)), precision)


def test_the_same_call_gives_the_same_bits_and_where_rows_are_alone_those_of_the_whole(mapped):
    query, out = mapped
    options = {"method": "kde", "bandwidth": H}
    got = sdkde_core.estimate(X, query, out=out, **options).copy()
    assert np.array_equal(sdkde_core.estimate(X, Y, progress=lambda *_: None, **options), got)
    ready = sdkde_core.prepare(X, **options)
    parts = [ready.estimate(Y[i : i + 256]) for i in range(0, len(Y), 256)]
    assert np.array_equal(np.concatenate(parts), ready.estimate(Y, progress=lambda *_: None))


def test_the_other_calls_say_how_far_they_are():
    watch = Watch()
    ready = sdkde_core.prepare(X, bandwidth=H, progress=watch)
    assert watch.steps(700) == [256, 256, 188]
    near(ready.estimate(Y, log=True), sdkde_core.estimate(X, Y, bandwidth=H, log=True))
    options = {"method": "kde", "kernel": "tophat", "bandwidth": 0.7}
    near(sdkde_core.estimate(X, Y, out=np.empty(len(Y)), **options), sdkde_core.estimate(X, Y, **options))
    watch = Watch()
    near(sdkde_core.debias(X, bandwidth=H, progress=watch), sdkde_core.debias(X, bandwidth=H))
    assert watch.steps(700) == [256, 256, 188]
    want = sdkde_core.grad_log_density(X, Y, bandwidth=H)
    for method, steps in (("sdkde", [256, 256, 188]), ("kde", []), ("laplace", [])):
        watch, want = Watch(), sdkde_core.grad_log_density(X, Y, bandwidth=H, method=method)
        near(sdkde_core.grad_log_density(X, Y, bandwidth=H, method=method, progress=watch), want)
        assert watch.steps(1100 + sum(steps)) == [*steps, 256, 256, 256, 256, 76]
    watch = Watch()
    near(ready.grad_log_density(Y[:300], progress=watch), sdkde_core.grad_log_density(X, Y[:300], bandwidth=H))
    assert watch.steps(300) == [256, 44]
    watch = Watch()
    sdkde_core.prepare(X, bandwidth=H, method="kde", progress=watch)
    assert not watch.told


@pytest.mark.parametrize(
    ("bandwidth", "adaptive"),
    [pytest.param(1e-3, None, marks=pytest.mark.slow), (0.4, None), pytest.param(0.4, 0.5, marks=pytest.mark.slow)],
)
def test_numba_tells_of_rows_without_batches(bandwidth, adaptive):
    """The same bits with progress: batches would have neighbours apart, which costs most where kernels are narrow."""
    pytest.importorskip("numba")
    n = 30_000 if adaptive is None else 8000
    x = np.random.default_rng(3).normal(size=(n, 2))
    options, first, second = {"bandwidth": bandwidth, "adaptive": adaptive, "backend": "numba"}, Watch(), Watch()
    ready = sdkde_core.prepare(x, progress=first, **options)
    want = sdkde_core.prepare(x, **options).estimate(x, log=True)
    got = ready.estimate(x, log=True, progress=second)
    np.testing.assert_array_equal(got, want) if adaptive is None else near(got, want)
    assert sum(first.steps(n)) == sum(second.steps(n)) == n
    nested = Watch()
    ready.estimate(x, progress=lambda done, rows: nested(done, rows) or ready.estimate(x[:5000]))
    assert sum(nested.steps(n)) == n and min(nested.steps(n)) > 0
    with pytest.raises(ZeroDivisionError):
        ready.estimate(x, progress=lambda done, rows: 1 / 0)
    with pytest.raises(SystemExit):
        ready.estimate(x, progress=lambda done, rows: sys.exit(3))
    with pytest.raises(StopIteration):
        ready.estimate(x, progress=lambda done, rows: next(iter(())))
    assert np.array_equal(ready.estimate(x, log=True), want)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_told_while_others_are_summed(threads):
    told, heard = [], threading.Event()

    def task(i):
        assert i < 5 or heard.wait(10.0)

    with telling(70, lambda rows: (told.append(rows), heard.set())):
        map_threads(task, range(10), threads, told=True)
        assert len(told) > 1 and sum(told) == 69  # what follows, as rows that are summed apart, may take a while
    assert sum(told) == 70


@pytest.mark.parametrize("h", [0.01, 3.0])
def test_numba_tells_of_all_rows(h):
    backend, told = pytest.importorskip("sdkde_numba.backend").NumbaBackend(skip=h < 1.0), []
    problem = Problem(Reduction.MEAN, 1100, 700, 2, extent=5.0 / h)
    state = backend.prepare(problem, Columns(X / h, np.full(700, -np.log(700.0))))
    with telling(1100, told.append):
        backend.reduce(problem, Y / h, state)
        assert sum(told) == 1089  # 99 %


def test_resubstitution_and_empty_queries():
    watch = Watch()
    near(sdkde_core.estimate(X, bandwidth=H, log=True, progress=watch), sdkde_core.estimate(X, bandwidth=H, log=True))
    assert watch.steps(1400) == [256, 256, 188] * 2
    for query in (Y[:0], []):
        got = sdkde_core.estimate(X, query, bandwidth=H, progress=True)
        assert (got.shape, got.dtype) == ((0,), np.dtype("f8"))
        assert sdkde_core.grad_log_density(X, query, bandwidth=H, progress=True).shape == (0, 2)
        out = np.empty(0)
        assert sdkde_core.estimate(X, query, bandwidth=H, out=out) is out


@pytest.mark.parametrize(
    ("train", "query", "dtype", "precision"),
    [("f4", "f4", "f4", "fast"), ("f4", "f8", "f8", "high"), ("f8", "f4", "f8", "high"), ("f4", "list", "f8", "high")],
)
def test_dtypes_and_precision_are_those_of_both(train, query, dtype, precision):
    x, y = X.astype(train), Y.tolist() if query == "list" else Y.astype(query)
    want = sdkde_core.estimate(x, y, bandwidth=H)
    got = sdkde_core.estimate(x, y, bandwidth=H, progress=lambda *_: None)
    assert got.dtype == want.dtype == np.dtype(dtype)
    near(np.log(got), np.log(want), precision)
    out = np.empty(len(Y), "f4")
    assert sdkde_core.estimate(x, y, bandwidth=H, out=out) is out
    np.testing.assert_allclose(out, want, rtol=2e-3)


@pytest.mark.parametrize("kind", ["torch", "strict"])
def test_other_libraries_arrays(kind, mapped):
    array = pytest.importorskip("torch").from_numpy if kind == "torch" else array_api_strict.asarray
    got = sdkde_core.estimate(array(X), array(Y), bandwidth=H, log=True, progress=lambda *_: None)
    want = sdkde_core.estimate(array(X), array(Y), bandwidth=H, log=True)
    assert type(got) is type(want)
    assert got.dtype == want.dtype
    near(np.asarray(got), np.asarray(want))
    ready = sdkde_core.prepare(array(X), bandwidth=H)
    assert ready.estimate(array(Y), log=True, out=mapped[1]) is mapped[1]
    near(mapped[1], np.asarray(want))
    assert ready.grad_log_density(array(Y), progress=lambda *_: None).shape == (1100, 2)


def test_a_signed_density_warns_once():
    far = 3 * Y
    with pytest.warns(RuntimeWarning, match=r"negative at \d+ of 1100 points") as heard:
        got = sdkde_core.estimate(X, far, method="laplace", bandwidth=H, log=True, progress=lambda *_: None)
    (warning,) = heard
    assert warning.filename == __file__
    assert str(warning.message).split()[6] == str(np.isnan(got).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for negative in ("clip", "renormalise"):
            options = {"method": "laplace", "bandwidth": H, "negative": negative, "log": True}
            near(sdkde_core.estimate(X, far, out=np.empty(1100), **options), sdkde_core.estimate(X, far, **options))


def test_derivatives_of_moved_samples_by_batches():
    torch = pytest.importorskip("torch")
    grads = []
    for given in (False, lambda *_: None):
        x = torch.tensor(X[:300], requires_grad=True)
        (sdkde_core.debias(x, bandwidth=H, precision="float64", progress=given) ** 3).sum().backward()
        grads.append(x.grad.numpy())
    np.testing.assert_allclose(grads[1], grads[0], rtol=1e-8, atol=1e-10)
    message = r"query requires grad, and only .* out, progress; pass query.detach"
    with pytest.raises(TypeError, match=message):
        sdkde_core.estimate(X, torch.tensor(Y, requires_grad=True), bandwidth=H, progress=True)


# --- memory -------------------------------------------------------------------------------------------------------


def test_neither_queries_nor_results_are_whole_in_memory(tmp_path):
    rows, d = 200_000, 4
    query = np.lib.format.open_memmap(tmp_path / "q.npy", "w+", np.float32, (rows, d))
    query[:] = np.linspace(-3, 3, rows, dtype="f4")[:, None]
    query = np.load(tmp_path / "q.npy", mmap_mode="r")
    out = np.lib.format.open_memmap(tmp_path / "p.npy", "w+", np.float64, (rows,))
    how = {"method": "kde", "bandwidth": 0.5, "backend": "numpy"}
    tracemalloc.start()
    try:
        sdkde_core.estimate(X[:8] @ np.eye(2, d), query, out=out, **how)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(out[-5:], sdkde_core.estimate(X[:8] @ np.eye(2, d), query[-5:], **how), rtol=1e-4)
    assert peak < 0.4 * (query.nbytes + out.nbytes)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [False, True])
def test_what_out_cannot_be(prepared, tmp_path):
    ready = sdkde_core.prepare(X, bandwidth=H)
    (tmp_path / "p").write_bytes(bytes(8 * 1100))
    y = np.ones((1100, 2))
    for out, kind, message in (
        ([0.0] * 1100, TypeError, "out is a list; pass a NumPy array of floats"),
        (np.empty(1100, int), TypeError, "out is of dtype int64; pass a NumPy array of floats"),
        (np.empty(1100, complex), TypeError, "out is of dtype complex128"),
        (np.empty(1099), ValueError, r"out has shape \(1099,\), but query has \(1100, 2\); pass one of shape"),
        (np.empty((1100, 1)), ValueError, r"out has shape \(1100, 1\)"),
        (np.memmap(tmp_path / "p", "f8", "r"), ValueError, r"out is read-only; .* mode 'r\+' or 'w\+'"),
        (y[:, 0], ValueError, "out shares memory with query"),
    ):
        with pytest.raises(kind, match=message):
            ready.estimate(y, out=out) if prepared else sdkde_core.estimate(X, y, bandwidth=H, out=out)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "query has values that are not finite, the first nan at row 900, column 1"),
        (np.inf, "query has values that are not finite, the first inf at row 900, column 1"),
        (1e300, r"row 900 of query, 1e\+300 in column 1, is too far"),
    ],
)
def test_a_row_is_named_by_its_number_in_the_whole(value, message, mapped):
    y = Y.copy()
    y[900, 1] = value
    with pytest.raises(ValueError, match=message):
        sdkde_core.estimate(X, y, bandwidth=H, out=mapped[1])
    want = sdkde_core.estimate(X, Y, bandwidth=H)
    near(np.log(mapped[1][:768]), np.log(want[:768]))  # what was done before
    assert not mapped[1][768:].any()


def test_rows_that_float64_does_not_hold_are_named_too():
    x, y = np.concatenate([X, [[1e12, 0.0]]]), Y.copy()
    y[900] = [1e12 + 0.01, 0.0]
    with pytest.raises(ValueError, match="row 900 of query"):
        sdkde_core.estimate(x, y, bandwidth=H, method="kde", progress=lambda *_: None)


@pytest.mark.parametrize("progress", [1, "yes", None, object()])
def test_what_progress_cannot_be(progress):
    ready = sdkde_core.prepare(X, bandwidth=H)
    for call in (
        lambda: sdkde_core.estimate(X, Y, bandwidth=H, progress=progress),
        lambda: sdkde_core.prepare(X, bandwidth=H, progress=progress),
        lambda: sdkde_core.debias(X, bandwidth=H, progress=progress),
        lambda: sdkde_core.grad_log_density(X, Y, bandwidth=H, progress=progress),
        lambda: ready.estimate(Y, progress=progress),
        lambda: ready.grad_log_density(Y, progress=progress),
    ):
        with pytest.raises(TypeError, match=r"progress is .*; pass True for a bar, or a function of the rows"):
            call()


# --- the bar, and interrupts --------------------------------------------------------------------------------------


def test_the_bar(capsys):
    pytest.importorskip("tqdm")
    sdkde_core.estimate(X, Y, bandwidth=H, progress=True)
    shown = capsys.readouterr()
    assert "sdkde: 100%" in shown.err
    assert "1.80k/1.80k" in shown.err
    assert not shown.out
    sdkde_core.estimate(X, Y, bandwidth=H)
    sdkde_core.prepare(X, bandwidth=H, method="kde", progress=True)
    assert not capsys.readouterr().err


def test_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"progress=True needs tqdm: pip install 'sdkde-core\[progress\]'"):
        sdkde_core.estimate(X, Y, bandwidth=H, progress=True)


def test_what_a_function_raises_ends_the_call(mapped):
    def stop(done, rows):
        if done > 1000:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        sdkde_core.estimate(X, Y, bandwidth=H, out=mapped[1], progress=stop)
    assert np.flatnonzero(mapped[1]).tolist() == list(range(512))


# --- backends that do not answer ----------------------------------------------------------------------------------


def test_rows_beyond_a_backends_reach_go_to_another_only_under_auto(monkeypatch):
    (own,) = (r for r in registry.records() if r.name == "numpy")
    holds = Support(False, "too far for it"), Support(True, "near")
    info = replace(own.info, name="near", supports=lambda p: holds[p.extent <= 60], extent_limit=lambda p: 1e9)
    monkeypatch.setattr(registry, "records", lambda: (replace(own, name="near", info=info), own))
    y = Y.copy()
    y[600] = 100.0
    options = {"bandwidth": 1.0, "method": "kde", "log": True}
    want = sdkde_core.estimate(X, y, backend="numpy", **options)
    near(sdkde_core.estimate(X, y, progress=lambda *_: None, **options), want)
    ready = sdkde_core.prepare(X, bandwidth=1.0, method="kde")
    assert ready.backend == "near"
    before = ready.estimate(Y, log=True)
    near(ready.estimate(y, log=True), want)
    assert ready.backend == "near"
    assert np.array_equal(ready.estimate(Y, log=True), before)
    with pytest.raises(BackendUnavailable, match="'near' cannot do this: too far for it"):
        sdkde_core.estimate(X, y, backend="near", out=np.empty(1100), **options)


def test_a_backend_that_fails_between_batches_is_replaced(monkeypatch):
    (own,) = (r for r in registry.records() if r.name == "numpy")
    module = sys.modules[own.info.implementation.partition(":")[0]]
    calls = []

    class Failing(module.NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            calls.append(problem.m)
            if len(calls) == 3:
                raise RuntimeError("lost")
            return super().reduce(problem, queries, state, own_offset)

    monkeypatch.setitem(sys.modules, "failing_backend", SimpleNamespace(Failing=Failing))
    info = replace(own.info, name="failing", implementation="failing_backend:Failing", startup_seconds=0.0)
    monkeypatch.setattr(registry, "made", {})
    monkeypatch.setattr(registry, "aside", {})
    monkeypatch.setattr(registry, "records", lambda: (replace(own, name="failing", info=info), own))
    watch = Watch()
    with pytest.warns(sdkde_core.SdkdeWarning, match="'failing' failed"):
        got = sdkde_core.estimate(X, Y, bandwidth=H, method="kde", progress=watch)
    assert len(calls) == 3
    assert watch.steps(1100) == [256, 256, 256, 256, 76]
    near(np.log(got), sdkde_core.estimate(X, Y, bandwidth=H, method="kde", log=True, backend="numpy"))


def test_steps_are_as_fine_as_the_work_is_long(monkeypatch):
    """Some ten where two seconds are predicted, and few where a backend needs little time for all rows."""
    monkeypatch.setattr(batches, "ROWS", 1 << 16)
    for name in ("numpy", "numba", "fourier"):
        info = registry.find(name).info
        for n, m in ((30_000, 30_000), (300_000, 300_000), (10**6, 10**6)):
            problem = Problem(Reduction.LOG_SUM, m, n, 2, extent=20.0)
            seconds, steps = predict(info, problem, cpu()), m / batches.batch_rows(m, problem, info)
            assert min(5.0 * seconds, 256.0) - 1.0 <= steps <= max(5.0 * seconds, m / batches.ROWS) + 1.0, (name, n)
