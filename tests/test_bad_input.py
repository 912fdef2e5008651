"""Whatever people pass: the right answer, or an error that names the argument; inputs never change.

Hypothesis draws arguments, most of them right in all but one respect. Answers are compared with the oracle's.
"""

import copy
import functools
import re
import warnings

import numpy as np
import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strange import OPTIONS, arrays, bandwidths

import sdkde_core
from sdkde_core.protocol import BackendUnavailable

#: What an error may be; its message names one of the arguments, or the backend.
ERRORS = (TypeError, ValueError, BackendUnavailable)
NAMES = (
    *("train", "query", "bandwidth", "weights", "method", "negative", "precision", "backend", "device", "log", "rule"),
    *("check_finite", "backend_options", "base", "dims", "given", "lower", "upper", "q", "x"),
    *("n", "random_state", "starts", "other", "samples", "option", "grad", "density", "kernel"),
)
NAMED = re.compile(rf"\b({'|'.join(NAMES)})\b")

EVERY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


def snapshot(x):
    """What can be compared afterwards of an argument."""
    if isinstance(x, torch.Tensor) and x.device.type != "meta":
        return x.detach().clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    return copy.deepcopy(x) if isinstance(x, (list, dict, tuple)) else None


def unchanged(x, before):
    if before is None:
        return True
    if isinstance(x, torch.Tensor):
        return torch.equal(torch.nan_to_num(x.detach()), torch.nan_to_num(before))
    if isinstance(x, np.ndarray):
        x, before = np.asarray(x), np.asarray(before)  # of a masked array what is below its mask
        return x.tobytes() == before.tobytes() or x.dtype.kind == "O"
    return repr(x) == repr(before)


def tried(function, *given, errors=ERRORS, named=NAMED, **options):
    """The result; or None after one of the errors, whose message says what was wrong."""
    everything = [*given, *options.values()]
    before = [snapshot(x) for x in everything]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "the Laplace estimate is negative", RuntimeWarning)
            warnings.simplefilter("ignore", sdkde_core.SdkdeWarning)
            return function(*given, **options)
    except errors as error:
        assert named.search(str(error)), f"{type(error).__name__} names no argument: {error}"
        assert "\n" not in str(error).strip() or isinstance(error, BackendUnavailable), error
        return None
    finally:
        for x, was in zip(everything, before):
            assert unchanged(x, was), f"an argument was changed: {was!r} became {x!r}"


def dimension(x):
    """How many dimensions an argument has, if it has some."""
    try:
        shape = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
    except ValueError:  # ragged
        return 1
    return shape[1] if len(shape) == 2 else 1


@st.composite
def calls(draw, wrong=2):
    """Arguments of estimate: right, but for a few."""
    good = ((6,), (6, 3), (9, 2), (1, 3), (9, 1))
    train = draw(arrays(shapes=good, plain=1.0) if draw(st.integers(0, 4)) else arrays())
    d = dimension(train)
    shapes = ((4, d), (0, d)) if draw(st.integers(0, 4)) else ((4,), (d,), (4, d + 1), ())
    query = draw(arrays(shapes=shapes, plain=0.9)) if draw(st.booleans()) else None
    options = {"bandwidth": draw(bandwidths(max(1, d))) if draw(st.integers(0, 2)) == 0 else 0.5}
    for name in draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=wrong)):
        options[name] = draw(OPTIONS[name])
    if "weights" in options and isinstance(train, np.ndarray) and draw(st.booleans()):
        options["weights"] = np.linspace(0.0, 1.0, len(train)) if train.ndim else None
    return train, query, options


def plain(x):
    """The numbers of an argument that was taken, (k, d)."""
    x = x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, dtype=np.float64)
    return x[:, None] if x.ndim == 1 else x


def compare(train, query, options, log):
    """An answer with the oracle's, where float64 holds all numbers of it."""
    result = tried(sdkde_core.estimate, train, query, log=log, **options)
    if result is None:
        return
    x = plain(train)
    y = x if query is None else plain(query)
    assert tuple(result.shape) == (len(y),)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        assert options.get("check_finite") is False
        return
    if options.get("negative", "keep") != "keep":
        return
    h = tried(sdkde_core.prepare, *([train.detach()] if isinstance(train, torch.Tensor) else [train]), **options)
    if h is None or len(y) == 0 or not 1e-140 < abs(h.bandwidth.factor).max() < 1e140:
        return  # the oracle squares bandwidths
    weights = options.get("weights")
    how = {"bandwidth": h.bandwidth.matrix, "method": options.get("method", "sdkde"), "kernel": h.kernel}
    if h.bandwidth.factor.ndim == 1:
        how["bandwidth"] = h.bandwidth.factor
    how |= {"step": h.bandwidth.step, "score_bandwidth": h.bandwidth.score_bandwidth}
    how |= {"tails": h.bandwidth.tails}
    with np.errstate(all="ignore"):
        want = reference.estimate(x, y, weights=None if weights is None else plain(weights)[:, 0], log=True, **how)
    got = plain(result)[:, 0]
    kept = np.isfinite(want) & (abs(want) < 1e12)  # beyond it tolerances exceed one
    loose = {"fast": 1.1e-3, "high": 2.1e-5, "float64": 3e-10}[h.precision] + 2e-6 * abs(want[kept])
    single = 0.0 if "64" in str(result.dtype) else 1e-6
    if log:
        assert (abs(got[kept] - want[kept]) <= loose + single * (1 + abs(want[kept]))).all(), (got, want)
    else:
        with np.errstate(all="ignore"):
            off = abs(np.log(abs(got[kept])) - want[kept])
        range_ = (want[kept] > (-80 if single else -700)) & (want[kept] < (80 if single else 700))
        assert (off[range_] <= (loose + 2 * single)[range_]).all(), (got, np.exp(want))


def examples(quick):
    """So many in `make test`, and many more in `make test-full`."""
    return pytest.mark.parametrize(
        "count", [quick, pytest.param(40 * quick, marks=pytest.mark.slow, id=f"{40 * quick}")]
    )


def drawn(count, check, *strategies):
    """Check ``count`` draws."""
    settings(EVERY, max_examples=count)(given(*strategies)(check))()


@examples(75)
def test_estimate(count):
    drawn(count, lambda call, log: compare(*call, log), calls(), st.booleans())


@examples(20)
def test_by_batches(count):
    """The same answer, or an error too; but for tensors that require grad."""

    def check(call):
        train, query, options = call
        whole = tried(sdkde_core.estimate, train, query, log=True, **options)
        got = tried(sdkde_core.estimate, train, query, log=True, progress=lambda done, rows: None, **options)
        if got is None or whole is None:
            assert whole is None or getattr(whole, "requires_grad", False)
            assert got is None
            return
        assert (type(got), got.dtype, got.shape) == (type(whole), whole.dtype, whole.shape)
        np.testing.assert_allclose(plain(got), plain(whole), rtol=1e-5, atol=1.1e-3)

    drawn(count, check, calls())


@examples(30)
def test_what_is_beside_it(count):
    def check(call, function):
        train, query, options = call
        if function in (sdkde_core.prepare, sdkde_core.debias):
            tried(function, train, **options)
        else:
            tried(function, train, query, **options)

    functions = (sdkde_core.prepare, sdkde_core.debias, sdkde_core.grad_log_density, sdkde_core.explain)
    drawn(count, check, calls(), st.sampled_from(functions))


@examples(20)
def test_select_bandwidth(count):
    def check(train, method, rule, base, weights):
        got = tried(sdkde_core.select_bandwidth, train, method=method, rule=rule, base=base, weights=weights)
        assert got is None or ((got.factor if got.factor.ndim == 1 else np.diag(got.factor)) > 0).all()

    rules = st.sampled_from(("auto", "lscv", "lcv", "silverman", "nope", None, 3))
    bases = st.one_of(st.none(), bandwidths(3))
    drawn(count, check, arrays(), OPTIONS["method"], rules, bases, OPTIONS["weights"])


X = np.random.default_rng(0).normal(size=(9, 3))
READY = {
    (method, d): sdkde_core.prepare(X[:, :d], method=method, bandwidth=0.7, backend="numpy")
    for method in ("kde", "sdkde", "laplace")
    for d in (1, 3)
}

STRANGE = st.one_of(
    arrays(),
    st.sampled_from(
        (0, 1, -1, 3, 1.5, np.nan, np.inf, "a", None, True, {}, {0: 1.0}, {1: np.nan}, {0: 1, 2: 3}, [0, 2])
    ),
)


@pytest.mark.parametrize(
    "method",
    ["estimate", "grad_log_density", "sample", "marginal", "conditional", "probability", "cdf", "quantile", "modes",
     "divergence"],
)  # fmt: skip
@examples(13)
def test_a_prepared_density(method, count):
    def check(which, first, second):
        given = (first, second) if method == "probability" else (first,)
        if method == "sample" and isinstance(first, int) and first > 1000:
            return
        tried(getattr(READY[which], method), *given)

    drawn(count, check, st.sampled_from(sorted(READY)), STRANGE, STRANGE)


#: What SciPy names in its messages, which gaussian_kde has too, where arguments are concerned.
SCIPYS = re.compile(
    rf"{NAMED.pattern}|`?(dataset|bw_method|points|dimensions?|mean|cov|covariance|bounds?|seed|size|KDEs?|1D)\b", re.I
)

METHODS = ("evaluate", "logpdf", "integrate_gaussian", "integrate_box_1d", "integrate_box", "integrate_kde", "marginal",
           "set_bandwidth", "resample")  # fmt: skip


@examples(30)
def test_gaussian_kde(count):
    """The class takes samples in columns; its errors are SciPy's, LinAlgError among them."""
    there = {(m, d): sdkde_core.gaussian_kde(X[:, :d].T, 0.7, method=m) for m, d in READY}

    said = functools.partial(tried, errors=(*ERRORS, np.linalg.LinAlgError), named=SCIPYS)

    def check(train, bw_method, weights, which, method, first, second):
        made = said(sdkde_core.gaussian_kde, train, bw_method, weights)
        if made is not None and made.d * made.n < 50:
            said(made.evaluate, np.zeros((made.d, 2)))
        kde = copy.copy(there[which])
        if not (method == "resample" and isinstance(first, int) and first > 1000):
            two = method in ("integrate_gaussian", "integrate_box", "integrate_box_1d")
            said(getattr(kde, method), *((first, second) if two else (first,)))

    factors = st.sampled_from(
        (None, "scott", "silverman", "auto", "isj", "nope", 0.5, 0, -1.0, np.nan, [1.0], True, len)
    )
    which = st.sampled_from(sorted(there))
    drawn(count, check, arrays(), factors, OPTIONS["weights"], which, st.sampled_from(METHODS), STRANGE, STRANGE)
