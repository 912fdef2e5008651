"""Dask arrays in, lazy Dask arrays out: the same bits on every scheduler, for every chunking, after every lost worker."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import sdkde_core

da = pytest.importorskip("dask.array")
dask = pytest.importorskip("dask")

N, M, D = 5000, 3000, 2


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)), rng.normal(size=(M, D)) * 1.5, rng.random(N)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several shards and row blocks of few points."""
    narrow(monkeypatch)


def narrow(patch):
    raise NotImplementedError


def in_chunks(x, chunks):
    return da.from_array(x, chunks=(chunks, *x.shape[1:]) if x.ndim > 1 else chunks)


def bits(x, **how):
    with dask.config.set({"scheduler": "synchronous", **how}):
        return np.asarray(x.compute())


def refusing(shape, dtype=float, chunks=700):
    """An array whose numbers cannot be had."""

    def fail(*_, **__):
        raise AssertionError("computed")

    return da.map_blocks(fail, chunks=in_chunks(np.empty(shape, dtype), chunks).chunks, dtype=dtype, meta=np.empty((0,) * len(shape), dtype))


@pytest.mark.parametrize("method", ["sdkde", "kde", "laplace"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_numbers_are_those_of_arrays_in_memory(data, method, weighted):
    x, y, w = data
    how = {"method": method, "backend": "numpy", "precision": "float64"}
    want = sdkde_core.estimate(x, y, weights=w if weighted else None, **how)
    weights = in_chunks(w, 900) if weighted else None
    got = sdkde_core.estimate(in_chunks(x, 1300), in_chunks(y, 800), weights=weights, **how)
    assert isinstance(got, da.Array)
    assert np.allclose(bits(got), want, rtol=1e-9, atol=1e-14)


def test_the_same_bits_for_every_chunking_and_scheduler(data):
    x, y, w = data
    found = []
    for scheduler, a, b in (("synchronous", N, M), ("threads", 1300, 800), ("synchronous", 77, (2999, 1))):
        got = sdkde_core.estimate(in_chunks(x, a), in_chunks(y, b), weights=in_chunks(w, 999), backend="numpy", log=True)
        found.append(bits(got, scheduler=scheduler, num_workers=2))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
