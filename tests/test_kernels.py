"""Kernels other than the Gaussian: scikit-learn's, in any dimension, with any bandwidth, and what they go with."""

import math
import pickle
import re

import mpmath
import numpy as np
import pytest
import reference
from scipy import stats

import sdkde_core
from sdkde_core.cli.main import main as command
from sdkde_core.engine.exact import reduce_exact
from sdkde_core.estimator.density import log_norm
from sdkde_core.protocol import KERNELS, BackendUnavailable, Columns, Problem, Reduction

OTHERS = tuple(name for name in KERNELS if name != "gaussian")
BACKENDS = ("numpy", "numba")
RNG = np.random.default_rng(5)
X, Y, W = RNG.normal(size=(150, 3)), RNG.normal(size=(40, 3)), RNG.gamma(1.0, size=150)
KDE = {"method": "kde", "bandwidth": 0.8}


def _shape(shape, d):
    """A bandwidth in d dimensions, of which kernels reach some of the normal samples."""
    h = 0.4 + 1.3 * math.sqrt(d) * np.linspace(0.9, 1.1, d)
    turned = np.linalg.qr(np.random.default_rng(d).normal(size=(d, d)))[0]
    return {"number": float(h[0]), "per dimension": h, "matrix": turned @ np.diag(h**2) @ turned.T}[shape]


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 17])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scikit_learns_numbers(kernel, d):
    """But where its own are wrong.

    Its constant of the cosine lacks a term where d is even: in the plane ∫ r cos(π r / 2) is a − a², a = 2/π. In 17
    dimensions it has five digits. Of a row that no sample reaches its tree leaves a remainder of rounding.
    """
    neighbors = pytest.importorskip("sklearn.neighbors")
    rng = np.random.default_rng(d)
    x, y, w = rng.normal(size=(120, d)), rng.normal(size=(30, d)), rng.gamma(1.0, size=120)
    missing = -math.log(1.0 - 2.0 / math.pi) if (kernel, d) == ("cosine", 2) else 0.0
    for h in (0.4 + 0.9 * math.sqrt(d), 1.5 * math.sqrt(d), 3.0 * math.sqrt(d)):
        for weights in (None, w):
            theirs = neighbors.KernelDensity(kernel=kernel, bandwidth=h).fit(x, sample_weight=weights)
            want = theirs.score_samples(y) + missing
            how = {"method": "kde", "bandwidth": h, "kernel": kernel, "weights": weights, "precision": "float64"}
            for backend in BACKENDS:
                got = sdkde_core.estimate(x, y, log=True, backend=backend, **how)
                reached = np.isfinite(got)
                off = 2e-5 if (kernel, d) == ("cosine", 17) else 1e-9
                np.testing.assert_allclose(got[reached], want[reached], rtol=1e-9, atol=off)
                assert (want[~reached] < want.max() - 30.0).all()
    assert reached.all()


@pytest.mark.parametrize("kernel", OTHERS)
def test_constants_are_integrals(kernel):
    """In every dimension, by mpmath; in many, where float64's recursions lose all digits, too."""
    with mpmath.workdps(40):
        for d in (1, 2, 3, 9, 20) if kernel == "exponential" else (*range(1, 21), 64, 333, 1024):
            value = {
                "tophat": lambda r: mpmath.mpf(1),
                "epanechnikov": lambda r: 1 - r**2,
                "exponential": lambda r: mpmath.exp(-r),
                "linear": lambda r: 1 - r,
                "cosine": lambda r: mpmath.cos(mpmath.pi * r / 2),
            }[kernel]
            ends = [0, d / 2, d, 2 * d, 20 * d + 400] if kernel == "exponential" else [0, 0.5, 0.9, 0.99, 1]
            radial = mpmath.quad(lambda r: r ** (d - 1) * value(r), ends)  # noqa: B023
            surface = 2 * mpmath.pi ** (mpmath.mpf(d) / 2) / mpmath.gamma(mpmath.mpf(d) / 2)
            assert log_norm(kernel, d) == pytest.approx(float(mpmath.log(surface * radial)), rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [1, 3, 17])
@pytest.mark.parametrize("kernel", OTHERS)
def test_the_oracle_with_every_shape_of_bandwidth(kernel, d, backend):
    rng = np.random.default_rng([d, 1])
    x, y, w = rng.normal(size=(90, d)), rng.normal(size=(20, d)), rng.gamma(0.3, size=90)
    w[::7] = 0.0
    for shape in ("number", "per dimension", "matrix"):
        how = {"method": "kde", "bandwidth": _shape(shape, d), "kernel": kernel, "weights": w}
        want = reference.estimate(x, y, log=True, **how)
        got = sdkde_core.estimate(x, y, log=True, precision="float64", backend=backend, **how)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(sdkde_core.estimate(x, y, backend=backend, **how), np.exp(want), rtol=1e-4)
    assert np.isfinite(want).mean() > 0.5


def test_the_gaussian_is_the_default():
    got = sdkde_core.estimate(X, Y, kernel="gaussian", backend="numpy", bandwidth=0.5)
    np.testing.assert_array_equal(got, sdkde_core.estimate(X, Y, backend="numpy", bandwidth=0.5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", OTHERS)
def test_a_sample_at_the_bandwidth_does_not_count_and_a_nearer_one_does(kernel, backend):
    """As in scikit-learn, where nothing is rounded."""
    how = {"method": "kde", "bandwidth": 2.0, "kernel": kernel, "backend": backend, "log": True}
    x = np.array([0.0, 10.0, 20.0])
    near, at, beyond = sdkde_core.estimate(x, [22.0 - 1e-6, 22.0, 22.5], **how)
    assert np.isfinite(near)
    if kernel != "exponential":
        assert (at, beyond) == (-np.inf, -np.inf)
        assert sdkde_core.estimate(x, [30.0], **how | {"log": False}) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", OTHERS)
def test_far_rows_and_samples(kernel, backend):
    """Nothing is taken off, and summed by the Gaussian's exact path, however far it is."""
    x, y = np.concatenate([X, [[1e9, 0.0, 0.0], [0.0, -3e120, 0.0]]]), Y.copy()
    y[3], y[7] = [0.0, 1e140, 0.0], [1e9, 0.1, 0.2]
    w = np.concatenate([W, [1e-200, 0.0]])
    for weights in (None, w):
        how = {"method": "kde", "bandwidth": 1.0, "kernel": kernel, "weights": weights}
        want = reference.estimate(x, y, log=True, **how)
        got = sdkde_core.estimate(x, y, log=True, precision="high", backend=backend, **how)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
        ready = sdkde_core.prepare(x, backend=backend, precision="high", **how)
        np.testing.assert_allclose(ready.estimate(y, log=True), want, rtol=1e-6, atol=1e-5)
    assert np.isfinite(want[3]) == (kernel == "exponential")
    assert np.isfinite(want[7])


def test_the_exact_path_has_no_other_kernel():
    problem = Problem(Reduction.LOG_SUM, 1, 1, 1, kernel="linear", requires=frozenset({"kernel"}))
    with pytest.raises(ValueError, match="kernel='gaussian' only"):
        reduce_exact(problem, np.zeros((1, 1)), Columns(np.zeros((1, 1)), np.zeros(1)))


@pytest.mark.parametrize("d", [1, 2, 17])
@pytest.mark.parametrize("kernel", KERNELS)
def test_draws_are_of_the_density(kernel, d):
    """Radii by Kolmogorov and Smirnov's test, directions by their mean; of one sample."""
    h = _shape("matrix", d)
    ready = sdkde_core.prepare(np.full((1, d), 5.0), method="kde", bandwidth=h, kernel=kernel, backend="numpy")
    for random_state in (3, np.random.RandomState(3)):
        u = np.linalg.solve(np.linalg.cholesky(h), (ready.sample(4000, random_state) - 5.0).T).T
        r = np.linalg.vector_norm(u, axis=1)
        ends = np.linspace(0.0, 1.0 if kernel in ("tophat", "epanechnikov", "linear", "cosine") else 60.0, 30_001)
        middle = (ends[1:] + ends[:-1]) / 2
        value = np.exp(reference.kernel_log_sum(middle[:, None], np.zeros((1, 1)), kernel)) * middle ** (d - 1)
        cumulative = np.interp(r, ends, np.concatenate([[0.0], np.cumsum(value)]) / value.sum())
        assert stats.kstest(cumulative, "uniform").pvalue > 1e-3
        assert abs((u / r[:, None]).mean(axis=0)).max() < 4.0 / math.sqrt(4000 * d)
    np.testing.assert_array_equal(ready.sample(5, 1), ready.sample(5, 1))
    assert ready.sample(0, 1).shape == (0, d)


# --- the same from every entrance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", OTHERS)
def test_prepared_pickles_and_says_its_kernel(kernel):
    ready = sdkde_core.prepare(X, kernel=kernel, weights=W, backend="numpy", **KDE)
    want = sdkde_core.estimate(X, Y, kernel=kernel, weights=W, backend="numpy", **KDE)
    assert ready.kernel == kernel
    assert f"{kernel} kernel" in repr(ready)
    for one in (ready, pickle.loads(pickle.dumps(ready))):
        assert one.kernel == kernel
        np.testing.assert_array_equal(one.estimate(Y), want)
    assert sdkde_core.prepare(X, bandwidth=0.8).kernel == "gaussian"


def test_explain_says_the_kernel_and_who_has_it():
    for given in ((X, Y), ((1000, 3), (50, 3))):
        told = sdkde_core.explain(*given, kernel="linear", **KDE)
        assert str(told).startswith("kde with the linear kernel of ")
        assert told.to_dict()["kernel"] == "linear"
        able = {c.name for c in told.candidates if c.ok}
        assert {"numpy"} <= able <= {"numpy", "numba"}
        others = [c for c in told.candidates if c.name in ("fourier", "keops", "torch") and c.device == "cpu"]
        assert all("lacks kernel" in c.reason for c in others)


def test_float32_and_torch_come_back_as_they_came():
    got = sdkde_core.estimate(X.astype(np.float32), Y.astype(np.float32), kernel="cosine", **KDE)
    assert got.dtype == np.float32
    torch = pytest.importorskip("torch")
    got = sdkde_core.estimate(torch.tensor(X), torch.tensor(Y), kernel="cosine", **KDE)
    np.testing.assert_allclose(got.numpy(), sdkde_core.estimate(X, Y, kernel="cosine", **KDE), rtol=1e-9)


def test_the_command(tmp_path):
    from click.testing import CliRunner

    np.save(tmp_path / "x.npy", X)
    given = ["estimate", str(tmp_path / "x.npy"), "-o", str(tmp_path / "p.npy"), "--kernel", "tophat"]
    result = CliRunner().invoke(command, [*given, "--method", "kde", "--bandwidth", "0.8"])
    assert result.exit_code == 0, result.output
    want = sdkde_core.estimate(X, kernel="tophat", **KDE)
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), want, rtol=1e-9)
    result = CliRunner().invoke(command, [*given, "--method", "kde"])
    assert result.exit_code == 2
    assert "bandwidth='auto' is a rule for kernel='gaussian'" in " ".join(result.output.split())


# --- what goes with what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "tophats"}, "kernel is 'tophats'; pass one of 'gaussian', 'tophat', .*did you mean 'tophat'"),
        ({"method": "sdkde"}, "kernel='tophat' is for method='kde', but method='sdkde' .* pass method='kde', or leave"),
        ({"method": "laplace"}, "kernel='tophat' is for method='kde', but method='laplace'"),
        ({"bandwidth": "auto"}, "bandwidth='auto' is a rule for kernel='gaussian', but kernel is 'tophat'; pass bandw"),
        ({"bandwidth": "scott"}, "bandwidth='scott' is a rule for kernel='gaussian'"),
        ({"bandwidth": "scot"}, "bandwidth is 'scot'; pass one of"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, message):
    options = {"kernel": "tophat"} | KDE | options
    for call in (sdkde_core.estimate, sdkde_core.prepare, sdkde_core.explain):
        with pytest.raises(ValueError, match=message):
            call(X, **options)
    if "auto" in message:
        with pytest.raises(ValueError, match=message):
            sdkde_core.explain((100, 2), **options)


def test_a_kernel_is_a_string():
    with pytest.raises(TypeError, match="kernel is 3; pass a string"):
        sdkde_core.estimate(X, kernel=3, **KDE)


def test_gradients_and_moves_are_the_gaussians():
    for kernel in OTHERS:
        with pytest.raises(
            ValueError, match=f"kernel='{kernel}' is for densities, not for their gradients; leave kern"
        ):
            sdkde_core.grad_log_density(X, Y, kernel=kernel, **KDE)
        with pytest.raises(ValueError, match=f"kernel='{kernel}' has densities and draws, no gradient"):
            sdkde_core.prepare(X, kernel=kernel, **KDE).grad_log_density(Y)
    with pytest.raises(ValueError, match="kernel='linear' is for method='kde'"):
        sdkde_core.debias(X, kernel="linear", bandwidth=0.5)


@pytest.mark.parametrize(
    ("method", "arguments", "lacks"),
    [
        ("mixture", (), "normal components"),
        ("marginal", (0,), "marginals"),
        ("conditional", ({0: 1.0},), "conditionals"),
        ("probability", (0.0, 1.0), "probabilities"),
        ("cdf", (0.0,), "distribution function"),
        ("quantile", (0.5,), "quantiles"),
        ("modes", (), "modes"),
    ],
)
def test_closed_forms_are_the_gaussians(method, arguments, lacks):
    ready = sdkde_core.prepare(X[:, 0], kernel="tophat", **KDE)
    with pytest.raises(ValueError, match=f"kernel='tophat' has densities and draws, no {lacks}; prepare with kernel="):
        getattr(ready, method)(*arguments)


def test_autograd_is_the_gaussians():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X, requires_grad=True)
    with pytest.raises(
        ValueError, match="train requires grad, but kernel='linear' has no derivatives; leave kernel out"
    ):
        sdkde_core.estimate(x, kernel="linear", **KDE)
    with torch.no_grad():
        np.testing.assert_allclose(
            sdkde_core.estimate(x, kernel="linear", **KDE).numpy(), sdkde_core.estimate(X, kernel="linear", **KDE)
        )


def test_a_backend_without_the_feature_is_named_with_those_that_have_it():
    name = next(r.name for r in sdkde_core.backends() if r.ok and "kernel" not in r.info.features)
    with pytest.raises(BackendUnavailable) as raised:
        sdkde_core.estimate(X, Y, kernel="linear", backend=name, **KDE)
    text = " ".join(str(raised.value).split())
    assert "lacks kernel" in text or "runs on" in text
    assert re.search(r"kernel='linear' is asked for: name a backend with the feature 'kernel' \(.*numpy: pip", text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": "linear"}, "go together"),
        ({"requires": frozenset({"kernel"})}, "go together"),
        ({"kernel": "round", "requires": frozenset({"kernel"})}, "kernel is 'round'; pass one of"),
        ({"reduction": "mean", "kernel": "linear", "requires": frozenset({"kernel"})}, "is for LOG_SUM; MEAN is of"),
    ],
)
def test_a_problem_is_consistent(fields, message):
    with pytest.raises(ValueError, match=message):
        Problem(**{"reduction": Reduction.LOG_SUM, "m": 1, "n": 1, "d": 1} | fields)
