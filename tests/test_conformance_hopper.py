"""The Hopper backend passes the suite on a GPU of compute capability 9.0, and keeps its tolerance in the worst case."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.core")

import torch
from sdkde_hopper import plan

from sdkde_core.arrays import to_host
from sdkde_core.choice import registry
from sdkde_core.plugin import concatenate, each, merge
from sdkde_core.protocol import Columns, Reduction
from sdkde_core.testing import BackendConformance, problems
from sdkde_core.testing.problems import Case

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA device of compute capability 9.0")]

PRECISIONS = pytest.mark.parametrize("precision", ["fast", "high"])


class TestHopper(BackendConformance):
    backend = "hopper"
    device = "cuda:0"
    profile = "full"


def _errors(case, reduction, precision, same=True):
    """What a reduction is off by for every row, as a share of the tolerance."""
    info, problem = registry.find("hopper").info, case.problem(reduction, precision, same=same, device="cuda:0")
    assert info.supports(problem).ok
    got = problems.answer(info, info.load(), problem, case)
    return problems.errors(problem, got, problems.truth(case, same=same))


def _heaps(n, d, reach, distance):
    """Points, each with so many duplicates of another one ``distance`` away that both matter as much.

    Their φ are the same number, so what rounding leaves of it counts for all of them alike.
    """
    rng = np.random.default_rng(n)
    found = []
    while sum(map(len, found)) < n:
        centre, away = rng.normal(size=(2, d))
        centre *= reach * rng.random() ** 0.2 / np.linalg.norm(centre)
        r = distance * rng.uniform(0.7, 1.1)
        copies = max(1, round(rng.uniform(0.5, 1.5) * math.exp(r * r / 2)))
        found += [centre[None], np.repeat(centre[None] + r * away / np.linalg.norm(away), copies, 0)]
    points = rng.permutation(np.concatenate(found)[:n])
    return Case("heaps", points, points[:1].copy(), np.full(n, -math.log(n)))


@PRECISIONS
@pytest.mark.parametrize("distance", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("d", "reach"), [(1, 8.0), (3, 8.0), (16, 8.0), (16, 14.0), (24, 14.0), (64, 14.0)])
def test_heaps_of_duplicates(d, reach, distance, precision):
    assert _errors(_heaps(1500, d, reach, distance), Reduction.MEAN, precision).max() < 1


@PRECISIONS
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0, 30.0])
@pytest.mark.parametrize(("d", "distance"), [(2, 3.0), (16, 2.0), (40, 3.0)])
def test_heaps_whose_weights_differ(d, distance, spread, precision):
    """By more than the pieces that weights and φ are made of resolve, too."""
    case = _heaps(1500, d, 8.0, distance)
    log_weights = spread * np.random.default_rng(d).normal(size=1500)
    log_weights -= log_weights.max() + np.log(np.exp(log_weights - log_weights.max()).sum())
    case = replace(case, log_weights=log_weights)
    for reduction in Reduction:
        assert _errors(case, reduction, precision).max() < 1


def _answers(case, precision):
    """The backend, MEAN of the points themselves as a problem, and their state."""
    record = registry.find("hopper")
    problem = case.problem(Reduction.MEAN, precision, same=True, device="cuda:0")
    backend = record.info.load()
    columns = Columns(*(torch.tensor(x, device="cuda:0") for x in (case.points, case.log_weights)))
    return backend, problem, backend.prepare(problem, columns)


@PRECISIONS
@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("d", [3, 16, 30, 50])
def test_ranges_and_pairs_of_many_blocks(d, spread, precision, monkeypatch):
    """A range of the points as rows; pairs merge to the whole, in several launches too."""
    monkeypatch.setattr(plan, "MOST_UNITS", 9)
    case = problems.make("mixture", 4500, 10, d, 9.0)
    log_weights = spread * np.random.default_rng(d).normal(size=4500)
    case = replace(case, log_weights=log_weights - log_weights.max() - 9.0)
    backend, problem, state = _answers(case, precision)
    truth = problems.truth(case, same=True)
    found = backend.reduce(replace(problem, m=3476), None, state, 1024)
    off = problems.errors(replace(problem, m=3476), each(found, to_host), type(truth)(*(x[1024:] for x in truth)))
    assert off.max() < 1
    edges = [0, 2048, 3072, 4500]
    ranges = list(itertools.pairwise(edges))
    blocks = {}
    for i, rows in enumerate(ranges):
        for j, columns in enumerate(ranges[: i + 1]):
            blocks[i, j], blocks[j, i] = backend.reduce_pairs(problem, state, rows, columns)
    got = concatenate([merge([blocks[i, j] for j in range(3)]) for i in range(3)])
    assert problems.errors(problem, each(got, to_host), truth).max() < 1


@PRECISIONS
def test_rows_beyond_fp32_in_the_log_domain(precision):
    """Rows 18 bandwidths on one side of columns 18 on the other: φ is e⁻⁶⁴⁸."""
    rng = np.random.default_rng(0)
    points = rng.normal((16.0, 0.0, 0.0), size=(500, 3))
    points *= np.minimum(1.0, 18.5 / np.linalg.norm(points, axis=1))[:, None]
    queries = np.concatenate([-points[:50], points[:50]])
    case = Case("far", points, queries, np.full(500, -math.log(500)))
    assert _errors(case, Reduction.LOG_SUM, precision, same=False).max() < 0.9
    assert _errors(case, Reduction.LAPLACE, precision, same=False).max() < 0.9
