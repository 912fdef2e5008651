"""The Fourier backend on PyTorch's devices: products against sums, boxes that leave points out."""

import math

import numpy as np
import pytest

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.protocol import Columns, Partial, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import errors

torch = pytest.importorskip("torch")

from sdkde_fourier import modes, separable  # noqa: E402
from sdkde_fourier.device import TorchFourierBackend  # noqa: E402


def _columns(points, log_weights=None):
    if log_weights is None:
        log_weights = np.full(len(points), -math.log(len(points)))
    return Columns(torch.tensor(points), torch.tensor(log_weights))


def _numpy(partial, rows=slice(None)):
    arrays = (partial.log_sum, partial.shift, partial.sign, partial.log_magnitude)
    return Partial(*(None if a is None else a.numpy()[rows] for a in arrays))


@pytest.mark.parametrize("d", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_products_are_the_sums(d, reduction):
    """Cosines and sines in blocks, and in one dimension of two factors: to rounding."""
    rng = np.random.default_rng(d)
    points, rows = 3.0 * rng.normal(size=(5000, d)), 3.0 * rng.normal(size=(40, d))
    weights = rng.uniform(size=5000)
    weights /= weights.sum()
    problem = Problem(reduction, 40, 5000, d)
    ends = points.min(axis=0), points.max(axis=0)
    box, *_ = modes.choose_box(problem, ends, points, 1e-13, lambda shape, share, *outside: math.inf if share else 0.0)
    basis = separable.Basis(box, torch.device("cpu"), 1 << 20)
    found = separable.to_modes(basis, torch.tensor(points), torch.tensor(weights))
    coefficients = separable.fields(problem, basis, found)
    got = separable.to_points(basis, torch.tensor(rows), coefficients, reduction is Reduction.MEAN).numpy()
    step = points[None] - rows[:, None]
    r2 = (step**2).sum(-1)
    phi = weights * np.exp(-0.5 * r2)
    want = [phi.sum(1)]
    if reduction is Reduction.MEAN:
        want += list((phi[..., None] * step).sum(1).T)
    if reduction is Reduction.LAPLACE:
        want.append((phi * (1.0 + 0.5 * d - 0.5 * r2)).sum(1))
    assert np.abs(got - np.array(want)).max() < 2e-13


@pytest.mark.parametrize("d", [1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3))])
def test_columns_outside_the_box_are_added(d):
    """A few points far out: the box is of the others, and rows near its faces see what is outside."""
    rng = np.random.default_rng(d)
    points = 8.0 * rng.normal(size=(6000, d))
    points[:20] *= 40.0 if d > 1 else 4e4  # in one dimension a wide box costs little
    rows = np.concatenate([points[:60], 20.0 * rng.normal(size=(60, d)), [[1e4] * d]])
    columns, want = _columns(points), reference.sums(rows, points)
    for reduction in Reduction:
        problem = Problem(reduction, len(rows), 6000, d, extent=float(np.abs(points).max() * d))
        backend = TorchFourierBackend(always=True)
        state = backend.prepare(problem, columns)
        assert state.series is not None and state.series.outside is not None
        got = _numpy(backend.reduce(problem, torch.tensor(rows), state))
        assert errors(problem, got, want).max() <= 1.0


@pytest.mark.parametrize("d", [1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3))])
def test_same_bits_again(d):
    rng = np.random.default_rng(d)
    points = 6.0 * rng.normal(size=(20_000, d))
    points[:30] *= 10.0
    problem = Problem(Reduction.MEAN, 20_000, 20_000, d, same=True, extent=float(np.abs(points).max()))
    backend, columns = TorchFourierBackend(always=True), _columns(points)
    first, again = (backend.reduce(problem, None, backend.prepare(problem, columns)) for _ in range(2))
    assert torch.equal(first.log_sum, again.log_sum) and torch.equal(first.shift, again.shift)


@pytest.mark.parametrize("name", ["fourier", "fourier-torch"])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("always", [False, True])
def test_what_is_not_a_number_stays_in_its_row(name, d, always):
    """Rows that are not numbers, beside lonely ones; infinite columns; columns that are not numbers."""
    pytest.importorskip("finufft")
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


@pytest.mark.parametrize("name", ["fourier", "fourier-torch"])
def test_weights_near_the_end_of_float64(name):
    """A shard of the columns, whose weights underflow or nearly do: summed directly, in the log domain."""
    pytest.importorskip("finufft")
    info = registry.find(name).info
    rng = np.random.default_rng(0)
    points, rows = rng.normal(size=(300, 2)), rng.normal(size=(50, 2))
    rows[:5] += 30.0
    for precision in (-600.0, -720.0, -735.0, -800.0, -3000.0):
        log_weights = np.full(300, precision)
        problem = Problem(Reduction.MEAN, 50, 300, 2, extent=40.0, device="cpu")
        backend = info.load({"always": True})
        numpy = info.arrays == "numpy"
        columns = Columns(points, log_weights) if numpy else _columns(points, log_weights)
        got = backend.reduce(problem, rows if numpy else torch.tensor(rows), backend.prepare(problem, columns))
        got = got if numpy else _numpy(got)
        assert errors(problem, got, reference.sums(rows, points, log_weights=log_weights)).max() <= 1.0


def test_options_are_checked():
    with pytest.raises(TypeError, match="always"):
        TorchFourierBackend(always=1)
