"""Densities in files: what is loaded is what was saved, elsewhere too, and no file can do harm."""

import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
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
from strange import Frame

import sdkde_core
from sdkde_core import archive, messages
from sdkde_core.choice import registry
from sdkde_core.protocol import Support

RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(60, 2)), RNG.normal(size=(30, 2)), RNG.random(60) * (RNG.random(60) > 0.2)
NARROW = np.array([[1.0, 1.0 - 1e-7], [1.0 - 1e-7, 1.0]])  # whitened in two parts


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
    _, content, arrays = archive.read("a.sdkde")
    parameters = content["parameters"]
    for change in ({"parameters": {"x": 1}}, {"parameters": parameters | {"method": "x"}}, {"density": {}}):
        archive.write("a", "KernelDensity", content | change, arrays)
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
    _, content, arrays = archive.read("a.sdkde")
    for change in ({"method": "laplace"}, {"factor": "open"}, {"density": {}}, {"options": {"x": 1}}, {"options": 3}):
        archive.write("a", "gaussian_kde", content | change, arrays)
        with pytest.raises(ValueError, match="'a' cannot be loaded"):
            sdkde_core.load("a")
    archive.write("a", "gaussian_kde", content, {k: x for k, x in arrays.items() if k != "dataset"})
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


def test_after_an_error_the_old_file_stands():
    ready = saved()
    before = Path("a.sdkde").read_bytes()
    with pytest.raises(FileNotFoundError, match=r"none/a\.sdkde"):
        ready.save("none/a.sdkde")
    assert [p.name for p in Path().iterdir()] == ["a.sdkde"]
    assert Path("a.sdkde").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_process_that_is_killed_leaves_the_old_file_or_the_new_one():
    """Of a file of megabytes, which is written all the time."""
    rng = np.random.default_rng(2)
    old, new = (sdkde_core.prepare(rng.normal(size=(50_000, 8)), bandwidth=h, method="kde") for h in (0.5, 0.6))
    whole = []
    for ready in (new, old):
        ready.save("a.sdkde")
        whole.append(Path("a.sdkde").read_bytes())
    Path("new.sdkde").write_bytes(whole[0])
    code = """
import sdkde_core
new, old = sdkde_core.load("new.sdkde"), sdkde_core.load("a.sdkde")
print("ready", flush=True)
while True:
    new.save("a.sdkde")
    old.save("a.sdkde")
"""
    for k in range(2):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with child:
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.03 + 0.034 * k)
            child.kill()
        assert Path("a.sdkde").read_bytes() in whole


# --- reading ------------------------------------------------------------------------------------------------------


BROKEN = r"^'a' (is|cannot be|holds) .*(save it anew|that save\(\) has written|pip install -U sdkde-core)$"


def test_what_is_cut_off_or_altered_is_refused_or_makes_no_difference():
    """Every number and every field has a checksum; what the zip says twice, and dates, may change."""
    ready = sdkde_core.prepare(X[:6], bandwidth=1.0, method="kde")
    ready.save("whole")
    raw, want, refused = Path("whole").read_bytes(), ready.estimate(Y), 0
    altered = [raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :] for i in range(0, len(raw), 3)]
    for changed in [*altered, raw + b"\n", b"\n" + raw, raw.replace(b"\x00", b"")]:
        Path("a").write_bytes(changed)
        try:
            assert np.array_equal(sdkde_core.load("a").estimate(Y), want)
        except ValueError as error:
            assert re.search(BROKEN, str(error), re.S)
            refused += 1
    assert refused > 0.8 * len(altered)
    for i in range(0, len(raw), 11):
        Path("a").write_bytes(raw[:i])
        with pytest.raises(ValueError, match=BROKEN):
            sdkde_core.load("a")


def test_what_another_version_wrote():
    for version, remedy in ((2, "pip install -U sdkde-core"), (0, "save it anew")):
        crafted(about(format=version))
        with pytest.raises(
            ValueError, match=f"'a' is of format version {version}, and sdkde-core .* reads 1; {remedy}"
        ):
            sdkde_core.load("a")
    for kind, option in (("Other", {}), ("Prepared", {"images": 3})):
        content, arrays = sdkde_core.prepare(X, bandwidth=1.0).to_saved()
        content["request"] |= option
        archive.write("a.sdkde", kind, content, arrays)
        unknown = r"'a\.sdkde' .*('Other'|'images'), which this version does not know; pip"
        with pytest.raises(ValueError, match=unknown):
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
    np.savez("other.npz", points=X)
    Path("empty").touch()
    for name in ("objects.npy", "pickle", "text"):
        with pytest.raises(ValueError, match=f"^'{name}' is no file that sdkde has saved; pass one that save"):
            sdkde_core.load(name)
    for name in ("zip", "other.npz", "empty"):
        with pytest.raises(ValueError, match=f"^'{name}' is cut off, altered or damaged, or another program wrote it"):
            sdkde_core.load(name)
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


@pytest.mark.parametrize("kind", ["Prepared", "KernelDensity", "gaussian_kde"])
def test_a_file_of_another_program_is_not_replaced(kind):
    if kind == "KernelDensity":
        pytest.importorskip("sklearn")
    make = {
        "Prepared": lambda: sdkde_core.prepare(X, bandwidth=0.5),
        "KernelDensity": lambda: sdkde_core.KernelDensity(bandwidth=0.5).fit(X),
        "gaussian_kde": lambda: sdkde_core.gaussian_kde(X.T),
    }[kind]()
    make.save("own")
    own = Path("own").read_bytes()
    Path("text").write_text("sdkde")
    np.savez("other.npz", sdkde=X, kde=X)
    Path("before").write_bytes(b"#!/bin/sh\n" + own)
    for name in ("text", "other.npz", "before"):
        before = Path(name).read_bytes()
        with pytest.raises(FileExistsError, match=f"^{name}: is there, and is no density; name another, or remove it"):
            make.save(name)
        assert Path(name).read_bytes() == before
    for begun in (b"", own[:-30], own[:600], own.replace(b"PK\1\2", b"PK\1\3"), own):
        Path("own").write_bytes(begun)
        make.save("own")
        assert type(sdkde_core.load("own")) is type(make)


def crafted(*members, compression=zipfile.ZIP_STORED):
    """A file of these members, pairs of a name and bytes; its size."""
    with zipfile.ZipFile("a", "w", compression) as made:
        for name, raw in members:
            made.writestr(name, raw)
    return Path("a").stat().st_size


def npy(array=None, raw=b"", **head):
    file = io.BytesIO()
    if head:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (1,), **head})
    else:
        np.save(file, array)
    return file.getvalue() + raw


def about(text=None, **changes):
    fields = {"format": 1, "kind": "Prepared", "library": "1", "content": {}, **changes}
    raw = json.dumps(fields).encode() if text is None else text
    return "sdkde.npy", npy(np.frombuffer(raw, np.uint8))


def cropped(**head):
    """An array whose head says more than there is."""
    return about(), ("points.npy", npy(raw=bytes(64), **head))


@pytest.mark.parametrize(
    "members",
    [
        cropped(shape=(1 << 40, 1 << 20)),
        cropped(shape=(-1, -8)),
        cropped(shape=(True,) * 40),
        cropped(shape=(7,)),
        cropped(descr="|O", shape=(8,)),
        (about(), ("points.npy", b"")),
        (about(), ("points.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"[" * 70_000)),
        (about(), ("points.npy", pickle.dumps(Bomb()))),
        (("points.npy", npy(X)),),
        (("sdkde.npy", npy(X)),),
        (about(kind=["Prepared"]),),
        (about(format="1"),),
        (about(b"[" * 1_000_000),),
        (about(b'{"kind": NaN}'),),
        (about(b'{"format": ' + b"1" * 5000 + b"}"),),
    ],
)
def test_crafted_members_are_refused_without_taking_memory(members):
    size = crafted(*members)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^'a' is cut off, altered or damaged, .*; save it anew$"):
            sdkde_core.load("a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000 + 40 * size
    assert not Path("harm").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_is_compressed_is_refused_before_it_is_unpacked(compression):
    assert crafted(about(), ("points.npy", npy(np.zeros(1_000_000))), compression=compression) < 20_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^'a' is cut off, .*its members do not fit it"):
            sdkde_core.load("a")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


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
        *(_set(f"arrays/{name}", None) for name in ("points", "log_weights", "centre", "matrix")),
        *(_set(f"arrays/{name}", lambda x: x[:1]) for name in ("points", "log_weights", "centre", "matrix")),
        *(_set(f"arrays/{name}", lambda x: x.astype("f4")) for name in ("points", "matrix")),
        *(_set(f"arrays/{name}", lambda x: x[None]) for name in ("points", "centre", "matrix")),
        *(_set("arrays/matrix", _first(value)) for value in (0.0, -1.0, np.nan)),
        *(_set("arrays/log_weights", _first(value)) for value in (1.0, np.nan, -1.0)),
        *(_set("arrays/points", _first(value)) for value in (np.inf, 1e200)),
        _set("arrays/points", np.zeros((0, 2))),
        *(_set("request/method", value) for value in ("other", 3, ["kde"])),
        *(_set("request/check_finite", value) for value in (1, "yes")),
        _set("request/negative", "clip"),
        _set("request/precision", "double"),
        *(_set("dtype", value) for value in ("object", "float16")),
        *(_set("rows", value) for value in (0, 1.5, True, 1 << 64, 10**400)),
        *(_set("extent", value) for value in (1e200, 3, "1")),
        *(_set("names", value) for value in (["a"], [1, 2], "ab")),
        *(_set("selection", value) for value in ([], {"method": "kde"}, 3)),
        *(_set("arrays/points", _first(np.nan)), _set("arrays/centre", _first(np.nan))),
        _set("weighted", 0),
    ],
)
def test_crafted_fields_are_refused(change):
    content, arrays = sdkde_core.prepare(X, bandwidth=NARROW, method="kde").to_saved()
    change(content, arrays)
    archive.write("a", "Prepared", content, arrays)
    with pytest.raises(ValueError, match=r"^'a' cannot be loaded: "):
        sdkde_core.load("a")


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-5])
def test_a_matrix_of_nearly_dependent_columns_is_kept(d, spread):
    rng = np.random.default_rng(d)
    x = rng.normal(size=(90, 1)) + spread * rng.normal(size=(90, d))
    ready = saved(x * 10.0 ** rng.uniform(-3, 3, d), bandwidth="scott", method="kde", precision="float64")
    again = sdkde_core.load("a.sdkde")
    assert np.array_equal(again.bandwidth.matrix, ready.bandwidth.matrix)


@pytest.mark.parametrize("change", [lambda x: x[::-1].copy(), lambda x: -x, lambda x: x[:, None]])
def test_crafted_selections_are_refused(change):
    content, arrays = sdkde_core.prepare(X, bandwidth="auto").to_saved()
    archive.write("a", "Prepared", content, arrays | {"selection.multiples": change(arrays["selection.multiples"])})
    with pytest.raises(ValueError, match=r"^'a' cannot be loaded: its selection"):
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
    with np.load("a", allow_pickle=False) as held:
        found = dict(held)
    about = json.loads(found.pop("sdkde").tobytes())
    assert about["library"] == sdkde_core.__version__
    assert (about["format"], about["kind"]) == (1, "thing")
    assert about["content"] == {"x": [1, 0.1, None, "ü", True]}
    assert set(found) == set(arrays)
    for name, want in arrays.items():
        for got in (found[name], archive.read("a")[2][name]):
            assert np.array_equal(got, want) and got.dtype == want.dtype and got.flags.c_contiguous
