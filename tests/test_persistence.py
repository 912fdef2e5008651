"""Densities in files: what is loaded is what was saved, elsewhere too, and no file can do harm."""

import copy
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pairwise import cases
from sdkde_numpy.backend import NumpyBackend
from sdkde_numpy.info import INFO

import sdkde_core
from sdkde_core import archive, messages
from sdkde_core.choice import registry
from sdkde_core.protocol import Support

RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(60, 2)), RNG.normal(size=(30, 2)), RNG.random(60) * (RNG.random(60) > 0.2)
NARROW = np.array([[1.0, 1.0 - 1e-7], [1.0 - 1e-7, 1.0]])  # whitened in two parts
PINNED = Path(__file__).parent / "files" / "prepared-1.sdkde"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def saved(train=X, **options):
    options = {"bandwidth": 0.5, **options}
    ready = sdkde_core.prepare(train, **options)
    ready.save("a.sdkde")
    return ready


# --- the same -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "bandwidth", "precision", "weighted", "dtype"),
    cases(
        ("kde", "sdkde", "laplace"),
        ("auto", 0.5, "silverman", "scott", "narrow"),
        ("auto", "fast", "float64"),
        (False, True),
        ("f4", "f8"),
    ),
)
def test_what_is_loaded_gives_the_same_bits(method, bandwidth, precision, weighted, dtype):
    options = {"method": method, "precision": precision, "weights": W if weighted else None}
    options["negative"] = "renormalise" if method == "laplace" and weighted else "keep"
    ready = saved(X.astype(dtype), bandwidth=NARROW if bandwidth == "narrow" else bandwidth, **options)
    again = sdkde_core.load("a.sdkde")
    for query in (Y.astype("f4"), Y, 100 * Y):
        got, want = again.estimate(query), ready.estimate(query)
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)
    assert repr(again) == repr(ready)
    assert again._fitted.problem == ready._fitted.problem
    assert np.array_equal(again.bandwidth.matrix, ready.bandwidth.matrix)
    if method == "laplace":
        assert again.negative_mass() == ready.negative_mass()
    chosen = ready.bandwidth.selection
    assert (chosen is None) is (bandwidth != "auto")
    if chosen is not None:
        assert again.bandwidth.selection.to_dict() == chosen.to_dict()
    Path("a.sdkde").rename("first")
    again.save("a.sdkde")
    assert Path("a.sdkde").read_bytes() == Path("first").read_bytes()


class Frame:
    def __init__(self, x, names):
        self.x, self.columns = x, names

    def __array__(self, dtype=None, copy=None):
        return self.x


def test_options_and_names_are_kept(monkeypatch):
    frame = Frame(X, ["b", "ä"])
    options = {"backend": "numpy", "backend_options": {"threads": 1}, "check_finite": False, "device": "cpu"}
    saved(frame, **options)
    monkeypatch.setenv("SDKDE_PRECISION", "fast")  # for what is decided now
    again = sdkde_core.load(Path("a.sdkde"))
    asked = again._fitted.request
    assert {name: getattr(asked, name) for name in options} == options
    assert again.precision == "high"
    with pytest.raises(ValueError, match="in another order: ä, b"):
        again.estimate(Frame(X, ["ä", "b"]))
    nan = again.estimate([[np.nan, 0.0], [0.0, 0.0]])
    assert np.isnan(nan).tolist() == [True, False]


def test_it_travels_to_another_process():
    ready = saved(weights=W, method="sdkde", precision="float64")
    np.save("y.npy", Y)
    code = """
import sys, numpy, sdkde_core
print(sdkde_core.load("a.sdkde").estimate(numpy.load("y.npy")).tolist())
assert not {"torch", "sklearn", "scipy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ready.estimate(Y).tolist()


def test_what_torch_made_loads_without_it(monkeypatch):
    torch = pytest.importorskip("torch")
    ready = saved(torch.from_numpy(X), backend="torch", device="cpu", precision="high")
    assert torch.equal(sdkde_core.load("a.sdkde").estimate(torch.from_numpy(Y)), ready.estimate(torch.from_numpy(Y)))
    monkeypatch.setattr(messages, "_told", set())
    others = tuple(r for r in registry.records() if r.name != "torch")
    monkeypatch.setattr(registry, "records", lambda: others)
    with pytest.warns(sdkde_core.SdkdeWarning, match=r"a\.sdkde was made with backend='torch', device='cpu', not to"):
        there = sdkde_core.load("a.sdkde")
    assert there.backend != "torch"
    np.testing.assert_allclose(there.estimate(Y), ready.estimate(Y), rtol=3e-5)


@pytest.mark.parametrize("named", [False, True])
def test_what_another_device_made_loads_where_there_is_none(named, monkeypatch):
    with monkeypatch.context() as patch:
        implementation = type("Far", (NumpyBackend,), {"probe": lambda self, device: Support(True, "is here")})
        patch.setitem(sys.modules, "far_backend", SimpleNamespace(Implementation=implementation))
        info = replace(INFO, name="far", implementation="far_backend:Implementation", devices=("far",))
        patch.setattr(registry, "made", {})
        patch.setattr(registry, "records", lambda: (registry.Record("far", "ok", "", "tests", "1", "", info),))
        ready = saved(precision="float64", **({"device": "far:1"} if named else {}))
        assert ready.backend == "far"
        want = ready.estimate(Y)
    monkeypatch.setattr(messages, "_told", set())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        again = sdkde_core.load("a.sdkde")
    assert [str(w.message).partition(",")[0] for w in heard] == ["a.sdkde was made with device='far:1'"] * named
    assert again.device == "cpu"
    np.testing.assert_allclose(again.estimate(Y), want, rtol=1e-10)


def test_a_file_of_version_1_loads_for_ever():
    """Do not write it anew: it stands for those that users have."""
    held = archive.read(PINNED)
    ready = sdkde_core.load(PINNED)
    assert (held.kind, ready.method, ready.bandwidth.rule) == ("Prepared", "sdkde", "auto × given")
    assert (ready.n_train, ready.n_dimensions, ready.precision) == (40, 2, "high")
    assert "least squares" in ready.bandwidth.selection.reason
    query = [[0.0, 0.0], [1.0, -1.0], [3.0, 30.0]]
    want = [-3.9310473, -5.4182852, -20.105005]
    np.testing.assert_allclose(ready.estimate(query, log=True), want, rtol=2e-5)
    score = [[-0.4210967, 0.01222732], [-1.9151215, 0.009175795], [-6.2302977, -0.6299894]]
    np.testing.assert_allclose(ready.grad_log_density(query), score, rtol=1e-4, atol=1e-5)


def test_the_kernel_is_kept():
    ready = saved(method="kde", kernel="epanechnikov", bandwidth=1.5)
    again = sdkde_core.load("a.sdkde")
    assert again.kernel == "epanechnikov"
    assert np.array_equal(again.estimate(Y), ready.estimate(Y))


def test_what_is_derived_is_kept_too():
    ready = sdkde_core.prepare(X, bandwidth="scott", weights=W)
    for other in (ready.marginal([1]), ready.conditional({0: 0.5})):
        other.save("a.sdkde")
        again = sdkde_core.load("a.sdkde")
        assert np.array_equal(again.estimate(Y[:, 0]), other.estimate(Y[:, 0]))
        assert np.array_equal(again.sample(5, 0), other.sample(5, 0))


def test_draws_are_of_the_samples_library_if_it_is_one_that_is_known():
    torch = pytest.importorskip("torch")
    ready = saved(torch.from_numpy(X).float())
    draws = sdkde_core.load("a.sdkde").sample(3, 0)
    assert torch.equal(draws, ready.sample(3, 0))
    content, arrays = ready.to_saved()
    for origin in (["array_api_compat.torch", "cuda:99", False], ["antigravity", "cpu", True], ["", 3], 7):
        archive.write("a", "Prepared", {**content, "origin": origin}, arrays)
        assert isinstance(sdkde_core.load("a").sample(3, 0), np.ndarray)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("bandwidth", [0.5, "auto", [0.5, 0.6], NARROW])
def test_scikit_learns_class_is_kept_too(bandwidth):
    pytest.importorskip("sklearn")
    model = sdkde_core.KernelDensity(method="sdkde", bandwidth=bandwidth, leaf_size=7).fit(X, sample_weight=W)
    model.feature_names_in_ = np.array(["b", "ä"], dtype=object)
    model.save("a.sdkde")
    again = sdkde_core.load("a.sdkde")
    assert type(again) is sdkde_core.KernelDensity
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # scikit-learn misses the names
        assert np.array_equal(again.score_samples(Y), model.score_samples(Y))
    assert (again.method, again.leaf_size, again.n_features_in_) == ("sdkde", 7, 2)
    assert again.feature_names_in_.tolist() == ["b", "ä"]
    assert np.array_equal(again.bandwidth_, model.bandwidth_)
    again.fit(X)  # with the parameters it has
    held = archive.read("a.sdkde")
    parameters = held.content["parameters"]
    for change in ({"parameters": {"x": 1}}, {"parameters": parameters | {"method": "x"}}, {"density": {}}):
        archive.write("a", "KernelDensity", held.content | change, held.arrays)
        with pytest.raises(ValueError, match="'a' cannot be loaded"):
            sdkde_core.load("a")


@pytest.mark.parametrize(("method", "weights"), [("kde", None), ("sdkde", W)])
def test_scipys_class_is_kept_too(method, weights):
    kde = sdkde_core.gaussian_kde(X.T, "silverman", weights, method=method)
    kde.save("a.sdkde")
    again = sdkde_core.load("a.sdkde")
    assert type(again) is sdkde_core.gaussian_kde
    assert np.array_equal(again.logpdf(Y.T), kde.logpdf(Y.T))
    np.testing.assert_allclose(again.resample(5, 0), kde.resample(5, 0), rtol=1e-12)
    np.testing.assert_allclose((again.factor, again.neff), (kde.factor, kde.neff), rtol=1e-12)
    held = archive.read("a.sdkde")
    for change in ({"method": "laplace"}, {"factor": "open"}, {"density": {}}, {"options": {"x": 1}}, {"options": 3}):
        archive.write("a", "gaussian_kde", held.content | change, held.arrays)
        with pytest.raises(ValueError, match="'a' cannot be loaded"):
            sdkde_core.load("a")
    archive.write("a", "gaussian_kde", held.content, {k: x for k, x in held.arrays.items() if k != "dataset"})
    with pytest.raises(ValueError, match="'a' cannot be loaded: its dataset is missing"):
        sdkde_core.load("a")


# --- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {1, 2}, np.int64(3), np.zeros(2), b"x", float("nan"), object()])
def test_options_that_a_file_does_not_keep(value):
    ready = saved()
    before = Path("a.sdkde").read_bytes()
    asked = replace(ready._fitted.request, backend="numpy", backend_options={"threads": 1, "what": value})
    other = copy.copy(ready._fitted)
    other.request = asked
    with pytest.raises(TypeError, match=r"backend_options has what=.*which a file does not keep; pass None, booleans"):
        sdkde_core.Prepared(other, "float64").save("a.sdkde")
    assert Path("a.sdkde").read_bytes() == before


def test_after_an_error_the_old_file_stands(monkeypatch):
    ready = saved()
    before = Path("a.sdkde").read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hashlib, "sha256", lambda: SimpleNamespace(update=interrupted))
        ready.save("a.sdkde")
    assert [p.name for p in Path().iterdir()] == ["a.sdkde"]
    assert Path("a.sdkde").read_bytes() == before
    with pytest.raises(FileNotFoundError, match=r"none/a\.sdkde"):
        ready.save("none/a.sdkde")
    with pytest.raises(ValueError, match="5000"):
        archive.write("a.sdkde", "x", {"long": "x" * 5_000_000}, {})


# --- reading ------------------------------------------------------------------------------------------------------


def test_what_is_cut_off_or_altered_is_refused():
    sdkde_core.prepare(X[:6], bandwidth=1.0, method="kde").save("whole")
    raw = Path("whole").read_bytes()
    for i in (*range(26), *range(26, len(raw), 11), len(raw) - 1):
        Path("a").write_bytes(raw[:i])
        with pytest.raises(ValueError, match=r"^'a' is cut off"):
            sdkde_core.load("a")
        Path("a").write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :])
        with pytest.raises(ValueError, match=r"^'a' is (no file|of format version|altered or damaged|cut off)"):
            sdkde_core.load("a")
    Path("a").write_bytes(raw + b"\n")
    with pytest.raises(ValueError, match="altered or damaged"):
        sdkde_core.load("a")
    Path("a").write_bytes(raw.replace(b"\r\n", b"\n"))
    with pytest.raises(ValueError, match="no file that sdkde has saved"):
        sdkde_core.load("a")


def test_what_a_newer_version_wrote():
    saved()
    raw = bytearray(Path("a.sdkde").read_bytes())
    raw[8] = 2
    Path("a.sdkde").write_bytes(raw)
    with pytest.raises(ValueError, match=r"'a\.sdkde' is of format version 2, and sdkde-core .* reads up to 1; pip"):
        sdkde_core.load("a.sdkde")
    for kind, option in (("Other", {}), ("Prepared", {"tails": 3})):
        content, arrays = sdkde_core.prepare(X, bandwidth=1.0).to_saved()
        content["request"] |= option
        archive.write("a.sdkde", kind, content, arrays)
        with pytest.raises(ValueError, match=r"'a\.sdkde' .*('Other'|'tails'), which this version does not know; pip"):
            sdkde_core.load("a.sdkde")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_other_files_are_refused_and_nothing_is_executed():
    with zipfile.ZipFile("zip", "w") as archived:
        archived.writestr("a.npy", pickle.dumps(Bomb()))
    np.save("objects.npy", np.array([Bomb()], dtype=object))
    Path("pickle").write_bytes(pickle.dumps(Bomb()))
    Path("text").write_text("sdkde")
    for name in ("zip", "objects.npy", "pickle", "text"):
        with pytest.raises(ValueError, match=f"^'{name}' is no file that sdkde has saved; pass one that save"):
            sdkde_core.load(name)
    Path("empty").touch()
    with pytest.raises(ValueError, match="'empty' is cut off after 0 bytes"):
        sdkde_core.load("empty")
    Path("folder").mkdir()
    for call in (sdkde_core.load, sdkde_core.prepare(X, bandwidth=0.5).save):
        with pytest.raises(OSError, match="folder"):
            call("folder")
        for path in (0, None, b"a", ["a"]):
            with pytest.raises(TypeError, match=r"path is .*; pass a string or a Path"):
                call(path)
    with pytest.raises(FileNotFoundError, match="none"):
        sdkde_core.load("none")
    assert not Path("harm").exists()


def crafted(header, payload=b"", length=None, total=None):
    """A file with a right fingerprint, whatever it says."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    total = 24 + len(raw) + len(payload) + 32 if total is None else total
    head = struct.pack("<8sIIQ", archive.MAGIC, 1, len(raw) if length is None else length, total)
    return head + raw + payload + hashlib.sha256(head + raw + payload).digest()


def of(*arrays, kind="Prepared", **more):
    return {"kind": kind, "library": "1", "arrays": list(arrays), "content": {}, **more}


@pytest.mark.parametrize(
    "raw",
    [
        crafted(of(["points", "float64", [1 << 40, 1 << 20]])),
        crafted(of(["points", "float64", [0, 1 << 62]])),
        crafted(of(["points", "float64", [-1, -2]]), bytes(16)),
        crafted(of(["points", "float64", [2.0]]), bytes(16)),
        crafted(of(["points", "float64", [True] * 40]), bytes(8)),
        crafted(of(["points", "object", [1]]), bytes(8)),
        crafted(of(["points", ["float64"], [1]]), bytes(8)),
        crafted(of(["a", "float64", [1]], ["a", "float64", [1]]), bytes(16)),
        crafted(of(["a", "float64", [1]]), bytes(16)),
        crafted(of(["a", "float64"])),
        crafted(of(kind=["Prepared"])),
        crafted(of(content=[])),
        crafted([1, 2]),
        crafted(b"[" * 1_000_000),
        crafted(b"\xff\xfe"),
        crafted(b'{"kind": NaN}'),
        crafted(b"{}", length=1 << 31),
        crafted(b"{}", total=10),
        crafted(b"{}", total=1 << 62),
        crafted(b" " * 5_000_000 + b"{}"),
    ],
)
def test_crafted_headers_are_refused_without_taking_memory(raw):
    Path("a").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^'a' is (altered or damaged|cut off)"):
            sdkde_core.load("a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 + 40 * len(raw)


def _set(place, value):
    def change(content, arrays):
        *path, last = place.split("/")
        there = {"arrays": arrays, **content} if path and path[0] == "arrays" else content
        for name in path:
            there = there[name]
        if value is None:
            del there[last]
        else:
            there[last] = value(there[last]) if callable(value) else value

    return change


def _first(number):
    def change(x):
        x = x.copy()
        x.flat[0] = number
        return x

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(
            _set(place, None)
            for place in ("request", "names", "rule", "dtype", "weighted", "rows", "extent", "backend")
        ),
        *(_set(f"arrays/{name}", None) for name in ("points", "log_weights", "centre", "factor", "scale", "high")),
        *(_set(f"arrays/{name}", lambda x: x[:1]) for name in ("points", "log_weights", "centre", "factor", "high")),
        *(_set(f"arrays/{name}", lambda x: x.astype("f4")) for name in ("points", "factor", "matrix")),
        *(_set(f"arrays/{name}", lambda x: x[None]) for name in ("points", "centre", "factor")),
        *(_set("arrays/factor", _first(value)) for value in (0.0, -1.0, np.nan)),
        *(_set("arrays/log_weights", _first(value)) for value in (1.0, np.nan, -1.0)),
        *(_set("arrays/points", _first(value)) for value in (np.inf, 1e200)),
        _set("arrays/points", np.zeros((0, 2))),
        *(_set("request/method", value) for value in ("other", 3, ["kde"])),
        *(_set("request/check_finite", value) for value in (1, "yes")),
        _set("request/negative", "clip"),
        _set("request/precision", "double"),
        *(_set("dtype", value) for value in ("object", "float16")),
        *(_set("rows", value) for value in (0, 1.5, True)),
        *(_set("extent", value) for value in (1e200, 3, "1")),
        *(_set("names", value) for value in (["a"], [1, 2], "ab")),
        *(_set("selection", value) for value in ([], {"method": "kde"}, 3)),
        _set("weighted", 0),
    ],
)
def test_crafted_fields_are_refused(change):
    content, arrays = sdkde_core.prepare(X, bandwidth=NARROW, method="kde").to_saved()
    change(content, arrays)
    archive.write("a", "Prepared", content, arrays)
    with pytest.raises(ValueError, match=r"^'a' cannot be loaded: "):
        sdkde_core.load("a")


def test_columns_beyond_the_extent_that_a_file_claims():
    """No backend is told that points lie nearer than they do."""
    ready = sdkde_core.prepare(X, bandwidth=0.01, method="kde", precision="float64")
    content, arrays = ready.to_saved()
    archive.write("a", "Prepared", content | {"extent": 0.0}, arrays)
    again = sdkde_core.load("a")
    assert again._fitted.problem.extent > 100.0
    np.testing.assert_allclose(again.estimate(X), ready.estimate(X), rtol=1e-10)


def test_what_is_written_is_what_is_documented():
    arrays = {
        "a": np.arange(6.0).reshape(2, 3).T,
        "b": np.zeros((0, 3), "f4"),
        "c": np.array(3),
        "d": np.ones(2, ">f8"),
    }
    archive.write("a", "thing", {"x": [1, 0.1, None, "ü", True]}, arrays)
    file = io.BytesIO(Path("a").read_bytes())
    assert file.read(8) == b"\x89sdkde\r\n"
    version, length, total = struct.unpack("<IIQ", file.read(16))
    assert (version, total) == (1, len(file.getvalue()))
    header = json.loads(file.read(length))
    assert header["library"] == sdkde_core.__version__
    assert (header["kind"], header["content"]) == ("thing", {"x": [1, 0.1, None, "ü", True]})
    for name, dtype, shape in header["arrays"]:
        want = arrays[name]
        count = want.size * np.dtype(dtype).itemsize
        got = np.frombuffer(file.read(count), np.dtype(dtype).newbyteorder("<")).reshape(shape)
        assert np.array_equal(got, want)
        assert np.array_equal(archive.read("a").arrays[name], want)
    assert file.read() == hashlib.sha256(file.getvalue()[:-32]).digest()
