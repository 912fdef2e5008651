"""The Hopper backend passes the suite on a GPU of compute capability 9.0, and keeps its tolerance in the worst case."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.core")

import torch

from sdkde_core.arrays import to_host
from sdkde_core.choice import registry
from sdkde_core.plugin import each, reduce_pass
from sdkde_core.protocol import Columns, Reduction
from sdkde_core.testing import BackendConformance, problems
from sdkde_core.testing.problems import Case

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA device of compute capability 9.0")]


class TestHopper(BackendConformance):
    backend = "hopper"
    device = "cuda:0"
    profile = "full"


def _errors(case, reduction, same=True):
    """What a reduction is off by for every row, as a share of the tolerance."""
    record = registry.find("hopper")
    problem = case.problem(reduction, "fast", same=same, device="cuda:0")
    assert record.info.supports(problem).ok
    points, log_weights, queries = (
        torch.tensor(x, device="cuda:0") for x in (case.points, case.log_weights, case.queries)
    )
    columns = Columns(points, log_weights)
    got = reduce_pass(record.info.load(), record.info, problem, columns, None if same else queries)
    return problems.errors(problem, each(got, to_host), problems.truth(case, same=same))


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


@pytest.mark.parametrize("distance", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("d", "reach"), [(1, 8.0), (3, 8.0), (16, 8.0), (16, 14.0)])
def test_heaps_of_duplicates(d, reach, distance):
    assert _errors(_heaps(1500, d, reach, distance), Reduction.MEAN).max() < 1


@pytest.mark.parametrize("n", [1, 63, 1024, 1025, 2500])
def test_sizes_about_tiles_and_supers(n):
    case = problems.make("mixture", n, 10, 16, 9.0)
    assert _errors(case, Reduction.MEAN).max() < 0.9
    assert _errors(case, Reduction.LOG_SUM).max() < 0.9


def test_rows_beyond_fp32_in_the_log_domain():
    """Rows 18 bandwidths on one side of columns 18 on the other: φ is e⁻⁶⁴⁸."""
    rng = np.random.default_rng(0)
    points = rng.normal((16.0, 0.0, 0.0), size=(500, 3))
    points *= np.minimum(1.0, 18.5 / np.linalg.norm(points, axis=1))[:, None]
    queries = np.concatenate([-points[:50], points[:50]])
    case = Case("far", points, queries, np.full(500, -math.log(500)))
    assert _errors(case, Reduction.LOG_SUM, same=False).max() < 0.9
