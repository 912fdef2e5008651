"""Rows shared out among several devices: the numbers of one, and which lists of devices can be."""

import sys
from dataclasses import replace

import blocks
import numpy as np
import pytest
import reference
import sdkde_hopper.info
from array_api_compat import is_torch_array
from pairwise import cases
from plugins import good, installer  # noqa: F401 - the fixture ``install``
from sdkde_numpy.backend import NumpyBackend

import sdkde_core
from sdkde_core.choice import registry, select
from sdkde_core.choice.hardware import cpu
from sdkde_core.engine.columns import PackedColumns
from sdkde_core.estimator import request
from sdkde_core.protocol import BackendUnavailable, Columns, Problem, Reduction, Support
from sdkde_core.spreading.devices import OnDevices
from sdkde_core.spreading.tasks import dealt, tasks_of

INFO = registry.find("numpy").info
N, M, D = 3149, 2053, 2


@pytest.fixture
def points():
    x = np.random.default_rng(3).normal(size=(N, D))
    x[::500] *= 2e4  # outliers, in several devices' shares
    return x


@pytest.fixture
def queries():
    y = np.random.default_rng(4).normal(size=(M, D)) * 1.5
    y[2045:] *= 3e4  # in the last share alone
    return y


def spread(points, number, reduction, weighted):
    log_weights = np.full(N, -np.log(N))
    if weighted:
        log_weights = np.random.default_rng(5).normal(size=N)
        log_weights -= np.logaddexp.reduce(log_weights)
        log_weights[7] = -np.inf
    extent = 2.0 ** np.ceil(np.log2(6e4 * 5))
    features = frozenset({"weights"} if weighted else ())
    problem = Problem(reduction, m=N, n=N, d=D, requires=features, extent=extent, precision="high")
    info = replace(INFO, extent_limit=lambda problem: 1000.0)  # so that outliers are summed apart
    return OnDevices(["cpu"] * number, info.load(), info, problem, Columns(points, log_weights)), log_weights


@pytest.mark.parametrize(("reduction", "weighted"), cases(Reduction, [False, True], strength=1))
def test_the_same_numbers_on_several_devices_beside_outliers(points, queries, reduction, weighted):
    answers = []
    for number in (1, 3):
        several, log_weights = spread(points, number, reduction, weighted)
        answers.append([several.reduce(), several.reduce(queries), several.reduce(some=(1024, 2048))])
    for (a, a_far), (b, b_far) in zip(*answers, strict=True):
        assert a_far >= b_far > 0
        for name in ("log_sum", "shift", "sign", "log_magnitude"):
            assert getattr(a, name) is None or np.allclose(getattr(a, name), getattr(b, name), 3e-6, 1e-5)
    (own, _), (at_queries, _), (some, _) = answers[1]
    assert np.allclose(some.log_sum, own.log_sum[1024:2048], 3e-6, 1e-5)
    for got, rows in ((own, points), (at_queries, queries)):
        picked = np.r_[:9, 500:502, len(rows) - 9 : len(rows)]
        want = reference.sums(rows[picked], points, log_weights=log_weights, plain=True)
        log_sum = want.log_plus if reduction is Reduction.LAPLACE else want.log_sum
        assert np.allclose(got.log_sum[picked], log_sum, 3e-6, 1e-5)


def by_pairs(x, extent, limit=np.inf):
    """All points as rows on 2, 3 and 5 devices, by a backend that takes each pair once; the bits are the same."""
    problem = Problem(Reduction.MEAN, m=len(x), n=len(x), d=D, extent=extent, precision="high", same=True)
    columns = Columns(x, np.full(len(x), -np.log(len(x))))
    info = replace(
        blocks.INFO,
        extent_limit=lambda problem: limit,
        supports=lambda problem: Support(problem.extent <= limit, "up to a limit"),  # beyond: exact sums
    )
    backend = blocks.NumpyBackend()
    backend.reduce = None  # so that blocks of pairs are all that is asked for
    first, *others = (OnDevices(["cpu"] * k, backend, info, problem, columns).reduce() for k in (2, 3, 5))
    for other, _ in others:
        assert np.array_equal(other.log_sum, first[0].log_sum) and np.array_equal(other.shift, first[0].shift)
    return first


@pytest.mark.parametrize("away", [0.0, 15.0, 1e4])
def test_pairs_of_points_are_taken_once(away):
    """Beside outliers that near rows feel, and such as they do not; more of them than exact sums take at once."""
    x = np.random.default_rng(6).normal(size=(N, D))
    far = np.r_[3, 900:930, N - 1]
    x[far] += [away, 0.0]
    got, apart = by_pairs(x, 2.0 * away, 10.0) if away else by_pairs(x, 8.0)
    picked = np.r_[:9, 895:935, 1021:1027, N - 9 : N]
    want = reference.sums(x[picked], x, plain=True)
    assert np.allclose(got.log_sum[picked], want.log_sum, 1e-6, 1e-5)
    assert np.allclose(got.shift[picked], want.shift, 0, 9e-6)
    assert apart == (len(far) if away else 0)


@pytest.mark.parametrize(("d", "requires", "once"), [(16, set(), True), (17, set(), False), (16, {"weights"}, False)])
def test_blocks_of_pairs_are_dealt_where_a_backend_says_that_it_takes_each_pair_once(d, requires, once):
    n = 3 << 16  # as the Hopper backend says it
    problem = Problem(Reduction.MEAN, n, n, d, precision="fast", same=True, requires=frozenset(requires), extent=8.0)
    columns = Columns(np.zeros((n, d)), np.full(n, -np.log(n)))
    for features in (blocks.INFO.features, INFO.features):
        info = replace(blocks.INFO, supports=sdkde_hopper.info.INFO.supports, features=features)
        tasks = tasks_of(PackedColumns(blocks.NumpyBackend(), info, problem, columns), 4)
        pairs = once and "pairs" in features
        assert {task.kind for task in tasks} == {"pairs" if pairs else "rows"}
        shares = [sum(tasks[i].work for i in mine) for mine in dealt(tasks, 4)]
        assert shares == [n * n / (8 if pairs else 4)] * 4


def test_a_backend_that_takes_host_arrays_needs_no_pytorch(points, queries, monkeypatch):
    assert not is_torch_array(points)  # array_api_compat keeps that, and does not expect a None among the modules
    monkeypatch.setitem(sys.modules, "torch", None)
    problem = Problem(Reduction.LOG_SUM, m=N, n=N, d=D, extent=2.0**20, precision="high", device="cuda:0")
    columns = Columns(points, np.full(N, -np.log(N)))
    two, one = (OnDevices(on, INFO.load(), INFO, problem, columns) for on in (["cuda:0", "cuda:1"], ["cpu"]))
    assert np.allclose(two.reduce(queries)[0].log_sum, one.reduce(queries)[0].log_sum, 1e-6, 1e-5)


@pytest.fixture
def two(monkeypatch):
    """The CPU counts as two devices, of any number that is asked for."""
    monkeypatch.setattr(
        request, "parse_device", lambda device: ("cpu",) * device if isinstance(device, int) else device
    )


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_estimates_on_several_devices(two, method):
    x = np.random.default_rng(0).normal(size=(2113, 3))  # each of three devices has a share
    how = {"method": method, "bandwidth": 0.5, "backend": "numpy"}
    for query in (None, x[:1500] * 2):
        plain = sdkde_core.estimate(x, query, **how)
        several, twice = (sdkde_core.estimate(x, query, device=3, **how) for _ in range(2))
        assert np.array_equal(several, twice)
        assert np.allclose(plain, several, rtol=3e-5, atol=1e-9 * plain.max())
    prepared = sdkde_core.prepare(x, device=2, **how)
    assert np.array_equal(sdkde_core.estimate(x, query, device=2, **how), prepared.estimate(query))
    assert prepared.device == "cpu, cpu"
    assert "cpu, cpu" in str(sdkde_core.explain(x, device=2, **how))


class InOrder(NumpyBackend):
    """It has neighbours in one dimension together, and notes which columns and rows come so."""

    def __init__(self):
        super().__init__()
        self.asked, self.columns, self.rows = [], [], []

    def order(self, problem, points, columns=None):
        assert columns is None or columns.points is points
        self.asked.append((problem.m, columns is not None))
        return np.argsort(points[:, 0], kind="stable") if problem.m >= 20 else None

    def prepare(self, problem, columns):
        self.columns.append((problem.reduction, columns.ordered, _steps(columns.points)))
        return super().prepare(problem, columns)

    def reduce(self, problem, queries, state, own_offset=0):
        rows = state.points[own_offset : own_offset + problem.m] if queries is None else queries
        self.rows.append(_steps(rows))
        return super().reduce(problem, queries, state, own_offset)


IN_ORDER = InOrder()


def in_order():
    return IN_ORDER


def _steps(points):
    """How far apart consecutive points are in the first dimension, in the median; of a few outliers 0."""
    return np.median(np.abs(np.diff(points[:, 0]))) if len(points) > 9 else 0.0


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_backends_order_holds_for_all_passes_and_changes_no_result(two, number, monkeypatch):
    found = IN_ORDER
    info = replace(
        INFO, features=INFO.features | {"order"}, implementation=f"{__name__}:in_order", extent_limit=lambda _: 1000.0
    )
    record = replace(registry.find("numpy"), info=info)
    monkeypatch.setattr(registry, "records", lambda: (record,))
    rng = np.random.default_rng(7)
    every, y, w = rng.normal(size=(4_111, 2)), rng.normal(size=(503, 2)), rng.random(4_111)
    every[[5, 900]], y[3], w[::7] = [[1e4, 0.0], [-3e4, 9.0]], 2e4, 0.0
    few = 1_511 if number == 1 else 4_111  # for several devices blocks of 4096 come in turn
    for how in ({}, {"weights": w[:few]}, {"tails": "guard"}, {"adaptive": 0.25}, {"method": "laplace"}):
        x = every if "tails" in how else every[:few]  # the guard takes at most 4096
        for query in (y, None):
            found.asked.clear(), found.columns.clear(), found.rows.clear()
            got = sdkde_core.estimate(x, query, bandwidth=0.3, device=number, **how)
            of_samples = len(x) if how.get("method") != "laplace" or query is None else 503
            assert found.asked == [(-(-of_samples // number), True), (-(-503 // number), False)][: 1 + (query is y)]
            first, columns, rows = found.columns[0], found.columns.copy(), found.rows.copy()
            with monkeypatch.context() as patch:
                patch.setattr(found, "order", lambda *unused: None)
                want = sdkde_core.estimate(x, query, bandwidth=0.3, device=number, **how)
            assert np.allclose(got, want, rtol=2e-5, atol=1e-12)
            assert first[1] and first[2] < 1e-2 and max(rows) < 0.1, (how, first, rows)
            if "tails" not in how:  # whose guard takes every k-th sample, as they came
                assert all(ordered and (steps < 0.1 or "adaptive" in how) for _, ordered, steps in columns), (
                    how,
                    columns,
                )
    found.asked.clear()
    assert sdkde_core.estimate(x, y[:4], bandwidth=0.3, method="kde", device=number).shape == (4,)
    assert found.asked == [(-(-4 // number), True)]  # so few rows that nothing is put in order
    moved = sdkde_core.debias(x, bandwidth=0.3, device=number)
    monkeypatch.setattr(found, "order", lambda *unused: None)
    assert np.allclose(moved, sdkde_core.debias(x, bandwidth=0.3, device=number), atol=2e-5)


def test_more_devices_than_rows(two):
    x = np.random.default_rng(0).normal(size=(5, 3))
    for query in (None, x[:1]):
        plain, several = (sdkde_core.estimate(x, query, device=k, backend="numpy") for k in ("cpu", 7))
        assert np.allclose(plain, several, rtol=3e-5)


def test_gradients_are_for_one_device(two):
    torch = pytest.importorskip("torch")
    x = torch.zeros((9, 2), dtype=torch.float64).normal_().requires_grad_()
    with pytest.raises(ValueError, match="one device"):
        sdkde_core.estimate(x, bandwidth=1.0, device=2)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (["cuda:0", "cuda:0"], "twice"),
        (["cpu", "cuda:0"], "'cpu' in a list"),
        (["cuda"], "by number"),
        (["cuda:0", "mps:0"], "one kind"),
        ([], "one or more"),
        (["gpu:0"], "pass None, or one of"),
    ],
)
def test_lists_of_devices_that_cannot_be(device, words):
    with pytest.raises(ValueError, match=words):
        sdkde_core.estimate([[0.0], [1.0]], device=device)


def test_all_devices_where_there_is_none(monkeypatch):
    monkeypatch.setattr(select, "visible_gpus", lambda: ())
    with pytest.raises(BackendUnavailable, match="no CUDA device is here"):
        sdkde_core.estimate([[0.0], [1.0]], device="cuda:all")
    monkeypatch.setattr(select, "visible_gpus", lambda: ("a", "b"))
    assert select.parse_device("cuda:all") == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(("launches", "count"), [(1, 4), (500, 2), (5000, 1)])
def test_as_many_of_all_devices_as_pay(launches, count, install):
    """One host launches for all of them."""
    work = f"work=lambda p, c: Work(scalar_flops={4e-5 * cpu().scalar_flops} * p.m, launches={launches})"  # 40 ms
    install("many", "many", good("many", "many", more=work))
    choice = select.choose(
        [Problem(Reduction.LOG_SUM, 1000, 10, 2)], backend="many", device=select.AllGpus(["cpu"] * 4)
    )
    assert max(1, len(choice.devices)) == count


def test_a_device_that_does_not_work_is_named(monkeypatch):
    monkeypatch.setattr(request, "parse_device", lambda device: device)
    with pytest.raises(BackendUnavailable, match="cannot use cuda:7"):
        sdkde_core.estimate(np.zeros((9, 2)), bandwidth=1.0, backend="numpy", device=("cpu", "cuda:7"))


def test_an_estimator_on_several_devices_is_cloned_and_saved(two, tmp_path):
    sklearn = pytest.importorskip("sklearn")
    x = np.random.default_rng(0).normal(size=(60, 2))
    model = sdkde_core.KernelDensity(device=("cpu", "cpu"), backend="numpy").fit(x)
    assert sklearn.clone(model).device == ("cpu", "cpu")
    model.save(tmp_path / "model.sdkde")
    loaded = sdkde_core.load(tmp_path / "model.sdkde")
    assert loaded.device == ["cpu", "cpu"]
    assert np.array_equal(loaded.score_samples(x), model.score_samples(x))
