"""Normal mixtures, smoothed: what EM and the choice keep."""

import itertools

import numpy as np
import pytest

import sdkde_core
from sdkde_core.bandwidth import mixtures

SEED = 3


def clusters(n=300, d=2, k=3):
    rng = np.random.default_rng(SEED)
    x = 4.0 * rng.normal(size=(k, d))[rng.integers(k, size=n)] + rng.normal(size=(n, d))
    weights = rng.uniform(0.5, 1.5, size=n)
    return x, weights / weights.sum()


def fitted(x, weights, k, **options):
    ranks, weights = np.argsort(np.argsort(x, axis=0), axis=0) / len(x), weights[None]
    centres = np.stack(list(itertools.islice(mixtures.seeds(ranks, weights, np.random.default_rng(SEED)), k)), axis=1)
    return mixtures.fit(x, weights, mixtures.nearest(ranks, weights, centres), **options)[0].one(0)


def test_one_component_is_the_normal_of_the_samples():
    x, weights = clusters(n=2000)
    normals = fitted(x, weights, 1)
    covariance = np.cov(x.T, aweights=weights, bias=True)
    np.testing.assert_allclose(normals.means[0], weights @ x)
    np.testing.assert_allclose(normals.factors[0] @ normals.factors[0].T, covariance, rtol=2e-3, atol=2e-3)


def test_log_densities_are_those_of_the_components():
    x, weights = clusters()
    normals = fitted(x, weights, 3)
    for share, mean, factor, logs in zip(*normals, mixtures.log_densities(normals, x).T):
        u = np.linalg.solve(factor, (x - mean).T)
        expected = np.log(share / np.linalg.det(factor)) - 0.5 * (u * u).sum(0) - np.log(2 * np.pi)
        np.testing.assert_allclose(logs, expected)


def test_em_raises_the_likelihood():
    x, weights = clusters(n=600, d=3, k=4)
    fits = [fitted(x, weights, 4, most=most) for most in (1, 3, 10, 100)]
    values = [weights @ np.logaddexp.reduce(mixtures.log_densities(fit, x), axis=1) for fit in fits]
    assert values == sorted(values) and values[-1] > values[0]


@pytest.mark.parametrize("h", [0.4, 0.8, 1.0])
def test_every_group_keeps_the_mean_and_covariance_of_its_component(h):
    x, weights = clusters(n=2000)
    normals = fitted(x, weights, 3)
    groups = mixtures.smoothed(x, weights, normals, h)
    assert sum(share for *_, share in groups) == pytest.approx(1.0)
    for (points, inside, kernel, _), mean, factor in zip(groups, normals.means, normals.factors):
        assert inside.sum() == pytest.approx(1.0)
        centre = inside @ points
        away = points - centre
        covariance = (inside[:, None] * away).T @ away + kernel @ kernel.T
        np.testing.assert_allclose(centre, mean, atol=0.05)
        np.testing.assert_allclose(covariance, factor @ factor.T, atol=0.05)


def chosen(x, weights):
    return mixtures.choose(x, weights, np.arange(len(x)) % 5, SEED)


def test_the_choice_does_not_depend_on_units():
    x, weights = clusters()
    scales, shift = np.array([1e5, 3e-4]), np.array([7.0, -2.0])
    for one, other in zip(chosen(x, weights), chosen(x * scales + shift, weights), strict=True):
        assert one.h == other.h
        np.testing.assert_allclose(other.normals.means, one.normals.means * scales + shift, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(other.left_out, one.left_out - np.log(scales).sum(), rtol=1e-5)


@pytest.mark.parametrize(("n", "d"), [(4, 2), (10, 5), (60, 30), (60, 1)])
def test_few_samples_and_repeated_ones_have_mixtures(n, d):
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(n, d))
    once = x * ((np.arange(n) == 0)[:, None] | (np.arange(d) > 0))  # all but one of a column's values are 0
    for rows in (x, np.concatenate([x[:1], x, x[:1]]), np.round(x), once):
        weights = np.full(len(rows), 1 / len(rows))
        for part in chosen(rows, weights):
            groups = mixtures.smoothed(rows, weights, part.normals, part.h)
            assert np.isfinite([part.left_out, mixtures.log_density_of(groups, rows)]).all()


@pytest.mark.slow
def test_independent_columns_have_mixtures_without_correlations():
    rng = np.random.default_rng(SEED)
    for d, diagonal in ((12, True), (2, False)):  # in two columns full covariances do
        x = rng.laplace(size=(400, d))
        found = chosen(x, np.full(400, 1 / 400))
        assert diagonal == any(np.allclose(f, f * np.eye(d)) and len(f) > 1 for f in (p.normals.factors for p in found))
    unseen = rng.laplace(size=(2000, 12))
    x = rng.laplace(size=(400, 12))
    density = sdkde_core.prepare(x, method="stacked", bandwidth="silverman")
    log_p = density.estimate(unseen, log=True).mean()
    truth = (-np.abs(unseen) - np.log(2)).sum(1).mean()
    assert truth - log_p < 0.17  # .13; .20 with full covariances alone


def test_the_stack_finds_the_shares_and_drops_what_no_sample_is_from():
    rng = np.random.default_rng(SEED)
    x = np.where(rng.uniform(size=20_000) < 0.3, -3.0, 1.0) + rng.normal(size=20_000)
    logs = np.stack([-0.5 * (x - at) ** 2 for at in (-3.0, 1.0, 9.0)], axis=1)
    shares = mixtures.stack(logs, np.full(len(x), 1 / len(x)))
    assert shares[2] == 0.0
    np.testing.assert_allclose(shares, [0.3, 0.7, 0.0], atol=0.02)


def test_a_choice_where_pytorch_has_the_samples_is_that_on_the_host():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    x = 2.0 * rng.normal(size=(4, 2))[rng.integers(4, size=200)] + rng.normal(size=(200, 2))
    given = x, np.full(200, 1 / 200), np.arange(200) % 4, SEED
    for there, here in zip(mixtures.choose(*given, torch.from_numpy), mixtures.choose(*given)):
        assert there.h == here.h and there.shrink == here.shrink
        np.testing.assert_allclose(there.left_out, here.left_out, atol=1e-9)
        for one, other in zip(there.normals, here.normals):
            np.testing.assert_allclose(one, other, atol=1e-9)


def test_many_clusters_of_independent_columns_have_as_many_components():
    """Though mixtures of few components say far less without correlations than with them."""
    rng, clusters, d, n = np.random.default_rng(0), 12, 10, 500
    which, centres = rng.integers(clusters, size=n), 4.0 * rng.normal(size=(clusters, d))
    x = centres[which] + rng.normal(size=(n, d)) * rng.uniform(0.2, 1.0, (clusters, d))[which]
    best = chosen(x, np.full(n, 1 / n))[0]
    assert np.isinf(best.shrink) and len(best.normals.shares) >= clusters
