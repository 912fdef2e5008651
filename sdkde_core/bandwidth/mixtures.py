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
from numpy.typing import NDArray

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
    """A part of a smoothed mixture: points (n, d), weights (n,) that sum to 1, and a kernel's factor (d, d)."""

    points: Array
    weights: Array
    factor: Array
    share: float


class Chosen(NamedTuple):
    """A smoothed mixture that was chosen: h = 1 is the mixture itself.

    ``left_out`` (n,) are log densities at samples that were left out in turn, NaN at those that no fold has; ``share``
    is the mixture's among those that were chosen.
    """

    normals: Normals
    h: float
    left_out: Array
    share: float
    reason: str


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
    x: Array, weights: Array, k: int, rng: np.random.Generator, *, start: Normals | None = None, most: int = 100
) -> Normals:
    """Fit k normals by EM; fewer where components have less than d + 1 samples, effectively.

    Every covariance is shrunk towards the mean one within components, as if that were .3 (d + 1) more samples, and that
    one towards its diagonal, as if by d more of all samples: few samples have a covariance too. Results do not depend
    on the columns' units. ``start``: components to start from, instead of k-means.
    """
    centre, spread = weights @ x, spreads(x, weights)
    z = (x - centre) / spread
    if start is None:
        shares = _nearest(z, weights, k, rng)
    else:
        shares = _shares(log_densities(start, x))[0]
    last, n_eff = -math.inf, 1.0 / float(weights @ weights)
    for _ in range(most):
        normals = _maximised(z, weights, shares, n_eff)
        shares, logs = _shares(log_densities(normals, z))
        mean = float(weights @ logs)
        if mean - last < 1e-3:
            break
        last = mean
    return Normals(normals.shares, centre + spread * normals.means, spread[:, None] * normals.factors)


def spreads(x: Array, weights: Array) -> Array:
    """The columns' standard deviations, or what quartiles say where that is less and not 0."""
    order = np.argsort(x, axis=0)
    below = np.cumsum(weights[order], axis=0)
    low, high = (
        x[order[(below < q).sum(0).clip(0, len(x) - 1), range(x.shape[1])], range(x.shape[1])] for q in (0.25, 0.75)
    )
    deviations, quartiles = np.sqrt(weights @ (x - weights @ x) ** 2), (high - low) / 1.349
    found = np.where(quartiles > 0.0, np.minimum(deviations, quartiles), deviations)
    return np.where(found > 0.0, found, 1.0)


def _shares(logs: Array) -> tuple[Array, Array]:
    """The components' shares in every sample (n, k), and the log of their sum, (n,)."""
    total = log_sum(logs)
    return np.exp(logs - total[:, None]), total


def _nearest(z: Array, weights: Array, k: int, rng: np.random.Generator) -> Array:
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


def _maximised(z: Array, weights: Array, shares: Array, n_eff: float) -> Normals:
    """The components that samples with such shares are most likely from."""
    d = z.shape[1]
    counts = n_eff * (weights @ shares)
    kept = counts >= min(d + 1, counts.max())
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
    added = 0.3 * (d + 1)
    covariances = (counts[:, None, None] * covariances + added * within) / (counts[:, None, None] + added)
    covariances += 1e-6 * np.eye(d)
    return Normals(counts / counts.sum(), means, np.linalg.cholesky(covariances))


def smoothed(x: Array, weights: Array, normals: Normals, h: float) -> list[Group]:
    """The groups of a mixture that is smoothed with h; h = 1 has one point in each, its mean."""
    if h == 1.0:
        one = np.ones(1)
        return [Group(m[None], one, f, float(s)) for s, m, f in zip(*normals)]
    shares = _shares(log_densities(normals, x))[0]
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


def choose(x: Array, weights: Array, folds: NDArray[np.intp], seed: int) -> list[Chosen]:
    """Choose the mixtures that say most of samples that are left out, the one with the largest share first.

    Mixtures of more and more components are fitted, until more of them say clearly less. The best one that is smoothed
    and those that are not are stacked. Of these the four with the largest shares are kept, where a share is at least
    .05: in many columns several fits together are better than any of them.

    Parameters
    ----------
    x, weights : (n, d) and (n,) arrays
        The weights are positive and sum to 1.
    folds : (n,) array of int
        The samples of a fold are left out together; those of −1 are not heard in choosing, only in the last fit.
    seed : int
        Of the starts of EM.
    """
    centre, spread = weights @ x, spreads(x, weights)
    z = (x - centre) / spread
    heard = np.flatnonzero(folds >= 0)
    left = _Left(z[heard], weights[heard] / weights[heard].sum(), folds[heard], seed)
    left.search()
    parts = [(left.best, left.smooth[left.best])] + [((k, 1.0), plain) for k, plain in left.plain.items()]
    found = stack(np.stack([logs for _, logs in parts], axis=1), left.weights)
    result, constant = [], np.log(spread).sum()
    for i in np.argsort(-found)[:4]:
        (k, h), logs = parts[i]
        if found[i] >= 0.05:
            normals = fit(z, weights, k, np.random.default_rng(seed), start=left.nearest(z, weights, k))
            normals = Normals(normals.shares, centre + spread * normals.means, spread[:, None] * normals.factors)
            left_out = np.full(len(x), math.nan)
            left_out[heard] = logs - constant
            groups = len(normals.shares)
            reason = f"{groups} group{'s' * (groups > 1)}, h = {h:g}: {left.weights @ left_out[heard]:.4g} nats"
            result.append(Chosen(normals, h, left_out, float(found[i]), reason))
    return result


class _Left:
    """What fits to all folds but one say of that one."""

    def __init__(self, z: Array, weights: Array, folds: NDArray[np.intp], seed: int) -> None:
        self.z, self.weights, self.seed = z, weights, seed
        self.folds = [(np.flatnonzero(folds != f), np.flatnonzero(folds == f)) for f in np.unique(folds)]
        self.fits: dict[int, list[Normals]] = {}
        self.plain: dict[int, Array] = {}
        self.smooth: dict[tuple[int, float], Array] = {}
        self.best = 1, 1.0

    def search(self) -> None:
        """Look at more and more components, each smoothed by about the h that was best before."""
        (n, d), hs, at, worse = self.z.shape, (0.3, 0.5, 0.7, 0.85), 2, 0
        few = max(1, min(len(self.folds), round(1000 * len(self.folds) / n)))
        judged = np.concatenate([left for _, left in self.folds[:few]])
        top = -math.inf
        for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48):
            if k > 1 and 0.8 * n < 2 * k * (d + 1):
                break
            self.fits[k] = [self._fit(rows, k) for rows, _ in self.folds]
            self.plain[k] = self._left_out(k, 1.0, len(self.folds))
            values: dict[int, float] = {}
            while at not in values:  # climb: to the better neighbour, until there is none
                for i in {max(at - 1, 0), at, min(at + 1, 3)} - set(values):
                    logs = self._left_out(k, hs[i], few)
                    values[i] = float(self.weights[judged] @ logs[judged])
                at = max(values, key=lambda i: values[i])
                if {max(at - 1, 0), min(at + 1, 3)} <= set(values):
                    break
            if values[at] > top:
                top, self.best = values[at], (k, hs[at])
            plain = max(self.plain, key=lambda j: float(self.weights @ self.plain[j]))
            less = self.plain[k] - self.plain[plain]
            mean = float(self.weights @ less)
            error = math.sqrt(float(self.weights**2 @ (less - mean) ** 2))
            worse = worse + 1 if mean < -2.0 * error else 0
            if worse == 2:
                break
        self.smooth[self.best] = self._left_out(*self.best, len(self.folds))

    def _fit(self, rows: NDArray[np.intp], k: int) -> Normals:
        weights = self.weights[rows] / self.weights[rows].sum()
        return fit(self.z[rows], weights, k, np.random.default_rng(self.seed), most=40)

    def _left_out(self, k: int, h: float, folds: int) -> Array:
        logs = np.full(len(self.z), -math.inf)
        for normals, (rows, left) in zip(self.fits[k], self.folds[:folds]):
            weights = self.weights[rows] / self.weights[rows].sum()
            if h == 1.0:
                logs[left] = log_sum(log_densities(normals, self.z[left]))
            else:
                logs[left] = log_density_of(smoothed(self.z[rows], weights, normals, h), self.z[left])
        return logs

    def nearest(self, z: Array, weights: Array, k: int) -> Normals:
        """The fit of k components, of all that were made without a fold, that says most of all samples."""
        return max(self.fits[k], key=lambda normals: float(weights @ log_sum(log_densities(normals, z))))


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
