"""Numba's CUDA target passes the suite: on the GPU where there is one, otherwise in Numba's simulator, on the CPU.

The simulator runs every thread of a block as one of the operating system, some ten thousand pairs a second: it sees few
points, and checks of the suite itself only in `make test-full`. It rounds like a GPU but for fused products and sums.
"""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("numba_cuda")

import torch
from pairwise import cases

import sdkde_core
from sdkde_core import tuning
from sdkde_core.arrays import to_host
from sdkde_core.choice import registry
from sdkde_core.plugin import each
from sdkde_core.protocol import Columns, Problem, Reduction
from sdkde_core.testing import BackendConformance, problems
from sdkde_core.testing.checks import CHECKS, Target

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
NAME = "numba-cuda"
PRECISIONS = ("fast", "high", "float64")

simulated = pytest.mark.skipif(not SIMULATED, reason="runs in a process of its own, see test_in_the_simulator")


def _errors(case, problem):
    """Errors of a problem over its tolerance, by way of the core."""
    info = registry.find(NAME).info
    got = problems.answer(info, info.load(), problem, case)
    return problems.errors(problem, got, problems.truth(case, same=problem.same))


@simulated
@pytest.mark.parametrize(
    ("data", "reduction", "asked"),
    cases(
        [*((k, 10.0) for k in problems.CASES), ("tails", 1e4), ("clusters", 1e5)],
        Reduction,
        [("fast", False), ("high", True), ("float64", False)],
        strength=1,
    ),
    ids=str,
)
def test_simulated_rows_keep_their_tolerances(data, reduction, asked):
    (kind, extent), (precision, same) = data, asked
    case = problems.make(kind, 29, 11, 3, extent)
    assert _errors(case, case.problem(reduction, precision, same=same, device="cpu")).max() <= 1.0


@simulated
@pytest.mark.parametrize(
    ("reduction", "distance"), [(Reduction.LOG_SUM, 1e9), (Reduction.MEAN, 1e20), (Reduction.LAPLACE, 1e100)]
)
def test_simulated_rows_far_from_every_point(reduction, distance):
    """The check ``far_below`` in small; :mod:`test_numba_cuda_backend` looks for what compilers fuse."""
    case = problems.far(13, 8, 3, distance, stray=True)
    assert _errors(case, case.problem(reduction, "high", device="cpu")).max() <= 1.0


@simulated
@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 5), pytest.param(33, 2, marks=pytest.mark.slow)])
def test_simulated_sizes_that_divide_nothing(n, m):
    case = problems.make("mixture", n, m, 1, 10.0)
    for reduction, same in itertools.product(Reduction, (False, True)):
        problem = case.problem(reduction, "high", same=same, device="cpu")
        assert _errors(case, problem).max() <= 1.0, (reduction, same)


@simulated
@pytest.mark.parametrize(
    ("d", "precision", "extent", "reduction"),
    [
        (7, "fast", 5.0, "laplace"),
        (7, "high", 5.0, "mean"),
        pytest.param(7, "high", 60.0, "mean", marks=pytest.mark.slow),
        pytest.param(7, "float64", 5.0, "mean", marks=pytest.mark.slow),
        pytest.param(13, "high", 5.0, "mean", marks=pytest.mark.slow),
    ],
)
def test_simulated_rows_that_several_threads_share(d, precision, extent, reduction):
    """Dimensions that divide nothing either, over two and four threads, in every arithmetic."""
    case = problems.make("mixture", 5, 2, d, extent)
    shape = {"depth": 4, "rows": 1, "threads": 64, "columns": 4, "registers": 0}
    kinds = {f"{reduction}_{kind}": shape for kind in ("expanded", "single", "doubled", "float64")}
    problem = case.problem(Reduction(reduction), precision, same=reduction == "mean", device="cpu")
    with tuning.using(kinds):
        assert _errors(case, problem).max() <= 1.0


@simulated
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_simulated_nan_stays_nan(method):
    x = np.random.default_rng(0).normal(size=(20, 3))
    y = x[:3].copy()
    y[1, 2] = np.nan
    options = {"method": method, "backend": NAME, "precision": "fast", "bandwidth": 1.0, "check_finite": False}
    assert list(np.isnan(sdkde_core.estimate(x, y, **options))) == [False, True, False]


@simulated
@pytest.mark.parametrize("reduction", Reduction)
def test_simulated_ranges_of_rows(reduction):
    case, backend = problems.make("mixture", 30, 1, 2, 8.0), registry.find(NAME).info.load()
    columns = Columns(torch.tensor(case.points), torch.tensor(case.log_weights))
    problem = replace(case.problem(reduction, "high", same=True, device="cpu"), m=4)
    got = each(backend.reduce(problem, None, backend.prepare(problem, columns), 9), to_host)
    want = problems.truth(replace(case, queries=case.points), same=True, rows=range(9, 13))
    assert problems.errors(problem, got, want).max() <= 1.0


@pytest.mark.slow
@simulated
@pytest.mark.parametrize(
    ("check", "reduction"),
    [("state_reuse", "log_sum"), ("row_range", "mean")],
)
def test_simulated_suite(check, reduction):
    """Checks of the suite at its own sizes; all of them would take an hour here."""
    info = registry.find(NAME).info
    CHECKS[check].run(Target(info, info.load(), "cpu"), f"high-{reduction}")


@pytest.mark.skipif(SIMULATED or torch.cuda.is_available(), reason="there is a GPU, or the test starts this")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_simulator(which):
    """Run this file in a process that simulates kernels: Numba decides that when it is imported."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # nothing there needs them
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "simulated", "-m", f"{which} and not gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNumbaCuda(BackendConformance):
    backend = NAME
    device = "cuda:0"
    dimensions = (1, 2, 3, 5, 8, 16, 17, 33, 64, 128, 784)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("d", [1, 2, 5, 16, 33, 64, 128, 300])
@pytest.mark.parametrize("extent", [5.0, 9.0, 13.0, 16.0, 20.0, 25.0, 30.0, 60.0, 120.0])
def test_the_arithmetics_hold_up_to_their_limits(d, extent):
    for kind, precision, reduction, same in itertools.product(
        ("mixture", "duplicates", "tails"), PRECISIONS, Reduction, (False, True)
    ):
        case = problems.make(kind, 900, 120, d, extent)
        error = _errors(case, case.problem(reduction, precision, same=same, device="cuda:0"))
        assert error.max() <= 0.9, (kind, precision, reduction, same, error.max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_call_that_comes_again_gives_the_same_bits(method):
    """On other streams too."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(n, 5, device="cuda", generator=generator) for n in (700, 90))
    options = {"bandwidth": 0.7, "backend": NAME, "method": method}
    first = sdkde_core.estimate(x, y, **options)
    assert torch.equal(first, sdkde_core.estimate(x, y, **options))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = sdkde_core.estimate(x, y, **options)
    stream.synchronize()
    assert torch.equal(first, there)


def test_a_cpu_is_refused_unless_kernels_are_simulated(monkeypatch):
    info = registry.find(NAME).info
    problem = Problem(Reduction.LOG_SUM, 5, 5, 3, device="cpu")
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    assert "NUMBA_ENABLE_CUDASIM=1" in info.supports(problem).reason
    assert not info.supports(problem).ok
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert info.supports(problem).ok
    assert not info.supports(replace(problem, d=1025)).ok
    assert not info.supports(replace(problem, extent=1e200)).ok
    assert info.extent_limit(replace(problem, precision="float64")) == 1e140
