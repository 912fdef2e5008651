"""The PyTorch backend: options, formulas and their limits, devices without float64, and what it leaves alone."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import reference
import torch
from sdkde_torch import backend as implementation
from sdkde_torch import devices
from sdkde_torch.backend import TorchBackend
from sdkde_torch.info import INFO

import sdkde_core
from sdkde_core.arrays import to_host
from sdkde_core.plugin import each
from sdkde_core.protocol import PRECISIONS, BackendUnavailable, Columns, Problem, Reduction
from sdkde_core.testing.problems import answer, errors, make, truth

CPU = torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch):
    """Pass the CPU off as a device of a kind; return the function that does."""

    def put(kind, double):
        real = devices.place
        place = devices.Place(CPU, double)
        monkeypatch.setattr(implementation, "place", lambda name: place if name.startswith(kind) else real(name))

    return put


@pytest.mark.parametrize("options", [{"memory": "much"}, {"memory": 0}, {"memory": -1}, {"memory": 1.5}])
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TorchBackend(**options)
    with pytest.raises(ValueError, match=r"backend_options.*'torch'"):
        sdkde_core.estimate([0.0, 1.0], backend="torch", backend_options=options)


def test_memory_changes_no_answer():
    case = make("mixture", 3000, 200, 3)
    want = truth(case)
    for reduction, precision in itertools.product(Reduction, PRECISIONS):
        problem = case.problem(reduction, precision)
        for memory in ("256MiB", 1 << 16, 1):
            got = answer(INFO, TorchBackend(memory=memory), problem, case)
            assert errors(problem, got, want).max() <= 1.0, (reduction, precision, memory)


@pytest.mark.parametrize("kind", ["mixture", "tails", "clusters", "weights", "duplicates"])
@pytest.mark.parametrize("extent", [5.0, pytest.param(13.0, marks=pytest.mark.slow), 40.0])
@pytest.mark.parametrize("d", [1, 16])
def test_formulas_of_a_gpu(pretend, kind, extent, d):
    """The CPU passed off as a GPU with float64: split squares at "fast" and "high"."""
    pretend("mps", True)
    case = make(kind, 300, 60, d, extent)
    for precision, reduction, same in itertools.product(("fast", "high"), Reduction, (False, True)):
        problem = case.problem(reduction, precision, same=same, device="mps")
        got = answer(INFO, TorchBackend(), problem, case)
        assert errors(problem, got, truth(case, same=same)).max() <= 0.8, (precision, reduction, same)


def test_settings_that_round_products_are_noticed_and_left(pretend):
    """TF32 or bfloat16 products may be allowed for all of a process: then float64 is taken."""
    case = make("mixture", 500, 90, 16, 12.0)
    problem = case.problem(Reduction.LOG_SUM, "fast")
    backend, columns = TorchBackend(), Columns(torch.from_numpy(case.points), torch.from_numpy(case.log_weights))
    state = backend.prepare(problem, columns)
    assert state.library.dtype == torch.float32
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            for prepared in (state, backend.prepare(problem, columns)):  # also what was packed before
                got = each(backend.reduce(problem, torch.from_numpy(case.queries), prepared), to_host)
                assert errors(problem, got, truth(case)).max() <= 0.01
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_device_that_is_not_here():
    for device in ("mps", "xpu:0"):
        assert not TorchBackend().probe(device).ok
        with pytest.raises(BackendUnavailable, match="PyTorch .* cannot use " + device):
            sdkde_core.estimate([0.0, 1.0], backend="torch", device=device)
        assert len(TorchBackend().probe(device).reason) < 200  # not all that PyTorch says of mps


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_device_without_float64(pretend, method, dtype, monkeypatch):
    """Whitened on the host, where the points stay; no precision "float64", and `explain` says why."""
    monkeypatch.setattr(sdkde_core.choice.registry, "made", {})
    pretend("mps", False)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(n, 3)).astype(dtype) for n in (300, 40))
    options = {"method": method, "bandwidth": 0.5, "backend": "torch", "device": "mps"}
    for weights in (None, rng.random(300)):
        got = sdkde_core.estimate(x, y, weights=weights, **options)
        want = reference.estimate(x.astype(float), y.astype(float), method=method, bandwidth=0.5, weights=weights)
        np.testing.assert_allclose(got, want, rtol=2e-3 if dtype == "float32" else 1e-4, atol=1e-8)
        ready = sdkde_core.prepare(x, weights=weights, **options)
        np.testing.assert_allclose(ready.estimate(y), want, rtol=2e-3 if dtype == "float32" else 1e-4, atol=1e-8)
    with pytest.raises(BackendUnavailable, match="mps devices have no float64: precisions fast and high there"):
        sdkde_core.explain(x, y, method=method, bandwidth=0.5, precision="float64", device="mps")
    told = str(sdkde_core.explain(x, y, method=method, bandwidth=0.5, precision="high", device="mps"))
    assert "points stay on the host in float64" in told


def test_weights_that_float32_has_no_room_for(pretend):
    pretend("mps", False)
    case = make("mixture", 60, 30, 3, 8.0)
    case = replace(case, log_weights=np.where(np.arange(60) % 2, 0.0, -1300.0) - math.log(30))
    for reduction in Reduction:
        problem = case.problem(reduction, "high", device="mps")
        assert errors(problem, answer(INFO, TorchBackend(), problem, case), truth(case)).max() <= 1.0


def test_in_inference_mode_and_without_autograd():
    x = torch.randn(60, 2)
    want = sdkde_core.estimate(x, backend="torch")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(sdkde_core.estimate(x, backend="torch"), want)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("points", "log_weights", "precision", "want"),
    [
        # exp(−700) times an exponent of −10¹² would count beside a sum of 1e-289.
        ([36.47, 1.4e6], None, "float64", -0.5 * 36.47**2 - math.log(2) + math.log(1.5 + 0.5 * 36.47**2)),
        # The far column's exponent is 800 below the near one's, which weighs nothing, and it is the whole sum.
        ([0.0, 40.0], [-1500.0, 0.0], "high", -800 + math.log(801.5)),
    ],
)
def test_laplace_of_columns_far_beyond_others(points, log_weights, precision, want):
    requires = frozenset() if log_weights is None else frozenset({"weights"})
    weights = [-math.log(2)] * 2 if log_weights is None else log_weights
    problem = Problem(Reduction.LAPLACE, 1, 2, 1, precision=precision, extent=max(points), requires=requires)
    double = {"dtype": torch.float64}
    backend, given = TorchBackend(), Columns(torch.tensor(points, **double)[:, None], torch.tensor(weights, **double))
    got = backend.reduce(problem, torch.zeros(1, 1, **double), backend.prepare(problem, given))
    assert float(got.log_sum[0]) == pytest.approx(want, abs=1e-10 if precision == "float64" else 1e-5, rel=0)


def test_a_far_column_does_not_move_rows_whose_sums_are_small():
    """What its term is clamped at, times its coordinate, must be nothing beside the row's own sum."""
    case = make("outlier", 16, 51, 5, 200.0)  # its first row has a log sum of −664
    for precision in ("fast", "high", "float64"):
        problem = case.problem(Reduction.MEAN, precision)
        assert errors(problem, answer(INFO, TorchBackend(), problem, case), truth(case)).max() <= 1.0


def test_a_query_of_one_row_may_run_backwards_and_a_far_one_is_refused():
    ready = sdkde_core.prepare(np.zeros((3, 2)), bandwidth=1.0, backend="torch", device="cpu")
    assert ready.estimate(np.zeros((1, 2))[::-1]) == pytest.approx(0.5 / np.pi)
    with pytest.raises(ValueError, match="row 0 of query"):
        sdkde_core.prepare(np.zeros((2, 1)), bandwidth=1.0, backend="torch", device="cpu").estimate([[1.7e308]])
