"""Tables and labelled arrays of pandas, polars, Arrow and xarray: what they hold, and what comes back for them."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

import sdkde_core

pandas = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 2)), RNG.normal(size=(7, 2))
TRAIN = pandas.DataFrame(X, columns=["a", "b"])
QUERY = pandas.DataFrame(Y, columns=["a", "b"], index=pandas.Index(list("ABCDEFG"), name="site"))
H = {"bandwidth": 0.5}
READY = sdkde_core.prepare(TRAIN, **H)


def same(found, values, name):
    """A Series with the query's index, of that name and those values."""
    pandas.testing.assert_series_equal(found, pandas.Series(np.asarray(values), QUERY.index, name=name))


@pytest.mark.parametrize(
    "options",
    [
        H,
        {"log": True, **H},
        {"progress": lambda done, rows: None, **H},
        {"method": "laplace", **H},
        {"support": {"a": (-6.0, None)}, **H},
        {"method": "stacked"},
    ],
)
def test_a_density_has_the_index_of_the_query(options):
    name = "log_density" if options.get("log") else "density"
    want = sdkde_core.estimate(X, Y, **{**options, "support": [(-6.0, None), None] if "support" in options else None})
    same(sdkde_core.estimate(TRAIN, QUERY, **options), want, name)
    own = {key: value for key, value in options.items() if key not in ("log", "progress")}
    how = {key: value for key, value in options.items() if key in ("log", "progress")}
    same(sdkde_core.prepare(TRAIN, **own).estimate(QUERY, **how), want, name)
    places = {**options, "support": None}
    same(sdkde_core.estimate(X, QUERY, **places), sdkde_core.estimate(X, Y, **places), name)


def test_a_density_joins_its_samples_and_reads_as_before():
    found = sdkde_core.estimate(TRAIN.astype("float32"), **H)
    assert found.dtype == np.float32 and found.index.equals(TRAIN.index)
    assert TRAIN.join(found).columns.tolist() == ["a", "b", "density"]
    want = sdkde_core.estimate(X.astype("float32"), **H)
    np.testing.assert_array_equal(np.asarray(found), want)
    assert (found > 0.1).sum() == (want > 0.1).sum() and found.iloc[0] == found[0] == want[0]
    assert isinstance(sdkde_core.estimate(TRAIN, Y, **H), np.ndarray)  # the query's kind
    assert isinstance(sdkde_core.estimate(X, Y, **H), np.ndarray)
    empty = READY.estimate(QUERY[:0])
    assert empty.shape == (0,) and empty.index.name == "site"
    out = np.empty(7)
    assert READY.estimate(QUERY, out=out) is out
    assert sdkde_core.estimate(TRAIN, QUERY, out=out, **H) is out


def test_slopes_and_moved_samples_have_the_columns_too():
    slopes = pandas.DataFrame(sdkde_core.grad_log_density(X, Y, **H), QUERY.index, QUERY.columns)
    pandas.testing.assert_frame_equal(sdkde_core.grad_log_density(TRAIN, QUERY, **H), slopes)
    pandas.testing.assert_frame_equal(READY.grad_log_density(QUERY), slopes)
    watched = sdkde_core.grad_log_density(TRAIN, QUERY, progress=lambda done, rows: None, **H)
    pandas.testing.assert_frame_equal(watched, slopes)
    for how in ({}, {"score": lambda x: -x}, {"coordinates": "asinh"}):
        moved = sdkde_core.debias(TRAIN[::2], **H, **how)
        want = pandas.DataFrame(sdkde_core.debias(X[::2], **H, **how), TRAIN[::2].index, TRAIN.columns)
        pandas.testing.assert_frame_equal(moved, want)
    one = sdkde_core.grad_log_density(TRAIN["a"], QUERY["a"], **H)
    assert one.columns.tolist() == ["a"] and one.index.equals(QUERY.index)
    assert sdkde_core.estimate(TRAIN["a"], QUERY["a"], **H).index.equals(QUERY.index)


def test_the_classes_of_other_libraries_return_what_theirs_do():
    pytest.importorskip("sklearn")
    assert type(sdkde_core.KernelDensity().fit(TRAIN).score_samples(QUERY)) is np.ndarray
    kde = sdkde_core.gaussian_kde(TRAIN.T)
    assert type(kde(QUERY.T)) is type(kde.logpdf(QUERY.T)) is type(kde.pdf(QUERY.T)) is np.ndarray
    assert type(READY.sample(3, 0)) is type(READY.modes()) is np.ndarray


@pytest.mark.parametrize(
    "ready", [READY, pickle.loads(pickle.dumps(READY)), sdkde_core.prepare(TRAIN, coordinates="asinh")]
)
def test_samples_for_a_divergence_may_be_a_table(ready):
    other = sdkde_core.prepare(X, bandwidth=0.3)
    assert ready.divergence(other, QUERY) == ready.divergence(other, Y)


def test_a_table_is_read_as_pandas_numbers_whatever_they_are_kept_in():
    flags, counts = X[:, 0] > 0.0, np.arange(50) % 5
    plain = np.column_stack([X[:, 0], flags, counts])
    at = pandas.DataFrame(plain)
    want = sdkde_core.estimate(plain, bandwidth=1.0)
    kept = {
        "mixed": {},
        "nullable": {0: "Float64", 1: "boolean", 2: "Int64"},
        "arrow": {0: "double[pyarrow]", 1: "bool[pyarrow]", 2: "int8[pyarrow]"},
    }
    for name, types in kept.items():
        if name == "arrow":
            pytest.importorskip("pyarrow")
        table = at.astype({1: bool, 2: int}).astype(types)
        same_index = sdkde_core.estimate(table, bandwidth=1.0)
        np.testing.assert_array_equal(np.asarray(same_index), want, err_msg=name)
    holed = at.astype({2: "Int64"})
    holed.columns = list("xyz")
    holed.loc[3, "z"] = pandas.NA
    with pytest.raises(ValueError, match=r"train has .* nan at row 3, column 2 \('z'\); drop or fill"):
        sdkde_core.estimate(holed, **H)
    holed["y"] = holed["y"].astype(bool).astype("boolean")
    holed.loc[5, "y"] = pandas.NA
    with pytest.raises(ValueError, match=r"query has .* nan at row 3, column 2 \('z'\)"):
        sdkde_core.prepare(holed.dropna(), **H).estimate(holed)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["x"] * 50, r"column 'b' of train has dtype (str|object); pass real numbers .*train.drop\(columns='b'\)"),
        (pandas.Categorical(["x", "y"] * 25), "column 'b' of train has dtype category"),
        (
            pandas.date_range("2020", periods=50),
            r"column 'b' of train has dtype datetime64.* as \(t - t\[0\]\)",
        ),
        (pandas.array([1, None] * 25, dtype="Int64").astype(object), "column 'b' of train has dtype object"),
    ],
)
def test_a_column_that_holds_no_numbers_is_named(column, message):
    table = TRAIN.assign(b=column)
    for call in (sdkde_core.estimate, sdkde_core.prepare, sdkde_core.debias, sdkde_core.select_bandwidth):
        with pytest.raises(TypeError, match=message) as error:
            call(table)
        assert type(error.value) is TypeError
    with pytest.raises(TypeError, match=message.replace("train", "query").split(";")[0]):
        READY.estimate(table)


def test_columns_are_those_of_the_training_frame():
    turned = QUERY[["b", "a"]]
    for call in (READY.estimate, READY.grad_log_density, lambda query: sdkde_core.estimate(TRAIN, query, **H)):
        with pytest.raises(ValueError, match=r"in another order: b, a, .* query\[list\(train.columns\)\]"):
            call(turned)
        with pytest.raises(ValueError, match=r"shape \(7,\), but train has 2 .* or a data frame with the columns a, b"):
            call(QUERY["a"])
    for how in ({}, {"coordinates": "asinh"}):
        with pytest.raises(ValueError, match="score has the columns of train in another order: b, a"):
            sdkde_core.debias(TRAIN, score=lambda x: -x[["b", "a"]], **H, **how)
    sdkde_core.debias(TRAIN, score=-TRAIN.add_prefix("slope of "), **H)


def _polars(polars, x):
    return polars.DataFrame(x, schema=["a", "b"])


def _arrow(arrow, x):
    return arrow.table({"a": x[:, 0], "b": x[:, 1]})


@pytest.mark.parametrize(("name", "made"), [("polars", _polars), ("pyarrow", _arrow)])
def test_polars_and_arrow_give_numpys_arrays(name, made):
    """Their rows have no labels, and polars takes an array as a column."""
    library = pytest.importorskip(name)
    train, query = made(library, X), made(library, Y)
    want = sdkde_core.estimate(X, Y, **H)
    for found in (sdkde_core.estimate(train, query, **H), sdkde_core.prepare(train, **H).estimate(query)):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, want)
    assert type(sdkde_core.debias(train, **H)) is np.ndarray
    same(sdkde_core.estimate(train, QUERY, **H), want, "density")
    with pytest.raises(ValueError, match="in another order: b, a"):
        sdkde_core.estimate(train, query.select(["b", "a"]), **H)
    np.testing.assert_array_equal(sdkde_core.estimate(train["a"], **H), sdkde_core.estimate(X[:, 0], **H))


def test_what_polars_holds():
    polars = pytest.importorskip("polars")
    train = _polars(polars, X)
    with pytest.raises(TypeError, match=r"train is a polars LazyFrame, .* pass train.collect\(\)"):
        sdkde_core.estimate(train.lazy(), **H)
    with pytest.raises(TypeError, match=r"column 'b' of train has dtype String; .* leave it out: train.drop\('b'\)"):
        sdkde_core.estimate(train.with_columns(b=polars.lit("x")), **H)
    with pytest.raises(ValueError, match=r"nan at row 1, column 1 \('b'\)"):
        sdkde_core.estimate(train.with_columns(b=polars.Series([1, None] * 25)), **H)


def test_what_arrow_holds():
    arrow = pytest.importorskip("pyarrow")
    times = arrow.array(np.arange(50).astype("datetime64[s]"))
    mixed = arrow.table({"a": X[:, 0], "b": X[:, 1] > 0.0})
    want = sdkde_core.estimate(np.column_stack([X[:, 0], X[:, 1] > 0.0]), **H)
    np.testing.assert_array_equal(sdkde_core.estimate(mixed, **H), want)
    for column, dtype in ((times, r"timestamp\[s\]"), (arrow.array(["x"] * 50), "string")):
        with pytest.raises(TypeError, match=rf"column 'b' of train has dtype {dtype}; .*train.drop_columns\('b'\)"):
            sdkde_core.estimate(arrow.table({"a": X[:, 0], "b": column}), **H)
    for holed in (arrow.array([1, None, 2]), arrow.chunked_array([[1.5], [None, 2.0]])):
        with pytest.raises(ValueError, match=r"train has .* nan at row 1, column 0; drop or fill"):
            sdkde_core.estimate(holed, **H)


def test_a_labelled_array_keeps_its_coordinates():
    xarray = pytest.importorskip("xarray")
    own = {"site": list("ABCDEFG"), "height": ("site", np.arange(7.0), {"units": "m"}), "axis": ["a", "b"]}
    query = xarray.DataArray(Y, dims=("site", "axis"), coords=own, name="winds", attrs={"units": "m/s"})
    train = xarray.DataArray(X, dims=("time", "axis"), coords={"axis": ["a", "b"]})
    left = {name: query.coords[name] for name in ("site", "height")}
    for name, log in (("density", False), ("log_density", True)):
        want = xarray.DataArray(sdkde_core.estimate(X, Y, log=log, **H), left, ("site",), name)
        for found in (sdkde_core.estimate(train, query, log=log, **H), READY.estimate(query, log=log)):
            xarray.testing.assert_identical(found, want)
    slopes = sdkde_core.grad_log_density(train, query, **H)
    want = xarray.DataArray(sdkde_core.grad_log_density(X, Y, **H), own, query.dims, "grad_log_density")
    xarray.testing.assert_identical(slopes, want)
    xarray.testing.assert_identical(sdkde_core.debias(query, **H), query.copy(data=sdkde_core.debias(Y, **H)))
    one = query.isel(axis=0)
    xarray.testing.assert_identical(sdkde_core.estimate(one, **H).coords.to_dataset(), one.coords.to_dataset())
    assert sdkde_core.grad_log_density(one, **H).shape == (7, 1)
    for turned in (query.isel(axis=[1, 0]), query.T):
        with pytest.raises(ValueError, match=r"query has the columns of train (in another|under other)"):
            sdkde_core.estimate(train, turned, **H)
    with pytest.raises(TypeError, match=r"train is an xarray Dataset; .* train.to_dataarray\('column'\)"):
        sdkde_core.estimate(train.to_dataset("axis"), **H)
    columns = train.to_dataset("axis").to_dataarray("column").transpose(..., "column")
    np.testing.assert_array_equal(sdkde_core.estimate(columns, **H), sdkde_core.estimate(X, **H))
    grid = xarray.DataArray(X[:12].reshape(3, 4, 2), {"lat": [0, 1, 2], "lon": [5, 6, 7, 8]}, ("lat", "lon", "axis"))
    there = sdkde_core.estimate(train, grid.stack(point=("lat", "lon")).transpose("point", ...), **H).unstack("point")
    np.testing.assert_array_equal(there.values.ravel(), sdkde_core.estimate(X, X[:12], **H))
    assert there.sizes == {"lat": 3, "lon": 4} and there.lon.values.tolist() == [5, 6, 7, 8]


def test_no_library_of_tables_is_imported_or_needed():
    """While another thread imports one it is there and empty."""
    code = """
import sys, types, numpy, sdkde_core
for name in ("pandas", "polars", "pyarrow", "xarray"):
    sys.modules[name] = types.ModuleType(name)
x = [[0.0, 1.0], [2.0, 3.0], [1.0, 5.0]]
class Rows(list):
    pass
assert type(sdkde_core.estimate(Rows(x), bandwidth=1.0)) is numpy.ndarray
assert type(sdkde_core.grad_log_density(numpy.array(x), x, bandwidth=1.0)) is numpy.ndarray
"""
    subprocess.run([sys.executable, "-c", code], check=True)
