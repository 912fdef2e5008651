"""A backend that fails while it works: the next best one answers under "auto", the cause is told where it was named."""

import copy
import functools
import pickle
import signal
import warnings

import numpy as np
import pytest
from plugins import installer  # noqa: F401 - the fixture ``install``

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.engine.failures import BackendFailed

X = np.random.default_rng(0).normal(size=(60, 2))
Y = np.random.default_rng(1).normal(size=(7, 2))

#: Free of charge, so that "auto" takes it first; what it does wrong stands in ``wrong``.
SOURCE = """
    import numpy as np
    from dataclasses import replace
    from sdkde_core.protocol import BackendInfo, Support, Work
    from sdkde_numpy.backend import NumpyBackend
    loads = 0
    def make(**options):
        global loads
        loads += 1
        {make}
        return Weak()
    class Weak(NumpyBackend):
        def prepare(self, problem, columns):
            {prepare}
            return super().prepare(problem, columns)
        def reduce(self, problem, queries, state, own_offset=0):
            partial = super().reduce(problem, queries, state, own_offset)
            {reduce}
            return partial
    INFO = BackendInfo(
        name="weak", protocol=(1, 0), implementation="plugin_weak:make", devices=("cpu",),
        precisions=("fast", "high", "float64"), features=frozenset(["weights"]),
        install="pip install weak==2", {info}
    )
"""


@pytest.fixture
def weak(install, untold):
    """``weak(make=…, prepare=…, reduce=…)``: install a backend that is always chosen first."""

    def make(info="work=lambda problem, config: Work(),", **lines):
        lines = {"make": "pass", "prepare": "pass", "reduce": "pass"} | lines
        install("weak", "weak", SOURCE.format(info=info, **lines))

    return make


def module():
    return __import__("plugin_weak")


FAILURES = {
    "raises in prepare": {"prepare": "raise AttributeError(\"module 'numpy' has no attribute 'row_stack'\")"},
    "raises in reduce": {"reduce": "raise EOFError('Ran out of input')"},
    "exits": {"reduce": "raise SystemExit(3)"},
    "wrong shape": {"reduce": "return replace(partial, log_sum=partial.log_sum[:-1])"},
    "no partial": {"reduce": "return None"},
    "NaN": {"reduce": "partial.log_sum[-1] = np.nan"},
    "NaN in the shift": {"reduce": "partial.shift is None or partial.shift.__setitem__((-1, 0), np.nan)"},
    "writes to the points": {"prepare": "columns.points[0] = 0.0"},
    "writes to the queries": {"reduce": "queries is not None and queries.__setitem__(0, 0.0)"},
}
CAUSES = {
    "raises in prepare": r"AttributeError: module 'numpy' has no attribute 'row_stack'",
    "raises in reduce": "EOFError: Ran out of input",
    "exits": "SystemExit: 3",
    "wrong shape": "its log_sum for .* has shape",
    "no partial": "has shape None",
    "NaN": "NaN for row",
    "NaN in the shift": "its shift for mean is NaN for row 59",
    "writes to the points": "ValueError: assignment destination is read-only",
    "writes to the queries": "ValueError: assignment destination is read-only",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_under_auto_the_next_best_answers_after_one_warning(weak, failure):
    want = sdkde_core.estimate(X, Y, backend="numpy")
    weak(**FAILURES[failure])
    assert sdkde_core.explain(X, Y).backend == "weak"
    text = rf"backend 'weak' failed on cpu: .*{CAUSES[failure]}.*pip install weak==2.*auto.* does without it"
    with pytest.warns(sdkde_core.SdkdeWarning, match=text) as caught:
        assert np.array_equal(sdkde_core.estimate(X, Y), want)
    assert [w.filename for w in caught] == [__file__]  # one, and about the user's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(sdkde_core.estimate(X, Y), want)
    explained = sdkde_core.explain(X, Y)
    assert explained.backend == "numpy"
    assert [c.reason.startswith("set aside: ") for c in explained.candidates if c.name == "weak"] == [True]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_named_backend_says_why(weak, failure, monkeypatch):
    weak(**FAILURES[failure])
    for _ in range(2):  # it is not set aside: what was named is tried each time
        with pytest.raises(sdkde_core.BackendUnavailable, match=CAUSES[failure]) as caught:
            sdkde_core.estimate(X, Y, backend="weak")
    kind = CAUSES[failure].partition(":")[0]
    assert kind in (type(caught.value.__cause__).__name__, CAUSES[failure])
    monkeypatch.setenv("SDKDE_BACKEND", "weak")
    with pytest.raises(sdkde_core.BackendUnavailable, match=CAUSES[failure]):
        sdkde_core.estimate(X, Y)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sdkde_core.debias(X),
        lambda: sdkde_core.grad_log_density(X, Y),
        lambda: sdkde_core.explain(X, Y, measure=True).backend,
        lambda: sdkde_core.prepare(X, weights=np.arange(60.0)).estimate(Y),
        lambda: sdkde_core.prepare(X, method="kde").estimate(Y),
        lambda: sdkde_core.prepare(X).grad_log_density(Y),
    ],
)
def test_every_public_function_goes_on(weak, call):
    want = call()
    weak(reduce="raise EOFError('Ran out of input')")
    with pytest.warns(sdkde_core.SdkdeWarning, match="Ran out of input") as caught:
        assert np.array_equal(call(), want)
    assert [w.filename for w in caught] == [__file__]


def test_what_is_prepared_moves_to_the_next_best(weak):
    want = sdkde_core.prepare(X, method="kde", backend="numpy")
    weak(reduce="if problem.m == 7: raise EOFError('Ran out of input')")
    ready = sdkde_core.prepare(X, method="kde")
    assert ready.backend == "weak"
    assert np.array_equal(ready.estimate(Y[:3]), want.estimate(Y[:3]))
    with pytest.warns(sdkde_core.SdkdeWarning, match="Ran out of input"):
        assert np.array_equal(ready.estimate(Y), want.estimate(Y))
    assert ready.backend == "numpy"
    for again in (ready, pickle.loads(pickle.dumps(ready)), copy.deepcopy(ready)):
        assert np.array_equal(again.estimate(Y), want.estimate(Y))
        assert again.backend == "numpy"
    named = sdkde_core.prepare(X, method="kde", backend="weak")
    with pytest.raises(sdkde_core.BackendUnavailable, match="Ran out of input"):
        named.estimate(Y)
    assert named.backend == "weak"


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "MemoryError", "UserWarning"])
@pytest.mark.parametrize("backend", ["auto", "weak"])
def test_what_is_not_the_plugins_passes(weak, error, backend):
    weak(reduce=f"raise {error}('not mine')")
    with pytest.raises(__builtins__[error], match="not mine"):
        sdkde_core.estimate(X, Y, backend=backend)
    assert not registry.aside


def too_late(number, frame, after=0):
    raise TimeoutError(f"too late, after {after}")


class Handler:
    def __call__(self, number, frame):
        too_late(number, frame)


@pytest.mark.parametrize("handler", [too_late, functools.partial(too_late, after=9), Handler(), Handler().__call__])
def test_what_a_signal_handler_raises_is_not_the_plugins(weak, handler):
    weak(reduce="import signal; signal.raise_signal(signal.SIGTERM)")
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(TimeoutError):
            sdkde_core.estimate(X, Y)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_inputs_that_cannot_be_right_are_the_users(weak):
    weak(reduce="raise EOFError")
    with pytest.raises(ValueError, match="query has 5 dimensions"):
        sdkde_core.estimate(X, np.zeros((3, 5)))
    assert not registry.aside


def test_nan_that_came_in_goes_out(weak):
    weak()
    y = Y.copy()
    y[2, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = sdkde_core.estimate(X, y, check_finite=False)
    assert list(np.flatnonzero(np.isnan(got))) == [2]


def test_a_tensor_that_was_written_to_is_noticed(weak):
    torch = pytest.importorskip("torch")
    weak(
        info="arrays='torch', work=lambda problem, config: Work(),",
        prepare="columns.points.mul_(2.0); columns = replace(columns, points=columns.points.numpy())",
    )
    with pytest.raises(BackendFailed, match="it wrote to its inputs") as caught:
        sdkde_core.estimate(torch.tensor(X), backend="weak")
    assert caught.value.spoiled


def test_a_broken_plugin_is_loaded_once(weak):
    weak(make="raise ImportError('libfoo.so.3')")
    for _ in range(3):
        sdkde_core.estimate(X, Y)
        with pytest.raises(sdkde_core.BackendUnavailable, match=r"libfoo\.so\.3"):
            sdkde_core.estimate(X, Y, backend="weak")
    assert module().loads == 1


def test_what_does_not_load_stands_in_the_way_of_none(install, weak):
    """The second best was never judged while the best, which does not load, was taken to be faster than its start."""
    weak(make="raise ImportError('libfoo.so.3')", info="work=lambda problem, config: Work(),")
    second = SOURCE.replace('"weak"', '"second"').replace("plugin_weak", "plugin_second")
    info = "startup_seconds=1e-9, work=lambda problem, config: Work(),"
    install("second", "second", second.format(make="pass", prepare="pass", reduce="pass", info=info))
    assert sdkde_core.prepare(X).backend == "second"
