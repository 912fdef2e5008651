"""Arrays on a CUDA device: what goes in comes back there. Marked gpu; run where there is one."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import reference
import torch

import sdkde_core
from sdkde_core.arrays import ingest
from sdkde_core.choice import registry
from sdkde_core.engine.exact import reduce_exact
from sdkde_core.protocol import BackendInfo, Support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

X = np.random.default_rng(0).normal(size=(400, 3))
Y = np.random.default_rng(1).normal(size=(90, 3))
W = np.random.default_rng(2).random(400)


def _cuda(x):
    return torch.from_numpy(x).cuda()


def _far(x, count, at):
    x = x.copy()
    x[7 : 7 + 3 * count : 3] += at
    return x


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("bandwidth", [0.5, "silverman", "scott"])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_tensors_come_back_to_their_device(method, bandwidth, same, weighted):
    w = W if weighted else None
    options = {"method": method, "precision": "float64", "bandwidth": bandwidth}
    got = sdkde_core.estimate(_cuda(X), None if same else _cuda(Y), weights=None if w is None else _cuda(w), **options)
    assert got.device.type == "cuda"
    assert got.dtype == torch.float64
    want = sdkde_core.estimate(X, None if same else Y, weights=w, **options)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-10)


def test_devices_mix():
    want = reference.estimate(X, Y, bandwidth=0.5)
    for train, query in ((_cuda(X), Y), (X, _cuda(Y)), (_cuda(X), torch.from_numpy(Y))):
        got = sdkde_core.estimate(train, query, bandwidth=0.5, precision="float64")
        assert type(got) is type(query)
        if isinstance(query, torch.Tensor):
            assert got.device == query.device
            got = got.cpu().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:.*negative:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_large_data_of_the_host_are_worked_with_as_if_they_were_on_the_device(method, dtype):
    """The same numbers by one backend, the bandwidth's too; they come back as what they were."""
    options = {"method": method, "backend": "triton"}
    rng = np.random.default_rng(3)
    x, y, w = rng.normal(size=(9000, 40)).astype(dtype), rng.normal(size=(500, 40)).astype(dtype), rng.random(9000)
    assert ingest(x, device="cuda").came_from == "cpu"
    for query, weights in ((y, None), (None, w)):
        there = [None if a is None else _cuda(a) for a in (x, query, weights)]
        want = sdkde_core.estimate(*there[:2], weights=there[2], log=True, **options)
        got = sdkde_core.estimate(x, query, weights=weights, log=True, device="cuda", **options)
        assert isinstance(got, np.ndarray) and got.dtype == dtype
        np.testing.assert_allclose(got, want.cpu().numpy(), rtol=1e-6)  # tensors' extent may be rounded up further
        ready = sdkde_core.prepare(x, weights=weights, device="cuda", **options)
        np.testing.assert_allclose(ready.estimate(x if query is None else query, log=True), got, rtol=1e-5, atol=1e-5)
    said = str(sdkde_core.explain(x, y, method=method, device="cuda"))
    assert "one of many calls" in said  # this process has a context
    x[7, 1] = np.nan
    with pytest.raises(ValueError, match="row 7, column 1"):
        sdkde_core.estimate(x, device="cuda", method=method)


class Exact:
    """Direct differences on the device; waits for nothing."""

    def probe(self, device):
        return Support(True, "anywhere")

    def prepare(self, problem, columns):
        return columns

    def reduce(self, problem, queries, state, own_offset=0):
        return reduce_exact(problem, state.points if queries is None else queries, state)


@pytest.fixture
def exact(monkeypatch):
    info = BackendInfo("exact", (1, 0), "exact_on_cuda:Exact", ("cuda",), ("float64",), arrays="torch")
    record = registry.Record("exact", "ok", "installed", "tests", "1.0", "exact_on_cuda:INFO", info)
    monkeypatch.setitem(sys.modules, "exact_on_cuda", SimpleNamespace(Exact=Exact))
    monkeypatch.setattr(registry, "records", lambda: (record,))


def _waits(call):
    """What a call returns, and how often it waits for the device."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            result = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result, len([w for w in caught if "called a synchronizing" in str(w.message)])


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_with_a_number_as_bandwidth_the_core_waits_for_the_device_once(exact, method):
    x, y = _cuda(X).float(), _cuda(Y).float()
    got, waits = _waits(lambda: sdkde_core.estimate(x, y, method=method, bandwidth=0.5, precision="float64"))
    assert waits == 1
    want = reference.estimate(*(a.double().cpu().numpy() for a in (x, y)), method=method, bandwidth=0.5)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-6)


@pytest.mark.parametrize("bandwidth", [0.5, [0.4, 0.5, 0.6], "scott"])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_prepared_set_waits_for_the_device_once_a_batch(exact, method, bandwidth):
    options = {"method": method, "bandwidth": bandwidth, "precision": "float64"}
    ready = sdkde_core.prepare(_cuda(X), **options)
    want = sdkde_core.estimate(X, Y, device="cuda", **options)
    for y in (_cuda(Y), _cuda(Y)[:7], _cuda(Y[::-1].copy())):
        got, waits = _waits(lambda y=y: ready.estimate(y))
        assert waits == 1
        assert got.device == y.device
        np.testing.assert_allclose(got.cpu().numpy(), want[::-1] if y[0, 0] != Y[0, 0] else want[: len(y)], rtol=1e-9)


@pytest.mark.filterwarnings("ignore:the Laplace estimate is negative")
@pytest.mark.parametrize("at", [0.0, 20.0, 40.0, 1e4])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("backend", ["auto", "triton", "numba-cuda", "hopper"])
def test_calls_in_any_order_have_the_same_bits(backend, method, same, at):
    """Data of one shape in turn: with weights or without, some with points ``at`` bandwidths from the others.

    Some are beyond the fast formula's limit but in its sight, some beyond what a centre is moved for.
    """
    options = {"method": method, "bandwidth": 0.5, "backend": backend}
    query, zeros = None if same else _cuda(_far(Y, 1, at)).float(), W * (X[:, 0] < 2.0)
    asked = [
        (_cuda(_far(X * s, count, at)).float(), w)
        for s in (1.0, 1.2)
        for count in (0, 5)
        for w in (None, _cuda(W), _cuda(zeros))
    ]

    def estimate(x, w):
        return sdkde_core.estimate(x, query, weights=w, **options)

    try:
        want = [estimate(*data) for data in asked]
    except sdkde_core.BackendUnavailable as error:
        pytest.skip(str(error))
    host = [None if a is None else a.double().cpu().numpy() for a in (asked[4][0], query)]
    for i, weights in ((4, W), (5, zeros)):
        oracle = reference.estimate(*host, weights=weights, method=method, bandwidth=0.5)
        np.testing.assert_allclose(want[i].cpu().numpy(), oracle, rtol=4e-3, atol=1e-9)
    for i in (*[0] * 12, *range(12), *[4] * 12, *np.random.default_rng(0).integers(12, size=40)):
        assert torch.equal(estimate(*asked[i]), want[i])
    asked[0][0][7, 1] = float("inf")
    with pytest.raises(ValueError, match="row 7, column 1"):
        estimate(*asked[0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("backend", ["triton", "numba-cuda"])
def test_prepared_sets_have_the_same_bits_on_any_stream(backend, method, weighted):
    options = {"method": method, "bandwidth": 0.5, "backend": backend, "weights": _cuda(W) if weighted else None}
    try:
        ready = sdkde_core.prepare(_cuda(_far(X, 2, 40.0)).float(), **options)
    except sdkde_core.BackendUnavailable as error:
        pytest.skip(str(error))
    asked = [(ready.estimate, y) for y in (Y, Y * 3, _far(Y, 1, 1e4), _far(Y, 4, 40.0))]
    asked += [(ready.grad_log_density, y) for y in (Y, _far(Y, 1, 1e4))] if method != "laplace" else []
    asked = [(ask, _cuda(y).float()) for ask, y in asked]
    first = [ask(y) for ask, y in asked]
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()) * 9:
        with torch.cuda.stream(stream):
            for (ask, y), want in zip(asked, first):
                assert torch.equal(ask(y), want)


def test_a_prepared_set_gives_its_memory_back():
    pytest.importorskip("triton")
    x = torch.randn(20_000, 32, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    ready = sdkde_core.prepare(x, bandwidth=3.0, backend="triton")
    for _ in range(10):
        ready.estimate(x)
    del ready
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_dtypes(dtype):
    x = (torch.from_numpy(X) * 3).to(dtype)
    got = sdkde_core.estimate(x.cuda(), bandwidth=1.0)
    assert got.dtype == (torch.float64 if dtype == torch.int64 else torch.float32)
    np.testing.assert_allclose(got.cpu().numpy(), sdkde_core.estimate(x, bandwidth=1.0).numpy(), rtol=2e-3)  # fast


def test_debias_and_gradient():
    for got in (
        sdkde_core.debias(_cuda(X), bandwidth=0.5),
        sdkde_core.grad_log_density(_cuda(X), _cuda(Y), bandwidth=0.5),
    ):
        assert got.device.type == "cuda"
    got, want = (sdkde_core.debias(x, bandwidth="scott") for x in (_cuda(X), X))
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=0, atol=1e-5)  # both "high"


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bandwidth", [0.5, "per column", "matrix", "silverman", "auto"])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_tensors_are_estimated_as_rightly_as_arrays(method, bandwidth, weighted, backend):
    """Tensors go the straight line; in no dimension that whitening takes otherwise, nor by a matrix, does it matter."""
    if backend not in {c.name for c in sdkde_core.explain(_cuda(X).float()).candidates if c.ok}:
        pytest.skip(f"{backend} does not work here")
    for n, m, d in ((1, 1, 1), (600, 90, 3), (2100, 130, 17), (300, 40, 50)):
        rng = np.random.default_rng(n)
        near = min(1.0, (3 / d) ** 0.5)  # densities of float32 underflow in many dimensions
        x, y, w = (
            near * rng.normal(size=(n, d)),
            near * rng.normal(size=(m, d)),
            rng.random(n) + 0.1 if weighted else None,
        )
        if n == 1 and isinstance(bandwidth, str):
            continue
        h = {"per column": np.linspace(0.6, 0.9, d), "matrix": 0.4 * np.eye(d) + 0.1}.get(bandwidth, bandwidth)
        options = {"method": method, "weights": w, "bandwidth": h}
        if isinstance(h, str):  # the same on both
            options["bandwidth"] = h = sdkde_core.prepare(x, **options).bandwidth
        for single in (True, False):
            given = [_cuda(a).float() if single else _cuda(a) for a in (x, y)]
            weights = None if w is None else _cuda(w)
            got = sdkde_core.estimate(*given, backend=backend, **(options | {"weights": weights}))
            assert got.dtype == given[1].dtype
            want = sdkde_core.estimate(*(a.double().cpu().numpy() for a in given), precision="float64", **options)
            scale = sdkde_core.estimate(*(a.double().cpu().numpy() for a in given), **(options | {"method": "kde"}))
            error = np.abs(got.double().cpu().numpy() - want) / (scale * (1 + d) if method == "laplace" else want)
            assert error.max() < (3e-3 if single else 1e-4), (n, d, single, error.max())


def test_what_is_wrong_with_tensors_is_said():
    x, y = _cuda(X).float(), _cuda(Y).float()
    for value in (float("nan"), float("inf")):
        for given, name in ((x.clone(), "train"), (y.clone(), "query")):
            given[7, 1] = value
            with pytest.raises(ValueError, match=rf"{name} has values that are not finite.* row 7, column 1"):
                sdkde_core.estimate(*((given, y) if name == "train" else (x, given)), bandwidth=0.5)
    with pytest.raises(ValueError, match="query has 2 dimensions"):
        sdkde_core.estimate(x, y[:, :2].contiguous(), bandwidth=0.5)
    with pytest.raises(ValueError, match=r"bandwidth is -1\.0"):
        sdkde_core.estimate(x, y, bandwidth=-1.0)
    with pytest.raises(ValueError, match="negative values, the first"):
        sdkde_core.estimate(x, y, bandwidth=0.5, weights=-_cuda(W))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_call_within_a_graph_of_the_user(method, weighted):
    """A captured call reads new data at each replay; of data that reach further than any before it makes NaN."""
    x, y = torch.randn(900, 5, device="cuda"), 0.5 * torch.randn(70, 5, device="cuda")
    w = torch.rand(900, device="cuda") + 0.1
    how = {"method": method, "bandwidth": 0.7, "precision": "fast", "backend": "triton"}
    prepared = sdkde_core.prepare(x, weights=w if weighted else None, **how)

    def call():
        return sdkde_core.estimate(x, y, **how), sdkde_core.estimate(x, log=True, **how), prepared.estimate(y)

    with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sdkde_core.estimate(4.0 * x, y, **how)
        before = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    # Another extent than the data's may have another formula chosen.
    for got, want in zip(captured, before):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-6, equal_nan=True)
    x.copy_(torch.randn(900, 5, device="cuda"))
    y.copy_(0.5 * torch.randn(70, 5, device="cuda"))  # no farther than the prepared samples
    graph.replay()
    got, _, at = (a.clone() for a in captured)
    torch.testing.assert_close(got, sdkde_core.estimate(x, y, **how), rtol=2e-3, atol=2e-6)
    torch.testing.assert_close(at, prepared.estimate(y), rtol=2e-3, atol=2e-6)
    y[3] *= 1e3
    graph.replay()
    assert captured[0].isnan().all()
    assert captured[2].isnan().all()


def test_what_no_graph_can_capture_is_refused():
    x = torch.randn(333, 7, device="cuda")
    sdkde_core.estimate(x[:5], bandwidth=0.5)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1.0
        weights = torch.empty(333, device="cuda")
        for how, message in (
            ({}, "bandwidth='auto' reads the data"),
            ({"bandwidth": 0.123}, "call once with data"),
            ({"bandwidth": 0.5, "weights": weights}, "weights None"),
        ):
            with pytest.raises(RuntimeError, match=message):
                sdkde_core.estimate(x, **how)


def test_a_card_is_warmed_up():
    took = sdkde_core.warm_up("cuda")
    assert took.keys() == {"cuda:0"}
    assert {"torch"} <= took["cuda:0"].keys() <= {r.name for r in registry.records()}
    warm = {c.name: c for c in sdkde_core.explain(X, device="cuda").candidates if c.ok}
    assert warm["torch"].counted_seconds == 0.0


@pytest.mark.parametrize("bandwidth", [0.5, "scott"])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_fitted_density_on_a_device(method, bandwidth):
    """What it gives besides estimates is that of the same samples on the host, and its draws stay on the device."""
    options = {"method": method, "precision": "float64", "bandwidth": bandwidth}
    here, there = (sdkde_core.prepare(x, weights=w, **options) for x, w in ((X, W), (_cuda(X), _cuda(W))))
    pairs = [(here.marginal([2, 0]), there.marginal([2, 0]))]
    if method != "laplace":
        pairs.append((here.conditional({1: 0.3}), there.conditional({1: 0.3})))
        np.testing.assert_allclose(there.modes(), here.modes(), atol=1e-5)
    for mine, its in pairs:
        got = its.estimate(_cuda(Y[:, :2].copy()))
        assert got.device.type == "cuda"
        np.testing.assert_allclose(got.cpu().numpy(), mine.estimate(Y[:, :2]), rtol=1e-9)
    got = there.grad_log_density(_cuda(Y))
    np.testing.assert_allclose(got.cpu().numpy(), here.grad_log_density(Y), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(there.marginal(0).cdf([0.0, 1.0]), here.marginal(0).cdf([0.0, 1.0]), rtol=1e-9)


def test_draws_on_a_device():
    there = sdkde_core.prepare(_cuda(X), weights=_cuda(W), bandwidth=[0.3, 0.5, 0.7])
    y = there.sample(100_000, random_state=3)
    assert y.device.type == "cuda" and torch.equal(y, there.sample(100_000, random_state=3))
    means, weights, covariance, _ = there.mixture()
    np.testing.assert_allclose(y.cpu().numpy().mean(axis=0), weights @ means, atol=0.02)
    want = covariance + np.cov(means.T, aweights=weights, ddof=0)
    np.testing.assert_allclose(np.cov(y.cpu().numpy().T), want, atol=0.03)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_progress_out_and_files_on_a_device(method, tmp_path):
    options = {"method": method, "bandwidth": 0.5, "precision": "float64"}
    told, want = [], reference.estimate(X, Y, method=method, bandwidth=0.5)
    got = sdkde_core.estimate(_cuda(X), _cuda(Y), progress=lambda done, rows: told.append(done), **options)
    assert got.device.type == "cuda"
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-9, atol=1e-14)
    assert told[-1] == len(Y) + len(X) * (method == "sdkde")
    out = np.empty(len(Y))
    ready = sdkde_core.prepare(_cuda(X), **options)
    assert ready.estimate(_cuda(Y), out=out) is out
    np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-14)
    ready.save(tmp_path / "a.sdkde")
    again = sdkde_core.load(tmp_path / "a.sdkde")
    assert (again.backend, again.device) == (ready.backend, ready.device)
    assert torch.equal(again.estimate(_cuda(Y)), ready.estimate(_cuda(Y)))


@pytest.mark.parametrize("method", ["kde", "sdkde"])
def test_scipys_class_on_a_device(method):
    here, there = (sdkde_core.gaussian_kde(x, weights=w, method=method) for x, w in ((X.T, W), (_cuda(X).T, _cuda(W))))
    got = there.logpdf(_cuda(Y).T)
    assert got.device.type == there.resample(5).device.type == "cuda"
    np.testing.assert_allclose(got.cpu().numpy(), here.logpdf(Y.T), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(there.marginal(0)(0.5), here.marginal(0)(0.5), rtol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde"])
def test_groups_on_a_device(method, weighted):
    rng = np.random.default_rng(2)
    x, y = rng.standard_t(3, size=(6000, 2)), rng.normal(size=(500, 2))
    y[0] = 200.0
    weights = rng.random(6000) if weighted else None
    there = None if weights is None else _cuda(weights)
    for groups in ({"tails": "guard"}, {"tails": 0.1, "adaptive": 0.25}, {"tails": 0.1, "step": "moments"}):
        if method == "kde" and "step" in groups:
            continue
        how = {"bandwidth": 0.4, "method": method, **groups}
        want = sdkde_core.estimate(x, y, weights=weights, log=True, precision="float64", device="cpu", **how)
        for precision, most in (("fast", 2e-3), ("high", 4e-5), ("float64", 1e-8)):
            own = how | {"weights": there, "precision": precision}
            ready = sdkde_core.prepare(_cuda(x), **own)
            for _ in range(2):
                for got in (
                    sdkde_core.estimate(_cuda(x), _cuda(y), log=True, **own),
                    ready.estimate(_cuda(y), log=True),
                ):
                    np.testing.assert_allclose(got.cpu().numpy(), want, atol=most, rtol=3e-6)
            score = sdkde_core.grad_log_density(_cuda(x), _cuda(y), **own).cpu().numpy()
            np.testing.assert_allclose(score, ready.grad_log_density(_cuda(y)).cpu().numpy(), atol=50 * most)
    assert ready.sample(10).is_cuda and len(ready.mixture().weights) == 10_096


@pytest.mark.parametrize("moves", [{}, {"step": "moments", "score_bandwidth": 1.4}])
def test_a_guarded_call_is_captured(moves):
    x, y = _cuda(np.random.default_rng(3).normal(size=(5000, 3))), _cuda(np.random.default_rng(4).normal(size=(100, 3)))
    how = {"bandwidth": 0.5, "tails": "guard", "precision": "fast", "backend": "triton", **moves}
    want = sdkde_core.estimate(x, y, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sdkde_core.estimate(x, y, **how)
    got.zero_()
    graph.replay()
    np.testing.assert_allclose(got.cpu().numpy(), want.cpu().numpy(), rtol=1e-5)
