"""Every pair of backends that can work on this CPU gives the same numbers on random problems."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdkde_core.arrays import convert, to_host
from sdkde_core.choice import registry
from sdkde_core.engine.merge import each
from sdkde_core.engine.outliers import reduce_pass
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction
from sdkde_core.testing.problems import CASES, make

PRECISIONS = ("fast", "high", "float64")
DIMENSIONS = (1, 2, 3, 5, 8, 16, 17, 33)

#: Those that compile for seconds in each are compared in one that the conformance suite compiles too, with all columns.
FEW = {"keops": (3,)}


def _names():
    return [r.name for r in registry.records() if r.distribution == "sdkde" and r.status != "shadowed"]


@functools.cache
def _backend(name):
    """A backend's declaration and implementation, or why it cannot work here."""
    record = registry.find(name)
    if not record.ok:
        return None, None, record.reason
    if "cpu" not in record.info.devices:
        return None, None, f"runs on {', '.join(record.info.devices)}"
    support = (backend := record.info.load()).probe("cpu")
    return (record.info, backend, "") if support.ok else (None, None, support.reason)


def _answer(name, problem, case):
    """What a backend gives, or None where it declines."""
    info, backend, _ = _backend(name)
    if problem.precision not in info.precisions or problem.requires - info.features or not info.supports(problem).ok:
        return None
    columns, queries = (convert(x, info.arrays, "cpu") for x in (case.points, case.log_weights)), None
    if not problem.same:
        queries = convert(case.queries, info.arrays, "cpu")
    return each(reduce_pass(backend, info, problem, Columns(*columns), queries)[0], to_host)


def _off(problem, a, b):
    """How far two answers are apart, over twice the tolerance: each may be off by one."""
    tolerance = TOLERANCES[problem.precision]
    with np.errstate(invalid="ignore"):
        scale = np.where(np.isfinite(a.log_sum), a.log_sum, 0.0)
        apart = np.where(a.log_sum == b.log_sum, 0.0, abs(a.log_sum - b.log_sum))
    worst = apart / (2.0 * tolerance[Reduction.LOG_SUM].at(scale))
    if a.shift is not None:
        apart = np.sqrt(((a.shift - b.shift) ** 2).sum(1))
        worst = np.maximum(worst, apart / (2.0 * tolerance[Reduction.MEAN].at(scale)))
    if a.sign is not None:
        with np.errstate(invalid="ignore"):
            p, q = (x.sign * np.exp(np.where(x.sign == 0, 0.0, x.log_magnitude - a.log_sum)) for x in (a, b))
        worst = np.maximum(worst, abs(p - q) / (2.0 * tolerance[Reduction.LAPLACE].at(scale)))
    return worst


def _takes(name, d):
    """Whether a backend takes a small problem in so many dimensions."""
    info = registry.find(name).info
    return info.supports(Problem(Reduction.LOG_SUM, 9, 9, d, precision="fast", extent=5.0)).ok


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is what the test starts")
def test_interpreted_ones_agree_too():
    """Triton decides when it is imported whether it interprets its kernels."""
    if not registry.find("triton").ok:
        pytest.skip(registry.find("triton").reason)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "they_agree and triton"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    pairs = [name for name in _names() if name != "triton" and not _backend(name)[2]]
    assert f"{len(pairs)} passed" in done.stdout


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(_names(), 2)))
def test_they_agree(one, other):
    for name in (one, other):
        if _backend(name)[2]:
            pytest.skip(f"{name}: {_backend(name)[2]}")
    dimensions = [
        d for d in DIMENSIONS if all(d in FEW.get(name, DIMENSIONS) and _takes(name, d) for name in (one, other))
    ]
    compared = 0

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        kind=st.sampled_from(sorted(CASES)),
        n=st.integers(1, 120),
        m=st.integers(1, 60),
        d=st.sampled_from(dimensions),
        extent=st.sampled_from([1.0, 5.0, 12.0, 40.0, 200.0, 1e4]),
        precision=st.sampled_from(PRECISIONS),
        reduction=st.sampled_from(list(Reduction)),
        same=st.booleans(),
        exclude_self=st.booleans(),
    )
    def agree(kind, n, m, d, extent, precision, reduction, same, exclude_self):
        nonlocal compared
        case = make(kind, n, m, d, extent)
        problem = case.problem(
            reduction, precision, same=same, exclude_self=exclude_self and not {one, other} & set(FEW)
        )
        answers = [_answer(name, problem, case) for name in (one, other)]
        if None in answers:
            return
        compared += 1
        worst = _off(problem, *answers)
        assert worst.max(initial=0.0) <= 1.0, f"row {int(np.argmax(worst))} by {worst.max():.3g} times what both may"

    agree()
    assert compared >= 20
