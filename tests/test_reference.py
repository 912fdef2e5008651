"""The oracle against arbitrary precision, and against the paper's own formulas."""

import mpmath
import numpy as np
import pytest
import reference

from sdkde_core.protocol import KERNELS
from sdkde_core.testing import problems
from sdkde_core.testing.accuracy import draw, drawn_parameters
from sdkde_core.testing.checks import PROFILES


def _mp_density(train, query, h_matrix, weights, method):
    """p̂ by its definition in 60 digits."""
    with mpmath.workdps(60):
        d = train.shape[1]
        h = mpmath.matrix(h_matrix.tolist())
        inverse, constant = h**-1, 1 / mpmath.sqrt((2 * mpmath.pi) ** d * mpmath.det(h))
        w = [mpmath.mpf(float(x)) for x in weights]
        w = [x / sum(w) for x in w]
        points = [mpmath.matrix(row.tolist()) for row in train]

        def terms(y, centres):
            for w_j, x in zip(w, centres):
                delta = y - x
                yield w_j, delta, (delta.T * inverse * delta)[0]

        if method == "sdkde":
            moved = []
            for y in points:
                phis = [(w_j * mpmath.exp(-r2 / 2), delta) for w_j, delta, r2 in terms(y, points)]
                total = sum(p for p, _ in phis)
                moved.append(y - sum((p * delta for p, delta in phis), mpmath.matrix(d, 1)) / total / 2)
            points = moved
        result = []
        for row in query:
            found = [(w_j * mpmath.exp(-r2 / 2), r2) for w_j, _, r2 in terms(mpmath.matrix(row.tolist()), points)]
            factors = [1 + mpmath.mpf(d) / 2 - r2 / 2 if method == "laplace" else 1 for _, r2 in found]
            result.append(constant * sum(phi * factor for (phi, _), factor in zip(found, factors)))
        return result


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("shape", ["scalar", "diagonal", "full"])
def test_reference_has_twelve_digits(method, shape):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(12, 3)) * [1.0, 20.0, 0.3], rng.normal(size=(5, 3)) * [1.0, 20.0, 0.3]
    y[0] *= 30  # a far tail
    w = rng.random(12)
    h = {"scalar": 0.7, "diagonal": np.array([0.5, 9.0, 0.2]), "full": np.cov(x.T) * 0.3}[shape]
    matrix = h if shape == "full" else np.diag(np.broadcast_to(np.square(h), 3))
    want = _mp_density(x, y, matrix, w, method)
    got = reference.estimate(x, y, method=method, bandwidth=h, weights=w)
    for g, t in zip(got, want):
        if abs(t) > 1e-280:
            assert abs((g - float(t)) / float(t)) < 1e-11
    logs = reference.estimate(x, y, method=method, bandwidth=h, weights=w, log=True)
    for g, t in zip(logs, want):
        if t > 0:
            assert abs(g - float(mpmath.log(t))) < 1e-11 * max(1.0, abs(g))


@pytest.mark.parametrize("condition", [1e7, 1e14])
def test_a_nearly_singular_matrix_costs_the_reference_no_digits(condition):
    """It is taken as it is given, to the last digit: H's rounding alone would show in the first or second one."""
    rng = np.random.default_rng(4)
    directions = np.linalg.qr(rng.normal(size=(3, 3)))[0] * np.sqrt([1.0, 0.1, 1.0 / condition])
    h, x = directions @ directions.T, rng.normal(size=(14, 3)) @ directions.T
    x, y = x[:10], x[10:]
    w = np.full(10, 0.1)
    want = [float(mpmath.log(p)) for p in _mp_density(x, y, (h + h.T) / 2, w, "sdkde")]
    np.testing.assert_allclose(reference.estimate(x, y, bandwidth=h, log=True), want, rtol=1e-13)


@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize("distance", [1e9, 1e12, 1e20, 1e100])
def test_rows_and_samples_at_any_distance(distance, stray):
    case = problems.far(9, 8, 2, distance, stray=stray)
    got, c = reference.sums(case.queries, case.points, log_weights=case.log_weights), 2
    with mpmath.workdps(420):  # digits of a square at 1e100 bandwidths, and of the point beside it
        for i, row in enumerate(case.queries):
            away = [[mpmath.mpf(float(a)) - mpmath.mpf(float(b)) for a, b in zip(x, row)] for x in case.points]
            half = [sum(a * a for a in delta) / 2 for delta in away]
            phi = [mpmath.exp(-h) / 9 for h in half]
            total, plus = sum(phi), sum(p * (c + h) for p, h in zip(phi, half))
            assert got.log_sum[i] == pytest.approx(float(mpmath.log(total)), rel=1e-14, abs=1e-13)
            assert got.log_plus[i] == pytest.approx(float(mpmath.log(plus)), rel=1e-14, abs=1e-13)
            signed = sum(p * (c - h) for p, h in zip(phi, half)) / plus
            assert got.signed[i] == pytest.approx(float(signed), abs=1e-13)
            shift = [float(sum(p * delta[k] for p, delta in zip(phi, away)) / total) for k in range(2)]
            assert np.hypot(*(got.shift[i] - shift)) <= 1e-13 + 1e-15 * np.hypot(*shift)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_have_twelve_digits(kernel):
    rng = np.random.default_rng(6)
    x, w = rng.normal(size=(9, 2)), rng.random(9)
    y = np.concatenate([x[:4] + rng.normal(size=(4, 2)) * 0.4, [[0.0, 70.0]]])
    h = np.array([[0.8, 0.3], [0.3, 0.5]])
    value = {
        "gaussian": lambda r: mpmath.exp(-(r**2) / 2),
        "tophat": lambda r: mpmath.mpf(r < 1),
        "epanechnikov": lambda r: 1 - r**2 if r < 1 else mpmath.mpf(0),
        "exponential": lambda r: mpmath.exp(-r),
        "linear": lambda r: 1 - r if r < 1 else mpmath.mpf(0),
        "cosine": lambda r: mpmath.cos(mpmath.pi * r / 2) if r < 1 else mpmath.mpf(0),
    }[kernel]
    with mpmath.workdps(50):
        inverse = mpmath.matrix(h.tolist()) ** -1
        weights = [mpmath.mpf(float(v)) for v in w]
        want = []
        for row in y:
            away = [mpmath.matrix([mpmath.mpf(float(a)) - mpmath.mpf(float(b)) for a, b in zip(row, p)]) for p in x]
            terms = [v * value(mpmath.sqrt((a.T * inverse * a)[0])) for v, a in zip(weights, away)]
            total = sum(terms) / sum(weights)
            want.append(float(mpmath.log(total)) if total else -np.inf)
        norm = mpmath.quad(lambda r: 2 * mpmath.pi * r * value(r), [0, 0.5, 1, 5, 60])
    np.testing.assert_allclose(reference.kernel_log_sum(y, x, kernel, h, weights=w), want, rtol=1e-12, atol=1e-12)
    assert np.isfinite(want[1:4]).all()
    assert reference.kernel_log_norm(kernel, 2) == pytest.approx(float(mpmath.log(norm)), abs=1e-13)


def test_paper_formulas_agree_on_benign_data():
    """They expand squares, ‖x‖² + ‖y‖² − 2 xᵀy, and the score is (Σ_j φ_ij x_j − x_i Σ_j φ_ij) / (h² Σ_j φ_ij)."""
    rng = np.random.default_rng(2)
    x, y, h = rng.normal(size=(60, 4)), rng.normal(size=(20, 4)), 0.8

    def phi(y):
        return np.exp(-np.maximum((y**2).sum(1)[:, None] + (x**2).sum(1) - 2 * y @ x.T, 0.0) / (2 * h**2))

    constant, at_x, at_y = 60 * (h * np.sqrt(2 * np.pi)) ** 4, phi(x), phi(y)
    kde, laplace = (reference.estimate(x, y, method=method, bandwidth=h) for method in ("kde", "laplace"))
    np.testing.assert_allclose(at_y.sum(1) / constant, kde, rtol=1e-11)
    factor = 1 + 4 / 2 + np.log(at_y)  # log φ = −½ r²
    np.testing.assert_allclose((at_y * factor).sum(1) / constant, laplace, rtol=1e-9)
    total = at_x.sum(1, keepdims=True)
    score = (at_x @ x - x * total) / (h**2 * total)
    np.testing.assert_allclose(score, reference.grad_log_density(x, x, h), rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(reference.debias(x, h), x + 0.5 * h**2 * score, rtol=1e-11)


def test_gradient_is_the_derivative_of_the_log_density():
    rng = np.random.default_rng(4)
    x, y, h = rng.normal(size=(40, 2)), rng.normal(size=(6, 2)), np.array([[0.5, 0.2], [0.2, 0.4]])
    step = 1e-5
    for k in (0, 1):
        e = np.eye(2)[k] * step
        up = reference.estimate(x, y + e, method="kde", bandwidth=h, log=True)
        down = reference.estimate(x, y - e, method="kde", bandwidth=h, log=True)
        np.testing.assert_allclose(reference.grad_log_density(x, y, h)[:, k], (up - down) / (2 * step), rtol=1e-7)


@pytest.mark.parametrize("index", range(0, 39, 3))
def test_plain_float64_is_right_for_the_suites_random_problems(index):
    """Their truths are plain sums: they must be exact far within every tolerance."""
    seed, d = (int(x.lstrip("d")) for x in list(drawn_parameters(None, PROFILES["quick"]))[index].split("-")[:2])
    asked = draw(seed, d, 20_000, frozenset({"weights"}))
    case, rows = asked.case, np.unique([0, len(asked.case.queries) // 2, len(asked.case.queries) - 1])
    got, want = (
        reference.sums(case.queries[rows], case.points, log_weights=case.log_weights, plain=plain)
        for plain in (True, False)
    )
    np.testing.assert_allclose(got.log_sum, want.log_sum, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.log_plus, want.log_plus, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.signed, want.signed, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.shift, want.shift, rtol=0, atol=9e-13)


def test_far_columns_that_are_left_out_change_nothing():
    """Weights may be what makes a row's largest term large."""
    x, y = np.array([[0.0], [39.0], [45.0], [90.0]]), np.array([[0.0], [1.0], [44.0]])
    log_w = np.array([-1.0, -600.0, 0.0, 0.0])
    got = reference.sums(y, x, log_weights=log_w)
    for i, row in enumerate(y[:, 0]):
        with mpmath.workdps(40):
            total = sum(mpmath.exp(w - (mpmath.mpf(float(u)) - float(row)) ** 2 / 2) for u, w in zip(x[:, 0], log_w))
            assert abs(got.log_sum[i] - float(mpmath.log(total))) < 1e-12


def test_a_point_far_away_does_not_blur_the_others_under_a_matrix():
    x = np.array([[1e37], [0.8], [0.3], [-1.3]])
    number, matrix = (
        reference.estimate(x, x, bandwidth=h, method="sdkde", log=True) for h in (0.5, np.array([[0.25]]))
    )
    np.testing.assert_allclose(matrix, number, rtol=1e-12)
