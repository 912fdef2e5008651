"""A fitted density as what it is, a mixture: its components and draws, and its marginals and conditionals.

The marginal of a normal over some coordinates has the means and the covariance of these. So has that of the Laplace
kernel N(x) (1 + d/2 − ½ r²): r² is that within the coordinates kept, plus one whose mean is the number of the others.

Of the conditional, let the coordinates given come first and L be the lower Cholesky factor of H in that order. A
component's whitened coordinates are independent, so the others keep their places: the origin moves to where the value
given is regressed to, and weights are multiplied by the densities there.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_torch_array

from ..arrays import Argument, Array, to_host
from ..bandwidth.matrix import Bandwidth
from ..messages import brief
from .density import kernel_draws
from .fitted import Fitted
from .mapped import located, masses, of_both
from .plan import FARTHEST


class Mixture(NamedTuple):
    """Σ_j weights_j N(y; means_j, scales_j² covariance), on the host, float64.

    Parameters
    ----------
    means : (n, d) array
        In data units: the samples, for sdkde as they have moved.
    weights : (n,) array
        They sum to 1.
    covariance : (d, d) array
        The bandwidth's matrix H, in squared data units.
    scales : (n,) array
        Widths in bandwidths: 1, and others of a guard.
    """

    means: Array
    weights: Array
    covariance: Array
    scales: Array


def components(fitted: Fitted) -> Mixture:
    if fitted.coordinates is not None:
        raise ValueError(f"in coordinates {fitted.coordinates} a density is no mixture of normals; leave them out")
    if fitted.parts:
        raise ValueError("a stacked density has kernels of several covariances; take mixture() of each of its parts")
    points, log_weights, scales, centre = fitted.on_host
    means, covariance = centre + fitted.bandwidth.stretch(points), np.array(fitted.bandwidth.matrix)
    return Mixture(means, np.exp(log_weights), covariance, scales)


def check_positive(fitted: Fitted, lacks: str) -> None:
    if fitted.request.method == "laplace":
        raise ValueError(f"method='laplace' is signed and {lacks}; pass method='sdkde' or 'kde'")


def check_count(name: str, count: Any) -> int:
    try:
        many = -1 if isinstance(count, (bool, np.bool_)) else operator.index(count)
    except TypeError:
        many = -1
    if many < 0:
        raise ValueError(f"{name} is {brief(count)}; pass an integer ≥ 0")
    return many


def generator(random_state: Any) -> Any:
    """The generator of NumPy given, a RandomState too, or a new one from a seed."""
    if isinstance(random_state, (np.random.Generator, np.random.RandomState)):
        return random_state
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        instead = "pass None, an integer ≥ 0, or a Generator or RandomState of NumPy"
        raise type(error)(f"random_state is {brief(random_state)}; {instead}") from None


def draws(fitted: Any, n: int, random_state: Any = None) -> Any:
    """Draws (n, d), float64, made where the columns are: on a GPU by PyTorch, with a seed from ``random_state``."""
    check_positive(fitted, "cannot be sampled")
    rng, d = generator(random_state), fitted.problem.d
    if fitted.parts:
        return fitted.draws(n, rng)
    if fitted.coordinates is not None:
        first, ends, z = fitted.first.current, fitted.ends, np.empty((0, d))
        while len(z) < n:  # those of all with images that lie between the ends
            many = n if ends is None else min(2 * (n - len(z)) + 64, 1 << 22)
            drawn = to_host(draws(first, many, rng))
            inside = slice(None) if ends is None else ((drawn >= ends[0]) & (drawn <= ends[1])).all(axis=1)
            z = np.concatenate([z, drawn[inside]])
        return fitted.coordinates.inverse(z[:n])
    (points, log_weights, scales, centre), bandwidth = fitted.components, fitted.bandwidth
    if is_torch_array(points) and points.is_cuda:
        torch = sys.modules["torch"]
        there = torch.Generator(points.device)
        there.manual_seed(int(rng.integers(1 << 62) if hasattr(rng, "integers") else rng.randint(1 << 31)))
        reached = torch.cumsum(log_weights.exp(), 0)
        uniform = torch.rand(n, dtype=torch.float64, device=points.device, generator=there) * reached[-1]
        which = torch.searchsorted(reached, uniform, right=True).clamp_(max=len(reached) - 1)
        normal = torch.randn(n, d, dtype=torch.float64, device=points.device, generator=there)
        normal *= scales.index_select(0, which)[:, None]
        return bandwidth.stretch(points.index_select(0, which) + normal) + torch.asarray(centre).to(points)
    points, log_weights, scales, centre = map(to_host, (points, log_weights, scales, centre))
    reached = np.cumsum(np.exp(log_weights))
    which = np.searchsorted(reached, reached[-1] * rng.random(n), side="right")
    drawn = kernel_draws(fitted.request.kernel, n, d, rng) * scales[which][:, None]
    return centre + bandwidth.stretch(points[which] + drawn)


def marginal(fitted: Any, dims: Any) -> Any:
    kept = indices("dims", fitted, dims)
    if fitted.parts:
        return fitted.each([marginal(part.fitted, kept) for part in fitted.parts])
    if fitted.coordinates is not None:
        first = fitted.first.current if fitted.ends is None else _without(fitted, kept)
        return type(fitted)(marginal(first, kept), fitted.coordinates.kept(kept), fitted.problem.n)
    if fitted.request.negative != "keep":
        raise ValueError(f"negative={fitted.request.negative!r} has no marginals in closed form; pass 'keep'")
    _, log_weights, _, centre = fitted.on_host
    points, _, bandwidth, _, _ = split(fitted, kept)
    return fitted.derived(bandwidth, centre[kept], points, log_weights, kept)


def _without(fitted: Any, kept: Sequence[int]) -> Any:
    """The samples with their images, each weighed by its mass between the ends of all columns that are not kept."""
    first, dropped = fitted.first.current, np.ones(fitted.problem.d, bool)
    dropped[list(kept)] = False
    ends = np.where(dropped, fitted.ends, np.array([[-math.inf], [math.inf]]))
    points, _, _, centre = first.on_host
    with np.errstate(divide="ignore"):
        logs = np.log(masses(first, ends))
    return first.derived(first.bandwidth, centre, points, logs - math.log(np.exp(logs).sum()), range(len(dropped)))


def conditional(fitted: Any, given: Mapping[Any, Any]) -> Any:
    check_positive(fitted, "has no conditional density")
    if not isinstance(given, Mapping):
        raise TypeError(f"given is {brief(given)}; pass a mapping from dimensions to values, such as {{0: 1.5}}")
    first = indices("given", fitted, list(given))
    if len(first) == fitted.problem.d:
        raise ValueError(f"given has all {fitted.problem.d} dimensions; leave out those that the density is of")
    try:
        values = np.array([float(v) for v in given.values()])
    except (TypeError, ValueError):
        raise TypeError(f"given is {brief(dict(given))}; pass a number for each dimension") from None
    if not np.isfinite(values).all():
        raise ValueError(f"given is {brief(dict(given))}; pass finite values")
    found, log = _conditional(fitted, given, first, values)
    if log == -math.inf:
        what = "what columns take" if fitted.coordinates is None else f"the coordinates {fitted.coordinates}"
        raise ValueError(f"given is {brief(dict(given))}, outside of {what}, with density 0; pass values within")
    return found


def _conditional(fitted: Any, given: Any, first: list[int], values: Array) -> tuple[Any, float]:
    """The conditional density, and the log of the marginal of the dimensions ``first`` at the values."""
    others = [k for k in range(fitted.problem.d) if k not in first]
    if fitted.parts:
        found, terms = zip(*(_conditional(part.fitted, given, first, values) for part in fitted.parts))
        log = float(np.logaddexp.reduce([part.log_share + term for part, term in zip(fitted.parts, terms)]))
        return (fitted.each(found, np.array(terms)) if log > -math.inf else None), log
    if fitted.coordinates is not None:
        maps, x = fitted.coordinates.kept(first), values[None, :]
        z = maps.forward(x)[0]
        if not np.isfinite(z).all():
            return None, -math.inf
        inner, log = _conditional(fitted.first.current, given, first, z)
        made = type(fitted)(inner, fitted.coordinates.kept(others), fitted.problem.n)
        return made, log + made.log_mass - fitted.log_mass + float(maps.log_slopes(x).sum())
    k = len(first)
    near, points, held, bandwidth, slope = split(fitted, first)
    _, log_weights, scales, centre = fitted.on_host
    value = held.whiten((values - centre[first])[None, :], np.zeros(k))[0]
    if not (abs(value) < FARTHEST).all():
        raise ValueError(f"given is {brief(dict(given))}, too far from the samples: squares of distances overflow")
    log_weights = log_weights - 0.5 * np.square((near - value) / scales[:, None]).sum(axis=1)
    log_weights = log_weights - k * np.log(scales)
    top = float(log_weights.max())
    rest = math.log(np.exp(log_weights - top).sum())
    found = fitted.derived(bandwidth, centre[others] + slope @ value, points, log_weights - top - rest, others)
    return found, top + rest + held.log_constant


def split(fitted: Fitted, first: list[int]) -> tuple[Array, Array, Bandwidth, Bandwidth, Array]:
    """The kernels' places in bandwidths, of the dimensions given (n, k) and of the others (n, d − k), each bandwidth,
    and by how much the others' origin moves per bandwidth of those given, (d − k, k), in data units.
    """
    others = [j for j in range(fitted.problem.d) if j not in first]
    points, k, whole = fitted.on_host.points, len(first), fitted.bandwidth
    if whole.factor.ndim == 1:
        held, kept = (Bandwidth(len(dims), whole.factor[dims], whole.rule) for dims in (first, others))
        return points[:, first], points[:, others], held, kept, np.zeros((len(others), k))
    order = [*first, *others]
    triangle: Any = np.linalg.qr(whole.factor[order].T, mode="r")  # without squares of far units, which overflow
    factor = triangle.T * np.sign(np.diagonal(triangle))
    points = Bandwidth(len(order), factor).whiten(whole.stretch(points)[:, order], np.zeros(len(order)))
    parts = (f[0] if len(f) == 1 else f for f in (factor[:k, :k], factor[k:, k:]))
    held, kept = (Bandwidth(len(f), f, whole.rule) for f in parts)
    return points[:, :k], points[:, k:], held, kept, factor[k:, :k]


def indices(name: str, fitted: Fitted, dims: Any) -> list[int]:
    """Dimensions as distinct indices, counted from the end where negative; of a data frame also by name."""
    d, names = fitted.problem.d, fitted.names
    try:
        listed: list[Any] = [dims] if isinstance(dims, str) else list(dims)
    except TypeError:  # a single one
        listed = [dims]
    found = []
    for one in listed:
        if isinstance(one, str) and one in names:
            if names.count(one) > 1:
                raise ValueError(f"{name} has {one!r}, which {names.count(one)} columns are called; pass their numbers")
            found.append(names.index(one))
            continue
        try:
            k = operator.index(one)
        except TypeError:
            known = f", or names of columns: {', '.join(names)}" if names else ""
            raise TypeError(f"{name} has {brief(one)}; pass indices of dimensions{known}") from None
        if isinstance(one, (bool, np.bool_)) or not -d <= k < d:
            raise ValueError(f"{name} has {brief(one)}; pass indices of dimensions below {d}")
        found.append(k % d)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{name} is {brief(dims)}; pass at least one dimension, each once")
    return found


def places(fitted: Any, n: int, rng: Any) -> Array:
    """Where kernels are (k, d), some n or all of up to 2 n, data units: the same on every device."""
    if fitted.coordinates is not None:
        z = places(fitted.first.current, n, rng)
        return fitted.coordinates.inverse(z if fitted.ends is None else np.clip(z, *fitted.ends))
    if fitted.parts:
        counts = rng.multinomial(n, np.exp([part.log_share for part in fitted.parts]) * (1.0 - 1e-12))
        return np.concatenate([places(part.fitted.current, int(k), rng) for k, part in zip(counts, fitted.parts)])
    points, log_weights, _, centre = fitted.on_host
    weights = np.exp(log_weights)
    which = np.unique(rng.choice(len(weights), n, p=weights / weights.sum())) if len(weights) > 2 * n else weights > 0.0
    return centre + fitted.bandwidth.stretch(points[which])


def local(fitted: Any, query: Argument, scale: Array) -> tuple[Array, Array, Array]:
    """The log (m,) and the score (m, d) at a query, and Σ_e r_e H_e⁻¹ there (m, d, d), r_e the shares of the kernels.

    On the host, in units of ``scale`` (d,). Of one density a step in that unit is to the mean of the kernels there.
    """
    if fitted.coordinates is not None:  # kernels are as wide as T makes them there
        x, z, outside, logs = located(fitted.coordinates, query, to_host(fitted.centre))
        of_z = abs(fitted.bandwidth.stretch(np.eye(len(scale)))).max(axis=0)
        log, score, unit = local(fitted.first, query._replace(array=z), of_z)
        slopes = np.exp(logs + np.log(scale) - np.log(of_z))
        log = np.where(outside, -math.inf, log - fitted.log_mass + logs.sum(axis=1))
        score = score * slopes + fitted.coordinates.turns(x) * scale
        return log, score, unit * slopes[:, :, None] * slopes[:, None, :]
    if fitted.parts:
        each, scores, units = zip(*(local(part.fitted, query, scale) for part in fitted.parts))
        logs = np.stack([part.log_share + log for part, log in zip(fitted.parts, each)])  # (e, m)
        log = np.logaddexp.reduce(logs)
        shares = np.exp(logs - log)
        there = shares[:, :, None] > 0.0  # a part that is 0 has no score
        score = np.einsum("em,emd->md", shares, np.where(there, scores, 0.0))
        return log, score, np.einsum("em,emij->mij", shares, np.where(there[..., None], units, 0.0))
    log, score = of_both(fitted, query)
    widths = np.reshape([1.0] if len(fitted.groups) == 1 else fitted.widths(query), (-1, 1, 1))
    maps = fitted.bandwidth.whiten(np.diag(scale), np.zeros(len(scale)))
    return log, score * scale, widths * (maps @ maps.T) + np.zeros((len(log), 1, 1))
