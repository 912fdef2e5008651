"""Calls of what is public: from a function that PyTorch compiles, and whatever NumPy's error state says."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from pairwise import cases

import sdkde_core
from sdkde_core.bandwidth.rules import RULES

RNG = np.random.default_rng(0)
X, Y, W = torch.tensor(RNG.normal(size=(60, 3))), torch.tensor(RNG.normal(size=(20, 3))), torch.tensor(RNG.random(60))
READY = {}


@pytest.fixture(autouse=True, scope="module")
def _ready():
    READY.update(
        {method: sdkde_core.prepare(X, method=method, bandwidth=0.5) for method in ("kde", "sdkde", "laplace")}
    )


CALLS = {
    "estimate": lambda x, y: sdkde_core.estimate(x, y),
    "weights": lambda x, y: sdkde_core.estimate(x, y, bandwidth="scott", weights=W, method="kde"),
    "laplace": lambda x, y: sdkde_core.estimate(x, y, bandwidth=0.5, method="laplace"),
    "debias": lambda x, y: sdkde_core.debias(x, bandwidth=0.5),
    "gradient": lambda x, y: sdkde_core.grad_log_density(x, y, bandwidth=0.5),
    "prepare": lambda x, y: sdkde_core.prepare(x, bandwidth=0.5).estimate(y, log=True),
    "prepared": lambda x, y: READY["sdkde"].estimate(y, log=True),
    "prepared laplace": lambda x, y: READY["laplace"].estimate(y),
    "prepared gradient": lambda x, y: READY["kde"].grad_log_density(y),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_with_the_graph_broken_at_the_call(name):
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    def whole(x, y):
        return CALLS[name](x * 2.0, y * 2.0) * 2.0 + 1.0

    torch.compiler.reset()
    compiled = torch.compile(whole, backend=count)
    assert torch.equal(compiled(X, Y), whole(X, Y))
    assert len(graphs) == 2, "what is before the call, and what is after"
    for y in (Y[:7], Y[:0], Y.float()):
        assert torch.equal(compiled(X, y), whole(X, y))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_warnings_are_about_the_caller(prepared, compiled):
    def logs(y):
        return READY["laplace"].estimate(y, log=True) if prepared else sdkde_core.estimate(X, y, **options)

    options = {"bandwidth": 0.5, "method": "laplace", "log": True}
    with pytest.warns(RuntimeWarning, match="negative") as record:
        (torch.compile(logs, backend="eager") if compiled else logs)(Y)
    assert [r.filename for r in record] == [__file__]


@pytest.mark.slow
def test_what_says_what_would_be_done_and_errors_are_those_of_the_call():
    def said(x):
        return x + len(sdkde_core.explain(x, Y).to_dict()) + len(sdkde_core.backends())

    torch.compiler.reset()
    assert torch.equal(torch.compile(said, backend="eager")(X), said(X))
    with pytest.raises(ValueError, match="query has 2 dimensions"):
        torch.compile(sdkde_core.estimate, backend="eager")(X, Y[:, :2])


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_is_imported_for_it(traced):
    code = """
import sys, numpy, sdkde_core
x = numpy.arange(9.0)
sdkde_core.estimate(x)
assert "torch" not in sys.modules
import torch
sdkde_core.estimate(torch.tensor(x))
assert "torch._dynamo" not in sys.modules
if sys.argv[1] == "False":
    sys.exit()
print(torch.compile(lambda x: sdkde_core.estimate(x).sum(), backend="eager")(torch.tensor(x)).item())
"""
    done = subprocess.run([sys.executable, "-c", code, str(traced)], capture_output=True, text=True, check=True)
    assert not traced or float(done.stdout) == pytest.approx(sdkde_core.estimate(np.arange(9.0)).sum())


# --- NumPy's error state ----------------------------------------------------------------------------------------

#: Samples and queries among which something underflows, overflows, or is NaN on the way, and such bandwidths.
SAMPLES = np.concatenate([RNG.normal(size=(40, 3)), [[1e5, 0.0, 1e-200], [0.0, 1e-310, 0.0]]])
QUERIES = np.concatenate([SAMPLES, [[1e100, 0.0, -1e100]]])
WEIGHTS = np.r_[1e-300, 1e-200, np.zeros(5), RNG.random(35)]
MATRIX = np.array([[1e-2, 1e-1, 0.0], [1e-1, 1e6, 0.0], [0.0, 0.0, 1e-300]]) + np.diag([0.0, 0.0, 1.0])
BANDWIDTHS = [0.5, [0.5, 1e-30, 1e150], MATRIX, *(rule for rule in RULES if rule not in ("isj", "lcv"))]  # not for all


@pytest.fixture
def raising():
    with np.errstate(all="raise"):
        yield


@pytest.mark.parametrize(
    ("method", "bandwidth", "dtype"),
    cases(("kde", "sdkde", "laplace"), range(len(BANDWIDTHS)), ("float32", "float64")),
)
def test_no_error_state_shows(method, bandwidth, dtype, raising):
    with np.errstate(all="ignore"):
        x, y = SAMPLES.astype(dtype), np.clip(QUERIES, -1e30, None if dtype == "float64" else 1e30).astype(dtype)
    options = {"method": method, "bandwidth": BANDWIDTHS[bandwidth], "weights": WEIGHTS}
    sdkde_core.estimate(x, y, **options)
    ready = pickle.loads(pickle.dumps(sdkde_core.prepare(x, **options)))
    ready.estimate(y)
    assert repr(ready)
    assert str(sdkde_core.explain(x, y, measure=True, **options))
    if method == "sdkde":
        sdkde_core.debias(x, **options)
        sdkde_core.grad_log_density(x, y, **options)
        ready.grad_log_density(y)


@pytest.mark.parametrize("bandwidth", range(len(BANDWIDTHS)))
def test_no_error_state_shows_in_a_bandwidth(bandwidth, raising):
    whole = sdkde_core.prepare(SAMPLES, bandwidth=BANDWIDTHS[bandwidth]).bandwidth
    for b in (whole, sdkde_core.Bandwidth(3, whole.factor), whole.scaled(1e-160)):
        assert np.isfinite(b.matrix).all()
        assert np.isfinite(b.log_constant)
        assert str(b)
        for act in (b.stretch, b.pull_back, lambda u, b=b: b.whiten(u, SAMPLES[0])):
            assert act(QUERIES).shape == QUERIES.shape


@pytest.mark.parametrize("value", [np.longdouble("1e4000"), [1e-300, 1.0, np.inf], np.diag([1e308, -1.0, 1e308])])
def test_no_error_state_shows_in_an_error(value, raising):
    with pytest.raises(ValueError, match="bandwidth"):
        sdkde_core.Bandwidth.of(value, 3)
    with pytest.raises(ValueError, match="not finite"):
        sdkde_core.estimate(np.array([1.0, np.inf, -np.inf, np.longdouble("1e4000")]), bandwidth=0.5)
