"""Zero-inflated, count, clustered and outlying data: what is priced from a sample, summed once, and given up."""

import dataclasses
import math
import warnings
import weakref

import numpy as np
import pytest

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.engine.scales import reduce_pass
from sdkde_core.estimator import plan as planning
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.estimator.sample import SIZE, Sampler
from sdkde_core.protocol import Columns, NotWorthIt, Partial, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import errors

pytest.importorskip("finufft")

from sdkde_fourier import backend as module
from sdkde_fourier import duplicates, forecast, neighbours, price
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_pairs_of_neighbours_are_known_from_a_sample(kind, d, monkeypatch):
    counted = []
    original = price.by_pairs
    monkeypatch.setattr(neighbours, "by_pairs", lambda *found: counted.append(found[1:]) or original(*found))
    rng = np.random.default_rng(d)
    points, rows = kind(rng, 10_000, d) / KINDS[kind], kind(rng, 3000, d) / KINDS[kind]
    for queries in (None, rows):
        problem, columns = posed(points, queries, worth=0.0)
        sample = problem.sample()
        found = around(problem, sample.rows, sample.columns, sample.log_weights, True)
        search = neighbours.Neighbourhoods(columns, 1)
        with pytest.raises(NotWorthIt):  # pairs are counted before they are summed
            search.reduce(problem, points if queries is None else queries, None, 1.0, price.Limit(problem))
        ((distinct, pairs),) = counted
        assert 0.5 < found.rows / distinct < 2.0
        assert 0.4 < found.rows * found.neighbours.mean() / pairs < 2.5
        counted.clear()


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
    search = neighbours.Neighbourhoods(columns, 1)
    problem = Problem(reduction, 200, 3000, d, requires=frozenset({"weights"}))
    got = search.reduce(problem, rows, None, 1.0)
    assert errors(problem, got, reference.sums(rows, points, log_weights=log_weights)).max() <= 0.2
    assert len(search._merged.points) == len(np.unique(points, axis=0)) < 2900
    own = Problem(reduction, 200, 3000, d, same=True, requires=frozenset({"weights", "exclude_self"}))
    got = search.reduce(own, points[:200], np.arange(200), 1.0)
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


# --- what is not worth it -------------------------------------------------------------------------------------------


def backends():
    yield FourierBackend(1)
    if registry.find("fourier-torch").ok:
        from sdkde_fourier.device import TorchFourierBackend

        yield TorchFourierBackend()


@pytest.mark.parametrize("backend", list(backends()), ids=lambda b: type(b).__name__)
def test_a_run_far_over_its_price_ends_before_it_sums(backend):
    """In prepare, where the columns tell; in reduce, where only the rows do."""

    rng = np.random.default_rng(0)
    info = registry.find("fourier" if isinstance(backend, FourierBackend) else "fourier-torch").info
    bring = np.asarray
    if info.arrays == "torch":
        bring = pytest.importorskip("torch").as_tensor
    points = clusters(rng, 4200, 2) / 0.2
    problem, columns = posed(points)
    problem = dataclasses.replace(problem, sample=None, same=False)
    columns = Columns(bring(columns.points), bring(columns.log_weights))
    predicted = price.seconds(info.work(posed(points)[0], None))
    for worth, ends in ((predicted / 100, True), (10 * predicted, False), (None, False)):
        worthy = dataclasses.replace(problem, worth=worth)
        if ends:
            with pytest.raises(NotWorthIt, match=r"direct sums.* would take .* s or more, and is worth"):
                backend.prepare(worthy, columns)
        else:
            backend.reduce(worthy, bring(points), backend.prepare(worthy, columns))
    state = backend.prepare(problem, columns)
    with pytest.raises(NotWorthIt, match="direct sums over"):
        backend.reduce(dataclasses.replace(problem, worth=predicted / 100), bring(points), state)
    again = backend.reduce(problem, bring(points[:50]), state)  # and the state is as it was
    assert np.isfinite(np.asarray(again.log_sum)).all()


@pytest.fixture
def blind(monkeypatch):
    """The Fourier backend priced as if the data were benign, and free to start."""

    from sdkde_core.protocol import Work

    own = registry.find("fourier")
    info = dataclasses.replace(own.info, work=lambda problem, config: Work(), startup_seconds=0.0)
    others = [r for r in registry.records() if r.name == "numpy"]
    records = (dataclasses.replace(own, info=info), *others)
    monkeypatch.setattr(registry, "records", lambda: records)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_auto_takes_the_next_best_where_fourier_gives_up(blind, method):
    x = clusters(np.random.default_rng(0), 1500, 3)
    options = {"method": method, "bandwidth": 0.02, "precision": "fast"}
    assert sdkde_core.explain(x, **options).backend == "fourier"
    worth = planning.plan(Request(Goal.DENSITY, **options), x).problems[-1].worth
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        spend = price.Limit.spend
        patch.setattr(price.Limit, "spend", lambda self, predicted, on: spend(self, 1e6 * predicted, on))
        warnings.simplefilter("error")
        got = [sdkde_core.estimate(x, **options) for _ in range(2)]
        assert sdkde_core.prepare(x, **options).backend == "numpy"
    want = sdkde_core.estimate(x, backend="numpy", **options)
    assert worth > 0 and all(np.array_equal(g, want) for g in got)
    assert not registry.aside


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


def test_what_gives_up_within_a_reduction_of_the_plugin_interface_gives_up():
    """``reduce_pass`` is a backend's own way to the core: what is not worth it there is not worth it."""
    problem, columns = posed(clusters(np.random.default_rng(0), 3000, 2) / 0.2, worth=1e-9)
    info = registry.find("fourier").info
    with pytest.raises(sdkde_core.BackendUnavailable, match="gave up: direct sums"):
        reduce_pass(module.FourierBackend(1), info, problem, columns)
