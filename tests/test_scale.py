"""Samples that are read shard by shard: from every kind of file, within memory, and again after a crash."""

import pickle
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from pairwise import cases

import sdkde_core
from sdkde_core import scale
from sdkde_core.bandwidth.rules import RULES, resolve
from sdkde_core.estimator import blockwise, survey
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.files import source
from sdkde_core.messages import parse_size
from sdkde_core.spreading import checkpoint as kept

RNG = np.random.default_rng(0)
N, M, D = 2149, 1051, 3
X, Y = RNG.normal(size=(N, D)).astype(np.float32), RNG.normal(size=(M, D)).astype(np.float32)
HOW = {"bandwidth": 0.5, "backend": "numpy"}
P, Q = (RNG.normal(size=(k, D)) * [1.0, 10.0, 0.1] for k in (N, M))
P[17] *= 30.0
W = RNG.random(N)
W[::7] = 0.0


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(blockwise, "NUMBERS", 1024 * D)


class Reader:
    shape, dtype = X.shape, X.dtype

    def read(self, start, stop):
        return X[start:stop]


def test_from_every_kind_of_source(tmp_path):
    zarr, parquet = pytest.importorskip("zarr"), pytest.importorskip("pyarrow.parquet")
    import pyarrow

    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "f.npy", np.asfortranarray(X))
    z = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(700, D), dtype="f4")
    z[:] = X
    parquet.write_table(pyarrow.table({str(j): X[:, j] for j in range(D)}), tmp_path / "x.parquet")
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    files = [tmp_path / "x.npy", str(tmp_path / "f.npy"), tmp_path / "x.zarr", tmp_path / "x.parquet"]
    found = [scale.estimate(train, Y[:99], **HOW) for train in (*files, mapped, z, Reader(), X)]
    assert all(np.array_equal(one, found[0]) and one.dtype == np.float32 for one in found)
    np.testing.assert_allclose(found[0], sdkde_core.estimate(X, Y[:99], **HOW), rtol=3e-3)


def test_to_every_kind_of_sink(tmp_path):
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("pyarrow")
    how = {"method": "kde", **HOW}
    expected = scale.estimate(X, Y, **how)
    for name in ("p.npy", "p.zarr", "p.parquet"):
        path = str(tmp_path / name)
        assert scale.estimate(X, Y, out=path, **how) == path
        read = source(path).read()[:, 0]
        assert np.array_equal(read, expected)
    z = zarr.create_array(tmp_path / "q.zarr", shape=(M,), chunks=(500,), dtype="f4")
    scale.estimate(X, Y, out=z, **how)
    assert np.array_equal(z[:], expected)


@pytest.mark.parametrize("name", ["moved.npy", "moved.zarr", "moved.npz", "moved.csv", "moved.parquet"])
def test_moved_samples_to_a_file_from_a_checkpoint(tmp_path, name, monkeypatch):
    """An interrupted run goes on with the blocks that are there."""
    pytest.importorskip("zarr")
    pytest.importorskip("pyarrow")
    x, path, how = X[:1100], str(tmp_path / name), {"checkpoint": tmp_path / "checkpoint", **HOW}
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        _full_disk(patched)
        scale.debias(x, out=path, **how)
    assert not (tmp_path / name).exists() and len(list((tmp_path / "checkpoint" / "shifts").iterdir())) == 1
    with pytest.raises(ValueError, match="resume=True"):
        scale.debias(x, out=path, **how)
    assert scale.debias(x, out=path, resume=True, **how) == path
    read = source(path)
    assert np.array_equal(read.read().astype(np.float32), scale.debias(x, **HOW))
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


def test_moved_samples_and_no_queries():
    np.testing.assert_allclose(scale.debias(X, **HOW), sdkde_core.debias(X, **HOW), atol=1e-3)
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


def test_what_is_gone_is_computed_again(tmp_path):
    """tests/test_checkpoints.py has what is damaged."""
    checkpoint = tmp_path / "checkpoint"
    once = scale.estimate(X, Y, checkpoint=checkpoint, **HOW)
    assert np.array_equal(once, scale.estimate(X, Y, **HOW))
    for name in ("shifts/1", "results/1"):
        (checkpoint / name).unlink()
    assert np.array_equal(scale.estimate(X, Y, checkpoint=checkpoint, resume=True, **HOW), once)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    scale.estimate(X, Y, checkpoint=checkpoint, **HOW)
    later = X.copy()
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
        ({"step": "moments"}, "step"),
        ({"score_bandwidth": 1.5}, "score_bandwidth"),
        ({"tails": "guard"}, "tails"),
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


# --- plans of points that nobody has all of ------------------------------------------------------------------------


def plan(x=P, y=Q, w=None, **options):
    with ExitStack() as kept:
        return scale.job(kept, Request(Goal.DENSITY, weights=w, **options), x, y).plan


@pytest.mark.parametrize(
    ("method", "weighted", "precision"), cases(("kde", "sdkde", "laplace"), (False, True), ("fast", "float64"))
)
def test_the_numbers_are_those_of_one_piece(method, weighted, precision):
    options = {"method": method, "bandwidth": "silverman", "precision": precision, "backend": "numpy"}
    w = W if weighted else None
    for y in (Q, None):
        got = scale.estimate(P, y, weights=w, **options)
        expected = sdkde_core.estimate(P, y, weights=w, **options)
        tolerance = {"fast": 2e-3, "float64": 1e-9}[precision]
        size = sdkde_core.estimate(P, y, weights=w, **options | {"method": "kde"}) if method == "laplace" else expected
        assert (abs(got - expected) <= tolerance * abs(size)).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("isj", "lscv", "lcv")])
def test_bandwidths_over_blocks(rule, weighted):
    w = None
    if weighted:  # those that a choice is made from are others then
        w = W / W.sum()
    got = plan(y=None, w=w, bandwidth=rule, method="kde", backend="numpy").bandwidth
    with np.errstate(divide="ignore"):
        expected = resolve(rule, P, None if w is None else np.log(w), method="kde")
    rtol = 0.25 if weighted and rule == "auto" else 1e-10
    np.testing.assert_allclose(got.matrix, expected.matrix, rtol=rtol, atol=rtol * np.diag(expected.matrix).min())


@pytest.mark.parametrize("weighted", [False, True])
def test_quartiles_are_exact(weighted, monkeypatch):
    """By counting, with ties, far outliers, and a sample that says little."""
    monkeypatch.setattr(survey, "SORTED", 50)
    rng = np.random.default_rng(1)
    x = np.stack([rng.normal(size=N), np.round(3 * rng.normal(size=N)), rng.standard_cauchy(N) * 1e30], axis=1)
    got = plan(x, None, W if weighted else None, bandwidth="silverman", method="kde", backend="numpy").bandwidth
    with np.errstate(divide="ignore"):
        expected = resolve("silverman", x, np.log(W / W.sum()) if weighted else None)
    np.testing.assert_allclose(got.factor, expected.factor, rtol=1e-9)


def test_what_cannot_be_is_said():
    bad = P.copy()
    bad[1024 + 5, 1] = np.nan
    not_finite = f"values that are not finite, the first nan at row {1024 + 5}, column 1"
    negative = np.where(np.arange(N) == 1024 + 3, -1.0, 1.0)
    cases = [
        ({"x": bad, "bandwidth": 1.0}, f"train has {not_finite}"),
        ({"w": negative, "bandwidth": 1.0}, f"weights has negative values, the first -1.0 at index {1024 + 3}"),
        ({"w": np.zeros(N), "bandwidth": 1.0}, "weights are all zero"),
        ({"y": bad, "bandwidth": 1.0}, f"query has {not_finite}"),
        ({"x": np.where([True, True, False], P, 4.0), "bandwidth": "silverman"}, "column 2 of train is constant"),
        ({"bandwidth": 1e-160}, "beyond 1e149 bandwidths"),
        ({"bandwidth": 1e-9, "precision": "float64"}, "holds up to 1.5e\\+04"),
        ({"bandwidth": 0.5, "adaptive": 0.5}, "adaptive=0.5 needs all samples in memory"),
        ({"bandwidth": "isj", "method": "kde"}, "isj' needs all samples in memory"),
        ({"method": "laplace", "negative": "renormalise", "bandwidth": 1.0}, "negative='renormalise' needs all"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            plan(**given)


@pytest.mark.parametrize("n", [1300, pytest.param(4700, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("d", "weighted"),
    [(1, False), (6, True), *(pytest.param(d, d < 6, marks=pytest.mark.slow) for d in (1, 2, 6))],
)
def test_the_default_is_that_of_data_in_memory(d, n, weighted, tmp_path, monkeypatch):
    """From an array, a Dask array, and a command that goes on with a checkpoint from within the first pass."""
    from click.testing import CliRunner

    from sdkde_core.cli.main import main

    da = pytest.importorskip("dask.array")
    monkeypatch.setattr(blockwise, "NUMBERS", 1024 * d)
    monkeypatch.chdir(tmp_path)
    rng, command = np.random.default_rng(n + d), ["estimate", "x.npy", "y.npy", "-o", "p.npy", "--log", "--resume"]
    x, w = rng.standard_t(4, size=(n, d)), rng.random(n) * (np.arange(n) % 3) if weighted else None
    y, how = np.concatenate([x[:20], 8.0 * x[:3]]), {"weights": w, "precision": "float64", "backend": "numpy"}
    chosen = plan(x, y, w, backend="numpy").bandwidth  # with weights from other samples than in memory
    assert chosen.tails and chosen.step == "moments"
    expected = sdkde_core.estimate(x, y, log=True, **how | {"bandwidth": chosen})
    got = scale.estimate(x, y, log=True, **how)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    lazy = da.from_array(x, chunks=(700, d))
    np.testing.assert_allclose(sdkde_core.estimate(lazy, y, log=True, **how).compute(), expected, rtol=1e-9)
    moved = sdkde_core.debias(x, **how | {"bandwidth": chosen})
    for one in (scale.debias(x, **how), sdkde_core.debias(lazy, **how).compute()):
        np.testing.assert_allclose(one, moved, atol=1e-9)

    def stop(done, rows):
        raise KeyError

    for name, array in (("x.npy", x), ("y.npy", y), ("w.npy", w)):
        np.save(name, array)
    with pytest.raises(KeyError):
        scale.estimate(x, y, log=True, checkpoint="kept", progress=stop, **how)
    command += ["--checkpoint", "kept", "--memory", "4GB", "--precision", "float64", "--backend", "numpy"]
    done = CliRunner().invoke(main, command if w is None else [*command, "--weights", "w.npy"], catch_exceptions=False)
    assert done.exit_code == 0 and np.array_equal(np.load("p.npy"), got)


def test_a_shard_without_weight_adds_nothing():
    w = np.where(np.arange(N) < 1024, 0.0, 1.0 + np.arange(N) / N)
    for method, how in (("kde", {}), ("sdkde", {"step": "moments", "tails": "guard"}), ("laplace", {})):
        options = {"weights": w, "bandwidth": 0.7, "method": method, "backend": "numpy", **how}
        expected = sdkde_core.estimate(P, Q, **options)
        np.testing.assert_allclose(scale.estimate(P, Q, **options), expected, rtol=1e-4, atol=1e-6 * expected.max())


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
