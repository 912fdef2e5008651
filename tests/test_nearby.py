"""Which tiles can matter: what is left out stays within its share of the tolerance."""

import functools
import itertools
import math

import numpy as np
import pytest
import reference
import torch
from some_of_all import some_of_all

from sdkde_core import nearby
from sdkde_core.nearby import Neighbours, index, lists, order
from sdkde_core.plugin import each
from sdkde_core.protocol import Columns, Problem, Reduction
from sdkde_core.testing.problems import errors

SIZE, HEIGHT = 16, 8


# --- order and tiles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 100, 1024, 3001])
def test_the_order_has_every_point_once_and_neighbours_together(n, library):
    points = np.random.default_rng(n).normal(size=(n, 2))
    found = np.asarray(order(library(points), 8))
    assert np.array_equal(np.sort(found), np.arange(n)) and np.array_equal(found, order(library(points), 8))
    if n > 1000:
        leaves = points[found][: n // 8 * 8].reshape(-1, 8, 2)
        assert np.median(np.ptp(leaves, axis=1).max(axis=1)) < 0.1 * np.ptp(points)


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
def test_equal_points_are_ordered_too(library):
    assert np.array_equal(np.sort(order(library(np.zeros((1000, 3))), 8)), np.arange(1000))


# --- what is left out -----------------------------------------------------------------------------------------------


def _rows_and_columns(kind, d, rng):
    """Neighbouring rows, (m, d), and columns with their log weights."""
    n = 4096
    x, log_w = rng.normal(size=(n, d)), np.full(n, -math.log(n))
    if kind == "normal":
        x, y = 12.0 * x, 12.0 * x[:1] + rng.normal(size=(64, d))
    elif kind == "tail":
        x *= 6.0
        y = rng.normal(size=(64, d)) + 60.0
    elif kind == "clusters":
        x += 1e4 * rng.integers(0, 3, (n, 1))
        y = np.concatenate([x[:40], [[5e3] * d, [1.0005e4] * d]])
    elif kind == "duplicates":
        x = 8.0 * x[rng.integers(0, 30, n)]
        y = x[:64]
    elif kind == "weights":
        x, y, log_w = 10.0 * x, 10.0 * x[:1] + rng.normal(size=(64, d)), 400.0 * rng.normal(size=n)
        log_w -= np.logaddexp.reduce(log_w)
    elif kind == "ladder":  # tiles and rows that are points: the bound is what they add
        distances = np.concatenate([[0.0], np.linspace(4.0, 9.0, 255)])
        x = np.zeros((n, d))
        x[:, 0] = np.repeat(distances, SIZE)
        y = np.zeros((8, d))
    return y[order(y, HEIGHT)], x, log_w


KINDS = ("normal", "tail", "clusters", "duplicates", "weights", "ladder")


def _left_out(problem, y, x, log_w, together=0):
    """What leaving out tiles does to results, over the share of the tolerance, (m,), and the share listed."""
    columns = index(x, log_w, SIZE)
    found = lists(problem, columns, y, HEIGHT, together)
    x, log_w = x[columns.order], log_w[columns.order]
    change = np.zeros(len(y))
    for i, row in enumerate(y):
        tiles = found.tiles[found.ends[i // HEIGHT] : found.ends[i // HEIGHT + 1]]
        kept = np.isin(np.arange(len(x)) // SIZE, tiles)
        step = x - row
        half = 0.5 * (step**2).sum(axis=1)
        logs = log_w - half
        term = np.exp(logs - logs.max())
        a = 1.0 + 0.5 * problem.d
        if problem.reduction is Reduction.MEAN:
            mean = term @ step / term.sum()
            change[i] = np.linalg.norm(term[~kept] @ (mean - step[~kept])) / term[kept].sum()
        elif problem.reduction is Reduction.LAPLACE:
            change[i] = (term * (a + half))[~kept].sum() / (term * (a + half)).sum()
        else:
            change[i] = term[~kept].sum() / term.sum()
    return change / nearby.left_out(problem), len(found.tiles) / (len(columns.fine.square) * (len(found.ends) - 1))


@functools.cache
def _case(kind, d):
    return _rows_and_columns(kind, d, np.random.default_rng([KINDS.index(kind), d]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", Reduction)
def test_what_is_left_out_is_within_its_share(kind, reduction):
    for d, precision in itertools.product((1, 3), ("fast", "high", "float64")):
        y, x, log_w = _case(kind, d)
        problem = Problem(reduction, len(y), len(x), d, precision=precision)
        worst, listed = _left_out(problem, y, x, log_w)
        assert worst.max() <= 1.0, (d, precision)
        if kind in ("normal", "tail", "ladder", "duplicates"):
            assert listed < 0.9


@pytest.mark.parametrize("reduction", Reduction)
def test_in_groups_of_rows(reduction):
    """Far from one another, and the last one not full."""
    for kind in ("clusters", "weights"):
        y, x, log_w = _case(kind, 3)
        y = np.concatenate([y, x[:20], y[:1]])
        y = y[order(y, HEIGHT)]
        problem = Problem(reduction, len(y), len(x), 3)
        worst, listed = _left_out(problem, y, x, log_w, together=3 * HEIGHT)
        assert worst.max() <= 1.0 and listed < 0.95


@pytest.mark.parametrize("precision", ["fast", "high", "float64"])
def test_some_of_all_columns_beside_one_that_weighs_far_more(precision):
    """The shift that counts is that over all columns, which is longer than any over some."""
    case = some_of_all(10.0, SIZE, 0.04, precision)
    far = int(np.argmax(case.points[:, 0]))
    x, log_w, y = np.delete(case.points, far, axis=0), np.delete(case.log_weights, far), case.queries
    columns, problem = index(x, log_w, SIZE), Problem(Reduction.MEAN, len(y), len(x), 2, precision=precision)
    found = lists(problem, columns, y, HEIGHT)
    left = np.setdiff1d(np.arange(len(columns.fine.square)), found.tiles)
    kept = columns.order[~np.isin(np.arange(len(x)) // SIZE, left)]

    def shift(which):
        step = np.concatenate([x[which], case.points[far : far + 1]]) - y[0]
        logs = np.concatenate([log_w[which], case.log_weights[far : far + 1]]) - 0.5 * (step**2).sum(axis=1)
        terms = np.exp(logs - logs.max())
        return terms @ step / terms.sum()

    off = np.linalg.norm(shift(kept) - shift(np.arange(len(x))))
    assert off <= nearby.left_out(problem)


# --- other libraries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", Reduction)
def test_lists_of_tensors_are_those_of_arrays(reduction):
    y, x, log_w = _case("normal", 3)
    problem = Problem(reduction, len(y), len(x), 3)
    arrays, tensors = index(x, log_w, SIZE), index(torch.from_numpy(x), torch.from_numpy(log_w), SIZE)
    leaves = [np.sort(np.asarray(one.order).reshape(-1, SIZE), axis=1) for one in (arrays, tensors)]
    assert np.array_equal(*leaves)
    want, got = lists(problem, arrays, y, HEIGHT), lists(problem, tensors, torch.from_numpy(y), HEIGHT)
    assert np.array_equal(want.ends, got.ends.numpy()) and np.array_equal(want.tiles, got.tiles.numpy())
    assert np.allclose(want.floors, got.floors.numpy(), rtol=1e-9) and np.allclose(want.cuts, got.cuts.numpy())


# --- direct sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "counted"), [(4, 0.10), (5, 0.2), (6, 0.4), (8, 0.9), (12, 1.0)])
def test_the_share_of_typical_data_is_that_counted_of_a_normal_sample(d, counted):
    """Of a million points at Silverman's bandwidth, counted between "fast" and "high"."""
    n = 1_000_000
    extent = n ** (1 / (d + 4)) / 0.9 * (math.sqrt(d) + math.sqrt(2 * math.log(n)))
    shares = [
        nearby.typical_share(
            Problem(Reduction.LOG_SUM, n, n, d, precision=precision, extent=extent), 128, 128, 0.15 * tolerance
        )
        for precision, tolerance in (("fast", 5e-4), ("high", 1e-5))
    ]
    assert shares[0] < shares[1] and counted / 1.5 < np.mean(shares) < 1.5 * counted
    for odd in (0.0, 1e-6, 1e9, 1e200):
        problem = Problem(Reduction.MEAN, n, n, d, extent=odd)
        assert 0.0 <= nearby.typical_share(problem, 128, 128, 1e-5) <= 1.0


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("extent", [0.2, 10.0, 1e4])
def test_direct_sums_over_neighbours(d, extent, library):
    """Weights of all sizes, rows far away; few rows, isolated ones and many."""
    rng = np.random.default_rng(d)
    points = extent * rng.normal(size=(1000, d))
    rows = np.concatenate([points[:40], 300.0 * rng.normal(size=(60, d)), 1e6 * rng.normal(size=(3, d))])
    log_weights = rng.choice([-400.0, -30.0, 0.0], 1000)
    log_weights -= np.logaddexp.reduce(log_weights)
    neighbours = Neighbours(Columns(library(points), library(log_weights)))
    want = reference.sums(rows, points, log_weights=log_weights)
    for reduction, few in itertools.product(Reduction, (7, 25, 103)):
        some = slice(0, few)
        problem = Problem(reduction, few, 1000, d)
        got = each(neighbours.reduce(problem, library(rows[some])), np.asarray)
        assert errors(problem, got, want._make(sums[some] for sums in want)).max() <= 0.1


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_direct_sums_of_few_rows_among_many_columns(d, library):
    """In the tails, between clusters, and beside a single column, which a sample of the columns is not near."""
    rng = np.random.default_rng(d)
    points = np.concatenate([20.0 * rng.standard_t(3, size=(15_000, d)), 1e5 + rng.normal(size=(5, d))])
    far = np.argsort(-np.abs(points).max(axis=1))[:40]
    rows = np.concatenate([points[far], np.full((1, d), 5e4), -1e5 * np.eye(d)])
    log_weights, want = np.full(len(points), -math.log(len(points))), reference.sums(rows, points)
    for reduction in Reduction:
        problem = Problem(reduction, len(rows), len(points), d)
        got = Neighbours(Columns(library(points), library(log_weights))).reduce(problem, library(rows))
        assert errors(problem, each(got, np.asarray), want).max() <= 0.1


def test_rough_shares_of_odd_points():
    """Equal points, clusters far apart, few points: a share, whatever they are."""
    x, log_weights = np.zeros((4000, 2)), np.full(4000, -math.log(1e6))
    for points in (x, x + 1e4 * (np.arange(4000)[:, None] % 3), x + 1e150 * np.arange(4000)[:, None]):
        for reduction in Reduction:
            problem = Problem(reduction, 10**6, 10**6, 2)
            assert 0.0 <= nearby.rough_share(problem, points[:64], points, log_weights, 32, 64, 1e-5) <= 1.0
    assert nearby.rough_share(problem, x[:9], x[:9], log_weights[:9], 32, 64, 1e-5) == 1.0
    assert nearby.rough_share(problem, x * math.nan, x * math.nan, log_weights, 32, 64, 1e-5) == 1.0


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
def test_direct_sums_beside_other_columns(library):
    """Where a sum is known to be large, columns far away are left out."""
    points = np.array([[0.0], [1.0], [30.0]])
    neighbours = Neighbours(Columns(library(points[1:]), library(np.zeros(2))))
    rows = np.repeat([[1.0], [30.0], [15.0]], 20, axis=0)
    problem = Problem(Reduction.LOG_SUM, 60, 3, 1)
    both = np.exp(np.asarray(neighbours.reduce(problem, library(rows), 0.0).log_sum))
    np.testing.assert_allclose(both[::20], [1.0, 1.0, 0.0], atol=1e-9)


@pytest.mark.parametrize("name", ["numba", pytest.param("fourier", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "reduction",
    [Reduction.MEAN, *(pytest.param(x, marks=pytest.mark.slow) for x in Reduction if x is not Reduction.MEAN)],
)
def test_a_grid_around_clusters_that_are_far_apart(name, reduction):
    """Most rows are far from all columns, and each sum is over few of these; some rows are within a cluster."""
    module = pytest.importorskip(f"sdkde_{name}.backend")
    backend = module.NumbaBackend(skip=True) if name == "numba" else module.FourierBackend(always=True)
    rng = np.random.default_rng(5)
    x = np.concatenate([20.0 * rng.normal(size=(3000, 2)), 2.0 * rng.normal(size=(3000, 2)) + [2000.0, 0.0]])
    log_weights = np.where(rng.random(6000) < 0.5, -30.0, 0.0)
    log_weights -= np.logaddexp.reduce(log_weights)
    rows = [np.stack(np.meshgrid(*[np.linspace(-w, w, 9)] * 2), axis=-1).reshape(-1, 2) for w in (50.0, 3e3, 1e6)]
    rows = np.concatenate([*rows, x[::100] + 0.1])
    want = reference.sums(rows, x, log_weights=log_weights)
    for precision in ("fast", "high"):
        problem = Problem(
            reduction, len(rows), 6000, 2, precision=precision, extent=2e6, requires=frozenset({"weights"})
        )
        got = backend.reduce(problem, rows, backend.prepare(problem, Columns(x, log_weights)))
        assert errors(problem, got, want).max() <= 1.0
