"""Zero-inflated, count, clustered and outlying data: what is priced from a sample, and summed once."""

import dataclasses
import math
import weakref

import numpy as np
import pytest

from sdkde_core.choice import registry
from sdkde_core.estimator import plan as planning
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.estimator.sample import SIZE, Sampler
from sdkde_core.protocol import Columns, Partial, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import errors

pytest.importorskip("finufft")

from sdkde_fourier import duplicates, forecast, price
from sdkde_fourier.around import around
from sdkde_fourier.backend import FourierBackend


def zeros(rng, n, d):
    return np.exp(3.0 * rng.normal(size=(n, d))) * (rng.random((n, d)) > 0.7)


def counts(rng, n, d):
    return rng.poisson(rng.gamma(1.5, 3.0, (n, d))).astype(float)


def clusters(rng, n, d):
    return 1e4 * rng.normal(size=(8, d))[rng.integers(0, 8, n)] + rng.normal(size=(n, d))


def heavy(rng, n, d):
    return rng.standard_t(2, (n, d))


#: Kinds of data, and a bandwidth that leaves them to direct sums in two and three dimensions.
KINDS = {zeros: 0.01, counts: 0.02, clusters: 0.2, heavy: 0.02}


def posed(points, rows=None, reduction=Reduction.LOG_SUM, **more):
    """A problem and its columns, of equal weights, with the sample that a plan would give it."""
    n, d = points.shape
    log_weights = np.full(n, -math.log(n))
    here = points if rows is None else rows
    extent = float(np.sqrt((np.concatenate([points, here]) ** 2).sum(axis=1).max()))
    sample = Sampler(points, here, log_weights)
    problem = Problem(reduction, len(here), n, d, same=rows is None, extent=extent, sample=sample, **more)
    return problem, Columns(points, log_weights)


# --- the sample -----------------------------------------------------------------------------------------------------


def test_a_sample_has_points_from_everywhere_whatever_their_order():
    n = 8 * SIZE
    x = np.sort(np.random.default_rng(0).normal(size=(n, 2)), axis=0)
    x[::8] = 100.0  # as wide apart as the sample's places are, on average
    weights = np.where(np.arange(n) % 3 == 0, -np.inf, -9.0)
    sample = Sampler(x, x[:100], weights)()
    assert np.array_equal(sample.rows, x[:100]) and len(sample.columns) == pytest.approx(SIZE * 2 / 3, rel=0.02)
    for k in (SIZE + 1, SIZE + SIZE // 9, 3 * SIZE - 1):  # no point twice
        columns = Sampler(np.arange(float(k))[:, None], x[:9], np.zeros(k))().columns
        assert SIZE / 2 <= len(np.unique(columns)) == len(columns) <= SIZE
    assert (sample.columns[:, 0] == 100.0).mean() == pytest.approx(1 / 8, abs=0.01)
    assert np.array_equal(sample.low, x.min(axis=0)) and np.array_equal(sample.high, x.max(axis=0))
    again = Sampler(x, x[:100], weights)()
    assert np.array_equal(sample.columns, again.columns) and sample != again
    few = Sampler(x[:70], x[:70], weights[1:2].repeat(70))()
    assert np.array_equal(few.columns, x[:70]) and np.array_equal(few.rows, x[:70])


def test_a_sample_that_is_taken_keeps_no_data_alive():
    """Backends remember what they have priced, and a problem has its sample."""
    x = np.random.default_rng(0).normal(size=(2 * SIZE, 2))
    sampler, gone = Sampler(x, x[:100].copy(), np.zeros(len(x))), weakref.ref(x)
    sampler()
    del x
    assert gone() is None and sampler() is sampler.taken


def test_a_sample_is_taken_only_where_it_matters():
    """Not where the data are benign, few, or in many dimensions, and not where the backend is named."""
    rng = np.random.default_rng(0)

    def looked(x, **options):
        request = Request(Goal.DENSITY, "kde", "silverman", **options)
        plan = planning.plan(request, x)
        assert all(p.sample is None for p in plan.problems)
        return plan.looked

    odd = zeros(rng, 4200, 2)
    assert looked(odd)
    assert not looked(odd, backend="numpy")
    assert not looked(odd[:500])
    assert not looked(rng.normal(size=(4200, 2)))
    assert not looked(zeros(rng, 4200, 5))


# --- the price ------------------------------------------------------------------------------------------------------


def test_a_sample_is_not_taken_of_calls_that_a_device_may_replay():
    from sdkde_core.estimator.graphs import PAIRS

    problem, _ = posed(zeros(np.random.default_rng(0), 3000, 2))
    large = dataclasses.replace(problem, n=PAIRS, m=1, same=False)
    for device, n, taken in (("cuda:0", 3000, False), ("cuda:0", PAIRS // 3000, False), ("cuda:0", PAIRS, True)):
        forecast.estimate_on_device(dataclasses.replace(large, m=3000, n=n, device=device))
        assert (problem.sample.taken is not None) is taken
    assert forecast.ON_A_DEVICE >= PAIRS


def test_the_price_says_what_the_backend_does():
    """Box or no box: as the backend decides once it has the points."""
    rng, info = np.random.default_rng(0), registry.find("fourier").info
    for kind, h, d in ((zeros, 0.01, 2), (clusters, 0.2, 3), (heavy, 0.3, 1), (heavy, 0.1, 2), (clusters, 2.0, 1)):
        problem, columns = posed(kind(rng, 5000, d) / h)
        told = info.supports(problem).reason
        state = FourierBackend(1).prepare(problem, columns)
        assert ("modes" in told) == (state.series is not None), told


def test_at_one_extent_clusters_are_dearer_than_points_apart():
    rng, info = np.random.default_rng(0), registry.find("fourier").info
    together = clusters(rng, 20_000, 2)
    apart = np.abs(together).max() * rng.uniform(-1.0, 1.0, (20_000, 2))
    cheap, dear = (price.seconds(info.work(posed(x)[0], None)) for x in (apart, together))
    assert dear > 10 * cheap


# --- equal points are summed once -----------------------------------------------------------------------------------


def test_neighbourhoods_of_columns_whose_weights_all_underflow():
    points = np.random.default_rng(0).normal(size=(8, 3))
    problem = Problem(Reduction.MEAN, 8, 8, 3, requires=frozenset({"weights"}), extent=3.0)
    found = around(problem, points, points, np.full(8, -2000.0), merges=True)
    assert np.isfinite(found.neighbours).all() and (found.sums == 0).all()


@pytest.mark.parametrize("d", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_equal_points_are_summed_once_and_right(d, reduction):
    rng = np.random.default_rng(d)
    points, rows = zeros(rng, 3000, d) / 0.01, zeros(rng, 200, d) / 0.01
    log_weights = np.log(rng.exponential(size=3000)) - math.log(3000)
    columns = Columns(points, log_weights)
    search = duplicates.Distinct(columns, 1)
    problem = Problem(reduction, 200, 3000, d, requires=frozenset({"weights"}))
    got = search.reduce(problem, rows, None)
    assert errors(problem, got, reference.sums(rows, points, log_weights=log_weights)).max() <= 0.2
    first, _ = duplicates.distinct(points)
    assert len(first) == len(np.unique(points, axis=0)) < 2900
    own = Problem(reduction, 200, 3000, d, same=True, requires=frozenset({"weights", "exclude_self"}))
    got = search.reduce(own, points[:200], np.arange(200))
    arrays = (got.log_sum, got.shift, got.sign, got.log_magnitude)
    for row in range(0, 200, 20):  # each leaves out its own one of the equal columns
        keep = np.arange(3000) != row
        one = reference.sums(points[row : row + 1], points[keep], log_weights=log_weights[keep])
        mine = Partial(*(None if a is None else a[row : row + 1] for a in arrays))
        assert errors(own, mine, one)[0] <= 0.2


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


def test_the_command_line_chooses_by_the_samples(monkeypatch):
    """The plan that it shows is made from the shapes; the samples may call for another backend."""
    from sdkde_core.cli import streaming
    from sdkde_core.protocol import Work
    from sdkde_core.scale import files

    (own,) = (r for r in registry.records() if r.name == "numpy")
    asked = []

    def work(problem, config):
        asked.append(problem)
        return Work() if problem.sample is None else Work(scalar_flops=1e15)

    blind = dataclasses.replace(own.info, name="blind", work=work, startup_seconds=0.0)
    monkeypatch.setattr(registry, "records", lambda: (dataclasses.replace(own, name="blind", info=blind), own))
    train, query = (
        files.Source.of(name, np.random.default_rng(0).normal(size=(k, 2))) for name, k in (("x", 50), ("y", 7))
    )
    options = {
        "method": "kde",
        "bandwidth": 1.0,
        "weights": None,
        "precision": "auto",
        "backend": "auto",
        "device": None,
    }
    job = streaming.Stream.of(train, query, log=False, **options)
    assert job.plan.backend == "blind"
    (found,) = job.densities(lambda rows: None)
    assert job.where == "numpy on cpu" and not job.elsewhere and found.shape == (7,)
    assert asked[-1].sample is not None and asked[-1].m == 7
