"""The straight line without a card: Triton's kernels are interpreted, and tensors on the CPU taken for a card's.

On a card it is in test_gpu.py.
"""

import math
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from interpreter import INTERPRETED, interpreted, run
from reference import sums
from sdkde_triton.backend import TritonBackend

import sdkde_core
from sdkde_core.arrays import Argument
from sdkde_core.engine.launches import Lists
from sdkde_core.estimator import straight
from sdkde_core.protocol import Columns, Problem, Reduction

BACKEND = {"backend": "triton", "device": "cpu"}


@pytest.mark.skipif(INTERPRETED, reason="this is what the test starts")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marked):
    run(
        __file__,
        f"{marked} and not gpu",
        "not that_of_the_host and not chosen_on_the_host",
        more=("test_joint.py", "test_criteria.py", "test_moves.py", "test_device_line.py"),
    )


@pytest.fixture
def tensors(monkeypatch):
    """What came of the line for tensors on the CPU: a result, or None."""
    found, estimate = [], straight.estimate

    def estimated(request, *arguments):
        result = estimate(request, *arguments)
        found.append(result[0])
        return result

    def place(*given):
        plain = all(type(x) is torch.Tensor and x.layout is torch.strided and x.is_floating_point() for x in given)
        return "cpu" if plain and not any(x.requires_grad for x in given) else None

    monkeypatch.setattr(Lists, "serve", lambda self, key, given, launch, served: launch()[0])
    monkeypatch.setattr(straight, "place_of", place)
    monkeypatch.setattr(straight, "_device_asked", lambda request: True)
    monkeypatch.setattr(straight, "estimate", estimated)
    return found


def drawn(n, m, d, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn(k, d, generator=generator, dtype=torch.float64).to(dtype) for k in (n, m))


OPTIONS = [
    (bandwidth, weighted, log)
    for bandwidth in (0.5, "matrix", "per column", "silverman")
    for weighted in (False, True)
    for log in (False, True)
]
FEW = [("matrix", True, False), (0.5, False, False)]


@interpreted
@pytest.mark.parametrize(
    ("bandwidth", "weighted", "log"),
    [pytest.param(*options, marks=() if options in FEW else pytest.mark.slow) for options in OPTIONS],
)
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.filterwarnings("ignore:the Laplace estimate is negative")
def test_it_is_the_general_way_in_fewer_launches(method, bandwidth, weighted, log, tensors):
    sizes = (70, 9, 3, torch.float32), (66, 10, 17, torch.float64)
    for n, m, d, dtype in sizes[: 2 - ((bandwidth, weighted, log) in FEW and method != "sdkde")]:
        x, y = drawn(n, m, d, dtype)
        h = {"per column": np.linspace(0.6, 0.9, d), "matrix": 0.4 * np.eye(d) + 0.1}.get(bandwidth, bandwidth)
        options = {"method": method, "bandwidth": h, "log": log, **BACKEND}
        weights = torch.linspace(1.0, 2.0, n, dtype=dtype) if weighted else None
        got = sdkde_core.estimate(x, y, weights=weights, **options)
        assert tensors.pop() is not None and got.dtype == dtype
        arrays = [None if a is None else a.numpy() for a in (x, y, weights)]
        want = sdkde_core.estimate(*arrays[:2], weights=arrays[2], **options)
        exact = 1e-5 if weighted else 1e-12  # another extent is another grid, and sums round otherwise
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-6 if dtype == torch.float32 else exact, atol=0)


CHOSEN = {"step": "moments", "score_bandwidth": 1.4, "tails": "guard"}  # as "auto" has them


@interpreted
@pytest.mark.parametrize(
    ("log", "weighted"),
    [(True, True), *(pytest.param(*a, marks=pytest.mark.slow) for a in ((False, False), (True, False), (False, True)))],
)
def test_samples_that_move_as_by_default_and_a_guard(log, weighted, tensors):
    x, y = drawn(130, 9, 3, torch.float64)
    options = {"bandwidth": 0.4 * np.eye(3) + 0.1, **CHOSEN, **BACKEND}
    weights = torch.linspace(1.0, 2.0, 130, dtype=torch.float64) if weighted else None
    for query in (y, None):
        got = sdkde_core.estimate(x, query, weights=weights, log=log, **options)
        assert tensors.pop() is not None
        arrays = [None if a is None else a.numpy() for a in (x, query, weights)]
        want = sdkde_core.estimate(*arrays[:2], weights=arrays[2], log=log, **options)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("coordinates", [None, "identity"])
def test_a_guard_of_some_of_the_samples(coordinates, weighted, tensors):
    """The guard's kernels are wider then; beside coordinates they are not."""
    x, y = drawn(4200, 7, 3, torch.float64)
    options = {"bandwidth": 0.5, "method": "kde", "tails": 0.3, "coordinates": coordinates, **BACKEND}
    weights = torch.linspace(1.0, 9.0, 4200, dtype=torch.float64) if weighted else None
    got = sdkde_core.estimate(x, 3.0 * y, weights=weights, **options)
    assert tensors.pop() is not None
    arrays = x.numpy(), 3.0 * y.numpy()
    want = sdkde_core.estimate(*arrays, weights=None if weights is None else weights.numpy(), **options)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("reduction", [Reduction.LOG_SUM, Reduction.MEAN])
@pytest.mark.parametrize("weights", ["nearly all equal", "nearly all light"])
def test_bounds_of_log_weights_serve_as_well_as_the_weights(reduction, weights):
    rng, n, span = np.random.default_rng(5), 260, 20.0
    logs = np.where(np.arange(n) == 7, -span if weights == "nearly all equal" else span, 0.0)
    logs -= np.logaddexp.reduce(logs)
    points = rng.normal(size=(n, 3))
    want = sums(points, points, log_weights=logs, plain=True)
    problem = Problem(reduction, n, n, 3, same=True, requires=frozenset(["weights"]), extent=6.0, weight_span=span)
    for bounds in (None, (-span - math.log(n), 0.0)):
        columns = Columns(torch.from_numpy(points), torch.from_numpy(logs), log_range=bounds)
        found = TritonBackend().reduce(problem, None, TritonBackend().prepare(problem, columns))
        np.testing.assert_allclose(found.log_sum, want.log_sum, atol=9e-6)
        if reduction is Reduction.MEAN:
            np.testing.assert_allclose(found.shift, want.shift, atol=1e-5)


@interpreted
def test_without_kernels_for_what_lies_between_sums_the_general_way_answers(tensors, monkeypatch):
    x, y = drawn(130, 9, 3, torch.float64)
    monkeypatch.setattr(straight.registry, "having", lambda feature, device: None)
    for options in ({"tails": "guard"}, {"step": 0.7}, {}):
        options = {"bandwidth": 0.5, **options, **BACKEND}
        got = sdkde_core.estimate(x, y, **options)
        assert (tensors.pop() is None) == (len(options) > 3)
        np.testing.assert_allclose(got, sdkde_core.estimate(x.numpy(), y.numpy(), **options), rtol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "case",
    ["column", "dtypes", "samples", *(pytest.param(x, marks=pytest.mark.slow) for x in ("strided", "whole number"))],
)
def test_tensors_as_users_have_them(case, tensors):
    x, y = drawn(120, 30, 1 if case == "column" else 3)
    h, given = (1 if case == "whole number" else np.float64(0.5)), (x, y)
    if case == "strided":
        given = x.T.contiguous().T, y.repeat(1, 2)[::2, :3]
        y = y[::2]
    elif case == "column":
        given = x[:, 0], y.repeat(1, 2)[:, 0]
    elif case == "dtypes":
        given = x, y.double()
    elif case == "samples":
        given, y = (x, x[:20]), x[:20]
    for ask in (sdkde_core.estimate, sdkde_core.grad_log_density):
        got = ask(*given, bandwidth=h, **BACKEND)
        assert tensors.pop() is not None and got.dtype == (torch.float64 if case == "dtypes" else torch.float32)
        want = ask(x.numpy(), y.numpy(), bandwidth=h, **BACKEND)
        assert got.shape == want.shape
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4 * abs(want).max())


@interpreted
def test_scores(tensors):
    x, y = drawn(200, 31, 3)
    got = sdkde_core.grad_log_density(x, y, bandwidth=0.5, **BACKEND)
    assert tensors.pop() is not None
    want = sdkde_core.grad_log_density(x.numpy(), y.numpy(), bandwidth=0.5, **BACKEND)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("what", ["density", "log", "score"])
@pytest.mark.parametrize("method", ["kde", "sdkde"])
def test_prepared_queries(method, what, tensors):
    x, y = drawn(200, 31, 3)
    options = {"method": method, "bandwidth": 0.5, **(CHOSEN if method == "sdkde" else {}), **BACKEND}
    fitted, query = sdkde_core.prepare(x, **options)._fitted, Argument.of("query", y)
    fitted.centre = torch.from_numpy(np.asarray(fitted.centre))  # of a card's tensors it is one
    got = straight.answer(fitted, query._replace(array=y), what)
    want = fitted.answer(fitted.read(query), what)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)
    far = torch.full((1, 3), 3e9)
    with warnings.catch_warnings():  # of the interpreter: kernels see them before anybody looks how far they are
        warnings.simplefilter("ignore")
        assert straight.answer(fitted, query._replace(array=far), what) is None


@interpreted
def test_scores_of_samples_that_might_have_moved_beyond_the_limit(tensors):
    """A step of up to 1.2 may put them 1.4 times as far out, where MEAN at "high" has other formulas; it did not."""
    x, y = drawn(200, 20, 30, torch.float64)
    options = {"bandwidth": 0.6, **CHOSEN, **BACKEND}
    fitted, query = sdkde_core.prepare(x, **options)._fitted, Argument.of("query", y)
    fitted.centre = torch.from_numpy(np.asarray(fitted.centre))
    assert fitted.problem.extent > 15.0
    got = straight.answer(fitted, query._replace(array=y), "score")
    want = sdkde_core.grad_log_density(x.numpy(), y.numpy(), **options | {"backend": "numpy"})
    np.testing.assert_allclose(got, want, atol=1e-4 * abs(want).max())


@interpreted
def test_what_it_leaves_to_the_general_way(tensors):
    x, y = drawn(200, 31, 3)
    options = {"bandwidth": 0.5, **BACKEND}
    far = x.clone()
    far[7] += 1e5
    assert torch.isfinite(sdkde_core.estimate(far, y, **options)).all()
    assert tensors.pop() is None
    for value in (float("nan"), float("inf")):
        wrong = x.clone()
        wrong[7, 1] = value
        with pytest.raises(ValueError, match=r"train has values that are not finite.*row 7, column 1"):
            sdkde_core.estimate(wrong, y, **options)
        assert tensors.pop() is None
    weights = torch.ones(200)
    weights[3:] = 0.0
    got = sdkde_core.estimate(x, y, weights=weights, **options)
    assert tensors.pop() is None
    np.testing.assert_allclose(got.numpy(), sdkde_core.estimate(x[:3], y, **options).numpy(), rtol=1e-5)
    assert tensors.pop() is not None
    with pytest.raises(ValueError, match="query has 2 dimensions"):
        sdkde_core.estimate(x, y[:, :2].contiguous(), **options)


@interpreted
def test_a_bandwidth_that_was_chosen_is_kept_for_the_general_way(tensors, monkeypatch):
    x, y = drawn(300, 31, 2)
    chosen = []
    monkeypatch.setattr(straight, "read", lambda *a, real=straight.read: chosen.append(1) or real(*a))
    x[7] += 1e6
    got = sdkde_core.estimate(x, y, **BACKEND)
    assert tensors.pop() is None and chosen == [1]
    np.testing.assert_allclose(got.numpy(), sdkde_core.estimate(x.numpy(), y.numpy(), **BACKEND), rtol=1e-3)


@pytest.mark.parametrize(
    "options", [{"method": "stacked"}, {"coordinates": "asinh"}, {"support": [(-9.0, None), None]}]
)
def test_densities_of_several_ask_their_parts(options):
    x = np.random.default_rng(3).normal(size=(200, 2))
    fitted = sdkde_core.prepare(x, **options)._fitted
    for what in ("density", "log", "score"):
        assert straight.answer(fitted.current, Argument.of("query", torch.from_numpy(x[:4])), what) is None
