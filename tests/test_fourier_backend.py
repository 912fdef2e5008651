"""Fourier sums beyond the suite, by finufft and by PyTorch: error bounds, boxes, rows that are redone."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import reference

import sdkde_core
from sdkde_core.arrays import convert
from sdkde_core.choice import registry
from sdkde_core.plugin import each
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction
from sdkde_core.testing.problems import Case, answer, errors, make, truth

pytest.importorskip("finufft")
torch = pytest.importorskip("torch")

from sdkde_fourier import bounds, device, modes  # noqa: E402
from sdkde_fourier.backend import FourierBackend, finufft, to_modes, to_points  # noqa: E402

NAMES = ("fourier", "fourier-torch")
DIMENSIONS = (1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3)))


def _mixture(d, n, m, width=20.0):
    rng = np.random.default_rng([0, d, n])
    means = 2.0 * rng.normal(size=(8, d))
    x, y = (means[rng.integers(0, 8, k)] + rng.normal(size=(k, d)) for k in (n, m))
    return Case("mixture", x * width / 6.0, y * width / 6.0, np.full(n, -math.log(n)))


def _prepared(name, problem, case, **options):
    """A backend and its state of a case's columns."""
    info = registry.find(name).info
    backend = info.load(options)
    return backend, backend.prepare(
        problem, Columns(*(convert(x, info.arrays, "cpu") for x in (case.points, case.log_weights)))
    )


def _worst(name, problem, case, rows=slice(None), **options):
    """The largest error over the tolerance, of some rows."""
    info = registry.find(name).info
    got = answer(info, info.load(options), problem, case)
    rows = np.arange(problem.m)[rows]
    return errors(problem, each(got, lambda x: x[rows]), truth(case, same=problem.same, rows=rows)).max()


def _box(problem, points, epsilon):
    """The box around all points."""
    ends = points.min(axis=0), points.max(axis=0)
    return modes.choose_box(problem, ends, points, epsilon, lambda shape, share, *far: math.inf if share else 0.0)[0]


def _sums(reduction, points, weights, rows):
    """S; and MEAN's Σ w φ (u_j − y), by dimension, or LAPLACE's L."""
    step = points[None] - rows[:, None]
    r2 = (step**2).sum(-1)
    phi = weights * np.exp(-0.5 * r2)
    means = list((phi[..., None] * step).sum(1).T) if reduction is Reduction.MEAN else []
    laplace = [(phi * (1.0 + 0.5 * points.shape[1] - 0.5 * r2)).sum(1)] if reduction is Reduction.LAPLACE else []
    return np.array([phi.sum(1), *means, *laplace])


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_transforms_err_less_than_their_bound(d, reduction):
    """Sources that all coincide, where errors add up, against sums in float64; at every tolerance."""
    rng = np.random.default_rng(d)
    points = np.repeat(rng.uniform(-8, 8, (3, d)), 20, axis=0)
    rows = np.concatenate([points[::20], points[rng.integers(0, 60, 150)] + rng.normal(size=(150, d))])
    weights = np.full(60, 1 / 60)
    for epsilon in (1e-7, 1e-9, 1e-11, 1e-13):
        problem = Problem(reduction, len(rows), 60, d)
        box = _box(problem, points, epsilon)
        rows = rows[box.holds(rows, -box.margin)]
        series = to_modes(box.angles(points), weights, box.shape, epsilon, 1)
        packed = to_points(box.angles(rows), modes.fields(problem, box, series, bounds.cutoff(epsilon)), epsilon, 1)
        got = [part for field in packed for part in (field.real, field.imag)]
        want = _sums(reduction, points, weights, rows)
        largest = modes.density_bound(box, points, weights)
        assert largest >= max(want[0])
        allowed = bounds.error(epsilon, largest, box.period.max())
        scale = 1 + d / 2 if reduction is Reduction.LAPLACE else 1.0
        for a, b, by in zip(got, want, (1.0, scale, 1.0, 1.0)):
            assert abs(a - b).max() <= allowed * by
        assert allowed < 20 * epsilon + 1e-13  # and the bound is worth something


@pytest.mark.parametrize("d", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_products_are_the_sums(d, reduction):
    """Cosines and sines in blocks, and in one dimension of two factors: to rounding."""
    rng = np.random.default_rng(d)
    points, rows = 3.0 * rng.normal(size=(5000, d)), 3.0 * rng.normal(size=(40, d))
    weights = rng.dirichlet(np.ones(5000))
    problem = Problem(reduction, 40, 5000, d)
    basis = device.Basis(_box(problem, points, 1e-13), torch.device("cpu"), 1 << 20)
    found = device.to_modes(basis, torch.tensor(points), torch.tensor(weights))
    coefficients = device.fields(problem, basis, found)
    got = device.to_points(basis, torch.tensor(rows), coefficients, reduction is Reduction.MEAN).numpy()
    assert np.abs(got - _sums(reduction, points, weights, rows)).max() < 2e-13


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_columns_outside_the_box_are_counted(name, d):
    """A few points far out: the box is of the others. The answers are right, near what is outside and far."""
    case = _mixture(d, 6000, 400)
    rng = np.random.default_rng(d)
    far = rng.choice(6000, 60, replace=False)
    case.points[far] += rng.standard_t(2, (60, d)) * (60.0 if name == "fourier" else 600.0)
    case.points[far[0]] = 1e7
    case.queries[:60] = case.points[far] + rng.normal(size=(60, d))
    case.queries[60:160] = case.points[far[rng.integers(0, 60, 100)]] * rng.random((100, 1))
    for reduction in Reduction:
        problem = case.problem(reduction, "high")
        _, state = _prepared(name, problem, case, always=True)
        assert state.series is not None and state.series.outside is not None
        assert _worst(name, problem, case, slice(0, 400, 5), always=True) <= 1.0


@pytest.mark.parametrize("d", [1, 2, 3])
def test_rows_far_from_every_point_are_redone(d):
    case = _mixture(d, 3000, 300)
    case.queries[:] *= np.linspace(1.0, 1e4, 300)[:, None]
    for reduction in Reduction:
        assert _worst("fourier", case.problem(reduction, "high"), case, slice(0, 300, 4), always=True) <= 1.0


@pytest.mark.parametrize("precision", [pytest.param("high", marks=pytest.mark.slow), "float64"])
def test_a_prepared_density_answers_far_rows_itself(precision):
    """Rows beyond the box of modes are summed over their neighbours, by the backend that was chosen."""
    x = np.random.default_rng(0).normal(size=(20_000, 2))
    axis = np.linspace(-8.0, 8.0, 24)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    ready = sdkde_core.prepare(x, method="kde", bandwidth=0.1, precision=precision)
    assert ready.backend == "fourier"
    got, want = ready.estimate(grid, log=True), reference.estimate(x, grid[::5], method="kde", bandwidth=0.1, log=True)
    assert ready.backend == "fourier" and want.min() < -1500.0
    assert (np.abs(got[::5] - want) <= TOLERANCES[precision][Reduction.LOG_SUM].at(want)).all()
    named = sdkde_core.prepare(x, method="kde", bandwidth=0.1, precision=precision, backend="fourier")
    assert np.array_equal(got, named.estimate(grid, log=True))


def test_a_row_midway_between_far_columns_is_balanced_as_float64_allows():
    """Half of the squared distances, 10¹⁰, is right to some roundings, 10⁻⁶ each; the shift is that times 10⁵."""
    left, right, row = -289160.97160250205, -537.331899748747, -144849.15175112538
    exponent = (Fraction(right) - Fraction(left)) * (Fraction(left) + Fraction(right) - 2 * Fraction(row)) / 2
    share = 1 / (1 + math.exp(exponent))  # of the right column
    want = share * (right - row) + (1 - share) * (left - row)
    case = Case("two", np.array([[left], [right]]), np.array([[row]]), np.full(2, -math.log(2.0)))
    problem = case.problem(Reduction.MEAN, "float64")
    got = answer(registry.find("fourier").info, FourierBackend(), problem, case)
    roundings = 2.0**-53 * (right - row) ** 2 / 2
    assert abs(got.shift[0, 0] - want) < 2 * roundings * (right - left) / 2


def test_tiny_bandwidths_take_no_modes():
    """Where the bandwidth is small against the spacing, rows are summed over their few neighbours."""
    rng = np.random.default_rng(0)
    case = Case("sparse", 1e6 * rng.random((5000, 3)), 1e6 * rng.random((50, 3)), np.full(5000, -math.log(5000)))
    problem = case.problem(Reduction.MEAN, "high")
    assert _prepared("fourier", problem, case)[1].series is None
    assert _worst("fourier", problem, case) <= 1.0


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize(
    ("name", "n", "options"), [("fourier", 70_000, {"threads": 2}), ("fourier-torch", 20_000, {"always": True})]
)
def test_same_bits_with_threads(name, n, options, d):
    """The same bits again and again, also where several call at once."""
    case = _mixture(d, n, n, width=30.0 if d < 3 else 12.0)
    case.points[:30] *= 10.0
    problem = case.problem(Reduction.MEAN, "high")
    info = registry.find(name).info
    backend = info.load(options)
    with ThreadPoolExecutor(2) as pool:
        first, *others = pool.map(lambda _: answer(info, backend, problem, case), range(4))
    for again in others:
        assert np.array_equal(first.log_sum, again.log_sum) and np.array_equal(first.shift, again.shift)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("always", [False, True])
def test_what_is_not_a_number_stays_in_its_row(name, d, always):
    """Rows that are not numbers, beside lonely ones; infinite columns; columns that are not numbers."""
    rng = np.random.default_rng(d)
    x, y = rng.normal(size=(500, d)), 0.5 * rng.normal(size=(64, d)) + 6.0
    options = {"method": "kde", "bandwidth": 0.3, "log": True, "check_finite": False, "device": "cpu"}
    mine = {"backend": name, "backend_options": {"always": always}}
    want = sdkde_core.estimate(x, y, backend="numpy", **options)
    for few in (5, [1, 5, 40]):
        rows = y.copy()
        rows[few] = np.nan
        for some in (rows, rows[:8]):
            got = sdkde_core.estimate(x, some, **mine, **options)
            lost = np.isnan(some).any(axis=1)
            assert np.isnan(got[lost]).all()
            np.testing.assert_allclose(got[~lost], want[: len(some)][~lost], rtol=1e-6)
    x[7] = np.nan
    assert np.isnan(sdkde_core.estimate(x, y, **mine, **options)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_weight", [-600.0, -720.0, -735.0, -800.0, -3000.0])
def test_weights_near_the_end_of_float64(name, log_weight):
    """A shard of the columns, whose weights underflow or nearly do: summed directly, in the log domain."""
    rng = np.random.default_rng(0)
    case = Case("light", rng.normal(size=(300, 2)), rng.normal(size=(50, 2)), np.full(300, log_weight))
    case.queries[:5] += 30.0
    assert _worst(name, case.problem(Reduction.MEAN, "high"), case, always=True) <= 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [("fourier", {"threads": 0}), ("fourier", {"threads": True}), *((name, {"always": 1}) for name in NAMES)],
)
def test_options_are_checked(name, options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        registry.find(name).info.load(options)


def test_listing_it_does_not_import_finufft():
    code = "import sys, sdkde_core; sdkde_core.backends(); import sdkde_fourier.info; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "finufft" not in done.stdout.split()


def test_the_suite_s_cases_are_transformed():
    """The conformance run with ``always`` would prove nothing if it never transformed."""
    case = make("mixture", 211, 67, 3, 10.0)
    assert _prepared("fourier", case.problem(Reduction.MEAN, "high"), case, always=True)[1].series is not None


def test_finufft_s_failures_to_allocate_are_memory_errors(monkeypatch):
    def plan(kind, *arguments, **options):
        raise RuntimeError({1: "FINUFFT general malloc failure", 2: "FINUFFT transform type invalid"}[kind])

    monkeypatch.setattr(finufft, "Plan", plan)
    angles, field = [np.zeros(3)], np.ones(5, complex)
    with pytest.raises(MemoryError, match="FINUFFT general malloc"):
        to_modes(angles, np.ones(3), (5,), 1e-9, 1)
    with pytest.raises(RuntimeError, match="invalid"):
        to_points(angles, [field], 1e-9, 1)
