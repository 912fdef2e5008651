"""The public face, end to end, against the reference and against the libraries that define the same estimators."""

import logging
import sys

import numpy as np
import pytest
import reference
from pairwise import cases

import sdkde_core
from sdkde_core.testing import problems

METHODS = ("kde", "sdkde", "laplace")


def _data(n=300, m=80, d=3, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.geomspace(0.01, 100, d)
    return (rng.normal(size=(n, d)) + 5) * scale, (rng.normal(size=(m, d)) + 5) * scale, rng.random(n)


@pytest.mark.parametrize(
    ("method", "shape", "same", "weighted"),
    cases(METHODS, ("scalar", "per dimension", "full"), (False, True), (False, True)),
)
def test_estimate_is_right_to_ten_digits(method, shape, same, weighted):
    x, y, w = _data()
    if shape == "scalar":
        x, y = x / np.geomspace(0.01, 100, 3), y / np.geomspace(0.01, 100, 3)
    h = {"scalar": 0.4, "per dimension": 0.4 * x.std(0), "full": 0.2 * np.cov(x.T)}[shape]
    options = {"method": method, "bandwidth": h, "weights": w if weighted else None}
    query = None if same else y
    got = sdkde_core.estimate(x, query, precision="float64", **options)
    np.testing.assert_allclose(got, reference.estimate(x, query, **options), rtol=1e-10)
    if method != "laplace":
        log = sdkde_core.estimate(x, query, precision="float64", log=True, **options)
        np.testing.assert_allclose(log, np.log(got), rtol=1e-10)


@pytest.mark.parametrize(
    ("backend", "distance", "d", "stray", "weighted"),
    cases(("numpy", "numba", "torch", "fourier"), (1e9, 1e12, 1e20, 1e100), (1, 3), (False, True), (False, True)),
)
@pytest.mark.filterwarnings("ignore:the Laplace estimate is negative:RuntimeWarning")
def test_any_distance_through_every_call(backend, distance, d, stray, weighted):
    """Rows, and with ``stray`` a sample, at what stands for missing values: they are right, and so are the others."""
    case, h = problems.far(40, 11, d, distance, stray=stray), 0.5
    x, y, w = h * case.points, h * case.queries, np.random.default_rng(2).random(40) if weighted else None
    options = {"bandwidth": h, "weights": w, "backend": backend}
    if stray and distance == 1e12:  # where float64 still tells a row from a sample beside it, but not well enough
        with pytest.raises(ValueError, match=r"holds up to 1e\+09 bandwidths"):
            sdkde_core.estimate(x, y, **options)
        return
    for method in METHODS:
        given, its = {**options, "method": method}, {"method": method, "bandwidth": h, "weights": w, "log": True}
        want = reference.estimate(x, y, **its)
        prepared = sdkde_core.prepare(x, **given)
        alone = np.concatenate([prepared.estimate(y[i : i + 1], log=True) for i in range(11)])
        for got in (sdkde_core.estimate(x, y, log=True, **given), prepared.estimate(y, log=True), alone):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-5)
        want = reference.estimate(x, **its)
        np.testing.assert_allclose(sdkde_core.estimate(x, log=True, **given), want, rtol=2e-6, atol=2e-5)
        if method != "laplace":
            centres = reference.debias(x, h, weights=w) if method == "sdkde" else x
            want = reference.grad_log_density(centres, y, h, weights=w)
            for got in (sdkde_core.grad_log_density(x, y, **given), prepared.grad_log_density(y)):
                off, size = (np.hypot.reduce(a, axis=1) for a in (got - want, want))
                assert (off <= 4e-5 + 1e-6 * size).all()
    want = reference.debias(x, h, weights=w)
    np.testing.assert_allclose(sdkde_core.debias(x, **options), want, rtol=1e-12, atol=9e-6 * h)


def test_extreme_weights():
    x, y, _ = _data()
    w = np.full(300, 1e-200)
    w[::2] = 1e200
    w[::3] = 0
    options = {"bandwidth": 0.4 * x.std(0), "weights": w}
    for method in METHODS:
        got = sdkde_core.estimate(x, y, method=method, precision="float64", **options)
        np.testing.assert_allclose(got, reference.estimate(x, y, method=method, **options), rtol=1e-10)


def test_zero_weight_points_are_still_rows():
    x, _, w = _data()
    w[:100] = 0
    got = sdkde_core.estimate(x, weights=w, bandwidth=0.4 * x.std(0), precision="float64")
    assert got.shape == (300,)
    np.testing.assert_allclose(got, reference.estimate(x, weights=w, bandwidth=0.4 * x.std(0)), rtol=1e-10)
    moved = sdkde_core.debias(x, weights=w, bandwidth=0.4 * x.std(0), precision="float64")
    np.testing.assert_allclose(moved, reference.debias(x, 0.4 * x.std(0), weights=w), rtol=1e-11)


def test_weights_scale_and_repeat():
    x, y, _ = _data()
    counts = np.random.default_rng(3).integers(0, 4, 300)
    h = 0.4 * x.std(0)
    repeated = sdkde_core.estimate(np.repeat(x, counts, axis=0), y, bandwidth=h, precision="float64")
    for scale in (1.0, 1e-300, 1e300):
        got = sdkde_core.estimate(x, y, bandwidth=h, weights=counts * scale, precision="float64")
        np.testing.assert_allclose(got, repeated, rtol=1e-10)


@pytest.mark.parametrize("bandwidth", [0.4, "full"])
def test_debias_then_kde_is_sdkde(bandwidth):
    x, y, w = _data()
    h = 0.2 * np.cov(x.T) if bandwidth == "full" else 0.4 * x.std(0)
    moved = sdkde_core.debias(x, bandwidth=h, weights=w, precision="float64")
    np.testing.assert_allclose(moved, reference.debias(x, h, weights=w), rtol=1e-11)
    got = sdkde_core.estimate(moved, y, method="kde", bandwidth=h, weights=w, precision="float64")
    np.testing.assert_allclose(got, sdkde_core.estimate(x, y, bandwidth=h, weights=w, precision="float64"), rtol=1e-10)


@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize("full", [False, True])
def test_the_gradient_is_the_derivative_of_the_log_density(method, full):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(200, 2)), rng.normal(size=(20, 2))
    h = [[0.3, 0.1], [0.1, 0.2]] if full else [0.5, 0.4]
    options = {"method": method, "bandwidth": h, "precision": "float64"}
    got = sdkde_core.grad_log_density(x, y, **options)
    want = np.empty_like(got)
    for k in (0, 1):
        step = np.eye(2)[k] * 1e-5
        up, down = (sdkde_core.estimate(x, y + s, log=True, **options) for s in (step, -step))
        want[:, k] = (up - down) / 2e-5
    off, size = (np.hypot.reduce(a, axis=1) for a in (got - want, want))
    assert (off <= 1e-6 * size).all()
    if method == "kde":
        np.testing.assert_allclose(got, reference.grad_log_density(x, y, h), rtol=1e-10)


@pytest.mark.parametrize("precision", ["auto", "fast", "high", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_precision_levels_end_to_end(dtype, precision):
    x, y, _ = (a.astype(dtype) for a in _data(d=16))
    h = 0.9 * x.std(0)
    precision = precision if precision != "auto" else {"float32": "fast", "float64": "high"}[dtype]
    want = reference.estimate(x.astype(float), y.astype(float), bandwidth=h.astype(float), log=True)
    got = sdkde_core.estimate(x, y, bandwidth=h, log=True, precision=precision)
    rounding = np.finfo(dtype).eps * abs(want)
    allowed = 2 * (sdkde_core.protocol.TOLERANCES[precision][sdkde_core.protocol.Reduction.LOG_SUM].at(want)) + rounding
    assert (abs(got - want) <= allowed).all()


def test_units_do_not_matter():
    x, y, _ = _data(n=100)
    one = sdkde_core.estimate(x, y, log=True, precision="float64")
    scale, offset = np.array([1e-30, 1e12, 7.0]), np.array([0.0, 1e9, -3.0])
    other = sdkde_core.estimate(x * scale + offset * scale, y * scale + offset * scale, log=True, precision="float64")
    np.testing.assert_allclose(
        other + np.log(scale).sum(), one, atol=1e-5
    )  # 1e9 offsets cost digits of the input itself


def test_one_outlier_at_ten_million_bandwidths():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(500, 3))
    x[100] = 1e7
    for method in METHODS:
        want = reference.estimate(x, method=method, bandwidth=0.6)
        for precision in ("fast", "float64"):
            got = sdkde_core.estimate(x, method=method, bandwidth=0.6, precision=precision)
            np.testing.assert_allclose(got, want, rtol=1e-3 if precision == "fast" else 1e-9)
    text = str(sdkde_core.explain(x, bandwidth=0.6, precision="float64", measure=True))
    assert "1 far points summed apart" in text


def test_a_bandwidth_that_overflows_is_refused():
    with pytest.raises(ValueError, match=r"beyond 1e149 bandwidths .* overflow; .* or pass a larger bandwidth"):
        sdkde_core.estimate([[1.0], [2.0]], bandwidth=1e-200)


def test_laplace_is_negative_somewhere_and_says_so():
    x = np.random.default_rng(6).normal(size=(200, 2))
    y = np.array([[0.0, 0.0], [5.0, 5.0], [6.0, -6.0]])
    signed = sdkde_core.estimate(x, y, method="laplace")
    assert signed[0] > 0 > signed[1]
    ready = sdkde_core.prepare(x, method="laplace")
    for call in (lambda: sdkde_core.estimate(x, y, method="laplace", log=True), lambda: ready.estimate(y, log=True)):
        with pytest.warns(RuntimeWarning, match=r"negative at 2 of 3 points.*log=False") as record:
            log = call()
        assert [r.filename for r in record] == [__file__]
        assert np.isnan(log).tolist() == [False, True, True]
        np.testing.assert_allclose(log[0], np.log(signed[0]), rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "sd-kde"}, ValueError, "method is 'sd-kde'; pass one of 'kde', 'sdkde', 'laplace'"),
        ({"precision": "double"}, ValueError, "precision is 'double'"),
        ({"bandwidth": "optimal"}, ValueError, "'silverman'"),
        ({"device": "gpu"}, ValueError, "device is 'gpu'"),
        ({"backend": "cuda-magic"}, sdkde_core.BackendUnavailable, "'cuda-magic' is unknown; installed: .*numpy"),
        ({"backend": "numpy", "device": "cuda"}, sdkde_core.BackendUnavailable, "runs on cpu, not on cuda"),
        ({"backend": "numpy", "backend_options": {"thread": 2}}, ValueError, "backend_options.*thread"),
        ({"backend": "numpy", "backend_options": {"threads": -2}}, ValueError, "threads is -2"),
        ({"backend_options": {"threads": 2}}, ValueError, "go with a named backend"),
        ({"backend": "numpy", "backend_options": 5}, TypeError, "backend_options is 5"),
        ({"backend": "numpy", "backend_options": []}, TypeError, "backend_options is"),
        ({"backend": None}, TypeError, "backend is None"),
        ({"method": None}, TypeError, "method is None"),
        ({"precision": np.array(["high"])}, TypeError, "precision is"),
        ({"device": "cpu:"}, ValueError, "device is 'cpu:'"),
    ],
)
def test_what_is_refused(options, error, message):
    x, y, _ = _data(n=9)
    with pytest.raises(error, match=message):
        sdkde_core.estimate(x, y, **options)
    with pytest.raises(error, match=message):
        sdkde_core.explain(x, y, **options)


def test_environment(monkeypatch):
    x, y, _ = _data(n=9)
    monkeypatch.setenv("SDKDE_PRECISION", "float64")
    assert sdkde_core.explain(x, y).passes[0].precision == "float64"
    assert sdkde_core.explain(x, y, precision="fast").passes[0].precision == "fast"
    monkeypatch.setenv("SDKDE_BACKEND", "nowhere")
    monkeypatch.setenv("SDKDE_NUM_THREADS", "1")
    sdkde_core.estimate(x, y, backend="numpy")


def test_an_empty_query_still_checks_the_backend():
    with pytest.raises(sdkde_core.BackendUnavailable):
        sdkde_core.estimate([[0.0], [1.0]], [], backend="nonsense")


def test_explain():
    x, y, _ = _data(n=100)
    e = sdkde_core.explain(x, y)
    assert [p.reduction for p in e.passes] == ["mean", "log_sum", "log_sum"]
    assert [p.m for p in e.passes] == [100, 80, 80]
    assert f"chosen from the data: {e.selection.reason}" in str(e)
    d = e.to_dict()
    assert d["backend"] == "numpy"
    assert [c["name"] for c in d["candidates"] if c["chosen"]] == ["numpy"]
    assert d["passes"][0]["predicted_seconds"] > 0
    assert d["passes"][0]["measured_seconds"] is None
    assert "chosen: numpy on cpu" in str(e)
    measured = sdkde_core.explain(x, y, measure=True)
    assert all(p.measured_seconds > 0 for p in measured.passes)
    assert "took" in str(measured)


def test_explain_from_shapes():
    e = sdkde_core.explain((1_000_000, 16), (131_072, 16), method="kde")
    assert (e.passes[0].m, e.passes[0].n) == (131_072, 1_000_000)
    assert sdkde_core.explain((1000,)).passes[0].d == 1
    for bad in ((0, 2), (3, 4, 5)):
        with pytest.raises(ValueError, match="shape"):
            sdkde_core.explain(bad)
    for query in ((5, 3), (0, 2), np.zeros((5, 3)), 5, "ab", np.zeros((1, 2, 3))):
        with pytest.raises((ValueError, TypeError), match="query"):
            sdkde_core.explain((10, 2), query)
    for bandwidth in ("foo", [1.0, 2.0, 3.0], -1):
        with pytest.raises(ValueError, match="bandwidth"):
            sdkde_core.explain((10, 2), bandwidth=bandwidth)
    with pytest.raises(ValueError, match="weights has shape"):
        sdkde_core.explain((10, 2), weights=np.ones(9))
    with pytest.raises(ValueError, match="both as data or both as shapes"):
        sdkde_core.explain(np.zeros((5, 2)), (5, 2), bandwidth=1.0)
    with pytest.raises(ValueError, match="needs the data"):
        sdkde_core.explain((10, 2), measure=True)


def test_the_choice_is_logged(caplog):
    x, y, _ = _data(n=9)
    with caplog.at_level(logging.DEBUG, logger="sdkde"):
        sdkde_core.estimate(x, y)
    assert "backend numpy on cpu" in caplog.text


def test_gradients_without_pytorch(monkeypatch):
    for name in ("torch", "torch._dynamo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert sdkde_core.grad_log_density(np.eye(3), bandwidth=0.4, backend="numpy").shape == (3, 3)
