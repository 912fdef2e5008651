"""Rows beside a heap of duplicates, which weighs as much as all else: every column of it is rounded alike. On a GPU."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from sdkde_core.choice import registry
from sdkde_core.plugin import reduce_pass
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = 200


def _heap(n, d, away):
    """Points, nine tenths of them on one spot ``away`` from the origin, and which lie where that weighs a half."""
    generator = torch.Generator("cuda").manual_seed(n + d)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)

    spot = normal(d)
    spot *= away / spot.norm()
    heap, mates = n * 9 // 10, 40 if d <= 2 else 1000  # few enough that they are alone
    points = spot.repeat(n, 1)
    direction = normal(mates, d)
    distance = math.sqrt(2.0 * math.log(heap)) + 0.3 * normal(mates, 1)
    points[:mates] += direction / direction.norm(dim=1, keepdim=True) * distance
    points[heap + mates :] = -0.5 * spot + 0.7 * normal(n - heap - mates, d)
    order = torch.randperm(n, generator=generator, device="cuda")
    where = torch.empty_like(order)
    where[order] = torch.arange(n, device="cuda")
    return points[order], where[: min(mates, ROWS)]


def _exact(points, rows):
    """Log sums, shifts, and LAPLACE's L by its scale, by direct differences in float64."""
    log_sums, shifts, laplace = [], [], []
    for some in rows.split(20):
        away = [points[None, :, k] - points[some, None, k] for k in range(points.shape[1])]
        e = -0.5 * sum(x * x for x in away)
        log_sum = torch.logsumexp(e, 1, keepdim=True)
        shifts.append(torch.stack([(torch.exp(e - log_sum) * x).sum(1) for x in away], 1))
        log_sums.append(log_sum[:, 0] - math.log(len(points)))
        square = -(torch.exp(e - log_sum) * e).sum(1)  # the mean of ½ r²
        half = 1.0 + 0.5 * points.shape[1]
        laplace.append((half - square) / (half + square))
    return torch.cat(log_sums), torch.cat(shifts), torch.cat(laplace)


def _given(name, n, d, away, precision):
    """The backend, a problem with a heap, its columns, and the rows to look at."""
    record = registry.find(name)
    if not record or not record.ok:
        pytest.skip(f"no {name}")
    points, rows = _heap(n, d, away)
    log_weights = torch.full((n,), -math.log(n), dtype=torch.float64, device="cuda")
    extent = float(points.norm(dim=1).max()) * (1.0 + 1e-9)
    how = {"dtype": "float32", "precision": precision, "device": "cuda:0", "same": True, "extent": extent}
    return record.info, Problem(Reduction.MEAN, n, n, d, **how), Columns(points, log_weights), rows


@pytest.mark.parametrize("away", [5.0, 10.0, 12.0])
@pytest.mark.parametrize("d", [1, 3, 8, 12, 16, 24, 64, 128, 200])
@pytest.mark.parametrize("precision", ["fast", "high", "float64"])
@pytest.mark.parametrize("name", ["triton", "hopper", "numba-cuda", "torch"])
def test_tolerances_hold_beside_a_heap(name, precision, d, away):
    info, problem, columns, rows = _given(name, 131072, d, away, precision)
    if precision not in info.precisions or not info.supports(problem).ok:
        pytest.skip(f"{name} does not take it")
    backend, tolerance = info.load({}), TOLERANCES[precision]
    log_sums, shifts, laplace = _exact(columns.points, rows)
    got = reduce_pass(backend, info, problem, columns)
    assert (got.shift[rows] - shifts).norm(dim=1).max() <= tolerance[Reduction.MEAN].absolute
    assert (got.log_sum[rows] - log_sums).abs().max() <= tolerance[Reduction.LOG_SUM].absolute
    asked = replace(problem, reduction=Reduction.LOG_SUM, m=len(rows), same=False)
    queries = columns.points[rows].contiguous()
    got = reduce_pass(backend, info, asked, columns, queries)
    assert ((got.log_sum - log_sums).abs() <= tolerance[Reduction.LOG_SUM].at(log_sums)).all()
    got = reduce_pass(backend, info, replace(asked, reduction=Reduction.LAPLACE), columns, queries)
    found = got.sign * torch.exp(got.log_magnitude - got.log_sum)
    assert (found - laplace).abs().max() <= tolerance[Reduction.LAPLACE].absolute


@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("d", [3, 8])
def test_tolerances_hold_beside_a_heap_in_lists(precision, d):
    info, problem, columns, rows = _given("triton", 131072, d, 12.0, precision)
    _, shifts, _ = _exact(columns.points, rows)
    got = reduce_pass(info.load({"skip": True}), info, problem, columns)
    assert (got.shift[rows] - shifts).norm(dim=1).max() <= TOLERANCES[precision][Reduction.MEAN].absolute
