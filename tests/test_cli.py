"""The command line: formats in and out, streaming, errors of one line, and a document that has everything."""

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import sdkde_core
from sdkde_core import files
from sdkde_core.bandwidth.rules import RULES
from sdkde_core.choice import registry
from sdkde_core.cli.main import main
from sdkde_core.estimator import batches
from sdkde_core.protocol import Support

DOCUMENT = (Path(__file__).parent.parent / "docs" / "command-line.md").read_text()
X = np.random.default_rng(0).normal(size=(100, 3)) * [1.0, 20.0, 0.3] + [0.0, 500.0, 0.0]
Y = np.random.default_rng(1).normal(size=(70, 3)) * [1.5, 25.0, 0.4] + [0.0, 500.0, 0.0]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sdkde(*arguments):
    """Run a command that must succeed."""
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments):
    """Run a command that must fail as promised; return its line."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    line = result.stderr
    assert line.startswith("Error: ")
    assert line.count("\n") == 1
    assert line.endswith("\n")
    return line


def save(name, x, names=None):
    path = Path(name)
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        np.savez(path, other=np.zeros(3), points=x)
        return f"{name}:points"
    elif path.suffix in (".csv", ".tsv"):
        comma = "," if path.suffix == ".csv" else "\t"
        header = comma.join(names or "abc"[: x.shape[1]])
        np.savetxt(path, x, delimiter=comma, fmt="%.17g", header=header, comments="")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.table({n: arrow.array(np.ascontiguousarray(c)) for n, c in zip(names or "abcdef", x.T)})
        parquet.write_table(table, path)
    return name


def load(name):
    if name.endswith(".npz"):
        return np.load(name)["density"]
    found = files.source(name)
    assert found.names == (("density",) if name.endswith((".csv", ".tsv", ".parquet")) else ())
    return found.read()[:, 0]


# --- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [e for e in files.EXTENSIONS if e != ".zarr"])  # tests/test_scale.py has it
def test_every_format_in_and_out(extension):
    train, query, out = save(f"train{extension}", X), save(f"query{extension}", Y), f"out{extension}"
    result = sdkde("estimate", train, query, "-o", out)
    assert result.stdout == ""
    assert re.fullmatch(rf"out{extension}: 70 rows, numpy on cpu, \d+\.\d\d s\n", result.stderr)
    np.testing.assert_allclose(load(out), sdkde_core.estimate(X, Y), rtol=1e-9)
    assert load(out).dtype == np.float64
    assert sdkde("estimate", train, query, "-o", out, "-q").output == ""
    assert [p.name for p in Path().iterdir() if p.name.startswith(".")] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
@pytest.mark.parametrize("extension", [e for e in files.EXTENSIONS if e != ".zarr"])  # tests/test_scale.py has it
def test_every_format_into_a_pipe(extension):
    if extension == ".parquet":
        pytest.importorskip("pyarrow")
    name, read = f"out{extension}", []
    os.mkfifo(name)
    reader = threading.Thread(target=lambda: read.append(Path(name).read_bytes()), daemon=True)
    reader.start()
    want = np.linspace(0.0, 1.0, 9)
    with files.writing(name, (9,), "float64", "density") as write:
        write(want[:5])
        write(want[5:])
    reader.join(60)
    assert Path(name).is_fifo()
    Path(f"got{extension}").write_bytes(read[0])
    np.testing.assert_array_equal(load(f"got{extension}"), want)


@pytest.mark.parametrize("extension", [".npy", ".npz", ".parquet"])
def test_float32_stays_float32(extension):
    x, y = X.astype(np.float32), Y.astype(np.float32)
    train, query, out = save(f"train{extension}", x), save(f"query{extension}", y), f"out{extension}"
    sdkde("estimate", train, query, "-o", out)
    assert load(out).dtype == np.float32
    np.testing.assert_allclose(load(out), sdkde_core.estimate(x, y), rtol=1e-3)
    sdkde("estimate", train, save("wide.npy", Y), "-o", out)
    assert load(out).dtype == np.float64


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_without_a_query_the_training_points(method):
    sdkde("estimate", save("x.npy", X), "-o", "out.npy", "--method", method)
    np.testing.assert_allclose(np.load("out.npy"), sdkde_core.estimate(X, method=method), rtol=1e-9)


def test_one_dimension_integers_and_other_layouts():
    x = X[:, 0]
    want = sdkde_core.estimate(x)
    for name in ("x.npy", "x.npz"):
        sdkde("estimate", save(name, x), "-o", "out.npy")
        np.testing.assert_allclose(np.load("out.npy"), want, rtol=1e-9)
    np.savez_compressed("fortran.npz", np.asfortranarray(X))
    np.save("fortran.npy", np.asfortranarray(X))
    np.save("big.npy", X.astype(">f8"))
    for name in ("fortran.npz", "fortran.npy", "big.npy"):
        sdkde("estimate", name, "-o", "out.npy")
        np.testing.assert_allclose(np.load("out.npy"), sdkde_core.estimate(X), rtol=1e-9)
    grid = np.arange(60).reshape(20, 3) ** 2 % 17
    sdkde("estimate", save("grid.npy", grid), "-o", "out.npy")
    np.testing.assert_allclose(np.load("out.npy"), sdkde_core.estimate(grid), rtol=1e-9)


@pytest.mark.parametrize("extension", [e for e in files.EXTENSIONS if e != ".zarr"])  # tests/test_scale.py has it
def test_an_empty_query(extension):
    query = save(f"query{extension}", np.empty((0, 3)))
    sdkde("estimate", save("x.npy", X), query, "-o", f"out{extension}")
    assert load(f"out{extension}").shape == (0,)


def test_csv_as_people_write_it():
    lines = [",".join(map(repr, row)) for row in X.tolist()]
    want = sdkde_core.estimate(X)
    quoted = "\n".join('"' + line.replace(",", '","') + '"' for line in lines)
    for text in (
        "\n".join(lines),
        "\r\n".join(["a,b,c", *lines, ""]),
        "\ufeff\n\n" + "\n\n".join(["# x, y, z", *lines]) + "\n\n \n",
        '"a","b",""\n' + quoted,
        quoted.replace(",", ", "),
        "# of 1936\n#\n\n" + "\n".join(["a,b,c", *lines]),
        "# of 1936\n# 1, 2, 3\n" + "\n".join(lines),
        "\n".join(["#,b,c", *lines]),  # a column's name, as of numbers in a list
    ):
        Path("x.csv").write_text(text, encoding="utf-8", newline="")
        sdkde("estimate", "x.csv", "-o", "out.npy")
        np.testing.assert_allclose(np.load("out.npy"), want, rtol=1e-9)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "the file is empty"),
        ("a,b,c\n", "train is empty"),
        ("1,2,3\n4,x,6\n", "line 2: 'x' is not a number"),
        ("1,2,3\n4,2024_01,6\n", "line 2: '2024_01' is not a number"),
        ("\na,b\n1,2\n\n3,\n", "line 5 has '' for a number"),
        ("1,2,3\n4,5\n", "line 2 has 2 values, the first line 3"),
        ("1,x,3\n4,5,6\n", "line 1: 'x' is not a number"),
        ("1\n3;4\n", "line 2: '3;4' is not a number (values are separated by commas)"),
        ("1;2\n3;4\n", "separated by commas"),
        ("1.5 2.5\n1 2\n", "separated by commas"),
        (",a,b\n0,1,2\n1,4,5\n", "the first column has no name"),
        ("0,1\n0.5,0.25\n1.5,2.25\n", "is a data frame's default header, or a sample"),
        ("1,2\n3,nan\n", "train has values that are not finite, the first nan at row 1 (line 2), column 1"),
        ("a,b,c\n1,2\n", "line 2 has 2 values, the first line 3, separated by commas: '1,2'"),
        ("A title\na,b\n1,2\n", "line 2 has 2 values, the first line 1, separated by commas: 'a,b'"),
        ("a;b\n1;2\n", "Error: x.csv: line 2: '1;2' is not a number (values are separated by commas)"),
        ("# a note\n\n# b\na,b\n1,2\n3,inf\n", "the first inf at row 1 (line 6), column 1 ('b')"),
        ("# a note\n1,2\n3,inf\n", "the first inf at row 1 (line 3), column 1;"),
        ("\na,b\n1,2\n\n3,inf\n", "x.csv: train has values that are not finite, the first inf at row 1 (line 5), col"),
    ],
)
def test_csv_errors_name_the_line(text, cause):
    Path("x.csv").write_text(text)
    assert cause in refused("estimate", "x.csv", "-o", "out.npy")


@pytest.mark.parametrize("option", [("--support", "a:0,"), ("--coordinates", "log")])
def test_samples_outside_are_named_by_their_line(option):
    Path("x.csv").write_text("a\n1.5\n2.5\n-1\n3.5\n")
    line = refused("estimate", "x.csv", "-o", "out.npy", *option)
    assert line.startswith("Error: x.csv: ") and "in row 2 (line 4)" in line


def test_parquet_columns():
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"a": X[:, 0], "b": X[:, 1], "__index_level_0__": np.arange(100), "c": X[:, 2]}
    parquet.write_table(arrow.table(columns), "x.parquet", row_group_size=64)
    sdkde("estimate", "x.parquet", "-o", "out.npy")
    np.testing.assert_allclose(np.load("out.npy"), sdkde_core.estimate(X), rtol=1e-9)
    parquet.write_table(arrow.table({"a": [1.0, None], "b": [1, 2]}), "gaps.parquet")
    assert "column 'a' has missing values" in refused("estimate", "gaps.parquet", "-o", "out.npy")
    parquet.write_table(arrow.table({"a": [1.0, 2.0], "b": ["x", "y"]}), "text.parquet")
    assert "column 'b' is of type string" in refused("estimate", "text.parquet", "-o", "out.npy")
    Path("broken.parquet").write_bytes(b"PAR1 no")
    assert "broken.parquet: " in refused("estimate", "broken.parquet", "-o", "out.npy")


def test_parquet_without_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("x.parquet").touch()
    for arguments in (("x.parquet", "-o", "out.npy"), (save("x.npy", X), "-o", "out.parquet")):
        assert "pip install 'sdkde-core[parquet]'" in refused("estimate", *arguments)


def test_columns_are_matched_by_name_where_both_files_have_them():
    train, want = save("x.csv", X, "abc"), sdkde_core.estimate(X, Y)
    other = save("y.csv", np.column_stack([Y[:, 2], np.full(70, 7.5), Y[:, :2]]), "czab")
    for more in ((), ("--memory", "64GB")):
        sdkde("estimate", train, other, "-o", "out.npy", *more)
        np.testing.assert_allclose(np.load("out.npy"), want, rtol=1e-9)
    assert "70 × 100, d = 3" in sdkde("explain", train, other).stdout
    assert "Warning" not in sdkde("estimate", train, save("y.npy", Y), "-o", "out.npy").stderr
    told = sdkde("estimate", train, save("z.csv", Y, "def"), "-o", "out.npy").stderr
    assert told.startswith(
        "Warning: z.csv has the columns d, e, f for a, b, c of x.csv: they are matched by position\n"
    )
    np.testing.assert_allclose(np.load("out.npy"), want, rtol=1e-9)


# --- options ----------------------------------------------------------------------------------------------------


def test_bandwidths():
    train, query = save("x.npy", X), save("y.npy", Y)
    h = [0.4, 9.0, 0.1]
    matrix = np.diag(np.square(h)) + 0.001
    np.save("matrix.npy", matrix)
    np.save("row.npy", h)
    np.savetxt("row.csv", [h], delimiter=",")
    np.savetxt("column.csv", h)
    np.savetxt("one.csv", [2.0])
    np.savetxt("matrix.csv", matrix, delimiter=",")
    for text, bandwidth in [
        ("scott", "scott"),
        ("2.5", 2.5),
        ("0.4,9,0.1", h),
        ("row.npy", h),
        ("row.csv", h),
        ("column.csv", h),
        ("one.csv", 2.0),
        ("matrix.npy", matrix),
        ("matrix.csv", matrix),
    ]:
        sdkde("estimate", train, query, "-o", "out.npy", "--bandwidth", text, "--log")
        want = sdkde_core.estimate(X, Y, bandwidth=bandwidth, log=True)
        np.testing.assert_allclose(np.load("out.npy"), want, atol=1e-9, rtol=1e-9)
    own = ("--method", "kde", "--bandwidth", "normal-reference")  # a rule that depends on the method
    sdkde("estimate", train, query, "-o", "out.npy", *own)
    want = sdkde_core.estimate(X, Y, method="kde", bandwidth="normal-reference")
    np.testing.assert_allclose(np.load("out.npy"), want, rtol=1e-9)
    for text, cause in [
        ("silvermann", f"pass one of {', '.join(RULES)}, numbers, or a file; did you mean 'silverman'"),
        ("1,2", "bandwidth has shape (2,), but train has 3 dimensions"),
        ("-1", "bandwidth is -1.0"),
        ("none.npy", "none.npy: No such file"),
    ]:
        assert cause in refused("estimate", train, "-o", "out.npy", "--bandwidth", text)


def test_weights_precision_backend_device_and_threads(monkeypatch):
    train, query, w = save("x.npy", X), save("y.npy", Y), np.arange(1.0, 101.0)
    np.savetxt("w.csv", w, header="w", comments="")
    sdkde(*("estimate", train, query, "-o", "out.npy", "--weights", "w.csv", "--precision", "float64"))
    np.testing.assert_allclose(
        np.load("out.npy"), sdkde_core.estimate(X, Y, weights=w, precision="float64"), rtol=1e-12
    )
    result = sdkde("estimate", train, query, "-o", "out.npy", "--backend", "numpy", "--device", "CPU")
    assert "numpy on cpu" in result.stderr
    assert "x.npy: weights have 3 columns; pass one" in refused("estimate", train, "-o", "o.npy", "--weights", "x.npy")
    assert "weights has shape (70,)" in refused("estimate", train, "-o", "o.npy", "--weights", save("w.npy", w[:70]))
    assert "device is 'gpu'" in refused("estimate", train, "-o", "o.npy", "--device", "gpu")
    assert "backend 'nope' is unknown" in refused("estimate", train, "-o", "o.npy", "--backend", "nope")
    assert "'nope' is not one of" in refused("estimate", train, "-o", "o.npy", "--method", "nope")
    monkeypatch.setenv("SDKDE_PRECISION", "nope")
    assert "SDKDE_PRECISION" in refused("estimate", train, "-o", "o.npy")


def test_laplaces_negative_values_are_counted_once():
    train, query = save("x.npy", X), save("y.npy", Y)
    result = sdkde(*("estimate", train, query, "-o", "out.npy", "--method", "laplace", "--log", "--bandwidth", "scott"))
    count = np.isnan(np.load("out.npy")).sum()
    assert count > 0
    assert f"Warning: the Laplace estimate is negative at {count} of 70 points" in result.stderr
    assert result.stderr.count("\n") == 2


@pytest.mark.parametrize("negative", ["clip", "renormalise"])
def test_negative_values_are_clipped(negative):
    train, query, options = save("x.npy", X), save("y.npy", Y), ("--method", "laplace", "--negative", negative)
    result = sdkde("estimate", train, query, "-o", "out.npy", "--log", *options)
    assert "Warning" not in result.stderr
    want = sdkde_core.estimate(X, Y, method="laplace", negative=negative, log=True)
    assert np.isneginf(want).any()
    np.testing.assert_allclose(np.load("out.npy"), want, rtol=1e-9)
    assert "its integral there is" in sdkde("explain", train, query, "--measure", *options).stdout
    assert "is for method='laplace'" in refused("estimate", train, "-o", "out.npy", "--negative", negative)


# --- streaming --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_batches(monkeypatch):
    """Several batches in both passes, the last one short."""
    monkeypatch.setattr(batches, "ROWS", 1024)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_stream_has_the_bits_of_batches(method, weighted, small_batches):
    rng = np.random.default_rng(1)
    x, y, weights = rng.normal(size=(1100, 2)), 3 * rng.normal(size=(2100, 2)), rng.random(1100)
    how = ["--method", method, "--backend", "numpy", "--bandwidth", "0.4"]
    how += ["--weights", save("w.npy", weights)] if weighted else []
    sdkde("estimate", save("x.npy", x), save("y.npy", y), "-o", "out.npy", *how)
    options = {"method": method, "backend": "numpy", "bandwidth": 0.4, "weights": weights if weighted else None}
    np.testing.assert_array_equal(np.load("out.npy"), sdkde_core.estimate(x, y, progress=lambda *_: None, **options))


def test_neither_query_nor_result_is_whole_in_memory():
    rows = 500_000
    mapped = np.lib.format.open_memmap("query.npy", "w+", np.float64, (rows, 4))
    mapped[:] = np.linspace(-3, 3, rows)[:, None]
    mapped.flush()
    del mapped
    train = save("x.npy", np.random.default_rng(3).normal(size=(8, 4)))
    whole = Path("query.npy").stat().st_size
    sdkde("estimate", train, "query.npy", "-o", "out.npy", "--method", "kde")  # what that imports takes memory too
    tracemalloc.start()
    try:
        sdkde("estimate", train, "query.npy", "-o", "out.npy", "--method", "kde")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert whole == 16_000_128
    assert peak < 0.7 * whole
    assert np.load("out.npy", mmap_mode="r").shape == (rows,)


def test_a_value_that_is_not_finite_is_named_by_its_row_in_the_file(small_batches):
    y = np.tile(Y, (50, 1))
    y[2500, 1] = np.inf
    Path("out.npy").write_text("as before")
    for query in (save("y.npy", y), save("y.csv", y)):
        line = refused("estimate", save("x.npy", X), query, "-o", "out.npy")
        assert "query has values that are not finite, the first inf at row 2500" in line
    assert Path("out.npy").read_text() == "as before"
    assert sorted(p.name for p in Path().iterdir()) == ["out.npy", "x.npy", "y.csv", "y.npy"]


def test_a_batch_that_reaches_farther_than_the_backend_goes_elsewhere_only_under_auto(monkeypatch, small_batches):
    (working,) = (r for r in sdkde_core.backends() if r.name == "numpy")
    holds = Support(False, "too far for it"), Support(True, "near")
    info = replace(working.info, name="near", supports=lambda p: holds[p.extent <= 30], extent_limit=lambda p: 1e9)
    monkeypatch.setattr(registry, "records", lambda: (replace(working, name="near", info=info), working))
    x, y = X / [1, 20, 0.3], np.zeros((1100, 3))
    y[1050:] = 40.0

    arguments = "estimate", save("x.npy", x), save("y.npy", y), "-o", "o.npy", "--method", "kde", "--bandwidth", "1"
    assert ": 1100 rows, near on cpu, " in CliRunner().invoke(main, [*arguments, "--log"]).stderr
    want = sdkde_core.estimate(x, y, bandwidth=1.0, method="kde", log=True, backend="numpy")
    np.testing.assert_allclose(np.load("o.npy"), want, rtol=1e-9)
    assert "too far for it" in refused(*arguments, "--backend", "near")


def test_a_file_that_grows_while_it_is_read():
    source = files.source(save("y.csv", Y))
    with Path("y.csv").open("a") as file:
        file.write("1,2,3\n")
    with pytest.raises(ValueError, match=r"y\.csv: had 70 rows and now 71"):
        list(source.batches(16))


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
@pytest.mark.parametrize(("speed", "bar"), [(1e4, True), (1e-4, False)])
def test_a_progress_bar_on_a_terminal_for_long_work_only(speed, bar):
    np.save("x.npy", X)
    code = (
        f"import time; clock = time.perf_counter; time.perf_counter = lambda: {speed} * clock(); "
        "from sdkde_core.cli import main; main.main(['estimate', 'x.npy', '-o', 'out.npy'])"
    )
    leader, follower = os.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=follower, check=True)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(leader, 4096):
            shown += piece
    os.close(leader)
    assert b"out.npy: 100 rows" in shown
    assert (b"200/200" in shown) is bar
    assert (b"[###" in shown) is bar


# --- errors -----------------------------------------------------------------------------------------------------


def test_errors_are_one_line():
    train = save("x.npy", X)
    np.save("objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    np.save("complex.npy", np.ones((4, 2), complex))
    np.save("cube.npy", np.ones((2, 2, 2)))
    np.savez("cube.npz", np.ones((2, 2, 2)))
    np.savez("scalar.npz", np.float64(1))
    np.savez("objects.npz", np.array([{}, 1], dtype=object))
    with zipfile.ZipFile("nothing.npz", "w"):
        pass
    for name in ("empty.npy", "empty.npz"):
        Path(name).touch()
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:900])
    Path("folder.npy").mkdir()
    for arguments, cause in [
        (("none.npy", "-o", "o.npy"), "none.npy: No such file or directory"),
        (("folder.npy", "-o", "o.npy"), "folder.npy: Is a directory"),
        (
            ("x.txt", "-o", "o.npy"),
            "x.txt: unknown extension '.txt'; pass one of .npy, .npz, .csv, .tsv, .parquet, .zarr",
        ),
        ((train, "-o", "o.txt"), "o.txt: unknown extension '.txt'"),
        ((train, "-o", "none/o.npy"), "none/o.npy: there is no folder "),
        ((train, "-o", "folder.npy"), "folder.npy: Is a directory"),
        ((train, "-o", "x.npy"), "x.npy: out and train are one file"),
        (
            (train, "-o", "h.npy", "--bandwidth", save("h.npy", np.full(3, 0.5))),
            "h.npy: out and bandwidth are one file",
        ),
        (
            (train, "-o", "o.cvs"),
            "o.cvs: unknown extension '.cvs'; pass one of .npy, .npz, .csv, .tsv, .parquet, .zarr; did you mean",
        ),
        (("objects.npy", "-o", "o.npy"), "objects.npy: the array is of Python objects"),
        (("objects.npz", "-o", "o.npy"), "objects.npz: the array is of Python objects"),
        (("complex.npy", "-o", "o.npy"), "complex.npy: train is ndarray of dtype complex128; pass real numbers"),
        (("cube.npy", "-o", "o.npy"), "cube.npy: the array has shape (2, 2, 2); pass (points, dimensions)"),
        (("cube.npz", "-o", "o.npy"), "cube.npz: "),
        (("scalar.npz", "-o", "o.npy"), "scalar.npz: the array has shape ()"),
        (("nothing.npz", "-o", "o.npy"), "nothing.npz: holds 0 arrays"),
        (("empty.npy", "-o", "o.npy"), "empty.npy: "),
        (("empty.npz", "-o", "o.npy"), "empty.npz: "),
        (("cut.npy", "-o", "o.npy"), "cut.npy: "),
        ((train, save("two.npy", Y[:, :2]), "-o", "o.npy"), "two.npy: query has 2 dimensions, but train has 3"),
        ((train, save("flat.npy", Y[:, 0]), "-o", "o.npy"), "flat.npy: query has 1 dimensions, but train has 3"),
        ((save("same.npy", np.ones((5, 2))), "-o", "o.npy"), "same.npy: bandwidth='auto' needs columns that vary"),
        ((save("one.npy", np.ones((1, 2))), "-o", "o.npy"), "one.npy: bandwidth='auto' needs more than one sample"),
        ((train, "-o", "o.npy", "--bandwidth", "1e-300"), "bandwidth (given: h 1e-300) is too small"),
        ((train, "-o", "o.npy", "--device", "cuda", "--backend", "numpy"), "runs on cpu, not on cuda"),
        ((), "Missing argument 'TRAIN'"),
        ((train, "-o", "o.npy", "--loud"), "No such option"),
    ]:
        assert cause in refused("estimate", *arguments)
        assert not Path("o.npy").exists()
    assert "No such command 'guess'" in refused("guess")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the file system cannot reserve")
def test_a_full_disk_is_one_line_before_anything_is_computed(monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr("sdkde_core.cli.main.fit", None)
    line = refused("estimate", save("x.npy", X), "-o", "out.npy")
    assert line == "Error: out.npy: No space left on device\n"
    assert [p.name for p in Path().iterdir()] == ["x.npy"]


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_errors_in_what_a_file_holds_begin_with_its_name(command):
    bad = Y.copy()
    bad[7, 1] = np.nan
    train, good, nan = save("x.npy", X), save("y.npy", Y), save("nan.npy", bad)
    ones, far = np.ones(len(X)), save("far.npy", 1e160 * np.vstack([X, X]))
    small = "far.npy: bandwidth (given: h 0.5) is too small for the data: distances beyond 1e149 bandwidths overflow"
    for arguments, cause in [
        ((nan,), "nan.npy: train has values that are not finite, the first nan at row 7, column 1"),
        (
            (train, save("nan.csv", bad)),
            "nan.csv: query has values that are not finite, the first nan at row 7 (line 9)",
        ),
        (
            (train, good, "--weights", save("w.npy", ones[:4])),
            "w.npy: weights has shape (4,), but train has 100 points",
        ),
        ((train, good, "--weights", save("v.npy", -ones)), "v.npy: weights has negative values"),
        ((train, good, "--weights", save("u.npy", 0 * ones)), "u.npy: weights are all zero"),
        ((train, good, "--weights", train), "x.npy: weights have 3 columns; pass one column"),
        ((train, good, "--bandwidth", save("h.npy", ones[:2])), "h.npy: bandwidth has shape (2,), but train has 3"),
        ((train, good, "--bandwidth", save("m.npy", -np.eye(3))), "m.npy: bandwidth is not positive definite"),
        ((train, good, "--bandwidth", "1,2"), "bandwidth has shape (2,), but train has 3 dimensions"),
        *(
            ((*given, "--bandwidth", "0.5", "--backend", "numpy"), small)
            for given in ([far], [train, far], [far, train])
        ),
    ]:
        out = ("-o", "o.npy") if command == "estimate" else ()
        assert refused(command, *arguments, *out).startswith(f"Error: {cause}")
        assert not Path("o.npy").exists()


@pytest.mark.parametrize("name", ["train.npy", "query.npy"])
def test_files_that_are_named_as_arguments_are(name):
    cut = save(name, X[:, :2])
    good = save("x.npy", X)
    assert refused("estimate", good, cut, "-o", "o.npy").startswith(f"Error: {name}: query has 2 dimensions")
    Path(name).write_bytes(b"no array")
    assert refused("estimate", name, "-o", "o.npy").startswith(f"Error: {name}: the magic string is not correct")


# --- the other commands -----------------------------------------------------------------------------------------


def test_explain_from_shapes_and_files():
    text = sdkde("explain", "100000x16", "200x16", "--method", "kde").output
    assert "200 × 100000, d = 16" in text
    assert "chosen: numpy on cpu" in text
    told = json.loads(sdkde("explain", "100", "--json").output)
    library = json.loads(json.dumps(sdkde_core.explain((100,)).to_dict()))
    differ = {"calls", "candidates"}  # how start-up counts
    assert {k: v for k, v in told.items() if k not in differ} == {k: v for k, v in library.items() if k not in differ}
    train, query = save("x.npz", X), save("y.csv", Y)
    told = json.loads(sdkde("explain", train, query, "--json", "--measure", "--bandwidth", "2").output)
    assert [(p["m"], p["n"]) for p in told["passes"]] == [(100, 100), (70, 100)]
    assert all(p["measured_seconds"] > 0 for p in told["passes"])
    for method in ("sdkde", "laplace"):  # which has no likelihood, and JSON no NaN
        told = json.loads(sdkde("explain", train, "--json", "--method", method).output, parse_constant=pytest.fail)
        assert told["selection"]["method"] == method
        assert np.isfinite(told["selection"]["least_squares"]).all()
    assert "chosen from the data: " in sdkde("explain", train, "--bandwidth", "lscv").output
    assert "measure=True needs the data" in refused("explain", "10x2", "--measure")
    assert "query is the shape (70, 3), but train is data" in refused("explain", train, "70x3")
    assert "but train has 16 dimensions" in refused("explain", "10x16", query)
    assert "train has the shape (0, 2)" in refused("explain", "0x2")


def test_backends():
    text = sdkde("backends").output
    assert re.match(r"name +status +devices +precisions +features +from +reason\n", text)
    assert re.search(r"^numpy +ok +cpu +fast, high, float64 +.*weights", text, re.M)
    told = json.loads(sdkde("backends", "--json").output)
    assert [row["name"] for row in told] == [r.name for r in sdkde_core.backends()]
    assert {"status", "reason", "distribution", "version", "devices", "precisions", "features"} <= told[0].keys()


def test_doctor_reports_what_is_missing_and_what_fails(monkeypatch):
    (working,) = (r for r in sdkde_core.backends() if r.name == "numpy")
    sad = replace(working, name="sad", info=replace(working.info, name="sad", implementation="no_such_module:Backend"))
    odd = replace(working, name="odd", info=replace(working.info, name="odd", devices=("mps",)))
    gone = registry.Record("gone", "missing", "needs gone; install with: pip install gone", "x", "1", "x:y")
    monkeypatch.setattr(registry, "records", lambda: (working, sad, odd, gone))
    monkeypatch.setenv("SDKDE_NUM_THREADS", "3")
    text = sdkde("doctor").output
    for pattern in (
        rf"sdkde +{re.escape(sdkde_core.__version__)}",
        r"python +3\.",
        r"SDKDE_NUM_THREADS +3",
        rf"numpy +{re.escape(np.__version__)}",
        r"optuna +",
        r"cpu +.*3 threads",
        r"GFLOP/s.*\n +nominal",
        r"gpu|cuda:0",
        r"numpy +cpu +works +NumPy runs on the CPU",
        r"sad +cpu +no +does not load: ModuleNotFoundError",
        r"odd +mps +no ",
        r"gone +- +missing +needs gone; install with: pip install gone",
    ):
        assert re.search(pattern, text), pattern
    monkeypatch.setenv("SDKDE_NUM_THREADS", "many")
    assert "SDKDE_NUM_THREADS is 'many'" in sdkde("doctor").output


def test_alone_it_shows_its_help():
    assert "estimate" in sdkde().output
    assert sdkde_core.__version__ in sdkde("--version").output


# --- the document -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_argument_and_option_is_documented(name):
    command = main.commands[name]
    section = re.search(rf"^## sdkde {name}\n(.*?)(?=^## |\Z)", DOCUMENT, re.M | re.S)
    assert section, f"docs/command-line.md has no section '## sdkde {name}'"
    assert command.help
    for parameter in command.params:
        assert parameter.help, parameter.name
        for text in (*parameter.opts, *parameter.secondary_opts):
            shown = text if text.startswith("-") else text.upper()
            assert re.search(rf"(?<![\w-]){re.escape(shown)}(?![\w-])", section[1]), shown


def test_defaults_and_rules_are_documented():
    section = DOCUMENT.split("\n## sdkde estimate")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| .*?`--([a-z]+).*?` \| (.*) \|$", section, re.M))
    given = [p for p in main.commands["estimate"].params if isinstance(p.default, str)]
    assert {p.name for p in given} >= {"method", "bandwidth", "negative", "precision", "backend"}
    for parameter in given:
        assert f"`{parameter.default}` (default" in rows[parameter.name], parameter.name
    assert set(RULES) <= set(re.findall(r"`([a-z-]+)`", rows["bandwidth"]))


def test_the_documents_commands_parse():
    lines = [line for block in re.findall(r"```sh\n(.*?)```", DOCUMENT, re.S) for line in block.splitlines()]
    assert len(lines) > 8
    for line in lines:
        program, name, *arguments = line.partition("#")[0].replace("[QUERY]", "QUERY").split()
        assert program == "sdkde"
        with contextlib.redirect_stdout(io.StringIO()):
            main.commands[name].make_context(name, arguments)
