"""Samples that are read shard by shard: from every kind of file, within memory, and again after a crash."""

import numpy as np
import pytest

import sdkde_core
from sdkde_core import scale
from sdkde_core.estimator import blockwise
from sdkde_core.files import source
from sdkde_core.scale import parse_size
from sdkde_core.spreading import checkpoint as kept

RNG = np.random.default_rng(0)
N, M, D = 2549, 1101, 3
X, Y = RNG.normal(size=(N, D)).astype(np.float32), RNG.normal(size=(M, D)).astype(np.float32)
HOW = {"bandwidth": 0.5, "backend": "numpy"}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(blockwise, "NUMBERS", 1024 * D)


@pytest.fixture(scope="module")
def expected():
    return sdkde_core.estimate(X, Y, **HOW)


class Reader:
    shape, dtype = X.shape, X.dtype

    def read(self, start, stop):
        return X[start:stop]


def test_from_every_kind_of_source(tmp_path, expected):
    zarr, parquet = pytest.importorskip("zarr"), pytest.importorskip("pyarrow.parquet")
    import pyarrow

    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "f.npy", np.asfortranarray(X))
    z = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(700, D), dtype="f4")
    z[:] = X
    parquet.write_table(pyarrow.table({str(j): X[:, j] for j in range(D)}), tmp_path / "x.parquet")
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    files = [tmp_path / "x.npy", str(tmp_path / "f.npy"), tmp_path / "x.zarr", tmp_path / "x.parquet"]
    found = [scale.estimate(train, Y, **HOW) for train in (*files, mapped, z, Reader(), X)]
    assert all(np.array_equal(one, found[0]) and one.dtype == np.float32 for one in found)
    np.testing.assert_allclose(found[0], expected, rtol=3e-3)


def test_to_every_kind_of_sink(tmp_path):
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("pyarrow")
    expected = scale.estimate(X, Y, **HOW)
    for name in ("p.npy", "p.zarr", "p.parquet"):
        path = str(tmp_path / name)
        assert scale.estimate(X, Y, out=path, **HOW) == path
        read = source(path).read()[:, 0]
        assert np.array_equal(read, expected)
    z = zarr.create_array(tmp_path / "q.zarr", shape=(M,), chunks=(500,), dtype="f4")
    scale.estimate(X, Y, out=z, **HOW)
    assert np.array_equal(z[:], expected)


@pytest.mark.parametrize("name", ["moved.npy", "moved.zarr", "moved.npz", "moved.csv", "moved.parquet"])
def test_moved_samples_to_a_file_from_a_checkpoint(tmp_path, name, monkeypatch):
    """An interrupted run goes on with the blocks that are there."""
    pytest.importorskip("zarr")
    pytest.importorskip("pyarrow")
    path, how = str(tmp_path / name), {"checkpoint": tmp_path / "checkpoint", **HOW}
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        _full_disk(patched)
        scale.debias(X, out=path, **how)
    assert not (tmp_path / name).exists() and len(list((tmp_path / "checkpoint" / "results.zarr" / "c").iterdir())) == 1
    with pytest.raises(ValueError, match="resume=True"):
        scale.debias(X, out=path, **how)
    assert scale.debias(X, out=path, resume=True, **how) == path
    read = source(path)
    assert np.array_equal(read.read().astype(np.float32), scale.debias(X, **HOW))
    if name.endswith((".csv", ".parquet")):
        assert read.names == ("debiased_0", "debiased_1", "debiased_2")


def _full_disk(patched):
    """No more than one block fits."""
    real, written = kept.Chunks.write, []

    def write(self, start, block):
        if written:
            raise OSError(28, "No space left on device")
        written.append(start)
        real(self, start, block)

    patched.setattr(kept.Chunks, "write", write)


def test_moved_samples_and_methods():
    np.testing.assert_allclose(scale.debias(X, **HOW), sdkde_core.debias(X, **HOW), atol=1e-3)
    for method in ("kde", "laplace"):
        got = scale.estimate(X, weights=np.arange(1.0, N + 1.0), method=method, **HOW)
        plain = sdkde_core.estimate(X, weights=np.arange(1.0, N + 1.0), method=method, **HOW)
        np.testing.assert_allclose(got, plain, rtol=3e-3, atol=1e-3 * abs(plain).max())
    assert scale.estimate(X, Y[:0], **HOW).shape == (0,)


def test_progress_counts_all_rows():
    told = []
    scale.estimate(X, Y, progress=lambda done, rows: told.append((done, rows)), **HOW)
    assert told[-1] == (N + M, N + M) and len(told) == 5


@pytest.mark.parametrize(("text", "size"), [("1.5 GB", 1_500_000_000), ("512MiB", 2**29), (10**6, 10**6)])
def test_sizes(text, size):
    assert parse_size(text) == size


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(ValueError, match=r"memory is 1 MB, of which .* pass memory='\d+ MB' or more"):
        scale.estimate(X, Y, memory="1 MB", **HOW)
    with pytest.raises(ValueError, match=r"memory is '1e3'; pass bytes, or a string such as '1.5 GB'"):
        scale.estimate(X, Y, memory="1e3", **HOW)


@pytest.fixture
def checkpoint(tmp_path):
    pytest.importorskip("zarr")
    return tmp_path / "checkpoint"


def test_what_is_gone_is_computed_again(checkpoint):
    """tests/test_checkpoints.py has what is damaged."""
    once = scale.estimate(X, Y, checkpoint=checkpoint, **HOW)
    assert np.array_equal(once, scale.estimate(X, Y, **HOW))
    for name in ("moved.zarr/c/1/0", "results.zarr/c/1"):
        (checkpoint / name).unlink()
    assert np.array_equal(scale.estimate(X, Y, checkpoint=checkpoint, resume=True, **HOW), once)


def test_a_checkpoint_of_something_else_is_refused(checkpoint):
    scale.estimate(X, Y, checkpoint=checkpoint, **HOW)
    later, W = X.copy(), np.arange(1.0, N + 1.0)
    later[5, 1] = np.nextafter(later[5, 1], np.float32(9.0))
    with pytest.raises(ValueError, match=r"is there already; pass resume=True"):
        scale.estimate(X, Y, checkpoint=checkpoint, **HOW)
    for change, name in (
        *(
            ({name: x}, "samples, weights and queries")
            for name, x in (("train", later), ("query", Y + 1), ("weights", W))
        ),
        ({"bandwidth": 0.6}, "bandwidth"),
        ({"precision": "high"}, "precision"),
        ({"method": "kde"}, "method"),
        ({"log": True}, "log"),
        ({"backend": "numpy", "backend_options": {"threads": 1}}, "backend"),
    ):
        given = {"train": X, "query": Y, **HOW} | change
        with pytest.raises(ValueError, match=f"is of another estimate: {name} was "):
            scale.estimate(checkpoint=checkpoint, resume=True, **given)


def test_the_command(tmp_path):
    zarr = pytest.importorskip("zarr")
    from click.testing import CliRunner

    from sdkde_core.cli.main import main

    for name, x in (("x", X), ("y", Y)):
        zarr.create_array(tmp_path / f"{name}.zarr", shape=x.shape, chunks=(500, D), dtype="f4")[:] = x
    where = [str(tmp_path / name) for name in ("x.zarr", "y.zarr", "p.zarr", "c")]
    command = ["estimate", *where[:2], "-o", where[2], "--bandwidth", "0.5", "--backend", "numpy", "--memory", "4GB"]
    command += ["--checkpoint", where[3]]
    first = CliRunner().invoke(main, command)
    assert first.exit_code == 0, first.output
    assert f"{M} rows, numpy on cpu" in first.output
    assert np.array_equal(zarr.open_array(where[2])[:], scale.estimate(X, Y, **HOW))
    again = CliRunner().invoke(main, command)
    assert again.exit_code != 0 and "--resume" in str(again.output) + str(again.exception)
    assert CliRunner().invoke(main, [*command, "--resume"]).exit_code == 0
