"""Normal mixtures, smoothed: what a stack has beside sdkde, and the shares of its parts.

A mixture Σ_k π_k N(μ_k, Σ_k) is fitted by EM. Its smoothed form keeps the samples:

    p̂(y) = Σ_ik w_i r_ik N(y; μ_k + √(1 − h²) (x_i − μ_k), h² Σ_k),

r_ik the share of component k in sample i. Each group k has about the mean and covariance of its component whatever h
is: h = 1 is the mixture, and h → 0 a kernel estimate. The number of components, h, and how far covariances are shrunk
or whether they are diagonal are those that say most of left-out samples.

Samples x, weights and shares are on the host, or where a GPU's PyTorch has them; what is small is NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device
from numpy.typing import NDArray

from ..arrays import Array, array_namespace, look, to_host
from ..engine.products import dots, product
from ..engine.threads import checkpoint

Group = tuple[Any, Any, Array, float]  # points (n, d), their weights (n,), the kernel's factor (d, d), its share


class Normals(NamedTuple):
    """A mixture: shares (k,) that sum to 1, means (k, d), lower Cholesky factors of the covariances (k, d, d)."""

    shares: Array
    means: Array
    factors: Array


class Chosen(NamedTuple):
    """A smoothed mixture that was chosen; h = 1 is the mixture itself.

    ``left_out`` (n,): log densities at samples that were left out in turn, NaN at those that no fold has.
    """

    normals: Normals
    h: float
    left_out: Array
    shrink: float  # as of :func:`fit`


def log_densities(normals: Normals, y: Any) -> Any:
    """Log shares plus the components' log densities at y, (m, k)."""
    k, d = normals.means.shape
    inverses = np.linalg.inv(normals.factors)
    offsets = (inverses @ normals.means[:, :, None]).reshape(-1)
    constants = np.log(normals.shares) + np.log(np.diagonal(inverses, axis1=1, axis2=2)).sum(1)
    constants -= 0.5 * d * math.log(2 * math.pi)
    if not isinstance(y, np.ndarray):
        sent = _beside(y, np.concatenate([inverses.reshape(-1), offsets, constants]))  # at once
        flat, offsets, constants = sent[: k * d * d].reshape(k * d, d).T, sent[k * d * d : -k], sent[-k:]
        return constants - 0.5 * ((y @ flat - offsets) ** 2).reshape(-1, k, d).sum(2)
    result = np.empty((len(y), k))
    flat = np.ascontiguousarray(inverses.reshape(k * d, d).T)
    for rows in _blocks(len(y), k * d, 1 << 16):  # u stays in cache
        u = product(y[rows], flat)
        u -= offsets
        u = u.reshape(-1, k, d)
        result[rows] = constants - 0.5 * np.einsum("mkd,mkd->mk", u, u)
    return result


def _product(a: Any, b: Any) -> Any:
    """On the host by one thread: steps are short, and threads of BLAS that wait for each other take twenty times."""
    return product(a, b) if isinstance(a, np.ndarray) else a @ b


def _beside(y: Any, x: Array) -> Any:
    """An array of NumPy's where y is."""
    return x if isinstance(y, np.ndarray) else array_namespace(y).asarray(x, device=device(y))


def fit(
    x: Any, weights: Any, start: Any, *, shrink: float = 1.0, ridge: Array | None = None, most: int = 100
) -> Normals:
    """Fit normals by EM; fewer than at the start where components have less than d + 1 samples, effectively.

    x is (n, d); weights (n,) sum to 1; ``start`` are Normals, or shares (n, k) on the host. Ends after ``most`` steps,
    or where one raises the mean log likelihood by less than 1e-3. Covariances are shrunk towards their mean, as if that
    were .3 shrink (d + 1) more samples, and the mean towards its diagonal, as if by shrink² d more: that mends few
    samples, and spoils data that are nearly in a plane. With an infinite ``shrink`` they are diagonal, and shrunk as
    one column's variance. ``ridge`` (d,) is added to variances.
    """
    centre, last = weights @ x, -math.inf
    z = x - centre
    ridge = 1e-10 * to_host(weights @ z**2) if ridge is None else ridge
    shares = _shares(log_densities(start, x))[0] if isinstance(start, Normals) else _beside(x, start)
    n_eff = 1.0 / float(weights @ weights)
    counts = n_eff * to_host(weights @ shares)
    for _ in range(most):
        checkpoint()
        normals = _maximised(z, weights, shares, counts, shrink, ridge)
        fewer = len(normals.shares) < shares.shape[1]
        shares, logs = _shares(log_densities(normals, z))
        *found, mean = look(lambda *both: both, weights @ shares, weights @ logs)
        counts, before, last = n_eff * np.array(found), last, mean
        if last - before < 1e-3 and not fewer:
            break
    return normals._replace(means=normals.means + to_host(centre))


def _shares(logs: Any) -> tuple[Any, Any]:
    """The components' shares in every sample (n, k), and the log of their sum, (n,)."""
    xp = array_namespace(logs)
    top = xp.clip(xp.max(logs, axis=1, keepdims=True), min=-1e300)
    shares = xp.exp(logs - top)
    total = xp.sum(shares, axis=1, keepdims=True)
    shares /= total
    return shares, (xp.log(total) + top)[:, 0]


def seeds(z: Array, weights: Array, k: int, rng: np.random.Generator) -> Array:
    """Points (k, d) of z, by k-means++."""
    centres = z[rng.choice(len(z), 1, p=weights)]
    near = ((z - centres) ** 2).sum(1)
    while len(centres) < k and near.max() > 0.0:
        chances = weights * near
        tried = rng.choice(len(z), 2 + int(math.log(k)), p=chances / chances.sum())
        nearer = [np.minimum(near, ((z - z[i]) ** 2).sum(1)) for i in tried]
        best = int(np.argmin([weights @ distances for distances in nearer]))
        near, centres = nearer[best], np.concatenate([centres, z[tried[best]][None]])
    return centres


def nearest(z: Array, weights: Array, centres: Array) -> Array:
    """Shares (n, k) of 0 and 1, by k-means from these centres."""
    for _ in range(20):
        which = np.argmin((centres**2).sum(1) - 2.0 * product(z, centres.T), axis=1)
        shares = (which[:, None] == np.arange(len(centres))).astype(float)
        shares = shares[:, shares.any(0)]
        centres = product(shares.T, weights[:, None] * z) / (weights @ shares)[:, None]
    return shares


def _maximised(z: Any, weights: Any, shares: Any, counts: Array, shrink: float, ridge: Array) -> Normals:
    """The components that samples with such shares are most likely from, of covariances that are shrunk.

    ``counts`` (k,): how many samples each has, effectively.
    """
    d, n_eff = z.shape[1], float(counts.sum())
    kept = counts >= min(d + 1, counts.max())
    if not kept.all():
        shares = shares[:, _beside(shares, kept)] + 1e-12  # samples that only a dropped one had are shared out
        shares /= shares.sum(1)[:, None]
        counts = n_eff * to_host(weights @ shares)
    counts = counts[:, None, None]
    means, covariances = _moments(z, weights, shares)
    few, added = shrink**2 * d, 0.3 * shrink * (d + 1)
    if math.isinf(shrink):
        covariances, few, added = covariances * np.eye(d), 0.0, 0.6
    within = (counts * covariances).sum(0) / counts.sum()
    within = (n_eff * within + few * np.diag(np.diagonal(within))) / (n_eff + few)
    covariances = (counts * covariances + added * within) / (counts + added)
    covariances += np.diag(ridge)
    return Normals(counts[:, 0, 0] / counts.sum(), means, np.linalg.cholesky(covariances))


def _moments(z: Any, weights: Any, shares: Any) -> tuple[Array, Array]:
    """Means (k, d) and covariances (k, d, d) of samples by their shares (n, k), but those below 1e-5."""
    (_, d), k = z.shape, shares.shape[1]
    if not isinstance(z, np.ndarray):  # all at once
        heard = weights[:, None] * shares * (shares > 1e-5)
        heard = (heard / heard.sum(0)).T  # (k, n)
        centres = heard @ z
        away = heard.sqrt()[:, :, None] * (z[None, :, :] - centres[:, None, :])
        both = to_host(array_namespace(z).concat((centres[:, :, None], away.mT @ away), axis=2))
        return both[:, :, 0], both[:, :, 1:]
    means, covariances = np.empty((k, d)), np.empty((k, d, d))
    for j, share in enumerate(shares.T):
        rows = np.flatnonzero(share > 1e-5)
        heard = weights[rows] * share[rows]
        heard /= heard.sum()
        means[j] = heard @ z[rows]
        away = np.sqrt(heard)[:, None] * (z[rows] - means[j])
        covariances[j] = product(away.T, away)
    return means, covariances


def smoothed(x: Any, weights: Any, normals: Normals, h: float) -> list[Group]:
    """The groups of a mixture that is smoothed with h; h = 1 has one point in each, its mean."""
    if h == 1.0:
        return [(m[None], np.ones(1), f, float(s)) for s, m, f in zip(*normals)]
    xp, shares = array_namespace(x), _shares(log_densities(normals, x))[0]
    shares[shares < 1e-3] = 0.0
    shares *= (weights / shares.sum(1))[:, None]
    groups = []
    for share, mean, factor in zip(shares.T, normals.means, normals.factors):
        rows, total, middle = xp.nonzero(share)[0], float(share.sum()), _beside(x, mean)
        if rows.shape[0]:
            groups.append((middle + math.sqrt(1 - h * h) * (x[rows] - middle), share[rows] / total, h * factor, total))
    return groups


def log_density_of(groups: list[Group], y: Any) -> Any:
    """Log densities of the groups' sum at y, (m,)."""
    xp = array_namespace(y)
    result = _beside(y, np.full(y.shape[0], -math.inf))
    for points, weights, factor, share in groups:
        points, weights, inverse = (_beside(y, a) for a in (points, weights, np.linalg.inv(factor).T))
        u, v = (_product(a - points[0], inverse) for a in (y, points))
        constant = math.log(share) - np.log(np.diagonal(factor)).sum() - 0.5 * y.shape[1] * math.log(2 * math.pi)
        columns = xp.log(weights) - 0.5 * (v * v).sum(1)
        for rows in _blocks(y.shape[0], points.shape[0], 1 << 18 if isinstance(y, np.ndarray) else 1 << 26):
            total = _shares(_product(u[rows], v.T) + columns)[1] - 0.5 * (u[rows] * u[rows]).sum(1)
            result[rows] = xp.logaddexp(result[rows], total + float(constant))
    return result


def choose(
    x: Array, weights: Array, folds: NDArray[np.intp], seed: int, there: Callable[[Array], Any] = np.asarray
) -> list[Chosen]:
    """Choose the mixtures that say most of samples that are left out, the one with the largest share first.

    Mixtures of more and more components are fitted, until more of them say clearly less. The best one that is smoothed
    and those that are not are stacked, and four at most are kept. Samples with the same number in ``folds`` (n,) are
    left out together, those with −1 are heard only in the last fit. ``seed`` is that of EM's starts. ``there`` brings
    arrays to where sums are to be made.
    """
    heard = np.flatnonzero(folds >= 0)
    z, parts, fold, d = x[heard], weights[heard] / weights[heard].sum(), folds[heard], x.shape[1]
    outs = [fold == f for f in np.unique(fold)]
    on_host = [(z[~out], parts[~out] / parts[~out].sum()) for out in outs]
    cuts = [(there(rows), there(shares)) for rows, shares in on_host]
    left = [there(z[out]) for out in outs]
    ranks = [np.argsort(np.argsort(rows, axis=0, kind="stable"), axis=0) / len(rows) for rows, _ in on_host]
    ridge = 1e-10 * (weights @ (x - weights @ x) ** 2)  # a column may be constant in a fold
    few = max(1, min(len(cuts), round(1000 * len(cuts) / len(z))))  # enough to choose h by
    judged = np.any(outs[:few], axis=0)
    fits: dict[tuple[int, float], list[Normals]] = {}
    plain: dict[tuple[int, float], Array] = {}

    def fitted(i: int, start: Any, shrink: float) -> Normals:
        start = start if isinstance(start, Normals) else nearest(ranks[i], on_host[i][1], start)
        return fit(*cuts[i], start, shrink=shrink, ridge=ridge, most=40)

    def left_out(key: tuple[int, float], h: float, many: int) -> Array:
        def of(i: int) -> Array:
            if h == 1.0:
                return to_host(_shares(log_densities(fits[key][i], left[i]))[1])
            return to_host(log_density_of(smoothed(*cuts[i], fits[key][i], h), left[i]))

        logs = np.full(len(z), -math.inf)
        for i in range(many):
            logs[outs[i]] = of(i)
        return logs

    best, top, worse = ((1, 1.0), 1.0), -math.inf, {1.0: 0, 0.015: 0} | dict.fromkeys([math.inf] * (d > 2), 0)
    for k in (1, 2, 3, 4, 6, 8, 12, 17, 24, 34):
        going = [shrink for shrink in worse if worse[shrink] < 2 and (k == 1 or 0.8 * len(z) >= 2 * k * (d + 1))]
        for shrink in going:
            rng = np.random.default_rng(seed)
            starts: list[Any] = fits.get((k, 1.0)) or [seeds(u, w, k, rng) for u, (_, w) in zip(ranks, on_host)]
            fits[k, shrink] = [fitted(i, start, shrink) for i, start in enumerate(starts)]
            plain[k, shrink] = left_out((k, shrink), 1.0, len(cuts))
            # Without correlations more components are needed: such mixtures have only each other to keep up with.
            rivals = [logs for key, logs in plain.items() if math.isfinite(shrink) or key[1] == shrink]
            less = plain[k, shrink] - max(rivals, key=lambda logs: float(parts @ logs))
            error = math.sqrt(float(parts**2 @ (less - parts @ less) ** 2))
            worse[shrink] = worse[shrink] + 1 if parts @ less < -2.0 * error else 0
        if going:
            key = k, max(going, key=lambda shrink: float(parts @ plain[k, shrink]))
            value, h = max((float(parts[judged] @ left_out(key, h, few)[judged]), h) for h in (0.3, 0.5, 0.7, 0.85))
            best, top = ((key, h), value) if value > top else (best, top)
    found = [(*best, left_out(*best, len(cuts))), *((key, 1.0, logs) for key, logs in plain.items())]
    shares = stack(np.stack([logs for _, _, logs in found], axis=1), parts)
    every, all_of_them = there(z), (there(x), there(weights))

    def last(i: np.intp) -> Chosen:
        key, h, logs = found[i]
        start = max(fits[key], key=lambda one: float(parts @ to_host(_shares(log_densities(one, every))[1])))
        everywhere = np.full(len(x), math.nan)
        everywhere[heard] = logs
        return Chosen(fit(*all_of_them, start, shrink=key[1], most=30), h, everywhere, key[1])

    return [last(i) for i in np.argsort(-shares, kind="stable")[:4] if shares[i] >= 0.05]


def stack(logs: Array, weights: Array, prior: Array | float = 0.0) -> Array:
    """The parts' shares (e,) that say most of left-out samples, by log densities (n, e); ``prior``: of samples."""
    prior = prior * float(weights @ weights) + np.zeros(logs.shape[1])
    densities = np.exp(logs - np.maximum(logs.max(1, keepdims=True), -1e300))
    densities[~densities.any(1)] = 1.0
    shares, turned = np.full(logs.shape[1], 1.0 / logs.shape[1]), np.ascontiguousarray(densities.T)
    for _ in range(1000):
        last, shares = shares, shares * dots(turned, weights / dots(densities, shares)) + prior
        shares /= shares.sum()
        if np.abs(shares - last).max() < 1e-7:
            break
    shares = np.where(shares < 0.005, 0.0, shares)
    return shares / shares.sum()


def _blocks(n: int, width: int, most: int = 1 << 18) -> Iterator[slice]:
    size = max(1, most // width)
    return (slice(i, i + size) for i in range(0, n, size))
