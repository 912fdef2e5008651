"""A density of columns that end somewhere or go round: that of the samples with their images, within the ends.

With images x_j and weights w_j, a sample's for each of its own, p̂(z) = Σ_j w_j K(z; x_j) / M between the ends and 0
outside, M the mass of the sum between them. So it integrates to 1 whatever images are left out because they are far
away, and where an end has none. Kernels may not couple a column that ends with another: their image would be turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Argument, Array, Origin, quiet, to_host
from ..coordinates import Coordinates, images
from ..protocol import Problem
from .integrals import between, distribution, probability, quantiles, times_density
from .mapped import Composed, of_part
from .mixture import draws
from .plan import read
from .request import Request


class Bounded(Composed):
    """A density ``first`` of samples with their images, as one of columns between ``ends`` (2, d), of n samples."""

    def __init__(self, first: Any, ends: Array, circular: Array, n: int) -> None:
        problem: Problem = replace(first.problem, n=n, m=n)
        super().__init__(first, first.request, problem)
        mass = float(masses(first, ends, first.request.method == "laplace").sum())
        self.ends, self.circular = ends, circular
        self.log_mass = math.log(mass) if abs(mass - 1.0) > 1e-12 else 0.0  # but for rounding

    @property
    def negative_mass(self) -> Any:
        """Refused: that of the columns with images is another."""
        raise ValueError("a density with support has no negative mass yet; integrate its values, or leave support out")

    @quiet
    def answer(self, query: Argument, what: str) -> Any:
        """As :meth:`.Fitted.answer`, of points between the ends."""
        found, by = of_part(self.first, query, what), self.log_mass
        found = found - by if what == "log" else found * math.exp(-by) if what == "density" else found
        return query.origin.restore(found, max(query.dtype, self.problem.dtype))

    def draws(self, n: int, rng: Any) -> Array:
        """Draws (n, d): those of all that lie between the ends."""
        found = np.empty((0, self.problem.d))
        while len(found) < n:
            z = to_host(draws(self.first.current, min(2 * (n - len(found)) + 64, 1 << 22), rng))
            found = np.concatenate([found, z[((z >= self.ends[0]) & (z <= self.ends[1])).all(axis=1)]])
        return found[:n]

    def part(self, kept: Sequence[int], made: Any) -> Bounded:
        """The density of some columns that ``made`` has, of the samples with their images."""
        return Bounded(made, self.ends[:, kept], self.circular[kept], self.problem.n)

    def probability(self, low: Array, high: Array) -> float:
        """Of the box between two corners (d,); of circles the arc from the first on."""
        around = self.circular & (low > high)
        if around.any():
            j = int(np.argmax(around))
            first, last = high.copy(), low.copy()
            first[j], last[j] = self.ends[1, j], self.ends[0, j]
            return self.probability(low, first) + self.probability(last, high)
        low, high = np.maximum(low, self.ends[0]), np.minimum(high, self.ends[1])
        empty = (low >= high).any()
        return 0.0 if empty else min(1.0, probability(self.first.current, low, high) * math.exp(-self.log_mass))

    def distribution(self) -> Callable[[Any], Array]:
        """The distribution function in one dimension; round a circle from its start."""
        function, (low, high) = distribution(self.first.current), self.ends[:, 0]
        start, mass = self._start(), math.exp(self.log_mass)

        def between_ends(x: Array) -> Array:
            found = (function(np.clip(x, low, high)) - start) / mass
            return np.where(x <= low, 0.0, np.where(x >= high, 1.0, np.clip(found, 0.0, 1.0)))

        return between_ends

    def _start(self) -> float:
        """The mass of the sum, in one dimension, below the lower end."""
        return float(distribution(self.first.current)(self.ends[:1, 0])[0]) if self.ends[0, 0] > -math.inf else 0.0

    def quantiles(self, q: Array) -> Array:
        """The values (m,) where that is q."""
        (low, high), reached = self.ends[:, 0], self._start() + math.exp(self.log_mass) * q
        found = np.clip(quantiles(self.first.current, np.where((q > 0.0) & (q < 1.0), reached, 0.5)), low, high)
        return np.where(q <= 0.0, low, np.where(q >= 1.0, high, found))

    def without(self, kept: Sequence[int]) -> Any:
        """The samples with their images, each weighed by its mass between the ends of all columns that are not kept."""
        first, dropped = self.first.current, np.ones(self.problem.d, bool)
        dropped[list(kept)] = False
        ends = np.where(dropped, self.ends, np.array([[-math.inf], [math.inf]]))
        points, _, _, centre = first.on_host
        with np.errstate(divide="ignore"):
            logs = np.log(masses(first, ends))
        return first.derived(first.bandwidth, centre, points, logs - math.log(np.exp(logs).sum()), first.names)


def masses(first: Any, ends: Array, signed: bool = False) -> Array:
    """The mass (n,) that the kernels have between ends (2, d), with their weights; ``signed``: of Laplace's."""
    points, log_weights, scales, centre = first.on_host
    result, extra = np.exp(log_weights), np.zeros(len(points))
    width = _widths(first.bandwidth)[0]
    places = centre + first.bandwidth.stretch(points)
    for j in np.flatnonzero(np.isfinite(ends).any(axis=0)):
        a, b = ((end - places[:, j]) / (width[j] * scales) for end in ends[:, j])
        inside = between(a, b)
        if signed:  # ΠF_k + Σ_k G_k Π_{l≠k} F_l, see integrals
            extra = extra * inside + 0.5 * result * (times_density(b) - times_density(a))
        result *= inside
    return result + extra


def _widths(bandwidth: Any) -> tuple[Array, Array]:
    """The kernels' standard deviations (d,) and correlations (d, d), without squares: in far units they underflow."""
    rows = bandwidth.stretch(np.eye(bandwidth.d)).T
    width = np.hypot.reduce(rows, axis=1)
    return width, (rows / width[:, None]) @ (rows / width[:, None]).T


def for_choosing(request: Request, z: Argument, coordinates: Coordinates) -> tuple[Request, Argument]:
    """Samples with images as far as kernels may reach that are yet to be chosen; the request has their weights."""
    request = replace(request, mixed=False)
    data, start = read(replace(request, bandwidth="silverman"), z)
    n, d = data.train.shape
    n_eff = n if data.log_weights is None else 1.0 / float(np.exp(2.0 * to_host(data.log_weights)).sum())
    wide = min(3.5 * n_eff ** (1.0 / (d + 4.0)), 15.0 if d < 3 else 6.0)
    return _with_images(request, z, coordinates, wide * _widths(start)[0])


def imaged(request: Request, z: Argument, coordinates: Coordinates) -> tuple[Request, Argument]:
    """Samples with their images, and the request for these, with the bandwidth that is chosen from them.

    ValueError for a bandwidth that couples a column that has ends with another one.
    """
    chosen = isinstance(request.bandwidth, str)
    bandwidth = read(*(for_choosing(request, z, coordinates) if chosen else (request, z)))[1]
    (scale, matrix), ended = _widths(bandwidth), np.isfinite(np.asarray(coordinates.ends)).any(axis=0)
    couples = (abs(matrix) > 1e-9) & (ended[:, None] | ended)
    np.fill_diagonal(couples, False)
    if couples.any():
        i, j = np.argwhere(couples)[0]
        raise ValueError(
            f"bandwidth couples columns {i} and {j}, and one of them has a support: images would be turned; pass one "
            "number for each column"
        )
    request = replace(request, bandwidth=bandwidth, mixed=False)
    moves = request.moving(bandwidth)
    wide = max(1.0, moves.score_bandwidth or 1.0) * (4.0 if request.adaptive else 1.0)
    # The guard is four times as wide, and far from the samples it is all that there is: round a circle it has no jump.
    reach = 6.5 * scale * np.where(coordinates.circular & (moves.guard > 0.0), max(wide, 4.0), wide)
    return _with_images(request, z, coordinates, reach)


def _with_images(request: Request, z: Argument, coordinates: Coordinates, reach: Array) -> tuple[Request, Argument]:
    x = z.at(Origin())
    reach = np.minimum(reach, 100.0 * np.ptp(np.asarray(coordinates.ends), axis=0))
    found, which = images(x, coordinates.maps, reach)
    if len(found) > 20 * len(x) + 1_000_000:
        raise ValueError(
            f"support of so many columns with kernels as wide makes {len(found)} images of {len(x)} samples; pass "
            "coordinates='logit' or 'log' for some of them instead, or a smaller bandwidth"
        )
    weights = None if request.weights is None else to_host(request.weights)[which]
    return replace(request, weights=weights), z._replace(array=found)
