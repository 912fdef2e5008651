"""Integrals of a fitted density: probabilities, distribution functions, quantiles, moments, the mass of regions.

Of the Laplace kernel in one dimension, φ(u) (3/2 − ½ u²), the integral up to t is Φ(t) + ½ t φ(t), as ∫ u² φ = Φ − t φ.
In d dimensions 1 + d/2 − ½ r² = 1 + Σ_k (½ − ½ u_k²), so that over a box it is ΠF_k + Σ_k G_k Π_{l≠k} F_l, where F is
the difference of Φ between the two sides, and G that of ½ t φ(t).

A mixture's covariance is that of its kernels' places, and the kernels' own: v c² H of one that is c bandwidths wide. v
is 1 for the Gaussian, ∫ r^(d+1) K / (d ∫ r^(d−1) K) for another kernel, and 0 for Laplace's. In other coordinates a
column's mean is by quadrature of its marginal density.

A highest-density region is where a density is above one value. The smallest that holds a given mass is one. Source:
Hyndman, "Computing and graphing highest density regions", The American Statistician 50 (1996).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays import Argument, Array, numbers, to_host
from ..arrays.frames import check_labels
from ..messages import brief
from .batches import densities
from .conditionals import root
from .density import between, normal_distribution, radial_variance, times_density
from .mapped import leaves, masses
from .mixture import check_positive, draws, marginal


def probability(fitted: Any, lower: Any, upper: Any) -> float:
    if fitted.parts:
        return sum(math.exp(part.log_share) * probability(part.fitted, lower, upper) for part in fitted.parts)
    d = fitted.problem.d
    low, high = corner("lower", lower, d, fitted.names), corner("upper", upper, d, fitted.names)
    wrong = low > high
    if fitted.coordinates is not None:
        wrong &= ~fitted.coordinates.circular
    if wrong.any():
        k = int(np.argmax(wrong))
        raise ValueError(f"lower is above upper in dimension {k}: {low[k]} > {high[k]}; swap them")
    if fitted.coordinates is not None:
        low, high = map(fitted.into, fitted.coordinates.arcs(low, high))
        return probability(fitted.first.current, low, high) if fitted.ends is None else _within(fitted, low, high)
    bounded = np.flatnonzero((low > -math.inf) | (high < math.inf))
    if not bounded.size:
        return 1.0
    if bounded.size < d and fitted.request.negative == "keep":
        fitted, low, high = marginal(fitted, bounded), low[bounded], high[bounded]
    if fitted.request.negative != "keep":
        raise ValueError(f"negative={fitted.request.negative!r} has no probabilities in closed form; pass 'keep'")
    points, log_weights, scales, centre = fitted.on_host
    weights, factor = np.exp(log_weights), fitted.bandwidth.factor
    if factor.ndim == 2:
        if fitted.problem.reduction.name == "LAPLACE":
            raise ValueError("method='laplace' has no probabilities with a full matrix; pass bandwidth as numbers")
        displacement = fitted.bandwidth.stretch(points)
        sides = ((side - centre - displacement) / scales[:, None] for side in (low, high))
        each = _plane(factor, *sides) if len(factor) == 2 else _sequential(factor, *sides)
        return float(weights @ each / weights.sum())
    each = masses(fitted, np.stack([low, high]), fitted.request.method == "laplace")
    return float(each.sum() / weights.sum())


def _within(fitted: Any, low: Array, high: Array) -> float:
    """The probability of a box of columns that end; of circles that of the arc from the first corner on."""
    ends, around = fitted.ends, fitted.coordinates.circular & (low > high)
    if around.any():
        j = int(np.argmax(around))
        first, last = high.copy(), low.copy()
        first[j], last[j] = ends[1, j], ends[0, j]
        return _within(fitted, low, first) + _within(fitted, last, high)
    low, high = np.maximum(low, ends[0]), np.minimum(high, ends[1])
    if (low >= high).any():
        return 0.0
    found = probability(fitted.first.current, low, high) * math.exp(-fitted.log_mass)
    return found if fitted.request.method == "laplace" else min(1.0, found)  # a part of a signed density may exceed 1


def distribution(fitted: Any) -> Callable[[Any], Array]:
    """The distribution function in one dimension: of values (m,) in data units to probabilities (m,)."""
    if fitted.problem.d != 1:
        why = "a distribution function has one; take a marginal first, or the probability of a box"
        raise ValueError(f"the density has {fitted.problem.d} dimensions, and {why}")
    if fitted.request.negative != "keep":
        raise ValueError(f"negative={fitted.request.negative!r} has no integral in closed form; pass negative='keep'")
    if fitted.parts:
        parts = [(math.exp(part.log_share), distribution(part.fitted)) for part in fitted.parts]
        return lambda x: sum((share * function(x) for share, function in parts), np.zeros(len(x)))
    if fitted.coordinates is not None:
        return _mapped_distribution(fitted)
    points, log_weights, scales, centre = fitted.on_host
    order, widest = np.argsort(points[:, 0], kind="stable"), scales.max()
    u, w, scales = points[order, 0], np.exp(log_weights[order]), scales[order]
    reached = np.concatenate([[0.0], np.cumsum(w)])
    h, laplace = float(fitted.bandwidth.factor.reshape(-1)[0]), fitted.request.method == "laplace"
    cumulative = normal_distribution()

    def sums(x: Array) -> Array:
        y = (x - centre[0]) / h
        result, by_place = np.empty(len(y)), np.argsort(y, kind="stable")
        for start in range(0, len(y), 256):
            block = by_place[start : start + 256]
            rows = y[block]
            first = np.searchsorted(u, rows[0] - 9.4 * widest)  # those before add all that they have
            last = np.searchsorted(u, rows[-1] + 38.6 * widest)  # those after add nothing in float64
            total = np.full(len(rows), reached[first])
            for left in range(first, last, 1 << 14):
                some = slice(left, min(left + (1 << 14), last))
                t = (rows[:, None] - u[None, some]) / scales[None, some]
                share = cumulative(t)
                if laplace:
                    share += 0.5 * times_density(t)
                total += share @ w[left : left + t.shape[1]]
            result[block] = total / reached[-1]
        return result

    return sums


def _mapped_distribution(fitted: Any) -> Callable[[Any], Array]:
    """The distribution function in other coordinates; round a circle from 0."""
    inner, into, ends = distribution(fitted.first.current), fitted.into, fitted.ends
    if ends is None:
        return lambda x: inner(into(x))
    start, mass, (low, high) = _below(fitted.first.current, ends), math.exp(fitted.log_mass), ends[:, 0]
    least, most = (-math.inf, math.inf) if fitted.request.method == "laplace" else (0.0, 1.0)  # the former is signed

    def between_ends(x: Array) -> Array:
        z = into(x)
        found = (inner(np.clip(z, low, high)) - start) / mass
        return np.where(z <= low, 0.0, np.where(z >= high, 1.0, np.clip(found, least, most)))

    if not fitted.coordinates.circular[0]:
        return between_ends
    zero, before = into(np.zeros(1)), between_ends(np.zeros(1))

    def around(x: Array) -> Array:
        inside = np.clip(x, 0.0, high)
        found = between_ends(inside) - before + (into(inside) < zero)
        return np.where(x <= 0.0, 0.0, np.where(x >= high, 1.0, np.clip(found, least, most)))

    return around


def _below(fitted: Any, ends: Array) -> float:
    """The mass of a density in one dimension below the lower end."""
    return float(distribution(fitted)(ends[:1, 0])[0]) if ends[0, 0] > -math.inf else 0.0


def quantiles(fitted: Any, q: Array) -> Array:
    """The values (m,) where the distribution function is q, by :func:`.conditionals.root`."""
    check_positive(fitted, "has no quantiles")
    inside = (q > 0) & (q < 1)
    if fitted.coordinates is not None:
        first, ends = fitted.first.current, fitted.ends
        if ends is None:
            return fitted.coordinates.inverse(quantiles(first, q)[:, None])[:, 0]
        mass, outer, shares = math.exp(fitted.log_mass), fitted.coordinates.inverse(ends)[:, 0], q
        if fitted.coordinates.circular[0]:  # from where z begins, not from 0
            outer = ends[:, 0]
            before = (distribution(first)(fitted.into(np.zeros(1))) - _below(first, ends)) / mass
            shares = np.mod(before + q, 1.0)
        reached = np.where(inside, _below(first, ends) + mass * shares, 0.5)
        z = np.clip(quantiles(first, reached), *ends[:, 0])
        return np.where(inside, fitted.coordinates.inverse(z[:, None])[:, 0], np.where(q <= 0, *outer))
    function, ends = distribution(fitted), (-math.inf, math.inf)
    if fitted.parts:
        outer = np.array([quantiles(part.fitted, np.array([0.0, 1.0])) for part in fitted.parts])
        ends = outer[:, 0].min(), outer[:, 1].max()
        each = np.array([quantiles(part.fitted, np.where(inside, q, 0.5)) for part in fitted.parts])
        low, high = each.min(axis=0), each.max(axis=0)  # between which that of the sum is
        start = 0.5 * low + 0.5 * high
    else:
        points, log_weights, scales, centre = fitted.on_host
        h, carried = float(fitted.bandwidth.factor.reshape(-1)[0]), points[log_weights > -math.inf, 0]
        reach = 40.0 * scales.max()  # beyond it there is nothing
        low = np.full(q.shape, centre[0] + h * (carried.min() - reach))
        high = np.full(q.shape, centre[0] + h * (carried.max() + reach))
        order = np.argsort(points[:, 0])
        start = centre[0] + h * np.interp(q, np.cumsum(np.exp(log_weights[order])), points[order, 0])

    def below(x: Array, rows: Array) -> tuple[Array, Array]:
        try:
            return function(x), np.asarray(densities(fitted, Argument.of("query", x), log=False), dtype=np.float64)
        except ValueError:  # beyond the precision's reach: then by halves
            return function(x), np.full(len(x), math.nan)

    return np.where(inside, root(below, np.where(inside, q, 0.5), low, high, start), np.where(q <= 0, *ends))


def corner(name: str, value: Any, d: int, names: Sequence[str] = ()) -> Array:
    check_labels(name, value, names)
    found = numbers(name, value)
    if found.shape not in ((d,), (1,), ()) or np.isnan(found).any():
        raise ValueError(f"{name} is {brief(value)}; pass {d} numbers, or one for all, which may be infinite")
    return np.broadcast_to(found, (d,)).copy()


def _plane(factor: Array, low: Array, high: Array) -> Array:
    """Probabilities (n,) of boxes under N(0, L Lᵀ) in two dimensions: Gauss and Legendre's rule along the first.

    The nodes lie in stretches of the length on which the integrand is smooth: the second's width over the slope.
    """
    parts = int(min(64, math.ceil(max(1.0, abs(factor[1, 0]) / factor[1, 1]))))
    x, w = np.polynomial.legendre.leggauss(96)
    a, b = (np.clip(side[:, 0] / factor[0, 0], -9.0, 9.0) for side in (low, high))
    total = np.zeros(len(a))
    for part in range(parts):
        left, width = a + (b - a) * (part / parts), (b - a) / parts
        for node, weight in zip(x, w):
            z = left + 0.5 * width * (node + 1.0)
            sides = ((side[:, 1] - factor[1, 0] * z) / factor[1, 1] for side in (low, high))
            total += 0.5 * width * weight * np.exp(-0.5 * z * z) * between(*sides)
    return total / math.sqrt(2.0 * math.pi)


def _sequential(factor: Array, low: Array, high: Array) -> Array:
    """Probabilities (n,) of boxes under N(0, L Lᵀ), by Genz's sequence of conditional ones over shifted Sobol points.

    Source: Genz, "Numerical computation of multivariate normal probabilities" (1992). Components share the points, each
    shifted by other numbers: so their errors average out.
    """
    from scipy.special import ndtri
    from scipy.stats import qmc

    n, d = low.shape
    many, rng = int(2 ** np.clip(math.log2((1 << 20) / n) // 1, 5, 14)), np.random.default_rng(0)
    points, shifts = qmc.Sobol(d - 1, seed=rng).random(many), rng.random((n, d - 1))
    ndtr, total, step = normal_distribution(), np.zeros(n), max(1, (1 << 16) // n)
    for start in range(0, many, step):
        t = points[start : start + step]
        z, share = np.zeros((len(t), n, d)), np.ones((len(t), n))
        for k in range(d):
            rest = z[:, :, :k] @ factor[k, :k]
            a, b = ((side[:, k] - rest) / factor[k, k] for side in (low, high))
            width = between(a, b)
            share *= width
            if k < d - 1:
                flipped = a > 0  # from the side whose tail float64 holds
                into = (t[:, k, None] + shifts[:, k]) % 1.0 * width
                reached = np.where(flipped, ndtr(-a) - into, ndtr(a) + into)
                z[:, :, k] = np.where(flipped, -1.0, 1.0) * ndtri(np.clip(reached, 1e-300, 1.0 - 1e-16))
        total += share.sum(axis=0)
    return total / many


def moments(fitted: Any, both: bool) -> tuple[Array, Array]:
    """The mean (d,), and where ``both`` are wanted the covariance (d, d)."""
    if fitted.request.negative != "keep":
        raise ValueError(f"negative={fitted.request.negative!r} has no moments in closed form; pass 'keep'")
    if parts := leaves(fitted):
        shares = np.exp([part.log_share for part in parts])
        means, covariances = map(np.stack, zip(*(moments(part.fitted, both) for part in parts)))
        middle = shares @ means / shares.sum()
        covariances = covariances + (means - middle)[:, :, None] * (means - middle)[:, None, :]
        return middle, np.einsum("e,eij->ij", shares / shares.sum(), covariances)
    d = fitted.problem.d
    if fitted.coordinates is not None:
        if both and d > 1:
            sampled = "numpy.cov(density.sample(100_000, random_state=0).T)"
            instead = f"take {sampled}, or the variance of each marginal(j), which is by quadrature"
            raise ValueError(f"in coordinates {fitted.coordinates} a covariance has no closed form; {instead}")
        middle, variances = np.array([_column(fitted if d == 1 else marginal(fitted, [j])) for j in range(d)]).T
        return middle, np.diag(variances)
    points, log_weights, scales, centre = fitted.on_host
    weights, stretch = np.exp(log_weights), fitted.bandwidth.stretch
    weights /= weights.sum()
    middle = weights @ points
    own = 0.0 if fitted.request.method == "laplace" else radial_variance(fitted.request.kernel, d)
    spread = (points - middle).T @ ((points - middle) * weights[:, None]) + own * (weights @ scales**2) * np.eye(d)
    return centre + stretch(middle[None, :])[0], stretch(stretch(spread).T)


def _column(fitted: Any) -> tuple[float, float]:
    """The mean and the variance in one dimension, by quadrature."""
    found = None if fitted.coordinates.circular[0] else on_cells(fitted)
    if found is None:
        why = "its samples are scattered, or go round a circle, where it depends on the cut"
        instead = "take the mean of sample(n), of angles that of their sines and cosines"
        raise ValueError(f"{fitted.coordinates} has no mean by quadrature: {why}; {instead}")
    x, _, masses = found
    middle = x @ masses / masses.sum()
    return float(middle), float((x - middle) ** 2 @ masses / masses.sum())


def thresholds(values: Array, masses: Array, shares: Any) -> Array:
    """The values above which the shares of the mass lie, of points or cells with a density and a mass (k,) each."""
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(masses[order]) - 0.5 * masses[order]  # up to the middle of each
    return np.interp(shares, np.maximum.accumulate(reached), values[order])


def log_thresholds(fitted: Any, shares: Array, n: int, random_state: Any) -> Array:
    """The logs of the density above which the shares (k,) lie."""
    if (found := on_cells(fitted)) is not None:
        cells = np.arange(len(found[0]))
        parts = np.arange(-0.5, len(cells) - 0.5, 1.0 / 16.0) + 1.0 / 32.0  # sixteenths, so that sorting jumps less
        values, masses = (np.interp(parts, cells, x) for x in found[1:])
        return np.log(thresholds(values, masses / 16.0, shares))
    query = Argument.of("query", draws(fitted.current, n, random_state))
    logs = np.asarray(to_host(densities(fitted, query, log=True)), dtype=np.float64)
    return thresholds(logs, np.full(n, 1.0 / n), shares)


def on_cells(fitted: Any) -> tuple[Array, Array, Array] | None:
    """Cells of a 32nd of a kernel's width: middles, density, masses (k,); None for more than 2^16, and where d > 1."""
    found = list[Array]()
    for leaf in [part.fitted for part in leaves(fitted)] or [fitted]:
        inner = leaf.current if leaf.coordinates is None else leaf.first.current
        points, log_weights, scales, centre = inner.on_host
        places, far = points[log_weights > -math.inf, 0], (9.0 if inner.request.kernel == "gaussian" else 40.0)
        reach, h = far * scales.max(), float(inner.bandwidth.factor.reshape(-1)[0])
        ends = (-math.inf, math.inf) if leaf.coordinates is None or leaf.ends is None else leaf.ends[:, 0]
        low, high = np.clip(centre[0] + h * np.array([places.min() - reach, places.max() + reach]), *ends)
        many = max((high - low) / (h * scales.min()) * 32.0, 512.0)  # kernels may be wider than a support
        if many > 1 << 16 or fitted.problem.d > 1:
            return None
        z = np.linspace(low, high, math.ceil(many) + 1)
        if leaf.coordinates is not None:
            z = leaf.coordinates.inverse(z[:, None])[:, 0]
            z = np.append(z, ends) if leaf.coordinates.circular[0] else z  # a circle begins elsewhere in z
        found.append(z[np.isfinite(z)])
    edges = np.unique(np.concatenate(found))
    middles = 0.5 * edges[1:] + 0.5 * edges[:-1]
    values = np.asarray(densities(fitted, Argument.of("query", middles), log=False), dtype=np.float64)
    return middles, values, values * np.diff(edges)
