"""Files that are read and written: no input is lost, nothing of the user's is replaced, and damage is an error."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from commands import HOW, X, command, in_a_folder, needs_zarr, refused  # noqa: F401 - fixtures too

from sdkde_core import scale


def array(zarr, name, x=X, **extra):
    zarr.create_array(name, shape=x.shape, chunks=(500, *x.shape[1:]), dtype=x.dtype, **extra)[:] = x
    return name


def contents(folder="."):
    """Every file, and what is in it."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


# --- outputs that are inputs ------------------------------------------------------------------------------------


def inputs(zarr):
    """An array in a group and a link to it, files, a hard link, and a checkpoint."""
    zarr.create_group("store.zarr")
    array(zarr, "store.zarr/x.zarr")
    os.symlink("store.zarr/x.zarr", "link.zarr")
    np.save("x.npy", X[:, 0])
    np.savez("x.npz", x=X[:, 0], y=X[:5, 0])
    np.save("w.npy", np.ones(len(X)))
    os.link("x.npy", "hard.npy")
    os.symlink("x.npy", "soft.npy")


@pytest.mark.parametrize(
    ("train", "out", "more", "cause"),
    [
        ("x.npy", "x.npy", {}, "out and train are one file"),
        ("x.npy", "soft.npy", {}, "out and train are one file"),
        ("soft.npy", "x.npy", {}, "out and train are one file"),
        ("x.npy", "hard.npy", {}, "out and train are one file"),
        ("x.npz:x", "x.npz:z", {}, "out and train are one file"),
        ("x.npz:y", "x.npy", {"query": "soft.npy"}, "out and query are one file"),
        ("x.npy", "w.npy", {"weights": "w.npy"}, "out and weights are one file"),
        ("link.zarr", "store.zarr/x.zarr", {}, "out and train are one file"),
        ("store.zarr/x.zarr", "link.zarr", {}, "out and train are one file"),
        ("store.zarr/x.zarr", "store.zarr", {}, "out contains train"),
        ("link.zarr", "store.zarr", {}, "out contains train"),
        ("link.zarr", "store.zarr/x.zarr/p.zarr", {}, "out lies in train"),
        ("store.zarr/x.zarr", "link.zarr/c/p.npy", {}, "out lies in train"),
        ("x.npy", "kept/results/p.npy", {"checkpoint": "kept"}, "out lies in the checkpoint"),
        ("x.npy", "kept.zarr", {"checkpoint": "kept.zarr/c"}, "out contains the checkpoint"),
        ("link.zarr", "p.npy", {"checkpoint": "store.zarr/x.zarr"}, "the checkpoint lies in train"),
    ],
)
def test_no_input_is_written_to(zarr, train, out, more, cause):
    """The command and Python refuse alike."""
    inputs(zarr)
    before = contents()
    with pytest.raises(ValueError, match=cause):
        scale.estimate(train, out=out, **more, **HOW)
    positional = [train, more["query"]] if "query" in more else [train]
    options = [word for name in more if name != "query" for word in (f"--{name}", more[name])]
    assert cause in refused(*positional, "-o", out, *options)
    assert contents() == before


def test_no_mapped_input_is_written_to(zarr):
    inputs(zarr)
    before = contents()
    mapped, wide, opened = np.load("x.npy", mmap_mode="r+"), array(zarr, "wide.zarr"), zarr.open_array("link.zarr")
    moved = zarr.open_array("store.zarr/x.zarr")
    for call in (
        lambda: scale.estimate("soft.npy", out=mapped, **HOW),
        lambda: scale.estimate(mapped, out="x.npy", **HOW),
        lambda: scale.estimate(np.asarray(mapped), out=np.load("hard.npy", mmap_mode="r+"), **HOW),
        lambda: scale.estimate(mapped[:5], out=mapped[2:7], **HOW),
        lambda: scale.estimate(X, out=X[:, 0], **HOW),
        lambda: scale.debias(opened, out="store.zarr/x.zarr", **HOW),
        lambda: scale.debias(opened, out=moved, **HOW),
        lambda: scale.debias("store.zarr/x.zarr", out=opened, **HOW),
    ):
        with pytest.raises(ValueError, match=r"out and train are one file|out shares memory with train"):
            call()
    assert {path: text for path, text in contents().items() if wide not in path.parts} == before


def test_an_output_beside_its_inputs_is_written(zarr):
    """In a group of the user's, under a name that is free."""
    inputs(zarr)
    before = contents()
    assert command("store.zarr/x.zarr", "-o", "store.zarr/p.zarr").exit_code == 0
    assert zarr.open_group("store.zarr")["p.zarr"].shape == (len(X),)
    assert before.items() <= contents().items()


# --- outputs that are there -------------------------------------------------------------------------------------


def test_a_folder_that_sdkde_did_not_write_is_not_replaced(zarr):
    array(zarr, "x.zarr", X[:200])
    array(zarr, "users.zarr", X[:9])
    array(zarr, "attributes.zarr", X[:9], attributes={"written_by": "me"})
    zarr.create_group("group.zarr", attributes={"written_by": "sdkde"})
    Path("empty.zarr").mkdir()
    Path("garbage.zarr").mkdir()
    Path("garbage.zarr/zarr.json").write_text("[" * 10**5)
    Path("file.zarr").write_text("notes")
    for name, notes in (("extended", "notes.txt"), ("chunks", "c/notes.txt")):
        scale.estimate("x.zarr", out=f"{name}.zarr", **HOW)
        Path(f"{name}.zarr", notes).write_text("precious")
    before = contents()
    for out in ("users", "attributes", "group", "empty", "garbage", "file", "extended", "chunks"):
        cause = "is there, and is no array that sdkde wrote; name another, or remove it first"
        assert f"{out}.zarr: {cause}" in refused("x.zarr", "-o", f"{out}.zarr")
        with pytest.raises(FileExistsError, match="no array that sdkde wrote"):
            scale.estimate("x.zarr", out=f"{out}.zarr", **HOW)
    assert contents() == before


def test_an_array_that_sdkde_wrote_is_replaced_through_a_link_too_and_keeps_its_mode(zarr):
    Path("far").mkdir()
    os.symlink("far/p.zarr", "p.zarr")
    for x in (X[:50], X[:40], X[:30]):
        scale.estimate(x, out="p.zarr", **HOW)
        assert np.array_equal(zarr.open_array("far/p.zarr")[:], scale.estimate(x, **HOW))
        assert len(x) == 50 or os.name != "posix" or Path("far/p.zarr").stat().st_mode & 0o777 == 0o700
        Path("far/p.zarr").chmod(0o700)
    assert Path("p.zarr").is_symlink()
    assert [path.name for path in Path("far").iterdir()] == ["p.zarr"]


def test_an_output_that_may_not_be_written_is_refused_before_anything_is_computed(zarr):
    array(zarr, "users.zarr", X[:9])
    progress = []
    for out, error in (("users.zarr", FileExistsError), ("none/p.npy", FileNotFoundError), (np.empty(7), ValueError)):
        with pytest.raises(error):
            scale.estimate(X, out=out, progress=lambda done, rows: progress.append(done), **HOW)
    assert not any(progress)


def test_a_folder_that_came_meanwhile_is_not_replaced_and_the_result_is_kept(zarr):
    def put(done, rows):
        Path("p.zarr").mkdir(exist_ok=True)
        Path("p.zarr/notes.txt").write_text("precious")

    with pytest.raises(FileExistsError, match=r"no array that sdkde wrote.* the new one is ") as found:
        scale.estimate(X[:50], out="p.zarr", progress=put, **HOW)
    assert Path("p.zarr/notes.txt").read_text() == "precious"
    kept = found.value.strerror.partition("the new one is ")[2]
    assert np.array_equal(zarr.open_array(kept)[:], scale.estimate(X[:50], **HOW))


def test_after_an_error_the_old_array_is_there(zarr):
    scale.estimate(X[:50], out="p.zarr", **HOW)
    before = contents()
    bad = X[:50].copy()
    bad[7] = np.nan
    np.save("bad.npy", bad)
    assert "not finite" in refused("bad.npy", "-o", "p.zarr")
    Path("bad.npy").unlink()
    assert contents() == before


# --- inputs that are damaged ------------------------------------------------------------------------------------


def npy(shape, payload, fortran=False, descr="<f8"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": fortran, "descr": descr})
    return file.getvalue() + payload


@pytest.mark.parametrize("extension", [".npy", ".npz"])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize(
    ("shape", "length", "descr", "cause"),
    [
        ((-5, 3), 0, "<f8", r"its header says shape \(-5, 3\), which is negative"),
        ((5, -3), 120, "<f8", r"its header says shape \(5, -3\), which is negative"),
        ((-5,), 0, "<f8", r"its header says shape \(-5,\), which is negative"),
        ((5, 3), 100, "<f8", r"is cut off: its header says shape \(5, 3\), 120 bytes, and there are 100"),
        ((5,), 30, "<f8", r"is cut off: its header says shape \(5,\), 40 bytes, and there are 30"),
        ((1 << 62, 1 << 62), 80, "<f8", "is cut off"),
        ((5, 3), 300, "<f8", r"has more bytes than its array: its header says shape \(5, 3\), 120 bytes"),
        ((1 << 60, 0), 0, "<f8", "the array (has no columns|is too big)|array is too big"),
        ((1 << 60, 2), 0, "|S0", "the array is of dtype .*; pass numbers|itemsize cannot be zero"),
        ((5,), 40, "<M8[s]", "the array is of dtype .*; pass numbers"),
    ],
)
def test_headers_that_are_not_of_what_follows(extension, fortran, shape, length, descr, cause):
    name, data = f"x{extension}", npy(shape, bytes(length), fortran, descr)
    if extension == ".npy":
        Path(name).write_bytes(data)
    else:
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("x.npy", data)
    with pytest.raises(ValueError, match=f"^{name}: {cause}"):
        scale.estimate(name, **HOW)
    assert refused(name, "-o", "p.npy").startswith(f"Error: {name}: ")
    np.save("train.npy", X[:9])
    assert refused("train.npy", name, "-o", "p.npy").startswith(f"Error: {name}: ")
    assert not Path("p.npy").exists()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_the_checksum_of_an_archive_is_compared(order, save):
    save("x.npz", x=np.asarray(np.round(X[:500], 1), order=order))
    whole = Path("x.npz").read_bytes()
    with zipfile.ZipFile("x.npz") as archive:
        length = archive.getinfo("x.npy").compress_size
    for at in (length // 2, length - 1):
        place = 50 + at
        Path("x.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"^x\.npz: "):
            scale.estimate("x.npz", **HOW)
        assert refused("x.npz", "-o", "p.npy").startswith("Error: x.npz: ")


@pytest.mark.parametrize("checked", [False, True])
def test_a_damaged_chunk_of_zarr_is_named(zarr, checked):
    array(zarr, "x.zarr", X, **({"compressors": zarr.codecs.Crc32cCodec()} if checked else {}))
    chunk = Path("x.zarr/c/1/0")
    data = chunk.read_bytes()
    chunk.write_bytes(data[:99] + bytes([data[99] ^ 16]) + data[100:] if checked else data[:50])
    with pytest.raises(ValueError, match=r"^x\.zarr: "):
        scale.estimate("x.zarr", **HOW)
    with pytest.raises(ValueError, match=r"^x\.zarr: "):
        scale.estimate(X, "x.zarr", **HOW)
    assert refused("x.zarr", "-o", "p.npy").startswith("Error: x.zarr: ")
    Path("x.zarr/zarr.json").write_text("{")
    assert refused("x.zarr", "-o", "p.npy").startswith("Error: x.zarr: ")
    zarr.create_group("group.zarr")
    assert refused("group.zarr", "-o", "p.npy").startswith("Error: group.zarr: ")
    zarr.create_array("y.zarr", shape=(1 << 62, 3), chunks=(500, 3), dtype="f8")  # all zeros, by zarr's rule
    assert refused("y.zarr", "-o", "p.npy").startswith("Error: y.zarr: its metadata say shape (4611686018427387904, 3)")


def test_commas_in_the_quotes_of_a_csv_header():
    lines = [f"{a},{b}" for a, b in X[:50, :2]]
    for first in ('"a, in cm",b', '"a, in ""cm""" , "b"'):
        Path("x.csv").write_text("\n".join([first, *lines]))
        assert np.array_equal(scale.estimate("x.csv", **HOW), scale.estimate(X[:50, :2], **HOW))
    Path("x.csv").write_text("\n".join(['"a,b', *lines]))
    assert refused("x.csv", "-o", "p.npy").startswith("Error: x.csv: line 2 has 2 values")


@pytest.mark.parametrize("count", [12, pytest.param(2500, marks=pytest.mark.slow)])
def test_forged_files(zarr, count):
    """benchmarks/fuzz_files.py: no crash, no traceback, and no damage accepted where a checksum exists."""
    pytest.importorskip("pyarrow")
    script = Path(__file__).parent.parent / "benchmarks" / "fuzz_files.py"
    words = [sys.executable, str(script), "--files", str(count)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# --- what an output or a reader may not do ----------------------------------------------------------------------------


def test_an_array_of_an_archive_does_not_replace_the_others():
    np.save("x.npy", X)
    np.savez("r.npz", run1=X, weights=np.ones(3))
    assert "also holds run1, weights, which would be lost" in refused("x.npy", "-o", "r.npz:density")
    assert sorted(np.load("r.npz").files) == ["run1", "weights"]


class Reader:
    """An object that reads rows, as it is told to."""

    dtype = X.dtype

    def __init__(self, read, shape=X.shape):
        self.read, self.shape = read, shape


@pytest.mark.parametrize(
    "read",
    [
        lambda start, stop: X[start:stop].T,
        lambda start, stop: X[start:stop] + 1j,
        lambda start, stop: X[start : stop - 1],
        lambda start, stop: X[start:stop].astype(int),
    ],
)
def test_rows_that_are_not_what_was_declared(read):
    with pytest.raises(ValueError, match=r"train: rows 0 to \d+ are declared as float64 of shape"):
        scale.estimate(Reader(read), bandwidth=0.4)
    masked = np.ma.masked_less(X, 0.0)
    for given in (masked, Reader(lambda start, stop: masked[start:stop])):
        with pytest.raises(TypeError, match=r"train .*masked"):
            scale.estimate(given, bandwidth=0.4)


@pytest.mark.parametrize("out", [np.zeros(len(X), int), np.zeros(len(X), "U3"), [0.0] * len(X), b"out"])
def test_what_takes_results_takes_floats(out):
    with pytest.raises(TypeError, match="pass a path, or an array of floats"):
        scale.estimate(X, out=out, bandwidth=0.4)


def test_an_out_that_is_read_only_is_refused_and_one_that_is_an_input():
    out = np.zeros(len(X))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        scale.estimate(X, out=out, bandwidth=0.4)

    class Rows:
        shape, dtype = (30,), np.dtype(float)

        def __getitem__(self, rows):
            return np.arange(30.0)[rows]

        def __setitem__(self, rows, block):
            raise AssertionError("an input is written to")

    given = Rows()
    with pytest.raises(ValueError, match="out is train"):
        scale.estimate(given, out=given, bandwidth=0.4)


def test_a_file_that_changes_while_it_is_read_is_an_error(monkeypatch):
    np.save("t.npy", X)

    def changed(start, stop):
        np.save("t.npy", X + 1.0)
        os.utime("t.npy", (1, 1))
        return np.ones(stop - start)

    with pytest.raises(ValueError, match="has changed since it was opened"):
        scale.estimate("t.npy", bandwidth=0.4, weights=Reader(changed, (len(X),)))


def test_a_folder_that_is_no_checkpoint_stays_as_it_is(zarr):
    Path("mine").mkdir()
    Path("mine/notes.md").write_text("mine")
    with pytest.raises(ValueError, match="is no checkpoint"):
        scale.estimate(X, bandwidth=0.4, checkpoint="mine")
    assert [path.name for path in Path("mine").iterdir()] == ["notes.md"]
