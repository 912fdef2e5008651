"""Normal mixtures, smoothed: what a stack has beside sdkde, and the shares of its parts.

A mixture Σ_k π_k N(μ_k, Σ_k) is fitted by EM. Its smoothed form keeps the samples:

    p̂(y) = Σ_ik w_i r_ik N(y; μ_k + √(1 − h²) (x_i − μ_k), h² Σ_k),

r_ik the share of component k in sample i. At the maximum of the likelihood every group k keeps the mean and covariance
of its component, whatever h is. h = 1 is the mixture, and h → 0 a kernel estimate. The number of components and h are
those that say most of samples that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..arrays import Array


class Normals(NamedTuple):
    """A mixture of normals.

    Parameters
    ----------
    shares : (k,) array
        They sum to 1.
    means : (k, d) array
    factors : (k, d, d) array
        Lower Cholesky factors of the covariances.
    """

    shares: Array
    means: Array
    factors: Array


class Group(NamedTuple):
    """A kernel estimate that is a part of a smoothed mixture: points (n, d), weights (n,) that sum to 1, factor (d, d)."""

    points: Array
    weights: Array
    factor: Array
    share: float


def log_densities(normals: Normals, y: Array) -> Array:
    """Log shares plus the components' log densities at y, (m, k)."""
    k, d = normals.means.shape
    inverses = np.linalg.inv(normals.factors)
    offsets = (inverses @ normals.means[:, :, None]).reshape(-1)
    stacked = inverses.reshape(k * d, d).T
    diagonals = np.diagonal(normals.factors, axis1=1, axis2=2)
    constants = np.log(normals.shares) - np.log(diagonals).sum(1) - 0.5 * d * math.log(2 * math.pi)
    result = np.empty((len(y), k))
    for rows in _blocks(len(y), k * d):
        u = (y[rows] @ stacked - offsets).reshape(-1, k, d)
        result[rows] = constants - 0.5 * np.einsum("mkd,mkd->mk", u, u)
    return result


def log_sum(logs: Array) -> Array:
    """Log of the sum of exp over the last axis."""
    top = np.maximum(logs.max(-1, keepdims=True), -1e300)
    return np.log(np.exp(logs - top).sum(-1)) + top[..., 0]


def fit(
    x: Array,
    weights: Array,
    k: int,
    rng: np.random.Generator,
    *,
    prior: float = 1.0,
    most: int = 100,
    loose: float = 1e-4,
    least: float = 1.0,
) -> Normals:
    """Fit k normals by EM; fewer where components have less than d + 1 samples, effectively.

    Every covariance is shrunk towards the mean one within components, as if that were ``prior`` (d + 1) more samples,
    and that one towards its diagonal, as if by d of all samples. Results do not depend on the columns' units.
    """
    n, d = x.shape
    centre = weights @ x
    spread = np.sqrt(weights @ (x - centre) ** 2)
    z = (x - centre) / spread
    n_eff = 1.0 / float(weights @ weights)
    shares = _start(z, weights, k, rng)
    last = -math.inf
    for _ in range(most):
        normals = _maximised(z, weights, shares, n_eff, prior, least)
        logs = log_densities(normals, z)
        found = log_sum(logs)
        mean = float(weights @ found)
        shares = np.exp(logs - found[:, None])
        if mean - last < loose and len(normals.shares) == logs.shape[1]:
            break
        last = mean
    return Normals(normals.shares, centre + spread * normals.means, spread[:, None] * normals.factors)


def _start(z: Array, weights: Array, k: int, rng: np.random.Generator) -> Array:
    """Shares (n, k) of 0 and 1: the nearest centres, by k-means++ and a few steps of k-means."""
    centres = z[rng.choice(len(z), 1, p=weights)]
    near = ((z - centres) ** 2).sum(1)
    while len(centres) < k and near.max() > 0.0:
        chances = weights * near
        tried = rng.choice(len(z), 2 + int(math.log(k)), p=chances / chances.sum())
        nearer = [np.minimum(near, ((z - z[i]) ** 2).sum(1)) for i in tried]
        best = int(np.argmin([weights @ some for some in nearer]))
        near = nearer[best]
        centres = np.concatenate([centres, z[tried[best]][None]])
    for _ in range(20):
        which = np.argmin((centres**2).sum(1) - 2.0 * z @ centres.T, axis=1)
        shares = (which[:, None] == np.arange(len(centres))).astype(float)
        totals = weights @ shares
        kept = totals > 0.0
        centres = (shares[:, kept].T @ (weights[:, None] * z)) / totals[kept, None]
    return shares[:, kept]


def _maximised(z: Array, weights: Array, shares: Array, n_eff: float, prior: float, least: float) -> Normals:
    """The components that samples with such shares are most likely from."""
    n, d = z.shape
    counts = n_eff * (weights @ shares)
    kept = counts >= least * (d + 1) if shares.shape[1] > 1 else counts > 0
    if not kept.any():
        kept = counts == counts.max()
    shares, counts = shares[:, kept], counts[kept]
    k = len(counts)
    means, covariances = np.empty((k, d)), np.empty((k, d, d))
    for j in range(k):
        rows = np.flatnonzero(shares[:, j] > 1e-9)
        heard = weights[rows] * shares[rows, j]
        heard /= heard.sum()
        means[j] = heard @ z[rows]
        away = np.sqrt(heard)[:, None] * (z[rows] - means[j])
        covariances[j] = away.T @ away
    within = np.einsum("k,kij->ij", counts / counts.sum(), covariances)
    diagonal = np.diag(np.diagonal(within))
    within = (n_eff * within + d * diagonal) / (n_eff + d)
    added = prior * (d + 1)
    covariances = (counts[:, None, None] * covariances + added * within) / (counts[:, None, None] + added)
    covariances += 1e-6 * np.eye(d)
    return Normals(counts / counts.sum(), means, np.linalg.cholesky(covariances))


def smoothed(x: Array, weights: Array, normals: Normals, h: float) -> list[Group]:
    """The groups of a mixture that is smoothed with h; h = 1 has one point in each, its mean."""
    if h == 1.0:
        one = np.ones(1)
        return [Group(m[None], one, f, float(s)) for s, m, f in zip(*normals)]
    logs = log_densities(normals, x)
    shares = np.exp(logs - log_sum(logs)[:, None])
    shares[shares < 1e-3] = 0.0
    shares *= (weights / shares.sum(1))[:, None]
    groups = []
    for share, mean, factor in zip(shares.T, normals.means, normals.factors):
        rows = np.flatnonzero(share)
        if rows.size:
            total = float(share[rows].sum())
            points = mean + math.sqrt(1.0 - h * h) * (x[rows] - mean)
            groups.append(Group(points, share[rows] / total, h * factor, total))
    return groups


def log_density_of(groups: list[Group], y: Array) -> Array:
    """Log densities of the groups' sum at y, (m,)."""
    result = np.full(len(y), -math.inf)
    for points, weights, factor, share in groups:
        inverse = np.linalg.inv(factor)
        u, v = (y - points[0]) @ inverse.T, (points - points[0]) @ inverse.T
        constant = math.log(share) - np.log(np.diagonal(factor)).sum() - 0.5 * y.shape[1] * math.log(2 * math.pi)
        columns = np.log(weights) - 0.5 * (v * v).sum(1)
        for rows in _blocks(len(y), len(points)):
            logs = u[rows] @ v.T + columns
            found = log_sum(logs) - 0.5 * (u[rows] * u[rows]).sum(1) + constant
            result[rows] = np.logaddexp(result[rows], found)
    return result


def stack(logs: Array, weights: Array) -> Array:
    """The shares (e,) of parts with which left-out samples are most likely; those below .005 are 0.

    ``logs``: the parts' log densities at samples that they were not fitted to, (n, e).
    """
    top = logs.max(1, keepdims=True)
    densities = np.exp(logs - np.where(np.isfinite(top), top, 0.0))
    densities[~np.isfinite(top[:, 0])] = 1.0
    shares = np.full(logs.shape[1], 1.0 / logs.shape[1])
    for _ in range(1000):
        last, shares = shares, shares * (densities.T @ (weights / (densities @ shares)))
        if np.abs(shares - last).max() < 1e-7:
            break
    shares = np.where(shares < 0.005, 0.0, shares)
    return shares / shares.sum()


def _blocks(n: int, width: int) -> Iterator[slice]:
    size = max(1, (1 << 18) // width)
    return (slice(i, i + size) for i in range(0, n, size))


class Chosen(NamedTuple):
    normals: Normals
    h: float
    left_out: Array
    reason: str


def choose(x: Array, weights: Array, folds: Array) -> list[Chosen]:
    best = None
    for k in (1, 2, 4, 8):
        for h in (0.3, 0.5, 0.7, 1.0):
            out = np.empty(len(x))
            for f in np.unique(folds):
                kept = folds != f
                w = weights[kept] / weights[kept].sum()
                normals = fit(x[kept], w, k, np.random.default_rng(0))
                out[~kept] = log_density_of(smoothed(x[kept], w, normals, h), x[~kept])
            score = weights @ out
            if best is None or score > best[0]:
                best = score, k, h, out
    normals = fit(x, weights, best[1], np.random.default_rng(0))
    return [Chosen(normals, best[2], best[3], f"mixture of {len(normals.shares)} groups")]
