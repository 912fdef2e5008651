"""The command line: columns, pipes, densities that are kept, and the queries' columns beside their densities."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import sdkde_core
from sdkde_core import files
from sdkde_core.cli.main import main

X = np.random.default_rng(0).normal(size=(100, 3)) * [1.0, 20.0, 0.3]
Y = np.random.default_rng(1).normal(size=(40, 3)) * [1.0, 20.0, 0.3]
WANT = sdkde_core.estimate(X, Y, bandwidth=0.5)
HOW = ("--bandwidth", "0.5")


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    """In a folder of the test's own, samples and queries with text and a label beside the numbers."""
    monkeypatch.chdir(tmp_path)
    for name, x in (("train", X), ("query", Y)):
        text(f"{name}.csv", x)
        np.save(f"{name}.npy", x)


def text(name, x, comma=","):
    names = [f'"kind{comma} or not"', "a", "label", "b", "c"]
    rows = [
        [f'"k{comma} {i % 5}"', repr(a), str(i % 3), repr(b), f"{c:.17f}"] for i, (a, b, c) in enumerate(x.tolist())
    ]
    Path(name).write_text("".join(comma.join(row) + "\n" for row in [names, *rows]))


def sdkde(*arguments, stdin=None):
    result = CliRunner().invoke(main, [str(a) for a in arguments], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments, stdin=None):
    """Run a command that must fail in one line; return that."""
    result = CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == "" and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


def numbers(result):
    return np.loadtxt(io.StringIO(result.stdout), skiprows=1, ndmin=1)


# --- columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["a,b,c", "1,3,4", "a,3, c"])
@pytest.mark.parametrize("extension", [".csv", ".tsv", ".parquet"])
def test_columns_of_a_file_with_text(extension, columns):
    for name, x in (("train", X), ("query", Y)):
        if extension == ".parquet":
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            more = {"kind": ["k"] * len(x), "a": x[:, 0], "label": [1] * len(x), "b": x[:, 1], "c": x[:, 2]}
            parquet.write_table(arrow.table(more), f"{name}.parquet")
        else:
            text(f"{name}{extension}", x, "\t" if extension == ".tsv" else ",")
    result = sdkde("estimate", f"train{extension}", f"query{extension}", "--columns", columns, *HOW)
    np.testing.assert_allclose(numbers(result), WANT, rtol=1e-12)
    assert result.stdout.startswith("density\n") and result.stderr == ""


def test_columns_by_number_in_arrays_and_out_of_order():
    wide = np.column_stack([np.zeros(100), X])
    np.save("wide.npy", wide)
    np.savez("wide.npz", points=wide)
    for train in ("wide.npy", "wide.npz"):
        np.testing.assert_allclose(numbers(sdkde("estimate", train, "query.npy", "--columns", "1,2,3", *HOW)), WANT)
    turned = numbers(sdkde("estimate", "train.npy", "query.npy", "--columns", "2,0,1", "--bandwidth", "0.1,0.5,9"))
    want = sdkde_core.estimate(X, Y, bandwidth=[0.5, 9.0, 0.1])
    np.testing.assert_allclose(turned, want, rtol=1e-9)
    by_shards = sdkde("estimate", "wide.npy", "query.npy", "--columns", "1,2,3", "--memory", "64GB", *HOW)
    np.testing.assert_allclose(numbers(by_shards), WANT, rtol=1e-9)
    assert "100 × 100, d = 2" in sdkde("explain", "train.csv", "--columns", "a,b").stdout


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ("a,bb", "there is no column 'bb'; its columns are kind, or not, a, label, b, c; or pass numbers from 0 to 4"),
        ("a,labl", "did you mean 'label'?"),
        ("a,5", "there is no column '5'"),
        ("a,1", "--columns has a column twice: a, 1"),
        ("", "there is no column ''; its columns are kind, or not, a,"),
        ("kind", "there is no column 'kind'"),
        ("0,1", "line 2: 'k, 0' is not a number (column 'kind, or not', see --columns; values are"),
    ],
)
def test_columns_that_cannot_be(columns, cause):
    assert cause in refused("estimate", "train.csv", "--columns", columns)


def test_columns_that_two_files_do_not_share():
    text("other.csv", Y)
    Path("other.csv").write_text(Path("other.csv").read_text().replace(",c\n", ",d\n", 1))
    np.save("wide.npy", Y)
    Path("twice.csv").write_text("a,a,b\n1,2,3\n4,5,7\n")
    for arguments, cause in [
        (("train.csv", "other.csv", "--columns", "a,b,c"), "other.csv: --columns: there is no column 'c'"),
        (("train.csv", "wide.npy", "--columns", "a,b"), "its columns are without names; pass numbers from 0 to 2"),
        (("twice.csv", "--columns", "a,b"), "two columns are 'a'"),
        (("train.csv", "--columns", "a", "--keep", "-o", "o.npy"), "o.npy: --keep writes columns that are no points'"),
    ]:
        assert cause in refused("estimate", *arguments)


def test_a_label_among_the_points_is_named_with_what_leaves_it_out():
    labels = np.arange(100) % 3
    np.savetxt("x.csv", np.column_stack([X, labels]), delimiter=",", header="a,b,c,target", comments="")
    for command in ("estimate x.csv", "fit x.csv -o x.sdkde", "sample x.csv", "explain x.csv"):
        told = sdkde(*command.split()).stderr
        assert "Warning: x.csv: column target has at most ten distinct values, all integers: a label?" in told
        assert "To leave it out: --columns a,b,c\n" in told
    np.save("x.npy", np.column_stack([labels, X]))
    assert "column 0 has at most ten distinct values" in sdkde("estimate", "x.npy").stderr
    assert sdkde("estimate", "x.csv", "--columns", "a,target").stderr == ""
    for right in (labels / 2, np.arange(100)):
        np.save("x.npy", np.column_stack([X, right]))
        assert sdkde("estimate", "x.npy").stderr == ""
    for counts in (labels, np.column_stack([labels, np.arange(100) % 4])):
        np.save("x.npy", counts)
        assert sdkde("estimate", "x.npy").stderr == ""


# --- pipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "tsv", "npy"])
def test_standard_input_by_what_it_holds(kind):
    data, columns = Path("train.npy").read_bytes(), "0,1,2"
    if kind != "npy":
        text("in", X, "\t" if kind == "tsv" else ",")
        data, columns = Path("in").read_bytes(), "a,b,c"
    result = sdkde("estimate", "-", "query.npy", "-o", "-", "--columns", columns, *HOW, stdin=data)
    np.testing.assert_allclose(numbers(result), WANT, rtol=1e-12)
    as_query = sdkde("estimate", "train.csv", "-", "--columns", "a,b,c", *HOW, stdin=Path("query.csv").read_bytes())
    np.testing.assert_allclose(numbers(as_query), WANT, rtol=1e-12)


def test_standard_input_that_cannot_be():
    assert "standard input: the file is empty" in refused("estimate", "-", stdin=b"")
    assert "TRAIN and QUERY are both standard input" in refused("estimate", "-", "-", stdin=b"1\n2\n3\n")
    assert "standard input: line 2: 'x' is not a number" in refused("estimate", "-", stdin=b"1,2\n3,x\n")
    assert "-.zarr: a zarr array is a folder" in refused("estimate", "train.npy", "-o", "-.zarr")


def test_standard_output_as_other_formats():
    got = sdkde("estimate", "train.npy", "query.npy", *HOW, "-o", "-.npy", "--log").stdout_bytes
    np.testing.assert_allclose(np.load(io.BytesIO(got)), np.log(WANT), rtol=1e-9)
    assert sdkde("sample", "train.npy", "-o", "-.tsv").stdout.startswith("x0\tx1\tx2\n")


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_leaves_early_ends_the_command_quietly():
    np.save("many.npy", np.random.default_rng(2).normal(size=(100_000, 3)))
    code = "from sdkde_core.cli.main import main; main(['estimate', '-', 'many.npy', '--keep', '--bandwidth', '2'])"
    with Path("train.csv.3").open("wb") as file:
        np.savetxt(file, X, delimiter=",")
    with Path("train.csv.3").open("rb") as stdin:
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
            assert process.stdout.readline() == b"x0,x1,x2,density\n"
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(120) == 1


# --- beside the queries' columns --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(), ("--memory", "64GB"), ("--log",)])
def test_all_columns_of_the_query_are_kept_as_they_stand(how):
    name = "log_density" if "--log" in how else "density"
    sdkde("estimate", "train.csv", "query.csv", "--columns", "a,b,c", "--keep", "-o", "out.csv", *how, *HOW)
    before, after = (Path(name).read_text().splitlines() for name in ("query.csv", "out.csv"))
    assert after[0] == f"{before[0]},{name}"
    assert [line.rpartition(",")[0] for line in after[1:]] == before[1:]
    got = np.array([float(line.rpartition(",")[2]) for line in after[1:]])
    np.testing.assert_allclose(got, np.log(WANT) if "--log" in how else WANT, rtol=1e-9)
    again = refused("estimate", "train.csv", "out.csv", "--columns", "a,b,c", "--keep", *how)
    assert f"out.csv: has a column '{name}' already; rename that, or leave out --keep" in again


@pytest.mark.parametrize("out", ["out.npy", "out.parquet", "out.csv"])
def test_columns_of_arrays_are_kept_as_numbers(out):
    if out.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    sdkde("estimate", "train.npy", "query.npy", "--keep", "-o", out, *HOW)
    found = files.source(out)
    assert found.names == (() if out.endswith(".npy") else ("x0", "x1", "x2", "density"))
    np.testing.assert_allclose(found.read(), np.column_stack([Y, WANT]), rtol=1e-12)
    np.save("empty.npy", np.empty((0, 3)))
    sdkde("estimate", "train.npy", "empty.npy", "--keep", "-o", out, *HOW)
    assert files.source(out).rows == 0
    sdkde("estimate", "train.npy", "--columns", "2,0,1", "--keep", "-o", out, *HOW)
    order = [0, 1, 2] if out.endswith(".csv") else [2, 0, 1]  # .csv as it stands
    np.testing.assert_allclose(files.source(out).read()[:, :3], X[:, order], rtol=1e-15)


# --- densities that are kept ------------------------------------------------------------------------------------


def test_a_density_is_kept_with_its_names_and_read_by_all():
    result = sdkde("fit", "train.csv", "--columns", "a,b,c", "-o", "x.sdkde", *HOW)
    assert result.stdout == "" and result.stderr.startswith("x.sdkde: Prepared(sdkde, 100 × 3, given: h 0.5")
    prepared = sdkde_core.load("x.sdkde")
    logs = prepared.estimate(Y, log=True)
    np.testing.assert_allclose(numbers(sdkde("estimate", "x.sdkde", "query.csv", "--log")), logs, rtol=1e-12)
    score = json.loads(sdkde("score", "x.sdkde", "query.csv", "--json", "-o", "logs.npy").stdout)
    np.testing.assert_allclose(np.load("logs.npy"), logs, rtol=1e-12)
    error = logs.std(ddof=1) / np.sqrt(len(logs))
    assert score == pytest.approx({"mean_log_density": logs.mean(), "standard_error": error, "points": 40})
    said = f"mean log density {logs.mean():.6g}, standard error {error:.6g}, points 40\n"
    assert sdkde("score", "x.sdkde", "query.csv").stdout == said
    piped = sdkde("score", "x.sdkde", "query.csv", "-o", "-")
    assert piped.stderr == said
    np.testing.assert_allclose(numbers(piped), logs, rtol=1e-12)
    assert "lacks c of x.sdkde" in refused("score", "x.sdkde", "query.csv", "--columns", "a,b")
    told = sdkde("score", "x.sdkde", "query.csv", "--columns", "b,a,c").stderr
    assert "query.csv has the columns b, a, c for a, b, c of x.sdkde: they are matched by position" in told
    drawn = sdkde("sample", "x.sdkde", "-n", "5", "--seed", "3")
    assert drawn.stdout.startswith("a,b,c\n")
    got = np.loadtxt(io.StringIO(drawn.stdout), delimiter=",", skiprows=1)
    np.testing.assert_array_equal(got, prepared.sample(5, 3))
    some = sdkde("sample", "x.sdkde", "-n", "5", "--seed", "3", "--columns", "c,a").stdout
    want = prepared.marginal([2, 0]).sample(5, 3)
    np.testing.assert_array_equal(np.loadtxt(io.StringIO(some), delimiter=",", skiprows=1), want)
    assert sdkde("sample", "x.sdkde").stdout.count("\n") == 2
    sdkde("fit", "train.npy", "-o", "x.sdkde", "-q")  # what holds a density is replaced
    assert "there is no column 'a'" in refused("sample", "x.sdkde", "--columns", "a")


def test_a_density_that_python_saved_has_any_name():
    kde = pytest.importorskip("sdkde_core.interop.kernel_density").KernelDensity(bandwidth=0.5).fit(X)
    kde.save("kde.npz")
    np.testing.assert_allclose(numbers(sdkde("estimate", "kde.npz", "query.npy", "--log")), kde.score_samples(Y))
    pytest.importorskip("scipy")
    theirs = sdkde_core.gaussian_kde(X.T)
    theirs.save("density")
    np.testing.assert_allclose(numbers(sdkde("estimate", "density", "query.npy")), theirs(Y.T), rtol=1e-9)


def test_samples_in_place_of_a_density_are_fitted_with_the_defaults():
    want = sdkde_core.prepare(X).estimate(Y, log=True).mean()
    np.savetxt("turned.csv", Y[:, ::-1], delimiter=",", header="c,b,a", comments="")
    told = json.loads(sdkde("score", "train.csv", "turned.csv", "--columns", "1,3,4", "--json").stdout)
    assert told["mean_log_density"] == pytest.approx(want)


def test_where_a_density_is_zero_or_there_is_one_point():
    sdkde("fit", "train.csv", "--columns", "c", "--support", "c:-2,2", "-o", "x.sdkde")
    Path("q.csv").write_text("c\n0.1\n9\n")
    assert ", points 2, points of density 0 1\n" in sdkde("score", "x.sdkde", "q.csv").stdout
    told = json.loads(sdkde("score", "x.sdkde", "q.csv", "--json").stdout)
    assert told == {"mean_log_density": None, "standard_error": None, "points": 2, "points_of_density_0": 1}
    Path("q.csv").write_text("c\n0.1\n")
    assert json.loads(sdkde("score", "x.sdkde", "q.csv", "--json").stdout)["standard_error"] is None
    Path("q.csv").write_text("c\n")
    assert "q.csv: has no rows" in refused("score", "x.sdkde", "q.csv")
    sdkde("fit", "train.npy", "--method", "laplace", "-o", "x.sdkde", "--bandwidth", "1")
    np.save("far.npy", Y * 3)
    assert json.loads(sdkde("score", "x.sdkde", "far.npy", "--json").stdout)["points_of_negative_density"] > 0


@pytest.mark.parametrize("columns", ["a", pytest.param("a,b", marks=pytest.mark.slow), "a,b,c"])
def test_a_picture(columns):
    pytest.importorskip("matplotlib")
    sdkde("plot", "train.csv", "--columns", columns, "-o", "samples.svg")
    sdkde("fit", "train.csv", "--columns", "a,b,c", "-o", "x.sdkde", *HOW)
    assert sdkde("plot", "x.sdkde", "--columns", columns, "-o", "p.png").output == ""
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"<!-- {name} -->" in Path("samples.svg").read_text() for name in columns.split(","))


def test_a_picture_of_another_kernel():
    pytest.importorskip("matplotlib")
    kernel = ("--method", "kde", "--kernel", "epanechnikov", "--bandwidth", "9")
    sdkde("fit", "train.csv", "--columns", "a,b", "-o", "x.sdkde", *kernel)
    sdkde("plot", "x.sdkde", "-o", "p.png")
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_kept_scored_or_drawn():
    sdkde("fit", "train.npy", "-o", "x.sdkde", *HOW)
    for name in ("notes.txt", "notes.sdkde"):
        Path(name).write_text("precious")
    Path("damaged.sdkde").write_bytes(Path("x.sdkde").read_bytes()[:500])
    np.save("nine.npy", np.random.default_rng(0).normal(size=(50, 9)))
    for arguments, cause in [
        (("fit", "train.npy"), "Missing option '-o'"),
        (("fit", "train.npy", "-o", "-"), "-: a density is no table"),
        (("fit", "train.npy", "-o", "out.csv"), "out.csv: a density is no table; pass such as -o density.sdkde"),
        (("fit", "train.npy", "-o", "notes.txt"), "notes.txt: is there, and is no density"),
        (("fit", "train.npy", "-o", "notes.sdkde"), "notes.sdkde: is there, and is no density"),
        (("fit", "train.npy", "-o", "none/x.sdkde"), "none/x.sdkde: there is no folder"),
        (("fit", "train.npy", "-o", "x.sdkde", "--bandwidth", "1,2"), "bandwidth has shape (2,), but train has 3"),
        (("estimate", "x.sdkde"), "x.sdkde is a density, without its training points; pass QUERY"),
        (("estimate", "x.sdkde", "query.npy", *HOW), "--bandwidth comes too late for x.sdkde, which is fitted"),
        (("estimate", "x.sdkde", "query.npy", "--memory", "1GB"), "--memory comes too late for x.sdkde"),
        (("estimate", "x.sdkde", "query.npy", "-o", "x.sdkde"), "x.sdkde: out and train are one file"),
        (("estimate", "x.sdkde", "nine.npy"), "nine.npy: query has 9 dimensions, but train has 3"),
        (("score", "damaged.sdkde", "query.npy"), "is cut off, altered or damaged"),
        (("score", "none.sdkde", "query.npy"), "none.sdkde: No such file"),
        (("score", "x.sdkde", "nine.npy"), "nine.npy: query has 9 dimensions, but train has 3"),
        (("sample", "x.sdkde", "-n", "0"), "Invalid value for '-n'"),
        (("sample", "x.sdkde", "-o", "x.sdkde"), "x.sdkde: out and density are one file"),
        (("plot", "x.sdkde", "-o", "p.doc"), "p.doc: unknown extension '.doc'; pass one of .png, .pdf, .svg"),
        (("plot", "nine.npy", "-o", "p.png"), "nine.npy: has 9 columns, too many for all pairs of them"),
    ]:
        assert cause in refused(*arguments)
    assert Path("notes.txt").read_text() == Path("notes.sdkde").read_text() == "precious"
    assert not Path("out.csv").exists() and not Path("p.png").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n1.2\n\n0.3\n2.2\n", "line 3 is empty"),
        ('a,t\n1.5,"x\ny"\n2.5,"z"\n', "line 2 has a line break within quotes"),
        ("a,b\n1.5,\n2.5,1\n", "line 2 has '' for a number"),
    ],
)
def test_what_a_table_lacks_is_said(tmp_path, text, words):
    (tmp_path / "x.csv").write_text(text)
    columns = ["--columns", "a"] if ",t" in text else []
    done = CliRunner().invoke(main, ["estimate", str(tmp_path / "x.csv"), *columns])
    assert done.exit_code and words in done.output


def test_queries_that_lack_a_column_are_told_which(tmp_path):
    x, y, kept = (str(tmp_path / name) for name in ("x.csv", "y.csv", "x.sdkde"))
    np.savetxt(x, X, delimiter=",", header="a,b,target", comments="")
    np.savetxt(y, X[:, :2], delimiter=",", header="a,b", comments="")
    assert CliRunner().invoke(main, ["fit", x, "-o", kept]).exit_code == 0
    for train, words in ((x, "the same columns, as by --columns a,b\n"), (kept, "the same columns\n")):
        done = CliRunner().invoke(main, ["estimate", train, y])
        assert done.exit_code == 2 and done.stderr.endswith(f"{y}: lacks target of {train}; pass {words}")
    assert CliRunner().invoke(main, ["estimate", x, y, "--columns", "a,b"]).exit_code == 0


def test_a_header_of_numbers_is_warned_of_and_columns_add_up(tmp_path):
    (tmp_path / "x.csv").write_text("0\n1.5\n2.5\n0.25\n0.75\n")
    done = CliRunner().invoke(main, ["estimate", str(tmp_path / "x.csv"), "-q"])
    assert "its first line, 0, is taken as a sample" in done.stderr
    (tmp_path / "y.csv").write_text("a,b,c\n1.5,2.5,0.1\n2.5,0.2,0.3\n0.25,0.1,0.7\n")
    asked = ["estimate", str(tmp_path / "y.csv"), "--bandwidth", "1", "-q"]
    ways = (["--columns", "a", "--columns", "b"], ["--columns", "a,b"])
    both, one = (CliRunner().invoke(main, [*asked, *more]) for more in ways)
    assert both.stdout == one.stdout and both.exit_code == 0


@pytest.mark.filterwarnings("default::UserWarning")
def test_first_lines_of_words_and_numbers(tmp_path):
    """Such as pandas writes of columns without names are refused; what may be a sample is told of."""
    x, y = (str(tmp_path / name) for name in ("x.csv", "y.csv"))
    for first in ("0,1,label", ",0,1"):
        Path(x).write_text(f"{first}\n1,1.5,2.5\n2,0.25,0.5\n3,1.25,2.0\n")
        done = CliRunner().invoke(main, ["estimate", x, "--columns", "0,1", "--bandwidth", "1"])
        assert done.exit_code == 2 and f"its first line, {first}, is a data frame's default header" in done.stderr
    Path(x).write_text("1.5,2.5\n0.25,0.5\n1.25,2.0\n")
    for first, *given in (
        ("country,2019,2020", y, "--columns", "1,2"),
        ("2019,2020,country", x, y, "--columns", "0,1"),
    ):
        Path(y).write_text(f"{first}\n10,11,12\n12,13,14\n")
        done = CliRunner().invoke(main, ["estimate", *given, "--bandwidth", "1"])
        assert done.exit_code == 0 and f"{y}: its first line, {first}, is taken as a sample: a header?" in done.stderr
    assert "is taken" not in CliRunner().invoke(main, ["estimate", x, "--bandwidth", "1"]).stderr


def test_an_archive_of_several_arrays_is_not_replaced(tmp_path):
    np.savez(tmp_path / "o.npz", train=np.zeros(3), test=np.ones(3))
    (tmp_path / "x.csv").write_text("a\n1.5\n2.5\n0.25\n")
    done = CliRunner().invoke(main, ["estimate", str(tmp_path / "x.csv"), "-o", str(tmp_path / "o.npz")])
    assert done.exit_code and "also holds test, train" in done.output
    assert sorted(np.load(tmp_path / "o.npz")) == ["test", "train"]


def test_points_that_change_while_they_are_read(tmp_path, monkeypatch):
    x, y, o = (str(tmp_path / name) for name in ("x.npy", "y.npy", "o.npy"))
    for name in (x, y):
        np.save(name, np.random.default_rng(0).normal(size=(900, 2)))
    monkeypatch.setattr("sdkde_core.cli.data.batch_rows", lambda *_: 300)
    answered, calls = sdkde_core.cli.data.answered, []

    def slow(*arguments):
        calls.append(np.save(y, np.ones((900, 2))) if len(calls) == 1 else None)
        return answered(*arguments)

    monkeypatch.setattr("sdkde_core.cli.data.answered", slow)
    done = CliRunner().invoke(main, ["estimate", x, y, "-o", o])
    assert done.exit_code == 2 and "y.npy: has changed since it was opened" in done.stderr and not Path(o).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams in a shell")
def test_closed_streams(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(50, 2)))
    command = [sys.executable, "-c", "from sdkde_core.cli.main import main; main()", "estimate", "x.npy", "-o"]
    for output, closed in (("y.npy", "2>&-"), ("-", ">&-")):
        done = subprocess.run(
            f"{shlex.join([*command, output])} {closed}", shell=True, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == (0 if output == "y.npy" else 2), done.stderr
    assert "standard output is closed" in done.stderr and len(np.load(tmp_path / "y.npy")) == 50
