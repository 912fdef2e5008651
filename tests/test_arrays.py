"""Arrays of every kind, dtype and device go in; the same kind comes out."""

import pickle

import array_api_strict
import numpy as np
import pytest

pytest.importorskip("torch")

import reference
import torch
from scipy import sparse
from strange import Frame

import sdkde_core
from sdkde_core.arrays import Origin, arguments, convert, ingest
from sdkde_core.arrays.places import with_room

X = np.random.default_rng(0).normal(size=(50, 2))
Y = np.random.default_rng(1).normal(size=(7, 2))
WANT = reference.estimate(X, Y, bandwidth=0.5)


class OnlyDlpack:
    """An array of a library that shares memory and nothing else."""

    def __init__(self, x, device=None):
        self.x, self.device = x, device

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device or self.x.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "bool"])
@pytest.mark.parametrize("kind", ["numpy", "list", "torch", "strict", "dlpack", "fortran", "strided", "readonly"])
def test_kinds_and_dtypes(kind, dtype):
    base = (X * 3).astype(dtype)
    if kind == "strict" and dtype == "float16":
        pytest.skip("the array API has no float16")
    query = (Y * 3).astype(dtype)
    kinds = {
        "numpy": np.asarray,
        "list": np.ndarray.tolist,
        "torch": torch.from_numpy,
        "strict": array_api_strict.asarray,
        "dlpack": OnlyDlpack,
        "fortran": np.asfortranarray,
        "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
        "readonly": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    }
    got = sdkde_core.estimate(kinds[kind](base), kinds[kind](query), bandwidth=0.5, method="kde")
    narrow = dtype in ("float32", "float16") and kind != "list"
    assert type(got) is {"torch": torch.Tensor, "strict": type(array_api_strict.asarray(0.0))}.get(kind, np.ndarray)
    assert str(got.dtype).endswith("float32" if narrow else "float64")
    want = reference.estimate(base.astype(float), query.astype(float), bandwidth=0.5, method="kde")
    np.testing.assert_allclose(np.asarray(got), want, rtol=6e-4 if narrow else 2e-5)


def test_bfloat16():
    got = sdkde_core.estimate(torch.from_numpy(X).bfloat16(), torch.from_numpy(Y).bfloat16(), bandwidth=0.5)
    want = reference.estimate(*(torch.from_numpy(a).bfloat16().double().numpy() for a in (X, Y)), bandwidth=0.5)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-3)


@pytest.mark.parametrize(
    ("train", "query", "out"), [("f4", "f4", "f4"), ("f4", "f8", "f8"), ("f8", "f4", "f8"), ("i4", "f4", "f8")]
)
def test_dtypes_are_promoted(train, query, out):
    assert sdkde_core.estimate(X.astype(train), Y.astype(query), bandwidth=0.5).dtype == np.dtype(out)


def test_the_result_is_the_querys_kind():
    assert isinstance(sdkde_core.estimate(X, torch.from_numpy(Y), bandwidth=0.5), torch.Tensor)
    assert isinstance(sdkde_core.estimate(torch.from_numpy(X), Y, bandwidth=0.5), np.ndarray)
    assert isinstance(sdkde_core.estimate(torch.from_numpy(X), bandwidth=0.5), torch.Tensor)
    assert isinstance(sdkde_core.debias(torch.from_numpy(X), bandwidth=0.5), torch.Tensor)
    assert isinstance(sdkde_core.grad_log_density(X, torch.from_numpy(Y), bandwidth=0.5), torch.Tensor)


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("bandwidth", ["silverman", "scott", 0.5, [0.4, 0.5], [[0.3, 0.1], [0.1, 0.2]]])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_data_on_a_device_stay_in_their_library(method, bandwidth, query):
    """array_api_strict's second device refuses to mix with anything else, as a GPU would."""
    device = array_api_strict.Device("device1")
    w = np.random.default_rng(2).random(50)
    w[:5] = 0
    x, y, weights = (array_api_strict.asarray(a, device=device) for a in (X, Y, w))
    got = sdkde_core.estimate(
        x, y if query else None, bandwidth=bandwidth, method=method, weights=weights, precision="float64"
    )
    assert got.device == device
    want = sdkde_core.estimate(
        X, Y if query else None, bandwidth=bandwidth, method=method, weights=w, precision="float64"
    )
    back = np.asarray(array_api_strict.asarray(got, device=array_api_strict.Device("CPU_DEVICE")))
    np.testing.assert_allclose(back, want, rtol=1e-11)
    if method == "sdkde":
        assert sdkde_core.debias(x, bandwidth=bandwidth).device == device
        assert sdkde_core.grad_log_density(x, y, bandwidth=bandwidth).device == device
    data = ingest(x, y)
    assert data.train.device == device
    assert ingest(x, y, device="cpu").device == "cpu"


def test_large_data_of_the_host_go_to_the_device_that_was_asked_for(monkeypatch):
    """If it has room for them; float32 as it is, and results come back."""
    there = Origin(array_api_strict, array_api_strict.Device("device1"), on_host=False)
    monkeypatch.setattr(arguments, "LARGE", X.size)
    monkeypatch.setattr(arguments, "with_room", lambda device, size: there if device == "cuda:0" else Origin())
    narrow = ((X.astype(">f4"), "float32"), (X.astype(np.float16), "float32"))
    for x, dtype in (*narrow, (X, "float64"), (X > 0, "float64")):
        data = ingest(x, x[:7], device="cuda:0")
        assert data.device != data.came_from and data.train.device == data.query.device == there.device
        assert data.train.dtype == data.query.dtype == getattr(array_api_strict, dtype)
        assert (data.dtype, data.origin, data.came_from) == (dtype, Origin(), "cpu")
    for x, device in ((X[1:], "cuda:0"), (X, "cuda:1"), (X, "cpu"), (X, None)):
        data = ingest(x, device=device)
        assert isinstance(data.train, np.ndarray) and data.device == data.came_from
    x = array_api_strict.asarray(X)  # the user's own device is left alone
    own = ingest(array_api_strict.asarray(X, device=there.device), device="cuda:0")
    assert own.device == own.came_from
    assert ingest(x, device="cuda:0").came_from == "cpu"


def test_a_device_that_is_not_here_has_no_room():
    for device in ("cuda:17", "mps", "cpu", "cuda:0"):
        assert with_room(device, 2**60) == Origin()


def test_a_host_query_against_data_on_a_device():
    x = array_api_strict.asarray(X, device=array_api_strict.Device("device1"))
    got = sdkde_core.estimate(x, Y, bandwidth=0.5)
    assert isinstance(got, np.ndarray)
    np.testing.assert_allclose(got, WANT, rtol=2e-5)


def test_a_dlpack_array_on_a_device_is_an_error():
    with pytest.raises(TypeError, match="train is on a device"):
        sdkde_core.estimate(OnlyDlpack(X, device=(2, 0)))


def test_one_dimension():
    x, y = X[:, 0], Y[:, 0]
    want = reference.estimate(x, y, bandwidth=0.5)
    for train in (x, x[:, None]):
        for query in (y, y[:, None]):
            np.testing.assert_allclose(sdkde_core.estimate(train, query, bandwidth=0.5), want, rtol=2e-5)
    assert sdkde_core.debias(x).shape == (50, 1)
    assert sdkde_core.grad_log_density(x, y).shape == (7, 1)


@pytest.mark.parametrize("query", [[], np.empty(0), np.empty((0, 2)), torch.empty(0, 2)])
def test_an_empty_query(query):
    for method in ("kde", "sdkde", "laplace"):
        assert tuple(sdkde_core.estimate(X, query, method=method).shape) == (0,)
    assert tuple(sdkde_core.grad_log_density(X, query).shape) == (0, 2)


def _table(x, names):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.table(dict(zip(names, x.T)))


@pytest.mark.parametrize("frame", [Frame, _table])
def test_columns_of_data_frames_stand_in_one_order(frame):
    x, y = frame(X, ["a", "b"]), frame(Y[:, ::-1], ["b", "a"])
    ready = sdkde_core.prepare(x, bandwidth=0.5)
    calls = {
        "estimate": lambda query: sdkde_core.estimate(x, query, bandwidth=0.5),
        "gradient": lambda query: sdkde_core.grad_log_density(x, query, bandwidth=0.5),
        "explain": lambda query: sdkde_core.explain(x, query, bandwidth=0.5),
        "prepared": ready.estimate,
        "pickled": pickle.loads(pickle.dumps(ready)).estimate,
        "prepared gradient": ready.grad_log_density,
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"in another order: b, a, where train has a, b; pass .*columns\)"):
            call(y)
        with pytest.raises(ValueError, match="other columns than train: a, c, where train has a, b"):
            call(frame(Y, ["a", "c"]))
        with pytest.raises(ValueError, match="other columns than train: a, b, c, where"):
            call(frame(np.ones((5, 3)), ["a", "b", "c"]))
    for query in (frame(Y, ["a", "b"]), Y, Frame(Y, [0, 1]), Frame(Y, None)):  # numbers are places, not names
        np.testing.assert_allclose(ready.estimate(query), WANT, rtol=2e-5)
        np.testing.assert_allclose(sdkde_core.estimate(x, query, bandwidth=0.5), WANT, rtol=2e-5)
    want = sdkde_core.estimate(X, Y[:, ::-1], bandwidth=0.5)
    np.testing.assert_array_equal(sdkde_core.estimate(X, y, bandwidth=0.5), want)


#: Arrays that PyTorch does not share memory with, or warns of.
AWKWARD = {
    "backwards": lambda a: a[::-1],
    "mirrored": lambda a: a[:, ::-1],
    "every other": lambda a: np.repeat(a, 2, axis=0)[::-2],
    "broadcast": lambda a: np.broadcast_to(a[0], a.shape),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "field": lambda a: np.rec.fromarrays([a, np.zeros(len(a), "i1")], [("x", "f8", 2), ("y", "i1")]).x,
    "unaligned": lambda a: np.frombuffer(b" " + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "other bytes": lambda a: a.astype(">f8"),
}


@pytest.mark.parametrize("backend", ["torch", "fourier-torch"])  # others with PyTorch's arrays want a GPU or a compiler
@pytest.mark.parametrize("kind", [*AWKWARD, "mapped"])
def test_memory_that_pytorch_cannot_share(kind, backend, tmp_path):
    """Warnings are errors here."""
    np.save(tmp_path / "y.npy", Y)
    x, w = X, np.linspace(1.0, 2.0, 50)[::-1]
    y = np.load(tmp_path / "y.npy", mmap_mode="r") if kind == "mapped" else AWKWARD[kind](Y)
    assert np.array_equal(convert(y.astype(float, copy=False), "torch", "cpu").numpy(), y)
    for train, query, weights in ((x, y, w), (y, x, None), (y, None, None)):
        options = {"bandwidth": 0.5, "weights": weights}
        want = reference.estimate(train, query, **options)
        got = sdkde_core.estimate(train, query, backend=backend, **options)
        np.testing.assert_allclose(got, want, rtol=2e-5)
        ready = sdkde_core.prepare(train, backend=backend, **options)
        np.testing.assert_allclose(ready.estimate(train if query is None else query), want, rtol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1.0], [1.0, 2.0]],), ValueError, "train is no array of numbers: pass rows of equal length"),
        ((torch.eye(3).to_sparse(),), TypeError, r"train is a Tensor that cannot be read.*pass train.to_dense\(\)"),
        ((sparse.eye_array(3).tocsr(),), TypeError, r"train is a sparse csr_array; pass train.toarray\(\)"),
        ((X, sparse.csc_matrix(Y)), TypeError, r"query is a sparse csc_matrix; pass query.toarray\(\)"),
        ((np.arange(3) + np.datetime64("2020"),), TypeError, r"datetime64.* times, .*\(t - t\[0\]\) / np.timedelta64"),
        ((np.arange(3) * np.timedelta64(1, "D"),), TypeError, r"timedelta64\[D\]; .* times, .*\(t - t"),
        ((torch.empty(3, 2, device="meta"),), TypeError, "train"),
        ((np.empty((0, 2)),), ValueError, "train is empty"),
        ((np.empty((3, 0)),), ValueError, "train is empty"),
        ((3.0,), ValueError, r"train has shape \(\); pass .*\(points,\): \[0.5\]"),
        ((np.ones((2, 2, 2)),), ValueError, r"shape \(2, 2, 2\)"),
        ((X.astype(complex),), TypeError, "complex128"),
        ((torch.from_numpy(X).to(torch.complex64),), TypeError, "complex64"),
        ((X.astype(object),), TypeError, "dtype object"),
        ((["a", "b"],), TypeError, "dtype <U1"),
        ((None,), TypeError, "NoneType"),
        ((np.ma.masked_array(X, X > 1),), TypeError, "masked"),
        ((list(np.ma.masked_array(X, X > 1)),), TypeError, "masked"),
        ((X, Y[0]), ValueError, r"query\[None, :\]"),
        ((X, np.ones(5)), ValueError, r"shape \(m, 2\)"),
        ((X, np.ones((5, 3))), ValueError, "query has 3 dimensions, but train has 2"),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        sdkde_core.estimate(*arguments)


TURNED = r"; if columns are points, as for SciPy's gaussian_kde, pass "


@pytest.mark.parametrize(
    ("arguments", "options", "turned"),
    [
        ((X.T, Y.T), {}, "train.T and query.T"),
        ((X.T, Y), {}, "train.T"),
        ((X, Y.T), {}, "query.T"),
        ((X[:, 0][None, :],), {}, "train.T"),
        ((X.T,), {"bandwidth": "scott"}, "train.T"),
        ((X.T,), {"bandwidth": [0.1, 0.2]}, "train.T"),
        ((X.T,), {"bandwidth": torch.eye(2)}, "train.T"),
        ((X.T,), {"weights": np.ones(50)}, "train.T"),
        ((np.zeros((2, 9)),), {}, "train.T"),
        ((X, np.ones((50, 3))), {}, None),
        ((X.T, np.ones((3, 3))), {}, None),
        ((X,), {"weights": np.ones(2)}, None),
        ((X,), {"bandwidth": np.eye(50)}, None),
        ((X.T,), {"bandwidth": -1.0}, None),
        ((np.zeros((9, 2)),), {}, None),
    ],
)
def test_errors_that_points_in_columns_explain_say_so(arguments, options, turned):
    with pytest.raises(ValueError, match=rf"{TURNED}{turned}$" if turned else None) as error:
        sdkde_core.estimate(*arguments, **options)
    assert turned or "SciPy" not in str(error.value)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(
    ("value", "bandwidth", "message"),
    [
        (
            np.nan,
            "silverman",
            "bandwidth='silverman' is chosen from train, which has nan at row 3, column 1; drop or fill",
        ),
        (-np.inf, "scott", "bandwidth='scott' is chosen from train, which has -inf at row 3, column 1"),
        (np.inf, 0.5, "row 3 of train, inf in column 1, is not finite; drop or fill it"),
        (-1e300, 0.5, r"row 3 of train, -1e\+300 in column 1, is too far from the median of train: .* drop the row"),
        (1e308, "scott", r"'scott' would be inf in column 1 of train, .* to 1e\+308: .* rescale that column"),
    ],
)
def test_data_are_named_where_they_are_to_blame(kind, value, bandwidth, message):
    """And not the bandwidth, also where nothing was checked; a row of weight zero does not count for rules."""
    x, w = X.copy(), np.ones(50)
    x[3, 1] = value
    w[1] = 0.0
    with pytest.raises(ValueError, match=message):
        sdkde_core.estimate(kind(x), bandwidth=bandwidth, weights=w, check_finite=False)
    if not isinstance(bandwidth, str):
        message = message.replace("row 3 of train", "row 3 of query")
        with pytest.raises(ValueError, match=message):
            sdkde_core.estimate(X, kind(x), bandwidth=bandwidth, check_finite=False)
        ready = sdkde_core.prepare(kind(X), bandwidth=bandwidth, check_finite=False)
        with pytest.raises(ValueError, match=message):
            ready.estimate(kind(x))
        assert np.isfinite(np.asarray(ready.estimate(kind(x[:3])))).all()


def test_differences_that_overflow_are_the_datas():
    x = np.array([1e308, -1e308, -1e308, -1.1e308, -1.2e308])
    with pytest.raises(ValueError, match=r"row 0 of train, 1e\+308 in column 0, is too far.* rescale"):
        sdkde_core.estimate(x, bandwidth=1e307)
    with pytest.raises(ValueError, match=r"in column 0 of train, which goes from -1.2e\+308 to 1e\+308: .* rescale"):
        sdkde_core.estimate(x)
    with pytest.raises(ValueError, match=r"would be 0.0 in column 0 of train, which goes from 0 to 9.88e-324"):
        sdkde_core.estimate(np.array([0.0, 1e-323]), bandwidth="scott")
    far = np.array([[1e308, 1e308], [-1e308, -1e308], [-1e308, -1e308]])
    for call in (sdkde_core.estimate, sdkde_core.debias):
        with pytest.raises(ValueError, match=r"row 0 of train, 1e\+308 in column 0, is too far"):
            call(far, bandwidth=np.eye(2))
    line, how = np.linspace(-1, 1, 40), {"method": "kde", "bandwidth": "isj"}
    one, large, small = (sdkde_core.prepare(s * line, **how).bandwidth.factor[0] for s in (1.0, 1e308, 1e-310))
    np.testing.assert_allclose([large / 1e308, small / 1e-310], one, rtol=1e-10)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(49), r"shape \(50,\)"),
        (np.ones((50, 1)), r"shape \(50,\)"),
        (np.zeros(50), "all zero"),
        (np.r_[-1.0, np.ones(49)], "negative.*-1.0 at index 0"),
        (np.r_[np.ones(49), np.nan], "not finite.*index 49"),
    ],
)
def test_weights_that_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        sdkde_core.estimate(X, bandwidth=1.0, weights=weights)
