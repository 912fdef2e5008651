"""The Fourier backend beyond the suite: its error bounds, its boxes, the rows that it redoes, its prices."""

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import sdkde_core
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import Case, errors, make

pytest.importorskip("finufft")

from sdkde_fourier import bounds, modes, transforms
from sdkde_fourier.backend import FourierBackend
from sdkde_fourier.transforms import to_modes, to_points


def _mixture(d, n, m, width=20.0, seed=0):
    rng = np.random.default_rng([seed, d, n])
    means = 2.0 * rng.normal(size=(8, d))
    x, y = (means[rng.integers(0, 8, k)] + rng.normal(size=(k, d)) for k in (n, m))
    return Case("mixture", x * width / 6.0, y * width / 6.0, np.full(n, -math.log(n)))


def _worst(problem, got, case, rows, want=None):
    queries = case.points if problem.same else case.queries
    if want is None:
        want = reference.sums(queries[rows], case.points, log_weights=case.log_weights)
    arrays = (got.log_sum, got.shift, got.sign, got.log_magnitude)
    some = Partial(*(None if a is None else a[rows] for a in arrays))
    return errors(problem, some, want).max()


def _whole_box(problem, points, epsilon):
    ends = points.min(axis=0), points.max(axis=0)
    found = modes.choose_box(problem, ends, points, epsilon, lambda shape, share, *outside: math.inf if share else 0.0)
    return found[0]


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_transforms_err_less_than_their_bound(d, reduction):
    """Sources that all coincide, where errors add up, against sums in float64; at every tolerance."""
    rng = np.random.default_rng(d)
    points = np.repeat(rng.uniform(-8, 8, (3, d)), 20, axis=0)
    rows = np.concatenate([points[::20], points[rng.integers(0, 60, 150)] + rng.normal(size=(150, d))])
    n = len(points)
    for epsilon in (1e-7, 1e-9, 1e-11, 1e-13):
        problem = Problem(reduction, len(rows), n, d)
        box = _whole_box(problem, points, epsilon)
        rows = rows[box.holds(rows, -box.margin)]
        series = to_modes(box.angles(points), np.full(n, 1 / n), box.shape, epsilon, 1)
        packed = to_points(box.angles(rows), modes.fields(problem, box, series, bounds.cutoff(epsilon)), epsilon, 1)
        got = [part for field in packed for part in (field.real, field.imag)]
        step = points[None] - rows[:, None]
        r2 = (step**2).sum(-1)
        phi = np.exp(-0.5 * r2) / n
        want = [phi.sum(1)]
        if reduction is Reduction.MEAN:
            want += list((phi[..., None] * step).sum(1).T)
        if reduction is Reduction.LAPLACE:
            want.append((phi * (1 + d / 2 - r2 / 2)).sum(1) / (1 + d / 2))
            got[1] = got[1] / (1 + d / 2)
        largest = modes.density_bound(box, points, np.full(n, 1 / n))
        assert largest >= max(want[0])
        allowed = bounds.error(epsilon, largest, box.period.max())
        for a, b in zip(got, want):
            assert abs(a - b).max() <= allowed
        assert allowed < 20 * epsilon + 1e-13  # and the bound is worth something


@pytest.mark.parametrize("d", [1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3))])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_outliers_are_left_out_of_the_box_and_counted(d, reduction):
    """Points thrown so far that a box around all has too many modes: the answers are right, near them and far."""
    case = _mixture(d, 6000, 400)
    rng = np.random.default_rng(d)
    far = rng.choice(6000, 60, replace=False)
    case.points[far] += rng.standard_t(2, (60, d)) * 60.0
    case.points[far[0]] = 1e7
    case.queries[:60] = case.points[far] + rng.normal(size=(60, d))
    case.queries[60:160] = case.points[far[rng.integers(0, 60, 100)]] * rng.random((100, 1))
    problem = case.problem(reduction, "high")
    backend = FourierBackend(always=True)
    state = backend.prepare(problem, Columns(case.points, case.log_weights))
    assert state.series is not None and state.series.outside is not None
    got = backend.reduce(problem, case.queries, state)
    assert _worst(problem, got, case, np.arange(0, 400, 5)) <= 1.0


@pytest.mark.parametrize("d", [1, 2, 3])
def test_rows_far_from_every_point_are_redone(d):
    case = _mixture(d, 3000, 300)
    case.queries[:] *= np.linspace(1.0, 1e4, 300)[:, None]
    rows = np.arange(0, 300, 4)
    want = reference.sums(case.queries[rows], case.points, log_weights=case.log_weights)
    for reduction in Reduction:
        problem = case.problem(reduction, "high")
        backend = FourierBackend(always=True)
        got = backend.reduce(problem, case.queries, backend.prepare(problem, Columns(case.points, case.log_weights)))
        assert _worst(problem, got, case, rows, want) <= 1.0
        assert got.log_sum.min() < -1e6


@pytest.mark.parametrize("precision", [pytest.param("high", marks=pytest.mark.slow), "float64"])
def test_a_prepared_density_answers_far_rows_itself(precision):
    """Rows beyond the box of modes are summed over their neighbours, by the backend that was chosen."""
    x = np.random.default_rng(0).normal(size=(20_000, 2))
    axis = np.linspace(-8.0, 8.0, 24)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    ready = sdkde_core.prepare(x, method="kde", bandwidth=0.1, precision=precision)
    assert ready.backend == "fourier"
    got, want = ready.estimate(grid, log=True), reference.estimate(x, grid, method="kde", bandwidth=0.1, log=True)
    assert ready.backend == "fourier" and want.min() < -1500.0
    assert (np.abs(got - want) <= TOLERANCES[precision][Reduction.LOG_SUM].at(want)).all()
    named = sdkde_core.prepare(x, method="kde", bandwidth=0.1, precision=precision, backend="fourier")
    assert np.array_equal(got, named.estimate(grid, log=True))


def test_a_row_midway_between_far_columns_is_balanced_as_float64_allows():
    """Half of the squared distances, 10¹⁰, is right to some roundings, 10⁻⁶ each; the shift is that times 10⁵."""
    left, right, row = -289160.97160250205, -537.331899748747, -144849.15175112538
    exponent = (Fraction(right) - Fraction(left)) * (Fraction(left) + Fraction(right) - 2 * Fraction(row)) / 2
    share = 1 / (1 + math.exp(exponent))  # of the right column
    want = share * (right - row) + (1 - share) * (left - row)
    columns = Columns(np.array([[left], [right]]), np.full(2, -math.log(2.0)))
    problem = Problem(Reduction.MEAN, 1, 2, 1, precision="float64")
    backend = FourierBackend()
    got = backend.reduce(problem, np.array([[row]]), backend.prepare(problem, columns))
    roundings = 2.0**-53 * (right - row) ** 2 / 2
    assert abs(got.shift[0, 0] - want) < 2 * roundings * (right - left) / 2


def test_tiny_bandwidths_take_no_modes():
    """Where the bandwidth is small against the spacing, rows are summed over their few neighbours."""
    rng = np.random.default_rng(0)
    case = Case("sparse", 1e6 * rng.random((5000, 3)), 1e6 * rng.random((50, 3)), np.full(5000, -math.log(5000)))
    problem = case.problem(Reduction.MEAN, "high")
    backend = FourierBackend()
    state = backend.prepare(problem, Columns(case.points, case.log_weights))
    assert state.series is None
    assert _worst(problem, backend.reduce(problem, case.queries, state), case, np.arange(50)) <= 1.0


@pytest.mark.parametrize("d", [1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3))])
def test_same_bits_with_threads(d):
    """Two threads give the same bits again and again, also where several call at once."""
    from concurrent.futures import ThreadPoolExecutor

    case = _mixture(d, 70_000, 70_000, width=30.0 if d < 3 else 12.0)
    problem = case.problem(Reduction.MEAN, "high")
    backend = FourierBackend(threads=2)
    columns = Columns(case.points, case.log_weights)

    def run(_):
        return backend.reduce(problem, case.queries, backend.prepare(problem, columns))

    first = run(0)
    with ThreadPoolExecutor(2) as pool:
        for again in pool.map(run, range(3)):
            assert np.array_equal(first.log_sum, again.log_sum) and np.array_equal(first.shift, again.shift)


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": True}, {"always": 1}])
def test_options_are_checked(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        FourierBackend(**options)


def test_listing_it_does_not_import_finufft():
    code = "import sys, sdkde_core; sdkde_core.backends(); import sdkde_fourier.info; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "finufft" not in done.stdout.split()


def test_the_suite_s_cases_are_transformed():
    """The conformance run with ``always`` would prove nothing if it never transformed."""
    case = make("mixture", 211, 67, 3, 10.0)
    problem = case.problem(Reduction.MEAN, "high")
    state = FourierBackend(always=True).prepare(problem, Columns(case.points, case.log_weights))
    assert state.series is not None


def test_too_little_memory_is_an_error_before_finufft_is_called(monkeypatch):
    from sdkde_core.engine import memory as host

    limit = host.Limit("ulimit -v", 1 << 30, 130 << 20, 16 << 20, 104 << 20)
    monkeypatch.setattr(host, "_address_space", lambda: [limit])
    monkeypatch.setattr(host, "limits", lambda: [limit])
    monkeypatch.setattr(transforms.finufft, "Plan", None)
    case = _mixture(3, 3000, 100)
    problem = case.problem(Reduction.MEAN, "high")
    message = (
        r"^a Fourier transform of \d+ × \d+ × \d+ modes takes \d+ MiB of memory, and 130 MiB is free .*another backend"
    )
    with pytest.raises(MemoryError, match=message):
        FourierBackend(always=True).prepare(problem, Columns(case.points, case.log_weights))


def test_finufft_s_failures_to_allocate_are_memory_errors(monkeypatch):
    def plan(kind, *arguments, **options):
        raise RuntimeError({1: "FINUFFT general malloc failure", 2: "FINUFFT transform type invalid"}[kind])

    monkeypatch.setattr(transforms.finufft, "Plan", plan)
    angles, field = [np.zeros(3)], np.ones(5, complex)
    with pytest.raises(MemoryError, match="5 modes: FINUFFT general malloc"):
        to_modes(angles, np.ones(3), (5,), 1e-9, 1)
    with pytest.raises(RuntimeError, match="invalid"):
        to_points(angles, [field], 1e-9, 1)


def test_problems_beyond_the_machine_s_memory_are_declined(monkeypatch):
    from sdkde_fourier import info

    from sdkde_core.choice.select import Wanted, ranked

    problem = Problem(Reduction.LOG_SUM, 10**6, 10**6, 3, extent=36.0)
    reasons = {}
    for total in (None, 1 << 30, 400 << 20):
        monkeypatch.setattr(info.prices, "total_memory", lambda: total)  # noqa: B023
        reasons[total] = {c.name: c for c in ranked([problem], None, Wanted(device="cpu"))}["fourier"]
        assert info.INFO.supports(replace(problem, n=1000, m=1000)).ok
    assert reasons[None].ok and reasons[1 << 30].ok
    assert not reasons[400 << 20].ok and reasons[400 << 20].reason == (
        "takes 0.44 GiB of memory or more; this process may use 0.39"
    )
