"""Zero-inflated data: equal points are summed once."""

import math

import numpy as np
import pytest

from sdkde_core.protocol import Columns, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import errors

pytest.importorskip("finufft")

from sdkde_fourier import duplicates


def zeros(rng, n, d):
    return np.exp(3.0 * rng.normal(size=(n, d))) * (rng.random((n, d)) > 0.7)


@pytest.mark.parametrize("d", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_equal_points_are_summed_once_and_right(d, reduction):
    rng = np.random.default_rng(d)
    points, rows = zeros(rng, 3000, d) / 0.01, zeros(rng, 200, d) / 0.01
    log_weights = np.log(rng.exponential(size=3000)) - math.log(3000)
    columns = Columns(points, log_weights)
    search = duplicates.Distinct(columns, map)
    problem = Problem(reduction, 200, 3000, d, requires=frozenset({"weights"}))
    got = search.reduce(problem, rows)
    assert errors(problem, got, reference.sums(rows, points, log_weights=log_weights)).max() <= 0.2
    first, _ = duplicates.distinct(points)
    assert len(first) == len(np.unique(points, axis=0)) < 2900


def test_groups_of_equal_points():
    points = np.array([[0.0, 1.0], [2.0, 3.0], [-0.0, 1.0], [0.0, 2.0], [2.0, 3.0]])
    first, group = duplicates.distinct(points)
    assert np.array_equal(points[first][group], points) and len(first) == 3
    log_weights = np.array([-1000.0, -3.0, -1000.0, -4.0, -5.0])
    weights = duplicates.merged_weights(log_weights, first, group)
    want = {0: np.logaddexp(-1000.0, -1000.0), 1: np.logaddexp(-3.0, -5.0), 3: -4.0}
    for index, expected in want.items():
        assert weights[group[index]] == pytest.approx(expected, rel=1e-15)
    assert duplicates.many(np.zeros((9, 1))) and not duplicates.many(np.arange(9.0)[:, None])
