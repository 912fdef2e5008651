"""Parts of a list that a backend on the host sums in one call: the feature "groups"."""

import numpy as np
import pytest

import sdkde_core
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction

NUMBA = pytest.importorskip("sdkde_numba.backend")


@pytest.mark.parametrize("precision", ["fast", "high", "float64"])
@pytest.mark.parametrize(
    ("d", "sizes", "m"),
    [(1, (300, 2), 40), (3, (1, 17, 700), 5), (9, (60, 33), 1), (4, (520,), 300), (100, (40, 3), 9)],
)
def test_every_group_is_summed_over_its_own_columns(d, sizes, m, precision):
    rng = np.random.default_rng(d)
    groups, logs = [], []
    rows, constants = rng.normal(size=(len(sizes), m, d)) * 3.0, 5.0 * rng.normal(size=(len(sizes), m))
    rows[:, 0] *= 20.0
    constants[-1, m // 2] = -np.inf  # the whole needs nothing of the group there
    for n, u in zip(sizes, rows):
        columns = Columns(rng.normal(size=(n, d)) * 2.0, np.log(rng.gamma(1.0, size=n)) - 9.0)
        terms = columns.log_weights - 0.5 * ((u[:, None] - columns.points) ** 2).sum(2)
        groups.append(columns)
        logs.append(np.logaddexp.reduce(terms, axis=1))
    known = np.where(np.arange(m) % 2, -np.inf, rng.normal(size=m))
    given = {"precision": precision, "requires": frozenset(["weights", "groups"]), "extent": 150.0}
    asked, backend = Problem(Reduction.LOG_SUM, m, sum(sizes), d, **given), NUMBA.NumbaBackend()

    def whole(logs):
        return np.logaddexp.reduce([known, *(np.array(logs) + constants)], axis=0)

    want, state = whole(logs), backend.prepare_groups(asked, groups)
    got = backend.reduce_groups(asked, rows, state, constants, known).log_sum
    assert got.shape == (len(sizes), m)
    assert (abs(whole(got) - want) <= TOLERANCES[precision][Reduction.LOG_SUM].at(want)).all()
    one = NUMBA.NumbaBackend(threads=1).reduce_groups(asked, rows[:, :1], state, constants[:, :1], known[:1]).log_sum
    np.testing.assert_array_equal(one, got[:, :1])


def skewed(n, rng, d=3):
    near = rng.random(n) < 0.5
    return np.where(near[:, None], np.exp(0.6 * rng.normal(size=(n, d))), 4.0 + 0.2 * rng.normal(size=(n, d)))


@pytest.fixture(scope="module")
def stack():
    x = skewed(250, np.random.default_rng(41))
    return sdkde_core.prepare(x, method="stacked", device="cpu", backend="numba", precision="float64")


@pytest.mark.parametrize("far", [[], [[300.0, -2.0, 1e7]]])
def test_a_stack_is_summed_at_once_and_gives_what_its_parts_give(stack, far, monkeypatch):
    y, sums = np.concatenate([skewed(80, np.random.default_rng(2)), *([f] for f in far)]), []
    plain = NUMBA.NumbaBackend.reduce_groups

    def counted(self, problem, queries, state, *more):
        sums.append(queries.shape)
        return plain(self, problem, queries, state, *more)

    monkeypatch.setattr(NUMBA.NumbaBackend, "reduce_groups", counted)
    log = stack.estimate(y, log=True)
    assert len(sums) > 0 and max(k for k, *_ in sums) > 1
    want = np.logaddexp.reduce([np.log(share) + one.estimate(y, log=True) for _, share, one in stack.parts])
    np.testing.assert_allclose(log, want, rtol=1e-10, atol=1e-9)
    np.testing.assert_array_equal(stack.estimate(y[:1], log=True), log[:1])


def test_where_groups_fail_parts_are_asked_one_by_one(stack, monkeypatch):
    y = skewed(30, np.random.default_rng(3))
    log = stack.estimate(y, log=True)

    def broken(*given):
        raise RuntimeError("broken")

    monkeypatch.setattr(NUMBA.NumbaBackend, "reduce_groups", broken)
    np.testing.assert_allclose(stack.estimate(y, log=True), log, rtol=1e-10, atol=1e-9)


def test_a_query_that_is_not_finite_is_named(stack):
    with pytest.raises(ValueError, match="query has values that are not finite, the first nan at row 1"):
        stack.estimate([[1.0, 1.0, 1.0], [np.nan, 0.0, 0.0]])


def test_a_backend_that_is_named_is_not_left_for_its_groups(monkeypatch):
    monkeypatch.setattr(NUMBA.NumbaBackend, "reduce_groups", None)
    x = skewed(100, np.random.default_rng(4))
    density = sdkde_core.prepare(x, method="stacked", device="cpu", backend="numpy", coordinates="identity")
    assert np.isfinite(density.estimate(x[:5], log=True)).all()
