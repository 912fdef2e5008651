"""The Triton backend passes the suite: on the GPU where there is one, otherwise in Triton's interpreter, on the CPU.

The interpreter rounds nothing: it shows that the kernels compute what they should, and no precision.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import reference
import torch
from interpreter import INTERPRETED, interpreted, run
from sdkde_triton.space import LEAF, Config
from some_of_all import some_of_all

import sdkde_core
from sdkde_core.arrays import to_host
from sdkde_core.choice import registry
from sdkde_core.plugin import each
from sdkde_core.protocol import Columns, Problem, Reduction
from sdkde_core.testing import BackendConformance, problems
from sdkde_core.testing.problems import Case

warns = pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum


def _two_clusters(rng):
    """Neighbours some 20 bandwidths apart, 300 in three dimensions; some of them are one point."""
    x = rng.normal(size=(300, 3)) + np.repeat([[6.0], [-6.0]], 150, axis=0)
    x[3:20] = x[2]
    return x


@interpreted
@warns
@pytest.mark.parametrize(
    ("reduction", "same", "requires", "precision"),
    [
        pytest.param("mean", True, (), "fast", marks=pytest.mark.slow),
        pytest.param("mean", True, (), "high", marks=pytest.mark.slow),
        ("mean", False, ("weights",), "fast"),
        pytest.param("log_sum", True, ("weights",), "fast", marks=pytest.mark.slow),
        pytest.param("laplace", False, ("weights",), "fast", marks=pytest.mark.slow),
        pytest.param("mean", True, ("weights",), "fast", marks=pytest.mark.slow),
        pytest.param("mean", True, ("weights",), "high", marks=pytest.mark.slow),
        pytest.param("log_sum", False, ("weights",), "high", marks=pytest.mark.slow),
        pytest.param("laplace", True, (), "high", marks=pytest.mark.slow),
    ],
)
def test_suite_with_tiles_left_out(reduction, same, requires, precision, monkeypatch):
    """Tiles are small, and lists in several parts; rows in several batches, their last tile not full."""
    import triton.language as tl
    from sdkde_triton import choose, launch, near
    from sdkde_triton.backend import TritonBackend

    rng, looked = np.random.default_rng(3), []
    # Everything small, so that there are several nodes, batches of rows, chunks of these, and parts of lists.
    small = near.AMOUNTS._replace(beside=16, visited=5, entries=64, shortest=2, longest=2)
    for name, value in {"LEAF": 8, "LISTED": 32, "AMOUNTS": small}.items():
        monkeypatch.setattr(near, name, value)
        monkeypatch.setattr(launch, name, value, raising=False)
    monkeypatch.setattr(choose, "WIDE", tl.constexpr(8))
    monkeypatch.setattr(near, "default", lambda *_: Config(64, 32, 4, 1))
    monkeypatch.setattr(near, "steps_at_most", lambda *_: 2)
    plain = near.Pass.list
    monkeypatch.setattr(near.Pass, "list", lambda *arguments: looked.append(plain(*arguments)) or looked[-1])
    x = _two_clusters(rng)
    y = x if same else np.concatenate([x[::2], [[0.0, 0.0, 0.0], [9.0, -9.0, 9.0]]])
    log_w = 2.0 * rng.normal(size=300) if "weights" in requires else np.zeros(300)
    log_w -= np.logaddexp.reduce(log_w)
    how = {"precision": precision, "device": "cpu", "same": same, "extent": 15.0, "weight_span": np.ptp(log_w)}
    problem = Problem(Reduction(reduction), len(y), 300, 3, requires=frozenset(requires), **how)
    backend, queries = TritonBackend(skip=True), None if same else torch.from_numpy(y)
    state = backend.prepare(problem, Columns(torch.from_numpy(x), torch.from_numpy(log_w)))
    got = each(backend.reduce(problem, queries, state), to_host)
    assert len(looked) > 1
    assert max(found.parts for found in looked) > 1
    assert sum(len(found.leaves) for found in looked) < 0.9 * 38 * sum(len(found.which) for found in looked)
    assert problems.errors(problem, got, reference.sums(y, x, log_weights=log_w)).max() < 1.0
    if same:  # a range of them, which are ordered by themselves
        got = each(backend.reduce(replace(problem, m=150), None, state, 70), to_host)
        assert problems.errors(problem, got, reference.sums(y[70:220], x, log_weights=log_w)).max() < 1.0
    order = backend.order(problem, torch.from_numpy(x), Columns(torch.from_numpy(x), torch.from_numpy(log_w))).numpy()
    assert np.array_equal(np.sort(order), np.arange(300))
    state = backend.prepare(problem, Columns(torch.from_numpy(x[order]), torch.from_numpy(log_w[order]), ordered=True))
    rows = order[100:260] if same else backend.order(problem, queries).numpy()
    part = replace(problem, m=len(rows))
    got = each(backend.reduce(part, None if same else queries[rows], state, 100 if same else 0), to_host)
    assert problems.errors(part, got, reference.sums(y[rows], x, log_weights=log_w)).max() < 1.0


@pytest.mark.slow
@interpreted
@warns
def test_rows_that_are_no_numbers_have_an_order_too():
    x = np.random.default_rng(4).normal(size=(100, 3))
    y = x[:70].copy()
    y[[10, 69], [1, 0]] = np.nan
    how = {"bandwidth": 0.5, "backend": "triton", "device": "cpu", "backend_options": {"skip": True}}
    for train, query in ((x, y), (y, None), (y, x)):
        got = sdkde_core.estimate(train, query, check_finite=False, method="kde", **how)
        want = sdkde_core.estimate(x, x[:70], method="kde", **how)
        want[[10, 69] if train is x else slice(None)] = np.nan
        assert np.allclose(got[:70], want, rtol=1e-3, equal_nan=True)


@interpreted
@warns
@pytest.mark.parametrize("rows", [slice(90, 180), slice(0, 180), slice(0, 90, 2)])
def test_rows_that_share_memory_with_columns_need_not_be_columns(rows):
    from sdkde_triton.backend import TritonBackend

    both = torch.from_numpy(np.random.default_rng(3).normal(size=(180, 3)))
    x, y, log_w = both[:90], both[rows], np.full(90, -np.log(90.0))
    problem, backend = Problem(Reduction.LOG_SUM, len(y), 90, 3, device="cpu", extent=15.0), TritonBackend(skip=True)
    got = each(backend.reduce(problem, y, backend.prepare(problem, Columns(x, torch.from_numpy(log_w)))), to_host)
    assert problems.errors(problem, got, reference.sums(y.numpy(), x.numpy(), log_weights=log_w)).max() < 1.0


@interpreted
@warns
@pytest.mark.parametrize("precision", ["fast", pytest.param("high", marks=pytest.mark.slow)])
def test_columns_are_left_out_beside_an_outlier_that_weighs_far_more(precision):
    """Of the shift that both are merged into."""
    info = registry.find("triton").info
    plain = Problem(Reduction.MEAN, 64, 1000, 2, precision=precision, device="cpu", requires=frozenset({"weights"}))
    case = some_of_all(info.extent_limit(plain), LEAF, 0.25, precision)
    problem = case.problem(Reduction.MEAN, precision, device="cpu")
    got = problems.answer(info, info.load({"skip": True}), problem, case)
    assert problems.errors(problem, got, problems.truth(case)).max() < 1.0


class InterpretedConformance(BackendConformance):
    backend = "triton"
    device = "cpu"

    @pytest.mark.skip(reason="Triton's interpreter serves one thread at a time")
    def test_threads(self, parameter):
        """See the same check on a GPU."""


@interpreted
@warns
@pytest.mark.covering(1)
class TestInterpreted(InterpretedConformance):
    dimensions = (5,)
    draws, pairs = 6, 4000
    slow = (
        "drawn",
        "far_below",
        "forked_child",
        "repeat",
        "results_are_the_callers",
        "row_range",
        "state_reuse",
        "sizes",
        *("surroundings", "thread_counts", "many_alive", "new_contents", "limits", "heap"),
    )

    def test_some_of_the_points_are_rows(self):
        """The check ``row_range`` in small."""
        (target,), case = self._targets(), problems.make("mixture", 90, 1, 5, 8.0)
        problem = target.problem(case, Reduction.MEAN, "fast", same=True, whole=True)
        got = target.reduce(replace(problem, m=20), None, target.prepare(problem, case), 65)
        want = problems.truth(case, same=True, rows=np.arange(65, 85))
        assert problems.errors(problem, got, want).max() < 1.0


@interpreted
@warns
@pytest.mark.slow
class TestMoreInterpreted(InterpretedConformance):
    dimensions = (1, 17)  # two dimensions take the kernels of one; the suite on a GPU has them
    draws, pairs = 3, 4000


def _duplicates(d, extent):
    """Rows with duplicates beside a shell of columns that weigh as much: what pieces leave out has one sign here."""
    rng = np.random.default_rng(d)
    centres = rng.normal(size=(8, d))
    axes = np.eye(d)[:4]
    centres[: len(axes)] = axes + 0.01 * centres[: len(axes)]  # large coordinates, too
    centres *= extent / np.sqrt((centres**2).sum(1))[:, None]
    away = rng.normal(size=(8, 1, d))
    away *= 2.9 / np.sqrt((away**2).sum(2, keepdims=True))
    points = np.concatenate([centres, np.repeat(centres[:, None] + away, 60, axis=1).reshape(-1, d)])
    return Case("duplicates", points, points[::7].copy(), np.full(len(points), -math.log(len(points))))


def _check(case, device, reductions=tuple(Reduction), rows=(False, True), precision="fast", most=0.9, **options):
    info = registry.find("triton").info
    for reduction, same in itertools.product(reductions, rows):
        problem = case.problem(reduction, precision, same=same, device=device)
        got = problems.answer(info, info.load(options), problem, case)
        error = problems.errors(problem, got, problems.truth(case, same=same))
        assert error.max() < most, (reduction, same, error.max())


@interpreted
@pytest.mark.parametrize(
    ("kind", "n", "m", "d"),
    [
        ("mixture", 1, 1, 3),
        pytest.param("weights", 34, 3, 1, marks=pytest.mark.slow),
        pytest.param("mixture", 3, 33, 2, marks=pytest.mark.slow),
        ("weights", 129, 1, 17),
    ],
)
def test_interpreted_sizes_that_divide_nothing(kind, n, m, d):
    for precision, rows in (("fast", (False,)), ("high", (True,))):
        _check(problems.make(kind, n, m, d, 10.0), "cpu", precision=precision, rows=rows)


@interpreted
@pytest.mark.parametrize(
    ("reduction", "distance"), [(Reduction.LOG_SUM, 1e9), (Reduction.MEAN, 1e12), (Reduction.LAPLACE, 1e100)]
)
def test_interpreted_rows_far_from_every_point(reduction, distance):
    """The check ``far_below`` in small."""
    _check(problems.far(34, 8, 3, distance, stray=True), "cpu", (reduction,), (False,), precision="high")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("d", [8, 15, 16, 32, 64, 128])
@pytest.mark.parametrize("extent", [6.0, 10.0, 17.0])
def test_interpreted_duplicates_keep_their_weight(d, extent):
    if d <= 16 and extent == 17.0:
        pytest.skip("takes one bit more than the CPU's sums are exact in; see grid_step")
    _check(_duplicates(d, extent), "cpu")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("extent", [13.0, 18.0, 25.0, 36.0])
def test_interpreted_formulas_hold_between_the_suites_extents(d, extent):
    _check(problems.make("mixture", 200, 50, d, extent), "cpu")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "rows"), [("fast", (True,)), ("fast", (False,)), ("high", (True,))])
def test_interpreted_blocks_of_rows_and_columns(precision, rows, monkeypatch):
    """More points than φ is stored of at a time; at "fast", blocks of the points themselves serve rows and columns."""
    from sdkde_triton import launch

    monkeypatch.setattr(launch, "block_points", lambda *arguments: 256)
    case = problems.make("mixture", 300, 270, 130, 7.5)
    _check(case, "cpu", (Reduction.MEAN,), rows, precision=precision)


def _pixels(d, spacing, extent):
    """Black and white images: what two pieces leave out of the spacing counts once for every pixel that differs."""
    rng = np.random.default_rng(d)
    images = (rng.random(d) < 0.5) ^ (rng.random((60, d)) < 0.3)
    log_weights = rng.uniform(-900.0, 0.0, len(images))
    log_weights -= np.log(np.exp(log_weights).sum())
    points = spacing * (images - images[0].astype(float))
    queries = points[:20] + spacing * (rng.random((20, d)) < 0.1)
    queries[0] *= extent / np.sqrt((queries[0] ** 2).sum())
    return Case("pixels", points, queries, log_weights)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.32])  # of the first piece's grid that the second must hold
def test_interpreted_lattices(share):
    spacing = (22 + share) * 2.0**-4 / math.sqrt(math.log2(math.e))
    _check(_pixels(784, spacing, 90.0), "cpu", (Reduction.LOG_SUM, Reduction.LAPLACE), (False,))


def _between_corners(d, extent):
    """Corners of a lattice, two opposite ones heavy, and rows about midway between these.

    All coordinates of a row have the same magnitude, so what its pieces leave out adds up along the way from one corner
    to the other.
    """
    rng = np.random.default_rng(d)
    corners = rng.choice([-1.0, 1.0], size=(60, d))
    corners[1] = -corners[0]
    log_weights = rng.uniform(-30.0, -10.0, len(corners))
    log_weights[:2] = -0.5, -1.0
    log_weights -= np.log(np.exp(log_weights).sum())
    queries = rng.uniform(-2e-3, 2e-3, (50, 1)) * corners[0]
    return Case("between corners", extent / math.sqrt(d) * corners, queries, log_weights)


@interpreted
@pytest.mark.parametrize("extent", [12.0, 14.0])
def test_interpreted_rows_midway_between_corners_of_a_lattice(extent):
    _check(_between_corners(48, extent), "cpu", (Reduction.MEAN,), (False,), precision="high", most=0.5)


def light_between_spots(d, extent, nats, heavy=64):
    """Light points midway between two spots of heavy ones, which weigh about as much there as they do."""
    rng, away = np.random.default_rng(d), np.ones(d) / math.sqrt(d)
    reach = math.sqrt(2.0 * (nats + math.log(heavy)))
    spots = reach * np.repeat([away, -away], heavy, axis=0)
    turned = np.roll(away, 1) * np.where(np.arange(d) % 2, 1.0, -1.0)
    points = np.concatenate([0.05 * rng.normal(size=(24, d)), spots]) + (extent - reach) * turned
    points *= extent / np.linalg.norm(points, axis=1).max()
    log_weights = reference.normalised(np.where(np.arange(len(points)) < 24, -nats, 0.0))
    return Case("light between spots", points, points[:8], log_weights)


@interpreted
@pytest.mark.parametrize("nats", [23.0, pytest.param(40.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("d", "precision"), [(3, "fast"), pytest.param(17, "high", marks=pytest.mark.slow)])
def test_interpreted_points_much_lighter_than_others(d, precision, nats):
    _check(light_between_spots(d, 30.0, nats), "cpu", (Reduction.MEAN,), (True,), precision=precision)


def _crowded(run, fit, sizes):
    """``run`` on a device whose memory suffices for ``fit`` rows; notes how many were asked for."""

    def within(problem, way, points, *others):
        sizes.append(points.shape[0])
        if points.shape[0] > fit:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return run(problem, way, points, *others)

    return within


def _same_bits_in_slabs(monkeypatch, case, device, precision, fit, every=1):
    """Reduce, then again where memory does not suffice for more than ``fit`` rows at a time."""
    from sdkde_triton import backend as module

    record = registry.find("triton")
    backend, d = record.info.load(), case.points.shape[1]
    for reduction, same, weighted in list(itertools.product(Reduction, (False, True), (False, True)))[::every]:
        log_weights = torch.tensor(case.log_weights, device=device)
        if weighted:
            log_weights = torch.log_softmax(torch.linspace(-3.0, 0.0, len(log_weights), device=device).double(), 0)
        more = {"requires": {"weights"}} if weighted else {}
        problem = case.problem(reduction, precision, same=same, device=device, **more)
        columns = Columns(torch.tensor(case.points, device=device), log_weights)
        queries = None if same else torch.tensor(case.queries, device=device)
        whole = backend.reduce(problem, queries, backend.prepare(problem, columns))
        sizes: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(module, "_run", _crowded(module._run, fit, sizes))
            parts = backend.reduce(problem, queries, backend.prepare(problem, columns))
        if d > 128 and precision == "fast" and same and not weighted and reduction is Reduction.MEAN:
            continue  # φ of rows and columns at once: fewer rows have no columns among them
        assert max(sizes) > fit >= min(sizes)
        for name in ("log_sum", "shift", "sign", "log_magnitude"):
            a, b = getattr(whole, name), getattr(parts, name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), (reduction, same, weighted, name)


@interpreted
@pytest.mark.slow
def test_interpreted_memory_changes_no_bits(monkeypatch):
    # One dimension, so without products: those of NumPy round by a row's place among the others.
    _same_bits_in_slabs(monkeypatch, problems.make("mixture", 600, 520, 1, 8.0), "cpu", "fast", 300, every=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("d", [1, 2, 5, 16, 64, 130])
def test_memory_changes_no_bits(d, precision, monkeypatch):
    _same_bits_in_slabs(monkeypatch, problems.make("mixture", 3000, 900, d, 8.0), "cuda:0", precision, 300)


no_gpu = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="there is a GPU, or the test starts this")

#: What one process interprets: stages, so that several can at once.
STAGES = {
    "suite": "TestInterpreted or left_out or no_numbers",
    "more dimensions": "TestMoreInterpreted",
    "more": "test_interpreted",
}


@no_gpu
@pytest.mark.parametrize(
    ("stage", "marked"),
    [
        ("suite", "not slow and not gpu"),
        pytest.param("more", "not slow and not gpu", marks=pytest.mark.slow),
        *(pytest.param(stage, "slow and not gpu", marks=pytest.mark.slow) for stage in STAGES),
    ],
)
def test_in_the_interpreter(stage, marked):
    run(__file__, marked, STAGES[stage])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTriton(BackendConformance):
    backend = "triton"
    device = "cuda:0"
    profile = "full"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("d", "skip"), [(2, True), (8, True), (16, True), (3, False), (16, False), (64, False)])
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("nats", [23.9, 40.0])
def test_points_much_lighter_than_others(d, skip, precision, nats):
    for extent, heavy in itertools.product((11.0, 35.9), (64, 2048)):
        case = light_between_spots(d, extent, nats, heavy)
        _check(case, "cuda:0", (Reduction.MEAN,), (True,), precision=precision, most=1.0, skip=skip)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("d", [2, 8, 15, 16, 17, 32, 48, 64, 128, 384, 784])
@pytest.mark.parametrize("extent", [6.0, 10.0, 13.0, 17.0, 20.0, 30.0, 60.0])
def test_duplicates_and_mixtures_between_the_suites_extents(d, extent):
    _check(_duplicates(d, extent), "cuda:0")
    if d >= 64:
        _check(_pixels(d, 30.0 / math.sqrt(d), extent), "cuda:0", (Reduction.LOG_SUM, Reduction.LAPLACE), (False,))
        for precision, within in (("fast", 36.0), ("high", 15.0 if d <= 128 else 8.0)):
            if extent < within:
                _check(_between_corners(d, extent), "cuda:0", (Reduction.MEAN,), (False,), precision=precision)
    _check(problems.make("mixture", 600, 100, d, extent), "cuda:0")
