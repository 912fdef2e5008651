"""All backends that can work on this CPU give the same numbers: every pair of them, in every problem that both take."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pairwise import covering

from sdkde_core.choice import registry
from sdkde_core.protocol import Reduction
from sdkde_core.testing.problems import CASES, Truth, answer, errors, make

PRECISIONS = ("fast", "high", "float64")
DIMENSIONS = (1, 2, 3, 5, 8, 16, 17, 33)
EXTENTS = (1.0, 5.0, 12.0, 40.0, 200.0, 1e4)

#: Those that compile for seconds by dimension, reduction and feature: problems of one or two formulas each.
COMPILED = ("keops",)
EQUALLY_WEIGHTED = tuple(kind for kind in CASES if kind in ("mixture", "tails", "clusters", "outlier", "duplicates"))

PRODUCT = list(itertools.product(CASES, Reduction, PRECISIONS, DIMENSIONS, EXTENTS, (False, True)))
CHOSEN = covering(PRODUCT)
OF_ONE_FORMULA = covering(
    list(itertools.product(EQUALLY_WEIGHTED, (Reduction.LOG_SUM,), PRECISIONS, (1,), EXTENTS, (False,)))
)
OF_MORE = covering(list(itertools.product(CASES, Reduction, PRECISIONS, (3,), EXTENTS, (False, True))))


def _names():
    return [r.name for r in registry.records() if r.distribution == "sdkde-core" and r.status != "shadowed"]


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
    return answer(info, backend, problem, case)


def _off(problem, a, b):
    """How far two answers are apart, over twice the tolerance: each may be off by one."""
    with np.errstate(invalid="ignore"):
        signed = None if b.sign is None else b.sign * np.exp(np.where(b.sign == 0, 0.0, b.log_magnitude - b.log_sum))
    return errors(problem, a, Truth(b.log_sum, b.shift, signed, b.log_sum)) / 2.0


def _case(kind, reduction, precision, d, extent, same):
    """A problem and its data, of sizes that are drawn."""
    seed = PRODUCT.index((kind, reduction, precision, d, extent, same))
    rng = np.random.default_rng(seed)
    case = make(kind, int(rng.integers(1, 121)), int(rng.integers(1, 61)), d, extent)
    return case.problem(reduction, precision, same=same), case


def _who():
    """Backends that work here."""
    return [name for name in _names() if not _backend(name)[2]]


def _agree(row, names):
    problem, case = _case(*row)
    answers = {name: found for name in names if (found := _answer(name, problem, case)) is not None}
    for (one, a), (other, b) in itertools.combinations(answers.items(), 2):
        worst = _off(problem, a, b)
        row = int(np.argmax(worst)) if worst.size else 0
        assert worst.max(initial=0.0) <= 1.0, f"{one}, {other}: row {row} by {worst[row]:.3g} times what both may"


def _named(row):
    return "-".join(map(str, row[:3])) + f"-d{row[3]}-e{row[4]:g}" + "-same" * row[5]


@pytest.mark.parametrize(
    ("row", "all_of_them"),
    [(row, False) for row in CHOSEN]
    + [(row, True) for row in OF_ONE_FORMULA]
    + [pytest.param(row, True, marks=pytest.mark.slow) for row in OF_MORE],
    ids=lambda x: _named(x) if isinstance(x, tuple) else "compiled" * x,
)
def test_they_agree(row, all_of_them):
    _agree(row, [name for name in _who() if all_of_them or name not in COMPILED])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reduction", Reduction)
def test_they_agree_in_the_whole_product(reduction, precision):
    for row in PRODUCT:
        if row[1:3] == (reduction, precision):
            _agree(row, [name for name in _who() if name not in COMPILED])


def test_every_pair_is_compared():
    """Who takes a problem is known without computing."""

    def takes(name, problem):
        info = _backend(name)[0]
        fits = problem.precision in info.precisions and not problem.requires - info.features
        return fits and info.supports(problem).ok

    who = _who()
    assert len(who) >= 2
    compared = dict.fromkeys(itertools.combinations(who, 2), 0)
    for row in (*CHOSEN, *OF_ONE_FORMULA):
        names = [n for n in who if (n not in COMPILED or row in OF_ONE_FORMULA) and takes(n, _case(*row)[0])]
        for pair in itertools.combinations(names, 2):
            compared[pair] += 1
    assert min(compared.values()) >= 5, compared


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is what the test starts")
def test_interpreted_ones_agree_too():
    """Triton decides when it is imported whether it interprets its kernels."""
    if not registry.find("triton").ok:
        pytest.skip(registry.find("triton").reason)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "test_they_agree or every_pair", "-m", "not slow"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(CHOSEN) + len(OF_ONE_FORMULA) + 1} passed" in done.stdout
