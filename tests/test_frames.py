"""Tables and labelled arrays of pandas, polars, Arrow and xarray: what they hold, and what comes back for them."""

import itertools
import pickle

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
WATCHED = {"progress": lambda done, rows: None}


@pytest.mark.parametrize("how", [{}, {"log": True}, WATCHED])
@pytest.mark.parametrize(
    "options", [H, {"method": "laplace", "negative": "clip", **H}, {"support": {"a": (-6.0, None)}, **H}]
)
def test_a_density_has_the_index_of_the_query(options, how):
    by_place = options | ({"support": [(-6.0, None), None]} if "support" in options else {})
    want = pandas.Series(sdkde_core.estimate(X, Y, **by_place, **how), QUERY.index, name="density")
    want.name = "log_density" if "log" in how else "density"
    pandas.testing.assert_series_equal(sdkde_core.estimate(TRAIN, QUERY, **options, **how), want)
    pandas.testing.assert_series_equal(sdkde_core.prepare(TRAIN, **options).estimate(QUERY, **how), want)
    pandas.testing.assert_series_equal(sdkde_core.estimate(X, QUERY, **by_place, **how), want)


def test_a_density_joins_its_samples_and_its_numbers_are_as_before():
    found, want = sdkde_core.estimate(TRAIN.astype("f4"), **H), sdkde_core.estimate(X.astype("f4"), **H)
    assert found.dtype == np.float32
    assert TRAIN.join(found).columns.tolist() == ["a", "b", "density"]
    np.testing.assert_array_equal(np.asarray(found), want)
    assert found.iloc[0] == want[0] and np.mean(found) == pytest.approx(want.mean())
    assert type(sdkde_core.estimate(TRAIN, Y, **H)) is np.ndarray  # of the query's kind
    assert READY.estimate(QUERY[:0]).index.name == "site"
    out = np.empty(7)
    assert READY.estimate(QUERY, out=out) is sdkde_core.estimate(TRAIN, QUERY, out=out, **H) is out
    other = sdkde_core.prepare(X, bandwidth=0.3)
    for ready in (READY, pickle.loads(pickle.dumps(READY)), sdkde_core.prepare(TRAIN, coordinates="asinh")):
        assert ready.divergence(other, QUERY) == ready.divergence(other, Y)


def test_slopes_and_moved_samples_have_the_columns_too():
    slopes = pandas.DataFrame(sdkde_core.grad_log_density(X, Y, **H), QUERY.index, QUERY.columns)
    for found in (
        sdkde_core.grad_log_density(TRAIN, QUERY, **H),
        sdkde_core.grad_log_density(TRAIN, QUERY, **H, **WATCHED),
        READY.grad_log_density(QUERY),
    ):
        pandas.testing.assert_frame_equal(found, slopes)
    for how in ({}, {"score": lambda x: -x}, {"coordinates": "asinh"}):
        moved = sdkde_core.debias(TRAIN[::2], **H, **how)
        want = pandas.DataFrame(sdkde_core.debias(X[::2], **H, **how), TRAIN[::2].index, TRAIN.columns)
        pandas.testing.assert_frame_equal(moved, want)
    one = sdkde_core.grad_log_density(TRAIN["a"], QUERY["a"], **H)
    assert one.columns.tolist() == ["a"] and one.index.equals(QUERY.index)


def test_the_classes_of_other_libraries_return_what_theirs_do():
    pytest.importorskip("sklearn")
    kde = sdkde_core.gaussian_kde(TRAIN.T)
    of_classes = sdkde_core.KernelDensity().fit(TRAIN).score_samples(QUERY), kde(QUERY.T), kde.logpdf(QUERY.T)
    assert {type(x) for x in (*of_classes, READY.sample(3, 0), READY.modes())} == {np.ndarray}


@pytest.mark.parametrize("kept", ["f8 ? i8", "Float64 boolean Int64", "double[pyarrow] bool[pyarrow] int8[pyarrow]"])
def test_numbers_are_read_whatever_they_are_kept_in(kept):
    if "pyarrow" in kept:
        pytest.importorskip("pyarrow")
    plain = np.column_stack([X[:, 0], X[:, 1] > 0.0, np.arange(50) % 5])
    table = pandas.DataFrame(plain, columns=list("xyz")).astype({"y": bool, "z": int})
    table = table.astype(dict(zip("xyz", kept.split())))
    found = np.asarray(sdkde_core.estimate(table, bandwidth=1.0))
    np.testing.assert_array_equal(found, sdkde_core.estimate(plain, bandwidth=1.0))
    if "bool" in kept:
        table.loc[3, "y"] = pandas.NA
        with pytest.raises(ValueError, match=r"train has .* nan at row 3, column 1 \('y'\); drop or fill"):
            sdkde_core.estimate(table, **H)
        with pytest.raises(ValueError, match=r"query has .* nan at row 3, column 1 \('y'\); drop or fill"):
            sdkde_core.prepare(table.dropna(), **H).estimate(table)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["x"] * 50, r"column 'b' of train has dtype (str|object); pass real numbers .*train.drop\(columns='b'\)"),
        (pandas.Categorical(["x", "y"] * 25), "column 'b' of train has dtype category"),
        (1j, "column 'b' of train has dtype complex"),
        (pandas.date_range("2020", periods=50), r"column 'b' of train has dtype datetime64.* as \(t - t\[0\]\)"),
    ],
)
def test_a_column_that_holds_no_numbers_is_named(column, message):
    table = TRAIN.assign(b=column)
    for call in (sdkde_core.estimate, sdkde_core.debias, sdkde_core.select_bandwidth):
        with pytest.raises(TypeError, match=message) as error:
            call(table)
        assert type(error.value) is TypeError
    with pytest.raises(TypeError, match="column 'b' of query has dtype"):
        READY.estimate(table)
    with pytest.raises(TypeError, match="train is a Series and has dtype"):
        sdkde_core.estimate(table["b"])


def test_columns_are_those_of_the_training_frame():
    for call in (READY.estimate, READY.grad_log_density, lambda query: sdkde_core.estimate(TRAIN, query, **H)):
        with pytest.raises(ValueError, match=r"in another order: b, a, .* query\[list\(train.columns\)\]"):
            call(QUERY[["b", "a"]])
        with pytest.raises(ValueError, match=r"shape \(7,\), but train has 2 .* or a data frame with the columns a, b"):
            call(QUERY["a"])
    for how in (H, {"coordinates": "asinh", **H}):
        with pytest.raises(ValueError, match="score has the columns of train in another order: b, a"):
            sdkde_core.debias(TRAIN, score=lambda x: -x[["b", "a"]], **how)
    sdkde_core.debias(TRAIN, score=-TRAIN.add_prefix("slope of "), **H)


def test_one_column_has_its_name():
    ready = sdkde_core.prepare(TRAIN["a"], **H)
    for query in (QUERY["a"], QUERY[["a"]], QUERY["a"].rename(None), QUERY["a"].to_numpy()):
        assert ready.estimate(query).shape == (7,)
    for call, query in itertools.product((ready.estimate, ready.cdf), (QUERY["b"], QUERY[["b"]])):
        with pytest.raises(ValueError, match=r"other columns than train: b, where train has a; .* \(a Series by"):
            call(query)
    np.testing.assert_array_equal(ready.cdf(QUERY["a"]), ready.cdf(QUERY["a"].to_numpy()))
    with pytest.raises(ValueError, match=r"columns a, b \(a row of pandas: df.iloc\[\[0\]\]\)$"):
        READY.estimate(QUERY.iloc[0])
    with pytest.raises(ValueError, match="other columns than train: a, where train has b"):
        sdkde_core.estimate(TRAIN["b"], QUERY["a"], **H)
    sdkde_core.estimate(TRAIN["a"], weights=TRAIN["b"].abs(), **H)
    sdkde_core.debias(TRAIN["a"], score=-TRAIN["b"], **H)


MADE = {
    "polars": lambda library, x: library.DataFrame(x, schema=["a", "b"]),
    "pyarrow": lambda library, x: library.table({"a": x[:, 0], "b": x[:, 1]}),
}


@pytest.mark.parametrize("name", MADE)
def test_polars_and_arrow_give_numpys_arrays(name):
    """Their rows have no labels, and polars takes an array as a column."""
    library = pytest.importorskip(name)
    train, query = MADE[name](library, X), MADE[name](library, Y)
    for found in (sdkde_core.estimate(train, query, **H), sdkde_core.prepare(train, **H).estimate(query)):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, sdkde_core.estimate(X, Y, **H))
    assert type(sdkde_core.debias(train, **H)) is np.ndarray
    with pytest.raises(ValueError, match="in another order: b, a"):
        sdkde_core.estimate(train, query.select(["b", "a"]), **H)


def test_what_polars_holds():
    polars = pytest.importorskip("polars")
    train = MADE["polars"](polars, X)
    with pytest.raises(TypeError, match=r"train is a polars LazyFrame, .* pass train.collect\(\)"):
        sdkde_core.estimate(train.lazy(), **H)
    with pytest.raises(TypeError, match=r"column 'b' of train has dtype String; .* leave it out: train.drop\('b'\)"):
        sdkde_core.estimate(train.with_columns(b=polars.lit("x")), **H)
    with pytest.raises(ValueError, match=r"nan at row 1, column 1 \('b'\)"):
        sdkde_core.estimate(train.with_columns(b=polars.Series([1, None] * 25)), **H)


def test_what_arrow_holds():
    arrow = pytest.importorskip("pyarrow")
    for column, dtype in ((np.arange(50).astype("datetime64[s]"), r"timestamp\[s\]"), (["x"] * 50, "string")):
        with pytest.raises(TypeError, match=rf"column 'b' of train has dtype {dtype}; .*train.drop_columns\('b'\)"):
            sdkde_core.estimate(arrow.table({"a": X[:, 0], "b": column}), **H)
    for holed in (arrow.array([1, None, 2]), arrow.chunked_array([[1.5], [None, 2.0]])):
        with pytest.raises(ValueError, match=r"train has .* nan at row 1, column 0; drop or fill"):
            sdkde_core.estimate(holed, **H)


def test_a_labelled_array_keeps_its_coordinates():
    xarray = pytest.importorskip("xarray")
    same, sites = xarray.testing.assert_identical, ("site", np.arange(7.0), {"units": "m"})
    own = {"site": list("ABCDEFG"), "height": sites, "axis": ["a", "b"]}
    query = xarray.DataArray(Y, own, ("site", "axis"), "winds", {"units": "m/s"})
    train = xarray.DataArray(X, {"axis": ["a", "b"]}, ("time", "axis"))
    left = {name: query.coords[name] for name in ("site", "height")}
    want = xarray.DataArray(sdkde_core.estimate(X, Y, **H), left, ("site",), "density")
    same(sdkde_core.estimate(train, query, **H), want)
    same(READY.estimate(query), want)
    slopes = sdkde_core.grad_log_density(X, Y, **H)
    found = sdkde_core.grad_log_density(train, query, **H)
    same(found, xarray.DataArray(slopes, own, query.dims, "grad_log_density"))
    same(sdkde_core.debias(query, **H), query.copy(data=sdkde_core.debias(Y, **H)))
    assert sdkde_core.grad_log_density(query[:, 0], **H).shape == (7, 1)
    assert type(sdkde_core.estimate(query.variable, **H)) is np.ndarray  # which has no coordinates
    for turned in (query[:, ::-1], query.T):
        with pytest.raises(ValueError, match=r"query has the columns of train (in another|under other)"):
            sdkde_core.estimate(train, turned, **H)
    with pytest.raises(TypeError, match=r"train is an xarray Dataset; pass train.to_dataarray\('column'\)"):
        sdkde_core.estimate(train.to_dataset("axis"), **H)
    grid = xarray.DataArray(X[:12].reshape(3, 4, 2), {"lat": [0, 1, 2]}, ("lat", "lon", "axis"))
    there = sdkde_core.estimate(train, grid.stack(point=("lat", "lon")).transpose("point", ...), **H).unstack("point")
    np.testing.assert_array_equal(there.values.ravel(), sdkde_core.estimate(X, X[:12], **H))
