"""Normal mixtures, smoothed: what a stack has beside sdkde, and the shares of its parts.

A mixture Σ_k π_k N(μ_k, Σ_k) is fitted by EM. Its smoothed form keeps the samples:

    p̂(y) = Σ_ik w_i r_ik N(y; μ_k + √(1 − h²) (x_i − μ_k), h² Σ_k),

r_ik the share of component k in sample i. Each group k has about the mean and covariance of its component whatever h
is: h = 1 is the mixture, and h → 0 a kernel estimate. The number of components, h, and how far covariances are shrunk
or whether they are diagonal are those that say most of left-out samples.

Samples x, weights and shares are on the host, or where a GPU's PyTorch has them; what is small is NumPy's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device
from numpy.typing import NDArray

from ..arrays import Array, array_namespace, to_host
from ..engine.products import dots, product, times
from ..engine.threads import checkpoint

Group = tuple[Array, Array, Array, float]  # points (n, d), their weights (n,), the kernel's factor (d, d), its share


class Normals(NamedTuple):
    """A mixture: shares (k,) that sum to 1, means (k, d), lower Cholesky factors of the covariances (k, d, d).

    Or several, with a first axis more; components that were given up have shares of 0 then.
    """

    shares: Array
    means: Array
    factors: Array

    def one(self, i: int) -> Normals:
        """The i-th of several, without components of share 0."""
        return Normals(*(x[i][self.shares[i] > 0.0] for x in self))


class Chosen(NamedTuple):
    """A smoothed mixture that was chosen; h = 1 is the mixture itself.

    ``left_out`` (n,): log densities at samples that were left out in turn, NaN at those that no fold has.
    """

    normals: Normals
    h: float
    left_out: Array
    shrink: float  # as of :func:`fit`


def log_densities(normals: Normals, y: Any) -> Any:
    """Log shares plus the components' log densities at y, (m, k); of several mixtures (b, m, k)."""
    *_, k, d = normals.means.shape
    inverses = np.linalg.inv(normals.factors)
    offsets = (inverses @ normals.means[..., None]).reshape(*inverses.shape[:-3], 1, k * d)
    constants = np.log(np.diagonal(inverses, axis1=-1, axis2=-2)).sum(-1) - 0.5 * d * math.log(2 * math.pi)
    with np.errstate(divide="ignore"):
        constants = (constants + np.log(normals.shares))[..., None, :]
    flat = inverses.reshape(*offsets.shape[:-2], k * d, d).swapaxes(-1, -2)
    if not isinstance(y, np.ndarray):
        sent = flat, offsets, constants
        parts = _beside(y, np.concatenate([a.reshape(-1) for a in sent])).split([a.size for a in sent])  # at once
        flat, offsets, constants = (x.reshape(a.shape) for x, a in zip(parts, sent))
        found = []
        for rows in _blocks(y.shape[0], math.prod(offsets.shape), 1 << 27):
            u = (y[rows] @ flat - offsets) ** 2
            found.append(constants - 0.5 * u.reshape(*u.shape[:-1], k, d).sum(-1))
        return found[0] if len(found) == 1 else array_namespace(y).concat(found, axis=-2)
    result = np.empty((*flat.shape[:-2], len(y), k))
    each = (a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:]) for a in (result, flat, offsets, constants))
    for into, matrix, offset, constant in zip(*each):
        matrix = np.ascontiguousarray(matrix)
        for rows in _blocks(len(y), k * d, 1 << 16):  # u stays in cache
            u = product(y[rows], matrix)
            u -= offset
            u = u.reshape(-1, k, d)
            into[rows] = constant - 0.5 * np.einsum("mkd,mkd->mk", u, u)
    return result


def _beside(y: Any, x: Array) -> Any:
    """An array of NumPy's where y is."""
    return x if isinstance(y, np.ndarray) else array_namespace(y).asarray(x, device=device(y))


def fit(
    x: Any, weights: Any, start: Any, *, shrink: Any = 1.0, ridge: Array | None = None, most: int = 100
) -> tuple[Normals, Any]:
    """Fit b mixtures of normals to samples x (n, d) by EM.

    ``weights`` (b, n) are the samples' in each mixture, and sum to 1. ``start`` are Normals, or shares (b, n, k).
    Returns the mixtures, and their log densities at the samples, (b, n).
    A mixture ends after ``most`` steps, or where one raises its mean log likelihood by less than 1e-3. Components with
    less than d + 1 samples, effectively, are given up. Covariances are shrunk towards their mean, as if that were
    .3 shrink (d + 1) more samples, and the mean towards its diagonal, as if by shrink² d more: that mends few samples,
    and spoils data that are nearly in a plane. With an infinite ``shrink``, a number or (b,), they are diagonal, and
    shrunk as one column's variance. ``ridge`` (d,) is added to variances.
    """
    centre = weights.sum(0) @ x / len(weights)
    z = x - centre
    ridge = 1e-10 * to_host(weights.sum(0) / len(weights) @ z**2) if ridge is None else ridge
    shares = _shares(log_densities(start, x))[0] if isinstance(start, Normals) else start
    n_eff = 1.0 / to_host((weights**2).sum(1))
    counts = n_eff[:, None] * to_host((weights[:, None, :] @ shares)[:, 0, :])
    shrink, last = np.broadcast_to(shrink, n_eff.shape), np.full(len(n_eff), -math.inf)
    going, ended = np.arange(len(n_eff)), dict[int, tuple[Any, ...]]()
    for step in range(most):
        checkpoint()
        normals, fewer = _maximised(z, weights, shares, counts, shrink, ridge)
        shares, logs = _shares(log_densities(normals, z))
        sums = (weights[:, None, :] @ shares)[:, 0, :], (weights * logs).sum(1)[:, None]
        found = to_host(array_namespace(x).concat(sums, axis=1))
        goes = ((found[:, -1] - last >= 1e-3) | fewer) & (step < most - 1)
        ended |= {int(going[i]): (*(part[i] for part in normals), logs[i]) for i in np.flatnonzero(~goes)}
        if not goes.any():
            break
        going, last, n_eff, shrink = (a[goes] for a in (going, found[:, -1], n_eff, shrink))
        counts = n_eff[:, None] * found[goes, :-1]
        if not goes.all():
            weights, shares = weights[_beside(x, goes)], shares[_beside(x, goes)]
    *parts, logs = zip(*(ended[i] for i in range(len(ended))))
    result = Normals(*map(np.stack, parts))
    return result._replace(means=result.means + to_host(centre)), array_namespace(x).stack(logs)


def _shares(logs: Any) -> tuple[Any, Any]:
    """The components' shares (…, n, k) in every sample, and the log of their sum (…, n)."""
    xp = array_namespace(logs)
    top = xp.clip(xp.max(logs, axis=-1, keepdims=True), min=-1e300)
    shares = xp.exp(logs - top)
    total = xp.sum(shares, axis=-1, keepdims=True)
    shares /= total
    return shares, (xp.log(total) + top)[..., 0]


def seeds(z: Any, weights: Any, rng: np.random.Generator) -> Iterator[Any]:
    """Yield points (b, d) of z (n, d), one for each of some weights (b, n), by k-means++."""
    xp, tries = array_namespace(z), 5
    chances = weights
    near: Any = None
    while True:
        sums = xp.cumulative_sum(chances, axis=1)
        drawn = _beside(z, rng.random((weights.shape[0], tries))) * sums[:, -1:]
        tried = z[xp.clip((sums[:, None, :] <= drawn[:, :, None]).sum(-1), max=z.shape[0] - 1)]  # (b, tries, d)
        flat = tried.reshape(-1, z.shape[1])
        away = (flat * flat).sum(1)[:, None] - 2.0 * times(flat, z.T) + (z * z).sum(1)
        away = away.reshape(*tried.shape[:2], -1)
        away = xp.where(away < 1e-13, 0.0, away)  # of equal samples, by rounding
        away = away if near is None else xp.minimum(near[:, None, :], away)
        best = xp.argmin((weights[:, None, :] * away).sum(-1), axis=1)
        each = xp.arange(weights.shape[0], device=device(z))
        near = away[each, best]
        chances = weights * near
        yield tried[each, best]


def nearest(z: Any, weights: Any, centres: Any) -> Any:
    """Shares (b, n, k) of 0 and 1, by k-means from these centres (b, k, d)."""
    xp, which = array_namespace(z), None
    (b, k, d), n = centres.shape, z.shape[0]
    for _ in range(20):
        across = times(z, centres.reshape(b * k, d).T).reshape(n, b, k)
        last, which = which, xp.argmin((centres * centres).sum(-1) - 2.0 * across, axis=2).T
        shares = xp.astype(which[:, :, None] == xp.arange(k, device=device(z)), xp.float64)
        if last is not None and bool(xp.all(which == last)):
            break
        heard = (weights[:, :, None] * shares).mT
        total = xp.clip(heard.sum(-1), min=1e-300)
        centres = times(heard.reshape(b * k, n), z).reshape(b, k, d) / total[:, :, None]
    return shares


def _maximised(z: Any, weights: Any, shares: Any, counts: Array, shrink: Array, ridge: Array) -> tuple[Normals, Any]:
    """Return the components that make the samples most likely, and which mixtures lost a component, (b,).

    ``counts`` (b, k) are the components' effective numbers of samples.
    """
    d, n_eff = z.shape[1], counts.sum(1)
    kept = counts >= np.minimum(d + 1, counts.max(1, keepdims=True))
    fewer = ((counts > 0.0) & ~kept).any(1)
    if fewer.any():
        shares = (shares + 1e-12) * _beside(shares, 1.0 * kept[:, None, :])  # what only a dropped one had is shared out
        shares /= shares.sum(2)[:, :, None]
        counts = n_eff[:, None] * to_host((weights[:, None, :] @ shares)[:, 0, :])
    means, covariances = _moments(z, weights, shares)
    diagonal = np.isinf(shrink)
    counted = (0.0, shrink**2 * d), (0.6, 0.3 * shrink * (d + 1))
    few, added = (np.where(diagonal, a, b)[:, None, None] for a, b in counted)
    covariances[diagonal] *= np.eye(d)
    counts, total = counts[:, :, None, None], n_eff[:, None, None]
    within = (counts * covariances).sum(1) / total
    within = (total * within + few * np.eye(d) * within) / (total + few)
    covariances = (counts * covariances + added[:, None] * within[:, None]) / (counts + added[:, None])
    covariances += np.diag(ridge)
    return Normals(counts[:, :, 0, 0] / total[:, 0], means, np.linalg.cholesky(covariances)), fewer


def _moments(z: Any, weights: Any, shares: Any) -> tuple[Array, Array]:
    """Means (b, k, d) and covariances (b, k, d, d) of samples by their shares (b, n, k), but those below 1e-5."""
    (n, d), (b, _, k) = z.shape, shares.shape
    if not isinstance(z, np.ndarray) or n * d * d <= 1 << 19:  # all at once
        xp = array_namespace(z)
        heard = (weights[:, :, None] * shares * (shares > 1e-5)).mT
        heard = (heard / xp.clip(heard.sum(-1), min=1e-300)[:, :, None]).reshape(b * k, n)
        found = xp.zeros((b * k, d + d * d), dtype=z.dtype, device=device(z))
        for rows in _blocks(n, d * d, 1 << 26):
            squares = (z[rows, :, None] * z[rows, None, :]).reshape(-1, d * d)
            found += times(heard[:, rows], xp.concat((z[rows], squares), axis=1))
        found = to_host(found)
        means, squares = found[:, :d].reshape(b, k, d), found[:, d:].reshape(b, k, d, d)
        return means, squares - means[..., None] * means[..., None, :]
    means, covariances = np.zeros((b, k, d)), np.zeros((b, k, d, d))
    for i, j in np.ndindex(b, k):
        heard = weights[i] * shares[i, :, j]
        some = np.flatnonzero(heard > 1e-5 * weights[i])
        heard = heard[some] / heard[some].sum()
        means[i, j] = heard @ z[some]
        away = np.sqrt(heard)[:, None] * (z[some] - means[i, j])
        covariances[i, j] = product(away.T, away)
    return means, covariances


def smoothed(x: Array, weights: Array, normals: Normals, h: float) -> list[Group]:
    """The groups, on the host, of a mixture that is smoothed with h; h = 1 has one point in each, its mean."""
    if h == 1.0:
        return [(m[None], np.ones(1), f, float(s)) for s, m, f in zip(*normals)]
    groups = list[Group]()
    for share, mean, factor in zip(_heard(x, weights, normals).T, normals.means, normals.factors):
        rows, total = np.flatnonzero(share), float(share.sum())
        if len(rows):
            groups.append((mean + math.sqrt(1 - h * h) * (x[rows] - mean), share[rows] / total, h * factor, total))
    return groups


def _heard(x: Any, weights: Any, normals: Normals) -> Any:
    """The components' shares in every sample, times its weight (n, k)."""
    shares = _shares(log_densities(normals, x))[0]
    shares[shares < 1e-3] = 0.0
    shares *= (weights / shares.sum(1))[:, None]
    return shares


def log_density_of(groups: list[Group], y: Array) -> Array:
    """Log densities of the groups' sum at y on the host, (m,)."""
    result = np.full(len(y), -math.inf)
    for points, weights, factor, share in groups:
        inverse = np.linalg.inv(factor).T
        u, v = (product(a - points[0], inverse) for a in (y, points))
        constant = math.log(share) - np.log(np.diagonal(factor)).sum() - 0.5 * y.shape[1] * math.log(2 * math.pi)
        columns = np.log(weights) - 0.5 * (v * v).sum(1)
        for rows in _blocks(len(y), len(points), 1 << 18):
            total = _shares(product(u[rows], v.T) + columns)[1] - 0.5 * (u[rows] * u[rows]).sum(1)
            result[rows] = np.logaddexp(result[rows], total + float(constant))
    return result


def smoothed_logs(x: Any, weights: Any, normals: Normals, widths: Sequence[float], y: Any) -> Any:
    """Log densities (h, m) at y of a mixture of samples x that is smoothed with each of some ``widths`` h."""
    if isinstance(y, np.ndarray):
        return np.stack([log_density_of(smoothed(x, weights, normals, h), y) for h in widths])
    xp, shares, found = array_namespace(x), _heard(x, weights, normals), list[Any]()
    inverses, means, logs = (_beside(x, a) for a in (np.linalg.inv(normals.factors), normals.means, np.log(widths)))
    constants = xp.linalg.diagonal(inverses).log().sum(1) - 0.5 * y.shape[1] * math.log(2 * math.pi)
    v = (x[None] - means[:, None]) @ inverses.mT
    columns, squares = (xp.log(shares).T + constants[:, None])[:, None], (v * v).sum(2)[:, None]
    for rows in _blocks(y.shape[0], shares.shape[0] * shares.shape[1], 1 << 26):  # all components at once
        u, each = (y[None, rows] - means[:, None]) @ inverses.mT, list[Any]()
        across, own = u @ v.mT, (u * u).sum(2)[:, :, None]
        for h in widths:
            less = math.sqrt(1 - h * h)
            e = (less * across - 0.5 * own - 0.5 * less**2 * squares) / h**2 + columns
            e = xp.permute_dims(e, (1, 0, 2)).reshape(e.shape[1], -1)
            each.append(_shares(e)[1])
        found.append(xp.stack(each))
    return xp.concat(found, axis=1) - y.shape[1] * logs[:, None]


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
    z, parts, d = x[heard], weights[heard] / weights[heard].sum(), x.shape[1]
    numbers, fold = np.unique(folds[heard], return_inverse=True)
    outs = fold == np.arange(len(numbers))[:, None]
    by_fold = np.where(outs, 0.0, parts)  # each without its own samples
    by_fold /= by_fold.sum(1, keepdims=True)
    samples, inside = there(z), there(by_fold)
    ranks = there(np.argsort(np.argsort(z, axis=0, kind="stable"), axis=0) / len(z))
    ridge = 1e-10 * (weights @ (x - weights @ x) ** 2)  # a column may be constant in a fold
    few = max(1, min(len(outs), round(1000 * len(outs) / len(z))))  # enough to choose h by
    judged = np.any(outs[:few], axis=0)
    cuts = [(there(z[~out]), there(w[~out]), there(z[out])) for w, out in zip(by_fold, outs)]
    fits: dict[tuple[int, float], Normals] = {}
    plain: dict[tuple[int, float], Array] = {}

    def fitted(k: int, shrinks: list[float], start: Any) -> None:
        xp, many = array_namespace(inside), len(shrinks)
        each = xp.concat([inside] * many)
        if isinstance(start, Normals):
            start = Normals(*(np.concatenate([a] * many) for a in start))
        else:
            start = xp.concat([start] * many)
        found, logs = fit(samples, each, start, shrink=np.repeat(shrinks, len(outs)), ridge=ridge, most=40)
        for i, shrink in enumerate(shrinks):
            rows = slice(i * len(outs), (i + 1) * len(outs))
            fits[k, shrink] = Normals(*(a[rows] for a in found))
            plain[k, shrink] = to_host(logs[rows])[fold, np.arange(len(z))]
            # Without correlations more components are needed: such mixtures have only each other to keep up with.
            rivals = [logs for key, logs in plain.items() if math.isfinite(shrink) or key[1] == shrink]
            less = plain[k, shrink] - max(rivals, key=lambda logs: float(parts @ logs))
            error = math.sqrt(float(parts**2 @ (less - parts @ less) ** 2))
            worse[shrink] = worse[shrink] + 1 if parts @ less < -2.0 * error else 0

    def left_out(key: tuple[int, float], widths: Sequence[float], many: int) -> Array:
        logs = np.full((len(widths), len(z)), -math.inf)
        for i, (rows, shares, left) in enumerate(cuts[:many]):
            logs[:, outs[i]] = to_host(smoothed_logs(rows, shares, fits[key].one(i), widths, left))
        return logs

    widths, best, top = (0.3, 0.5, 0.7, 0.85), ((1, 1.0), 1.0), -math.inf
    worse = {1.0: 0, 0.015: 0} | dict.fromkeys([math.inf] * (d > 2), 0)
    for k in (1, 2, 3, 4, 6, 8, 12, 17, 24, 34):
        going = [shrink for shrink in worse if worse[shrink] < 2 and (k == 1 or 0.8 * len(z) >= 2 * k * (d + 1))]
        if not going:
            break
        drawn = itertools.islice(seeds(ranks, inside, np.random.default_rng([seed, k])), k)
        start = nearest(ranks, inside, array_namespace(ranks).stack(list(drawn), axis=1))
        if 1.0 in going:
            fitted(k, [1.0], start)
            start = fits[k, 1.0]
        if others := [shrink for shrink in going if shrink != 1.0]:
            fitted(k, others, start)
        key = k, max(going, key=lambda shrink: float(parts @ plain[k, shrink]))
        values = left_out(key, widths, few)[:, judged] @ parts[judged]
        if values.max() > top:
            top, best = values.max(), (key, widths[int(np.argmax(values))])
    key, h = best
    found = [(key, h, left_out(key, [h], len(cuts))[0] if h < 1.0 else plain[key])]
    found += [(key, 1.0, logs) for key, logs in plain.items()]
    shares = stack(np.stack([logs for _, _, logs in found], axis=1), parts)
    rows, by_all = there(x), there(weights[None])

    def last(i: np.intp) -> Chosen:
        key, h, logs = found[i]
        start = fits[key].one(int(np.argmax(to_host(_shares(log_densities(fits[key], samples))[1]) @ parts)))
        everywhere = np.full(len(x), math.nan)
        everywhere[heard] = logs
        start = Normals(*(a[None] for a in start))
        return Chosen(fit(rows, by_all, start, shrink=key[1], most=30)[0].one(0), h, everywhere, key[1])

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


def _blocks(n: int, width: int, most: int) -> Iterator[slice]:
    size = max(1, most // width)
    return (slice(i, i + size) for i in range(0, n, size))
