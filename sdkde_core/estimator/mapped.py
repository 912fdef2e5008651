"""A density in other coordinates: p̂(x) = q̂(T(x)) Π_j T_j′(x_j), q̂ a fitted density, or a list of some, of z = T(x).

Whatever chooses, sums and draws does so in z. Points are mapped on the host, in float64. Where a query is outside what
T takes the density is 0, and its gradient NaN.

Where columns end, or go round, q̂ is that of the samples with their images z_j, a sample's weight for each of its own:
q̂(z) = Σ_j w_j K(z; z_j) / M between the ends and 0 outside, M the mass of the sum between them. So it integrates to 1
whatever images are left out because they are far away, and where an end has none. Kernels may not couple a column that
ends with another: their image would be turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
from array_api_compat import device, is_torch_array

from ..arrays import Argument, Array, Origin, array_namespace, check_names, ingest, quiet, to_host
from ..coordinates import Coordinates, fit, images
from ..protocol import Problem
from .batches import answered
from .density import between, times_density, widths
from .plan import read
from .request import Request

R = TypeVar("R")


class Composed:
    """A density made of others, which change to another backend by themselves; ``first`` describes it."""

    groups = ()
    parts: tuple[Any, ...] = ()
    coordinates: Any = None

    def __init__(self, first: Any, request: Request, n: int) -> None:
        self.first, self.request = first, request
        self.problem: Problem = replace(first.problem, n=n, m=n)
        self.bandwidth, self.names, self.home, self.centre = first.bandwidth, first.names, first.home, first.centre

    @property
    def choice(self) -> Any:
        return self.first.current.choice

    @property
    def current(self) -> Self:
        return self

    def asked(self, query: Any) -> Argument:
        return self.first.asked(query)

    def read(self, query: Argument) -> Argument:
        return query

    def serve(self, compute: Callable[[Self], R]) -> R:
        return compute(self)


class Mapped(Composed):
    """A density ``first`` of z, as one of x, of n samples; ``ends`` (2, d) of z, or None; ``log_mass``: log M."""

    def __init__(self, first: Any, coordinates: Coordinates, n: int) -> None:
        super().__init__(first, first.request, n)
        self.coordinates, self.ends, self.log_mass = coordinates, coordinates.ends, 0.0
        if self.ends is not None:
            mass = float(masses(first, self.ends, first.request.method == "laplace").sum())
            self.log_mass = math.log(mass) if abs(mass - 1.0) > 1e-12 else 0.0  # but for rounding

    @property
    def negative_mass(self) -> Any:
        """The Laplace estimate's negative mass: the same in all coordinates, but not with images."""
        if self.ends is not None:
            raise ValueError("a density with support has no negative mass yet; integrate its values, or drop support")
        return self.first.serve(lambda first: first.negative_mass)

    @quiet
    def answer(self, query: Argument, what: str) -> Any:
        away = self.choice.device != "cpu" and not query.origin.on_host  # sums are made on their device
        there = away and is_torch_array(query.array) and self.coordinates.anywhere
        x, z, outside, slopes = located(self.coordinates, query, to_host(self.centre), there)
        asked, xp = query._replace(array=z, dtype="float64", origin=Origin()), array_namespace(x)
        if away:
            asked = asked._replace(array=query.origin.restore(z, "float64"), origin=query.origin)
        if what == "both":
            log, score = of_both(self.first, asked)
            log, score = log - self.log_mass + slopes.sum(axis=1), score * np.exp(slopes) + self.coordinates.turns(x)
            log[outside], score[outside] = -np.inf, np.nan
            return log, score
        signed = what == "density" and self.request.method == "laplace"
        found = of_part(self.first, asked, what if signed or what in ("score", "slope") else "log")
        found, change = found if there else to_host(found), slopes.sum(axis=1) - self.log_mass
        if what in ("score", "slope"):
            found = found * xp.exp(slopes) + self.coordinates.turns(x)
        elif signed:
            found = found * xp.exp(change)
        else:
            found = xp.exp(found + change) if what == "density" else found + change
        found[outside] = {"log": -np.inf, "density": 0.0}.get(what, np.nan)
        return query.origin.restore(found, max(query.dtype, self.problem.dtype))

    def into(self, points: Array) -> Array:
        """Corners of boxes in z, of shape (d,) or for one column (k,); infinite where T does not reach."""
        return self.coordinates.forward(points.reshape(-1, self.problem.d)).reshape(points.shape)


def masses(first: Any, ends: Array, signed: bool = False) -> Array:
    """The mass (n,) that the kernels have between ends (2, d), with their weights; ``signed``: of Laplace's."""
    points, log_weights, scales, centre = first.on_host
    result, extra = np.exp(log_weights), np.zeros(len(points))
    width = widths(first.bandwidth)[0]
    places = first.bandwidth.stretch(points)
    for j in np.flatnonzero((ends[0] > -math.inf) | (ends[1] < math.inf)):
        a, b = ((end - centre[j] - places[:, j]) / (width[j] * scales) for end in ends[:, j])
        inside, near = np.ones(len(a)), (a > -9.0) | (b < 9.0)
        inside[near] = between(a[near], b[near])
        if signed:  # ΠF_k + Σ_k G_k Π_{l≠k} F_l, see integrals
            extra = extra * inside + 0.5 * result * (times_density(b) - times_density(a))
        result *= inside
    return result + extra


def unwrapped(fitted: Any) -> Any:
    """A density that is a list of one: that one, whose coordinates say where columns go round."""
    while fitted.coordinates is None and len(fitted.parts) == 1:
        fitted = fitted.parts[0].fitted.current
    return fitted


def leaves(fitted: Any) -> list[Any]:
    """The parts of a density that is a list, with their shares of the whole; empty for one that is none."""
    if fitted.coordinates is not None:
        return [p._replace(fitted=Mapped(p.fitted, fitted.coordinates, fitted.problem.n)) for p in leaves(fitted.first)]
    found = []
    for part in fitted.parts:
        below = leaves(part.fitted)
        found += [p._replace(log_share=p.log_share + part.log_share) for p in below] if below else [part]
    return found


def shares(fitted: Any) -> dict[str, tuple[float, float | None]]:
    """The share of each label, and its mean log density of left-out samples; largest first."""
    found: dict[str, tuple[float, float | None]] = {}
    for part in leaves(fitted):
        share = found.get(part.label, (0.0, None))[0] + math.exp(part.log_share)
        found[part.label] = share, part.left_out
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def located(coordinates: Coordinates, query: Argument, inside: Array, there: bool = False) -> tuple[Any, Any, Any, Any]:
    """Points (m, d), z, which T does not take (m,): moved to z = ``inside``; and log T′; on the host, or ``there``."""
    x = query.at(query.origin if there else Origin())
    xp = array_namespace(x)
    x = xp.reshape(xp.astype(x, xp.float64), (-1, len(coordinates.maps)))  # a copy
    z, slopes = coordinates.placed(x)
    outside = xp.any(xp.isfinite(x) & ~xp.isfinite(z), axis=1)
    if xp.any(outside):
        places = inside, coordinates.inverse(inside[None, :])
        z[outside], x[outside] = (xp.asarray(place, device=device(x)) for place in places)
        slopes = coordinates.log_slopes(x)
    return x, z, outside, slopes


def of_part(fitted: Any, query: Argument, what: str) -> Any:
    """A density's answer, float64, on the query's device."""
    found = answered(fitted, query, what)
    return array_namespace(found).astype(found, array_namespace(found).float64)


def of_both(fitted: Any, query: Argument) -> tuple[Array, Array]:
    """The log (m,) and the score (m, d) at a query on the host, float64, by one sum."""
    log, score = fitted.serve(lambda here: here.answer(here.read(query), "both"))
    return to_host(log), to_host(score)


def mapped(request: Request, train: Any, choosing: bool = False) -> tuple[Request, Argument, Coordinates, int]:
    """Fit a request's coordinates; return the request without them, the samples z with images, the coordinates, and n.

    Where there are images the request has their weights, and the bandwidth that is chosen from them; ``choosing``: it
    is yet to be chosen.
    """
    data = ingest(train, None, request.weights, check_finite=request.check_finite, device="cpu")
    data.check_finite()
    n = len(data.train)
    weights = np.full(n, 1.0 / n) if data.log_weights is None else np.exp(to_host(data.log_weights))
    coordinates = fit(request.coordinates, data.train, weights, data.names, request.support)
    z = Argument("train", coordinates.forward(data.train), data.dtype, data.origin, data.names)
    request = replace(request, coordinates="identity", support=None)
    if coordinates.ends is not None:
        request, z = (_for_choosing if choosing else _imaged)(request, z, coordinates)
    return request, z, coordinates, n


def _for_choosing(request: Request, z: Argument, coordinates: Coordinates) -> tuple[Request, Argument]:
    """Samples with images as far as kernels may reach that are yet to be chosen."""
    request = replace(request, mixed=False)
    data, start = read(replace(request, bandwidth="silverman"), z)
    n, d = data.train.shape
    n_eff = n if data.log_weights is None else 1.0 / float(np.exp(2.0 * to_host(data.log_weights)).sum())
    wide = min(3.5 * n_eff ** (1.0 / (d + 4.0)), 15.0 if d < 3 else 6.0)
    return _with_images(request, z, coordinates, wide * widths(start)[0])


def _imaged(request: Request, z: Argument, coordinates: Coordinates) -> tuple[Request, Argument]:
    """Samples with images as far as kernels reach; ValueError where these couple a column that ends with another."""
    chosen = isinstance(request.bandwidth, str)
    bandwidth = read(*(_for_choosing(request, z, coordinates) if chosen else (request, z)))[1]
    (scale, matrix), ended = widths(bandwidth), np.isfinite(np.asarray(coordinates.ends)).any(axis=0)
    couples = (abs(matrix) > 1e-9) & (ended[:, None] | ended)
    np.fill_diagonal(couples, False)
    if couples.any():
        i, j = np.argwhere(couples)[0]
        why = "one of them has a support: images would be turned; pass one number for each column"
        raise ValueError(f"bandwidth couples columns {i} and {j}, and {why}")
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
    weights = None if request.weights is None else to_host(request.weights)[which]
    return replace(request, weights=weights), z._replace(array=found)


def score_in(score: Any, coordinates: Coordinates, train: Any, z: Argument) -> Any:
    """A score from elsewhere, of samples in other coordinates."""
    x = coordinates.inverse(z.at(Origin()))
    given = Argument.of("score", score(train) if callable(score) else score)
    check_names(z.names, given.names, "score")
    return (given.at(Origin()).reshape(x.shape) - coordinates.turns(x)) / np.exp(coordinates.log_slopes(x))
