"""Dask arrays in, lazy Dask arrays out: the same bits on every scheduler, for every chunking, after a lost worker."""

import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import sdkde_core
from sdkde_core import scale
from sdkde_core.estimator import blockwise

dask = pytest.importorskip("dask")
cloudpickle = pytest.importorskip("cloudpickle")
da = pytest.importorskip("dask.array")
graph = pytest.importorskip("sdkde_core.spreading.dask")

RNG = np.random.default_rng(0)
N, M, D = 2173, 1051, 2
X, Y, W = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)) * 1.5, RNG.random(N)
HOW = {"bandwidth": [0.3, 0.4], "backend": "numpy"}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Three shards, and small blocks of rows."""
    monkeypatch.setattr(blockwise, "NUMBERS", 1024 * D)
    monkeypatch.setattr(graph, "rows_of_a_task", lambda *of: 1024)


def chunked(x, rows):
    return da.from_array(x, chunks=(rows, *x.shape[1:]))


def bits(x, **how):
    with dask.config.set({"scheduler": "synchronous", **how}):
        return x.compute()


@pytest.mark.parametrize("method", ["sdkde", "laplace"])
def test_the_bits_are_those_of_files_for_every_chunking(method):
    how = {"method": method, **HOW, "weights": W} | ({"step": "moments", "tails": 0.1} if method == "sdkde" else {})
    expected = scale.estimate(X, Y, **how)  # whose blocks of rows are as small here
    for rows in ((N, M), (1300, (M - 1, 1))):
        x, y, w = chunked(X, rows[0]), chunked(Y, rows[1]), chunked(W, 999)
        p = sdkde_core.estimate(x, y, **{**how, "weights": w})
        assert isinstance(p, da.Array) and p.chunks[0] == y.chunks[0] and p.dtype == np.float64
        assert np.array_equal(bits(p), expected)
    assert np.array_equal(bits(p, scheduler="threads", num_workers=2), expected)
    np.testing.assert_allclose(expected, sdkde_core.estimate(X, Y, **how), rtol=1e-4)


def test_any_one_of_the_arguments_may_be_lazy():
    how, x, y = {"method": "kde", **HOW}, X[:500], Y[:99]
    for a, b, w in ((chunked(x, 77), y, None), (x, chunked(y, 7), None), (x, y, chunked(W[:500], 99))):
        p = sdkde_core.estimate(a, b, weights=w, log=True, **how)
        expected = sdkde_core.estimate(x, y, weights=None if w is None else W[:500], log=True, **how)
        np.testing.assert_allclose(bits(p), expected, atol=1e-4)
    p = sdkde_core.estimate(chunked(x[:, 0].astype("f4"), 77), method="kde", bandwidth=1.0, backend="numpy")
    assert p.dtype == np.float32 and p.shape == (500,) and p.chunks[0][0] == 77
    np.testing.assert_allclose(
        bits(p), sdkde_core.estimate(x[:, 0].astype("f4"), method="kde", bandwidth=1.0), rtol=2e-3
    )
    empty = sdkde_core.estimate(chunked(x, 77), y[:0], **how)
    assert bits(empty).shape == (0,)


def test_moved_samples():
    moved = sdkde_core.debias(chunked(X, 1000), **HOW)
    assert moved.shape == X.shape and moved.chunks[0] == (1000, 1000, 173)
    assert np.array_equal(bits(moved), scale.debias(X, **HOW))


def refusing(shape, chunks=700):
    """An array whose numbers cannot be had."""

    def fail(block):
        raise AssertionError("computed")

    return da.zeros(shape, chunks=(chunks, *shape[1:])).map_blocks(fail, meta=np.empty((0,) * len(shape)))


@pytest.mark.parametrize(
    "options", [*({"bandwidth": rule} for rule in ("auto", "silverman", "scott")), {"method": "stacked"}]
)
def test_nothing_is_computed_before_it_is_asked_for(options):
    p = sdkde_core.estimate(refusing((N, D)), refusing((M, D)), weights=refusing((N,)), **options)
    assert p.shape == (M,)
    with pytest.raises(AssertionError, match="computed"):
        bits(p)


def test_the_bandwidth_is_chosen_by_tasks():
    how = {"method": "kde", "bandwidth": "silverman", "backend": "numpy"}
    p = sdkde_core.estimate(chunked(X, 999), Y[:50], **how)
    np.testing.assert_allclose(bits(p), sdkde_core.estimate(X, Y[:50], **how), rtol=1e-4)
    several = np.repeat(X[:5], 400, axis=0)  # quartiles among samples in one place
    p = sdkde_core.estimate(chunked(several, 999), Y[:50], **how)
    np.testing.assert_allclose(bits(p), sdkde_core.estimate(several, Y[:50], **how), rtol=1e-4)


def test_far_points_are_counted():
    far = np.vstack([X, [[1e6, 0.0]]])
    p = sdkde_core.estimate(chunked(far, 999), chunked(far[-60:], 7), **HOW)
    assert np.array_equal(bits(p), scale.estimate(far, far[-60:], **HOW))


def test_what_cannot_be_is_refused():
    x = chunked(X, 999)
    for function in (sdkde_core.prepare, sdkde_core.grad_log_density, sdkde_core.select_bandwidth, sdkde_core.explain):
        with pytest.raises(TypeError, match=r"only estimate and debias are lazy; pass \w+.compute\(\)"):
            function(x)
    with pytest.raises(TypeError, match=r"only estimate and debias are lazy; pass X.compute\(\)"):
        pytest.importorskip("sdkde_core.interop.kernel_density").KernelDensity().fit(x)
    with pytest.raises(TypeError, match=r"only estimate and debias are lazy; pass \w+.compute\(\)"):
        sdkde_core.gaussian_kde(x.T)
    with pytest.raises(ValueError, match=r"unknown size; call train\.compute_chunk_sizes"):
        sdkde_core.estimate(x[x[:, 0] > 0], Y)
    with pytest.raises(TypeError, match="to_zarr"):
        sdkde_core.estimate(x, Y, out=np.empty(M))
    with pytest.raises(ValueError, match="query has 3 dimensions"):
        sdkde_core.estimate(x, da.zeros((5, 3)))
    with pytest.raises(ValueError, match="isj"):
        sdkde_core.estimate(x, method="kde", bandwidth="isj")
    with pytest.raises(TypeError, match="complex"):
        sdkde_core.estimate(x.astype(complex))
    with pytest.raises(TypeError, match="bandwidth is a Dask array"):
        sdkde_core.estimate(x, bandwidth=da.ones(2))
    broken = X.copy()
    broken[2111, 1] = np.nan
    with pytest.raises(ValueError, match="nan at row 2111, column 1"):
        bits(sdkde_core.estimate(chunked(broken, 500), **HOW))
    with pytest.raises(TypeError, match="train is a masked array"):
        bits(sdkde_core.estimate(da.ma.masked_less(x, 0), **HOW))


OTHERS = {
    "fewer rows": lambda block: block[: len(block) // 2],
    "more rows": lambda block: np.concatenate([block, block]),
    "fewer columns": lambda block: block[:, :1] if block.ndim > 1 else block[:, None],
    "no rows": lambda block: block[:0],
    "no columns": lambda block: block.sum(),
    "complex": lambda block: block + 1j,
    "narrower": lambda block: block.astype("f4"),
    "integers": lambda block: block.astype(int),
    "objects": lambda block: block.astype(object),
    "a list": lambda block: block.tolist(),
    "none": lambda block: None,
}


@pytest.mark.parametrize("argument", ["train", "query", "weights"])
@pytest.mark.parametrize("other", OTHERS)
def test_blocks_that_are_others_than_declared_are_refused(argument, other):
    """Fewer rows gave half the density, one column was broadcast, imaginary parts were dropped."""
    given = {"train": X[:900], "query": Y[:900], "weights": W[:900]}
    meta = np.empty((0,) * given[argument].ndim)
    given[argument] = chunked(given[argument], 400).map_blocks(OTHERS[other], dtype=float, meta=meta)
    p = sdkde_core.estimate(**given, method="kde", **HOW)
    shape = r"\(400,\)" if argument == "weights" else r"\(400, 2\)"
    found = rf"block \([012],( 0)?\) of {argument} is declared as float64 of shape ({shape}|.100.*), and is .*declare"
    with pytest.raises(ValueError, match=found):
        bits(p)


def test_what_is_dasks_and_no_array_is_refused():
    bag = pytest.importorskip("dask.bag").from_sequence([1.0, 2.0])
    one, some = dask.delayed(X), [dask.delayed(X), dask.delayed(X)]
    pass_ = r"is Dask's, of type \w+; pass one Dask array \(.to_dask_array"
    for value in (one, one[0], bag, some, tuple(some), [chunked(X, 900), chunked(X, 900)]):
        for train in (X, chunked(X, 900)):
            with pytest.raises(TypeError, match=f"query {pass_}"):
                sdkde_core.estimate(train, value, **HOW)
            with pytest.raises(TypeError, match=f"weights {pass_}"):
                sdkde_core.estimate(train, weights=value, **HOW)
        for function in (sdkde_core.estimate, sdkde_core.debias, sdkde_core.prepare, sdkde_core.grad_log_density):
            with pytest.raises(TypeError, match=f"train {pass_}"):
                function(value, bandwidth=0.5)
        with pytest.raises(TypeError, match=f"dataset {pass_}"):
            sdkde_core.gaussian_kde(value)
    with pytest.raises(TypeError, match=f"bandwidth {pass_}"):
        sdkde_core.estimate(X, bandwidth=dask.delayed(0.5))


@pytest.fixture
def cluster():
    distributed = pytest.importorskip("distributed")
    made = []

    def start(workers, **how):
        made.append(distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, **how))
        made.append(distributed.Client(made[0]))
        return made

    yield start
    for one in reversed(made):
        one.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_bits_on_workers(cluster, workers):
    local = cluster(workers)[0]
    assert len(local.workers) == workers
    how = {"weights": W, "backend": "numpy", "log": True}
    p = sdkde_core.estimate(chunked(X, 999), chunked(Y, 500), **{**how, "weights": chunked(W, 800)})
    assert np.array_equal(p.compute(), scale.estimate(X, Y, **how))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kills", [2, 20])
def test_a_lost_worker_changes_nothing(cluster, kills):
    """Killed at random moments, in one estimate or in several; a worker is started anew in the place of one lost."""
    x = np.random.default_rng(1).normal(size=(25_000, D))
    killed, moments, expected = 0, np.random.default_rng(), scale.estimate(x, **HOW)
    with dask.config.set({"distributed.scheduler.allowed-failures": 2 * kills}):
        local, client = cluster(2)
    while killed < kills:
        done, pids, most = threading.Event(), [], min(3, kills - killed)

        def kill(done=done, pids=pids, most=most):
            while not done.wait(moments.uniform(0.3, 2.0)):
                local.scale(2)  # Dask gives up a worker that is killed while it connects, and waits once none is left
                alive = [one.pid for one in list(local.workers.values()) if one.pid]
                if alive and len(pids) < most:
                    os.kill(alive[moments.integers(len(alive))], signal.SIGKILL)
                    pids.append(alive)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = client.compute(sdkde_core.estimate(chunked(x, 999), **HOW)).result(timeout=300)
        finally:
            done.set()
            killer.join()
        assert pids
        killed += len(pids)
        assert np.array_equal(found, expected)


def test_the_examples_of_the_page(capsys):
    pytest.importorskip("xarray")
    page = Path(__file__).parent.parent.joinpath("docs", "scaling-out.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^## Dask\n(.*?)(?=^## )", page, re.S | re.M)
    names = {}
    with dask.config.set({"scheduler": "synchronous"}):
        for example in re.findall(r"```python\n(.*?)```", text, re.S)[:2]:  # the last one needs GPUs
            exec(example, names)
    assert capsys.readouterr().out.startswith("((500, 500, 500, 500),) True\nFrozen({'star': 5000}) ('star',)")


@pytest.mark.parametrize(
    "options",
    [
        {"support": [(0, None), None]},
        pytest.param({"method": "stacked"}, marks=pytest.mark.slow),
        {"coordinates": ["log", "identity"]},
    ],
)
def test_what_needs_all_samples_is_fitted_by_one_task(options):
    rng = np.random.default_rng(3)
    x, w = np.stack([rng.exponential(size=150), rng.normal(size=150)], axis=1), rng.random(150)
    want = sdkde_core.estimate(x, x[:45], weights=w, log=True, **options)
    given = [chunked(a, k) for a, k in ((x, 50), (x[:45], 20), (w, 50))]
    got = sdkde_core.estimate(given[0], given[1], weights=given[2], log=True, **options)
    assert got.chunks == ((20, 20, 5),)
    np.testing.assert_allclose(got.compute(), want, rtol=1e-9)
    cloudpickle.dumps(dict(got.__dask_graph__()))  # as processes and clusters have it
    plain = sdkde_core.estimate(given[0], x[:45], weights=w, log=True, **options)
    np.testing.assert_allclose(plain.compute(), want, rtol=1e-9)
    lies = given[0].map_blocks(lambda block: block[:-1], dtype=float)
    with pytest.raises(ValueError, match=r"block .* of train is declared as"):
        sdkde_core.estimate(lies, x[:45], weights=w, log=True, **options).compute()
