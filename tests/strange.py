"""Strategies of what people pass: arrays of every kind, right and wrong, and values of every option."""

import numpy as np
import torch
from hypothesis import strategies as st
from scipy import sparse

SHAPES = ((), (0,), (1,), (6,), (6, 1), (6, 3), (0, 3), (3, 0), (1, 3), (2, 6), (2, 3, 4), (9, 2), (9,))
DTYPES = ("f8", "f4", "f2", "i8", "u1", "?", "g", "c16", "O", "U5", "S5", "M8[s]", "m8[s]", ">f8")
CONTENTS = ("normal", "normal", "constant", "duplicates", "nan", "inf", "large", "small", "scales", "fill", "zero")


def content(kind, shape, seed):
    """Numbers of a kind, float64."""
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.normal(size=shape))
    if kind == "constant":
        x[...] = 3.7
    elif kind == "zero":
        x[...] = 0.0
    elif kind == "duplicates":
        x = np.round(x)
    elif kind in ("nan", "inf", "fill") and x.size:
        x.reshape(-1)[rng.integers(x.size)] = {"nan": np.nan, "inf": -np.inf, "fill": 9.96921e36}[kind]
    elif kind == "large":
        x *= 1e300
    elif kind == "small":
        x *= 1e-300
    elif kind == "scales" and x.ndim == 2:
        x = x * 10.0 ** np.linspace(-150, 150, max(1, x.shape[1]))
    return x


class Frame:
    """What sdkde sees of a data frame."""

    def __init__(self, x, names):
        self._x, self.columns = x, names

    def __array__(self, dtype=None, copy=None):
        return self._x

    def __repr__(self):
        return f"Frame({self._x!r})"


class Broken:
    """An array that cannot be read."""

    shape, dtype, ndim = (6, 3), np.dtype("f8"), 2

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("not today")


@st.composite
def arrays(draw, shapes=SHAPES, plain=0.6):
    """An argument that may be an array of samples."""
    shape = draw(st.sampled_from(shapes))
    x = content(draw(st.sampled_from(CONTENTS)), shape, draw(st.integers(0, 99)))
    usual = draw(st.integers(0, 9)) < 10 * plain
    dtype = draw(st.sampled_from(DTYPES[:4] if usual else DTYPES))
    with np.errstate(all="ignore"):
        if dtype[0] in "M" or dtype[0] == "m":
            x = np.nan_to_num(x, posinf=1e6, neginf=-1e6).clip(-1e6, 1e6).astype("i8").astype(dtype)
        elif dtype in ("i8", "u1"):
            x = np.nan_to_num(x, posinf=1e6, neginf=-1e6).clip(-1e6, 1e6).astype(dtype)
        else:
            x = x.astype(dtype)
    form = draw(st.sampled_from(("array",) * 4 + ("fortran", "reversed", "strided", "read-only") if usual else FORMS))
    return formed(form, np.asarray(x))  # an operation on a 0-d array gives a number


FORMS = (
    *("array", "list", "tuple", "masked", "sparse", "torch", "grad", "bfloat16", "meta", "frame", "broken", "ragged"),
    *("generator", "dict", "string", "none", "number", "set", "matrix", "bytes", "object"),
)


def formed(form, x):
    """The numbers in the form that somebody holds them in."""
    real = x.dtype.kind in "fiub" and x.dtype.itemsize <= 8 and x.dtype.isnative
    match form:
        case "fortran":
            return np.asfortranarray(x)
        case "reversed":
            return x[::-1] if x.ndim else x
        case "strided":
            return np.repeat(x, 2, axis=0)[::2] if x.ndim else x
        case "read-only":
            x.flags.writeable = False
            return x
        case "list":
            return x.tolist()
        case "tuple":
            return tuple(x.tolist()) if x.ndim else x.tolist()
        case "masked":
            return np.ma.masked_invalid(x) if real else np.ma.MaskedArray(x)
        case "sparse" if x.ndim == 2 and real and x.dtype.itemsize > 2:
            return sparse.csr_array(x)
        case "torch" if real:
            return torch.from_numpy(x.copy())
        case "grad" if real and x.dtype.kind == "f":
            return torch.from_numpy(x.copy()).requires_grad_()
        case "bfloat16" if real:
            return torch.from_numpy(x.copy()).to(torch.bfloat16)
        case "meta" if real:
            return torch.empty(x.shape, device="meta")
        case "frame" if x.ndim == 2:
            return Frame(x, [f"c{k}" for k in range(x.shape[1])])
        case "broken":
            return Broken()
        case "ragged":
            return [[1.0, 2.0], [3.0]]
        case "generator":
            return (row for row in x.reshape(-1))
        case "dict":
            return {"a": 1.0}
        case "string":
            return "data.npy"
        case "none":
            return None
        case "number":
            return 1.5
        case "set":
            return {1.0, 2.0}
        case "bytes":
            return b"12345678"
        case "object":
            return object()
    return x


def bandwidths(d):
    """Bandwidths for d dimensions: rules, numbers, matrices, and what is none."""
    rng = np.random.default_rng(d)
    root = rng.normal(size=(d, d))
    rules = ("auto", "lscv", "lcv", "silverman", "silverman-iso", "scott", "silverman-full", "sdkde", "isj")
    return st.one_of(
        st.sampled_from(("auto", "silverman", 0.5, 0.5, 1.0)),
        st.sampled_from((*rules, "normal-reference", "nope", "")),
        st.sampled_from((0, -1.0, np.nan, np.inf, 1e-300, 1e300, 1e-12, 5, True, None, 1j, "1.0", [], [1.0] * (d + 1))),
        st.sampled_from((np.full(d, 0.4), np.full((d, 1), 0.4), root @ root.T + np.eye(d), root, np.zeros((d, d)))),
    )


OPTIONS = {
    "method": st.sampled_from(("sdkde", "kde", "laplace", "kde", "SDKDE", "", None, 3)),
    "weights": st.one_of(
        st.none(),
        st.none(),
        st.sampled_from((np.ones(6), np.arange(6.0), np.ones(9), np.zeros(6), -np.ones(6), np.full(6, np.nan))),
        arrays(shapes=((6,), (9,), (6, 1), (), (0,))),
    ),
    "kernel": st.sampled_from(("gaussian", "gaussian", "tophat", "linear", "exponential", "round", None)),
    "negative": st.sampled_from(("keep", "keep", "keep", "clip", "renormalise", "drop", None)),
    "precision": st.sampled_from(("auto", "fast", "high", "float64", "float32", None, 64)),
    "backend": st.sampled_from(("auto", "numpy", "numpy", "numba", "torch", "keops!", None, 3)),
    "device": st.sampled_from((None, None, "cpu", "cuda:99", "cpu:0", "tpu", 0, "")),
    "check_finite": st.sampled_from((True, True, False)),
    "backend_options": st.sampled_from((None, None, None, {}, {"threads": 1}, {"threads": 0}, {"nope": 1}, [1], "x")),
}
